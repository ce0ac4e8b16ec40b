"""Named shapes and seeded inputs for tests, validation, benchmarks and examples."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from narrowkv.sparse_fp8.layouts import HEAD_DIM
from narrowkv.sparse_fp8.rows import DSV4Rows
from narrowkv.sparse_fp8.sources import KVSource

__all__ = ["SparseInputs", "SparseWorkload"]

_I32 = torch.int32


@dataclass(frozen=True)
class SparseInputs:
    """What a `SparseWorkload` builds.

    Attributes:
        q: bf16 or fp16 `[num_tokens, num_qo_heads, 512]`.
        prefix, extend: sources, or None.
        attn_sink: fp32 `[num_qo_heads]`.
    """

    q: torch.Tensor
    prefix: KVSource | None
    extend: KVSource | None
    attn_sink: torch.Tensor


@dataclass(frozen=True)
class SparseWorkload:
    """A sparse attention call to build.

    Attributes:
        prefix_lens: indices of each token into the pool; None for no prefix source.
        extend_lens: indices of each token into this forward's rows; None for no extend source.
        num_qo_heads: 8, 16, 32, 64 or 128.
        pool_rows: rows of the pool.
        extend_rows: rows of this forward.
        layout: "bf16", "fp16" or a `DSV4Rows` layout.
        page_size, padded: of packed584.
        skipped: share of the indices that are -1.
        q_dtype: bf16 or fp16.
        spread: standard deviation of the logits, about: above 3 the softmax is peaky.
        format: the FP8 format.
    """

    prefix_lens: tuple[int, ...] | None = (70, 0, 33, 64)
    extend_lens: tuple[int, ...] | None = None
    num_qo_heads: int = 16
    pool_rows: int = 256
    extend_rows: int = 64
    layout: str = "split"
    page_size: int = 64
    padded: bool = True
    skipped: float = 0.1
    q_dtype: torch.dtype = torch.bfloat16
    spread: float = 1.0
    format: str = "fp8_e4m3fn"

    @property
    def num_tokens(self) -> int:
        """Query tokens."""
        lens = self.prefix_lens if self.prefix_lens is not None else self.extend_lens
        return len(lens or ())

    def build(self, device: torch.device | str = "cpu", seed: int = 0) -> SparseInputs:
        """Inputs on `device`; rows that no index names are NaN, so that reading one shows."""
        generator = torch.Generator().manual_seed(seed)
        tokens, heads = self.num_tokens, self.num_qo_heads
        q = torch.randn(tokens, heads, HEAD_DIM, generator=generator) * self.spread
        sink = torch.linspace(-2.0, 3.0, heads)
        return SparseInputs(
            q.to(device, self.q_dtype),
            self._source(self.prefix_lens, self.pool_rows, generator, device),
            self._source(self.extend_lens, self.extend_rows, generator, device),
            sink.to(device),
        )

    def _source(
        self, lens: tuple[int, ...] | None, rows: int, generator: torch.Generator, device: torch.device | str
    ) -> KVSource | None:
        if lens is None:
            return None
        indptr = torch.tensor([0, *lens]).cumsum(0).to(_I32)
        nnz = int(indptr[-1])
        # Odd rows are never named.
        indices = torch.randint(0, max(rows // 2, 1), (nnz,), generator=generator) * 2
        indices[torch.rand(nnz, generator=generator) < self.skipped] = -1
        x = torch.randn(rows, HEAD_DIM, generator=generator)
        # Tiles of very different magnitude, so that a missing or exchanged scale changes the result.
        x[:, : HEAD_DIM - 64] *= torch.exp2(
            torch.randint(-3, 4, (rows, 7), generator=generator)
        ).repeat_interleave(64, -1)
        x[1::2] = float("nan")
        x = x.to(device)
        if self.layout in ("bf16", "fp16"):
            pool: torch.Tensor | DSV4Rows = x.to(torch.bfloat16 if self.layout == "bf16" else torch.float16)
        else:
            pool = DSV4Rows.quantize(
                x, layout=self.layout, page_size=self.page_size, padded=self.padded, format=self.format
            )
        return KVSource(pool, indptr.to(device), indices.to(device, _I32))
