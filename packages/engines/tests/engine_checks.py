"""What the tests of every adapter compare with and watch: attention in plain torch, and narrowkv's calls."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass
from types import ModuleType
from typing import Any

import pytest
import torch

from narrowkv.attn_decode import paged_decode_reference
from narrowkv.attn_prefill import batch_prefill_reference
from narrowkv.paged_cache import PagedKVCache
from narrowkv.quant import relative_l1

REFERENCES = {"paged_decode": paged_decode_reference, "batch_prefill": batch_prefill_reference}
BF16 = 0.003  # relative L1 error of outputs in bf16

# Names of what engines ask their backends about.
CAPABILITY = re.compile(
    r"^(accept|can|folds|forward_includes|is|lse_base|needs?|prefers?|requires|skips|supports?|supported|use|uses)_"
    r"|_supported$|^_cudagraph_support$|_capped_by_|_captured_in_graph$"
)


def attention(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, sm_scale: float, *, window: int = -1,
    soft_cap: float = 0.0, sinks: torch.Tensor | None = None, hidden: torch.Tensor | None = None,
    dtype: torch.dtype = torch.float32,
) -> tuple[torch.Tensor, torch.Tensor]:  # fmt: skip
    """Attention of a sequence's last tokens to all of its keys.

    Args:
        q: `[tokens, heads, dim]`; k, v: `[keys, kv_heads, dim]`.
        window: keys before a token's own that it sees, or -1 for all.
        hidden: `[tokens, keys]`, which keys a token does not see; those after its own by default.
        dtype: of the products.

    Returns:
        `[tokens, heads, dim]` in `dtype`, and the log-sum-exp without the sinks, `[heads, tokens]`.
    """
    count, keys = q.shape[0], k.shape[0]
    k, v = (x.to(dtype).repeat_interleave(q.shape[1] // x.shape[1], 1) for x in (k, v))
    logits = torch.einsum("thd,shd->hts", q.to(dtype), k).float() * sm_scale
    if soft_cap:
        logits = soft_cap * torch.tanh(logits / soft_cap)
    place, key = torch.arange(keys - count, keys)[:, None], torch.arange(keys)
    hidden = key > place if hidden is None else hidden
    if window >= 0:
        hidden = hidden | (key < place - window)
    logits = logits.masked_fill(hidden, -torch.inf)
    lse = logits.logsumexp(-1)
    if sinks is not None:
        logits = torch.cat([logits, sinks.float()[:, None, None].expand(-1, count, 1)], -1)
    p = logits.softmax(-1)[..., :keys].to(dtype)
    return torch.einsum("hts,shd->thd", p, v), lse


def row_attention(q: torch.Tensor, rows: torch.Tensor, sm_scale: float, sinks: torch.Tensor) -> torch.Tensor:
    """Attention of one token `[heads, dim]` to rows `[rows, dim]` that are both keys and values."""
    pool = rows.float()[:, None]
    return attention(q[None], pool, pool, sm_scale, sinks=sinks, hidden=torch.tensor(False))[0][0]


@dataclass(frozen=True)
class Call:
    """A call of one of narrowkv's operations by an adapter."""

    name: str
    cache: PagedKVCache
    args: tuple[Any, ...]
    options: dict[str, Any]


class Calls(list[Call]):
    """Calls in their order."""

    @property
    def counts(self) -> dict[str, int]:
        """How often each operation ran."""
        return Counter(call.name for call in self)

    @property
    def memory(self) -> set[int]:
        """Addresses of the caches."""
        return {call.cache.k.data_ptr() for call in self}


def watch(
    monkeypatch: pytest.MonkeyPatch, *places: tuple[ModuleType, str], bound: float | None = None,
    look: Callable[[Call], object] = lambda call: None,
) -> Calls:  # fmt: skip
    """Collects the calls of operations where an adapter's modules look them up.

    Args:
        *places: modules and names.
        bound: the most that attention may differ from its reference, as a relative L1 error.
        look: is shown each call, while tensors hold what it was made with.
    """
    calls = Calls()
    for module, name in places:
        operation = getattr(module, name)

        def call(*args: Any, name: str = name, operation: Any = operation, **options: Any) -> Any:
            calls.append(Call(name, args[0 if name == "append" else 1], args, options))
            look(calls[-1])
            result = operation(*args, **options)
            if bound is not None and name in REFERENCES:
                plain = {key: value for key, value in options.items() if key not in ("out", "plan")}
                exact = REFERENCES[name](*args, **plain, out_dtype=torch.float32)
                assert relative_l1(result, exact) <= bound
            return result

        monkeypatch.setattr(module, name, call)
    return calls


def capabilities(*classes: type) -> dict[str, object]:
    """What classes of an engine's say that they can do, inherited or not.

    Returns:
        For each name of a capability its value, or "asked" for a method that takes arguments.
    """
    said: dict[str, object] = {}
    for each in classes:
        for name in filter(CAPABILITY.search, dir(each)):
            value = getattr(each, name)
            try:
                said[name] = value() if callable(value) else value
            except TypeError:  # of arguments that are missing
                said[name] = "asked"
    return said


def assert_same_greedy_tokens(found, reference):
    """The same tokens, up to one whose logit leads by less than what rounding changes."""
    (tokens, logits), (expected, exact) = found, reference
    error = (logits[0] - exact[0]).abs().max()  # of the first step, where both saw the same tokens
    best = exact.topk(2).values
    sure = (best[..., 0] - best[..., 1] > 2 * error).T.cumprod(1).bool()
    assert torch.equal(torch.tensor(tokens)[sure], torch.tensor(expected)[sure])
    assert sure.any(), "no token of the model leads by enough to compare"
