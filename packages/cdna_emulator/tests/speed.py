"""Measure the emulator: wave instructions a second on a paged decode, by target, warps and batch.

Run it as ``python packages/cdna_emulator/tests/speed.py [--engines] [--context 512] [--repeat 3]``.
"""

from __future__ import annotations

import argparse
import time
from itertools import product

import emulator_kernels as kernels
import torch
from emulator_cases import BF16_BOUND, PagedDecode
from emulator_support import TARGETS, as_bytes, compile_kernel

from narrowkv.cdna_emulator import Memory, load_program, run


def main() -> None:
    """Print one line for each configuration: the best of the repeats."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--context", type=int, default=512)
    parser.add_argument("--repeat", type=int, default=3)
    parser.add_argument("--engines", action="store_true", help="only compare the engines")
    chosen = parser.parse_args()
    batch = 4
    case = PagedDecode(torch.float8_e4m3fn, batch=batch, heads=8, lengths=(chosen.context,) * batch)
    if chosen.engines:
        compare_engines(case, chosen.repeat)
        return
    print("target  warps  order            at once  wave instructions  seconds  a second")
    for target in TARGETS:
        for warps in (1, 4):
            case.run(target, warps=warps, workgroups=[(0, 0, 0)])  # compiles
            for order, at_once, check in (
                ("turns", 1, False), ("turns", 8, False), ("turns", 32, False), ("lockstep", 32, False),
                ("turns", 32, True),
            ):  # fmt: skip
                options = {"wave_order": order, "batch_workgroups": at_once, "check_uninitialised": check}
                if at_once == 1:  # a sample is enough
                    options["workgroups"] = [(b, 0, 0) for b in range(batch)]
                best = float("inf")
                for _ in range(chosen.repeat):
                    start = time.perf_counter()
                    result = case.run(target, warps=warps, **options)
                    best = min(best, time.perf_counter() - start)
                if not case.is_right((slice(None), slice(case.group))):
                    raise SystemExit(f"wrong result on {target} with {warps} warps: beyond {BF16_BOUND:.1e}")
                n = result.counts.wave_instructions
                name = order + (" checked" if check else "")
                print(
                    f"{target}  {warps:5d}  {name:15s}  {at_once:8d}  {n:17.0f}  {best:7.2f}  {n / best:8.0f}"
                )
    compare_engines(case, chosen.repeat)


def compare_engines(case: PagedDecode, repeat: int) -> None:
    """Print the CPU time of a wave instruction in each engine, without checks and without loading."""
    print("target  warps  engine    CPU ns for a wave instruction")
    for target, warps in product(TARGETS, (1, 4)):
        constants = case.constants | {"STAGES": 1}
        compiled = compile_kernel(kernels.paged_decode, target, case.arguments, constants, num_warps=warps)
        program = load_program(compiled.asm["amdgcn"], lds_bytes=compiled.metadata.shared)
        memory = Memory()
        args = [
            memory.map(as_bytes(value), name=name) if torch.is_tensor(value) else value
            for name in kernels.paged_decode.arg_names
            if (value := case.arguments.get(name)) is not None
        ]
        grid = (*case.grid, 1, 1)[:3]
        for engine, order in (("numpy", "lockstep"), ("compiled", "turns")):
            options = {"check_uninitialised": False, "wave_order": order, "engine": engine}
            run(program, grid=grid, args=args, memory=memory, **options)  # translates
            best = float("inf")
            for _ in range(repeat):
                start = time.process_time()
                result = run(program, grid=grid, args=args, memory=memory, **options)
                best = min(best, time.process_time() - start)
            print(f"{target}  {warps:5d}  {engine:8s}  {best / result.counts.wave_instructions * 1e9:8.1f}")


if __name__ == "__main__":
    main()
