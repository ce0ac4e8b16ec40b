"""Latent attention (MLA) inside transformers: tiny models like DeepSeek-V3, Kimi, DeepSeek-V3.2 and GLM-5."""

from __future__ import annotations

import pytest
import torch
import transformers
from engine_checks import assert_same_greedy_tokens
from packaging.version import Version
from transformers import (
    AttentionInterface,
    AttentionMaskInterface,
    DeepseekV3Config,
    GlmMoeDsaConfig,
    KimiLinearConfig,
    MiniCPM3Config,
)
from transformers.masking_utils import eager_mask

import narrowkv.engines.transformers as engine
from narrowkv.engines import deepseek, tiny
from narrowkv.engines.tiny import LATENT, LATENT_SPARSE
from narrowkv.engines.transformers import NarrowCache, deepseek_v4, latent
from narrowkv.engines.trial import try_engine
from narrowkv.paged_cache import CacheFormat
from narrowkv.quant import relative_l1
from narrowkv.runtime.errors import UnsupportedError

PROMPT, NEW, PAD = 9, 3, 4
BOTH_BF16 = 0.02  # relative L1 error of logits in bf16, with other roundings
# Bytes of a row of 512 columns and 64 of RoPE.
FORMATS = {
    "bf16": ({"format": "bf16"}, 1152),
    "fp8": ({"format": "fp8_e4m3fn"}, 656),
    "fnuz": ({"format": "fp8_e4m3fnuz"}, 656),
    "fp8-static": ({"format": "fp8_e4m3fn", "k_descale": 0.02}, 576),
    "nvfp4": ({"format": "fp4_e2m1", "scale_group": 16, "scale_format": "e4m3"}, 352),
}
slow = pytest.mark.slow


def over_the_cache(dtype):
    """Attention over the dequantised rows, expanded, in plain torch, computed in `dtype`."""

    def attend(module, query, key, value, attention_mask, scaling, indices=None, **_):
        layer = latent.latent_layer(module)
        batch, heads, tokens, _ = query.shape
        if indices is None:
            seen = torch.ones(batch, 1, dtype=torch.bool) if attention_mask is None else attention_mask.bool()
            queries = None if attention_mask is None else attention_mask[:, -tokens:]
            seen = seen.expand(batch, layer.length)[:, None] & torch.ones(
                tokens, layer.length, dtype=torch.bool
            ).tril(layer.length - tokens)
        else:
            seen = (attention_mask[:, 0, -tokens:] == 0).expand(batch, -1, -1)
            queries = seen[:, -1, -tokens:]
            seen = seen & torch.zeros_like(seen).scatter(-1, indices.long(), True)
        stored_prompt = indices is not None
        layer.store(queries)
        out = torch.zeros(batch, tokens, heads, value.shape[-1], dtype=query.dtype)
        rows = layer.history(layer.owner.page_size * layer.owner.pages)
        for b, length in enumerate(layer.owner.rows.seq_lens.tolist()):
            held, new = rows[b, None, None, :length], min(length, tokens)
            newest = slice(tokens - new, tokens)
            k, v = (x[0] for x in module.expand_kv(held[..., :512], held[..., 512:]))
            if tokens == layer.length and not stored_prompt:  # a prompt sees its own tokens as they are
                k[:, length - new :], v[:, length - new :] = key[b, :, newest], value[b, :, newest]
            visible = seen[b, newest, layer.length - length :]
            scores = query[b, :, newest].to(dtype) @ k.to(dtype).mT * scaling
            weights = scores.masked_fill(~visible, -torch.inf).softmax(-1)
            out[b, newest] = (weights @ v.to(dtype)).transpose(0, 1).to(query.dtype)
        return out, None

    return attend


@pytest.fixture(autouse=True)
def registered():
    engine.register()
    deepseek_v4.register()
    for name, dtype in (("over_the_rows", torch.float32), ("over_the_rows_16", torch.bfloat16)):
        for suffix, mask in (("", engine.padding_of), ("_sparse", eager_mask)):
            AttentionInterface.register(name + suffix, over_the_cache(dtype))
            AttentionMaskInterface.register(name + suffix, mask)


@pytest.fixture
def calls(monkeypatch):
    counts = {}
    for module, name in ((latent, "latent_decode"), (latent, "attend_dense"), (deepseek, "sparse_decode")):
        operation = getattr(module, name)

        def counted(*args, name=name, operation=operation, **kwargs):
            counts[name] = counts.get(name, 0) + 1
            return operation(*args, **kwargs)

        monkeypatch.setattr(module, name, counted)
    return counts


