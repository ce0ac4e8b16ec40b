"""NarrowCache with first and newest tokens in FP8, against attention to tokens that torch quantises."""

from __future__ import annotations

import pytest
import torch
from engine_checks import attention
from transformers import AttentionInterface, AttentionMaskInterface

import narrowkv.engines.transformers as engine
from narrowkv.engines.tiny import tiny_model
from narrowkv.engines.transformers import NarrowCache
from narrowkv.engines.transformers.layers import LAYER_TAG
from narrowkv.engines.transformers.window import Window
from narrowkv.paged_cache import PageTable
from narrowkv.quant import Calibration, LayerCalibration, hadamard, relative_l1
from narrowkv.testing.recipes import StoredSide

FIRST, RECENT, PAD = 2, 3, 2
CHUNKS = (6, 1, 1, 2)
NEAR, FAR = StoredSide("fp8_e4m3fn", "fp32"), StoredSide("fp4_e2m1", "e4m3")
FORMAT = {"format": "fp4_e2m1", "scale_format": "e4m3"}


def stored_as(side, k, v, calibration):
    """K and V as the cache gives them back, in the units of the model."""
    if calibration is None:
        return side.store(k.float()), side.store(v.float())
    k, v = side.store(calibration.keys(k)), side.store(calibration.values(v))
    return hadamard(k) * calibration.k_balance + calibration.offset, v * calibration.v_balance


def oracle(calibration, apart_layers, dtype):
    """Attention in `dtype` that keeps the tokens of each row itself, and quantises them as they are seen."""
    history = {}

    def attend(module, query, key, value, attention_mask, scaling, sliding_window=None, s_aux=None, **_):
        layer = getattr(key, LAYER_TAG)
        layer.pending = None
        index, (batch, heads, tokens, dim) = module.layer_idx, query.shape
        own = None if calibration is None else calibration.layers[index]
        out = torch.zeros(batch, tokens, heads, dim)
        for b in range(batch):
            count = tokens if attention_mask is None else int(attention_mask[b, -tokens:].sum())
            new = [x[b, :, tokens - count :].transpose(0, 1) for x in (key, value)]
            before = history.get((index, b), [x[:0] for x in new])
            k, v = history[index, b] = [torch.cat(pair) for pair in zip(before, new, strict=True)]
            length, old = k.shape[0], before[0].shape[0]
            place = torch.arange(length)
            if index in apart_layers:
                near = (place < FIRST) | (place >= (length if tokens == 1 else old) - RECENT)
                sides, mixed = [stored_as(side, k, v, own) for side in (NEAR, FAR)], []
                for close, far, raw in zip(*sides, (k, v), strict=True):
                    x = torch.where(near[:, None, None], close, far)
                    # New tokens of a chunk see one another as they are.
                    mixed.append(torch.cat([x[:old], raw[old:].float()]) if tokens > 1 else x)
            else:
                mixed = stored_as(FAR, k, v, own)
            q = query[b, :, tokens - count :].transpose(0, 1)
            window = (sliding_window or 0) - 1
            o, _ = attention(q, *mixed, scaling, window=window, sinks=s_aux, dtype=dtype)
            out[b, tokens - count :] = o
        return out.to(query.dtype), None

    return attend


@torch.no_grad()
def logits_of(model, narrow, padded):
    """Logits of each step's last token: chunks of a prompt and single tokens, whatever the logits say."""
    ids = torch.randint(3, 90, (2, sum(CHUNKS)), generator=torch.Generator().manual_seed(1))
    mask = torch.ones_like(ids)
    mask[0, : PAD if padded else 0] = 0
    found, done = [], 0
    for count in CHUNKS:
        seen = mask[:, : done + count]
        out = model(
            ids[:, done : done + count], attention_mask=seen if padded else None, past_key_values=narrow,
            position_ids=(seen.cumsum(1) - 1).clamp(min=0)[:, done:], use_cache=True,
        )  # fmt: skip
        found.append(out.logits[:, -1].float())
        done += count
    return torch.stack(found)


def calibration_of(model, layers):
    random = torch.Generator().manual_seed(2)
    config = model.config
    shape = (config.num_key_value_heads, config.head_dim)

    def layer():
        balances = (0.5 + torch.rand(shape, generator=random) for _ in range(2))
        return LayerCalibration(torch.randn(shape, generator=random), *balances)

    return Calibration(tuple(layer() for _ in range(layers)))


