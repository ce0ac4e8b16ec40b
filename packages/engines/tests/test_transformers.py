"""The adapter inside transformers itself: tiny models of real attention shapes, on a CPU."""

from __future__ import annotations

import functools
import inspect
import time
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from engine_checks import assert_same_greedy_tokens, watch
from engine_checks import attention as plain_attention
from step_costs import LAYER_IN_VIEWS, READS, VIEWS, in_views, operators
from transformers import (
    AttentionInterface,
    AttentionMaskInterface,
    AutoConfig,
    AutoModelForCausalLM,
    AutoModelForImageTextToText,
    FalconH1Config,
    GenerationConfig,
)
from transformers.generation.configuration_utils import ContinuousBatchingConfig
from transformers.integrations.eager_paged import eager_paged_attention_forward
from transformers.models.llama.modeling_llama import LlamaAttention

import narrowkv.engines.transformers as engine
from narrowkv.engines.tiny import tiny_config, tiny_model
from narrowkv.engines.transformers import NarrowCache, attention, continuous, deepseek_v4, layers, rows
from narrowkv.engines.transformers.layers import LAYER_TAG
from narrowkv.engines.transformers.masks import tokens_of
from narrowkv.engines.trial import CACHES, try_engine
from narrowkv.paged_cache import CacheFormat
from narrowkv.quant import relative_l1
from narrowkv.runtime.errors import UnsupportedError

OWN = str(Path(engine.__file__).parent)
PROMPT, NEW = 9, 3
BOTH_BF16 = 0.02  # relative L1 error of logits in bf16, with other roundings
FORMATS = {
    "fp8": {"format": "fp8_e4m3fn"},
    "fp8-static": {"format": "fp8_e4m3fn", "k_descale": 0.05, "v_descale": torch.full((2,), 0.02)},
    "fp4": {"format": "fp4_e2m1", "scale_group": 32},
    "nvfp4": {"format": "fp4_e2m1", "scale_group": 16, "scale_format": "e4m3"},
    "k8v4": {"format": CacheFormat("fp8_e4m3fn", "fp4_e2m1")},
    "integers": {"format": CacheFormat("int8", "int4")},
    "bf16": {"format": "bf16"},
}


def rounded_attention(dtype):
    """Attention over the dequantised cache in plain torch, computed in `dtype`."""

    def attend(
        module, query, key, value, attention_mask, scaling, sliding_window=None, softcap=None, s_aux=None, **_
    ):
        layer = getattr(key, LAYER_TAG)
        batch, heads, tokens, _ = query.shape
        layer.store(tokens_of(attention_mask, batch, layer.length, tokens).queries)
        out = torch.zeros(batch, tokens, heads, value.shape[-1], dtype=query.dtype)
        stored = [x.view(batch, -1, *x.shape[2:]) for x in layer.cache.dequantize()]
        for b, keys in enumerate(layer.owner.rows.seq_lens.tolist()):
            count = min(keys, tokens)
            o, _ = plain_attention(
                query[b, :, tokens - count :].transpose(0, 1), *(x[b, :keys] for x in stored), scaling,
                window=(sliding_window or 0) - 1, soft_cap=softcap or 0.0, sinks=s_aux, dtype=dtype,
            )  # fmt: skip
            out[b, tokens - count :] = o.to(query.dtype)
        return out, None

    return attend


@pytest.fixture(autouse=True)
def registered():
    engine.register()
    for name, dtype in (("over_the_cache", torch.float32), ("over_the_cache_16", torch.bfloat16)):
        AttentionInterface.register(name, rounded_attention(dtype))
        AttentionMaskInterface.register(name, engine.padding_of)
    yield
    AttentionInterface.register(continuous.NAME, continuous.attend_paged)
    continuous.register_continuous_batching()


@pytest.fixture
def calls(monkeypatch):
    places = (layers, "append"), (attention, "paged_decode"), (attention, "batch_prefill")
    return watch(monkeypatch, *places)


def narrow_model(**sizes):
    return tiny_model("llama-3-tiny", attn_implementation="narrowkv", **sizes)


