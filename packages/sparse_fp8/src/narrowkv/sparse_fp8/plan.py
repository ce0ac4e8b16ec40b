"""Sparse attention planned once: which kernels run, what memory they need, and what a call may change."""

from __future__ import annotations

import math
from dataclasses import dataclass, field, replace
from functools import lru_cache
from typing import Any

import torch

from narrowkv.quant.device import BITS, NATIVE
from narrowkv.runtime.errors import (
    UnsupportedError,
    check_choice,
    check_dtype,
    check_finite_float,
    check_instance,
    check_last_dim_contiguous,
    check_no_grad,
    check_no_overlap,
    check_positive_int,
    check_same_device,
    check_shape,
    has_memory,
)
from narrowkv.runtime.launch import (
    VARIES,
    BoundLaunch,
    FixedLaunch,
    Workspace,
    active_target,
    block_bytes,
    executor,
    is_compiled,
)
from narrowkv.runtime.launch.tracing import handle_of
from narrowkv.runtime.targets import Target
from narrowkv.sparse_fp8.binding import (
    INT32_MAX,
    NO_CSR,
    NO_ROWS,
    RowsFormat,
    varying,
)
from narrowkv.sparse_fp8.config import (
    INVARIANT_SPLITS,
    MOST_CHOSEN_SPLITS,
    MOST_SPLITS,
    NUM_HEADS,
    SparseConfig,
    choose_config,
    choose_splits,
    hopper_config,
    hopper_pays,
    num_units,
)
from narrowkv.sparse_fp8.kernels.results import Call, Output, Partials
from narrowkv.sparse_fp8.kernels.rows import RowPointers
from narrowkv.sparse_fp8.launches import (
    NO_PARTIALS,
    bind_attention,
    bind_expand,
    bind_merge,
    expand_block,
    route_of,
)
from narrowkv.sparse_fp8.rows import HEAD_DIM, DSV4Rows, query_heads
from narrowkv.sparse_fp8.sources import KVSource, check_scales

__all__ = ["SparsePlan", "plan_sparse"]

_LOG2E = math.log2(math.e)
_OUT_DTYPES = (torch.bfloat16, torch.float16, torch.float32)
_QUERIES = {"bf16": RowsFormat("bf16"), "fp16": RowsFormat("fp16")}
_CACHED_PLANS = 256
_MAX_FIXED = 1024

Result = torch.Tensor | tuple[torch.Tensor, torch.Tensor]
Blocks = list[tuple[tuple[int, ...], torch.dtype]]


class _Source:
    """What an attention kernel reads of a `KVSource`, of rows that were widened to scratch."""

    __slots__ = ("csr", "far", "nnz", "num_rows", "number", "pointers", "tensors")

    def __init__(
        self, pointers: RowPointers, csr: Any, num_rows: int, nnz: int, number: Any, far: bool
    ) -> None:
        self.pointers, self.csr, self.num_rows, self.nnz, self.far = pointers, csr, num_rows, nnz, far
        # Of scratch rows, dtype and strides are the plan's; only the lists differ.
        self.number = number
        self.tensors = () if pointers.nope is None else (pointers.nope, csr.indptr, csr.indices)


_NO_SOURCE = _Source(NO_ROWS, NO_CSR, 0, 0, None, False)


