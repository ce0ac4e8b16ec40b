"""The keywords of `sage_attention`: one list for the call, the plan, the reference and the operator."""

from __future__ import annotations

from typing import Any, NamedTuple, TypedDict

import torch

from narrowkv.sage.shapes import QuantizedKV


class SagePlanOptions(TypedDict, total=False):
    """Keywords that a plan is made for: of `plan_sage`, and of `sage_attention`.

    Attributes:
        qk_dtype: what Q and K are multiplied in: "int8" (the default), "int4" or "fp8" (E4M3 of the target's
            kind).
        q_granularity, k_granularity: tokens that share a descale: "per_tensor", "per_block" (128), "per_warp"
            (Q 32, K 64) or "per_thread" (the default: Q 4, K 16; interleaved, see `narrowkv.quant.sage`).
        causal: None, "top_left" (query i stands at key i) or "bottom_right" (the last query stands at the
            last key): a query attends to keys up to where it stands, or as far as `window` says.
        window: `(left, right)`: keys before and after where a query stands that it attends to, -1 for all;
            with `causal` a right of -1 is 0. Without `causal`, queries stand bottom-right. The masks
            `t:128,30` and `b:128,30` of composable-kernel's example are
            `causal="top_left", window=(128, 30)` and `causal="bottom_right", window=(128, 30)`; its `xt:n`
            and `xb:n` are those with `window=(n // 2, n - 1 - n // 2)`.
        layout: of dense q, k, v and the output: "BSHD" `[batch, seq, heads, head_dim]`, as FlashAttention and
            AITER have it (the default), or "BHSD" `[batch, heads, seq, head_dim]`, as PyTorch's SDPA has it.
        smooth_k: subtract K's mean over each sequence before quantising (the default). Only the error
            changes; lse is corrected.
        smooth_q: also subtract Q's mean over each 128 tokens and add its scores back; for int4, at the price
            of fp32 scratch `[num_qo_heads, q_len / 128, k_len]` a sequence.
        sm_scale: softmax scale, not negative; default `head_dim ** -0.5`.
        block_sizes: queries and keys of a block of `block_mask`, multiples of 128 and 64. For a call with a
            mask (128, 128) if left out; a plan without them is for calls without a mask.
    """

    qk_dtype: str
    q_granularity: str
    k_granularity: str
    causal: str | bool | None
    window: tuple[int, int] | None
    layout: str
    smooth_k: bool
    smooth_q: bool
    sm_scale: float | None
    block_sizes: tuple[int, int] | None


class SageAttendOptions(TypedDict, total=False):
    """Keywords of `SagePlan.attend`, and of `SagePlan.run` and `sage_attention`.

    Attributes:
        cu_seqlens_q: where sequences of different lengths begin, int32 or int64 `[batch + 1]`; None takes the
            plan's.
        out: where to write, like q; bf16 or fp16.
        lse: where to write the log-sum-exp, fp32, shaped like q without head_dim. It is returned only with
            `return_lse`.
        return_lse: also return the log-sum-exp.
        block_mask: which blocks of keys each block of queries attends to, `[batch, num_qo_heads,
            ceil(q_len / block_sizes[0]), ceil(k_len / block_sizes[1])]`, bool, uint8, int8 or int32, any
            strides: 0 masks a block, anything else shows it to the extent that `causal` and `window` do.
            Masked blocks are not read. Its values may change between calls of a plan. With cu_seqlens the
            last two axes are blocks of the longest sequence, or fewer: blocks past them are masked.
        validate: also read cu_seqlens and refuse wrong values, which waits for the device. Otherwise a token
            belongs to the first sequence that claims it, and a sequence with an entry outside the tensor has
            no tokens: nothing is read or written outside the tensors. Tokens of no sequence have no result.
    """

    cu_seqlens_q: torch.Tensor | None
    out: torch.Tensor | None
    lse: torch.Tensor | None
    return_lse: bool
    block_mask: torch.Tensor | None
    validate: bool


class SageRunOptions(SageAttendOptions, total=False):
    """Keywords of `SagePlan.run`, and of `sage_attention`.

    Attributes:
        cu_seqlens_k: as `cu_seqlens_q`, of K and V.

    The other attributes are those of `SageAttendOptions`.
    """

    cu_seqlens_k: torch.Tensor | None


class SageOptions(SagePlanOptions, SageRunOptions, total=False):
    """Keywords of `sage_attention` and `sage_attention_reference`.

    Attributes:
        backend: "sage" quantises (the default); "auto" takes torch's attention in 16 bits for calls that it
            serves in less time, which is more accurate, too. `plan_sage(...).explain()` says which and why.

    The other attributes are those of `SagePlanOptions` and `SageRunOptions`.
    """

    backend: str


_ABSENT: Any = None


class SageArguments(NamedTuple):
    """The arguments of a call, with the values of those of `SageOptions` that are left out.

    `kv` takes the place of k and v in `SagePlan.attend`. Plans keep the keywords of `SagePlanOptions` in one
    without tensors.
    """

    q: torch.Tensor = _ABSENT
    k: torch.Tensor = _ABSENT
    v: torch.Tensor = _ABSENT
    cu_seqlens_q: torch.Tensor | None = None
    cu_seqlens_k: torch.Tensor | None = None
    out: torch.Tensor | None = None
    lse: torch.Tensor | None = None
    block_mask: torch.Tensor | None = None
    return_lse: bool = False
    # From here on: what a plan is made for.
    qk_dtype: str = "int8"
    q_granularity: str = "per_thread"
    k_granularity: str = "per_thread"
    causal: str | bool | None = None
    window: tuple[int, int] | None = None
    layout: str = "BSHD"
    smooth_k: bool = True
    smooth_q: bool = False
    sm_scale: float | None = None
    block_sizes: tuple[int, int] | None = None
    backend: str = "sage"
    # From here on: what prepared calls do not depend on.
    validate: bool = False
    kv: QuantizedKV | None = None

    @property
    def planned(self) -> dict[str, Any]:
        """The keywords that a plan is made for."""
        return dict(zip(self._fields[IN_CALL:IN_PLAN], self[IN_CALL:IN_PLAN], strict=True))


IN_CALL = SageArguments._fields.index("qk_dtype")  # what a plan's calls are prepared for comes before it
IN_PLAN = SageArguments._fields.index("backend")  # what plans are made for comes before it
OF_TENSORS = SageArguments._fields.index("return_lse")  # tensors come before it
IN_SIGNATURE = SageArguments._fields.index("validate")  # what calls depend on comes before it
PLAIN_VALUES = slice(OF_TENSORS, IN_SIGNATURE)