def narrow_cache(model, **options):
    return NarrowCache(model.config, max_length=PROMPT + 8, page_size=8, **options)


def padded_prompt(seed=1, pad=4):
    generator = torch.Generator().manual_seed(seed)
    ids = torch.randint(3, 90, (2, PROMPT), generator=generator)
    mask = torch.ones_like(ids)
    mask[0, :pad] = 0
    return ids, mask


def generate(model, narrow=None, *, new=NEW, pad=4):
    ids, mask = padded_prompt(pad=pad)
    out = model.generate(
        ids, attention_mask=mask, max_new_tokens=new, min_new_tokens=new, do_sample=False,
        past_key_values=narrow, return_dict_in_generate=True, output_logits=True,
    )  # fmt: skip
    return out.sequences[:, PROMPT:].tolist(), torch.stack(out.logits).float()


@torch.no_grad()
def steps(model, narrow):
    """Logits of a prompt in two chunks and of two tokens more, the same tokens whatever the logits say."""
    ids, mask = padded_prompt()
    ids = torch.cat([ids, torch.tensor([[5, 6], [7, 8]])], 1)
    mask = torch.cat([mask, torch.ones(2, 2, dtype=mask.dtype)], 1)
    places = (mask.cumsum(1) - 1).clamp(min=0)
    logits, done = [], 0
    for count in (5, 4, 1, 1):
        new = slice(done, done + count)
        done += count
        out = model(
            ids[:, new], attention_mask=mask[:, :done], position_ids=places[:, new], past_key_values=narrow,
            use_cache=True,
        )  # fmt: skip
        logits.append(out.logits[mask[:, new].bool()].float())
    return torch.cat(logits)


slow = pytest.mark.slow


@pytest.mark.parametrize(
    ("name", "form", "layers", "generates"),
    [
        ("llama-3-tiny", "fp8", 2, True),
        ("llama-3-tiny", "fp4", 1, False),
        ("glm-4.5-air-tiny", "fp8", 1, False),
        ("gpt-oss-tiny", "fp8", 2, False),
        ("gemma-2-tiny", "fp8", 1, False),
        ("mimo-v2-tiny", "fp8", 2, True),
        # Attention that has nothing which one of the others has not.
        pytest.param("gpt-oss-tiny", "fp8", 2, True, marks=slow),
        pytest.param("qwen3-tiny", "fp8", 1, False, marks=slow),
        pytest.param("gemma-3-tiny", "fp8", 2, False, marks=slow),
        *(pytest.param("gemma-4-tiny", form, 2, form == "fp8", marks=slow) for form in ("fp8", "nvfp4")),
        *(
            pytest.param("llama-3-tiny", form, 1, False, marks=slow)
            for form in ("bf16", "fp8-static", "nvfp4", "k8v4", "integers")
        ),
    ],
)
def test_logits_and_greedy_tokens_are_those_of_attention_over_the_dequantised_cache(
    name, form, layers, generates, calls
):
    model = tiny_model(name, num_layers=layers)
    found, tokens = {}, {}
    for implementation in ("narrowkv", "over_the_cache", "over_the_cache_16"):
        model.set_attn_implementation(implementation)
        found[implementation] = steps(model, narrow_cache(model, **FORMATS[form]))
        if generates and implementation != "over_the_cache_16":
            tokens[implementation] = generate(model, narrow_cache(model, **FORMATS[form]))
        if implementation == "narrowkv":
            # Two chunks and two tokens, then a prompt and the tokens after it; in every layer.
            prefills, decodes = layers * (2 + generates), layers * (2 + generates * (NEW - 1))
            wanted = {"append": prefills + decodes, "batch_prefill": prefills, "paged_decode": decodes}
            assert calls.counts == wanted
    exact = found["over_the_cache"]
    assert relative_l1(found["narrowkv"], exact) <= 2 * relative_l1(found["over_the_cache_16"], exact)
    if generates:
        assert_same_greedy_tokens(tokens["narrowkv"], tokens["over_the_cache"])


