"""The adapter inside transformers over static caches, under torch.compile, and with holes in masks."""

from __future__ import annotations

import functools
import itertools

import pytest
import torch
from torch._dynamo.utils import counters
from transformers import CompileConfig, DeepseekV3Config, DynamicCache, StaticCache

import narrowkv.engines.transformers as engine
from narrowkv.engines.tiny import tiny_model
from narrowkv.engines.transformers import NarrowCache, dense, masks
from narrowkv.quant import relative_l1

PROMPT, NEW = 9, 4
BOTH_BF16 = 0.02  # relative L1 error of logits in bf16, with other roundings
slow = pytest.mark.slow
IMPLEMENTATIONS = ("eager", "narrowkv")


@pytest.fixture(autouse=True)
def registered():
    engine.register()
    torch._dynamo.reset()


@functools.cache
def model(name="llama-3-tiny", implementation="narrowkv"):
    """A layer of each kind."""
    layers = 1 if name == "llama-3-tiny" else 2
    return tiny_model(name, num_layers=layers, attn_implementation=implementation)


@functools.cache
def prompt(batch=3):
    return torch.randint(3, 90, (batch, PROMPT), generator=torch.Generator().manual_seed(5))


def left_padded(batch=3, pad=4):
    mask = torch.ones(batch, PROMPT, dtype=torch.long)
    mask[0, :pad] = 0
    return mask


def generated(name, mask, batch=3, **options):
    """Tokens and logits by the model's own attention and by narrowkv's."""
    found = []
    for implementation in IMPLEMENTATIONS:
        out = model(name, implementation).generate(
            prompt(batch), attention_mask=mask, max_new_tokens=NEW, min_new_tokens=NEW, do_sample=False,
            return_dict_in_generate=True, output_logits=True, **options,
        )  # fmt: skip
        found.append((out.sequences.tolist(), torch.stack(out.logits).float()))
    return found


def assert_alike(found):
    """The same logits, and tokens up to one whose logit leads by less than what rounding changes."""
    (own_tokens, own), (tokens, logits) = found
    for row, (mine, theirs) in enumerate(zip(tokens, own_tokens, strict=True)):
        new = [x != y for x, y in zip(mine[PROMPT:], theirs[PROMPT:], strict=True)]
        same = new.index(True) if True in new else NEW
        seen = slice(0, same + 1)  # of steps that had the same tokens before them
        assert relative_l1(logits[seen, row], own[seen, row]) < BOTH_BF16
        if same < NEW:
            best = own[same, row].topk(2).values
            assert best[0] - best[1] <= 2 * (logits[same, row] - own[same, row]).abs().max()


STATIC = {"cache_implementation": "static"}


@pytest.mark.parametrize(
    ("name", "pad", "options"),
    [
        ("llama-3-tiny", None, STATIC),
        ("gemma-2-tiny", 4, STATIC),  # windows of 6 tokens
        *(
            pytest.param(*case, marks=slow)
            for case in (
                ("llama-3-tiny", 0, STATIC),
                ("llama-3-tiny", 4, STATIC),
                ("llama-3-tiny", 4, {**STATIC, "max_cache_len": 40}),
                ("gemma-2-tiny", None, STATIC),
                ("gemma-2-tiny", 4, {**STATIC, "prefill_chunk_size": 4}),
            )
        ),
    ],
)
def test_a_static_cache_gives_the_tokens_of_the_models_own_attention(name, pad, options):
    mask = None if pad is None else left_padded(pad=pad)
    assert_alike(generated(name, mask, **options))


def test_beams_over_a_static_cache_are_those_over_a_dynamic_one():
    static, dynamic = (generated("llama-3-tiny", None, 1, num_beams=2, **how)[1] for how in (STATIC, {}))
    assert static[0] == dynamic[0]
    assert torch.equal(static[1], dynamic[1])


@torch.no_grad()
def test_a_static_cache_is_continued_by_several_tokens():
    ids, found = prompt(), []
    for implementation in IMPLEMENTATIONS:
        own = model(implementation=implementation)
        cache = StaticCache(own.config, max_cache_len=32)
        parts = [own(part, past_key_values=cache).logits.float() for part in ids.split([4, 3, 2], 1)]
        found.append(torch.cat(parts, 1))
    assert relative_l1(found[1], found[0]) < BOTH_BF16