@dataclass(frozen=True, eq=False)
class SparsePlan:
    """Sparse attention over rows that are stored in one way, for any number of tokens up to a maximum.

    Made by `plan_sparse`. `run` neither waits for the device nor, with a maximum, allocates anything but
    outputs that are not given, so it can be captured in a graph and replayed with other rows, index lists
    and queries in the same tensors. Two plans are equal only if they are the same object.

    Attributes:
        mode: "wide" attends 16-bit rows, "fused" FP8 rows as stored, "prepass" FP8 rows widened first.
        target: what it was planned for.
        device: where its tensors lie.
        num_qo_heads: query heads.
        query, prefix, extend: how the query and the rows are stored; None for a source that is absent.
        sm_scale: the softmax scale.
        has_sink: whether `run` takes a sink.
        writes_lse: whether `run` writes and returns the log-sum-exp.
        num_splits: programs that share a token's rows; None chooses by the number of tokens.
        batch_invariant: whether a token's bits depend on nothing but the token.
        max_num_tokens, max_indices: the largest call, indices of each source; None for a plan without a
            workspace, whose calls allocate what they need.
        plain: the configuration of the plain kernel.
        hopper: that of a kernel for Hopper, which takes over where it fills the chip; None elsewhere.
        workspace: memory for scratch and partial results.
        handle: what operators of `torch.ops.narrowkv` find the plan by, in this process.
    """

    mode: str
    target: Target
    device: torch.device
    num_qo_heads: int
    query: RowsFormat
    prefix: RowsFormat | None
    extend: RowsFormat | None
    sm_scale: float
    has_sink: bool
    writes_lse: bool
    num_splits: int | None
    batch_invariant: bool
    max_num_tokens: int | None
    max_indices: int | None
    plain: SparseConfig
    hopper: SparseConfig | None
    workspace: Workspace | None = None
    _scratch: tuple[torch.Tensor, ...] = field(default=(), repr=False)
    _launches: dict[Any, BoundLaunch] = field(default_factory=dict, init=False, repr=False)
    _fixed: dict[Any, Any] = field(default_factory=dict, init=False, repr=False)

    handle: str = field(init=False, repr=False)
    # What a call looks up, found once: the 16-bit dtype, a fixed number of splits, partial results.
    _dtype: torch.dtype = field(init=False, repr=False)
    _fixed_splits: int | None = field(init=False, repr=False)
    _partials: tuple[torch.Tensor, ...] = field(init=False, repr=False)

    def __post_init__(self) -> None:
        """Finds what every call looks up."""
        splits = self.num_splits
        if splits is None and self.batch_invariant:
            splits = INVARIANT_SPLITS
        object.__setattr__(self, "handle", handle_of(self))
        object.__setattr__(self, "_dtype", self.query.dtype)
        object.__setattr__(self, "_fixed_splits", splits)
        object.__setattr__(self, "_partials", self._scratch[5:])

    def __deepcopy__(self, memo: dict[int, object]) -> SparsePlan:
        """A plan of its own over the same memory, which is what captured graphs know."""
        return replace(self)

    def explain(self) -> str:
        """One line for people: which kernels run, how the work is cut up, and what memory it takes."""
        other = "" if self.hopper is None else f"; {self.hopper.explain()} where it fills the chip"
        splits = (
            "splits by the number of tokens" if self._fixed_splits is None else f"{self._fixed_splits} splits"
        )
        first = "FP8 rows are widened first; " if self.mode == "prepass" else ""
        return f"{first}{self.plain.explain()}{other}; {splits}; workspace {self.workspace_bytes()} bytes"

    def workspace_bytes(self) -> int:
        """Bytes of workspace that the largest call takes; 0 for a plan without maxima."""
        return block_bytes(self._blocks()) if self.max_num_tokens is not None else 0

    def kernels(self) -> list[BoundLaunch]:
        """Every kernel that a call can launch, for compiling them beforehand."""
        found: list[BoundLaunch] = []
        for config in (self.plain, self.hopper):
            if config is None:
                continue
            fixed = self._fixed_splits
            for split in (False, True) if fixed is None else (fixed > 1,):
                found.append(self._attention(config, split, (False, False, False)))
                if split:
                    found.append(self._merge())
        if self.query.is_fp8 and (self.mode == "prepass" or self.hopper is not None):
            found.append(self._expansion(self.query, gather=False))
        if self.mode == "prepass":
            for rows in (self.prefix, self.extend):
                if rows is not None and rows.is_fp8:
                    found += [self._expansion(rows, gather=gather) for gather in (False, True)]
        return list({id(launch): launch for launch in found}.values())

    def run(
        self,
        q: torch.Tensor | DSV4Rows,
        prefix: KVSource | None,
        extend: KVSource | None = None,
        *,
        attn_sink: torch.Tensor | None = None,
        out: torch.Tensor | None = None,
        lse: torch.Tensor | None = None,
        validate: bool = False,
    ) -> Result:
        """Attends.

        Args:
            q, prefix, extend: as planned; at most `max_num_tokens` tokens and `max_indices` indices.
            attn_sink: fp32 `[num_qo_heads]` if the plan has a sink, else None.
            out: where to write, `[num_tokens, num_qo_heads, 512]`; bf16, fp16 or fp32.
            lse: where to write the log-sum-exp, fp32 `[num_tokens, num_qo_heads]`, if the plan writes it.
            validate: also read the index lists and scales on the host and refuse wrong values, which waits
                for the device; without it an index out of range is skipped and no wrong value reaches memory
                outside the tensors.

        Returns:
            `o`, or `(o, lse)`; see `sparse_prefill`.

        Raises:
            TypeError, ValueError: arguments that the plan is not for, naming the argument.
        """
        tokens = self._check(q, prefix, extend, attn_sink)
        if validate:
            _check_values(q, prefix, extend, attn_sink)
        if out is None:
            out = torch.empty((tokens, self.num_qo_heads, HEAD_DIM), dtype=self._dtype, device=self.device)
        else:
            self._check_out(out, q, prefix, extend, attn_sink, tokens)
        if self.writes_lse:
            if lse is None:
                lse = torch.empty((tokens, self.num_qo_heads), dtype=torch.float32, device=self.device)
            else:
                self._check_lse(lse, out, q, prefix, extend, attn_sink)
        elif lse is not None:
            raise ValueError("lse must be None for a plan that does not write it: plan with return_lse=True")
        if tokens:
            self._attend(q, prefix, extend, attn_sink, out, lse, tokens)
        return out if lse is None else (out, lse)

    # ------------------------------------------------------------------------------------------ checks

    def _check(
        self,
        q: torch.Tensor | DSV4Rows,
        prefix: KVSource | None,
        extend: KVSource | None,
        attn_sink: torch.Tensor | None,
    ) -> int:
        """Compares what a call can change with the plan; the number of tokens."""
        source = prefix if prefix is not None else extend
        if not isinstance(source, KVSource):
            raise TypeError(f"prefix or extend must be a KVSource, got {type(source).__name__}")
        tokens = source.num_tokens
        for name, planned, given in (("prefix", self.prefix, prefix), ("extend", self.extend, extend)):
            if planned is None and given is None:
                continue
            if planned is None or given is None or type(given) is not KVSource:
                _refuse_source(name, planned, given)
            elif given.format != planned or given.num_tokens != tokens or given.device != self.device:
                self._refuse_format(name, planned, given, tokens)
            elif self.max_indices is not None and given.nnz > self.max_indices:
                raise ValueError(
                    f"{name}.indices must have at most {self.max_indices} as planned, got {given.nnz}"
                )
        if self.max_num_tokens is not None and tokens > self.max_num_tokens:
            raise ValueError(f"q must have at most {self.max_num_tokens} tokens as planned, got {tokens}")
        if isinstance(q, torch.Tensor):
            if (
                q.dtype is not self._dtype
                or self.query.format
                or q.shape != (tokens, self.num_qo_heads, HEAD_DIM)
                or q.stride(2) != 1
                or q.device != self.device
            ):
                self._refuse_query(q, tokens)
        else:
            self._check_fp8_query(q, tokens)
        if (attn_sink is None) == self.has_sink or (
            attn_sink is not None
            and (
                type(attn_sink) is not torch.Tensor
                or attn_sink.dtype is not torch.float32
                or attn_sink.shape != (self.num_qo_heads,)
                or attn_sink.stride(0) != 1
                or attn_sink.device != self.device
            )
        ):
            self._refuse_sink(attn_sink)
        if torch.is_grad_enabled() and (
            (isinstance(q, torch.Tensor) and q.requires_grad)
            or (attn_sink is not None and attn_sink.requires_grad)
            or (prefix is not None and prefix.requires_grad)
            or (extend is not None and extend.requires_grad)
        ):
            for name, x in (
                ("q", q),
                ("attn_sink", attn_sink),
                ("prefix.rows", prefix and prefix.rows),
                ("extend.rows", extend and extend.rows),
            ):
                # Rows and queries in FP8 never do.
                if isinstance(x, torch.Tensor) and x.requires_grad:
                    check_no_grad(**{name: x})
        return tokens

    def _check_fp8_query(self, q: DSV4Rows, tokens: int) -> None:
        if not isinstance(q, DSV4Rows):
            raise TypeError(f"q must be a torch.Tensor or DSV4Rows, got {type(q).__name__}")
        if q.bound.format != self.query or q.device != self.device:
            raise ValueError(
                f"q must be stored as planned, {self.query} on {self.device}, "
                f"got {q.bound.format} on {q.device}"
            )
        # Pages are whole: the last may hold rows that are no head's.
        if not 0 <= q.num_rows - self.num_qo_heads * tokens < q.page_size:
            raise ValueError(
                f"q must hold num_tokens * num_qo_heads rows, {tokens} * {self.num_qo_heads}, "
                f"got {q.num_rows}"
            )

    def _refuse_query(self, q: torch.Tensor, tokens: int) -> None:
        if self.query.is_fp8:
            raise TypeError("q must be DSV4Rows as planned, got a torch.Tensor")
        check_dtype("q", q, self.query.dtype)
        check_same_device(plan=torch.empty(0, device=self.device), q=q)
        if q.dim() == 3 and q.shape[0] != tokens:
            raise ValueError(f"q must have {tokens} tokens like the sources' indptr, got {q.shape[0]}")
        check_shape("q", q, (tokens, self.num_qo_heads, HEAD_DIM))
        check_last_dim_contiguous("q", q)

    def _refuse_format(self, name: str, planned: RowsFormat, given: KVSource, tokens: int) -> None:
        check_same_device(plan=torch.empty(0, device=self.device), **{f"{name}.indices": given.indices})
        if given.num_tokens != tokens:
            raise ValueError(
                f"{name}.indptr must have {tokens + 1} elements like prefix.indptr, "
                f"got {given.indptr.shape[0]}"
            )
        raise ValueError(f"{name}.rows must be stored as planned, {planned}, got {given.format}")

    def _refuse_sink(self, attn_sink: torch.Tensor | None) -> None:
        if attn_sink is None or not self.has_sink:
            wanted = "a tensor: the plan has a sink" if self.has_sink else "None: the plan has no sink"
            raise ValueError(f"attn_sink must be {wanted}")
        check_dtype("attn_sink", attn_sink, torch.float32)
        check_shape("attn_sink", attn_sink, (self.num_qo_heads,))
        check_last_dim_contiguous("attn_sink", attn_sink)
        check_same_device(plan=torch.empty(0, device=self.device), attn_sink=attn_sink)

    def _check_out(
        self,
        out: torch.Tensor,
        q: torch.Tensor | DSV4Rows,
        prefix: KVSource | None,
        extend: KVSource | None,
        attn_sink: torch.Tensor | None,
        tokens: int,
    ) -> None:
        heads = self.num_qo_heads
        if (
            not isinstance(out, torch.Tensor)
            or out.dtype not in _OUT_DTYPES
            or out.shape != (tokens, heads, HEAD_DIM)
            or out.stride(2) != 1
            or out.device != self.device
            or out.requires_grad
        ):
            check_dtype("out", out, _OUT_DTYPES)
            check_shape("out", out, (tokens, heads, HEAD_DIM))
            check_last_dim_contiguous("out", out)
            check_same_device(plan=torch.empty(0, device=self.device), out=out)
            check_no_grad(out=out)
        if not tokens:
            return
        # The usual output, whose rows lie one after the other, beside inputs elsewhere; else the full check.
        step, row = out.stride(0), out.stride(1)
        low = out.data_ptr() if has_memory(out) else 0
        high = low + ((tokens - 1) * step + (heads - 1) * row + HEAD_DIM) * out.element_size()
        clear = low > 0 and row >= HEAD_DIM and step >= heads * row and isinstance(q, torch.Tensor)
        for source in (prefix, extend):
            if source is not None:
                for begin, end in source.byte_ranges:
                    clear = clear and (high <= begin or end <= low)
        for x in (q, attn_sink):
            if clear and isinstance(x, torch.Tensor):
                begin = x.data_ptr()
                end = begin + x.element_size() * (
                    (tokens - 1) * x.stride(0) + (heads - 1) * x.stride(1) + HEAD_DIM if x is q else heads
                )
                clear = high <= begin or end <= low
        if not clear:
            check_no_overlap("out", out, **_inputs(q, prefix, extend, attn_sink))

    def _check_lse(
        self,
        lse: torch.Tensor,
        out: torch.Tensor,
        q: torch.Tensor | DSV4Rows,
        prefix: KVSource | None,
        extend: KVSource | None,
        attn_sink: torch.Tensor | None,
    ) -> None:
        check_dtype("lse", lse, torch.float32)
        check_shape("lse", lse, tuple(out.shape[:2]))
        check_same_device(out=out, lse=lse)
        check_no_grad(lse=lse)
        check_no_overlap("lse", lse, o=out, **_inputs(q, prefix, extend, attn_sink))

    # ---------------------------------------------------------------------------------------- launches

    def _blocks(self) -> Blocks:
        """Scratch of the largest call: the query, both sources' rows and places, partial results."""
        tokens, indices = self.max_num_tokens or 0, self.max_indices or 0
        heads, wide = self.num_qo_heads, self.query.dtype
        widens_query = self.query.is_fp8 and (self.mode == "prepass" or self.hopper is not None)
        blocks: Blocks = [((tokens * heads if widens_query else 0, HEAD_DIM), wide)]
        for rows in (self.prefix, self.extend):
            count = indices if self.mode == "prepass" and rows is not None and rows.is_fp8 else 0
            blocks += [((count, HEAD_DIM), wide), ((count,), torch.int32)]
        partials = self._partial_results(tokens) * heads
        blocks += [
            ((partials, HEAD_DIM), torch.float32),
            ((partials,), torch.float32),
            ((partials,), torch.float32),
        ]
        return blocks

    def _partial_results(self, tokens: int) -> int:
        """Splits times tokens of the call that has the most."""
        fixed = self._fixed_splits
        if fixed is not None:
            return fixed * tokens if fixed > 1 else 0
        blocks = min(
            config.head_blocks(self.num_qo_heads)
            for config in (self.plain, self.hopper)
            if config is not None
        )
        return min(num_units(self.target) // blocks, MOST_CHOSEN_SPLITS * tokens)

    def _memory(self, block: int, shape: tuple[int, ...], dtype: torch.dtype) -> torch.Tensor:
        if self._scratch:
            return self._scratch[block]
        return torch.empty(shape, dtype=dtype, device=self.device)

    def _attend(
        self,
        q: torch.Tensor | DSV4Rows,
        prefix: KVSource | None,
        extend: KVSource | None,
        attn_sink: torch.Tensor | None,
        out: torch.Tensor,
        lse: torch.Tensor | None,
        tokens: int,
    ) -> None:
        heads = self.num_qo_heads
        config = self.plain if self.hopper is None else self._choose(q, prefix, extend, out, tokens)
        first: KVSource | _Source = _NO_SOURCE if prefix is None else prefix
        second: KVSource | _Source = _NO_SOURCE if extend is None else extend
        if self.mode == "prepass":
            first, second = self._widened(first, 1), self._widened(second, 3)
        query: tuple[Any, ...]
        q_tensors: tuple[torch.Tensor, ...]
        if isinstance(q, torch.Tensor):
            token, head, _ = q.stride()
            query, q_tensors, wide_heads = (token, head), (q,), heads * head > INT32_MAX
        elif config.stages or self.mode == "prepass":
            wide = self._memory(0, (tokens * heads, HEAD_DIM), self.query.dtype)
            self._expand(q, None, tokens * heads, wide, None)
            query, q_tensors, wide_heads = (heads * HEAD_DIM, HEAD_DIM), (wide,), False
        else:
            query, q_tensors, wide_heads = q.bound.template, q.bound.stored, False
        splits = self._fixed_splits
        programs = tokens * -(-heads // config.block_h)
        if splits is None:
            mean_rows = (first.nnz + second.nnz) // tokens
            splits = choose_splits(self.target, programs, -(-mean_rows // config.block_k))
        partials: tuple[torch.Tensor, ...] = ()
        if splits > 1:
            partials = self._partials
            if not partials:
                count = splits * tokens * heads
                partials = (
                    torch.empty((count, HEAD_DIM), dtype=torch.float32, device=self.device),
                    torch.empty(count, dtype=torch.float32, device=self.device),
                    torch.empty(count, dtype=torch.float32, device=self.device),
                )
        stride_t, stride_h, _ = out.stride()
        results: tuple[torch.Tensor, ...] = (out,)
        stride_lt = stride_lh = 0
        if lse is not None:
            stride_lt, stride_lh = lse.stride()
            results = (out, lse)
        if attn_sink is not None:
            results = (*results, attn_sink)
        wide_heads = wide_heads or heads * stride_h > INT32_MAX
        key = (
            config.stages, splits > 1, first.far, second.far, wide_heads, query, out.dtype, stride_t,
            stride_h, stride_lt, stride_lh, first.number, second.number,
        )  # fmt: skip
        known = self._fixed.get(key)
        if known is None:
            known = self._fix(config, key, first, second)
        attend, merge = known
        grid = (programs, splits, 1)
        numbers: tuple[int, ...] = (tokens, splits)
        if config.stages:
            items = programs * splits
            numbers, grid = (tokens, splits, items), (min(items, num_units(self.target)), 1, 1)
        sizes = (first.num_rows, first.nnz, second.num_rows, second.nnz)
        attend(grid, (*q_tensors, *results, *partials, *first.tensors, *second.tensors, *numbers, *sizes))
        if merge is not None:
            merge((tokens * heads, 1, 1), (*results, *partials, tokens, splits))

    def _fix(
        self,
        config: SparseConfig,
        key: tuple[Any, ...],
        first: KVSource | _Source,
        second: KVSource | _Source,
    ) -> tuple[FixedLaunch, FixedLaunch | None]:
        """The launches of calls whose tensors have the dtypes and strides that `key` has."""
        _, split, *far, query, _, stride_t, stride_h, stride_lt, stride_lh, _, _ = key
        if not isinstance(query, RowPointers):
            query = RowPointers(VARIES, None, None, query[0], 0, 0, query[1], 0)
        lse, sink = VARIES if self.writes_lse else None, VARIES if self.has_sink else None
        results = Output(VARIES, lse, sink, stride_t, stride_h, stride_lt, stride_lh)
        partials = Partials(VARIES, VARIES, VARIES) if split else NO_PARTIALS
        sizes = (VARIES,) * (7 if config.stages else 6)
        arguments = (
            query, results, partials, varying(first.pointers), varying(first.csr),
            varying(second.pointers), varying(second.csr), self.sm_scale * _LOG2E, *sizes,
        )  # fmt: skip
        attend = FixedLaunch(self._attention(config, split, tuple(far)), arguments)
        merge = FixedLaunch(self._merge(), (results, partials, VARIES, VARIES)) if split else None
        kept: tuple[FixedLaunch, FixedLaunch | None] = self._keep(key, (attend, merge))
        return kept

    def _choose(
        self,
        q: torch.Tensor | DSV4Rows,
        prefix: KVSource | None,
        extend: KVSource | None,
        out: torch.Tensor,
        tokens: int,
    ) -> SparseConfig:
        """The plain configuration, or that for Hopper where it pays and can read the call."""
        if self.hopper is None or not hopper_pays(self.target, self.hopper, tokens, self.num_qo_heads):
            return self.plain
        if isinstance(q, torch.Tensor):
            if q.data_ptr() % 16 or q.stride(0) % 16 or q.stride(1) % 16 or _passes_31_bits(q):
                return self.plain
        for given in (prefix, extend):
            if given is not None and not given.int32_lists:
                return self.plain
        return self.plain if _passes_31_bits(out) else self.hopper

    def _widened(self, source: KVSource | _Source, block: int) -> KVSource | _Source:
        """The source with its FP8 rows in 16-bit scratch: all, or one row an index where those are fewer."""
        if not isinstance(source, KVSource) or not isinstance(source.rows, DSV4Rows):
            return source
        rows = source.rows
        gather = source.nnz < source.num_rows
        count = source.nnz if gather else source.num_rows
        wide = self._memory(block, (count, HEAD_DIM), self.query.dtype)
        csr = source.csr
        if gather:
            places = self._memory(block + 1, (count,), torch.int32)
            self._expand(rows, source, count, wide, places)
            csr = csr._replace(indices=places)
        else:
            self._expand(rows, None, count, wide, None)
        pointers = RowPointers(wide, None, None, HEAD_DIM, 0, 0, 0, 0)
        number = (csr.indptr.dtype, csr.indices.dtype)
        return _Source(pointers, csr, count, source.nnz, number, count * HEAD_DIM > INT32_MAX)

    def _expand(
        self,
        rows: DSV4Rows,
        named_by: KVSource | None,
        count: int,
        wide: torch.Tensor,
        places: torch.Tensor | None,
    ) -> None:
        """FP8 rows as 16-bit `[count, 512]`: the first ones, or those that index lists name."""
        gather = named_by is not None
        key = ("expand", rows.bound.template, rows.bound.format, named_by and named_by.number)
        launch = self._fixed.get(key)
        if launch is None:
            csr = NO_CSR if named_by is None else varying(named_by.csr)
            arguments = (VARIES, VARIES if gather else None, rows.bound.template, csr, VARIES, VARIES)
            launch = self._keep(
                key, FixedLaunch(self._expansion(rows.bound.format, gather=gather), arguments)
            )
        grid = (-(-count // expand_block(self.target)), 1, 1)
        if named_by is None:
            launch(grid, (wide, *rows.bound.stored, rows.num_rows, count))
        else:
            lists = named_by.csr
            launch(
                grid, (wide, places, *rows.bound.stored, lists.indptr, lists.indices, rows.num_rows, count)
            )

    def _keep(self, key: Any, launch: Any) -> Any:
        """Remembers a launch with fixed arguments."""
        if len(self._fixed) >= _MAX_FIXED:
            self._fixed.clear()
        self._fixed[key] = launch
        return launch

    def _expansion(self, rows: RowsFormat, *, gather: bool) -> BoundLaunch:
        key = (rows, gather)
        if key not in self._launches:
            self._launches[key] = bind_expand(rows, self.target, gather=gather)
        return self._launches[key]

    def _attention(self, config: SparseConfig, split: bool, far: tuple[bool, bool, bool]) -> BoundLaunch:
        """The attention kernel; `far`: whether prefix, extend, and heads need 64-bit offsets."""
        key = (config.stages, split, far)
        known = self._launches.get(key)
        if known is not None:
            return known
        call = Call(self.num_qo_heads, self.has_sink, self.writes_lse, split, far[2])
        query, prefix, extend = self.query, self.prefix, self.extend
        if self.mode == "prepass" or config.stages:
            query = _QUERIES["fp16" if query.dtype == torch.float16 else "bf16"]
        if self.mode == "prepass":
            prefix, extend = (None if rows is None else query for rows in (prefix, extend))
        prefix, extend = (
            None if rows is None else rows._replace(offsets_64_bit=wide)
            for rows, wide in zip((prefix, extend), far, strict=False)
        )
        self._launches[key] = bind_attention(config, call, self.target, query, prefix, extend)
        return self._launches[key]

    def _merge(self) -> BoundLaunch:
        if "merge" not in self._launches:
            call = Call(self.num_qo_heads, self.has_sink, self.writes_lse, False, False)
            self._launches["merge"] = bind_merge(call)
        return self._launches["merge"]


def _inputs(
    q: torch.Tensor | DSV4Rows,
    prefix: KVSource | None,
    extend: KVSource | None,
    attn_sink: torch.Tensor | None,
) -> dict[str, torch.Tensor | None]:
    """All tensors that a call reads, by name."""
    inputs: dict[str, torch.Tensor | None] = {"attn_sink": attn_sink}
    if isinstance(q, DSV4Rows):
        inputs |= {part.replace("rows", "q"): x for part, x in q.bound.tensors.items()}
    else:
        inputs["q"] = q
    for name, source in (("prefix", prefix), ("extend", extend)):
        if source is not None:
            inputs |= {f"{name}.{part}": x for part, x in source.bound.tensors.items()}
            inputs |= {f"{name}.indptr": source.indptr, f"{name}.indices": source.indices}
    return inputs


def _passes_31_bits(x: torch.Tensor) -> bool:
    """Whether an offset from a token's first head to its last can pass 31 bits."""
    return x.shape[1] * x.stride(1) > INT32_MAX


def _refuse_source(name: str, planned: RowsFormat | None, given: object) -> None:
    if given is not None and not isinstance(given, KVSource):
        raise TypeError(f"{name} must be a KVSource or None, got {type(given).__name__}")
    wanted = "None" if planned is None else "a KVSource"
    raise ValueError(f"{name} must be {wanted} as planned, got {type(given).__name__}")


def _check_values(
    q: torch.Tensor | DSV4Rows,
    prefix: KVSource | None,
    extend: KVSource | None,
    attn_sink: torch.Tensor | None,
) -> None:
    """Reads what is on the device and refuses wrong values."""
    if isinstance(q, DSV4Rows):
        check_scales("q", q)
    for name, source in (("prefix", prefix), ("extend", extend)):
        if source is not None:
            source.check_values(name)
    if attn_sink is not None and bool(attn_sink.isnan().any()):
        raise ValueError("attn_sink must not hold NaN: -inf is no sink")


def plan_sparse(
    *,
    num_qo_heads: int,
    prefix: RowsFormat | None,
    extend: RowsFormat | None = None,
    query: str | RowsFormat = "bf16",
    device: torch.device | str,
    mode: str = "auto",
    sm_scale: float | None = None,
    has_sink: bool = False,
    return_lse: bool = False,
    num_splits: int | None = None,
    batch_invariant: bool = False,
    max_num_tokens: int | None = None,
    max_indices: int | None = None,
    workspace: Workspace | None = None,
) -> SparsePlan:
    """Plans sparse attention from formats and a device, before there are tensors.

    Args:
        num_qo_heads: query heads: 8, 16, 32, 64 or 128.
        prefix, extend: how the rows of each source are stored, `RowsFormat` (of rows that are there:
            `KVSource.bound.format`); None for a source that is absent.
        query: "bf16" or "fp16", or the `RowsFormat` of a query in `DSV4Rows`.
        device: where all tensors lie.
        mode: "wide" for 16-bit rows; "fused" or "prepass" for FP8 rows, see `sparse_prefill_fp8`; "auto" is
            "wide" over 16-bit rows, "prepass" where one source is 16-bit, else "fused".
        sm_scale: softmax scale, default `512 ** -0.5`.
        has_sink: whether calls have an `attn_sink`.
        return_lse: whether calls write the log-sum-exp.
        num_splits, batch_invariant: as for `sparse_decode`.
        max_num_tokens, max_indices: the largest call: tokens, and indices of each source. Both or neither;
            without them a call allocates scratch and partial results itself.
        workspace: memory to use, at least `workspace_bytes()`; None makes one. Plans that never run at the
            same time may share one.

    Returns:
        A plan; `plan.run(q, prefix, extend)` attends.

    Raises:
        TypeError, ValueError: naming the argument, what was expected and what came.
        UnsupportedError: what no kernel serves.

    Example:
        >>> rows = RowsFormat("packed584", page_size=64, format="fp8_e4m3fn")
        >>> plan = plan_sparse(num_qo_heads=16, prefix=rows, device="cpu", max_num_tokens=8, max_indices=64)
        >>> plan.mode, plan.workspace_bytes() <= plan.workspace.num_bytes
        ('fused', True)
    """
    if num_qo_heads not in NUM_HEADS:
        raise ValueError(f"num_qo_heads must be one of {NUM_HEADS}, got {num_qo_heads!r}")
    check_choice("mode", mode, ("auto", "wide", "fused", "prepass"))
    if isinstance(query, str):
        check_choice("query", query, tuple(_QUERIES))
        query = _QUERIES[query]
    formats = {"query": query, "prefix": prefix, "extend": extend}
    for name, rows in formats.items():
        if rows is not None and not isinstance(rows, RowsFormat):
            raise TypeError(f"{name} must be a RowsFormat, got {type(rows).__name__}")
    scale = HEAD_DIM**-0.5 if sm_scale is None else check_finite_float("sm_scale", sm_scale)
    if num_splits is not None and check_positive_int("num_splits", num_splits) > MOST_SPLITS:
        raise ValueError(f"num_splits must be at most {MOST_SPLITS}, got {num_splits}")
    if (max_num_tokens is None) != (max_indices is None):
        raise ValueError("max_num_tokens and max_indices must both be given or both be None, got one")
    if workspace is not None and check_instance("workspace", workspace, Workspace) and max_num_tokens is None:
        raise ValueError(
            "workspace must be None without max_num_tokens and max_indices, which it is sized by"
        )
    place = torch.empty(0, device=device).device  # with the index of the current GPU
    mode = _resolve(mode, prefix, extend)
    _check_formats(mode, query, prefix, extend)
    target = active_target(place)
    plan = _make_plan(
        mode, target, _compiles(place), place, num_qo_heads, query, prefix, extend, scale, has_sink,
        return_lse, num_splits, batch_invariant,
    )  # fmt: skip
    if max_num_tokens is None or max_indices is None:
        return plan
    plan = replace(
        plan,
        max_num_tokens=check_positive_int("max_num_tokens", max_num_tokens),
        max_indices=check_positive_int("max_indices", max_indices),
    )
    if workspace is None:
        workspace = Workspace(plan.workspace_bytes(), place)
    if workspace.device != place:
        raise ValueError(f"workspace must be on {place} like the plan, got {workspace.device}")
    return replace(plan, workspace=workspace, _scratch=workspace.carve(plan._blocks()))


def _resolve(mode: str, prefix: RowsFormat | None, extend: RowsFormat | None) -> str:
    given = [rows for rows in (prefix, extend) if rows is not None]
    if mode != "auto" or not given:
        return mode
    narrow = [rows.is_fp8 for rows in given]
    return "fused" if all(narrow) else "prepass" if any(narrow) else "wide"


def _check_formats(
    mode: str, query: RowsFormat, prefix: RowsFormat | None, extend: RowsFormat | None
) -> None:
    """Refuses sources and queries that a mode cannot attend together."""
    named = {name: rows for name, rows in (("prefix", prefix), ("extend", extend)) if rows is not None}
    if not named:
        raise ValueError("prefix or extend must be given, got None for both")
    if mode == "wide":
        if query.is_fp8:
            raise TypeError("q must be a bf16 or fp16 tensor over 16-bit rows, got DSV4Rows")
        for name, rows in named.items():
            if rows.is_fp8:
                raise UnsupportedError(
                    f"{name}.rows must be a bf16 or fp16 tensor here, got DSV4Rows: use sparse_prefill_fp8"
                )
    elif not any(rows.is_fp8 for rows in named.values()):
        raise UnsupportedError(
            "prefix.rows or extend.rows must be DSV4Rows here, got 16-bit rows: use sparse_prefill"
        )
    formats = {rows.format for rows in (query, *named.values()) if rows.is_fp8}
    if len(formats) > 1:
        raise UnsupportedError(
            f"q and all sources must have one FP8 format, got {', '.join(sorted(formats))}"
        )
    if mode == "fused":
        check_fused(named)
    for name, rows in named.items():
        if not rows.is_fp8 and rows.dtype != query.dtype:
            raise TypeError(f"{name}.rows must have the dtype of q, {query.dtype}, got {rows.dtype}")


def check_fused(rows: dict[str, RowsFormat]) -> None:
    """Refuses 16-bit rows, which the fused kernel does not read.

    Raises:
        UnsupportedError: naming the source and what works.
    """
    for name, stored in rows.items():
        if not stored.is_fp8:
            raise UnsupportedError(
                f"{name}.rows must be DSV4Rows for the fused kernel, got 16-bit rows: quantise them with "
                "DSV4Rows.quantize, or use mode='prepass' of sparse_prefill_fp8, which takes both kinds"
            )


def query_format(q: torch.Tensor | DSV4Rows) -> RowsFormat:
    """How a query is stored; the addresses of a 16-bit one are looked at in each call.

    Raises:
        TypeError: q is neither a bf16 or fp16 tensor nor `DSV4Rows`.
    """
    if isinstance(q, DSV4Rows):
        return q.bound.format
    if not isinstance(q, torch.Tensor):
        raise TypeError(f"q must be a torch.Tensor or DSV4Rows, got {type(q).__name__}")
    check_dtype("q", q, (torch.bfloat16, torch.float16))
    return _QUERIES["bf16" if q.dtype is torch.bfloat16 else "fp16"]


def plan_for(
    q: torch.Tensor | DSV4Rows,
    prefix: KVSource | None,
    extend: KVSource | None,
    *,
    mode: str,
    attn_sink: torch.Tensor | None,
    sm_scale: float | None,
    return_lse: bool,
    num_qo_heads: int | None,
    num_splits: int | None = None,
    batch_invariant: bool = False,
) -> SparsePlan:
    """The plan of a call that was not planned, from a small cache.

    Raises:
        TypeError, ValueError: naming the argument, what was expected and what came.
    """
    query = query_format(q)
    formats: list[RowsFormat | None] = []
    for name, source in (("prefix", prefix), ("extend", extend)):
        if source is not None and not isinstance(source, KVSource):
            raise TypeError(f"{name} must be a KVSource or None, got {type(source).__name__}")
        formats.append(None if source is None else source.format)
    first = prefix if prefix is not None else extend
    if first is None:
        raise ValueError("prefix or extend must be a KVSource, got None for both")
    heads = _num_heads(q, first.num_tokens, num_qo_heads)
    if mode == "auto":
        mode = _resolve(mode, formats[0], formats[1])
    _check_formats(mode, query, formats[0], formats[1])
    scale = HEAD_DIM**-0.5 if sm_scale is None else check_finite_float("sm_scale", sm_scale)
    device = q.device
    compiled = is_compiled(q.data if isinstance(q, DSV4Rows) else q)
    return _make_plan(
        mode, active_target(device), compiled, device, heads, query, formats[0], formats[1], scale,
        attn_sink is not None, return_lse, num_splits, batch_invariant,
    )  # fmt: skip


_known: dict[Any, SparsePlan] = {}


def known_plan(
    q: torch.Tensor | DSV4Rows, prefix: KVSource | None, extend: KVSource | None, *options: Any
) -> tuple[Any, SparsePlan | None]:
    """What calls like this one are remembered by, and the plan that `remember` kept for it.

    Everything that a mode and a plan depend on is part of the key, which is None for wrong classes.
    """
    try:
        running = executor()
        query = (
            (q.shape[1:], q.dtype, q.requires_grad) if isinstance(q, torch.Tensor)
            else (q.bound.format, q.num_rows)
        )  # fmt: skip
        sources = tuple(
            None if source is None else (source.number, source.num_tokens, source.nnz, source.num_rows)
            for source in (prefix, extend)
        )
        key = (query, q.device, sources, options, None if running is None else running.target.name)
        return key, _known.get(key)
    except (AttributeError, TypeError):
        return None, None


def remember(key: Any, plan: SparsePlan) -> SparsePlan:
    """Keeps the plan for calls with this key."""
    if len(_known) >= _MAX_FIXED:
        _known.clear()
    if key is not None:
        _known[key] = plan
    return plan


def _num_heads(q: torch.Tensor | DSV4Rows, tokens: int, num_qo_heads: int | None) -> int:
    if isinstance(q, DSV4Rows):
        heads = query_heads(q, tokens, num_qo_heads)
        spare = q.num_rows - heads * tokens
        if heads not in NUM_HEADS or not 0 <= spare < (1 if num_qo_heads is None else q.page_size):
            raise ValueError(
                f"q must hold num_tokens * num_qo_heads rows, num_qo_heads one of {NUM_HEADS}, for {tokens} "
                f"tokens; got {q.num_rows} rows and num_qo_heads={num_qo_heads}"
            )
        return heads
    check_shape("q", q, ("num_tokens", "num_qo_heads", HEAD_DIM))
    if q.shape[1] not in NUM_HEADS:
        raise ValueError(f"q must have num_qo_heads in {NUM_HEADS}, got {q.shape[1]}")
    if num_qo_heads not in (None, q.shape[1]):
        raise ValueError(f"num_qo_heads must be {q.shape[1]} as q has it, got {num_qo_heads}")
    return q.shape[1]


def _compiles(device: torch.device) -> bool:
    return is_compiled(torch.empty(0, device=device))


@lru_cache(maxsize=_CACHED_PLANS)
def _make_plan(
    mode: str, target: Target, compiled: bool, device: torch.device, num_heads: int, query: RowsFormat,
    prefix: RowsFormat | None, extend: RowsFormat | None, sm_scale: float, has_sink: bool, writes_lse: bool,
    num_splits: int | None, batch_invariant: bool,
) -> SparsePlan:  # fmt: skip
    """A plan without maxima; calls that are not planned find theirs here."""
    kernel = "fused" if mode == "fused" else "wide"
    rows = [each for each in (prefix, extend) if each is not None]
    fp8_qk = False
    if kernel == "fused":
        narrow = [*rows, query] if query.is_fp8 else rows
        route = route_of(target, narrow)
        groups = {each.scale_group for each in narrow}
        fp8_qk = query.is_fp8 and route != BITS and groups == {64}
    hopper = None
    if compiled and not batch_invariant and suits_hopper(mode, target, query, prefix, extend):
        hopper = hopper_config(target, kernel=kernel, num_heads=num_heads)
    return SparsePlan(
        mode, target, device, num_heads, query, prefix, extend, sm_scale, has_sink, writes_lse, num_splits,
        batch_invariant, None, None,
        choose_config(
            target, kernel=kernel, num_heads=num_heads, fp8_qk=fp8_qk, fp16_query=query.layout == "fp16"
        ),
        hopper,
    )  # fmt: skip


def suits_hopper(
    mode: str, target: Target, query: RowsFormat, prefix: RowsFormat | None, extend: RowsFormat | None
) -> bool:
    """Whether a kernel for Hopper can read rows and a query that are stored in these ways.

    It copies 16 bytes at once and reads both sources one way. FP8 rows it widens to bf16, as the hardware
    converts them, by a scale for 64 columns; a query in FP8 is widened first, whatever its layout.
    """
    rows = [each for each in (prefix, extend) if each is not None]
    if mode == "prepass":
        # What is not widened to scratch of its own is read where it lies.
        rows = [each for each in rows if not each.is_fp8]
    if not all(each.aligned for each in rows) or not (query.is_fp8 or query.aligned):
        return False
    if mode != "fused":
        return True
    return (
        query.dtype == torch.bfloat16
        and len({each.layout for each in rows}) == 1
        and all(each.scale_group == 64 for each in rows)
        and all(route_of(target, [each]) == NATIVE for each in (*rows, query) if each.is_fp8)
    )
