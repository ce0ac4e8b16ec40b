"""Measure the emulator: wave instructions a second on a paged decode, by target, warps and batch.

Run it as ``python packages/cdna_emulator/tests/speed.py [--context 512] [--repeat 3]``.
"""

from __future__ import annotations

import argparse
import time

import torch
from emulator_cases import BF16_BOUND, PagedDecode
from emulator_support import TARGETS


def main() -> None:
    """Print one line for each configuration: the best of the repeats."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--context", type=int, default=512)
    parser.add_argument("--repeat", type=int, default=3)
    chosen = parser.parse_args()
    batch = 4
    case = PagedDecode(torch.float8_e4m3fn, batch=batch, heads=8, lengths=(chosen.context,) * batch)
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


if __name__ == "__main__":
    main()