def logits_where_tokens(run, mask, ids, **options):
    seen = slice(None) if mask is None else mask.bool()
    return run(ids, attention_mask=mask, **options).logits.float()[seen]


@torch.no_grad()
def compare_compiled(name, masked, **how):
    """Compiled prompts, of two sizes where shapes are dynamic, beside the model's own attention."""
    compiled = torch.compile(model(name).forward, **how)
    for batch, length in ((3, PROMPT), (2, PROMPT - 2))[: 2 if "dynamic" in how else 1]:
        mask = left_padded(batch)[:, :length] if masked else None
        ids = prompt(batch)[:, :length]
        own = logits_where_tokens(model(name, "eager"), mask, ids, use_cache=False)
        assert relative_l1(logits_where_tokens(compiled, mask, ids, use_cache=False), own) < BOTH_BF16


@pytest.mark.parametrize(
    ("name", "masked", "how"),
    [
        ("llama-3-tiny", True, {"backend": "inductor", "fullgraph": True}),
        ("llama-3-tiny", False, {"backend": "aot_eager", "fullgraph": True}),
        *(
            pytest.param(name, masked, {"backend": "inductor", **how}, marks=slow)
            for name, masked, how in itertools.product(
                ("llama-3-tiny", "gemma-2-tiny"), (False, True), ({}, {"fullgraph": True, "dynamic": True})
            )
        ),
    ],
)
def test_a_compiled_prompt_gives_the_logits_of_the_models_own_attention(name, masked, how):
    compare_compiled(name, masked, **how)


@pytest.mark.parametrize(
    ("name", "pad", "backend"),
    [
        ("llama-3-tiny", None, "aot_eager"),
        pytest.param("llama-3-tiny", 4, "inductor", marks=slow),
        pytest.param("gemma-2-tiny", 4, "inductor", marks=slow),
    ],
)
def test_generate_compiles_its_steps_over_a_static_cache(name, pad, backend):
    how = CompileConfig(backend=backend, mode=None if backend == "aot_eager" else "default", fullgraph=True)
    how._compile_all_devices = True
    mask = None if pad is None else left_padded(pad=pad)
    counters.clear()
    assert_alike(generated(name, mask, compile_config=how, **STATIC))
    assert counters["stats"]["unique_graphs"] >= len(IMPLEMENTATIONS)  # generate did compile, each model


@pytest.mark.parametrize(
    ("name", "masked", "backend", "how"),
    [
        ("llama-3-tiny", False, "aot_eager", {"format": "bf16"}),
        *(
            pytest.param(*case, marks=slow)
            for case in (
                ("llama-3-tiny", True, "inductor", {"format": "bf16"}),
                ("gemma-2-tiny", True, "aot_eager", {"format": "fp8_e4m3fn"}),
                ("llama-3-tiny", True, "aot_eager", {"format": "fp4_e2m1", "recent": 4, "first": 2}),
            )
        ),
    ],
)
@torch.no_grad()
def test_a_compiled_forward_takes_a_narrow_cache_as_one_graph(name, masked, backend, how):
    """A prompt and three steps, of which the second is not compiled, beside the same without a compiler."""
    compiled = torch.compile(model(name).forward, backend=backend, fullgraph=True)
    own, narrow = (NarrowCache(model(name).config, max_length=16, page_size=8, **how) for _ in range(2))
    end = 0
    steps = zip(prompt().split([6, 1, 1, 1], 1), (compiled, compiled, model(name), compiled), strict=True)
    for part, run in steps:
        end += part.shape[1]
        mask = left_padded()[:, :end] if masked else None
        seen = slice(None) if mask is None else mask[:, -part.shape[1] :].bool()
        found, expected = (
            step(part, attention_mask=mask, past_key_values=cache).logits.float()[seen]
            for step, cache in ((run, narrow), (model(name), own))
        )
        assert relative_l1(found, expected) < BOTH_BF16


HOLE = torch.tensor([[1, 1, 1, 0, 0, 1, 1, 1, 1], [0, 1, 1, 1, 1, 1, 1, 1, 1], [1, 1, 1, 1, 1, 1, 1, 0, 0]])


def caches(name):
    config = model(name).config
    yield None
    yield NarrowCache(config, max_length=16, page_size=8, format="bf16")
    yield StaticCache(config, max_cache_len=16)


