"""Commands of `narrowkv` in this process, and a small contract to ask about."""

from __future__ import annotations

import json
from collections.abc import Callable
from typing import Any

from typer.testing import CliRunner, Result

from narrowkv.cli.app import app
from narrowkv.testing.operation import Contract, Shape
from narrowkv.testing.operations import PAGED_DECODE as DECODE

SHAPE = Shape(batch=2, q_len=1, context=48, num_qo_heads=24, num_kv_heads=2, head_dim=64)
SMALL_BENCH = "bench decode --batch 1,2 --context 32 --page-size 16 --num-kv-heads 1 --head-dim 64"
FP8 = Contract(DECODE, "bf16", "fp8_e4m3fn", "fp8_e4m3fn", 16, 0.002)


def narrowkv(line: str, *more: object, ends: int = 0) -> Result:
    """Runs a command line, with further arguments, which must end with an exit code."""
    result = CliRunner().invoke(app, [*line.split(), *map(str, more)])
    if result.exception is not None and not isinstance(result.exception, SystemExit):
        raise result.exception
    assert result.exit_code == ends, result.output
    return result


def document(line: str, *more: object, ends: int = 0) -> Any:
    """The JSON document of a command, which is all that it writes to stdout."""
    return json.loads(narrowkv(line, "--json", *more, ends=ends).stdout)


def counted(work: Callable[..., Any], most: int | None = None) -> tuple[Callable[..., Any], list[Any]]:
    """`work`, and a list that gets the arguments of each call; Ctrl-C follows `most` calls."""
    done: list[Any] = []

    def run(*arguments: Any, **options: Any) -> Any:
        if len(done) == most:
            raise KeyboardInterrupt
        done.append(arguments)
        return work(*arguments, **options)

    return run, done
