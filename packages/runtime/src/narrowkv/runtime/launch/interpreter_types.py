"""Makes the interpreter's types cheap to build, to compare and to promote.

Each interpreted operation builds the type of its result and compares types. Triton's compiler does that once
for a kernel; the interpreter does it for every operation of every program, which takes longer than the
arithmetic. A kernel has few shapes and types, so what depends on those alone is found once and shared.
"""

from __future__ import annotations

from typing import Any

import numpy as np

# Numbers in the text of kernels, each in the shapes that it meets, that are kept.
MOST_CONSTANTS = 1 << 12
PLAIN = {bool, int, float, str, type(None)}


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
    shared: dict[int, tuple[Any, int, str]] = {}  # by the id of a shape that lives in `blocks`
    tensors: dict[int, tuple[Any, Any, Any]] = {}
    dtypes: dict[str, np.dtype[Any]] = {}
    promote, check_operands = semantic.computation_type_impl, semantic.binary_op_type_checking_impl
    has_size = interpreter._validate_np_data_size
    promoted: dict[tuple[Any, ...], Any] = {}
    fitting: dict[tuple[str, int], bool] = {}
    constants: dict[tuple[Any, ...], tuple[Any, Any]] = {}
    unwrap = tl.core._unwrap_if_constexpr

    def block(self: Any, element_ty: Any, shape: Any) -> None:
        known = shared.get(id(shape))
        if known is None:
            key = tuple([size.value if type(size) is constexpr else size for size in shape])
            known = blocks.get(key)
        if known is None:
            build_block(self, element_ty, shape)
            blocks[key] = shared[id(self.shape)] = self.shape, self.numel, f"<{self.shape}, "
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

    def computation_type(self: Any, a: Any, a_scalar: bool, b: Any, b_scalar: bool, divides: bool) -> Any:
        key = a.name, a_scalar, b.name, b_scalar, divides
        if key not in promoted:
            promoted[key] = promote(self, a, a_scalar, b, b_scalar, divides)
        return promoted[key]

    def operands(
        self: Any, lhs: Any, rhs: Any, allow_lhs_ptr: bool = False, allow_rhs_ptr: bool = False,
        arithmetic_check: bool = True, div_or_mod: bool = False,
    ) -> Any:  # fmt: skip
        rest = allow_lhs_ptr, allow_rhs_ptr, arithmetic_check, div_or_mod
        if type(lhs) is not tl.tensor:
            return check_operands(self, lhs, rhs, *rest)
        if type(rhs) is tl.tensor:
            # Tensors of one type are not converted, but for quotients of less than 32 bits.
            if lhs.dtype is rhs.dtype and type(lhs.dtype) is tl.dtype and not div_or_mod:
                return broadcast(self, lhs, rhs)
            return check_operands(self, lhs, rhs, *rest)
        if not rhs:  # 0.0 and -0.0 are equal
            return check_operands(self, lhs, rhs, *rest)
        shape = lhs.type.shape if lhs.type.is_block() else None
        key = type(rhs), rhs, lhs.dtype.name, id(shape), rest
        known = constants.get(key)
        if known is None:
            left, right = check_operands(self, lhs, rhs, *rest)
            if left is lhs and len(constants) < MOST_CONSTANTS:
                constants[key] = shape, right  # with the shape, whose id then stays its own
            return left, right
        return lhs, known[1]

    def unwrapped(value: Any) -> Any:
        kind = type(value)
        if kind is tl.tensor or kind in PLAIN:
            return value
        return value.value if kind is constexpr else unwrap(value)

    def fits(array: Any, type: Any) -> bool:
        key = type.name, array.itemsize
        if key not in fitting:
            fitting[key] = has_size(array, type)
        return fitting[key]

    tl.block_type.__init__ = block
    tl.tensor.__init__ = tensor
    tl.dtype.__eq__ = equal
    semantic.broadcast_impl_value = broadcast
    semantic.computation_type_impl = computation_type
    semantic.binary_op_type_checking_impl = operands
    interpreter._get_np_dtype = dtype
    interpreter._validate_np_data_size = fits
    tl.core._unwrap_if_constexpr = unwrapped


def call_builtins_directly(interpreter: Any) -> None:
    """Has the language's functions, once they are interpreted, called without Triton's check of `_semantic`.

    Args:
        interpreter: the copy's `triton.runtime.interpreter`, whose `_patch_lang` was not called yet.
    """
    semantic = interpreter.interpreter_semantic

    def patch(where: Any, name: str, member: Any, builder: Any, scope: Any) -> None:
        function = getattr(member, "__wrapped__", member)

        def call(*args: Any, **kwargs: Any) -> Any:
            kwargs["_semantic"] = semantic
            return function(*args, **kwargs)

        scope.set_attr(where, name, call)

    interpreter._patch_attr = patch
