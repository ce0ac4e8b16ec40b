"""Decode over a shard of a sequence, whose query tokens have key ranges, as machine code for both targets."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from generated_code import assert_no_spills, both_targets

from narrowkv.attn_decode import merge_states, merge_states_reference, paged_decode, paged_decode_reference
from narrowkv.context_parallel import ShardLayout
from narrowkv.paged_cache import PagedKVCache, PageTable, pack_tree_mask
from narrowkv.runtime.launch import executing
from narrowkv.testing.cases.context_parallel import spread
from narrowkv.testing.cases.decode import DecodeCase, draw_tree
from narrowkv.testing.emulation import EmulateExecutor

pytestmark = pytest.mark.sampled(most=1)
WORST = (-(2**31), 2**31 - 1)
Results = tuple[torch.Tensor, torch.Tensor]


def emulate(target: str, call: Callable[[], Results]) -> Results:
    """What a call gives as machine code, watched for races and hazards; no kernel spills."""
    executor = EmulateExecutor(target, detect_hazards=True)
    with executing(executor):
        results = call()
    assert_no_spills([run.artifact for run in executor.runs])
    return results


def assert_attends(target: str, q: torch.Tensor, cache: PagedKVCache, table: PageTable) -> None:
    """Checks decode over a table against the reference."""
    o, lse = emulate(target, lambda: paged_decode(q, cache, table, return_lse=True))
    expected, expected_lse = paged_decode_reference(q, cache, table, return_lse=True)
    torch.testing.assert_close(o.float(), expected, rtol=2e-2, atol=2e-3)
    torch.testing.assert_close(lse, expected_lse, rtol=1e-4, atol=1e-4)


@both_targets
@pytest.mark.parametrize("q_len", [1, 3])
def test_key_ranges_machine_code(q_len: int, target: str) -> None:
    # The last sequence's ranges are wrong: they end with the sequence, and unused slots hold NaN.
    q, cache, table = DecodeCase.small(q_len=q_len, lens=(70, 130, 5), num_kv_heads=1, gqa_ratio=2).build()
    rows = [[(3, 40), (5, 41), (9, 60)][:q_len], [(20, 99), (21, 99), (21, 100)][:q_len], [WORST] * q_len]
    ranges = torch.tensor(rows, dtype=torch.int32)
    assert_attends(target, q, cache, table.with_key_ranges(ranges))


@both_targets
@pytest.mark.parametrize(("q_len", "ratio", "width"), [(3, 2, 32), (8, 9, 64)], ids=["16 rows", "128 rows"])
def test_a_tree_mask_machine_code(q_len: int, ratio: int, width: int, target: str) -> None:
    # The last sequence is shorter than the tree, high bits are set, and unused slots hold NaN.
    case = DecodeCase.small(lens=(70, q_len - 1), q_len=q_len, num_kv_heads=1, gqa_ratio=ratio)
    q, cache, table = case.build()
    seen = draw_tree("random", 2, q_len, torch.Generator().manual_seed(2))
    bits = pack_tree_mask(seen).long() | (-1 << q_len)
    masked = table.with_tree_mask(bits.to(torch.int32 if width == 32 else torch.int64))
    assert_attends(target, q, cache, masked)


@both_targets
def test_merge_states_with_sinks_machine_code(target: str) -> None:
    random = torch.Generator().manual_seed(4)
    o = torch.randn(3, 4, 2, 64, generator=random).transpose(1, 2)
    lse = torch.randn(3, 2, 4, generator=random) * 5
    lse[0, 0], lse[:, 1, 2] = -torch.inf, -torch.inf
    o[0, 0] = torch.nan
    sinks = torch.tensor([0.5, 30.0, -torch.inf, -3.0])
    merged, total = emulate(target, lambda: merge_states(o, lse, sinks=sinks, lse_base="2"))
    expected, expected_total = merge_states_reference(o, lse, sinks=sinks, lse_base="2")
    torch.testing.assert_close(merged, expected, rtol=1e-5, atol=1e-6)
    torch.testing.assert_close(total, expected_total, rtol=1e-5, atol=1e-5)


@both_targets
def test_every_rank_of_a_step_machine_code(target: str) -> None:
    """Each rank's attention over its shard and the merge of all, as `cp_paged_decode` launches them."""
    workload = DecodeCase(lens=(41, 3), q_len=2, num_kv_heads=1, gqa_ratio=2, page_size=4)
    q, cache, table = workload.build()
    expected, expected_lse = paged_decode_reference(q, cache, table, return_lse=True, window_left=20)

    def ranks() -> Results:
        parts = []
        for rank in range(3):
            layout = ShardLayout(3, rank, 2)
            shard = spread(cache, table, layout, page_size=4, own_pages=False, q_len=2, window_left=20)
            options = {"return_lse": True, "out_dtype": torch.float32}
            parts.append(paged_decode(q, shard.cache, shard.table.table, **options))
        return merge_states(*(torch.stack([part[i] for part in parts]) for i in range(2)))

    o, lse = emulate(target, ranks)
    torch.testing.assert_close(o, expected, rtol=2e-2, atol=2e-3)
    torch.testing.assert_close(lse, expected_lse, rtol=1e-4, atol=1e-4)
