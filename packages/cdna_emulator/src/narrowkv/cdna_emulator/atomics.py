"""Read-modify-write operations of global memory and LDS, one lane after another.

Source: BUFFER_ATOMIC_*, GLOBAL_ATOMIC_* and DS_*_RTN in the CDNA3 ISA document.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from .state import Array

_WIDER: dict[Any, Any] = {np.uint32: np.uint64, np.int32: np.int64, np.float32: np.float64}


def _bf16_pair_sum(old: Any, data: Any) -> Any:
    from .formats import bf16_to_f32, f32_to_bf16

    x, y = (np.array([v], np.uint32).view(np.uint16) for v in (old, data))
    return f32_to_bf16(bf16_to_f32(x) + bf16_to_f32(y)).view(np.uint32)[0]


def _f16_pair_sum(old: Any, data: Any) -> Any:
    x, y = (np.array([v], np.uint32).view(np.float16) for v in (old, data))
    return (x + y).view(np.uint32)[0]


@dataclass(frozen=True)
class Atomic:
    """The element's type, the function ``(memory, data) -> memory``, and whether data holds a comparand."""

    dtype: Any
    function: Callable[[Any, Any], Any]
    compares: bool = False

    @property
    def size(self) -> int:
        """Bytes of an element."""
        return int(np.dtype(self.dtype).itemsize)

    def widened(self) -> Atomic:
        """The same operation on 64 bits."""
        return replace(self, dtype=_WIDER[self.dtype])


ATOMICS: dict[str, Atomic] = {
    "add": Atomic(np.uint32, np.add), "sub": Atomic(np.uint32, np.subtract),
    "swap": Atomic(np.uint32, lambda m, d: d),
    "cmpswap": Atomic(np.uint32, lambda m, d: d, compares=True),
    "smin": Atomic(np.int32, min), "smax": Atomic(np.int32, max), "umin": Atomic(np.uint32, min),
    "umax": Atomic(np.uint32, max), "and": Atomic(np.uint32, np.bitwise_and),
    "or": Atomic(np.uint32, np.bitwise_or),
    "xor": Atomic(np.uint32, np.bitwise_xor),
    "inc": Atomic(np.uint32, lambda m, d: m.dtype.type(0) if m >= d else m + m.dtype.type(1)),
    "dec": Atomic(np.uint32, lambda m, d: d if m == 0 or m > d else m - m.dtype.type(1)),
    "add_f32": Atomic(np.float32, np.add), "add_f64": Atomic(np.float64, np.add),
    "min_f64": Atomic(np.float64, np.fmin), "max_f64": Atomic(np.float64, np.fmax),
    "pk_add_f16": Atomic(np.uint32, _f16_pair_sum), "pk_add_bf16": Atomic(np.uint32, _bf16_pair_sum),
}  # fmt: skip

# LDS names of the same operations: ds_<name>_<type> and ds_<name>_rtn_<type>.
LDS_ATOMICS: dict[str, Atomic] = {
    "add_u32": ATOMICS["add"], "sub_u32": ATOMICS["sub"], "min_i32": ATOMICS["smin"],
    "max_i32": ATOMICS["smax"],
    "min_u32": ATOMICS["umin"], "max_u32": ATOMICS["umax"], "and_b32": ATOMICS["and"],
    "or_b32": ATOMICS["or"],
    "xor_b32": ATOMICS["xor"], "inc_u32": ATOMICS["inc"], "dec_u32": ATOMICS["dec"],
    "add_f32": ATOMICS["add_f32"],
    "min_f32": Atomic(np.float32, np.fmin), "max_f32": Atomic(np.float32, np.fmax),
    "add_u64": ATOMICS["add"].widened(), "add_f64": ATOMICS["add_f64"], "wrxchg_b32": ATOMICS["swap"],
    "wrxchg_b64": ATOMICS["swap"].widened(),
}  # fmt: skip


def apply_atomic(
    atomic: Atomic, memory: Array, offsets: Array, data: Array, comparand: Array | None
) -> Array:
    """Apply an atomic at element ``offsets`` of ``memory`` in order; returns what was there before each."""
    before = np.empty(len(offsets), memory.dtype)
    for lane, at in enumerate(offsets):
        old = memory[at]
        before[lane] = old
        if comparand is None:
            memory[at] = atomic.function(old, data[lane])
        elif old == comparand[lane]:
            memory[at] = data[lane]
    return before
