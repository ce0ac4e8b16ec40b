"""Merging of partial results: plans that check and prepare calls once, and their launch."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import ClassVar, NamedTuple, TypedDict

import torch

from narrowkv.attn_decode.kernels import States, _merge_states_kernel
from narrowkv.runtime.errors import (
    OUT_DTYPES,
    check_choice,
    check_device,
    check_dtype,
    check_last_dim_contiguous,
    check_lse,
    check_no_grad,
    check_out,
    check_out_dtype,
    check_shape,
    check_sinks,
    refuse_overlap,
)
from narrowkv.runtime.launch import Arg, LaunchOptions, PreparedCall, active_target, launch_by_name
from narrowkv.runtime.launch.tracing import traceable
from narrowkv.runtime.operation import (
    Bounded,
    Operation,
    Plan,
    Prepared,
    signature_of,
    spans_of_arguments,
)

_OPTIONS = LaunchOptions(num_warps=1, num_stages=1)


class MergeOptions(TypedDict, total=False):
    """Keywords of `merge_states`, which describes them."""

    sinks: torch.Tensor | None
    lse_base: str
    out: torch.Tensor | None
    out_dtype: torch.dtype | None
    lse_out: torch.Tensor | None


class MergeArguments(NamedTuple):
    """The arguments of a call; `lse` is where the log-sum-exp of the result is written."""

    o: torch.Tensor
    states: torch.Tensor  # their log-sum-exps
    sinks: torch.Tensor | None
    out: torch.Tensor | None
    lse: torch.Tensor | None
    out_dtype: torch.dtype | None
    lse_base: str
    return_lse: bool = True


MERGE = Operation("merge_states", MergeOptions, MergeArguments)


@traceable
def merge_states(
    o: torch.Tensor,
    lse: torch.Tensor,
    *,
    sinks: torch.Tensor | None = None,
    lse_base: str = "e",
    out: torch.Tensor | None = None,
    out_dtype: torch.dtype | None = None,
    lse_out: torch.Tensor | None = None,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Combines partial attention results over splits, prefixes or ranks, in the order of the states.

    Args:
        o: `[num_states, num_tokens, num_qo_heads, head_dim]`, bf16, fp16 or fp32, any strides but a
            contiguous last dimension: results that are each normalised, without sinks.
        lse: `[num_states, num_tokens, num_qo_heads]` fp32, any strides. -inf marks a state that attended to
            nothing; its `o` is not read.
        sinks: `[num_qo_heads]` fp32, bf16 or fp16, contiguous: a natural logit per head with value 0. It
            enters the denominator of the merged `o`, and so must not be in the partial ones.
        lse_base: "e" where lse are natural logarithms, "2" where their base is 2; of the result, too.
        out: where to write, `[num_tokens, num_qo_heads, head_dim]`, last dimension contiguous.
        out_dtype: dtype of a new output; default o's.
        lse_out: where to write the lse, `[num_tokens, num_qo_heads]` fp32.

    Returns:
        `(o, lse)` of the union: `[num_tokens, num_qo_heads, head_dim]`, and `[num_tokens, num_qo_heads]`
        fp32 without the sink. A row without keys has o = 0 and lse = -inf.

    Raises:
        TypeError, ValueError: for wrong shapes, dtypes, devices or strides.

    Example:
        >>> states = torch.stack([o_prefix, o_suffix])  # doctest: +SKIP
        >>> o, lse = merge_states(states, torch.stack([lse_prefix, lse_suffix]))  # doctest: +SKIP
    """
    check_dtype("o", o, OUT_DTYPES)
    return plan_of_device(o.device).call(MergeArguments(o, lse, sinks, out, lse_out, out_dtype, lse_base))