@pytest.mark.parametrize(
    ("name", "calibrated", "padded"),
    [("llama-3-tiny", True, True), ("gpt-oss-tiny", False, False)],
)
def test_logits_are_those_of_attention_over_both_caches(name, calibrated, padded):
    engine.register()
    model = tiny_model(name, num_layers=2 if name == "gpt-oss-tiny" else 1)
    layers = model.config.num_hidden_layers
    calibration = calibration_of(model, layers) if calibrated else None
    apart = {1} if name == "gpt-oss-tiny" else set(range(layers))
    oracles = {
        "exact": (apart, torch.float32), "rounded": (apart, torch.bfloat16), "plain": (set(), torch.float32)
    }  # fmt: skip
    for oracle_name, (kept, dtype) in oracles.items():
        AttentionInterface.register(oracle_name, oracle(calibration, kept, dtype))
        AttentionMaskInterface.register(oracle_name, engine.padding_of)
    found = {}
    for implementation in ("narrowkv", *oracles):
        model.set_attn_implementation(implementation)
        narrow = NarrowCache(
            model.config, max_length=sum(CHUNKS), page_size=4, calibration=calibration, recent=RECENT,
            first=FIRST, **FORMAT,
        )  # fmt: skip
        found[implementation] = logits_of(model, narrow, padded)
    error, rounding, plain = (relative_l1(found[x], found["exact"]) for x in ("narrowkv", "rounded", "plain"))
    assert error <= 2 * rounding
    assert error < 0.5 * plain  # a cache without the window is further off


def test_slots_go_around_the_newest_and_tables_leave_them_out():
    pages = torch.arange(2 * 5, dtype=torch.int32).view(2, 5)
    lens = torch.zeros(2, dtype=torch.int32)
    window = Window(PageTable.from_block_table(pages, lens, page_size=4), FIRST, RECENT)
    first_slots = torch.tensor([0, 20], dtype=torch.int32)
    near_held, far_held = {}, {}
    for count in (4, 1, 1, 6, 1, 1):
        # Row 1 is one token behind: the first one of the first step is padding.
        slots = first_slots[:, None] + lens[:, None] + torch.arange(count, dtype=torch.int32)
        if not near_held:
            slots[1] = torch.tensor([-1, 20, 21, 22], dtype=torch.int32)
        tokens = slots - first_slots[:, None]
        lens += (slots >= 0).sum(1, dtype=torch.int32)
        near, far = window.slots(slots, first_slots, lens)
        window.set_lens(lens)
        for held, where in ((near_held, near), (far_held, far)):
            used = where[where >= 0].tolist()
            assert len(set(used)) == len(used)
            stored = [(row, token) for row in (0, 1) for token in tokens[row].tolist()]
            held.update((at, which) for at, which in zip(where.tolist(), stored, strict=True) if at >= 0)
        for row, length in enumerate(lens.tolist()):
            kept = [near_held[row * 5 + i] for i in range(int(window.near.seq_lens[row]))]
            left = [far_held[int(first_slots[row]) + i] for i in range(int(window.far.seq_lens[row]))]
            assert sorted(kept + left) == [(row, token) for token in range(length)]
            assert left == [(row, token) for token in range(FIRST, length - RECENT)]


@torch.no_grad()
def test_rows_are_chosen_in_both_caches_and_cropping_is_refused():
    engine.register()
    model = tiny_model("llama-3-tiny", attn_implementation="narrowkv", num_layers=1)
    narrow = NarrowCache(model.config, max_length=20, page_size=4, recent=RECENT, first=FIRST, **FORMAT)
    plain = NarrowCache(model.config, max_length=20, page_size=4, **FORMAT)
    ids = torch.randint(3, 90, (2, 9), generator=torch.Generator().manual_seed(1))
    for cache in (narrow, plain):
        model(ids, past_key_values=cache)
    (layer,) = narrow.narrow_layers
    held = [cache.k.view(torch.uint8).view(2, -1).clone() for cache in (layer.near, layer.cache)]
    narrow.reorder_cache(torch.tensor([1, 1]))
    for before, cache in zip(held, (layer.near, layer.cache), strict=True):
        assert torch.equal(cache.k.view(torch.uint8).view(2, -1), before[[1, 1]])
    with pytest.raises(ValueError, match="cannot forget tokens: use recent=0"):
        narrow.crop(-1)
    assert narrow.bytes() == plain.bytes() + 2 * 5 * 2 * (2 * 64 + 8)
