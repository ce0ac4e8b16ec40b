"""AITER's parameters, as tables of names and defaults."""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

__all__ = ["as_aiter"]

_REQUIRED = inspect.Parameter.empty


def as_aiter(
    required: str, keywords: dict[str, Any] | None = None, **defaults: Any
) -> Callable[[Callable[[Any], Any]], Callable[..., Any]]:
    """Gives a function AITER's parameters: the required ones by name, the others with their defaults.

    `keywords` are parameters that are passed by name only.
    """
    parameters = [
        inspect.Parameter(name, inspect.Parameter.POSITIONAL_OR_KEYWORD, default=default)
        for name, default in [*((name, _REQUIRED) for name in required.split()), *defaults.items()]
    ]
    parameters += [
        inspect.Parameter(name, inspect.Parameter.KEYWORD_ONLY, default=default)
        for name, default in (keywords or {}).items()
    ]
    signature = inspect.Signature(parameters)

    def wrap(function: Callable[[Any], Any]) -> Callable[..., Any]:
        @functools.wraps(function)
        def call(*args: Any, **kwargs: Any) -> Any:
            bound = signature.bind(*args, **kwargs)
            bound.apply_defaults()
            return function(SimpleNamespace(**bound.arguments))

        call.__signature__ = signature  # type: ignore[attr-defined]
        return call

    return wrap
