"""Sage attention planned once: what is quantised how, which configuration runs, a call's two steps."""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import Any

import torch

from narrowkv.quant.sage import TokenGroups
from narrowkv.runtime.errors import (
    byte_span,
    check_dtype,
    check_index_vector,
    check_instance,
    check_last_dim_contiguous,
    check_no_grad,
    check_no_overlap,
    check_same_device,
    check_shape,
)
from narrowkv.runtime.identity import ByIdentity
from narrowkv.runtime.launch import BoundLaunch, Workspace, block_bytes
from narrowkv.runtime.targets import Target
from narrowkv.sage.calls import Call, signature_of
from narrowkv.sage.checks import FLOATS, check_starts, dimensions
from narrowkv.sage.config import SageConfig
from narrowkv.sage.kernels import Mask
from narrowkv.sage.launch import SageLaunches
from narrowkv.sage.shapes import QuantizedKV, SageShape
from narrowkv.sage.sixteen_bit import attend as attend_in_16_bits
from narrowkv.sage.sixteen_bit import why_quantised

_MOST_CALLS = 256


@dataclass(frozen=True, eq=False)
class SagePlan:
    """A Sage attention up to one size, ready to quantise and to attend.

    Made by `plan_sage`. `quantize_kv` and `attend` make no host synchronisation, so both can be captured in a
    graph and replayed with other values and, if sequences are ragged, other lengths in the same tensors. Two
    plans are equal only if they are the same object.

    Attributes:
        target: what it was planned for.
        shape: the sizes of the largest call.
        qk_format: format of Q and K in scratch: "int8", "int4" or the target's FP8.
        q_groups, k_groups: which tokens share a descale; None for the whole tensor.
        bottom_right: the last query stands at the last key; else the first at the first.
        window_left, window_right: keys before and after a query's position that it attends to; -1 for all.
        smooth_k, smooth_q: which means are taken out.
        sm_scale: the softmax scale.
        config: the launch configuration.
        device: where it runs.
        layout: "BSHD" or "BHSD", of a dense batch.
        cu_seqlens_q, cu_seqlens_k: where sequences begin, unless a call says so; None for a dense batch.
        workspace: scratch of the queries and of statistics; None allocates it in each call.
    """

    target: Target
    shape: SageShape
    qk_format: str
    q_groups: TokenGroups | None
    k_groups: TokenGroups | None
    bottom_right: bool
    window_left: int
    window_right: int
    smooth_k: bool
    smooth_q: bool
    sm_scale: float
    config: SageConfig
    device: torch.device
    layout: str = "BSHD"
    cu_seqlens_q: torch.Tensor | None = None
    cu_seqlens_k: torch.Tensor | None = None
    workspace: Workspace | None = None
    _calls: ByIdentity[dict[Any, Call]] = field(default_factory=ByIdentity, init=False, repr=False)

    def __deepcopy__(self, memo: dict[int, object]) -> SagePlan:
        """A new plan over the same memory, whose addresses captured graphs hold."""
        return replace(self)

    @cached_property
    def launches(self) -> SageLaunches:
        """The kernels, bound to what the plan fixes."""
        return SageLaunches(
            self.shape, self.qk_format, self.q_groups, self.k_groups,
            Mask(self.bottom_right, self.window_left, self.window_right), self.smooth_k, self.smooth_q,
            self.sm_scale, self.config, self.device, self.workspace,
        )  # fmt: skip

    def kernels(self) -> list[BoundLaunch]:
        """Every kernel that calls can launch, for compiling them beforehand."""
        return self.launches.kernels()

    def workspace_bytes(self) -> int:
        """Bytes of workspace that the largest call takes."""
        return block_bytes(list(self.launches.blocks().values()))

    def explain(self) -> str:
        """One line for people, of the largest call."""
        config, why = self.config, self.why_quantised()
        return (
            f"Sage: Q and K in {self.qk_format}, P and V in {config.fp8}; {config.block_m} rows x "
            f"{config.block_n} keys a tile, {config.options.num_warps} warps; "
            f"workspace {self.workspace_bytes()} bytes; backend='auto' "
            + (f"quantises, because {why}" if why else "takes torch's 16-bit attention, which is faster here")
        )

    def why_quantised(self, *, lse: bool = False, one_dtype: bool = True) -> str:
        """Why `sage_attention(..., backend="auto")` quantises a call of the largest size.

        Args:
            lse: whether the log-sum-exp is wanted; one_dtype: whether Q, K and V have one dtype.

        Returns:
            The reason, or "" where it takes torch's attention in 16 bits, which is faster there.
        """
        return why_quantised(self.target, self.shape, self.launches.mask, lse=lse, one_dtype=one_dtype)

    def with_workspace(self, workspace: Workspace | None = None) -> SagePlan:
        """The same plan with its own memory, or in a workspace that plans share.

        Args:
            workspace: at least `workspace_bytes()` on the plan's device; None makes one. Plans that never run
                at the same time may share one.

        Raises:
            TypeError, ValueError: naming what was expected and what came.
        """
        if workspace is None:
            workspace = Workspace(self.workspace_bytes(), self.device)
        elif check_instance("workspace", workspace, Workspace).device != self.device:
            raise ValueError(f"workspace must be on {self.device} like the plan, got {workspace.device}")
        return replace(self, workspace=workspace)

    def quantize_kv(
        self,
        k: torch.Tensor,
        v: torch.Tensor,
        *,
        cu_seqlens_k: torch.Tensor | None = None,
        validate: bool = False,
    ) -> QuantizedKV:
        """Quantises K and V, which then serve any number of `attend` calls.

        Args:
            k, v: bf16 or fp16 `[batch, k_len, num_kv_heads, head_dim]`, or `[k_tokens, num_kv_heads,
                head_dim]` with cu_seqlens; last dimension contiguous; at most the plan's size.
            cu_seqlens_k: int32 or int64 `[batch + 1]`; None takes the plan's.
            validate: also read `cu_seqlens_k` and refuse wrong values, which waits for the device.

        Returns:
            The operands of `attend`, in their own memory. With `smooth_q` they include `k` itself, which must
            not change until then.

        Raises:
            TypeError, ValueError: tensors that the plan is not for.
        """
        starts = self._starts("cu_seqlens_k", self.cu_seqlens_k, cu_seqlens_k)
        k = self._operand("k", k, self.shape.num_kv_heads)
        v = self._operand("v", v, self.shape.num_kv_heads)
        check_shape("v", v, tuple(k.shape))
        if validate:
            check_starts("cu_seqlens_k", starts, k.shape[0])
        size = self._size("k", k, starts, self.shape.k_tokens)
        return self.launches.quantise_keys_values(k, v, starts, self._sized(size[0], 0, size[1]))

    def attend_in_16_bits(
        self, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, out: torch.Tensor | None = None
    ) -> torch.Tensor:
        """Attention without quantisation, by torch; for calls whose `why_quantised` is "".

        Args:
            q, k, v: as `attend` and `quantize_kv` take them, of one dtype.
            out: where to write, like q.

        Raises:
            TypeError, ValueError: tensors that the plan is not for.
        """
        given, q = q, self._operand("q", q, self.shape.num_qo_heads)
        k, v = (self._operand(name, x, self.shape.num_kv_heads) for name, x in (("k", k), ("v", v)))
        check_shape("v", v, tuple(k.shape))
        if out is not None:
            o = self._operand("out", out, self.shape.num_qo_heads)
            check_shape("out", out, tuple(given.shape))
            check_no_overlap("out", out, q=q, k=k, v=v)
        found = attend_in_16_bits(q, k, v, causal=self.window_right == 0, sm_scale=self.sm_scale)
        if out is None:
            return self._view(found).contiguous()
        o.copy_(found)
        return out

    def attend(
        self,
        q: torch.Tensor,
        kv: QuantizedKV,
        *,
        cu_seqlens_q: torch.Tensor | None = None,
        out: torch.Tensor | None = None,
        lse: torch.Tensor | None = None,
        return_lse: bool = False,
        validate: bool = False,
    ) -> torch.Tensor | tuple[torch.Tensor, torch.Tensor]:
        """Attention of `q` over quantised keys and values.

        Args:
            q: bf16 or fp16 `[batch, q_len, num_qo_heads, head_dim]`, or `[q_tokens, num_qo_heads, head_dim]`
                with cu_seqlens; at most the plan's size.
            kv: from `quantize_kv` of this plan, or of one with the same keys.
            cu_seqlens_q: int32 or int64 `[batch + 1]`; None takes the plan's.
            out: where to write, like q; bf16 or fp16.
            lse: where to write the log-sum-exp, fp32, shaped like q without head_dim; returned only
                with `return_lse`.
            return_lse: also return the log-sum-exp.
            validate: also read `cu_seqlens_q` and refuse wrong values, which waits for the device.

        Returns:
            `o`, or `(o, lse)`; see `sage_attention`.

        Raises:
            TypeError, ValueError: tensors that the plan is not for.
        """
        calls = self._calls.get(id(kv))
        signature = None
        if calls is None:
            check_instance("kv", kv, QuantizedKV)
            calls = self._calls.keep(kv, {})
        if not validate and cu_seqlens_q is None:
            signature = signature_of(q, out, lse, return_lse)
            call = calls.get(signature)
            if call is not None and not call.meets(q, out, lse):
                return call.run(q, out, lse, return_lse)
        starts = self._starts("cu_seqlens_q", self.cu_seqlens_q, cu_seqlens_q)
        given, q = q, self._operand("q", q, self.shape.num_qo_heads)
        if validate:
            check_starts("cu_seqlens_q", starts, q.shape[0])
        batch, tokens = self._size("q", q, starts, self.shape.q_tokens)
        self._check_kv(kv, batch)
        if out is None:
            out = torch.empty(given.shape, dtype=q.dtype, device=q.device)
            o = self._view(out)
        else:
            o = self._operand("out", out, self.shape.num_qo_heads)
            check_shape("out", out, tuple(given.shape))
            inputs = {"k": kv.k, "v": kv.v, "K as it came": kv.k_source, "cu_seqlens_q": starts}
            check_no_overlap("out", out, q=q, **inputs)
        if lse is not None:
            check_dtype("lse", lse, torch.float32)
            check_shape("lse", lse, tuple(given.shape[:-1]))
            check_same_device(q=q, lse=lse)
            check_no_overlap("lse", lse, q=q, o=out, k=kv.k, v=kv.v, cu_seqlens_q=starts)
        elif return_lse:
            lse = torch.empty(given.shape[:-1], dtype=torch.float32, device=q.device)
        if q.numel():
            size = self._sized(batch, tokens, kv.shape.k_tokens)
            query, bounds, quantised = self.launches.quantise_queries(
                q, starts, kv, size, lse=lse is not None
            )
            sums = lse if lse is None or self.layout == "BSHD" or lse.dim() != 3 else lse.transpose(1, 2)
            attended = self.launches.attend(query, bounds, kv, o, sums, size)
            if signature is not None and self._repeats_two_launches:
                if len(calls) >= _MOST_CALLS:
                    calls.clear()
                calls[signature] = Call(
                    quantised, attended, [byte_span(x) for x in (kv.k, kv.v) if x.numel()],
                    byte_span(q)[1] - q.data_ptr(), byte_span(o)[1] - o.data_ptr(),
                )  # fmt: skip
        return (out, lse) if return_lse and lse is not None else out

    @property
    def _repeats_two_launches(self) -> bool:
        """Whether a call is the pre-pass of Q and attention, in memory that stays where it is."""
        return not (self.workspace is None or self.shape.ragged or self.smooth_q or self.q_groups is None)

    def _view(self, x: torch.Tensor) -> torch.Tensor:
        """A dense tensor of either layout as BSHD."""
        return x.transpose(1, 2) if self.layout == "BHSD" and not self.shape.ragged else x

    def _operand(self, name: str, x: torch.Tensor, heads: int) -> torch.Tensor:
        """The tensor as BSHD, or `[tokens, heads, head_dim]`, once it is checked."""
        shape = self.shape
        dims = 3 if shape.ragged else 4
        if isinstance(x, torch.Tensor) and x.dim() == dims:
            viewed = x if shape.ragged or self.layout == "BSHD" else x.transpose(1, 2)
            if (
                x.dtype in FLOATS
                and viewed.shape[-2:] == (heads, shape.head_dim)
                and x.stride(-1) == 1
                and x.device == self.device
                and not x.requires_grad
            ):
                return viewed
        check_dtype(name, x, FLOATS)
        if x.dim() != dims:
            wanted = dimensions(self.layout, shape.ragged)
            raise ValueError(f"{name} must have shape {wanted}, got {list(x.shape)}")
        free = ("tokens",) if shape.ragged else ("batch", "tokens")
        check_shape(name, viewed, (*free, heads, shape.head_dim))
        check_last_dim_contiguous(name, x)
        check_no_grad(**{name: x})
        if x.device != self.device:
            raise ValueError(f"{name} must be on {self.device} like the plan, got {x.device}")
        return viewed

    def _starts(
        self, name: str, planned: torch.Tensor | None, given: torch.Tensor | None
    ) -> torch.Tensor | None:
        if not self.shape.ragged:
            if given is not None:
                raise ValueError(f"{name} must be None: the plan is for a dense batch")
            return None
        starts = planned if given is None else given
        if starts is None:
            raise ValueError(f"{name} must be given: the plan is for ragged sequences and has none")
        if given is not None:
            check_index_vector(name, given, "batch + 1")
        if starts.device != self.device:
            raise ValueError(f"{name} must be on {self.device} like the plan, got {starts.device}")
        return starts

    def _size(self, name: str, x: torch.Tensor, starts: torch.Tensor | None, most: int) -> tuple[int, int]:
        """Batch and tokens of a call, within the plan's."""
        batch = x.shape[0] if starts is None else starts.shape[0] - 1
        tokens = x.shape[-3]
        if batch > self.shape.batch or tokens > most:
            raise ValueError(
                f"{name} must have at most {self.shape.batch} sequences and {most} tokens as planned, "
                f"got {batch} and {tokens}"
            )
        return batch, tokens

    def _sized(self, batch: int, q_tokens: int, k_tokens: int) -> SageShape:
        largest = self.shape
        return SageShape(
            batch, q_tokens, k_tokens, largest.num_qo_heads, largest.num_kv_heads, largest.head_dim,
            largest.ragged,
        )  # fmt: skip

    def _check_kv(self, kv: QuantizedKV, batch: int) -> None:
        check_instance("kv", kv, QuantizedKV)
        shape, theirs = self.shape, kv.shape
        mine = (shape.num_kv_heads, shape.head_dim, shape.ragged, self.qk_format, self.config.fp8)
        those = (theirs.num_kv_heads, theirs.head_dim, theirs.ragged, kv.qk_format, kv.fp8)
        mine += (self.k_groups, self.config.key_order)  # type: ignore[assignment]
        those += (kv.k_groups, kv.key_order)  # type: ignore[assignment]
        if mine != those:
            raise ValueError(f"kv must be quantised for this plan ({mine}), got one for {those}")
        if theirs.batch != batch or theirs.k_tokens > shape.k_tokens:
            raise ValueError(
                f"kv must be quantised for q's {batch} sequences and at most {shape.k_tokens} tokens, got "
                f"{theirs.batch} and {theirs.k_tokens}"
            )
        if (self.smooth_k and kv.k_mean is None) or (self.smooth_q and kv.k_source is None):
            raise ValueError("kv must be quantised by a plan with the same smooth_k and smooth_q")
        if kv.k.device != self.device:
            raise ValueError(f"kv must be on {self.device} like the plan, got {kv.k.device}")
