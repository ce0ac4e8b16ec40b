"""The adapter inside transformers itself: tiny models of real attention shapes, on a CPU."""

from __future__ import annotations

import inspect
import sys
import time
from collections import Counter
from pathlib import Path

import pytest
import torch
from transformers import AttentionInterface, AttentionMaskInterface
from transformers.integrations.eager_paged import eager_paged_attention_forward

sys.path.insert(0, str(Path(__file__).parent))

from step_costs import MICROSECONDS, READS, VIEWS, operators

import narrowkv.engines.transformers as engine
from narrowkv.attn_decode import paged_decode_reference
from narrowkv.attn_prefill import batch_prefill_reference
from narrowkv.engines.tiny import DEEPSEEK_V4, TINY_MODELS, tiny_config, tiny_model
from narrowkv.engines.transformers import NarrowCache, attention, cache, continuous, deepseek_v4, rows
from narrowkv.engines.transformers.cache import LAYER_TAG
from narrowkv.engines.trial import CACHES, try_engine
from narrowkv.paged_cache import CacheFormat
from narrowkv.runtime.errors import UnsupportedError

OWN = str(Path(engine.__file__).parent)
PROMPT, NEW = 9, 3
FORMATS = {
    "fp8": {"format": "fp8_e4m3fn"},
    "fp8-static": {"format": "fp8_e4m3fn", "k_descale": 0.05, "v_descale": torch.full((2,), 0.02)},
    "fp4": {"format": "fp4_e2m1", "scale_group": 32},
    "nvfp4": {"format": "fp4_e2m1", "scale_group": 16, "scale_format": "e4m3"},
    "k8v4": {"format": CacheFormat("fp8_e4m3fn", "fp4_e2m1")},
    "integers": {"format": CacheFormat("int8", "int4")},
    "bf16": {"format": "bf16"},
}


# Models whose attention has nothing that one of the others has not.
LIKE_OTHERS = ("qwen3-tiny", "gemma-3-tiny")


