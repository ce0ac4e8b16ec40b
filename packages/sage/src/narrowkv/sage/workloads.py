"""Named shapes and seeded inputs of Sage attention; tests, the command line and examples draw from here."""

from __future__ import annotations

from dataclasses import dataclass

import torch

SageInputs = tuple[torch.Tensor, torch.Tensor, torch.Tensor, "torch.Tensor | None", "torch.Tensor | None"]


@dataclass(frozen=True)
class SageWorkload:
    """Inputs of one call.

    Attributes:
        q_lens, k_lens: tokens of each sequence; a dense batch wants all alike.
        num_kv_heads, gqa_ratio, head_dim: heads.
        dtype: bf16 or fp16.
        ragged: sequences one after the other with cu_seqlens, instead of a dense batch.
        data: "gaussian" is N(0, 1). "outlier" adds to K an offset on six channels and a component of rank
            four, which Q takes part in, and scales V's channels apart. "offset" adds to every channel of K, Q
            and V its own offset, K's four times the noise, as in the layers that smoothing was made for, and
            scales tokens apart.
    """

    q_lens: tuple[int, ...] = (150,)
    k_lens: tuple[int, ...] = (150,)
    num_kv_heads: int = 1
    gqa_ratio: int = 2
    head_dim: int = 64
    dtype: torch.dtype = torch.bfloat16
    ragged: bool = False
    data: str = "outlier"

    def build(self, device: torch.device | str = "cpu", seed: int = 0) -> SageInputs:
        """q, k, v, cu_seqlens_q, cu_seqlens_k; the last two None for a dense batch."""
        random = torch.Generator().manual_seed(seed)

        def normal(*sizes: int) -> torch.Tensor:
            return torch.randn(*sizes, generator=random)

        heads, dim = self.num_kv_heads * self.gqa_ratio, self.head_dim
        q = normal(sum(self.q_lens), heads, dim)
        k, v = (normal(sum(self.k_lens), self.num_kv_heads, dim) for _ in range(2))
        if self.data == "outlier":
            directions = normal(4, dim)
            k += normal(len(k), self.num_kv_heads, 4) @ directions * 0.5
            k[..., torch.randperm(dim, generator=random)[:6]] += torch.tensor(
                [12.0, -9.0, 7.0, -6.0, 5.0, -4.0]
            )
            q += 0.6 * directions[torch.randint(4, (len(q), heads), generator=random)]
            v *= torch.exp(0.5 * normal(dim))
        elif self.data == "offset":
            for x, size in ((q, 1.0), (k, 4.0), (v, 1.0)):
                x *= torch.exp(0.3 * normal(len(x), x.shape[1], 1))
                x += size * normal(x.shape[1], dim)
        q, k, v = (x.to(device, self.dtype) for x in (q, k, v))
        if self.ragged:
            starts = (
                torch.tensor([0, *lens]).cumsum(0).to(device, torch.int32)
                for lens in (self.q_lens, self.k_lens)
            )
            return q, k, v, *starts  # type: ignore[return-value]
        dense = [
            x.view(len(lens), lens[0], *x.shape[1:])
            for x, lens in zip((q, k, v), (self.q_lens, self.k_lens, self.k_lens), strict=True)
        ]
        return *dense, None, None  # type: ignore[return-value]