@pytest.mark.parametrize(
    "name",
    ["glm-4.5-air-tiny", *(pytest.param(name, marks=slow) for name in ("gpt-oss-tiny", "gemma-4-tiny"))],
)
def test_a_16_bit_cache_gives_what_the_models_own_attention_gives(name):
    model = tiny_model(name, num_layers=1 if name.startswith("glm") else 2)
    own_tokens, own = generate(model)
    model.set_attn_implementation("narrowkv")
    # Over a cache of narrowkv's, and without one: over transformers' DynamicCache.
    for given in (narrow_cache(model, format="bf16"), None):
        tokens, logits = generate(model, given)
        assert tokens == own_tokens
        assert relative_l1(logits, own) < BOTH_BF16


@pytest.mark.gpu
def test_a_gpu_generates_what_transformers_own_attention_does():
    own, *others = try_engine("transformers", "glm-4.5-air-tiny")
    assert own.calls == {}
    assert [found.cache for found in others] == list(CACHES["transformers"])
    for found, bound in zip(others, (0.1, 0.5, 1.0, 2.0, 0.5, 2.0), strict=True):
        assert found.difference < bound
        assert found.calls["paged_decode"] > 0


def test_deepseek_v4_generates_through_sparse_attention():
    own, sixteen, eight, four = try_engine("transformers", "deepseek-v4-tiny", tokens=2)
    assert own.calls == {}
    # Over 16-bit rows the attention's error is 0.0015; the tiny model's logits then differ by 0.06 to 0.12,
    # according to which outputs are rounded up.
    for found, bound in ((sixteen, 0.2), (eight, 1.2), (four, 2.5)):
        assert found.calls == {"sparse_decode": 2 * 3}  # a window, a layer of each kind of compressed rows
        assert 0 < found.difference < bound
    assert sixteen.tokens == own.tokens
    with pytest.raises(UnsupportedError, match="try it in transformers"):
        try_engine("vllm", "deepseek-v4-tiny")
    with pytest.raises(UnsupportedError, match="no rows of int8: try it with bf16, fp8_e4m3fn, fp4_e2m1"):
        try_engine("transformers", "deepseek-v4-tiny", ["int8"])
    model = tiny_model("llama-3-tiny", attn_implementation=deepseek_v4.NAME)
    with pytest.raises(ValueError, match='use "narrowkv" for other models'):
        model(torch.tensor([[5, 6]]))


def test_narrow_formats_take_their_share_of_the_memory():
    taken = {}
    for form, options in FORMATS.items():
        narrow = NarrowCache(tiny_config("llama-3-tiny"), max_length=PROMPT + 8, page_size=8, **options)
        keys = torch.zeros(1, 2, 1, 64, dtype=torch.bfloat16)
        for index in range(2):
            narrow.update(keys, keys, index)
        taken[form] = narrow.bytes()
    # Bytes of a head of 64 channels: stored numbers, and a descale or E8M0 scales.
    assert {form: size / taken["bf16"] * 128 for form, size in taken.items()} == {
        "bf16": 128, "fp8-static": 64, "fp8": 64 + 4, "fp4": 32 + 2, "nvfp4": 32 + 4,
        "k8v4": (64 + 4 + 32 + 1) / 2, "integers": (64 + 4 + 32 + 4) / 2,
    }  # fmt: skip


def test_a_step_copies_no_cache_and_waits_only_to_check_the_mask_of_a_chunk(monkeypatch, calls):
    model = tiny_model("gpt-oss-tiny", attn_implementation="narrowkv")
    narrow = narrow_cache(model)
    waits = []
    for name in READS:
        method = getattr(torch.Tensor, name)

        def read(self, *args, name=name, method=method, **kwargs):
            if inspect.currentframe().f_back.f_code.co_filename.startswith(OWN):
                waits.append(name)
            return method(self, *args, **kwargs)

        monkeypatch.setattr(torch.Tensor, name, read)

    def memory():
        pages = [layer.cache for layer in narrow.narrow_layers]
        return [(p, p.k.data_ptr(), p.v.data_ptr(), p.k_descale.data_ptr()) for p in pages]

    steps(model, narrow)
    before = memory()
    # Of two chunks, the mask of full and of sliding attention; none of a step of one token.
    assert waits == ["__bool__"] * 2 * 2
    assert calls.memory == {k for _, k, _, _ in before}
    narrow.reset()
    with torch.no_grad():
        model(padded_prompt(pad=0)[0], past_key_values=narrow)
    assert memory() == before


