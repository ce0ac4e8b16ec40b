"""`python -m narrowkv.virtual_gpu`: build the compiled parts, empty their folder, list the chips."""

from __future__ import annotations

import argparse
import sys

from . import build
from .chips import CHIPS
from .errors import VirtualGpuError


def main(arguments: list[str] | None = None) -> int:
    """Runs one command; returns the exit status."""
    parser = argparse.ArgumentParser(prog="python -m narrowkv.virtual_gpu", description=__doc__)
    commands = parser.add_subparsers(dest="command", required=True)
    commands.add_parser("build", help="compile the parts in C and C++ now")
    commands.add_parser("clean", help="empty the cache folder")
    commands.add_parser("chips", help="list the chips")
    command = parser.parse_args(arguments).command
    if command == "clean":
        print(f"{build.cache_folder()}: {build.clean()} bytes removed")
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


if __name__ == "__main__":
    sys.exit(main())