def tiny_model(name, **options):
    if name in LATENT_SPARSE and Version(transformers.__version__) < Version("5.18"):
        pytest.skip("before 5.18, transformers hands the keys and values of these models to the cache")
    return tiny.tiny_model(name, **options)


def own_name(name):
    return deepseek_v4.NAME if name in LATENT_SPARSE else engine.NAME


def prompt(pad=PAD):
    ids = torch.randint(3, 90, (2, PROMPT), generator=torch.Generator().manual_seed(1))
    mask = torch.ones_like(ids)
    mask[0, :pad] = 0
    return ids, mask


def cache_of(model, form="bf16", **options):
    return NarrowCache(model.config, max_length=PROMPT + 8, page_size=8, **FORMATS[form][0], **options)


def generate(model, cache=None, *, new=NEW, **options):
    ids, mask = prompt()
    out = model.generate(
        ids, attention_mask=mask, max_new_tokens=new, min_new_tokens=new, do_sample=False,
        past_key_values=cache, return_dict_in_generate=True, output_logits=True, **options,
    )  # fmt: skip
    return out.sequences[:, PROMPT:].tolist(), torch.stack(out.logits).float()


@torch.no_grad()
def steps(model, cache, counts=(5, 4, 1, 1), pad=PAD):
    """Logits of the same tokens, in chunks of these sizes."""
    ids, mask = prompt(pad)
    ids = torch.cat([ids, torch.tensor([[5, 6], [7, 8]])], 1)
    mask = torch.cat([mask, torch.ones(2, 2, dtype=mask.dtype)], 1)
    places = (mask.cumsum(1) - 1).clamp(min=0)
    logits, done = [], 0
    for count in counts:
        new = slice(done, done + count)
        done += count
        out = model(
            ids[:, new], attention_mask=mask[:, :done], position_ids=places[:, new], past_key_values=cache,
            use_cache=True,
        )  # fmt: skip
        logits.append(out.logits[mask[:, new].bool()].float())
    return torch.cat(logits)


@pytest.mark.parametrize(
    ("name", "form"),
    [
        ("deepseek-v3-tiny", "fp8"),
        ("glm-5-tiny", "fp8"),
        *(pytest.param("deepseek-v3-tiny", form, marks=slow) for form in FORMATS if form != "fp8"),
        *(pytest.param("deepseek-v3.2-tiny", form, marks=slow) for form in FORMATS),
        pytest.param("kimi-linear-tiny", "fp8-static", marks=slow),
    ],
)
def test_logits_are_those_of_attention_over_the_dequantised_rows(name, form, calls):
    sparse = name in LATENT_SPARSE
    model, found = tiny_model(name), {}
    for implementation in (own_name(name), "over_the_rows", "over_the_rows_16"):
        own = implementation == own_name(name)
        model.set_attn_implementation(implementation + "_sparse" * (sparse and not own))
        cache = cache_of(model, form)
        found["own" if own else implementation] = steps(model, cache)
        if own:
            layers = len(cache.narrow_layers)
            wanted = {"sparse_decode": 4 * layers}
            if not sparse:  # a prompt, then a chunk of it and two tokens
                wanted = {"attend_dense": layers, "latent_decode": 3 * layers}
            assert calls == wanted
    exact = found["over_the_rows"]
    assert relative_l1(found["own"], exact) <= 2 * relative_l1(found["over_the_rows_16"], exact)


@pytest.mark.parametrize("name", ["deepseek-v3-tiny", *(pytest.param(n, marks=slow) for n in LATENT[1:])])
def test_a_16_bit_cache_generates_the_eager_tokens(name):
    model = tiny_model(name)
    own = generate(model)
    model.set_attn_implementation(own_name(name))
    found = generate(model, cache_of(model))
    assert_same_greedy_tokens(found, own)
    assert relative_l1(found[1][0], own[1][0]) < BOTH_BF16


def test_without_a_narrow_cache_values_narrower_than_keys_are_attended_to():
    model = tiny_model("deepseek-v3-tiny", num_layers=1)
    own = generate(model)
    model.set_attn_implementation("narrowkv")
    found = generate(model)
    assert_same_greedy_tokens(found, own)
    assert relative_l1(found[1][0], own[1][0]) < BOTH_BF16


