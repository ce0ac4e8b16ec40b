"""Rotary embedding of new tokens, and its tables as kernel arguments."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, NamedTuple

import torch

from narrowkv.paged_cache.kernels.append import RopePointers
from narrowkv.runtime.errors import (
    check_choice,
    check_dtype,
    check_index_vector,
    check_instance,
    check_last_dim_contiguous,
    check_no_grad,
    check_same_device,
    check_shape,
    spans_of,
)
from narrowkv.runtime.launch import named_values
from narrowkv.runtime.operation import ByIdentity, metadata_of

FLOATS = (torch.bfloat16, torch.float16, torch.float32)


@dataclass(frozen=True, eq=False)
class Rope:
    """Rotary embedding of K on its way into the cache, and of Q beside it.

    Attributes:
        cos, sin: `[max_position, rotary_dim / 2]` bf16, fp16 or fp32, of equal strides, the last dimension
            contiguous: the halves of an engine's one table will do.
        positions: `[tokens]` int32 or int64, any stride: the position of each new token. One outside
            `[0, max_position)` is an error under `validate`, otherwise it is taken as the nearest inside.
        style: "neox" (the halves of the rotary dims are partners) or "gptj" (neighbours are).
    """

    cos: torch.Tensor
    sin: torch.Tensor
    positions: torch.Tensor
    style: str = "neox"

    @property
    def rotary_dim(self) -> int:
        """Leading dims that are rotated; the rest pass through."""
        return 2 * int(self.cos.shape[1])

    def tensors(self) -> dict[str, torch.Tensor]:
        """Its tensors by the names of messages."""
        return {"rope.cos": self.cos, "rope.sin": self.sin, "rope.positions": self.positions}


def check_rope(rope: Rope, head_dim: int, k_new: torch.Tensor, *, name: str = "k_new") -> None:
    """Refuses tables and positions that do not go with each other or with the new keys, called `name`."""
    check_instance("rope", rope, Rope)
    check_choice("rope.style", rope.style, ("neox", "gptj"))
    for name, table in (("rope.cos", rope.cos), ("rope.sin", rope.sin)):
        check_dtype(name, table, FLOATS)
        check_shape(name, table, ("max_position", "rotary_dim / 2"))
        check_last_dim_contiguous(name, table)
    check_shape("rope.sin", rope.sin, tuple(rope.cos.shape))
    if rope.cos.stride() != rope.sin.stride():
        raise ValueError(
            f"rope.sin must have the strides of rope.cos {rope.cos.stride()}, got {rope.sin.stride()}"
        )
    check_index_vector("rope.positions", rope.positions, k_new.shape[0])
    check_same_device(**{name: k_new}, cos=rope.cos, sin=rope.sin, positions=rope.positions)
    check_no_grad(cos=rope.cos, sin=rope.sin)
    if rope.rotary_dim > head_dim:
        raise ValueError(
            f"rope.cos must have at most head_dim / 2 = {head_dim // 2} columns, got {rope.cos.shape[1]}"
        )
    if rope.cos.shape[0] == 0:
        raise ValueError("rope.cos must have at least one position, got 0")


def rope_pointers(rope: Rope | None) -> RopePointers:
    """The tables of a rotary embedding as a kernel argument."""
    if rope is None:
        return RopePointers(None, None, None, 0, 0, 0)
    cos, positions = rope.cos, rope.positions
    return RopePointers(cos, rope.sin, positions, cos.stride(0), positions.stride(0), cos.shape[0])


def rope_constants(rope: Rope | None) -> dict[str, Any]:
    """The constants of a rotary embedding that a kernel is compiled with."""
    return {
        "ROTARY_DIM": 0 if rope is None else rope.rotary_dim,
        "INTERLEAVED": rope is not None and rope.style == "gptj",
    }


class BoundRope(NamedTuple):
    """A rotary embedding, or none, as a kernel argument.

    Attributes:
        kind: the same for all whose tensors have the same metadata, but for the number of tokens.
        tokens: how many there are.
        pointers, constants: as `rope_pointers` and `rope_constants` give them.
        spans: addresses that the tensors take.
        arguments: the tensors as values of a call, by name.
    """

    kind: int
    tokens: int
    pointers: RopePointers
    constants: dict[str, Any]
    spans: list[tuple[int, int]]
    arguments: dict[str, torch.Tensor]


BOUND_ROPES: ByIdentity[BoundRope] = ByIdentity()
BOUND_ROPES[id(None)] = BoundRope(-1, 0, rope_pointers(None), rope_constants(None), [], {})
_kinds: dict[Any, int] = {}


def bind_rope(rope: Rope) -> BoundRope:
    """The rotary embedding as a kernel argument; `BOUND_ROPES` has it from then on, and has that of None."""
    positions, pointers = rope.positions, rope_pointers(rope)
    kind = (
        rope.style, metadata_of(rope.cos), metadata_of(rope.sin), type(positions), positions.dtype,
        positions.stride(), positions.device,
    )  # fmt: skip
    bound = BoundRope(
        _kinds.setdefault(kind, len(_kinds)), positions.shape[0], pointers, rope_constants(rope),
        spans_of(rope.cos, rope.sin, positions), named_values("rope", pointers),
    )  # fmt: skip
    return BOUND_ROPES.keep(rope, bound)
