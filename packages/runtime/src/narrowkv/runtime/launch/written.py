"""The one place that makes functions of source which was written for them."""

from __future__ import annotations

from collections.abc import Sequence
from functools import lru_cache
from types import CodeType
from typing import Any


@lru_cache(maxsize=1024)  # a model's warm-up asks for the same few functions hundreds of times
def _code(source: str) -> CodeType:
    return compile(source, f"{__file__} (written)", "exec")


def written(name: str, parameters: Sequence[str], body: Sequence[str], scope: dict[str, Any]) -> Any:
    """A function of these parameters, whose body is lines of Python.

    Args:
        name: of the function.
        parameters: names of its parameters.
        body: lines, indented as within a function at the left margin.
        scope: the global variables of the function.

    Example:
        >>> written("add", ("x",), ["return x + one"], {"one": 1})(2)
        3
    """
    lines = [f"def {name}({', '.join(parameters)}):", *(f"    {line}" for line in body)]
    exec(_code("\n".join(lines) + "\n"), scope)
    return scope[name]
