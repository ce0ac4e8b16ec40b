"""Sage attention as an operation: its plan, with a call's two steps."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from functools import lru_cache
from typing import TYPE_CHECKING, Any, ClassVar

import torch

from narrowkv.runtime.errors import (
    check_device,
    check_dtype,
    check_index_vector,
    check_instance,
    check_last_dim_contiguous,
    check_lse,
    check_no_grad,
    check_no_overlap,
    check_shape,
    contiguous_vector,
    refuse_overlap,
)
from narrowkv.runtime.launch import Arg, BoundLaunch, PreparedCall
from narrowkv.runtime.launch.workspace import Block
from narrowkv.runtime.operation import (
    SCRATCH,
    Operation,
    Prepared,
    Spans,
    signature_of,
    spans_of_arguments,
)
from narrowkv.runtime.targets import Target
from narrowkv.sage import launches
from narrowkv.sage.checks import FLOATS, check_block_mask, check_starts, dimensions, windows_of
from narrowkv.sage.config import choose_config
from narrowkv.sage.config_tuned import tuned_config
from narrowkv.sage.options import (
    IN_CALL,
    SageArguments,
    SageAttendOptions,
    SageOptions,
    SagePlanOptions,
    SageRunOptions,
)
from narrowkv.sage.shapes import QuantizedKV, SageShape
from narrowkv.sage.sixteen_bit import attend as attend_in_16_bits
from narrowkv.sage.sixteen_bit import why_quantised

if TYPE_CHECKING:
    from typing_extensions import Unpack

Result = torch.Tensor | tuple[torch.Tensor, torch.Tensor]
_CACHED_PLANS = 256
SAGE = Operation("sage_attention", SageOptions, SageArguments, "plan_sage")
PLAN = Operation("plan_sage", SagePlanOptions, SageArguments, "plan_sage")
ATTEND = Operation("attend", SageAttendOptions, SageArguments, "plan_sage")
_RESULTS = SageArguments._fields.index("out")
RUN = Operation("run", SageRunOptions, SageArguments, "plan_sage")
# Of a call and of `quantize_kv`, in the order in which their launches take them.
_VALUES = (
    "q", "k", "v", "out", "lse", "q_starts", "k_starts", SCRATCH, "block_mask", "k_desc", "v_desc",
)  # fmt: skip
_KEY_VALUES = ("k", "v", "k_starts", SCRATCH)
_NOTHING: dict[str, Any] = {}


@dataclass(frozen=True, eq=False, kw_only=True)
class SagePlan(launches.SageSettings):
    """A Sage attention up to one size, ready to quantise and to attend.

    Made by `plan_sage`. `quantize_kv`, `attend` and `run` make no host synchronisation, so they can be
    captured in a graph and replayed with other values and, if sequences are ragged, other lengths in the same
    tensors. Its attributes are those of `SageSettings` and of `narrowkv.runtime.operation.Plan`; the
    workspace holds scratch of the queries and of statistics.
    """

    operation: ClassVar[Operation] = SAGE

    def blocks(self) -> dict[str, Block]:
        """Scratch of the largest call by name: shapes and dtypes."""
        found = launches.blocks_of_queries(self, self.shape)
        return found | launches.blocks_of_statistics(self, self.shape)

    def kernels(self) -> list[BoundLaunch]:
        """Every kernel that calls can launch, for compiling them beforehand."""
        return launches.kernels_of(self)

    def explain(self) -> str:
        """One line for people, of the largest call."""
        config, blocks, why = self.config, self.block_sizes, self.why_quantised()
        return (
            f"Sage: Q and K in {self.qk_format}, P and V in {config.fp8}; {config.block_m} rows x "
            f"{config.block_n} keys a tile, {config.options.num_warps} warps; "
            f"{f'{config.tuned}; ' if config.tuned else ''}"
            + ("" if blocks is None else f"block mask of {blocks[0]} queries x {blocks[1]} keys; ")
            + f"workspace {self.workspace_bytes()} bytes; backend='auto' "
            + (f"quantises, because {why}" if why else "takes torch's 16-bit attention, which is faster here")
        )

    def why_quantised(self, *, lse: bool = False, one_dtype: bool = True) -> str:
        """Why `sage_attention(..., backend="auto")` quantises a call of the largest size.

        Args:
            lse: whether the log-sum-exp is wanted; one_dtype: whether Q, K and V have one dtype.

        Returns:
            The reason, or "" where it takes torch's attention in 16 bits, which is faster there.
        """
        if self.block_sizes is not None:
            return "torch's 16-bit attention takes no block mask"
        return why_quantised(self.target, self.shape, self.mask, lse=lse, one_dtype=one_dtype)

    # ------------------------------------------------------------------------------------------- calls

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
        starts = self.cu_seqlens_k if cu_seqlens_k is None else cu_seqlens_k
        signature = signature_of("keys", k, v, starts)
        found = self.calls.find(signature)
        if found is None:
            found = self.calls.keep(signature, self._prepare_keys(k, v, starts))
        call, size, blocks = found
        if validate:
            check_starts("cu_seqlens_k", starts, k.shape[0])
        empty, device = torch.empty, self.device
        made = {}
        for name, (shape, dtype) in blocks.items():
            made[name] = empty(shape, dtype=dtype, device=device)
        k_starts = None if starts is None else _contiguous(starts)
        scratch = self.scratch_block(call)
        call.launches.run(k, v, k_starts, scratch, made)
        return QuantizedKV(
            launches.as_stored(made["k_codes"], self.qk_format), made["k_descale"], made.get("k_mean"),
            launches.as_stored(made["v_codes"], self.config.fp8), made["v_descale"], size,
            self.qk_format, self.config.fp8, self.k_groups, self.config.key_order, made.get("k_bounds"),
            self.viewed(k) if self.smooth_q else None,
        )  # fmt: skip

    def attend(self, q: torch.Tensor, kv: QuantizedKV, **options: Unpack[SageAttendOptions]) -> Result:
        """Attention of `q` over quantised keys and values.

        Args:
            q: bf16 or fp16 `[batch, q_len, num_qo_heads, head_dim]`, or `[q_tokens, num_qo_heads, head_dim]`
                with cu_seqlens; at most the plan's size.
            kv: from `quantize_kv` of this plan, or of one with the same keys.
            **options: `cu_seqlens_q`, `out`, `lse`, `return_lse`, `block_mask` and `validate`; see
                `SageAttendOptions`.

        Returns:
            `o`, or `(o, lse)`; see `sage_attention`.

        Raises:
            TypeError, ValueError: tensors that the plan is not for.
        """
        if options and not options.keys() <= ATTEND.keywords:
            ATTEND.check_keywords(options)
        return self.call(SageArguments(q, kv=kv, **options))

    def run(
        self, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, **options: Unpack[SageRunOptions]
    ) -> Result:
        """`quantize_kv` and `attend` in one call, with the quantised K and V in scratch memory.

        Args:
            q, k, v: as for `attend` and `quantize_kv`.
            **options: the keywords of `attend`, and `cu_seqlens_k`; see `SageRunOptions`.

        Raises:
            TypeError, ValueError: tensors that the plan is not for.
        """
        if options and not options.keys() <= RUN.keywords:
            RUN.check_keywords(options)
        return self.call(SageArguments(q, k, v, **options))

    def call(self, given: SageArguments) -> Result:
        """A call by this plan: `attend` if there is `kv`, else `run`; keywords of a plan are not read."""
        kv = given.kv
        if self.cu_seqlens_q is not None:
            given = self._with_starts(given)
        if kv is None:
            signature = signature_of("run", *given[:IN_CALL])
        else:
            kind = getattr(kv, "kind", None)
            signature = signature_of(given.q, given.cu_seqlens_q, *given[_RESULTS:IN_CALL], kind)
        call = self.calls.find(signature)
        if call is None:
            call = self.calls.keep(signature, self.prepare(given))
        return self.launch(call, given)

    def launch(self, call: Prepared, given: SageArguments) -> Result:
        """A call that was prepared for arguments with the same metadata."""
        q, kv, q_starts, k_starts = given.q, given.kv, given.cu_seqlens_q, given.cu_seqlens_k
        k: torch.Tensor | None = given.k
        if given.validate:
            check_starts("cu_seqlens_q", q_starts, q.shape[0])
            check_starts("cu_seqlens_k", k_starts, 0 if k is None else k.shape[0])
        read: Spans = ()
        stored, k_desc, v_desc = _NOTHING, None, None
        if kv is not None:
            k, stored = kv.k_source, kv.arguments
            if given.out is not None or given.lse is not None:
                read = kv.spans
            if self.config.tma and kv.k.numel():
                k_desc, v_desc = kv.descriptors(self.config.block_n)
        out, lse = self.results(call, given, read)
        if call.launches is not None:
            call.launches.run(
                q, k, given.v, out, lse, None if q_starts is None else _contiguous(q_starts),
                None if k_starts is None else _contiguous(k_starts), self.scratch_block(call),
                given.block_mask, k_desc, v_desc, stored,
            )  # fmt: skip
        return (out, lse) if given.return_lse and lse is not None else out

    def _with_starts(self, given: SageArguments) -> SageArguments:
        """The arguments, with the plan's lists of lengths for those that a call leaves out."""
        if given.cu_seqlens_q is None:
            given = given._replace(cu_seqlens_q=self.cu_seqlens_q)
        if given.cu_seqlens_k is None and given.kv is None:
            given = given._replace(cu_seqlens_k=self.cu_seqlens_k)
        return given

    def attend_codes(
        self,
        codes: Mapping[str, Any],
        kv: QuantizedKV,
        out: torch.Tensor,
        lse: torch.Tensor | None,
        block_mask: torch.Tensor | None = None,
    ) -> None:
        """Attention of a quantised query of the plan's size, for callers that have checked it.

        Args:
            codes: "q_codes" and "q_descale" as `narrowkv.sage.launches.blocks_of_queries` shapes them.
            kv: quantised keys and values.
            out, lse: where to write, `[batch, q_len, num_qo_heads, head_dim]` and without head_dim.
            block_mask: as for `attend`, checked.
        """
        memory = {**codes, **kv.arguments}
        for name, (shape, dtype) in launches.blocks_of_lists(self, self.shape, block_mask).items():
            memory[name] = torch.empty(shape, dtype=dtype, device=self.device)
        if self.config.tma and kv.k.numel():
            memory["k_desc"], memory["v_desc"] = kv.descriptors(self.config.block_n)
        steps = launches.list_tiles(self, self.shape, block_mask, memory)
        steps.append(launches.attend(self, self.shape, out, lse, memory, block_mask))
        PreparedCall((), steps).run({"out": out, "lse": lse, "block_mask": block_mask})

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
        found = attend_in_16_bits(q, k, v, causal=self.mask.RIGHT == 0, sm_scale=self.sm_scale)
        if out is None:
            return self.viewed(found).contiguous()
        o.copy_(found)
        return out

    # ------------------------------------------------------------------------------ preparing of calls

    def _prepare_keys(
        self, k: torch.Tensor, v: torch.Tensor, starts: torch.Tensor | None
    ) -> tuple[Prepared, SageShape, dict[str, Block]]:
        """The launches of `quantize_kv`, the size of K and V, and the tensors that it allocates by name."""
        k, v, size = self._check_keys(k, v, starts)
        memory, scratch_bytes = self.scratch(launches.blocks_of_statistics(self, size))
        blocks = launches.blocks_of_keys(self, size)
        memory |= {name: Arg(name) for name in blocks}
        steps = launches.quantise_keys(self, size, k, v, memory)
        return Prepared(launches=PreparedCall(_KEY_VALUES, steps), scratch_bytes=scratch_bytes), size, blocks

    def prepare(self, given: SageArguments) -> Prepared:
        """The launches of a call, once it is checked."""
        q, kv, starts, options = given.q, given.kv, given.cu_seqlens_q, self.options
        k: Any = given.k
        if kv is None:
            k, v, keys = self._check_keys(k, given.v, given.cu_seqlens_k)
        else:
            keys = check_instance("kv", kv, QuantizedKV).shape
        viewed, batch, tokens = self._check_query(q, starts)
        if kv is not None:
            self._check_kv(kv, batch)
        self._check_results(given)
        size = self._size_of_call(batch, tokens, keys.k_tokens)
        writes_lse = given.return_lse or given.lse is not None
        mask = self.check_blocks(given.block_mask, size)
        blocks = launches.blocks_of_queries(self, size, lse=writes_lse, block_mask=mask)
        if kv is None:
            blocks |= launches.blocks_of_keys(self, size) | launches.blocks_of_statistics(self, size)
        memory, scratch_bytes = self.scratch(blocks)
        steps: list[Any] = []
        if kv is None:
            if self.config.tma:
                launches.describe(memory, self, size)
            steps = launches.quantise_keys(self, size, k, v, memory)
        else:
            memory |= {name: Arg(name) for name, value in kv.arguments.items() if value is not None}
            memory |= {"k_desc": Arg("k_desc"), "v_desc": Arg("v_desc")}
            k = kv.k_source
        steps += launches.list_tiles(self, size, mask, memory)
        # Results that calls allocate have the strides of these.
        out, lse = given.out, given.lse
        out = torch.empty(q.shape, dtype=q.dtype, device=q.device) if out is None else out
        if lse is None and writes_lse:
            lse = torch.empty(q.shape[:-1], dtype=torch.float32, device=q.device)
        if lse is not None and options.layout == "BHSD" and lse.dim() == 3:
            lse = lse.transpose(1, 2)
        steps += launches.quantise_queries(self, size, viewed, k, memory, lse=writes_lse)
        steps.append(launches.attend(self, size, self.viewed(out), lse, memory, mask, viewed))
        return Prepared(
            launches=PreparedCall(_VALUES, steps) if q.numel() else None,
            out=(q.shape, q.dtype),
            lse=(q.shape[:-1], torch.float32),
            scratch_bytes=scratch_bytes if q.numel() else 0,
            **spans_of_arguments(given, self._unread),
        )

    @property
    def _unread(self) -> tuple[str, ...]:
        """Tensors of a call that are not read once a result is written."""
        before = ("v", "cu_seqlens_k", "block_mask")
        return before if self.smooth_q else ("k", *before)

    # ------------------------------------------------------------------------------------------ checks

    def _check_keys(
        self, k: torch.Tensor, v: torch.Tensor, starts: torch.Tensor | None
    ) -> tuple[torch.Tensor, torch.Tensor, SageShape]:
        """K and V as BSHD, and the sizes of a call without queries."""
        self._check_starts("cu_seqlens_k", starts)
        k = self._operand("k", k, self.shape.num_kv_heads)
        v = self._operand("v", v, self.shape.num_kv_heads)
        check_shape("v", v, tuple(k.shape))
        batch, tokens = self._sequences("k", k, starts, self.shape.k_tokens)
        return k, v, self._size_of_call(batch, 0, tokens)

    def _check_query(self, q: torch.Tensor, starts: torch.Tensor | None) -> tuple[torch.Tensor, int, int]:
        """Q as BSHD, sequences and tokens."""
        self._check_starts("cu_seqlens_q", starts)
        q = self._operand("q", q, self.shape.num_qo_heads)
        return q, *self._sequences("q", q, starts, self.shape.q_tokens)

    def _check_results(self, given: SageArguments) -> None:
        q, out, lse = given.q, given.out, given.lse
        if out is not None:
            self._operand("out", out, self.shape.num_qo_heads)
            check_shape("out", out, tuple(q.shape))
        if lse is not None:
            check_lse(lse, tuple(q.shape[:-1]), self.device, any_strides=True)
        self.refuse_overlap(given)

    def refuse_overlap(self, given: SageArguments) -> None:
        """Refuses results that lie over what is read after the first of them is written, or while it is."""
        kv, inputs = given.kv, {"q": given.q, "cu_seqlens_q": given.cu_seqlens_q}
        if kv is None:
            inputs["K as it came"] = given.k if self.smooth_q else None
        else:
            inputs |= {"k": kv.k, "v": kv.v, "K as it came": kv.k_source}
        refuse_overlap(given.out, given.lse, inputs)

    def check_blocks(self, block_mask: torch.Tensor | None, size: SageShape) -> torch.Tensor | None:
        """The block mask of a call of this size, once it is checked."""
        checked = check_block_mask(block_mask, self.block_sizes, size)
        if checked is not None:
            check_device("block_mask", checked, self.device, "the plan")
        return checked

    def viewed(self, x: torch.Tensor) -> torch.Tensor:
        """A view of a dense tensor with tokens and heads swapped if the layout is BHSD: to BSHD, and back."""
        return x.transpose(1, 2) if self.options.layout == "BHSD" and not self.shape.ragged else x

    def _operand(self, name: str, x: torch.Tensor, heads: int) -> torch.Tensor:
        """The tensor as BSHD, or `[tokens, heads, head_dim]`, once it is checked."""
        shape = self.shape
        check_dtype(name, x, FLOATS)
        if x.dim() != (3 if shape.ragged else 4):
            wanted = dimensions(self.options.layout, shape.ragged)
            raise ValueError(f"{name} must have shape {wanted}, got {list(x.shape)}")
        viewed = self.viewed(x)
        free = ("tokens",) if shape.ragged else ("batch", "tokens")
        check_shape(name, viewed, (*free, heads, shape.head_dim))
        check_last_dim_contiguous(name, x)
        check_no_grad(**{name: x})
        if x.device != self.device:
            raise ValueError(f"{name} must be on {self.device} like the plan, got {x.device}")
        return viewed

    def _check_starts(self, name: str, starts: torch.Tensor | None) -> None:
        if not self.shape.ragged:
            if starts is not None:
                raise ValueError(f"{name} must be None: the plan is for a dense batch")
            return
        if starts is None:
            raise ValueError(f"{name} must be given: the plan is for ragged sequences and has none")
        check_index_vector(name, starts, "batch + 1")
        if starts.device != self.device:
            raise ValueError(f"{name} must be on {self.device} like the plan, got {starts.device}")

    def _sequences(
        self, name: str, x: torch.Tensor, starts: torch.Tensor | None, most: int
    ) -> tuple[int, int]:
        """Batch and tokens of a call, within the plan's."""
        batch = x.shape[0] if starts is None else starts.shape[0] - 1
        tokens = x.shape[-3]
        if batch > self.shape.batch or tokens > most:
            raise ValueError(
                f"{name} must have at most {self.shape.batch} sequences and {most} tokens as planned, "
                f"got {batch} and {tokens}"
            )
        return batch, tokens

    def _size_of_call(self, batch: int, q_tokens: int, k_tokens: int) -> SageShape:
        return replace(self.shape, batch=batch, q_tokens=q_tokens, k_tokens=k_tokens)

    def _check_kv(self, kv: QuantizedKV, batch: int) -> None:
        shape, theirs = self.shape, kv.shape
        mine = (
            shape.num_kv_heads, shape.head_dim, shape.ragged, self.qk_format, self.config.fp8, self.k_groups,
            self.config.key_order,
        )  # fmt: skip
        those = (
            theirs.num_kv_heads, theirs.head_dim, theirs.ragged, kv.qk_format, kv.fp8, kv.k_groups,
            kv.key_order,
        )  # fmt: skip
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


def _contiguous(starts: torch.Tensor) -> torch.Tensor:
    return starts if starts.stride(0) == 1 else contiguous_vector(starts)


@lru_cache(maxsize=_CACHED_PLANS)
def make_plan(target: Target, shape: SageShape, options: SageArguments, device: torch.device) -> SagePlan:
    """A plan without a workspace and without lists of lengths, the same one for equal arguments."""
    left = windows_of(options.causal, options.window)[1]
    k_block = 0 if options.block_sizes is None else options.block_sizes[1]
    config = choose_config(
        target, options.qk_dtype, smooth_q=options.smooth_q, window=left >= 0, k_block=k_block
    )
    plan = SagePlan(target=target, shape=shape, options=options, config=config, device=device)
    plan.q_groups, plan.k_groups  # noqa: B018  # refuse unknown granularities
    return plan


def with_tuned_config(plan: SagePlan) -> SagePlan:
    """The plan with the configuration of a tune file, where there is one for its size."""
    config = tuned_config(plan.target, plan.shape, plan.options, plan.config)
    return plan if config is plan.config else replace(plan, config=config)