def test_a_decode_step_adds_one_operation_and_the_views_of_each_layer(monkeypatch):
    model = narrow_model()
    narrow = NarrowCache(model.config, max_length=2048)
    generate(model, narrow, pad=0, new=2)
    # The layers share one plan and its workspace.
    assert (len(narrow.rows._decode_plans), len(narrow.rows._prefill_plans)) == (1, 1)
    q, new = torch.zeros(2, 8, 1, 64).bfloat16(), torch.zeros(2, 2, 1, 64).bfloat16()
    module = torch.nn.Module()
    monkeypatch.setattr(layers, "append", lambda *args: None)
    monkeypatch.setattr(attention, "paged_decode", lambda q, *args, **kwargs: q)

    def layer(index):
        k, v = narrow.update(new, new, index)
        begun = time.perf_counter()
        attention.attend(module, q, k, v, None)
        return time.perf_counter() - begun

    for index in range(2):
        with operators() as seen:
            layer(index)
        assert seen == ["add_"] * (index == 0) + ["squeeze"] * 3 + ["view"]
    steps = [[layer(index) for index in range(2)] for _ in range(300)]
    assert in_views(min(second for _, second in steps)) <= LAYER_IN_VIEWS


def test_padding_takes_no_slots_and_does_not_change_its_neighbours():
    model = narrow_model(num_layers=1)
    narrow = narrow_cache(model)
    together, _ = generate(model, narrow)
    assert narrow.rows.seq_lens.tolist() == [PROMPT - 4 + NEW - 1, PROMPT + NEW - 1]
    ids, mask = padded_prompt()
    for row in (0, 1):
        alone = ids[row][mask[row].bool()][None]
        out = model.generate(
            alone, attention_mask=torch.ones_like(alone), max_new_tokens=NEW, min_new_tokens=NEW,
            do_sample=False, past_key_values=narrow_cache(model),
        )  # fmt: skip
        assert out[0, alone.shape[1] :].tolist() == together[row]


def test_padding_on_the_right_is_not_attended_to():
    model = narrow_model(num_layers=1)
    ids, _ = padded_prompt()
    mask = torch.ones_like(ids)
    mask[0, 6:] = 0
    with torch.no_grad():
        both = model(ids, attention_mask=mask, past_key_values=narrow_cache(model)).logits
        alone = model(ids[:1, :6], past_key_values=narrow_cache(model)).logits
    assert relative_l1(both[0, :6], alone[0].float()) < BOTH_BF16


@pytest.mark.parametrize(
    ("layers", "options"),
    [(2, {"num_beams": 2}), (1, {"prompt_lookup_num_tokens": 2}), (1, {"prefill_chunk_size": 4})],
    ids=["beams", "prompt lookup", "chunks"],
)
def test_generate_in_other_ways_gives_the_tokens_of_transformers_own_cache(layers, options):
    model = tiny_model("llama-3-tiny", num_layers=layers)
    ids = padded_prompt()[0][1:]
    settings = {"max_new_tokens": 4, "min_new_tokens": 4, "do_sample": False, **options}
    own = model.generate(ids, **settings)
    model.set_attn_implementation("narrowkv")
    narrow = NarrowCache(model.config, max_length=32, page_size=8, format="bf16")
    assert model.generate(ids, past_key_values=narrow, **settings).tolist() == own.tolist()


@torch.no_grad()
def forward(**options):
    narrow_model(num_layers=1)(padded_prompt()[0][:1], **options)


def generate_with_other_attention():
    model = tiny_model("llama-3-tiny", num_layers=1)
    generate(model, narrow_cache(model))


def generate_past_the_end():
    model = narrow_model(num_layers=1)
    generate(model, NarrowCache(model.config, max_length=4))


