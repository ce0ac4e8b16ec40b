"""The indexer's top-k, column for column: ties, special values, bounds, launches, tables of pages."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from narrowkv.runtime.launch import executing
from narrowkv.runtime.targets import TARGETS
from narrowkv.sparse_fp8 import KVSource, sparse_prefill, sparse_prefill_reference
from narrowkv.sparse_fp8.indexer import index_topk, index_topk_reference, plan_index_topk
from narrowkv.sparse_fp8.indexer.topk import MOST_COLUMNS, levels_of
from narrowkv.testing.calls import LaunchRecorder
from narrowkv.testing.cases.topk import BOUNDS, VALUES, TopkCase, sweep
from narrowkv.testing.checking import check
from narrowkv.testing.memory_guards import CheckedInterpreter, GuardZones

pytestmark = pytest.mark.sampled

I32 = torch.int32


def assert_right(case: TopkCase, device: str) -> None:
    result = check(case, case.inputs(device))
    assert result.passed, f"{case}: {result.detail}"


@pytest.mark.parametrize("case", sweep(), ids=str)
def test_every_value_of_every_axis(case: TopkCase, device: str) -> None:
    assert_right(case, device)


@pytest.mark.parametrize("bounds", BOUNDS)
@pytest.mark.parametrize("values", VALUES)
@pytest.mark.parametrize("columns", [100, 5000, 20000, 300000])
def test_values_by_bounds_and_launches(columns: int, values: str, bounds: str, device: str) -> None:
    for topk in (7, 500):
        assert_right(TopkCase(columns=columns, topk=topk, values=values, bounds=bounds), device)


def test_of_equal_logits_the_lower_columns_are_chosen(device: str) -> None:
    row = torch.tensor([[1.0, 2.0, 1.0, -0.0, 0.0, 2.0, 1.0, 0.0]], device=device)
    for topk, expected in ((1, [1]), (3, [0, 1, 5]), (4, [0, 1, 2, 5]), (6, [0, 1, 2, 3, 5, 6])):
        assert index_topk(row, topk).tolist() == [expected]
    # Across chunks, too.
    far = torch.zeros(1, 40000, device=device)
    assert index_topk(far, 9000 % 4096).tolist() == [list(range(9000 % 4096))]


def test_infinity_is_a_logit_and_what_is_none_is_never_chosen(device: str) -> None:
    inf, nan = torch.inf, torch.nan
    row = torch.tensor([[nan, -inf, -3e38, inf, -nan, -1e-45, inf]], device=device)
    assert index_topk(row, 5).tolist() == [[2, 3, 5, 6, -1]]
    assert index_topk(row, 1).tolist() == [[3]]
    assert index_topk(torch.full((2, 9), -inf, device=device), 3).tolist() == [[-1] * 3] * 2


def test_an_empty_row_and_no_rows(device: str) -> None:
    assert index_topk(torch.zeros(2, 0, device=device), 3).tolist() == [[-1] * 3] * 2
    assert index_topk(torch.zeros(0, 9, device=device), 3).shape == (0, 3)


def test_rows_apart_lengths_of_either_integer_and_slots(device: str) -> None:
    case = TopkCase(columns=3000, topk=40, bounds="seq_lens", page_size=64)
    call = case.inputs(device)
    expected = call.topk()
    room = torch.full((case.tokens, 5000), torch.inf, device=device)
    room[:, :3000] = call.logits
    where: dict[str, Any] = {
        "seq_lens": torch.stack([call.where["seq_lens"].long()] * 2, -1)[:, 0],
        "block_table": call.where["block_table"].long().T.contiguous().T,
    }
    out = torch.full((case.tokens, 90), 7, dtype=I32, device=device)
    index_topk(room[:, :3000], 40, page_size=64, out=out[:, 3:43], **where)
    assert torch.equal(out[:, 3:43], expected)
    assert bool((out[:, :3] == 7).all())
    assert bool((out[:, 43:] == 7).all())
    slots = torch.randperm(3000, device=device)
    for numbers in (slots, slots.int()):
        chosen = index_topk(call.logits, 40, seq_lens=where["seq_lens"], slots=numbers)
        columns = index_topk(call.logits, 40, seq_lens=where["seq_lens"])
        assert torch.equal(chosen, torch.where(columns >= 0, slots[columns.clamp(min=0).long()].int(), -1))


def test_columns_beyond_a_table_that_is_too_narrow_have_no_row() -> None:
    logits = torch.arange(100.0)[None]
    table = GuardZones().place("block_table", torch.tensor([[5, 2, -1]], dtype=I32))
    with executing(CheckedInterpreter()):
        rows = index_topk(logits, 100, block_table=table, page_size=16)
    expected = [*range(80, 96), *range(32, 48), *[-1] * 68]
    assert rows.tolist() == [expected]


def test_the_result_is_an_index_list_of_sparse_attention(device: str) -> None:
    logits, topk = torch.randn(3, 64, device=device), 16
    logits[1, 5:] = -torch.inf
    chosen = index_topk(logits, topk)
    assert (chosen[1] >= 0).sum() == 5
    indptr = torch.arange(0, 3 * topk + 1, topk, dtype=I32, device=device)
    source = KVSource(torch.randn(64, 512, device=device).bfloat16(), indptr, chosen.view(-1))
    q = torch.randn(3, 8, 512, device=device).bfloat16()
    o, expected = sparse_prefill(q, source), sparse_prefill_reference(q, source)
    assert torch.allclose(o.float(), expected.float(), atol=0.02)


def test_a_plan_keeps_its_candidates_and_takes_smaller_calls(device: str) -> None:
    plan = plan_index_topk(topk=300, num_columns=70000, device=device, max_num_tokens=4)
    assert plan.workspace is not None
    assert plan.workspace_bytes() == plan.workspace.num_bytes > 0
    for tokens, columns in ((4, 70000), (1, 70000), (3, 20000), (2, 5)):
        logits = torch.randn(tokens, columns, device=device)
        expected = index_topk_reference(logits, 300)
        assert torch.equal(plan.run(logits), expected)
        assert torch.equal(index_topk(logits, 300, plan=plan), expected)
        assert torch.equal(index_topk(logits, 300), expected)
    assert "2 launches" in plan.explain()


def _as_v41_defines_it(logits: torch.Tensor, ends: torch.Tensor, topk: int, num_blocks: int) -> torch.Tensor:
    """Columns in blocks of 8 as transformers' DeepSeek-V4.1 chooses them: by a mask of blocks."""
    hidden = logits.masked_fill(
        torch.arange(logits.shape[1], device=logits.device) >= ends[:, None], -torch.inf
    )
    scores = torch.nn.functional.pad(hidden, (0, -logits.shape[1] % 8), value=-torch.inf)
    scores = scores.unflatten(-1, (-1, 8)).amax(-1)
    newest = torch.arange(scores.shape[1], device=logits.device) == (ends[:, None] - 1).div(
        8, rounding_mode="floor"
    )
    best = scores.masked_fill(newest, torch.inf).topk(num_blocks, -1)
    mask = torch.zeros_like(newest).scatter_(1, best.indices, best.values > -torch.inf)
    hidden = hidden.masked_fill(~mask.repeat_interleave(8, 1)[:, : logits.shape[1]], -torch.inf)
    chosen = hidden.topk(topk, -1)
    columns = torch.where(chosen.values > -torch.inf, chosen.indices, logits.shape[1]).sort(-1).values
    return torch.where(columns < logits.shape[1], columns, -1).to(I32)


