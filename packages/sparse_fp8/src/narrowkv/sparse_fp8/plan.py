"""The plan of sparse attention: which kernels run, how the work is divided, and what memory it takes."""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from typing import Any

import torch

from narrowkv.runtime.launch import BoundLaunch, Workspace, block_bytes
from narrowkv.runtime.launch.tracing import handle_of
from narrowkv.sparse_fp8.binding import INT32_MAX, NO_CSR, NO_ROWS
from narrowkv.sparse_fp8.checks import PlannedCall, check_values
from narrowkv.sparse_fp8.config import (
    INVARIANT_SPLITS,
    MOST_BUFFER_BYTES,
    MOST_CHOSEN_SPLITS,
    SparseConfig,
    choose_splits,
    compute_units_of,
    specialised_pays,
)
from narrowkv.sparse_fp8.kernels.rows import RowPointers
from narrowkv.sparse_fp8.launch import CallLayout, SparseLaunches
from narrowkv.sparse_fp8.layouts import HEAD_DIM
from narrowkv.sparse_fp8.rows import DSV4Rows
from narrowkv.sparse_fp8.sources import KVSource

__all__ = ["SparsePlan"]

Result = torch.Tensor | tuple[torch.Tensor, torch.Tensor]
Blocks = list[tuple[tuple[int, ...], torch.dtype]]
_MAX_CHOICES = 1024


class _ExpandedSource:
    """The part of a `KVSource` that an attention kernel reads after its rows were expanded to 16 bits."""

    __slots__ = ("csr", "format_id", "nnz", "num_rows", "offsets_64_bit", "pointers", "tensors")

    def __init__(self, rows: torch.Tensor | None, num_rows: int, csr: Any, nnz: int) -> None:
        self.pointers = NO_ROWS if rows is None else RowPointers(rows, None, None, rows.stride(0), 0, 0, 0, 0)
        self.num_rows, self.csr, self.nnz = num_rows, csr, nnz
        self.offsets_64_bit = rows is not None and rows.numel() > INT32_MAX
        # Dtype and strides of scratch rows are the plan's; only the index lists differ between calls.
        self.format_id = None if rows is None else (csr.indptr.dtype, csr.indices.dtype)
        self.tensors = () if rows is None else (rows, csr.indptr, csr.indices)


_NO_SOURCE = _ExpandedSource(None, 0, NO_CSR, 0)


