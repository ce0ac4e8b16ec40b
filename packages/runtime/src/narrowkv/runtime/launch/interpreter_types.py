"""Makes the interpreter's types cheap to build.

Each interpreted operation builds the type of its result and compares types. Triton's compiler does that once
for a kernel; the interpreter does it for every operation of every program, which takes longer than the
arithmetic. A kernel has few shapes, so what depends on a shape alone is built once and shared.
"""

from __future__ import annotations

from typing import Any

import numpy as np


def share_types(tl: Any, interpreter: Any) -> None:
    """Replaces constructors of the interpreter's private copy of Triton by ones that remember shapes.

    Args:
        tl: the copy's `triton.language`.
        interpreter: the copy's `triton.runtime.interpreter`.
    """
    constexpr, semantic = tl.constexpr, type(interpreter.interpreter_semantic)
    build_block, build_tensor = tl.block_type.__init__, tl.tensor.__init__
    equal_types, numpy_dtype = tl.dtype.__eq__, interpreter._get_np_dtype
    broadcast_tensors = semantic.broadcast_impl_value
    blocks: dict[tuple[int, ...], tuple[Any, int, str]] = {}
    tensors: dict[int, tuple[Any, Any, Any]] = {}
    dtypes: dict[str, np.dtype[Any]] = {}

    def block(self: Any, element_ty: Any, shape: Any) -> None:
        key = tuple([size.value if type(size) is constexpr else size for size in shape])
        known = blocks.get(key)
        if known is None:
            build_block(self, element_ty, shape)
            blocks[key] = self.shape, self.numel, f"<{self.shape}, "
            return
        self.element_ty = element_ty
        self.shape, self.numel, name = known
        self.name = f"{name}{element_ty}>"

    def tensor(self: Any, handle: Any, type: Any) -> None:
        shape = type.shape if type.is_block() else None
        known = tensors.get(id(shape))
        if known is None:
            build_tensor(self, handle, type)
            tensors[id(shape)] = shape, self.shape, self.numel  # with the shape, whose id then stays its own
            return
        self.handle, self.type, self.dtype = handle, type, type.scalar
        _, self.shape, self.numel = known

    def equal(self: Any, other: Any) -> bool:
        return self is other or equal_types(self, other)

    def dtype(type: Any) -> np.dtype[Any]:
        scalar = type.scalar
        if scalar.name not in dtypes:
            dtypes[scalar.name] = numpy_dtype(scalar)
        return dtypes[scalar.name]

    def broadcast(self: Any, lhs: Any, rhs: Any) -> tuple[Any, Any]:
        # Tensors of one shape share it, by `tensor`.
        return (lhs, rhs) if lhs.shape is rhs.shape else broadcast_tensors(self, lhs, rhs)

    tl.block_type.__init__ = block
    tl.tensor.__init__ = tensor
    tl.dtype.__eq__ = equal
    semantic.broadcast_impl_value = broadcast
    interpreter._get_np_dtype = dtype