def test_two_levels_choose_what_deepseek_v41_defines(device: str) -> None:
    logits = torch.randn(6, 1501, generator=torch.Generator().manual_seed(0)).to(device)
    later = torch.randn(6, 1501, generator=torch.Generator().manual_seed(1)).to(device)
    ends = torch.tensor([1501, 1496, 1497, 100, 3, 0], dtype=I32, device=device)
    blocks = index_topk(logits, 40, block_size=8, ends=ends)
    newest = (ends[:5] - 1) // 8
    assert bool((blocks[:5] == newest[:, None]).any(1).all()), "the newest block is always among them"
    assert blocks[5].tolist() == [-1] * 40
    own = index_topk(logits, 60, block_size=8, blocks=blocks, ends=ends)
    assert torch.equal(own, _as_v41_defines_it(logits, ends, 60, 40))
    # Layers after the first have logits of their own, and its blocks.
    found = index_topk(later, 60, block_size=8, blocks=blocks, ends=ends)
    assert torch.equal(found, index_topk_reference(later, 60, ends=ends, block_size=8, blocks=blocks))
    inside = torch.where(found >= 0, found // 8, -1)
    assert bool(((inside[:, :, None] == blocks[:, None]).any(2) | (found < 0)).all())


@pytest.mark.parametrize("dtype", [torch.int32, torch.int64])
def test_numbers_that_no_block_has_are_skipped(dtype: torch.dtype) -> None:
    numbers = [-(2**31), -1, 0, 3, 12, 13, 2**29 + 1, 2**31 - 1]  # eight times the last but one is 8 again
    if dtype == torch.int64:
        numbers += [2**32 + 1]
    blocks = GuardZones().place("blocks", torch.tensor([numbers], dtype=dtype))
    with executing(CheckedInterpreter()):
        chosen = index_topk(torch.zeros(1, 99), 30, block_size=8, blocks=blocks)
    assert chosen.tolist() == [[*range(8), *range(24, 32), 96, 97, 98, *[-1] * 11]]


def test_no_blocks_and_plans_with_blocks(device: str) -> None:
    logits = torch.randn(5, 24000, device=device)
    none = torch.zeros(5, 0, dtype=I32, device=device)
    assert bool((index_topk(logits, 3, block_size=8, blocks=none) == -1).all())
    plan = plan_index_topk(topk=70, num_columns=24000, device=device, max_num_tokens=5, block_size=8)
    inner = plan_index_topk(
        topk=30, num_columns=24000, device=device, max_num_tokens=5, block_size=8, num_blocks=70
    )
    assert plan.explain().startswith("2 launches: blocks of 8 columns")
    for tokens in (5, 2):
        blocks = plan.run(logits[:tokens], block_size=8)
        assert torch.equal(blocks, index_topk_reference(logits[:tokens], 70, block_size=8))
        chosen = index_topk(logits[:tokens], 30, block_size=8, blocks=blocks, plan=inner)
        assert torch.equal(chosen, index_topk_reference(logits[:tokens], 30, block_size=8, blocks=blocks))


def test_more_tokens_than_the_scratch_holds(device: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("narrowkv.sparse_fp8.indexer.topk._SCRATCH_BYTES", 2 * 3 * 300 * 8)
    plan = plan_index_topk(topk=300, num_columns=24000, device=device, max_num_tokens=5)
    assert plan.tokens_at_once == 2
    few = plan_index_topk(topk=30, num_columns=24000, device=device, max_num_tokens=5, block_size=32)
    assert few.tokens_at_once == 2
    for_few = torch.randn(5, 24000, device=device)
    assert torch.equal(few.run(for_few, block_size=32), index_topk_reference(for_few, 30, block_size=32))
    ends = torch.tensor([24000, 9000, 23, 0, 16385], dtype=I32, device=device)
    logits = torch.randn(5, 24000, device=device)
    assert torch.equal(plan.run(logits, ends=ends), index_topk_reference(logits, 300, ends=ends))


@pytest.mark.parametrize("target", ["gfx942", "gfx950", "sm90"])
def test_rows_of_128k_take_two_launches(target: str) -> None:
    recorder = LaunchRecorder(target)
    with executing(recorder):
        for columns in (16384, 65536, 131072):
            index_topk(torch.zeros(3, columns), 2048)
    assert [launch.grid[:2] for launch in recorder.launches] == [(3, 1), (3, 8), (3, 1), (3, 8), (3, 1)]
    for launch in recorder.launches:
        assert launch.options.num_warps * TARGETS[target].wave_size <= 1024


@pytest.mark.parametrize("topk", [1, 2048, 4096])
def test_launches_reach_any_width(topk: int) -> None:
    for columns in (1, 16384, 16385, 131072, 1 << 20, MOST_COLUMNS):
        *earlier, last = levels_of(columns, topk)
        width = columns
        for level in earlier:
            assert topk < level.block
            assert level.block * level.chunks >= width
            width = level.chunks * topk
        assert last.block >= width
        assert last.chunks == 1


def _select(**changes: Any) -> Any:
    arguments: dict[str, Any] = {"logits": torch.zeros(4, 100), "topk": 5, **changes}
    return index_topk(**arguments)


ONE, TABLE = torch.zeros(1, dtype=I32), torch.zeros(2, 9, dtype=I32)
WRONG: dict[str, tuple[dict[str, Any], str]] = {
    "logits in bf16": ({"logits": torch.zeros(4, 100).bfloat16()}, "logits must have dtype torch.float32"),
    "logits of one dimension": ({"logits": torch.zeros(4)}, "logits must have shape"),
    "columns apart": ({"logits": torch.zeros(4, 200)[:, ::2]}, "logits must have a contiguous last"),
    "none": ({"topk": 0}, "topk must be at least 1"),
    "too many": ({"topk": 4097}, "topk must be at most 4096"),
    "bounds of other tokens": ({"ends": ONE}, r"ends must have shape \[4\]"),
    "starts alone": ({"starts": torch.zeros(4, dtype=I32)}, "ends must be given with starts"),
    "lengths beside bounds": (
        {"ends": torch.zeros(4, dtype=I32), "seq_lens": ONE}, "seq_lens must be None beside starts and ends",
    ),
    "a table without a page size": ({"block_table": TABLE}, "block_table and page_size must both be given"),
    "a page size without a table": ({"page_size": 64}, "block_table and page_size must both be given"),
    "pages of no tokens": ({"block_table": TABLE, "page_size": 0}, "page_size must be at least 1"),
    "a table and slots": (
        {"block_table": TABLE, "page_size": 64, "slots": torch.zeros(100, dtype=I32)},
        "slots must be None beside",
    ),
    "slots of fewer columns": ({"slots": ONE}, r"slots must have shape \[100\]"),
    "three sequences of four tokens": (
        {"seq_lens": torch.zeros(3, dtype=I32)}, "seq_lens must have a row for each sequence",
    ),
    "a table of another batch": (
        {"seq_lens": ONE, "block_table": TABLE, "page_size": 64},
        "block_table must have a row for each sequence",
    ),
    "blocks without a size": ({"blocks": TABLE[:1]}, "block_size must be given with num_blocks"),
    "blocks of three columns": ({"block_size": 3}, "block_size must be a power of two up to 64"),
    "blocks of 128 columns": ({"block_size": 128}, "block_size must be a power of two up to 64"),
    "blocks of other tokens": ({"block_size": 8, "blocks": TABLE}, r"blocks must have shape \[4"),
    "blocks in bf16": ({"block_size": 8, "blocks": torch.zeros(4, 9).bfloat16()}, "blocks must have dtype"),
    "rows of blocks": (
        {"block_size": 8, "slots": torch.zeros(100, dtype=I32)}, "slots must be None where blocks are chosen",
    ),
    "an output of another width": ({"out": torch.zeros(4, 6, dtype=I32)}, r"out must have shape \[4, 5\]"),
    "an output in int64": ({"out": torch.zeros(4, 5, dtype=torch.int64)}, "out must have dtype torch.int32"),
}  # fmt: skip


@pytest.mark.parametrize("what", WRONG)
def test_what_is_wrong_is_refused(what: str) -> None:
    changes, message = WRONG[what]
    with pytest.raises((TypeError, ValueError), match=message):
        _select(**changes)


def test_plans_refuse_larger_calls_and_other_numbers() -> None:
    plan = plan_index_topk(topk=5, num_columns=100, device="cpu", max_num_tokens=4)
    with pytest.raises(ValueError, match="at most 4 tokens, got 5"):
        plan.run(torch.zeros(5, 100))
    with pytest.raises(ValueError, match="at most 100 columns, got 101"):
        plan.run(torch.zeros(4, 101))
    with pytest.raises(ValueError, match="topk must be 5 like the plan's, got 6"):
        _select(topk=6, plan=plan)
    with pytest.raises(ValueError, match="block_size must be None like the plan's, got 8"):
        _select(block_size=8, plan=plan)
    of_blocks = plan_index_topk(topk=5, num_columns=100, device="cpu", block_size=8, num_blocks=3)
    with pytest.raises(ValueError, match="blocks must be given only with a plan for some"):
        _select(block_size=8, plan=of_blocks)
    with pytest.raises(ValueError, match="blocks must have at most 3 columns, got 4"):
        _select(block_size=8, blocks=torch.zeros(4, 4, dtype=I32), plan=of_blocks)
    with pytest.raises(ValueError, match="num_blocks must be at most"):
        plan_index_topk(topk=5, num_columns=9, device="cpu", block_size=64, num_blocks=MOST_COLUMNS)
    with pytest.raises(ValueError, match="num_columns must be at most"):
        plan_index_topk(topk=5, num_columns=MOST_COLUMNS + 1, device="cpu")
    with pytest.raises(ValueError, match="workspace must be None without max_num_tokens"):
        plan_index_topk(topk=5, num_columns=9, device="cpu", workspace=plan.workspace)
