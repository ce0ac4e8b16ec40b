"""Calls of the test kernels with exact results, for tests of results, of planted faults and of speed."""

from __future__ import annotations

from typing import Any

import emulator_kernels as kernels
import numpy as np
import torch
from emulator_support import emulate, nans

from narrowkv.cdna_emulator import Result

FP8 = {
    "e4m3fn": torch.float8_e4m3fn,
    "e5m2": torch.float8_e5m2,
    "e4m3fnuz": torch.float8_e4m3fnuz,
    "e5m2fnuz": torch.float8_e5m2fnuz,
}
NATIVE = {"gfx942": torch.float8_e4m3fnuz, "gfx950": torch.float8_e4m3fn}
E2M1 = [0, 0.5, 1, 1.5, 2, 3, 4, 6, -0.0, -0.5, -1, -1.5, -2, -3, -4, -6]
BF16_BOUND = 3 * 2**-9
"""bf16 P and O cost up to three roundings of 2^-9 of the largest value."""


class PagedDecode:
    """A paged decode with shuffled pages: `o` is the kernel's output, `want` its fp32 result."""

    def __init__(
        self, kv_dtype: Any, *, batch: int = 3, heads: int = 2, lengths: tuple[int, ...] = (70, 33, 1),
        fp8_qk: bool = False,
    ) -> None:  # fmt: skip
        dim, group, page = 128, 12, 16
        generator = torch.Generator().manual_seed(0)
        pages = -(-max(lengths) // page)
        table = torch.randperm(batch * pages, generator=generator).int().reshape(batch, pages)
        size = (batch * pages, page, heads, dim)
        k, v = (torch.randn(size, generator=generator).to(kv_dtype) for _ in range(2))
        q = torch.randn(batch, heads * group, dim, generator=generator).bfloat16()
        self.grid, self.group = (batch, heads), group
        self.o = nans(batch, heads * group, dim, dtype=torch.bfloat16)
        self.want = torch.empty(batch, heads * group, dim)
        self.arguments = {
            "q_ptr": q, "k_ptr": k, "v_ptr": v, "o_ptr": self.o, "table_ptr": table,
            "lens_ptr": torch.tensor(lengths).int(), "sm_scale": dim**-0.5, "stride_qb": heads * group * dim,
            "stride_qh": dim, "stride_kp": page * heads * dim, "stride_kt": heads * dim, "stride_kh": dim,
            "stride_tb": pages,
        }  # fmt: skip
        self.constants = {"GROUP": group, "BLOCK_N": 32, "D": dim, "PAGE": page, "FP8_QK": fp8_qk}
        for b, n in enumerate(lengths):
            keys, values = (x[table[b].long()].reshape(-1, heads, dim)[:n].float() for x in (k, v))
            query = (q[b].to(kv_dtype) if fp8_qk else q[b]).float().reshape(heads, group, dim)
            scores = torch.einsum("hgd,thd->hgt", query, keys) * dim**-0.5
            self.want[b] = torch.einsum("hgt,thd->hgd", scores.softmax(-1), values).reshape(-1, dim)

    def run(
        self, target: str, *, warps: int = 1, stages: int = 1, edit: Any = None, **options: Any
    ) -> Result:
        """Runs the kernel, its assembly changed by `edit`; `options` are those of the emulator's `run`."""
        constants = self.constants | {"STAGES": stages}
        return emulate(
            kernels.paged_decode, target, self.grid, self.arguments, constants, num_warps=warps, edit=edit,
            run_options=options,
        )  # fmt: skip

    def is_right(self, rows: Any = ...) -> bool:
        """Whether rows of the output are the result but for rounding."""
        got, want = self.o[rows].float(), self.want[rows]
        return bool((got - want).abs().max() < BF16_BOUND * want.abs().max())


class ScaledProduct:
    """`tl.dot_scaled` of a matrix `[m, k]` and one `[k, n]` in two formats, with a scale for 32 of k."""

    def __init__(self, formats: tuple[str, str], m: int, n: int, k: int) -> None:
        rng = np.random.default_rng(13)
        (a, a_value), (b, b_value) = (
            self._operand(rng, kind, rows, k) for kind, rows in zip(formats, (m, n), strict=True)
        )
        scales = [torch.from_numpy(rng.integers(120, 134, (r, k // 32)).astype(np.uint8)) for r in (m, n)]
        grown = [torch.exp2(s.double() - 127).repeat_interleave(32, 1) for s in scales]
        self.want = (a_value * grown[0]) @ (b_value * grown[1]).T
        self.c = nans(m, n)
        self.arguments = {
            "a_ptr": a, "a_scale_ptr": scales[0], "b_ptr": b.T.contiguous(), "b_scale_ptr": scales[1],
            "c_ptr": self.c,
        }  # fmt: skip
        pack = [2 if kind == "e2m1" else 1 for kind in formats]
        self.constants = {
            "M": m, "N": n, "K": k, "A_FORMAT": formats[0], "B_FORMAT": formats[1], "A_PACK": pack[0],
            "B_PACK": pack[1],
        }  # fmt: skip

    @staticmethod
    def _operand(rng: np.random.Generator, kind: str, rows: int, k: int) -> tuple[Any, Any]:
        """Stored numbers and their values."""
        if kind == "e2m1":
            codes = torch.from_numpy(rng.integers(0, 16, (rows, k)).astype(np.uint8))
            values = torch.tensor(E2M1, dtype=torch.float64)[codes.long()]
            return codes[:, ::2] | (codes[:, 1::2] << 4), values
        dtype = torch.float8_e4m3fn if kind == "e4m3" else torch.float8_e5m2
        stored = torch.from_numpy(rng.normal(size=(rows, k)).astype(np.float32)).to(dtype)
        return stored, stored.double()

    def run(self, *, warps: int = 4, edit: Any = None) -> Result:
        """Runs the kernel on gfx950."""
        return emulate(
            kernels.dot_scaled, "gfx950", (1,), self.arguments, self.constants, num_warps=warps, edit=edit
        )

    def is_right(self) -> bool:
        """Whether the output is the product."""
        return torch.allclose(self.c.double(), self.want, rtol=1e-6, atol=1e-4)