@pytest.mark.parametrize(
    ("call", "error", "match"),
    [
        (generate_past_the_end, ValueError, "max_length of at least 9 for these tokens, got 4"),
        (generate_with_other_attention, RuntimeError, "attn_implementation='narrowkv'"),
        (lambda: forward(attention_mask=torch.ones(1, 1, PROMPT, PROMPT).bool()), ValueError,
         "attention_mask must be None or"),
        (lambda: forward(position_ids=torch.tensor([[0, 1, 2, 3, 0, 1, 2, 3, 4]]), use_cache=False),
         ValueError, "packed"),
        (lambda: NarrowCache(FalconH1Config(num_hidden_layers=2), max_length=8), ValueError,
         "LinearAttentionAndFullAttentionLayer"),
        (lambda: NarrowCache(tiny_config("llama-3-tiny"), max_length=8, recent=-1), ValueError,
         "recent must be a number of tokens, 0 or more, got -1"),
        (lambda: NarrowCache(tiny_config("llama-3-tiny"), max_length=8, first=4), ValueError,
         "recent must be at least 1 beside first=4, got 0"),
        (lambda: continuous.register_continuous_batching("fp4_e2m1"), ValueError, "fp8_e4m3fn"),
    ],
    ids=["full", "other attention", "a mask that is no rule", "packed sequences", "layers of other kinds",
         "recent -1", "first alone", "FP4 in continuous batching"],
)  # fmt: skip
def test_what_is_not_served_is_refused(call, error, match):
    with pytest.raises(error, match=match):
        call()


DECODERS = {
    "deepseek_v3",
    "kimi_linear",
    "llama",
    "qwen3",
    "qwen3_moe",
    "gpt_oss",
    "gemma2",
    "gemma3_text",
    "gemma4_text",
    "mistral",
    "mixtral",
    "mimo_v2_flash",
}
REASONS = {
    "cohere_compass_text": "makes no model of its configuration: KeyError",
    "deepseek_v32": "narrowkv-sparse",
    "minicpm3": "latent rows have 256 columns and 32 of RoPE",
    "deepseek_v4": "narrowkv-sparse",
    "llama4_text": "chunks",
    "bloom": "AttentionInterface",
    "mamba": "keeps no keys and values",
    "whisper": "encoder",
}


@slow
@pytest.mark.parametrize(
    ("multimodal", "least", "yes", "no"),
    [
        (False, 150, DECODERS, REASONS),
        (True, 300, {"llava", "mistral3", "qwen2_5_vl", "qwen3_vl"},
         {"t5": "encoder", "bart": "encoder", "whisper": "encoder", "glm5_next": "mask of its own"}),
    ],
)  # fmt: skip
def test_every_registered_decoder_is_answered_yes_or_with_a_reason(multimodal, least, yes, no):
    answers = engine.supported_architectures(multimodal=multimodal)
    assert len(answers) > least
    assert all(isinstance(reason, str) and reason for reasons in answers.values() for reason in reasons)
    assert yes <= {name for name, reasons in answers.items() if not reasons}
    for name, reason in no.items():
        told = answers[name][:1] if multimodal else answers[name]
        assert any(reason in answer for answer in told), (name, told)


TEXT = {
    "num_hidden_layers": 2, "hidden_size": 128, "num_attention_heads": 2, "num_key_value_heads": 1,
    "head_dim": 64, "intermediate_size": 64, "max_position_embeddings": 64, "vocab_size": 96,
}  # fmt: skip
TOWER = {
    "hidden_size": 32, "intermediate_size": 32, "num_hidden_layers": 1, "num_attention_heads": 2,
    "image_size": 28, "patch_size": 14, "depth": 1, "num_heads": 2, "out_hidden_size": 128,
    "fullatt_block_indexes": [0], "deepstack_visual_indexes": [0],
}  # fmt: skip


