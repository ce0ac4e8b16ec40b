"""Sage attention planned once: what is quantised how, which configuration runs, a call's two steps."""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from functools import cached_property, lru_cache
from typing import Any, NamedTuple

import torch

from narrowkv.quant.sage import TokenGroups, token_groups
from narrowkv.runtime.errors import (
    byte_span,
    check_choice,
    check_dtype,
    check_finite_float,
    check_index_vector,
    check_instance,
    check_last_dim_contiguous,
    check_no_grad,
    check_no_overlap,
    check_same_device,
    check_shape,
    check_tensor,
    check_window,
)
from narrowkv.runtime.identity import ByIdentity
from narrowkv.runtime.launch import BoundLaunch, Workspace, active_target, block_bytes
from narrowkv.runtime.targets import Target
from narrowkv.sage.config import SageConfig, choose_config
from narrowkv.sage.kernels import Mask
from narrowkv.sage.launches import Launched, QuantizedKV, SageLaunches, SageShape

QK_DTYPES = ("int8", "int4", "fp8")
LAYOUTS = ("BSHD", "BHSD")
_HEAD_DIMS = (64, 128)
_FLOATS = (torch.bfloat16, torch.float16)
_DIMENSIONS = {"BSHD": "[batch, seq, heads, head_dim]", "BHSD": "[batch, heads, seq, head_dim]"}
# No model has as many heads: tokens were taken for heads.
_MOST_HEADS = 256
_CACHED_PLANS = 256
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
    _calls: ByIdentity[dict[Any, _Call]] = field(default_factory=ByIdentity, init=False, repr=False)

    def __deepcopy__(self, memo: dict[int, object]) -> SagePlan:
        """A plan of its own over the same memory, which is what captured graphs know."""
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
        """One line for people."""
        config = self.config
        return (
            f"Sage: Q and K in {self.qk_format}, P and V in {config.fp8}; {config.block_m} rows x "
            f"{config.block_n} keys a tile, {config.options.num_warps} warps; "
            f"workspace {self.workspace_bytes()} bytes"
        )

    def with_workspace(self, workspace: Workspace | None = None) -> SagePlan:
        """The same plan working in memory of its own, or in a workspace that plans share.

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
            What `attend` reads, in memory of its own. With `smooth_q` it keeps `k` itself, which must not
            change meanwhile.

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
            signature = _signature(q, out, lse, return_lse)
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
                calls[signature] = _Call(
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
                x.dtype in _FLOATS
                and viewed.shape[-2:] == (heads, shape.head_dim)
                and x.stride(-1) == 1
                and x.device == self.device
                and not x.requires_grad
            ):
                return viewed
        check_dtype(name, x, _FLOATS)
        if x.dim() != dims:
            wanted = _dimensions(self.layout, shape.ragged)
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


def _signature(q: torch.Tensor, out: torch.Tensor | None, lse: torch.Tensor | None, return_lse: bool) -> Any:
    """What a call of `attend` is checked and prepared for, but for its keys and addresses."""
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


class _Call(NamedTuple):
    """A call of `attend` over certain keys that was checked and made once.

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
        """Whether a result may lie in the memory of something else."""
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


def _dimensions(layout: str, ragged: bool) -> str:
    return "[total_tokens, heads, head_dim]" if ragged else _DIMENSIONS[layout]


def check_starts(name: str, starts: torch.Tensor | None, tokens: int) -> None:
    """Reads where sequences begin and refuses what is wrong; this waits for the device.

    Raises:
        ValueError: they do not begin at 0, decrease, or pass the tokens that there are.
    """
    if starts is None:
        return
    values = starts.tolist()
    if values[0] != 0:
        raise ValueError(f"{name} must start at 0, got {values[0]}")
    for i in range(len(values) - 1):
        if values[i + 1] < values[i]:
            raise ValueError(
                f"{name} must not decrease, got {values[i]} and then {values[i + 1]} at elements {i}, {i + 1}"
            )
    if values[-1] > tokens:
        raise ValueError(f"{name} must end within the {tokens} tokens, got {values[-1]}")