@pytest.mark.parametrize("form", FORMATS)
def test_a_row_takes_the_bytes_of_its_layout(form):
    cache = NarrowCache(DeepseekV3Config(num_hidden_layers=2), max_length=64, page_size=8, **FORMATS[form][0])
    assert cache.bytes() == 0
    for index in range(2):
        cache.update(torch.zeros(3, 1, 1, 512).bfloat16(), torch.zeros(3, 1, 1, 64).bfloat16(), index)
    assert cache.bytes() == 2 * (3 * 64 + 8) * FORMATS[form][1]  # and a page for padding


@pytest.mark.parametrize("form", ["bf16", "fp8", "fp8-static", "nvfp4"])
def test_rows_without_rope_columns_are_held(form):
    options = FORMATS[form][0]
    cache = NarrowCache(KimiLinearConfig(qk_rope_head_dim=0), max_length=16, page_size=8, **options)
    layer = cache.narrow_layers[0]
    rows = torch.randn(1, 1, 5, 512, generator=torch.Generator().manual_seed(0)).bfloat16()
    layer.update(rows, rows[..., :0])
    layer.store(None)
    error = relative_l1(layer.history(5).float(), rows[0].float())
    assert error <= {"bf16": 0, "nvfp4": 0.11}.get(form, 0.03)


def test_several_tokens_of_a_step_are_one_call_over_the_rows(calls):
    model = tiny_model("deepseek-v3-tiny", attn_implementation="narrowkv", num_layers=1)
    alone = steps(model, cache_of(model, "fp8"), (PROMPT, 1, 1), pad=0)
    assert calls == {"attend_dense": 1, "latent_decode": 2}
    together = steps(model, cache_of(model, "fp8"), (PROMPT, 2), pad=0)
    assert calls == {"attend_dense": 2, "latent_decode": 3}
    # The rows of the two new tokens lie by token, then by sequence.
    both = together[-4:].view(2, 2, -1).transpose(0, 1).flatten(0, 1)
    assert relative_l1(both, alone[-4:]) < BOTH_BF16


@pytest.mark.parametrize("form", ["bf16", "fp8-static"])
def test_a_chunk_of_many_tokens_attends_to_expanded_history(form, calls, monkeypatch):
    model = tiny_model("deepseek-v3-tiny", attn_implementation="narrowkv", num_layers=1)
    few = steps(model, cache_of(model, form))
    assert calls == {"attend_dense": 1, "latent_decode": 3}
    monkeypatch.setattr(latent, "MOST_QUERIES", 3)
    many = steps(model, cache_of(model, form))
    assert calls == {"attend_dense": 3, "latent_decode": 5}
    # With a narrow cache the tokens of a chunk see one another as they are.
    assert relative_l1(many, few) < {"bf16": BOTH_BF16}.get(form, 0.1)


def test_models_with_an_indexer_are_refused_by_the_name_for_dense_attention():
    model = tiny_model("glm-5-tiny", attn_implementation=engine.NAME)
    with pytest.raises(ValueError, match='load it with attn_implementation="narrowkv-sparse"'):
        cache_of(model)


@torch.no_grad()
@pytest.mark.parametrize("tail", [[0, 1, 1], [1, 1, 0]])
def test_padding_in_a_step_of_several_tokens_is_left_out(tail):
    model = tiny_model("deepseek-v3-tiny", attn_implementation="narrowkv", num_layers=1)
    ids = torch.cat([prompt()[0], torch.tensor([[5, 6, 5], [7, 8, 9]])], 1)
    mask = torch.ones_like(ids)
    mask[0, PROMPT:] = torch.tensor(tail)
    places = (mask.cumsum(1) - 1).clamp(min=0)
    cache = cache_of(model)
    for new in (slice(0, PROMPT), slice(PROMPT, PROMPT + 3)):
        options = {"attention_mask": mask[:, : new.stop], "position_ids": places[:, new]}
        logits = model(ids[:, new], past_key_values=cache, **options).logits.float()
    for row in range(2):
        kept = mask[row].bool()
        alone = model(ids[row][kept][None], past_key_values=cache_of(model)).logits[0].float()
        found = logits[row][kept[PROMPT:]]
        assert relative_l1(found, alone[-len(found) :]) < BOTH_BF16


