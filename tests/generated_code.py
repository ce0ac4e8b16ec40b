"""Calls compiled for AMD targets, each once in a process and without spills, or run as their machine code."""

from __future__ import annotations

import re
from functools import cache
from typing import Any

import pytest

from narrowkv.runtime.launch import executing
from narrowkv.runtime.launch.artifact import CompiledArtifact
from narrowkv.testing.checking import CaseResult, check
from narrowkv.testing.codegen import compile_call
from narrowkv.testing.emulation import EmulateExecutor

TARGETS = ("gfx942", "gfx950")
both_targets = pytest.mark.parametrize("target", TARGETS)


def assert_no_spills(artifacts: list[CompiledArtifact]) -> None:
    """Checks that no kernel spills vector registers, or scalars in the hot loop; each fits a compute unit."""
    assert artifacts
    for code in artifacts:
        registers = code.registers
        assert (registers.vgpr_spills, registers.scratch_bytes) == (0, 0), (code.name, registers)
        assert code.spills_in_loops == 0, code.name
        assert code.target.figures is not None
        assert code.lds_bytes <= code.target.figures.lds_bytes, code.name
        assert code.waves_per_simd >= 1, code.name


@cache
def compile_case(case: Any, target: str, *, lse: bool = False) -> list[CompiledArtifact]:
    """The kernels of a case's call, with lse or without, in the order of its launches; none spills."""
    inputs = case.inputs()
    artifacts = compile_call(target, inputs.call if lse else lambda: inputs.prepare()())
    assert_no_spills(artifacts)
    return artifacts


def emulate(
    case: Any, target: str, inputs: Any = None, *, bound: float | None = None
) -> tuple[CaseResult, list[CompiledArtifact]]:
    """Runs a case as machine code, watched for races and hazards, and compares it with the reference.

    Args:
        case: it.
        target: whose machine code runs.
        inputs: what the kernels get in place of the case's own, with which the results are compared.
        bound: of the relative L1 error, instead of the case's.

    Returns:
        How the case went, and the kernels in the order of their launches.
    """
    right = case.inputs()
    executor = EmulateExecutor(target, detect_hazards=True)
    with executing(executor):
        results = (inputs or right).call()
    assert sum(run.result.counts.mfma_flops for run in executor.runs) > 0
    return check(case, right, results, bound=bound), [run.artifact for run in executor.runs]


def stale_codes(code: list[tuple[int, str]]) -> list[str]:
    """Registers of FP8 codes that a loop of sm90 code widens before it packs them.

    No kernel carries packed codes from one pass of a loop to the next. ptxas 12.9 does where a product of
    warpgroups reads codes that are also widened again: the pass then widens those of the pass before.

    Args:
        code: the address and the text of each instruction.
    """
    place = {address: number for number, (address, _) in enumerate(code)}
    found = set()
    for number, (_, text) in enumerate(code):
        branch = re.search(r"\bBRA.*?0x([0-9a-f]+)$", text)
        begin = place.get(int(branch[1], 16), number) if branch else number
        packed: dict[str, bool] = {}
        first_read = set()
        for _, inside in code[begin : number + (begin < number)]:
            operation = re.sub(r"^@\S+\s+", "", inside)
            widened = re.match(r"F2FP\S*\.E[45]M[32]\.UNPACK_B\S* R\d+, (R\d+)", operation)
            if widened and widened[1] not in packed:
                first_read.add(widened[1])
            written = re.match(r"(\S+) (?:U?P\w+, )?R(\d+)", operation)
            if written:
                packs = bool(re.match(r"F2FP\S*\.E[45]M[32]\.F32\.PACK|PRMT .*, 0x7610, ", operation))
                last = int(written[2]) + (4 if ".128" in written[1] else 2 if ".64" in written[1] else 1)
                packed.update({f"R{register}": packs for register in range(int(written[2]), last)})
        found |= {register for register in first_read if packed.get(register)}
    return sorted(found)
