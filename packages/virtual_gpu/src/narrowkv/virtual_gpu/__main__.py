"""`python -m narrowkv.virtual_gpu`: build the compiled parts, empty their folder, list the chips."""

from __future__ import annotations

import argparse
import sys
from pathlib import Path

from . import build, watch
from .chips import CHIPS
from .errors import VirtualGpuError


def main(arguments: list[str] | None = None) -> int:
    """Runs one command; returns the exit status."""
    parser = argparse.ArgumentParser(prog="python -m narrowkv.virtual_gpu", description=__doc__)
    commands = parser.add_subparsers(dest="command", required=True)
    commands.add_parser("build", help="compile the parts in C and C++ now")
    commands.add_parser("clean", help="remove the cache folder, and the emulator's")
    commands.add_parser("chips", help="list the chips")
    watching = commands.add_parser("watch", help="what another Triton changes for a file of cases")
    add = watching.add_argument
    add("cases", type=Path, help="Python file with functions case_*; see narrowkv.virtual_gpu.watch")
    add("--triton", nargs=2, required=True, metavar="TRITON", help="two versions, wheels or folders")
    add("--target", nargs="+", default=list(watch.TARGETS), choices=watch.TARGETS)
    add("--tolerance", type=float, default=1e-2, help="relative difference of equal results")
    add("--json", action="store_true", help="print one JSON document")
    options = parser.parse_args(arguments)
    command = options.command
    if command == "watch":
        return _watch(options)
    if command == "clean":
        for folder, size in build.clean().items():
            print(f"{folder}: {size} bytes removed")
    elif command == "chips":
        for chip in CHIPS.values():
            gigabytes = chip.memory_bytes >> 30
            print(f"{chip.name:<11} {chip.arch}  {chip.compute_units:>3} compute units  {gigabytes:>3} GiB")
    else:
        try:
            for library in (build.hip_runtime(), build.torch_device()):
                print(library)
        except VirtualGpuError as error:
            print(error, file=sys.stderr)
            return 1
    return 0


def _watch(options: argparse.Namespace) -> int:
    """Prints what changed; returns 1 if something became worse, 2 if it could not be compared."""
    try:
        folder = build.cache_folder() / "watch"
        changes = watch.watch(
            options.cases.resolve(), options.triton, folder, options.target, options.tolerance
        )
    except ValueError as error:
        print(error, file=sys.stderr)
        return 2
    print((watch.as_json if options.json else watch.table)(changes, options.triton))
    return int(any(change.worse for change in changes))


if __name__ == "__main__":
    sys.exit(main())