@pytest.mark.parametrize(
    ("name", "options"),
    [
        ("deepseek-v3-tiny", {"prompt_lookup_num_tokens": 2}),
        ("deepseek-v3.2-tiny", {"num_beams": 2}),
        pytest.param("deepseek-v3-tiny", {"num_beams": 2}, marks=slow),
        pytest.param("deepseek-v3-tiny", {"prefill_chunk_size": 4}, marks=slow),
        pytest.param("deepseek-v3.2-tiny", {"prompt_lookup_num_tokens": 2}, marks=slow),
    ],
)
def test_generate_in_other_ways_gives_the_tokens_of_transformers_own_cache(name, options):
    model = tiny_model(name, num_layers=1)
    ids = prompt()[0][1:]
    wanted = {"max_new_tokens": NEW, "min_new_tokens": NEW, "do_sample": False, **options}
    mask = torch.ones_like(ids)
    own = model.generate(ids, attention_mask=mask, **wanted)
    model.set_attn_implementation(own_name(name))
    cache = cache_of(model)
    for _ in range(2):  # a cache that was reset is as new
        found = model.generate(ids, attention_mask=mask, past_key_values=cache, **wanted)
        assert found.tolist() == own.tolist()
        if "num_beams" in options:
            break
        cache.reset()
        assert cache.get_seq_length() == 0


def test_what_latent_rows_have_not_is_refused():
    config = DeepseekV3Config(num_hidden_layers=1)
    for options, match in (
        ({"format": "int8"}, "format must be one of bf16, fp16, .* for latent rows"),
        ({"format": CacheFormat("fp8_e4m3fn", "fp4_e2m1")}, "a row is key and value"),
        ({"v_descale": 0.5}, "v_descale must be None for latent rows"),
        ({"format": "bf16", "k_descale": 0.5}, "k_descale for those that are not FP8"),
        ({"k_descale": torch.ones(2)}, r"k_descale must be one number for latent rows, got \[2\]"),
        ({"recent": 4}, "recent must be left out"),
        ({"format": "fp4_e2m1", "scale_group": 32}, "must be 16 and 'e4m3' for latent rows in FP4"),
    ):
        with pytest.raises(ValueError, match=match):
            NarrowCache(config, max_length=8, **options)
    with pytest.raises(ValueError, match="latent rows have 256 columns and 32 of RoPE"):
        NarrowCache(MiniCPM3Config(), max_length=8)
    with pytest.raises(ValueError, match="has 192 query heads, and the kernels take 128"):
        NarrowCache(DeepseekV3Config(num_attention_heads=192, num_key_value_heads=192), max_length=8)
    assert "narrowkv-sparse" in engine.supports(GlmMoeDsaConfig())[0]


@torch.no_grad()
def test_models_that_cannot_be_attended_to_are_told_why():
    model = tiny_model("deepseek-v3-tiny", num_layers=1, attn_implementation="narrowkv")
    cache = cache_of(model)
    with pytest.raises(RuntimeError, match="with latent rows must not be compiled"):
        torch.compile(model.forward, backend="eager", fullgraph=True)(prompt()[0], past_key_values=cache)
    model.model.layers[0].self_attn.kv_b_proj.weight.data = torch.zeros(12 * 256, 512).to(torch.float8_e4m3fn)
    cache, module = cache_of(model), model.model.layers[0].self_attn
    cache.update(torch.zeros(1, 1, 1, 512).bfloat16(), torch.zeros(1, 1, 1, 64).bfloat16(), 0)
    q, k, v = (torch.zeros(1, 12, 1, d).bfloat16() for d in (192, 192, 128))
    with pytest.raises(TypeError, match=r"needs kv_b_proj in bf16 or fp16 .* got torch\.float8_e4m3fn"):
        engine.attend(module, q, k, v, None)
    # What another model's cache took is not this module's.
    assert latent.latent_layer(module) is None
    sparse = tiny_model("deepseek-v3.2-tiny", num_layers=1, attn_implementation=deepseek_v4.NAME)
    with pytest.raises(ValueError, match=r"NarrowCache\(model.config, max_length=...\)"):
        sparse(prompt()[0])


def test_the_command_tries_models_with_latent_attention():
    own, eight = try_engine("transformers", "deepseek-v3-tiny", ["fp8_e4m3fn"], tokens=2)
    assert own.calls == {}
    assert eight.calls == {"batch_prefill": 2, "latent_decode": 2}
    assert eight.difference < 0.3
    with pytest.raises(UnsupportedError, match="no rows of int8: try it with bf16, fp8_e4m3fn, fp4_e2m1"):
        try_engine("transformers", "glm-5-tiny", ["int8"])