def _windows(causal: str | bool | None, window: tuple[int, int] | None) -> tuple[bool, int, int]:
    """Alignment, and how far a row sees to the left and right."""
    if causal is True:
        raise ValueError('causal must say how it is aligned: "top_left" or "bottom_right", got True')
    if causal:
        check_choice("causal", causal, ("top_left", "bottom_right"))
    if window is None:
        return causal != "top_left", -1, 0 if causal else -1
    if not isinstance(window, tuple | list) or len(window) != 2:
        raise TypeError(f"window must be (left, right), each -1 or a number of tokens, got {window!r}")
    left, right = (check_window(f"window[{i}]", side) for i, side in enumerate(window))
    if causal and window[1] == -1:
        right = 0
    return causal != "top_left", left, right


def sage_shape(
    q: torch.Tensor,
    k: torch.Tensor,
    cu_seqlens_q: torch.Tensor | None,
    cu_seqlens_k: torch.Tensor | None,
    layout: str = "BSHD",
) -> SageShape:
    """Sizes of a call, checked without reading the device."""
    check_choice("layout", layout, LAYOUTS)
    ragged = cu_seqlens_q is not None
    if ragged != (cu_seqlens_k is not None):
        raise ValueError("cu_seqlens_q and cu_seqlens_k must both be given or both be None, got one")
    for name, tensor in (("q", q), ("k", k)):
        check_dtype(name, tensor, _FLOATS)
        if tensor.dim() != (3 if ragged else 4):
            raise ValueError(
                f"{name} must have shape {_dimensions(layout, ragged)}, got {list(tensor.shape)}"
            )
    if cu_seqlens_q is not None and cu_seqlens_k is not None:
        if layout != "BSHD":
            raise ValueError(
                f"layout must be left out with cu_seqlens, where tensors are {_dimensions(layout, True)}, "
                f"got {layout!r}"
            )
        check_index_vector("cu_seqlens_q", cu_seqlens_q, "batch + 1")
        if cu_seqlens_q.numel() == 0:
            raise ValueError(f"cu_seqlens_q must have shape [batch + 1], got {list(cu_seqlens_q.shape)}")
        batch = cu_seqlens_q.numel() - 1
        check_index_vector("cu_seqlens_k", cu_seqlens_k, batch + 1)
        check_same_device(q=q, k=k, cu_seqlens_q=cu_seqlens_q, cu_seqlens_k=cu_seqlens_k)
    else:
        batch = q.shape[0]
        if k.shape[0] != batch:
            raise ValueError(f"k must have q's batch {batch}, got {k.shape[0]}")
        check_same_device(q=q, k=k)
    if layout == "BHSD":
        q, k = q.transpose(1, 2), k.transpose(1, 2)
    shape = SageShape(batch, q.shape[-3], k.shape[-3], q.shape[-2], k.shape[-2], q.shape[-1], ragged)
    if k.shape[-1] != shape.head_dim:
        raise ValueError(f"k must have q's head_dim {shape.head_dim}, got {k.shape[-1]}")
    check_sage_shape(shape, layout)
    return shape


def check_sage_shape(shape: SageShape, layout: str) -> None:
    """Refuses sizes that no kernel takes, and axes that were evidently swapped.

    Raises:
        ValueError: naming the size.
    """
    if shape.head_dim not in _HEAD_DIMS:
        raise ValueError(f"q must have head_dim in {_HEAD_DIMS}, got {shape.head_dim}")
    heads, kv_heads = shape.num_qo_heads, shape.num_kv_heads
    hint = ""
    if not shape.ragged:
        other = LAYOUTS[1 - LAYOUTS.index(layout)]
        hint = f"; if tensors are {_DIMENSIONS[other]}, pass layout={other!r}"
    if max(heads, kv_heads) > _MOST_HEADS:
        raise ValueError(
            f"q and k must have at most {_MOST_HEADS} heads, got {heads} and {kv_heads} in layout {layout}"
            + hint
        )
    if heads == 0 or kv_heads == 0 or heads % kv_heads:
        raise ValueError(f"q must have a multiple of k's {kv_heads} heads, at least 1, got {heads}{hint}")


