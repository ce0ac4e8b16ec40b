"""The device memory of a prefill: widened keys, the order of tiles, partial results, counters."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property, partial
from itertools import accumulate
from typing import Any, NamedTuple

import torch

from narrowkv.attn_decode.kernels import PartialResults
from narrowkv.attn_prefill.kernels.arguments import Scratch
from narrowkv.attn_prefill.tiles import (
    PrefillConfig,
    PrefillShape,
)
from narrowkv.runtime.launch import Arg, Described, Part, Workspace, block_bytes
from narrowkv.runtime.launch.workspace import zeroed_counters

Blocks = dict[str, tuple[tuple[int, ...], torch.dtype]]


class LaunchMemory(NamedTuple):
    """Pointers and sizes of the memory that launches use.

    Attributes:
        scratch: widened keys, without their bounds; None where the cache is read in its pages.
        partials: partial results of splits, and their counters.
        descriptors: tensor descriptors of K and V of the scratch, or (None, None).
        tensors: every tensor by name.
    """

    scratch: Scratch | None
    partials: PartialResults
    descriptors: tuple[Any, Any]
    tensors: dict[str, torch.Tensor]


@dataclass(frozen=True)
class MemorySizes:
    """The sizes of a configuration's memory.

    Attributes:
        shape: the shape, or the largest that is served.
        config: the configuration.
        blocks: shapes and dtypes of everything but counters, by name.
        counters: how many counters of each kind; all are zero between launches.
    """

    shape: PrefillShape
    config: PrefillConfig
    blocks: Blocks
    counters: dict[str, int]

    @cached_property
    def rows(self) -> int:
        """Rows of scratch that a head has, 0 without scratch."""
        return self.blocks["k"][0][1] if "k" in self.blocks else 0

    @cached_property
    def num_bytes(self) -> int:
        """Bytes of everything but counters."""
        return block_bytes(list(self.blocks.values()))

    @cached_property
    def num_counters(self) -> int:
        """Counters of all kinds."""
        return sum(self.counters.values())

    @cached_property
    def arguments(self) -> dict[str, int]:
        """What a call that allocates its memory gives its launches besides `allocate`, by name."""
        found = {"rows": self.rows}
        begins = accumulate((block_bytes([block]) for block in self.blocks.values()), initial=0)
        found |= zip(map(_place_of, self.blocks), begins, strict=False)
        begins = accumulate((4 * count for count in self.counters.values()), initial=0)
        found |= zip(map(_place_of, self.counters), begins, strict=False)
        return found


def make_memory(memory_sizes: MemorySizes, workspace: Workspace) -> LaunchMemory:
    """Memory in a workspace."""
    blocks, counts = memory_sizes.blocks, memory_sizes.counters
    tensors = dict(zip(blocks, workspace.carve(list(blocks.values())), strict=True))
    if counts:
        counters = workspace.counters(memory_sizes.num_counters)
        tensors |= zip(counts, torch.split(counters, list(counts.values())), strict=True)
    config, descriptors = memory_sizes.config, (None, None)
    if config.tma and "k" in tensors:
        descriptors = (_descriptor(config, tensors["k"]), _descriptor(config, tensors["v"]))
    return memory_of(memory_sizes, tensors, memory_sizes.rows, descriptors)


def allocate(memory_sizes: MemorySizes, device: torch.device) -> dict[str, torch.Tensor | None]:
    """Memory of one call: a block of bytes, and counters; see `MemorySizes.arguments`."""
    block = torch.empty(memory_sizes.num_bytes, dtype=torch.uint8, device=device)
    total = memory_sizes.num_counters
    # The launch that fills the scratch leaves flags for the one that attends: no other call may share them.
    if not total:
        counters = None
    elif "factor_flag" in memory_sizes.counters:
        counters = torch.zeros(total, dtype=torch.int32, device=device)
    else:
        counters = zeroed_counters(total, device)
    return {"block": block, "counters": counters}


def allocated(memory_sizes: MemorySizes) -> LaunchMemory:
    """Placeholders for memory that a call allocates: the values are those of `allocate` and `arguments`."""
    tensors = {
        name: Part(Arg("block"), Arg(_place_of(name)), dtype)
        for name, (_, dtype) in memory_sizes.blocks.items()
    }
    for name in memory_sizes.counters:
        tensors[name] = Part(Arg("counters"), Arg(_place_of(name)), torch.int32)
    rows, descriptors = Arg("rows"), (None, None)
    if memory_sizes.config.tma and "k" in tensors:
        shape = memory_sizes.shape
        make_k, make_v = (
            partial(_described_rows, memory_sizes.config, shape.num_kv_heads, head_dim)
            for head_dim in (shape.head_dim, shape.v_dim)
        )
        descriptors = (  # type: ignore[assignment]
            Described(tensors["k"], rows, make_k), Described(tensors["v"], rows, make_v)
        )  # fmt: skip
    return memory_of(memory_sizes, tensors, rows, descriptors)


def _place_of(name: str) -> str:
    return f"{name}_begin"


def _described_rows(config: PrefillConfig, heads: int, head_dim: int, part: torch.Tensor, rows: int) -> Any:
    """The descriptor of `rows` rows of each head at the beginning of this memory."""
    return _descriptor(config, part[: heads * rows * head_dim].view(heads, rows, head_dim))


def memory_of(
    memory_sizes: MemorySizes, tensors: dict[str, Any], rows: Any, descriptors: Any
) -> LaunchMemory:
    """Kernel arguments of these tensors, or of their placeholders."""
    part = tensors.get
    scratch = None
    if "k" in tensors:
        scratch = Scratch(
            tensors["k"], tensors["v"], part("k_factor"), part("v_factor"),
            part("k_block_factor"), part("v_block_factor"), part("factor_flag"), tensors["schedule"],
            rows, None, None,
        )  # fmt: skip
    # Kernels that do not split are compiled without.
    splits = memory_sizes.config.num_splits > 1 or memory_sizes.config.kernel == "split"
    partials = PartialResults(*(part(name) if splits else None for name in ("acc", "ml", "arrived")))
    return LaunchMemory(scratch, partials, descriptors, tensors)


def _descriptor(config: PrefillConfig, stored: torch.Tensor) -> Any:
    """How to copy tiles of `[heads, rows, head_dim]`."""
    if config.fallback is not None:
        from narrowkv.attn_prefill.kernels.pipelined_copies import key_descriptor

        return key_descriptor(stored, config.block_n)
    from triton.tools.tensor_descriptor import TensorDescriptor

    rows = stored.view(-1, stored.shape[2])
    block = [config.block_n, power_of_two(stored.shape[2])]
    return TensorDescriptor(rows, list(rows.shape), list(rows.stride()), block)


def power_of_two(size: int) -> int:
    """The least power of two that is at least `size`."""
    return 1 << (size - 1).bit_length()


def key_type(q_dtype: torch.dtype, k_format: str) -> torch.dtype:
    """What keys are widened to: Q's 16-bit type unless it would round them; bytes for FP8 queries."""
    if q_dtype.itemsize == 1:
        return torch.uint8
    return {"bf16": torch.bfloat16, "fp16": torch.float16}.get(k_format, q_dtype)


FACTORS_OF_BLOCKS = ("bf16", "fp4_e2m1")
"""Formats of V whose blocks have a power of two beside them once they are float16."""


def has_v_factors(v_format: str, *, appends: bool, k_in_pages: bool) -> bool:
    """Whether blocks of V in the scratch have a factor; keys that stay in their pages need it."""
    return appends or k_in_pages or v_format in FACTORS_OF_BLOCKS


def append_blocks(shape: PrefillShape, size: int) -> int:
    """The most blocks of `size` new keys that an append has in one head."""
    return min(shape.num_tokens // size + shape.batch, shape.batch * -(-shape.max_q_len // size))


def scratch_rows(shape: PrefillShape, block: int, sequences: int, *, appends: bool) -> int:
    """The most rows of scratch that a head needs for the keys of `sequences` sequences."""
    return shape.scratch_rows(block, sequences) + (block * append_blocks(shape, block) if appends else 0)


def scratch_bytes(shape: PrefillShape, block: int, sequences: int, *, appends: bool) -> int:
    """Bytes of widened keys and values, two for each element, of the most rows that a call can have."""
    rows = scratch_rows(shape, block, sequences, appends=appends)
    return 2 * rows * shape.num_kv_heads * (shape.head_dim + shape.v_dim)
