"""Shapes of prefills, and the configurations that are chosen for them."""

from __future__ import annotations

from dataclasses import dataclass, field, replace

import torch

from narrowkv.paged_cache.layouts import HeadShape
from narrowkv.runtime.launch import LaunchOptions

ANY_LEN = 2**31 - 1  # a bound of query tokens that no sequence exceeds
IN_PAGES = ("fused", "split")  # kernels that read the cache in its pages
SCRATCH_BLOCK = 64  # keys; each sequence's widened keys begin at a multiple of it
WIDE_HEAD = 256  # channels; wider heads have tiles of their own


def scratch_block(head_dim: int) -> int:
    """`SCRATCH_BLOCK`, or 16 keys of wide heads.

    A program that widens or stores 32 keys of 512 channels over FP4 spills: on sm90 200 bytes, on gfx942 19
    vector registers and 56 scalars.
    """
    return SCRATCH_BLOCK if head_dim <= WIDE_HEAD else 16


@dataclass(frozen=True)
class PrefillShape(HeadShape):
    """The sizes that a configuration depends on; all are known without reading the device.

    Attributes:
        batch, num_tokens: sequences, and query tokens of all of them.
        max_q_len: a bound of a sequence's query tokens.
        num_qo_heads, num_kv_heads, head_dim, page_size: sizes.
        max_seq_len: a bound of a sequence's keys.
        kv_tokens: a bound of all sequences' keys together.
        q_dtype: of the query.
        min_q_len: the fewest query tokens that sequences are expected to have: classes of fewer have no
            launches. Sequences that have fewer are served by those of the next class.
        v_head_dim: channels of V where they are fewer than those of Q and K, else 0; `v_dim` says how many.
    """

    batch: int
    num_tokens: int
    max_q_len: int
    num_qo_heads: int
    num_kv_heads: int
    head_dim: int
    page_size: int
    max_seq_len: int
    kv_tokens: int
    q_dtype: torch.dtype = torch.bfloat16
    min_q_len: int = 0
    v_head_dim: int = 0

    def of_any_sequence(self) -> PrefillShape:
        """The same heads, with a batch and bounds that do not depend on the call."""
        return replace(self, batch=1, num_tokens=64, max_q_len=64, max_seq_len=1, kv_tokens=1, min_q_len=0)

    def sequences_with(self, q_len: int) -> int:
        """The most sequences that can have at least `q_len` query tokens each."""
        return min(self.batch, self.num_tokens // max(q_len, 1)) if q_len > 1 else self.batch

    def row_tiles(self, block_m: int, most_len: int = ANY_LEN) -> int:
        """The most tiles of packed rows of one KV head, over sequences of at most `most_len` tokens."""
        if self.batch == 0:
            return 0
        ragged = (self.num_tokens * self.gqa_ratio + self.batch * (block_m - 1)) // block_m
        longest = min(self.max_q_len, most_len)
        return min(ragged, self.batch * -(-longest * self.gqa_ratio // block_m))

    def scratch_rows(self, block: int, sequences: int) -> int:
        """Rows of scratch for the keys of `sequences` sequences, in whole blocks."""
        tokens = min(self.kv_tokens, sequences * self.max_seq_len)
        blocks = min(tokens // block + sequences, sequences * -(-self.max_seq_len // block))
        return max(blocks, 1) * block


@dataclass(frozen=True)
class PrefillConfig:
    """How a prefill runs.

    Attributes:
        kernel: "dense" (widen once, then attend), "fused" (widen in the loop), "split" (the same in equal
            shares of all keys) or "decode"; of an append "append_then_attend" (as dense), "pipelined" (the
            same by Hopper's kernel), "fused" or "split".
        why: the reason, for people.
        block_m, block_n: rows and keys of a tile.
        own_n: of a fused append: keys of the chunk itself that a program attends to at once.
        num_splits: programs that share a tile's keys; of "split" those of a KV head that run at once.
        q_lens: the fewest and the most query tokens of the sequences that it serves.
        stores: whether its launches store the new tokens of an append.
        short_queries: configurations of launches before it, for sequences with fewer query tokens.
        fp8: the FP8 format of the matrix unit when Q is FP8, else None.
        tma: keys of the scratch come by tensor descriptor.
        overlap: P @ V of a key tile runs during the softmax of the next one.
        ahead: keys and values of a tile are loaded to registers while the tile before is multiplied.
        scratch_block: widened keys of a sequence begin at multiples of it.
        k_in_pages: K is copied out of its pages, where that can be done, and only V is widened.
        fallback: where `kernels/pipelined.py` attends, what does when the scale is not positive or queries
            are to be rotated; None where a plain kernel attends anyway.
        ping_pong: on gfx950 the configuration of `kernels/cdna.py`, for calls that it serves; else None.
        tall: on Hopper the configuration of `kernels/tall.py`, for calls that it serves; else None.
        is_tall: whether it is such a configuration.
        as_decode: the loop over pages is that of decode, whose loads the compiler pipelines.
        xcd_rows: tiles of rows that an XCD takes of a KV head before the next one, see `xcd_order`; 0 for the
            order of the launch.
        options: compiler options of the attention kernel.
    """

    kernel: str
    why: str
    block_m: int = 16
    block_n: int = 16
    own_n: int = 16
    num_splits: int = 1
    q_lens: tuple[int, int] = (0, ANY_LEN)
    stores: bool = True
    short_queries: tuple[PrefillConfig, ...] = ()
    fp8: str | None = None
    tma: bool = False
    overlap: bool = False
    ahead: bool = False
    scratch_block: int = SCRATCH_BLOCK
    k_in_pages: bool = False
    fallback: PrefillConfig | None = None
    ping_pong: PrefillConfig | None = None
    tall: PrefillConfig | None = None
    is_tall: bool = False
    as_decode: bool = False
    xcd_rows: int = 0
    options: LaunchOptions = field(default_factory=LaunchOptions)

    @property
    def reading(self) -> str:
        """How its kernels read the cache: a key of `BoundCache.readings`."""
        if self.kernel not in IN_PAGES:
            return "to_scratch"
        if self.is_tall:
            return "in_tall_tiles"
        return "in_large_tiles" if self.as_decode and self.block_m >= 64 else "in_loop"
