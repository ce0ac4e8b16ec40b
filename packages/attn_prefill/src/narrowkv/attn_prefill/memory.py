"""The device memory of a prefill: widened keys, the order of tiles, partial results, counters."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property, partial
from itertools import accumulate
from typing import Any, NamedTuple

import torch

from narrowkv.attn_decode.kernels import PartialResults
from narrowkv.attn_prefill.kernels.arguments import Scratch
from narrowkv.attn_prefill.shapes import IN_PAGES, PrefillConfig, PrefillShape
from narrowkv.attn_prefill.tiles import most_work_items, partial_programs, tall_configs, tuned_as
from narrowkv.runtime.launch import Arg, Described, Part, Workspace, block_bytes
from narrowkv.runtime.launch.workspace import zeroed_counters
from narrowkv.runtime.targets import WARPGROUP_ROWS, Target

Blocks = dict[str, tuple[tuple[int, ...], torch.dtype]]
_COUNTER_ALIGNMENT = 64  # int32: counters of each kind begin at a multiple of this
_MOST_SPLITS = 32


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
    """The sizes of a configuration's memory, and what they depend on.

    Attributes:
        shape: the shape, or the largest that is served.
        config: the configuration.
        target: what it was chosen for.
        q_dtype: of the query; k_format, v_format: of the cache; per_key: see `widened_per_key`.
        appends: whether the call appends.
        num_splits: a number of splits that the caller forced, or None.
        sequences: a bound of the sequences whose keys are widened.
        exact: memory for this shape and configuration alone, not for any up to it.
    """

    shape: PrefillShape
    config: PrefillConfig
    target: Target
    q_dtype: torch.dtype
    k_format: str
    v_format: str
    per_key: tuple[bool, bool]
    appends: bool
    num_splits: int | None
    sequences: int
    exact: bool

    @cached_property
    def blocks(self) -> Blocks:
        """Shapes and dtypes of everything but counters."""
        shape, config, block = self.shape, self.config, self.config.scratch_block
        heads, found = shape.num_kv_heads, Blocks()
        if config.kernel not in IN_PAGES:
            rows = scratch_rows(shape, block, self.sequences, appends=self.appends)
            blocks = (heads, rows // block)
            found["k"] = (heads, rows, shape.head_dim), key_type(self.q_dtype, self.k_format)
            found["v"] = (heads, rows, shape.v_dim), torch.float16
            if self.per_key[0] or config.k_in_pages:
                found["k_factor"] = (heads, rows), torch.float32
            if self.per_key[1]:
                found["v_factor"] = (heads, rows), torch.float32
            if self.appends:
                found["k_block_factor"] = blocks, torch.float32
            if has_v_factors(self.v_format, appends=self.appends, k_in_pages=config.k_in_pages):
                found["v_block_factor"] = blocks, torch.float32
            found["schedule"] = (max(shape.row_tiles(self._least_rows), 1), 8), torch.int32
        rows = self._partial_rows()
        if rows:
            found["acc"] = (rows * power_of_two(shape.v_dim),), torch.float32
            found["ml"] = (rows * 2,), torch.float32
        return found

    @cached_property
    def counters(self) -> dict[str, int]:
        """How many counters of each kind; all are zero between launches."""
        shape, config = self.shape, self.config
        found = {}
        factors = has_v_factors(self.v_format, appends=self.appends, k_in_pages=config.k_in_pages)
        # Only the pipelined kernel looks at it, and puts it back to zero.
        if config.fallback is not None and factors:
            found["factor_flag"] = 2
        if self._partial_rows():
            # The pipelined kernel counts halves of a tile.
            if config.kernel == "split":
                return {"arrived": max(items for items, _ in self._split_items()) * shape.num_kv_heads}
            tiles = 2 * shape.row_tiles(self._least_rows) * shape.num_kv_heads
            most = 2 * partial_programs(self.target, 2)
            found["arrived"] = tiles if self.exact or self.num_splits else min(tiles, most)
        return found

    @property
    def names(self) -> tuple[str, ...]:
        """Names of all tensors."""
        return (*self.blocks, *self.counters)

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
        """Counters of all kinds, and the space between them."""
        return sum(_round_up_counters(count) for count in self.counters.values())

    @cached_property
    def has_flags(self) -> bool:
        """Whether a launch leaves the next one something among the counters."""
        return "factor_flag" in self.counters

    @cached_property
    def offsets(self) -> dict[str, int]:
        """Bytes before each tensor, by its name: in the block, or among the counters."""
        blocks = [block_bytes([block]) for block in self.blocks.values()]
        counters = [4 * _round_up_counters(count) for count in self.counters.values()]
        ends = (*accumulate(blocks), *accumulate(counters))
        sizes = blocks + counters
        return {name: end - size for name, end, size in zip(self.names, ends, sizes, strict=True)}

    @cached_property
    def arguments(self) -> dict[str, int]:
        """What a call that allocates its memory gives its launches besides `allocate`, by name."""
        return {"rows": self.rows} | {_place_of(name): at for name, at in self.offsets.items()}

    @property
    def _least_rows(self) -> int:
        """The fewest rows that a tile of rows can have."""
        return self.config.block_m if self.exact else 16

    def _split_items(self) -> list[tuple[int, int]]:
        """Partial results of a KV head and rows of each, of kernel "split" and of `kernels/tall.py`."""
        found = []
        formats = (self.k_format, self.v_format)
        for config in (self.config, *tall_configs(self.target, self.shape, self.config, formats).values()):
            rows = WARPGROUP_ROWS if config.is_tall else config.block_m  # a warpgroup has its own
            found.append((most_work_items(self.shape, config) * config.block_m // rows, rows))
        return found

    def _partial_rows(self) -> int:
        """Rows of partial results."""
        shape = self.shape
        if self.config.kernel == "split":
            return max(items * rows for items, rows in self._split_items()) * shape.num_kv_heads
        if self.exact:
            splits, block_m = self.config.num_splits, self.config.block_m
            return shape.row_tiles(block_m) * shape.num_kv_heads * splits * block_m if splits > 1 else 0
        rows = max(shape.row_tiles(m) * m for m in (16, 32, 64, 128)) * shape.num_kv_heads
        if self.num_splits is not None:
            return rows * self.num_splits if self.num_splits > 1 else 0
        splits = min(-(-shape.max_seq_len // 16) // 4, _MOST_SPLITS)
        # Tiles of 128 rows fill a multiprocessor of NVIDIA alone; two share a compute unit of AMD.
        largest = 128 if tuned_as(self.target).is_amd else 64
        return min(rows * splits, partial_programs(self.target, 2) * largest) if splits > 1 else 0


def make_memory(memory_sizes: MemorySizes, workspace: Workspace) -> LaunchMemory:
    """Memory in a workspace."""
    blocks, counts = memory_sizes.blocks, memory_sizes.counters
    tensors = dict(zip(blocks, workspace.carve(list(blocks.values())), strict=True))
    if counts:
        counters = workspace.counters(memory_sizes.num_counters)
        for name, count in counts.items():
            begin = memory_sizes.offsets[name] // 4
            tensors[name] = counters[begin : begin + count]
    config, descriptors = memory_sizes.config, (None, None)
    if config.tma and "k" in tensors:
        descriptors = (_descriptor(config, tensors["k"]), _descriptor(config, tensors["v"]))
    return memory_of(memory_sizes, tensors, memory_sizes.rows, descriptors)


def allocate(memory_sizes: MemorySizes, device: torch.device) -> dict[str, torch.Tensor | None]:
    """Memory of one call: a block of bytes, and counters; see `MemorySizes.offsets`."""
    block = torch.empty(memory_sizes.num_bytes, dtype=torch.uint8, device=device)
    total = memory_sizes.num_counters
    # The launch that fills the scratch leaves flags for the one that attends: no other call may share them.
    if not total:
        counters = None
    elif memory_sizes.has_flags:
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


def _round_up_counters(count: int) -> int:
    return -(-count // _COUNTER_ALIGNMENT) * _COUNTER_ALIGNMENT


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
