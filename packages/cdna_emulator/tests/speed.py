"""Measure the emulator: wave instructions a second on a paged decode, by target, warps and batch.

Run it as ``python packages/cdna_emulator/tests/speed.py [--context 512] [--repeat 3]``.
"""

from __future__ import annotations

import argparse
import time

import torch
from emulator_kernels import paged_decode
from emulator_support import TARGETS, compile_kernel, emulate
from test_kernels import paged_case


def main() -> None:
    """Print one line for each configuration: the best of the repeats."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--context", type=int, default=512)
    parser.add_argument("--repeat", type=int, default=3)
    chosen = parser.parse_args()
    batch, heads = 4, 8
    arguments, constants, want = paged_case(
        torch.float8_e4m3fn, batch=batch, heads=heads, lengths=(chosen.context,) * batch
    )
    constants |= {"STAGES": 1}
    print("target  warps  order            at once  wave instructions  seconds  a second")
    for target in TARGETS:
        for warps in (1, 4):
            compile_kernel(paged_decode, target, arguments, constants, num_warps=warps)
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
                    result = emulate(
                        paged_decode,
                        target,
                        (batch, heads),
                        arguments,
                        constants,
                        num_warps=warps,
                        run_options=options,
                    )
                    best = min(best, time.perf_counter() - start)
                error = (arguments["o_ptr"][:, :12].float() - want[:, :12]).abs().max() / want.abs().max()
                if error > 3 * 2**-9:
                    raise SystemExit(
                        f"wrong result on {target} with {warps} warps: relative error {error:.1e}"
                    )
                n = result.counts.wave_instructions
                name = order + (" checked" if check else "")
                print(
                    f"{target}  {warps:5d}  {name:15s}  {at_once:8d}  {n:17.0f}  {best:7.2f}  {n / best:8.0f}"
                )


if __name__ == "__main__":
    main()
