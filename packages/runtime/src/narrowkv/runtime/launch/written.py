"""The one place that makes functions of source which was written for them."""

from __future__ import annotations

from collections.abc import Sequence
from functools import lru_cache
from types import CodeType
from typing import Any

import torch

_INT32_MAX = 2**31 - 1


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


class Specialisation:
    """What Triton specialises kernels on, of arguments that a written function knows by name.

    Attributes:
        parts: expressions of the key.
        addresses: lines that read the addresses of tensors.
        missing: conditions that hold if a tensor has no memory.
    """

    def __init__(self, *, storage_sizes: bool) -> None:
        self.parts = dict[str, None]()  # each once, in order; so are the others
        self.addresses, self.missing = dict[str, None](), dict[str, None]()
        self._aligned, self._ints = dict[str, None](), dict[str, None]()
        self._storage_sizes = storage_sizes

    def pack(self, name: str, value: Any, by_value: bool = True, by_alignment: bool = True) -> str:
        """The expression of an argument as a launcher takes it, with an address in place of a tensor.

        Args:
            name: of the argument; value: one that it has.
            by_value: whether the kernel is specialised on it; by_alignment: and on being a multiple of 16.
        """
        if isinstance(value, torch.Tensor):
            address = f"_p_{name}"
            self.addresses[f"{address} = {name}.data_ptr()"] = self.missing[f"not {address}"] = None
            if by_value and by_alignment:
                self._aligned[address] = None
            if by_value and self._storage_sizes:
                self.parts[f"{name}.untyped_storage().nbytes() <= {_INT32_MAX}"] = None
            return address
        if type(value) is int:
            self._ints[name] = None
            if by_value:
                self.parts[f"{name} == 1"] = None
            if by_value and by_alignment:
                self.parts[f"{name} & 15 == 0"] = None
        return name

    def key(self) -> str:
        """The expression of a tuple that is equal for arguments that specialise alike."""
        # The usual case of all arguments together first: all are aligned, all are from 0 to 2**31 - 1.
        parts = [*self.parts]
        if self._aligned:
            each = "".join(f"{address} & 15 == 0, " for address in self._aligned)
            parts.append(f"not ({' | '.join(self._aligned)}) & 15 or ({each})")
        if self._ints:
            narrow = [f"{name} >> 31 in (0, -1)" for name in self._ints]
            wide = "".join(f"{name} >> 31 in (0, -1) or ({name} >> 63 in (0, -1),), " for name in self._ints)
            parts.append(f"({' | '.join(self._ints)}) >> 31 and not ({' and '.join(narrow)}) and ({wide})")
        return f"({''.join(f'{part}, ' for part in parts)})"