def rounded_attention(dtype):
    """Attention over the dequantised cache in plain torch, computed in `dtype`."""

    def attend(
        module, query, key, value, attention_mask, scaling, sliding_window=None, softcap=None, s_aux=None, **_
    ):
        layer = getattr(key, LAYER_TAG)
        layer.store(attention_mask)
        owner, stored = layer.owner.rows, layer.cache
        batch, heads, tokens, dim = query.shape
        out = torch.zeros(batch, tokens, heads, dim, dtype=query.dtype)
        k_all, v_all = (x.view(batch, -1, *x.shape[2:]) for x in stored.dequantize())
        for b in range(batch):
            keys = int(owner.seq_lens[b])
            count = min(keys, tokens)
            k, v = (x[b, :keys].to(dtype).repeat_interleave(heads // x.shape[2], 1) for x in (k_all, v_all))
            q = query[b, :, tokens - count :].to(dtype)
            logits = torch.einsum("htd,shd->hts", q, k).float() * scaling
            if softcap:
                logits = softcap * torch.tanh(logits / softcap)
            place = torch.arange(keys - count, keys)[:, None]
            seen = torch.arange(keys)
            hidden = seen > place
            if sliding_window:
                hidden = hidden | (seen <= place - sliding_window)
            logits = logits.masked_fill(hidden, -torch.inf)
            if s_aux is not None:
                logits = torch.cat([logits, s_aux.float()[:, None, None].expand(-1, count, 1)], -1)
            p = torch.softmax(logits, -1)[..., :keys].to(dtype)
            out[b, tokens - count :] = torch.einsum("hts,shd->thd", p, v).to(query.dtype)
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
def runs(monkeypatch):
    """How often each operation ran, and the memory of the caches that it was given."""
    counts = Counter()

    def counted(module, name, position):
        operation = getattr(module, name)

        def call(*args, **kwargs):
            counts[name] += 1
            counts[args[position].k.data_ptr()] += 1
            return operation(*args, **kwargs)

        monkeypatch.setattr(module, name, call)

    counted(cache, "append", 0)
    counted(attention, "paged_decode", 1)
    counted(attention, "batch_prefill", 1)
    return counts


def padded_prompt(seed=1, pad=4):
    generator = torch.Generator().manual_seed(seed)
    ids = torch.randint(3, 90, (2, PROMPT), generator=generator)
    mask = torch.ones_like(ids)
    mask[0, :pad] = 0
    return ids, mask


def generate(model, narrow=None, *, new=NEW, pad=4, **options):
    ids, mask = padded_prompt(pad=pad)
    out = model.generate(
        ids, attention_mask=mask, max_new_tokens=new, min_new_tokens=new, do_sample=False,
        past_key_values=narrow, return_dict_in_generate=True, output_logits=True, **options,
    )  # fmt: skip
    return out.sequences[:, PROMPT:].tolist(), torch.stack(out.logits).float()


@torch.no_grad()
def steps(model, narrow):
    """Logits of a prompt in two chunks and of two tokens more, the same tokens whatever the logits say."""
    ids, mask = padded_prompt()
    more = torch.tensor([[5, 6], [7, 8]])
    ids = torch.cat([ids, more], 1)
    logits, done = [], 0
    for count in (5, 4, 1, 1):
        seen = torch.cat([mask, torch.ones(2, 2, dtype=mask.dtype)], 1)[:, : done + count]
        place = (seen.cumsum(1) - 1).clamp(min=0)[:, done:]
        out = model(
            ids[:, done : done + count],
            attention_mask=seen,
            position_ids=place,
            past_key_values=narrow,
            use_cache=True,
        )
        kept = seen[:, done:].bool()
        logits.append(out.logits[kept].float())
        done += count
    return torch.cat(logits)


def relative_l1(x, reference):
    return ((x - reference).abs().sum() / reference.abs().sum()).item()


def assert_same_greedy_tokens(found, reference):
    """The same tokens, up to one whose logit leads by less than what rounding changes."""
    (tokens, logits), (expected, exact) = found, reference
    error = (logits[0] - exact[0]).abs().max()  # of the first step, where both saw the same tokens
    best = exact.topk(2).values
    sure = (best[..., 0] - best[..., 1] > 2 * error).T.cumprod(1).bool()
    assert torch.equal(torch.tensor(tokens)[sure], torch.tensor(expected)[sure])
    assert sure.any(), "no token of the model leads by enough to compare"


def narrow_cache(model, **options):
    return NarrowCache(model.config, max_length=PROMPT + 8, page_size=8, **options)


@pytest.mark.parametrize(
    ("name", "form"),
    [(name, "fp8") for name in TINY_MODELS if name not in (DEEPSEEK_V4, *LIKE_OTHERS)]
    + [("llama-3-tiny", "fp4")]
    + [pytest.param(name, "fp8", marks=pytest.mark.slow) for name in LIKE_OTHERS]
    + [
        pytest.param("llama-3-tiny", form, marks=pytest.mark.slow)
        for form in ("bf16", "fp8-static", "nvfp4", "k8v4", "integers")
    ],
)
def test_logits_and_greedy_tokens_are_those_of_attention_over_the_dequantised_cache(name, form, runs):
    layers = 1 if name in ("glm-4.5-air-tiny", "qwen3-tiny") or form != "fp8" else 2
    generates = form == "fp8" and name in ("llama-3-tiny", "gpt-oss-tiny")
    model = tiny_model(name, num_layers=layers)
    found, tokens = {}, {}
    for implementation in ("narrowkv", "over_the_cache", "over_the_cache_16"):
        model.set_attn_implementation(implementation)
        found[implementation] = steps(model, narrow_cache(model, **FORMATS[form]))
        if generates and implementation != "over_the_cache_16":
            tokens[implementation] = generate(model, narrow_cache(model, **FORMATS[form]))
        if implementation == "narrowkv":
            # Two chunks and two tokens, then a prompt and the tokens after it; in every layer.
            assert runs["batch_prefill"] == layers * (2 + generates)
            assert runs["paged_decode"] == layers * (2 + generates * (NEW - 1))
            assert runs["append"] == runs["batch_prefill"] + runs["paged_decode"]
    exact = found["over_the_cache"]
    assert relative_l1(found["narrowkv"], exact) <= 2 * relative_l1(found["over_the_cache_16"], exact)
    if generates:
        assert_same_greedy_tokens(tokens["narrowkv"], tokens["over_the_cache"])


@pytest.mark.parametrize("name", ["glm-4.5-air-tiny", pytest.param("gpt-oss-tiny", marks=pytest.mark.slow)])
def test_a_16_bit_cache_gives_what_the_models_own_attention_gives(name):
    model = tiny_model(name)
    own_tokens, own = generate(model)
    model.set_attn_implementation("narrowkv")
    tokens, logits = generate(model, narrow_cache(model, format="bf16"))
    assert tokens == own_tokens
    assert relative_l1(logits, own) < 0.02  # both in bf16, with other roundings
    own_tokens, own = generate(model)  # without a cache of narrowkv's: transformers' DynamicCache
    assert tokens == own_tokens
    assert relative_l1(logits, own) < 0.02


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
    for found, bound in ((sixteen, 0.1), (eight, 1.2), (four, 2.5)):
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
    model = tiny_model("llama-3-tiny", attn_implementation="narrowkv")
    taken = {}
    for form, options in FORMATS.items():
        narrow = narrow_cache(model, **options)
        keys = torch.zeros(1, 2, 1, 64, dtype=torch.bfloat16)
        for index in range(2):
            narrow.update(keys, keys, index)
        taken[form] = narrow.bytes()
    # Bytes of a head of 64 channels: stored numbers, and a descale or E8M0 scales.
    assert {form: size / taken["bf16"] * 128 for form, size in taken.items()} == {
        "bf16": 128, "fp8-static": 64, "fp8": 64 + 4, "fp4": 32 + 2, "nvfp4": 32 + 4,
        "k8v4": (64 + 4 + 32 + 1) / 2, "integers": (64 + 4 + 32 + 4) / 2,
    }  # fmt: skip


def test_a_step_copies_no_cache_and_never_waits_for_the_device(monkeypatch, runs):
    model = tiny_model("gpt-oss-tiny", attn_implementation="narrowkv")
    narrow = narrow_cache(model)
    waits = []

    def watched(name):
        method = getattr(torch.Tensor, name)

        def call(self, *args, **kwargs):
            if inspect.currentframe().f_back.f_code.co_filename.startswith(OWN):
                waits.append(name)
            return method(self, *args, **kwargs)

        monkeypatch.setattr(torch.Tensor, name, call)

    for name in READS:
        watched(name)
    steps(model, narrow)
    assert not waits
    pages = [layer.cache for layer in narrow.narrow_layers]
    assert {key for key in runs if isinstance(key, int)} == {page.k.data_ptr() for page in pages}
    before = [(p, p.k.data_ptr(), p.v.data_ptr(), p.k_descale.data_ptr()) for p in pages]
    narrow.reset()
    steps(model, narrow)
    assert before == [
        (layer.cache, layer.cache.k.data_ptr(), layer.cache.v.data_ptr(), layer.cache.k_descale.data_ptr())
        for layer in narrow.narrow_layers
    ]


def test_a_decode_step_adds_one_operation_and_the_views_of_each_layer(monkeypatch):
    model = tiny_model("llama-3-tiny", attn_implementation="narrowkv")
    narrow = NarrowCache(model.config, max_length=2048)
    generate(model, narrow, pad=0, new=2)
    q, new = torch.zeros(2, 8, 1, 64).bfloat16(), torch.zeros(2, 2, 1, 64).bfloat16()
    module = torch.nn.Module()
    monkeypatch.setattr(cache, "append", lambda *args: None)
    monkeypatch.setattr(attention, "paged_decode", lambda q, *args, **kwargs: q)

    def layer(index):
        k, v = narrow.update(new, new, index)
        begun = time.perf_counter()
        attention.attend(module, q, k, v, None)
        return time.perf_counter() - begun

    for index in range(2):
        with operators() as seen:
            layer(index)
        assert seen == ["add_"] * (index == 0) + ["squeeze"] * 3 + ["unsqueeze"]
    steps = [[layer(index) for index in range(2)] for _ in range(300)]
    assert min(second for _, second in steps) * 1e6 <= MICROSECONDS


def test_the_layers_share_one_plan_and_its_workspace():
    model = tiny_model("llama-3-tiny", attn_implementation="narrowkv")
    narrow = narrow_cache(model)
    generate(model, narrow, new=2)
    assert len(narrow.rows._decode_plans) == 1
    assert len(narrow.rows._prefill_plans) == 1


def test_padding_takes_no_slots_and_does_not_change_its_neighbours():
    model = tiny_model("llama-3-tiny", attn_implementation="narrowkv")
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
    model = tiny_model("llama-3-tiny", attn_implementation="narrowkv")
    ids, _ = padded_prompt()
    mask = torch.ones_like(ids)
    mask[0, 6:] = 0
    with torch.no_grad():
        both = model(ids, attention_mask=mask, past_key_values=narrow_cache(model)).logits
        alone = model(ids[:1, :6], past_key_values=narrow_cache(model)).logits
    assert relative_l1(both[0, :6].float(), alone[0].float()) < 0.02


@pytest.mark.parametrize(
    "options",
    [{"num_beams": 2}, {"prompt_lookup_num_tokens": 2}, {"prefill_chunk_size": 4}],
    ids=lambda x: next(iter(x)),
)
def test_generate_in_other_ways_gives_the_tokens_of_transformers_own_cache(options):
    model = tiny_model("llama-3-tiny")
    ids = padded_prompt()[0][1:]
    settings = {"max_new_tokens": 4, "min_new_tokens": 4, "do_sample": False, **options}
    own = model.generate(ids, **settings)
    model.set_attn_implementation("narrowkv")
    narrow = NarrowCache(model.config, max_length=32, page_size=8, format="bf16")
    assert model.generate(ids, past_key_values=narrow, **settings).tolist() == own.tolist()


def test_a_cache_that_is_full_says_how_long_it_must_be():
    model = tiny_model("llama-3-tiny", attn_implementation="narrowkv")
    with pytest.raises(ValueError, match=r"max_length of at least 9 for these tokens, got 4"):
        generate(model, NarrowCache(model.config, max_length=4))


def test_another_attention_than_narrowkvs_is_refused_by_the_cache():
    model = tiny_model("llama-3-tiny")
    with pytest.raises(RuntimeError, match="attn_implementation='narrowkv'"):
        generate(model, narrow_cache(model))


def test_masks_that_are_no_rules_are_refused():
    model = tiny_model("llama-3-tiny", attn_implementation="narrowkv")
    ids, _ = padded_prompt()
    with torch.no_grad(), pytest.raises(ValueError, match="attention_mask must be None or"):
        model(ids, attention_mask=torch.ones(2, 1, PROMPT, PROMPT, dtype=torch.bool))
    packed = torch.tensor([[0, 1, 2, 3, 0, 1, 2, 3, 4]])
    with torch.no_grad(), pytest.raises(ValueError, match="packed"):
        model(ids[:1], position_ids=packed, use_cache=False)


def test_layers_that_a_narrow_cache_cannot_hold_are_refused():
    from transformers import FalconH1Config

    with pytest.raises(ValueError, match="LinearAttentionAndFullAttentionLayer"):
        NarrowCache(FalconH1Config(num_hidden_layers=2), max_length=8)


@pytest.mark.slow
def test_every_model_with_a_decoder_is_answered_yes_or_with_a_reason():
    answers = engine.supported_architectures(multimodal=True)
    assert len(answers) > 300
    assert all(isinstance(reason, str) and reason for reasons in answers.values() for reason in reasons)
    assert {"llava", "mistral3", "qwen2_5_vl", "qwen3_vl"} <= {name for name, no in answers.items() if not no}
    assert {"t5", "bart", "whisper"} <= set(answers)
    assert all("encoder" in answers[name][0] for name in ("t5", "bart", "whisper"))


TEXT = {
    "num_hidden_layers": 2, "hidden_size": 128, "num_attention_heads": 2, "num_key_value_heads": 1,
    "head_dim": 64, "intermediate_size": 64, "max_position_embeddings": 64, "vocab_size": 96,
}  # fmt: skip
TOWER = {
    "hidden_size": 32, "intermediate_size": 32, "num_hidden_layers": 1, "num_attention_heads": 2,
    "image_size": 28, "patch_size": 14, "depth": 1, "num_heads": 2, "out_hidden_size": 128,
    "fullatt_block_indexes": [0], "deepstack_visual_indexes": [0],
}  # fmt: skip


@pytest.mark.slow
@pytest.mark.parametrize("model_type", ["llava", "mistral3", "qwen2_5_vl", "qwen3_vl"])
def test_the_decoder_of_a_model_of_images_generates_text(model_type):
    from transformers import AutoConfig, AutoModelForImageTextToText

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
    assert engine.supports(config) == []
    torch.manual_seed(0)
    model = AutoModelForImageTextToText.from_config(config, attn_implementation="eager")
    model = model.to(torch.bfloat16).eval()
    own_tokens, own = generate(model, new=2)
    model.set_attn_implementation({"text_config": "narrowkv"})
    tokens, logits = generate(model, narrow_cache(model, format="bf16"), new=2)
    assert relative_l1(logits[0], own[0]) < 0.02  # both in bf16, with other roundings
    assert tokens == own_tokens


@pytest.mark.slow
def test_every_registered_decoder_is_answered_yes_or_with_a_reason():
    answers = engine.supported_architectures()
    assert len(answers) > 150
    assert all(isinstance(reason, str) and reason for reasons in answers.values() for reason in reasons)
    yes = {name for name, reasons in answers.items() if not reasons}
    assert {"llama", "qwen3", "qwen3_moe", "gpt_oss", "gemma2", "gemma3_text", "mistral", "mixtral"} <= yes
    no = {
        "cohere_compass_text": "makes no model of its configuration: KeyError",
        "deepseek_v3": "MLA",
        "deepseek_v4": "narrowkv-sparse",
        "llama4_text": "chunks",
        "bloom": "AttentionInterface",
        "gemma4_text": "head_dim is 512",
        "mamba": "keeps no keys and values",
        "whisper": "encoder",
        "mimo_v2_flash": "192 channels and values 128",
    }
    for name, reason in no.items():
        assert any(reason in answer for answer in answers[name]), (name, answers[name])


TEN = (
    "arcee",
    "cohere",
    "ernie4_5",
    "gemma",
    "glm",
    "granite",
    "hunyuan_v1_dense",
    "olmo2",
    "phi3",
    "starcoder2",
)


def assert_generates_as_its_own_attention_does(model_type, options, *, pad):
    from transformers import AutoConfig, AutoModelForCausalLM

    config = AutoConfig.for_model(
        model_type, vocab_size=96, pad_token_id=0, bos_token_id=1, eos_token_id=2, **options
    )
    assert engine.supports(config) == []
    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_config(config, attn_implementation="eager").to(torch.bfloat16).eval()
    own_tokens, own = generate(model, new=2, pad=pad)
    model.set_attn_implementation("narrowkv")
    narrow = narrow_cache(model, format="bf16")
    tokens, logits = generate(model, narrow, new=2, pad=pad)
    assert any(layer.cache is not None for layer in narrow.narrow_layers)
    assert relative_l1(logits[0], own[0]) < 0.02  # both in bf16, with other roundings
    return tokens, own_tokens


SIZES = {
    "num_hidden_layers": 2, "hidden_size": 256, "num_attention_heads": 4, "num_key_value_heads": 2,
    "intermediate_size": 64, "max_position_embeddings": 64,
}  # fmt: skip


@pytest.mark.parametrize("model_type", TEN)
def test_an_architecture_that_is_answered_yes_generates(model_type):
    sizes = {**SIZES, "num_hidden_layers": 1, "head_dim": 64}
    tokens, own_tokens = assert_generates_as_its_own_attention_does(model_type, sizes, pad=4)
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


@pytest.mark.slow
@pytest.mark.parametrize("model_type", UNUSUAL)
def test_an_architecture_with_a_configuration_of_its_own_generates(model_type):
    assert_generates_as_its_own_attention_does(model_type, UNUSUAL[model_type], pad=0)


def test_float32_models_and_encoders_are_told_what_to_change():
    config = tiny_config("llama-3-tiny")
    config.dtype = torch.float32
    assert "dtype=torch.bfloat16" in " ".join(engine.supports(config))


class TestContinuousBatching:
    @staticmethod
    def generate(model):
        from transformers import GenerationConfig
        from transformers.generation.configuration_utils import ContinuousBatchingConfig

        prompts = [[5, 6, 7, 8, 9, 10, 11, 12, 13], [20, 21, 22, 23], [30, 31, 32, 33, 34, 35]]
        named_now = "page_size" in inspect.signature(ContinuousBatchingConfig).parameters
        pages = {"page_size" if named_now else "block_size": 16}
        out = model.generate_batch(
            prompts,
            generation_config=GenerationConfig(
                max_new_tokens=3, do_sample=False, eos_token_id=-1, pad_token_id=0
            ),
            continuous_batching_config=ContinuousBatchingConfig(num_blocks=8, max_batch_tokens=16, **pages),
        )
        assert [result.error for result in out.values()] == [None] * 3
        return [result.generated_tokens for result in out.values()]

    @pytest.fixture
    def counts(self, monkeypatch):
        found = Counter()
        references = {"paged_decode": paged_decode_reference, "batch_prefill": batch_prefill_reference}
        for name in ("append", "paged_decode", "batch_prefill"):
            operation = getattr(continuous, name)

            def call(*args, name=name, operation=operation, plan=None, **kwargs):
                if name == "append":
                    found[name, args[0].format.k] += 1
                    return operation(*args, **kwargs)
                found[name, args[1].format.k] += 1
                o = operation(*args, **kwargs, **({"plan": plan} if plan else {}))
                exact = references[name](*args, **kwargs, out_dtype=torch.float32)
                assert relative_l1(o.float(), exact) <= 0.002  # as for every 16-bit query
                return o

            monkeypatch.setattr(continuous, name, call)
        return found

    def test_the_engines_16_bit_cache_is_read_and_written_where_it_is(self, counts):
        continuous.register_continuous_batching()
        model = tiny_model("llama-3-tiny", num_layers=1)
        model.set_attn_implementation(continuous.NAME)
        self.generate(model)
        assert counts["append", "bf16"] == counts["batch_prefill", "bf16"] + counts["paged_decode", "bf16"]
        assert min(counts.values()) > 0

    def test_no_step_copies_the_engines_cache_or_reads_from_the_device(self):
        kernels = [(continuous, name) for name in ("append", "paged_decode", "batch_prefill", "plan_prefill")]
        found = []

        def watched(*args, **kwargs):
            with operators(*kernels) as seen:
                result = continuous.attend_paged(*args, **kwargs)
            found.append(set(seen))
            return result

        continuous.register_continuous_batching("fp8_e4m3fn", k_descale=0.05, v_descale=0.05)
        AttentionInterface.register(continuous.NAME, watched)
        model = tiny_model("llama-3-tiny", num_layers=1)
        model.set_attn_implementation(continuous.NAME)
        self.generate(model)
        # The lengths of last pages of one token each; the first step makes the views and their descales.
        assert len(found) > 1
        assert all(seen <= VIEWS | {"ones_like"} for seen in found[1:])

    def test_outputs_are_those_of_transformers_own_attention(self):
        errors = []

        def both(*args, **kwargs):
            o, _ = continuous.attend_paged(*args, **kwargs)
            own, _ = eager_paged_attention_forward(*args, **kwargs)
            errors.append(relative_l1(o.float(), own.float()))
            return o, None

        model = tiny_model("llama-3-tiny", num_layers=1)
        AttentionInterface.register(continuous.NAME, both)
        model.set_attn_implementation(continuous.NAME)
        self.generate(model)
        assert len(errors) >= 3
        assert max(errors) < 0.02  # both in bf16, with other roundings

    def test_the_engines_cache_is_stored_in_fp8(self, counts):
        continuous.register_continuous_batching("fp8_e4m3fn", k_descale=0.05, v_descale=0.05)
        model = tiny_model("llama-3-tiny", num_layers=1)
        model.set_attn_implementation(continuous.NAME)
        self.generate(model)
        assert {kind for _, kind in counts} == {"fp8_e4m3fn"}
        assert counts["append", "fp8_e4m3fn"] == sum(counts.values()) // 2

    def test_sliding_windows_and_unknown_formats_are_refused(self):
        model = tiny_model("gpt-oss-tiny")
        model.set_attn_implementation(continuous.NAME)
        with pytest.raises(AssertionError, match="ring of its sliding window"):
            self.generate(model)
        with pytest.raises(ValueError, match="fp8_e4m3fn"):
            continuous.register_continuous_batching("fp4_e2m1")


def test_starts_of_rows_and_of_their_padding():
    starts, counts = rows.interleaved_starts(torch.tensor([[0, 0, 0], [1, 1, 1], [1, 0, 0], [0, 1, 1]]))
    assert starts.tolist() == [0, 3, 3, 3, 6, 6, 7, 10, 12, 12]
    assert counts.tolist() == [0, 3, 1, 2]