@slow
@pytest.mark.parametrize("model_type", ["llava", "mistral3", "qwen2_5_vl", "qwen3_vl"])
def test_the_decoder_of_a_model_of_images_generates_text(model_type):
    default = AutoConfig.for_model(model_type)
    parts = {"text_config": TEXT, "vision_config": TOWER}
    for name, sizes in parts.items():
        own = getattr(default, name)
        parts[name] = {k: v for k, v in sizes.items() if hasattr(own, k)} | {"model_type": own.model_type}
    parts["text_config"] |= {"pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2}
    if model_type.startswith("qwen"):
        rope = {"rope_type": "default", "rope_theta": 1e4, "mrope_section": [8, 12, 12]}
        parts["text_config"]["rope_parameters"] = rope
    config = AutoConfig.for_model(model_type, **parts)
    chosen = {"text_config": "narrowkv"}
    tokens, own_tokens = generated_by_both(AutoModelForImageTextToText, config, chosen)
    assert tokens == own_tokens


def generated_by_both(auto_model, config, chosen="narrowkv", *, pad=4):
    """Tokens by narrowkv and by the model's own attention, where their first logits agree."""
    assert engine.supports(config) == []
    torch.manual_seed(0)
    model = auto_model.from_config(config, attn_implementation="eager").to(torch.bfloat16).eval()
    own_tokens, own = generate(model, new=2, pad=pad)
    model.set_attn_implementation(chosen)
    narrow = narrow_cache(model, format="bf16")
    tokens, logits = generate(model, narrow, new=2, pad=pad)
    assert any(layer.cache is not None for layer in narrow.narrow_layers)
    assert relative_l1(logits[0], own[0]) < BOTH_BF16
    return tokens, own_tokens


def sized(model_type, options):
    tokens = {"vocab_size": 96, "pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2}
    return AutoConfig.for_model(model_type, **tokens, **options)


SIZES = {
    "num_hidden_layers": 2, "hidden_size": 256, "num_attention_heads": 4, "num_key_value_heads": 2,
    "intermediate_size": 64, "max_position_embeddings": 64,
}  # fmt: skip


@pytest.mark.parametrize(
    "model_type",
    [
        *("cohere", "gemma", "granite", "olmo2", "starcoder2"),
        *(
            pytest.param(name, marks=slow)
            for name in ("arcee", "ernie4_5", "glm", "hunyuan_v1_dense", "phi3")
        ),
    ],
)
def test_an_architecture_that_is_answered_yes_generates(model_type):
    config = sized(model_type, {**SIZES, "num_hidden_layers": 1, "head_dim": 64})
    tokens, own_tokens = generated_by_both(AutoModelForCausalLM, config)
    assert tokens == own_tokens


MAMBA = {"mamba_n_heads": 8, "mamba_d_head": 64, "mamba_d_state": 16, "mamba_n_groups": 1}
EXPERTS = {"num_experts": 4, "num_experts_per_tok": 2}
# Layers of other kinds beside attention, and configurations that name their sizes in ways of their own.
UNUSUAL = {
    "bamba": {**SIZES, **MAMBA, "attn_layer_indices": [1]},
    "dbrx": {
        "d_model": 256, "n_heads": 4, "n_layers": 2, "max_seq_len": 64,
        "attn_config": {"kv_n_heads": 2, "rope_theta": 1e4, "clip_qkv": 8.0},
        "ffn_config": {"ffn_hidden_size": 64, "moe_num_experts": 4, "moe_top_k": 2},
    },
    "granitemoehybrid": {
        **SIZES, **MAMBA, "layer_types": ["mamba", "attention"], "num_local_experts": 4,
        "num_experts_per_tok": 2, "shared_intermediate_size": 64,
    },
    "jamba": {
        **SIZES, **EXPERTS, "attn_layer_period": 2, "attn_layer_offset": 1, "expert_layer_period": 2,
        "mamba_d_state": 16, "use_mamba_kernels": False,
    },
    "lfm2_moe": {
        **SIZES, **EXPERTS, "layer_types": ["conv", "full_attention"], "moe_intermediate_size": 64,
        "num_dense_layers": 1,
    },
    "nemotron": {**SIZES, "head_dim": 64},
    "recurrent_gemma": {
        **SIZES, "head_dim": 64, "lru_width": 256, "attention_window_size": 6,
        "block_types": ["recurrent", "attention"],
    },
}  # fmt: skip


@slow
@pytest.mark.parametrize("model_type", UNUSUAL)
def test_an_architecture_with_a_configuration_of_its_own_generates(model_type):
    generated_by_both(AutoModelForCausalLM, sized(model_type, UNUSUAL[model_type]), pad=0)


def test_float32_models_are_told_what_to_change():
    config = tiny_config("llama-3-tiny")
    config.dtype = torch.float32
    assert "dtype=torch.bfloat16" in " ".join(engine.supports(config))


def generate_continuously(name="llama-3-tiny", layers=1):
    """Three prompts through the engine's paged cache, by what is registered for it."""
    model = tiny_model(name, num_layers=layers)
    model.set_attn_implementation(continuous.NAME)
    named_now = "page_size" in inspect.signature(ContinuousBatchingConfig).parameters
    pages = {"page_size" if named_now else "block_size": 16}
    out = model.generate_batch(
        [[5, 6, 7, 8, 9, 10, 11, 12, 13], [20, 21, 22, 23], [30, 31, 32, 33, 34, 35]],
        generation_config=GenerationConfig(
            max_new_tokens=3, do_sample=False, eos_token_id=-1, pad_token_id=0
        ),
        continuous_batching_config=ContinuousBatchingConfig(num_blocks=8, max_batch_tokens=16, **pages),
    )
    assert [result.error for result in out.values()] == [None] * 3


CONTINUOUS = [(continuous, name) for name in ("append", "paged_decode", "batch_prefill")]


@pytest.mark.parametrize("form", ["bf16", "fp8_e4m3fn"])
def test_continuous_batching_reads_and_writes_the_engines_cache(form, monkeypatch):
    calls = watch(monkeypatch, *CONTINUOUS, bound=0.002)  # as for every 16-bit query
    errors, found = [], []

    def compared(module, q, k, v, mask, **kwargs):
        o, _ = continuous.attend_paged(module, q, k, v, mask, **kwargs)
        update = functools.partial(continuous.PagedAttentionCache.update, kwargs["cache"])
        if "cache" in inspect.signature(LlamaAttention.forward).parameters:  # it stores, from 5.24 on
            k, v = update(k, v, module.layer_idx, kwargs=kwargs)
        else:
            kwargs["cache"] = SimpleNamespace(update=update)
        own, _ = eager_paged_attention_forward(module, q, k, v, mask, **kwargs)
        errors.append(relative_l1(o, own.float()))
        return o, None

    def watched(*args, **kwargs):
        with operators(*CONTINUOUS, (continuous, "plan_prefill")) as seen:
            result = continuous.attend_paged(*args, **kwargs)
        found.append(set(seen))
        return result

    # What is stored is the engine's own in 16 bits, and a tensor beside it in FP8.
    descales = {} if form == "bf16" else {"k_descale": 0.05, "v_descale": 0.05}
    continuous.register_continuous_batching(None if form == "bf16" else form, **descales)
    AttentionInterface.register(continuous.NAME, compared if form == "bf16" else watched)
    generate_continuously()
    counts = calls.counts
    assert {call.cache.format.k for call in calls} == {form}
    assert counts["append"] == counts["batch_prefill"] + counts["paged_decode"]
    assert min(counts["batch_prefill"], counts["paged_decode"]) > 0
    if form == "bf16":
        assert len(errors) >= 3
        assert max(errors) < BOTH_BF16
    else:
        # The lengths of last pages of one token each; the first step makes the views and their descales.
        assert len(found) > 1
        assert all(seen <= VIEWS | {"ones_like"} for seen in found[1:])


def test_continuous_batching_refuses_sliding_windows():
    with pytest.raises(AssertionError, match="ring of its sliding window"):
        generate_continuously("gpt-oss-tiny", 2)


def test_starts_of_rows_and_of_their_padding():
    starts, counts = rows.interleaved_starts(torch.tensor([[0, 0, 0], [1, 1, 1], [1, 0, 0], [0, 1, 1]]))
    assert starts.tolist() == [0, 3, 3, 3, 6, 6, 7, 10, 12, 12]
    assert counts.tolist() == [0, 3, 1, 2]
