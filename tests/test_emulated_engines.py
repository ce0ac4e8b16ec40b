"""The emulator's two engines on the shipped kernels: the same bytes and the same counts."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from generated_code import both_targets

from narrowkv.cdna_emulator import Program, Result, run
from narrowkv.testing import emulation
from narrowkv.testing.operation import Contract
from narrowkv.testing.operations import contract_sets
from narrowkv.testing.probing import PASS, Task, run_task


def _on_both(program: Program, *, memory: Any, workgroups: Any = None, **options: Any) -> Result:
    """Run a launch in each engine on the same memory, and compare what they leave."""
    chosen = None if workgroups is None else list(workgroups)
    before = [buffer.data.copy() for buffer in memory.buffers]
    left = []
    for engine in ("numpy", "compiled"):
        for buffer, data in zip(memory.buffers, before, strict=True):
            buffer.data[...] = data
        result = run(
            program, grid=options["grid"], args=options["args"], memory=memory, workgroups=chosen,
            check_uninitialised=False, engine=engine,
        )  # fmt: skip
        left.append((result, [buffer.data.copy() for buffer in memory.buffers]))
    (first, expected), (second, found) = left
    assert first == second, program.kernel_name
    for buffer, one, other in zip(memory.buffers, expected, found, strict=True):
        assert np.array_equal(one, other), f"{program.kernel_name}: {buffer.name}"
    return second


CONTRACTS = [
    pytest.param(name, contract, id=f"{name} {number}")
    for name, contracts in contract_sets().items()
    for number, contract in enumerate(contracts.contracts)
]


@pytest.mark.sampled(most=4)
@both_targets
@pytest.mark.parametrize(("name", "contract"), CONTRACTS)
def test_both_engines_leave_the_same_bytes(
    name: str, contract: Contract, target: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """At the set's own shape, on a sample of workgroups."""
    monkeypatch.setattr(emulation, "run_program", _on_both)
    outcome = run_task(Task(contract, contract_sets()[name].shape, target=target, emulate=True))
    (answer,), _ = outcome
    assert answer.status == PASS, answer.detail