@torch.no_grad()
def test_padding_between_tokens_of_a_call_is_refused():
    for cache in caches("llama-3-tiny"):
        with pytest.raises(ValueError, match="got a 0 between two 1s: move the padding to the ends"):
            model()(prompt(), attention_mask=HOLE, past_key_values=cache)


@torch.no_grad()
def test_padding_between_the_tokens_of_two_calls_is_attended_around():
    found = []
    for implementation in IMPLEMENTATIONS:
        for cache in list(caches("llama-3-tiny"))[1:] if implementation == "narrowkv" else [DynamicCache()]:
            logits = []
            for begin, end in ((0, 4), (4, 7), (7, 8)):
                mask = HOLE[:, :end]
                places = (mask.cumsum(1) - 1).clamp(min=0)[:, begin:]
                out = model(implementation=implementation)(
                    prompt()[:, begin:end], attention_mask=mask, position_ids=places, past_key_values=cache
                )
                logits.append(out.logits[mask[:, begin:].bool()].float())
            found.append(torch.cat(logits))
    own, *ours = found
    assert len(ours) == 2
    assert max(relative_l1(logits, own) for logits in ours) < BOTH_BF16


@torch.no_grad()
def test_windows_refuse_padding_between_tokens_and_a_step_that_reads_nothing_gives_nan():
    name = "gemma-2-tiny"
    _, narrow, static = caches(name)
    for cache in (narrow, static):
        with pytest.raises(ValueError, match="all 0s of a row, got a 0 between two 1s"):
            model(name)(prompt()[:, 3:7], attention_mask=HOLE[:, 2:6], past_key_values=cache)
    mask = torch.tensor([[1, 0, 1]])
    for step in range(3):
        out = model(name)(
            prompt(1)[:, [step]], attention_mask=mask[:, : step + 1], past_key_values=narrow, use_cache=True
        )
        assert out.logits.isnan().all() == (step == 2)


@torch.no_grad()
def test_a_compiled_mask_that_is_not_served_gives_its_rows_nan():
    compiled = torch.compile(model().forward, backend="aot_eager", fullgraph=True)
    logits = compiled(prompt(), attention_mask=HOLE, use_cache=False).logits
    assert logits.isnan().any(-1).any(-1).tolist() == [True, False, False]
    packed = torch.arange(PROMPT).expand(3, -1).clone()
    packed[1, 5:] -= 5
    logits = compiled(prompt(), position_ids=packed, use_cache=False).logits
    assert logits.isnan().any(-1).any(-1).tolist() == [False, True, False]


def test_keys_and_values_that_lie_in_different_ways():
    random = torch.Generator().manual_seed(0)
    q, k, v = (torch.randn(2, heads, 5, 64, generator=random).bfloat16() for heads in (4, 2, 2))
    options = {"sm_scale": None, "logits_soft_cap": 0.0, "window_left": -1, "sinks": None}
    alike = dense.attend_dense(q, k, v, None, None, **options)
    k_by_token, by_token = (x.transpose(1, 2).contiguous().transpose(1, 2) for x in (k, v))
    by_channel = k.transpose(2, 3).contiguous().transpose(2, 3)
    assert torch.equal(dense.attend_dense(q, k, by_token, None, None, **options), alike)
    assert torch.equal(dense.attend_dense(q, k_by_token, v, None, None, **options), alike)
    assert torch.equal(dense.attend_dense(q, by_channel, v, None, None, **options), alike)


@torch.no_grad()
def test_a_mask_without_the_cached_tokens_is_refused():
    cache = DynamicCache()
    model()(prompt(), past_key_values=cache)
    with pytest.raises(ValueError, match="must have 12 columns, of the tokens in the cache and of the new"):
        model()(prompt()[:, :3], attention_mask=torch.ones(3, 3), past_key_values=cache)
    with pytest.raises(ValueError, match=r"here \[3, 9 or more\], got \(2, 9\)"):
        masks.tokens_of(torch.ones(2, 9), 3, 9, 9)


def test_a_forward_that_records_gradients_is_told_what_to_do():
    with pytest.raises(ValueError, match=r"call it inside `with torch\.no_grad"):
        model()(prompt())
    with torch.inference_mode():
        model()(prompt())


def test_a_cache_for_a_model_that_is_not_served_is_refused_with_the_reason():
    with pytest.raises(ValueError, match=r"NarrowCache cannot hold this model: its latent rows have 256 col"):
        NarrowCache(DeepseekV3Config(kv_lora_rank=256), max_length=16)