@dataclass(frozen=True, eq=False, kw_only=True)
class MergePlan(Plan):
    """Merges on one device: a call whose tensors have the metadata of an earlier one only launches."""

    operation: ClassVar[Operation] = MERGE
    compared: ClassVar[bool] = False

    def call(self, given: MergeArguments) -> tuple[torch.Tensor, torch.Tensor]:
        """`merge_states` by this plan."""
        signature = signature_of(*given)
        call = self.calls.find(signature)
        if call is None:
            call = self.calls.keep(signature, self._prepare(given))
        out, lse = self.results(call, given)
        assert lse is not None
        self.launch(call.launches, given.o, given.states, given.sinks, out, lse)
        return out, lse

    def _prepare(self, given: MergeArguments) -> Prepared:
        """Checks a call, and finds its launch."""
        o, lse, out, lse_out, out_dtype = given.o, given.states, given.out, given.lse, given.out_dtype
        check_dtype("lse", lse, (torch.float32,))
        check_choice("lse_base", given.lse_base, ("e", "2"))
        if o.dim() != 4:
            raise ValueError(
                f"o must have shape [num_states, num_tokens, num_qo_heads, head_dim], got {tuple(o.shape)}"
            )
        check_shape("lse", lse, tuple(o.shape[:3]))
        check_last_dim_contiguous("o", o)
        if o.shape[0] == 0:
            raise ValueError("o must have at least one state, got 0")
        check_device("lse", lse, o.device, "o")
        check_sinks(given.sinks, o.shape[2], o.device, like="o")
        check_no_grad(o=o, lse=lse)
        check_out_dtype(out_dtype)
        shape = tuple(o.shape[1:])
        if out is not None:
            check_out(out, shape, OUT_DTYPES if out_dtype is None else (out_dtype,), o.device, "o")
        if lse_out is not None:
            check_lse(lse_out, shape[:2], o.device, name="lse_out", like="o", any_strides=True)
        self.refuse_overlap(given)
        results = (shape, out_dtype or o.dtype), (shape[:2], torch.float32)
        new = [torch.empty(size, dtype=dtype, device="meta") for size, dtype in results]
        launches = self.launches(
            o, lse, given.sinks, new[0] if out is None else out, new[1] if lse_out is None else lse_out,
            lse_base=given.lse_base,
        )  # fmt: skip
        return Prepared(launches=launches, out=results[0], lse=results[1], **spans_of_arguments(given))

    def refuse_overlap(self, given: MergeArguments) -> None:
        """Names what a result lies over, if anything."""
        inputs = {"o": given.o, "lse": given.states, "sinks": given.sinks}
        refuse_overlap(given.out, given.lse, inputs, "lse_out")

    def launches(
        self, o: torch.Tensor, lse: torch.Tensor, sinks: torch.Tensor | None, out: torch.Tensor,
        lse_out: torch.Tensor | None, *, lse_base: str = "e", only: int | None = None,
    ) -> PreparedCall:  # fmt: skip
        """The launch of arguments that are known to be right, of any number of tokens.

        Args:
            o, lse, sinks, out, lse_base: as of `merge_states`; lse_out: None is not written.
            only: the one state whose share of the merged `o` is wanted; `o` then holds that state alone.
        """
        num_states, _, num_heads = lse.shape
        strides = o.stride()[1:3], lse.stride()[1:], out.stride()[:2]
        merged = None if lse_out is None else lse_out.stride()
        dtypes = o.dtype, out.dtype, None if sinks is None else (sinks.dtype, sinks.stride())
        key = (strides, merged, dtypes, num_states, num_heads, o.shape[3], lse_base, only)
        known = self._layouts.get(key)
        if known is not None:
            return known
        begin, end = (0, num_states) if only is None else (only, only + 1)
        bound = self.bind(
            _merge_states_kernel, _OPTIONS, HEAD_DIM=o.shape[3], BLOCK_D=1 << (o.shape[3] - 1).bit_length(),
            LSE_UNIT=math.log(2.0) if lse_base == "2" else 1.0,
        )  # fmt: skip
        step = launch_by_name(
            bound, (Arg("programs"),),
            o=States(Arg("o"), 0 if only is not None else Arg("o_state"), *strides[0]),
            lse=States(Arg("lse"), Arg("lse_state"), *strides[1]),
            out=States(Arg("out"), 0, *strides[2]),
            out_lse=States(None, None, None, None) if merged is None else States(Arg("out_lse"), 0, *merged),
            sinks_ptr=None if sinks is None else Arg("sinks"),
            num_states=num_states, begin=begin, end=end, num_heads=num_heads,
        )  # fmt: skip
        return self._layouts.keep(key, PreparedCall((), [step]))

    @staticmethod
    def launch(
        launches: PreparedCall, o: torch.Tensor, lse: torch.Tensor, sinks: torch.Tensor | None,
        out: torch.Tensor, lse_out: torch.Tensor | None,
    ) -> None:  # fmt: skip
        """Launches what `launches` returned for arguments like these."""
        launches.run({
            "o": o, "o_state": o.stride(0), "lse": lse, "lse_state": lse.stride(0), "out": out,
            "out_lse": lse_out, "sinks": sinks, "programs": lse.shape[1] * lse.shape[2],
        })  # fmt: skip


_plans: Bounded[MergePlan] = Bounded(64)


def plan_of_device(device: torch.device) -> MergePlan:
    """The plan of all merges on a device."""
    target = active_target(device)
    plan = _plans.get((target, device))
    return plan or _plans.keep((target, device), MergePlan(target=target, device=device))


def launch_merge(
    o: torch.Tensor, lse: torch.Tensor, sinks: torch.Tensor | None, out: torch.Tensor,
    lse_out: torch.Tensor | None, *, only: int | None = None,
) -> None:  # fmt: skip
    """Launches the merge of arguments that are known to be right; see `MergePlan.launches`."""
    plan = plan_of_device(o.device)
    plan.launch(plan.launches(o, lse, sinks, out, lse_out, only=only), o, lse, sinks, out, lse_out)