@dataclass(frozen=True, eq=False, kw_only=True)
class SparsePlan(PlannedCall):
    """Sparse attention over rows that are stored in one way, for any number of tokens up to a maximum.

    Made by `plan_sparse`. `run` does not wait for the device. With a maximum it allocates only outputs that
    are not given, so a graph can capture it and replay it with other rows, index lists and queries in
    the same tensors. Two plans are equal only if they are the same object.

    Attributes:
        sm_scale: the softmax scale.
        num_splits: programs that share a token's rows; None chooses by the number of tokens.
        batch_invariant: whether the bits of a token's result depend on the token alone.
        portable: the configuration of the portable kernel.
        specialised: the configuration of a kernel for the target's family, which runs where it is faster and
            can read the call; None on other targets.
        workspace: memory for scratch and partial results.
        handle: the name by which operators of `torch.ops.narrowkv` find the plan in this process.

    The other attributes are those of `PlannedCall`.
    """

    sm_scale: float
    num_splits: int | None
    batch_invariant: bool
    portable: SparseConfig
    specialised: SparseConfig | None
    workspace: Workspace | None = None
    _scratch: tuple[torch.Tensor, ...] = field(default=(), repr=False)
    handle: str = field(init=False, repr=False)
    _launches: SparseLaunches = field(init=False, repr=False)
    # Found once: the number of splits unless it depends on the call, and the memory of partial results.
    _fixed_splits: int | None = field(init=False, repr=False)
    _partials: tuple[torch.Tensor, ...] = field(init=False, repr=False)
    _choices: dict[tuple[int, int, bool], tuple[SparseConfig, int]] = field(init=False, repr=False)

    def __post_init__(self) -> None:
        """Computes the values that every call reads."""
        super().__post_init__()
        splits = self.num_splits
        if splits is None and self.batch_invariant:
            splits = INVARIANT_SPLITS
        object.__setattr__(self, "handle", handle_of(self))
        object.__setattr__(self, "_launches", SparseLaunches(self.planned_call(), self.sm_scale))
        object.__setattr__(self, "_fixed_splits", splits)
        object.__setattr__(self, "_partials", self._scratch[5:])
        object.__setattr__(self, "_choices", {})

    def __deepcopy__(self, memo: dict[int, object]) -> SparsePlan:
        """A new plan over the same memory, whose addresses captured graphs hold."""
        return replace(self)

    def explain(self) -> str:
        """One line: which kernels run, how the work is divided, and what memory it takes."""
        other = (
            ""
            if self.specialised is None
            else f"; {self.specialised.explain()} where it is faster and reads the call"
        )
        splits = (
            "splits by the number of tokens" if self._fixed_splits is None else f"{self._fixed_splits} splits"
        )
        before = "quantised rows are widened first; " if self.mode == "prepass" else ""
        return f"{before}{self.portable.explain()}{other}; {splits}; workspace {self.workspace_bytes()} bytes"

    def workspace_bytes(self) -> int:
        """Bytes of workspace that the largest call takes; 0 for a plan without maxima."""
        return block_bytes(self.workspace_blocks()) if self.max_num_tokens is not None else 0

    def kernels(self) -> list[BoundLaunch]:
        """Every kernel that a call can launch, for compiling them beforehand."""
        found: list[BoundLaunch] = []
        launches, fixed = self._launches, self._fixed_splits
        for config in (self.portable, self.specialised):
            if config is None:
                continue
            for split in (False, True) if fixed is None else (fixed > 1,):
                found.append(launches.bound_attention(config, split, (False, False, False)))
                if split:
                    found.append(launches.bound_merge())
        if self.query.is_quantized and (self.mode == "prepass" or self.specialised is not None):
            found.append(launches.bound_expansion(self.query, gather=False))
        if self.mode == "prepass":
            for rows in (self.prefix, self.extend):
                if rows is not None and rows.is_quantized:
                    found += [launches.bound_expansion(rows, gather=gather) for gather in (False, True)]
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
        tokens = self.check_inputs(q, prefix, extend, attn_sink)
        if validate:
            check_values(q, prefix, extend, attn_sink)
        if out is None:
            out = torch.empty(
                (tokens, self.num_qo_heads, HEAD_DIM), dtype=self.query_dtype, device=self.device
            )
        else:
            self.check_out(out, q, prefix, extend, attn_sink, tokens)
        if self.writes_lse:
            if lse is None:
                lse = torch.empty((tokens, self.num_qo_heads), dtype=torch.float32, device=self.device)
            else:
                self.check_lse(lse, out, q, prefix, extend, attn_sink)
        elif lse is not None:
            raise ValueError("lse must be None for a plan that does not write it: plan with return_lse=True")
        if tokens:
            self._attend(q, prefix, extend, attn_sink, out, lse, tokens)
        return out if lse is None else (out, lse)

    def workspace_blocks(self) -> Blocks:
        """Shape and dtype of each block of the largest call's workspace.

        In order: the expanded query; rows and places of the expanded prefix, then of the extend; partial
        outputs, maxima and sums.
        """
        tokens, indices = self.max_num_tokens or 0, self.max_indices or 0
        heads, dtype = self.num_qo_heads, self.query_dtype
        expands_query = self.query.is_quantized and (self.mode == "prepass" or self.specialised is not None)
        blocks: Blocks = [((tokens * heads if expands_query else 0, self.head_dim), dtype)]
        for rows in (self.prefix, self.extend):
            count = indices if self.mode == "prepass" and rows is not None and rows.is_quantized else 0
            blocks += [((count, self.head_dim), dtype), ((count,), torch.int32)]
        return blocks + _partial_blocks(self._most_partials(tokens) * heads)

    def _most_partials(self, tokens: int) -> int:
        """Splits times tokens of the call that has the most."""
        fixed = self._fixed_splits
        if fixed is not None:
            return fixed * tokens if fixed > 1 else 0
        blocks = min(
            config.head_blocks(self.num_qo_heads)
            for config in (self.portable, self.specialised)
            if config is not None
        )
        return min(compute_units_of(self.target) // blocks, MOST_CHOSEN_SPLITS * tokens)

    def _scratch_block(self, number: int, shape: tuple[int, ...], dtype: torch.dtype) -> torch.Tensor:
        """A block of the workspace, or new memory for a plan without one."""
        if self._scratch:
            return self._scratch[number]
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
        """Launches the kernels of a checked call with at least one token."""
        heads = self.num_qo_heads
        mean_rows = ((0 if prefix is None else prefix.nnz) + (0 if extend is None else extend.nnz)) // tokens
        reads = self.specialised is not None and self._specialised_reads(q, prefix, extend, out)
        choice = self._choices.get((tokens, mean_rows, reads))
        config, splits = self._configuration(tokens, mean_rows, reads) if choice is None else choice
        first: KVSource | _ExpandedSource = _NO_SOURCE if prefix is None else prefix
        second: KVSource | _ExpandedSource = _NO_SOURCE if extend is None else extend
        if self.mode == "prepass":
            first, second = self._expanded(first, 1), self._expanded(second, 3)
        query, q_tensors, head_offsets_64_bit = self._query_arguments(q, config, tokens)
        programs = tokens * -(-heads // config.block_h)
        partials: tuple[torch.Tensor, ...] = ()
        if splits > 1:
            partials = self._partials or tuple(
                torch.empty(shape, dtype=dtype, device=self.device)
                for shape, dtype in _partial_blocks(splits * tokens * heads)
            )
        stride_t, stride_h, _ = out.stride()
        results: tuple[torch.Tensor, ...] = (out,)
        stride_lt = stride_lh = 0
        if lse is not None:
            stride_lt, stride_lh = lse.stride()
            results = (out, lse)
        if attn_sink is not None:
            results = (*results, attn_sink)
        layout = CallLayout(
            config.family, splits > 1, first.offsets_64_bit, second.offsets_64_bit,
            head_offsets_64_bit or heads * stride_h > INT32_MAX, query, out.dtype, stride_t, stride_h,
            stride_lt, stride_lh, first.format_id, second.format_id,
        )  # fmt: skip
        attend, merge = self._launches.attention(
            config, layout, (first.pointers, first.csr), (second.pointers, second.csr)
        )
        grid = (programs, splits, 1)
        numbers: tuple[int, ...] = (tokens, splits)
        if config.family == "hopper":
            items = programs * splits
            numbers, grid = (tokens, splits, items), (min(items, compute_units_of(self.target)), 1, 1)
        sizes = (first.num_rows, first.nnz, second.num_rows, second.nnz)
        attend(grid, (*q_tensors, *results, *partials, *first.tensors, *second.tensors, *numbers, *sizes))
        if merge is not None:
            merge((tokens * heads, 1, 1), (*results, *partials, tokens, splits))

    def _query_arguments(
        self, q: torch.Tensor | DSV4Rows, config: SparseConfig, tokens: int
    ) -> tuple[tuple[Any, ...], tuple[torch.Tensor, ...], bool]:
        """Layout and tensors of the query, expanded to 16 bits if the kernel reads no FP8.

        Returns:
            The layout as in `CallLayout.query`, the tensors, and whether offsets of heads can pass 31 bits.
        """
        heads = self.num_qo_heads
        if isinstance(q, torch.Tensor):
            token, head, _ = q.stride()
            return (token, head), (q,), heads * head > INT32_MAX
        if config.family != "portable" or self.mode == "prepass":
            expanded = self._scratch_block(0, (tokens * heads, self.head_dim), self.query_dtype)
            self._launches.expand(q, None, tokens * heads, expanded, None)
            return (heads * self.head_dim, self.head_dim), (expanded,), False
        return q.bound.template, q.bound.stored, False

    def _configuration(self, tokens: int, mean_rows: int, reads: bool) -> tuple[SparseConfig, int]:
        """The specialised configuration where it is faster and `reads` the call, else the portable one.

        Returns:
            The configuration, and the programs that share a token's rows; kept for calls of this size.
        """
        config, splits = self.portable, self._splits(self.portable, tokens, mean_rows)
        if self.specialised is not None and reads:
            wanted = self._splits(self.specialised, tokens, mean_rows)
            if specialised_pays(self.specialised, -(-mean_rows // (wanted * self.specialised.block_k))):
                config, splits = self.specialised, wanted
        if len(self._choices) >= _MAX_CHOICES:
            self._choices.clear()
        self._choices[tokens, mean_rows, reads] = config, splits
        return config, splits

    def _splits(self, config: SparseConfig, tokens: int, mean_rows: int) -> int:
        """Programs that share a token's rows."""
        if self._fixed_splits is not None:
            return self._fixed_splits
        heads = self.num_qo_heads
        return choose_splits(
            self.target,
            config,
            tokens * config.head_blocks(heads),
            -(-mean_rows // config.block_k),
            tokens * heads * HEAD_DIM * 4,
        )

    def _specialised_reads(
        self, q: torch.Tensor | DSV4Rows, prefix: KVSource | None, extend: KVSource | None, out: torch.Tensor
    ) -> bool:
        """Whether the specialised kernel can read the tensors of a call."""
        if isinstance(q, torch.Tensor):
            if q.data_ptr() % 16 or q.stride(0) % 16 or q.stride(1) % 16 or _offsets_pass_31_bits(q):
                return False
        for given in (prefix, extend):
            if given is not None and not (given.int32_lists and self._reaches(given)):
                return False
        return not _offsets_pass_31_bits(out)

    def _reaches(self, source: KVSource) -> bool:
        """Whether the specialised kernel's offsets reach all rows and indices of a source."""
        assert self.specialised is not None
        if self.specialised.family != "cdna":
            return True
        if isinstance(source.rows, torch.Tensor) or self.mode == "fused":
            most = max(end - begin for begin, end in source.byte_ranges)
        else:
            most = min(source.num_rows, source.nnz) * HEAD_DIM * 2
        return max(most, source.nnz * 4) <= MOST_BUFFER_BYTES

    def _expanded(self, source: KVSource | _ExpandedSource, block: int) -> KVSource | _ExpandedSource:
        """The source with its quantised rows expanded to 16 bits in scratch memory from block `block` on.

        If there are fewer indices than rows, only the rows that they name are expanded, one for each index.
        """
        if not isinstance(source, KVSource) or not isinstance(source.rows, DSV4Rows):
            return source
        rows = source.rows
        gather = source.nnz < source.num_rows
        count = source.nnz if gather else source.num_rows
        expanded = self._scratch_block(block, (count, self.head_dim), self.query_dtype)
        csr = source.csr
        if gather:
            places = self._scratch_block(block + 1, (count,), torch.int32)
            self._launches.expand(rows, source, count, expanded, places)
            csr = csr._replace(indices=places)
        else:
            self._launches.expand(rows, None, count, expanded, None)
        return _ExpandedSource(expanded, count, csr, source.nnz)


def _partial_blocks(count: int) -> Blocks:
    """Shape and dtype of partial outputs, maxima and sums."""
    return [((count, HEAD_DIM), torch.float32), ((count,), torch.float32), ((count,), torch.float32)]


def _offsets_pass_31_bits(x: torch.Tensor) -> bool:
    """Whether an offset in bytes from a token's first head to its last can pass 31 bits."""
    return x.shape[1] * x.stride(1) * x.element_size() > INT32_MAX
