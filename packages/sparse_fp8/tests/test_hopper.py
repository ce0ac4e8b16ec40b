"""Which calls go to the kernels for Hopper, and on a GPU what they compute."""

from __future__ import annotations

import math
from dataclasses import replace

import pytest
import torch

from narrowkv.runtime.launch import executing
from narrowkv.runtime.targets import device_target, get_target
from narrowkv.sparse_fp8 import (
    DSV4Rows,
    KVSource,
    config,
    operation,
    plan_sparse,
    sparse_prefill_reference,
)
from narrowkv.sparse_fp8.config import specialised_config, specialised_pays
from narrowkv.sparse_fp8.options import SparseArguments
from narrowkv.sparse_fp8.planner import query_format, suits_specialised
from narrowkv.testing.cases.sparse import WAYS_OF_SPECIALISED, SparseCase
from narrowkv.testing.checking import assert_agrees

W = SparseCase.small
SM90 = get_target("sm90")


def _takes_hopper(target="sm90", *, kernel="16bit", num_heads=64, tiles=4):
    """The configuration for Hopper if a call with so many tiles for each program takes it."""
    chosen = specialised_config(get_target(target), kernel=kernel, num_heads=num_heads)
    if chosen is None or chosen.family != "hopper":
        return None
    return chosen if specialised_pays(chosen, tiles) else None


def test_it_is_taken_where_it_was_measured_to_be_faster():
    assert _takes_hopper(tiles=1)
    assert _takes_hopper(kernel="fused", tiles=3)
    assert not _takes_hopper(kernel="fused", tiles=2)
    assert _takes_hopper(kernel="fused", num_heads=16, tiles=1)
    assert not _takes_hopper(num_heads=16, tiles=1)
    for target in ("gfx942", "gfx950", "cuda", "cpu"):
        assert not _takes_hopper(target)


@pytest.mark.parametrize("kernel", ["16bit", "fused"])
@pytest.mark.parametrize(
    ("heads", "block"), [(1, 16), (8, 16), (12, 16), (16, 16), (24, 32), (32, 32), (40, 64), (64, 64)]
)
def test_few_heads_have_a_kernel_that_pads_none(kernel, heads, block):
    few = _takes_hopper(kernel=kernel, num_heads=heads)
    assert few.block_h == block
    assert few.stages


# Tokens, heads, tiles of a token; splits at which the measured time is least, or within 3% of it.
@pytest.mark.parametrize(
    ("tokens", "heads", "tiles", "best"),
    [
        (128, 64, 32, {1}), (32, 64, 32, {4}), (32, 128, 32, {2}), (8, 64, 32, {8, 16}), (1, 64, 32, {16}),
        (32, 128, 8, {1}), (32, 16, 8, {2, 3, 4}), (8, 16, 8, {4, 8}), (1, 16, 8, {8}), (512, 64, 32, {1}),
    ],
)  # fmt: skip
def test_splits_are_those_that_were_measured_to_be_fastest(tokens, heads, tiles, best):
    chosen = specialised_config(SM90, kernel="fused", num_heads=heads)
    programs = tokens * chosen.head_blocks(heads)
    assert config.choose_splits(SM90, chosen, programs, tiles, tokens * heads * 2048) in best


def _suits(inputs, **changes):
    inputs = replace(inputs, **changes)
    formats = [None if source is None else source.bound.format for source in (inputs.prefix, inputs.extend)]
    mode = "fused" if any(rows is not None and rows.is_quantized for rows in formats) else "16bit"
    return suits_specialised(mode, SM90, query_format(inputs.q), *formats)


def test_what_it_can_read():
    for layout in ("bf16", "split", "packed584", "row512", "packed528", "record528"):
        assert _suits(W(layout=layout, extend_lens=(3, 1, 0, 2)).build())
    wide = W(layout="bf16").build()
    strided = torch.zeros(8, 520, dtype=torch.bfloat16)[:, :512]
    assert not _suits(wide, prefix=KVSource(strided, wide.prefix.indptr, wide.prefix.indices))
    narrow = W().build()
    assert not _suits(narrow, q=narrow.q.half())
    assert _suits(narrow, q=DSV4Rows.quantize(narrow.q, layout="row512"))
    bytes_and_scales = torch.zeros(8, 512, dtype=torch.uint8)
    rope = torch.zeros(8, 64, dtype=torch.bfloat16)
    for rows in (
        DSV4Rows.row512(bytes_and_scales, rope, scale_group=32),
        DSV4Rows.quantize(torch.zeros(8, 512), layout="packed584", page_size=1, padded=False),
    ):
        assert not _suits(narrow, prefix=KVSource(rows, narrow.prefix.indptr, narrow.prefix.indices))


def test_a_query_or_lists_that_it_cannot_read_go_to_the_plain_kernel():
    class Sm90:
        """Launches nothing; calls inside are planned as on a Hopper GPU."""

        target = SM90

        def launch(self, *_):
            raise AssertionError("launched")

    wide = W(layout="bf16", num_qo_heads=64, prefix_lens=(3,) * 132).build()
    with executing(Sm90()):
        plan = plan_sparse(num_qo_heads=64, prefix=wide.prefix.bound.format, device="cpu")

        def stages(q=wide.q, prefix=wide.prefix, out=wide.q):
            return plan._configuration(132, 256, plan._specialised_reads(SparseArguments(q, prefix), out))[
                0
            ].stages

        assert stages() == 2
        shifted = torch.zeros(wide.q.numel() + 1, dtype=wide.q.dtype)[1:].view(wide.q.shape)
        assert stages(q=shifted) == 0
        far_apart = torch.empty_strided(wide.q.shape, (512, 2**28, 1), dtype=wide.q.dtype, device="meta")
        assert stages(q=far_apart) == 0
        assert stages(out=far_apart) == 0
        lists = replace(wide.prefix, indices=wide.prefix.indices.long())
        assert stages(prefix=lists) == 0


@pytest.mark.gpu
@pytest.mark.parametrize("way", WAYS_OF_SPECIALISED)
@pytest.mark.parametrize("heads", [6, 8, 12, 16, 24, 32, 40, 64, 128])
def test_it_agrees_with_the_reference(way, heads, monkeypatch):
    if device_target("cuda").name != "sm90":
        pytest.skip("needs a Hopper GPU")
    case = SparseCase.for_specialised(way, heads)
    inputs = case.build("cuda")
    stages = []
    original = operation.prepare

    def noted(plan, chosen, *arguments):
        stages.append(chosen.stages)
        return original(plan, chosen, *arguments)

    monkeypatch.setattr(operation, "prepare", noted)
    # Also for the few tiles of these programs, for which the portable kernel is faster.
    monkeypatch.setattr("narrowkv.sparse_fp8.operation.specialised_pays", lambda *_: True)
    q = DSV4Rows.quantize(inputs.q, layout="split") if way == "fp8_q" else inputs.q
    out = torch.full(inputs.q.shape, math.nan, dtype=torch.float32, device="cuda")
    results = replace(inputs, q=q).call(attn_sink=inputs.attn_sink, out=out)
    assert len(stages) == 1
    assert stages[0] > 0
    options = {"attn_sink": inputs.attn_sink, "num_qo_heads": heads, "return_lse": True}
    expected = sparse_prefill_reference(q, inputs.prefix, inputs.extend, **options)
    empty = expected[1] == -math.inf
    assert bool(empty.any())
    assert not bool(results[0][empty].any())
    assert_agrees(results, expected, bound=0.004, lse_bound=0.004)
