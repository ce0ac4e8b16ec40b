"""Sparse attention as an operation: which kernels run, how the work is divided, what memory it takes."""

from __future__ import annotations

from dataclasses import dataclass, field
from functools import cached_property
from typing import TYPE_CHECKING, Any, ClassVar

import torch

from narrowkv.runtime.errors import refuse_overlap, span_bytes
from narrowkv.runtime.launch import Arg, BoundLaunch, Part, named_values
from narrowkv.runtime.launch.workspace import Block
from narrowkv.runtime.operation import Prepared, metadata_of
from narrowkv.sparse_fp8.binding import INT32_MAX, begins_aligned
from narrowkv.sparse_fp8.checks import SparseSettings, check_values, inputs_of
from narrowkv.sparse_fp8.config import (
    INVARIANT_SPLITS,
    MOST_BUFFER_BYTES,
    MOST_CHOSEN_SPLITS,
    SparseConfig,
    choose_splits,
    programs_at_once,
    specialised_pays,
)
from narrowkv.sparse_fp8.launches import (
    SideLayout,
    SparseLayout,
    attention_kernel,
    expand_block,
    expansion_kernel,
    merge_kernel,
    prepare,
)
from narrowkv.sparse_fp8.layouts import HEAD_DIM
from narrowkv.sparse_fp8.options import OPERATIONS, SparseArguments
from narrowkv.sparse_fp8.rows import DSV4Rows
from narrowkv.sparse_fp8.sources import Source

if TYPE_CHECKING:
    from typing_extensions import Unpack

    from narrowkv.sparse_fp8.options import SparseRunOptions

__all__ = ["SparsePlan"]

Result = torch.Tensor | tuple[torch.Tensor, torch.Tensor]
_NOTHING: dict[str, Any] = {}


@dataclass(frozen=True, eq=False, slots=True, kw_only=True)
class PreparedSparse(Prepared):
    """A checked call.

    Attributes:
        sizes: grids, sizes and places of scratch in the block that a call without a workspace allocates, as
            values of its launches.

    The other attributes are those of `Prepared`.
    """

    sizes: dict[str, int] = field(default_factory=dict)


