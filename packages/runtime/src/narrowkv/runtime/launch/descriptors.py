"""Tensor descriptors that are encoded once, not in each launch.

Triton's launcher encodes every tensor descriptor that it is given, which takes longer than the rest of a
launch. Here the function that encodes runs once for a descriptor, and launches pass on what it returned.
"""

from __future__ import annotations

import copy
from collections.abc import Callable
from types import CellType, FunctionType
from typing import Any

# Encodes the descriptors of a launch, in the order of its arguments.
Encode = Callable[..., list[tuple[Any, ...]]]


def is_descriptor(value: object) -> bool:
    """Whether a kernel's argument is a tensor descriptor, of Triton or of Gluon."""
    return hasattr(value, "block_shape")


def encoder_of(compiled: Any, tail: tuple[Any, ...], args: tuple[Any, ...]) -> tuple[Any, Encode] | None:
    """The launcher that takes encoded descriptors, and the function that encodes them.

    Args:
        compiled: what Triton's compiler returned, for a kernel without scratch memory.
        tail: the constants that follow the arguments.
        args: arguments of a launch, the descriptors not within a tuple.

    Returns:
        None where no argument is a descriptor, or Triton does not encode in the way that is known here.
    """
    outer = compiled.run.launch
    places = [index for index, value in enumerate(args) if is_descriptor(value)]
    names = getattr(getattr(outer, "__code__", None), "co_freevars", ())
    if not places or "launcher" not in names:
        return None
    cells = outer.__closure__
    inner = cells[names.index("launcher")].cell_contents

    def encode(*descriptors: Any) -> list[tuple[Any, ...]]:
        given: list[Any] = [object() for _ in args]
        for place, descriptor in zip(places, descriptors, strict=True):
            given[place] = descriptor
        calls: list[tuple[Any, ...]] = []
        recording = CellType(lambda *everything: calls.append(everything))
        twin = copy.copy(compiled.run)
        twin.launch = FunctionType(
            outer.__code__,
            outer.__globals__,
            closure=tuple(
                recording if name == "launcher" else cell for name, cell in zip(names, cells, strict=True)
            ),
        )
        twin(1, 1, 1, 0, compiled.function, compiled.packed_metadata, None, None, None, *given, *tail)
        return _parts(calls[0], given, places)

    try:
        encode(*(args[place] for place in places))
    except LookupError:
        return None
    return inner, encode


def _parts(call: tuple[Any, ...], given: list[Any], places: list[int]) -> list[tuple[Any, ...]]:
    """The values that a launcher got in place of each descriptor.

    Raises:
        LookupError: something else than an encoding, sizes and strides.
    """
    flat, at = call[-1], 0
    if not isinstance(flat, tuple | list):
        raise LookupError("no arguments")
    found = []
    for index, value in enumerate(given):
        if index in places:
            length = 1 + 2 * len(value.shape)
            part = tuple(flat[at : at + length])
            if part[1:] != (*value.shape, *value.strides):
                raise LookupError("another encoding")
            found.append(part)
            at += length
        elif flat[at] is value:
            at += 1
        else:
            raise LookupError("another encoding")
    return found
