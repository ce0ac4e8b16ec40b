"""What the decode tests share: one call against the reference, and a small all-pairs generator."""

from __future__ import annotations

import itertools
import math
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

import torch

from narrowkv.attn_decode import DecodePlan, paged_decode, paged_decode_reference, plan_decode
from narrowkv.attn_decode.workloads import DecodeWorkload

MAX_RELATIVE_L1 = 0.002
MAX_LSE_ERROR = 1e-3


def relative_l1(o: torch.Tensor, expected: torch.Tensor) -> float:
    return float((o.float() - expected).abs().sum() / expected.abs().sum().clamp_min(1e-30))


def assert_matches(
    o: torch.Tensor, lse: torch.Tensor, expected: torch.Tensor, expected_lse: torch.Tensor, why: str = ""
) -> None:
    """No NaN, o within the kernel error that the package promises, lse likewise (-inf where -inf is due)."""
    assert not bool(o.isnan().any()), f"{int(o.isnan().sum())} NaNs; {why}"
    assert relative_l1(o, expected) <= MAX_RELATIVE_L1, why
    torch.testing.assert_close(lse, expected_lse, rtol=0, atol=MAX_LSE_ERROR)


def with_config(plan: DecodePlan, **changes: Any) -> DecodePlan:
    """The plan with some of its configuration replaced."""
    return replace(plan, config=replace(plan.config, **changes))


def with_few_units(plan: DecodePlan, per_sequence: int = 2) -> DecodePlan:
    """An AMD plan has a unit for every wave that the chip holds; interpreting that many takes seconds."""
    if plan.config.split == "none" or plan.config.tiles_per_split:
        return plan
    return with_config(plan, num_units=min(plan.config.num_units, per_sequence * max(plan.shape.batch, 1)))


def check(
    workload: DecodeWorkload,
    device: str,
    plan: Mapping[str, Any] | None = None,
    config: Mapping[str, Any] | None = None,
    few_units: bool = False,
    **options: Any,
) -> torch.Tensor:
    """Runs with a poisoned output and compares o and lse with the reference; returns o."""
    q, cache, table = workload.build(device)
    out = torch.full(q.shape, math.nan, dtype=options.pop("out_dtype", q.dtype), device=device)
    made = with_config(plan_decode(q, cache, table, **(plan or {})), **(config or {}))
    if few_units:
        made = with_few_units(made)
    o, lse = paged_decode(q, cache, table, out=out, return_lse=True, plan=made, **options)
    expected, expected_lse = paged_decode_reference(q, cache, table, return_lse=True, **options)
    assert o.data_ptr() == out.data_ptr(), "the result goes where the caller said"
    assert_matches(o, lse, expected, expected_lse, f"{workload}; {made.explain()}")
    return o


def all_pairs(axes: Mapping[str, Sequence[Any]]) -> list[dict[str, Any]]:
    """Cases in which every two values of different axes meet at least once; greedy and deterministic."""
    names = list(axes)
    missing = {
        ((a, i), (b, j))
        for a, b in itertools.combinations(names, 2)
        for i in range(len(axes[a]))
        for j in range(len(axes[b]))
    }
    cases = []
    while missing:
        # Seed each case with a pair still missing, then give every other axis the value that covers most.
        (a, i), (b, j) = min(missing)
        chosen = {a: i, b: j}
        for name in names:
            if name in chosen:
                continue

            def gain(value: int, name: str = name, chosen: dict[str, int] = chosen) -> tuple[int, int]:
                met = sum(
                    tuple(sorted(((name, value), other), key=lambda p: names.index(p[0]))) in missing
                    for other in chosen.items()
                )
                return met, -((value + len(cases)) % len(axes[name]))

            chosen[name] = max(range(len(axes[name])), key=gain)
        missing -= {((a, chosen[a]), (b, chosen[b])) for a, b in itertools.combinations(names, 2)}
        cases.append({name: axes[name][chosen[name]] for name in names})
    return cases