@dataclass(frozen=True, eq=False, kw_only=True)
class SparsePlan(SparseSettings):
    """Sparse attention over rows that are stored in one way, for any number of tokens up to a maximum.

    Made by `plan_sparse`. `run` does not wait for the device. With a maximum it allocates only outputs that
    are not given, so a graph can capture it and replay it with other rows, index lists and queries in
    the same tensors. Two plans are equal only if they are the same object.

    Attributes:
        num_splits: programs that share a token's rows; None chooses by the number of tokens.
        batch_invariant: whether the bits of a token's result depend on nothing but the token.
        portable: the configuration of the portable kernel.
        specialised: the configuration of a kernel for the target's family, which runs where it is faster and
            can read the call; None on other targets.
        max_seq_len: rows of the longest sequence over a page table; None takes what the table has room for.

    The other attributes are those of `SparseSettings`.
    """

    num_splits: int | None
    batch_invariant: bool
    portable: SparseConfig
    specialised: SparseConfig | None
    max_seq_len: int | None = None
    most_calls: ClassVar[int] = 1024

    @cached_property
    def _fixed_splits(self) -> int | None:
        """The number of splits, unless it depends on the call."""
        if self.num_splits is None and self.batch_invariant:
            return INVARIANT_SPLITS
        return self.num_splits

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

    def kernels(self) -> list[BoundLaunch]:
        """Every kernel that a call can launch, for compiling them beforehand."""
        found: list[BoundLaunch] = []
        fixed = self._fixed_splits
        for config in (self.portable, self.specialised):
            if config is None:
                continue
            for split in (False, True) if fixed is None else (fixed > 1,):
                found.append(attention_kernel(self, config, split, (False, False, False)))
                if split:
                    found.append(merge_kernel(self))
        if self._expands_queries:
            found.append(expansion_kernel(self, self.query, gather=False))
        if self.mode == "prepass":
            for rows in (self.prefix, self.extend):
                if rows is not None and rows.is_quantized:
                    found += [expansion_kernel(self, rows, gather=gather) for gather in (False, True)]
        return list({id(launch): launch for launch in found}.values())

    @property
    def _expands_queries(self) -> bool:
        """Whether a kernel of the plan reads a quantised query in 16 bits only."""
        return self.query.is_quantized and (self.mode == "prepass" or self.specialised is not None)

    def run(
        self,
        q: torch.Tensor | DSV4Rows,
        prefix: Source | None,
        extend: Source | None = None,
        **options: Unpack[SparseRunOptions],
    ) -> Result:
        """Attends.

        Args:
            q, prefix, extend: as planned; at most `max_num_tokens` tokens and `max_indices` indices.
            **options: `attn_sink` if the plan has a sink, `out`, `lse` if the plan writes it, `validate`; see
                `SparseRunOptions`.

        Returns:
            `o`, or `(o, lse)`; see `sparse_prefill`.

        Raises:
            TypeError, ValueError: arguments that the plan is not for, naming the argument.
        """
        if not options.keys() <= OPERATIONS["run"].keywords:
            OPERATIONS["run"].check_keywords(options)
        return self.call(SparseArguments(q, prefix, extend, **options))

    def call(self, given: SparseArguments) -> Result:
        """A call by this plan; see `run`. Of `given` only the arguments of `run` are read."""
        q, prefix, extend, attn_sink, out, lse = given[:6]
        grad = torch.is_grad_enabled()
        try:
            signature = (
                None if prefix is None else (prefix.signature, grad and prefix.requires_grad),
                None if extend is None else (extend.signature, grad and extend.requires_grad),
                (q.bound.format_id, q.device, q.num_rows)
                if isinstance(q, DSV4Rows)
                else (q.shape, q.stride(), q.dtype, q.device, grad and q.requires_grad, begins_aligned(q)),
                None if attn_sink is None else (metadata_of(attn_sink), grad and attn_sink.requires_grad),
                None if out is None else metadata_of(out), None if lse is None else metadata_of(lse),
            )  # fmt: skip
            call: PreparedSparse | None = self.calls.get(signature)
        except (AttributeError, TypeError):
            self._check(given)  # says which argument is of another class
            raise
        if call is None or given.validate:
            self._check(given)
            call = call or self.calls.keep(signature, self._prepare(given))
        if self.writes_lse and not given.return_lse:
            given = given._replace(return_lse=True)
        spans = [] if prefix is None else [*prefix.byte_ranges]
        if extend is not None:
            spans += extend.byte_ranges
        if isinstance(q, DSV4Rows):
            spans += q.byte_ranges
        out, lse = self.results(call, given, spans)
        if call.launches is not None:
            call.launches.run(
                q, out, lse, attn_sink, self.scratch_block(call),
                _NOTHING if prefix is None else prefix.arguments["prefix"],
                _NOTHING if extend is None else extend.arguments["extend"],
                named_values("q", q.bound.pointers) if isinstance(q, DSV4Rows) else _NOTHING,
                call.sizes,
            )  # fmt: skip
        return out if lse is None else (out, lse)

    def _check(self, given: SparseArguments) -> None:
        """Checks a call against the plan, with `validate` its values too.

        Raises:
            TypeError, ValueError: naming the argument, what was expected and what was given.
        """
        out, lse = given.out, given.lse
        tokens = self.check_inputs(given)
        if given.validate:
            check_values(given)
        if out is not None:
            self.check_out(out, tokens)
        if lse is not None and not self.writes_lse:
            raise ValueError("lse must be None for a plan that does not write it: plan with return_lse=True")
        if lse is not None:
            self.check_lse(lse, tokens)
        self.refuse_overlap(given)

    def blocks(self) -> dict[str, Block]:
        """Scratch of the largest call by name, none for a plan without maxima.

        The expanded query; rows and places of the expanded sources; partial outputs, maxima and sums.
        """
        tokens, indices = self.max_num_tokens, self.max_indices
        if tokens is None or indices is None:
            return {}
        heads, dtype = self.num_qo_heads, self.query_dtype
        found: dict[str, Block] = {
            "q_expanded": ((tokens * heads if self._expands_queries else 0, self.head_dim), dtype)
        }
        for side, rows in (("prefix", self.prefix), ("extend", self.extend)):
            count = indices if self.mode == "prepass" and rows is not None and rows.is_quantized else 0
            found |= {f"{side}_expanded": ((count, self.head_dim), dtype)}
            found |= {f"{side}_places": ((count,), torch.int32)}
        return found | _partial_blocks(self._most_partials(tokens) * heads)

    def _most_partials(self, tokens: int) -> int:
        """Splits times tokens of the call that has the most."""
        fixed = self._fixed_splits
        if fixed is not None:
            return fixed * tokens if fixed > 1 else 0
        most = max(
            programs_at_once(self.target, config, self.pages is not None)
            // config.head_blocks(self.num_qo_heads)
            for config in (self.portable, self.specialised)
            if config is not None
        )
        return min(most, MOST_CHOSEN_SPLITS * tokens)

    def _prepare(self, given: SparseArguments) -> PreparedSparse:
        """The launches of a checked call."""
        q, prefix, extend = given[:3]
        tokens = next(source.num_tokens for source in (prefix, extend) if source is not None)
        heads = self.num_qo_heads
        shape = tokens, heads, HEAD_DIM
        inputs = [
            (index, size)
            for index, x in enumerate(given[:4])
            if isinstance(x, torch.Tensor) and (size := span_bytes(x))
        ]
        results: dict[str, Any] = {
            "out": (shape, self.query_dtype), "lse": (shape[:2], torch.float32), "inputs": tuple(inputs),
            "outputs": tuple(0 if x is None else span_bytes(x) for x in (given.out, given.lse)),
        }  # fmt: skip
        if not tokens:
            return PreparedSparse(**results)
        rows = (0 if prefix is None else prefix.listed) + (0 if extend is None else extend.listed)
        mean_rows = rows // tokens
        if self.max_seq_len is not None:
            mean_rows = min(mean_rows, self.max_seq_len)
        # Strides of outputs that calls allocate are those of these.
        out = torch.empty(shape, dtype=self.query_dtype, device="meta") if given.out is None else given.out
        config, splits = self._configuration(tokens, mean_rows, self._specialised_reads(given, out))
        programs = tokens * -(-heads // config.block_h)
        sizes = {"tokens": tokens, "splits": splits, "programs": programs, "merged_rows": tokens * heads}
        allocated: dict[str, Block] = {}
        if config.family == "hopper":
            items = programs * splits
            sizes |= {"items": items, "programs": min(items, self.target.compute_units)}
        if splits > 1:
            allocated |= _partial_blocks(splits * tokens * heads)
        layouts: list[SideLayout | None] = []
        for side, source in (("prefix", prefix), ("extend", extend)):
            expands = source is not None and self.mode == "prepass" and isinstance(source.rows, DSV4Rows)
            layouts.append(
                self._expanded(sizes, allocated, side, source)
                if source is not None and expands
                else source and source.layout
            )
        stride_t, stride_h, _ = out.stride()
        far = heads * stride_h > INT32_MAX
        if isinstance(q, torch.Tensor):
            token, head, _ = q.stride()
            query: SideLayout = (token, head), far or heads * head > INT32_MAX, ""
        else:
            query = self._quantised_query(sizes, allocated, q, config, tokens, far)
        stride_lt, stride_lh = (0, 0) if not self.writes_lse else (heads, 1)
        if given.lse is not None:
            stride_lt, stride_lh = given.lse.stride()
        layout = SparseLayout(
            config.family, splits > 1, query, layouts[0], layouts[1], out.dtype, stride_t, stride_h,
            stride_lt, stride_lh,
        )  # fmt: skip
        memory, scratch_bytes = self.scratch(allocated)
        parts = {name: part for name, part in memory.items() if isinstance(part, Part)}
        sizes |= {f"{name}_at": part.offset for name, part in parts.items()}
        launches = self._layouts.get(layout)
        if launches is None:
            # Launches are shared by calls of other sizes, whose parts begin elsewhere.
            for name, part in parts.items():
                memory[name] = Part(part.block, Arg(f"{name}_at"), part.dtype)
            launches = self._layouts.keep(layout, prepare(self, config, layout, memory, given))
        return PreparedSparse(launches=launches, sizes=sizes, scratch_bytes=scratch_bytes, **results)

    def refuse_overlap(self, given: SparseArguments) -> None:
        """Refuses results that lie over each other or an input, naming both."""
        refuse_overlap(given.out, given.lse, inputs_of(given))

    def _quantised_query(
        self, sizes: dict[str, int], allocated: dict[str, Block], q: DSV4Rows, config: SparseConfig,
        tokens: int, far: bool,
    ) -> SideLayout:  # fmt: skip
        """Adds sizes, and scratch if the kernel reads no FP8; `far`: of offsets in out."""
        if config.family == "portable" and self.mode != "prepass":
            return q.bound.format_id, far, ""
        count = tokens * self.num_qo_heads
        allocated["q_expanded"] = (count, self.head_dim), self.query_dtype
        sizes |= {"q_rows": count, "q_stored_rows": q.num_rows}
        sizes["q_blocks"] = -(-count // expand_block(self.target))
        return q.bound.format_id, far, "all"

    def _expanded(
        self, sizes: dict[str, int], allocated: dict[str, Block], side: str, source: Source
    ) -> SideLayout:
        """Adds sizes and scratch for a quantised source's rows in 16 bits.

        If there are fewer indices than rows, only the rows that they name are expanded, one for each index.
        """
        gather = source.nnz < source.num_rows
        count = source.nnz if gather else source.num_rows
        allocated[f"{side}_expanded"] = (count, self.head_dim), self.query_dtype
        if gather:
            allocated[f"{side}_places"] = (count,), torch.int32
        sizes |= {f"{side}_rows": count, f"{side}_stored_rows": source.num_rows}
        sizes[f"{side}_blocks"] = -(-count // expand_block(self.target))
        return source.format_id, count * self.head_dim > INT32_MAX, "named" if gather else "all"

    def _configuration(self, tokens: int, mean_rows: int, reads: bool) -> tuple[SparseConfig, int]:
        """The specialised configuration where it is faster and `reads` the call, else the portable one.

        Returns:
            The configuration, and the programs that share a token's rows.
        """
        config, splits = self.portable, self._splits(self.portable, tokens, mean_rows)
        if self.specialised is not None and reads:
            wanted = self._splits(self.specialised, tokens, mean_rows)
            if specialised_pays(self.specialised, -(-mean_rows // (wanted * self.specialised.block_k))):
                config, splits = self.specialised, wanted
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
            self.pages is not None,
        )

    def _specialised_reads(self, given: SparseArguments, out: torch.Tensor) -> bool:
        """Whether the specialised kernel can read the tensors of a call."""
        if self.specialised is None:
            return False
        q = given.q
        if isinstance(q, torch.Tensor):
            if not begins_aligned(q) or q.stride(0) % 16 or q.stride(1) % 16 or _offsets_pass_31_bits(q):
                return False
        for source in (given.prefix, given.extend):
            if source is not None and not (source.int32_lists and self._reaches(source)):
                return False
        return not _offsets_pass_31_bits(out)

    def _reaches(self, source: Source) -> bool:
        """Whether the specialised kernel's offsets reach all rows and indices of a source."""
        assert self.specialised is not None
        if self.specialised.family != "cdna":
            return True
        if isinstance(source.rows, torch.Tensor) or self.mode == "fused":
            most = max(end - begin for begin, end in source.byte_ranges)
        else:
            most = min(source.num_rows, source.nnz) * HEAD_DIM * 2
        return max(most, source.nnz * 4) <= MOST_BUFFER_BYTES


def _partial_blocks(count: int) -> dict[str, Block]:
    """Partial outputs, maxima and sums."""
    number = torch.float32
    return {"acc": ((count, HEAD_DIM), number), "m": ((count,), number), "l": ((count,), number)}


def _offsets_pass_31_bits(x: torch.Tensor) -> bool:
    """Whether an offset in bytes from a token's first head to its last can pass 31 bits."""
    return x.shape[1] * x.stride(1) * x.element_size() > INT32_MAX
