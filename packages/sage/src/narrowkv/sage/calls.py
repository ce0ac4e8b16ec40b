"""A checked and prepared call of `attend` that can be repeated."""

from __future__ import annotations

from typing import Any, NamedTuple

import torch

from narrowkv.runtime.errors import byte_span
from narrowkv.sage.launch import Launched


def signature_of(
    q: torch.Tensor, out: torch.Tensor | None, lse: torch.Tensor | None, return_lse: bool
) -> Any:
    """The metadata that a call of `attend` is checked and prepared for, without keys and addresses."""
    try:
        return (
            type(q), q.shape, q.stride(), q.dtype, q.device, q.requires_grad and torch.is_grad_enabled(),
            None
            if out is None
            else (type(out), out.shape, out.stride(), out.dtype, out.device, out.requires_grad),
            None
            if lse is None
            else (type(lse), lse.shape, lse.stride(), lse.dtype, lse.device, lse.requires_grad),
            return_lse,
        )  # fmt: skip
    except AttributeError:
        return None  # the checks say which is no tensor


class Call(NamedTuple):
    """A checked and prepared call of `attend` over certain keys.

    Attributes:
        quantise, attend: its launches.
        spans: addresses of the keys and values.
        q_bytes, out_bytes: bytes that the query and the output span.
    """

    quantise: Launched
    attend: Launched
    spans: list[tuple[int, int]]
    q_bytes: int
    out_bytes: int

    def meets(self, q: torch.Tensor, out: torch.Tensor | None, lse: torch.Tensor | None) -> bool:
        """Whether a result may share memory with another tensor."""
        begin, end = q.data_ptr(), q.data_ptr() + self.q_bytes
        taken = [*self.spans, (begin, end)]
        if out is not None:
            begin = out.data_ptr()
            end = begin + self.out_bytes
            if any(begin < high and low < end for low, high in taken):
                return True
            taken.append((begin, end))
        if lse is not None:
            begin, end = byte_span(lse)
            return any(begin < high and low < end for low, high in taken)
        return False

    def run(
        self, q: torch.Tensor, out: torch.Tensor | None, lse: torch.Tensor | None, return_lse: bool
    ) -> torch.Tensor | tuple[torch.Tensor, torch.Tensor]:
        """Launches."""
        o = torch.empty(q.shape, dtype=q.dtype, device=q.device) if out is None else out
        if lse is None and return_lse:
            lse = torch.empty(q.shape[:-1], dtype=torch.float32, device=q.device)
        quantise, attend = self.quantise, self.attend
        quantise.launch(quantise.grid, (q, *quantise.after))
        results = (o,) if lse is None else (o, lse)
        attend.launch(attend.grid, (*attend.before, *results, *attend.after))
        return (o, lse) if return_lse and lse is not None else o