def plan_sage(
    q: torch.Tensor | SageShape,
    k: torch.Tensor | None = None,
    *,
    qk_dtype: str = "int8",
    q_granularity: str = "per_thread",
    k_granularity: str = "per_thread",
    causal: str | bool | None = None,
    window: tuple[int, int] | None = None,
    layout: str = "BSHD",
    cu_seqlens_q: torch.Tensor | None = None,
    cu_seqlens_k: torch.Tensor | None = None,
    smooth_k: bool = True,
    smooth_q: bool = False,
    sm_scale: float | None = None,
    device: torch.device | str | None = None,
) -> SagePlan:
    """Plans Sage attention for calls of these sizes or smaller; arguments as for `sage_attention`.

    Nothing is read from the device, and of `q` and `k` only the metadata. With a `SageShape` nothing needs to
    be there yet: `plan_sage(SageShape(batch, q_tokens, k_tokens, heads, kv_heads, head_dim, ragged),
    device=...)`; ragged calls then give `quantize_kv` and `attend` their cu_seqlens.

    Args:
        q: a query of the largest size, or the largest sizes.
        k: keys of the largest size; None with a `SageShape`.
        device: where tensors will be; None takes that of q.
        qk_dtype, q_granularity, k_granularity, causal, window, layout, cu_seqlens_q, cu_seqlens_k, smooth_k,
            smooth_q, sm_scale: as for `sage_attention`.

    Returns:
        A plan whose `quantize_kv(k, v)` is done once and whose `attend(q, kv)` many times.
        `plan.with_workspace()` allocates its scratch once.

    Raises:
        TypeError, ValueError: naming the argument, what was expected and what came.

    Example:
        >>> plan = plan_sage(q, k, causal="bottom_right")       # doctest: +SKIP
        >>> kv = plan.quantize_kv(k, v)                         # doctest: +SKIP
        >>> o = plan.attend(q, kv)                              # doctest: +SKIP
    """
    check_choice("qk_dtype", qk_dtype, QK_DTYPES)
    bottom_right, left, right = _windows(causal, window)
    if isinstance(q, SageShape):
        if k is not None or device is None:
            raise ValueError("k must be None and device given with a SageShape")
        check_choice("layout", layout, LAYOUTS)
        check_sage_shape(q, layout)
        shape, place = q, torch.empty(0, device=device).device
    else:
        shape = sage_shape(q, check_tensor("k", k), cu_seqlens_q, cu_seqlens_k, layout)
        place = q.device
    scale = shape.head_dim**-0.5 if sm_scale is None else check_finite_float("sm_scale", sm_scale)
    if scale < 0:
        raise ValueError(f"sm_scale must not be negative, got {scale}")
    plan = _make_plan(
        active_target(place), shape, qk_dtype, q_granularity, k_granularity, bottom_right, left, right,
        smooth_k, smooth_q, scale, place, layout,
    )  # fmt: skip
    if cu_seqlens_q is None:
        return plan
    planned = replace(plan, cu_seqlens_q=cu_seqlens_q, cu_seqlens_k=cu_seqlens_k)
    # The kernels are bound once for all lists of lengths.
    planned.__dict__["launches"] = plan.launches
    return planned


@lru_cache(maxsize=_CACHED_PLANS)
def _make_plan(
    target: Target, shape: SageShape, qk_dtype: str, q_granularity: str, k_granularity: str,
    bottom_right: bool, left: int, right: int, smooth_k: bool, smooth_q: bool, sm_scale: float,
    device: torch.device, layout: str,
) -> SagePlan:  # fmt: skip
    """A plan without a workspace; calls that are not planned find theirs here."""
    config = choose_config(target)
    return SagePlan(
        target, shape, config.fp8 if qk_dtype == "fp8" else qk_dtype, token_groups("q", q_granularity),
        token_groups("k", k_granularity), bottom_right, left, right, smooth_k, smooth_q, sm_scale, config,
        device, layout,
    )  # fmt: skip
