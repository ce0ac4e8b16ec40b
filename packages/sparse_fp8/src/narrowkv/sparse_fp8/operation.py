"""Sparse attention as an operation: which kernels run, how the work is divided, what memory it takes."""

from __future__ import annotations

from dataclasses import dataclass, field
from functools import cached_property, partial
from typing import TYPE_CHECKING, Any

import torch

from narrowkv.runtime.errors import check_keywords
from narrowkv.runtime.launch import BoundLaunch, named_values
from narrowkv.runtime.launch.workspace import Block
from narrowkv.runtime.operation import Bounded
from narrowkv.sparse_fp8.binding import INT32_MAX
from narrowkv.sparse_fp8.checks import SparseSettings, check_values
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
from narrowkv.sparse_fp8.options import KEYWORDS, SparseArguments
from narrowkv.sparse_fp8.rows import DSV4Rows
from narrowkv.sparse_fp8.sources import Source

if TYPE_CHECKING:
    from typing_extensions import Unpack

    from narrowkv.sparse_fp8.options import SparseRunOptions

__all__ = ["SparsePlan"]

Result = torch.Tensor | tuple[torch.Tensor, torch.Tensor]


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
    _choices: Bounded[tuple[SparseConfig, int]] = field(
        init=False, repr=False, default_factory=partial(Bounded, 1024)
    )

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
        if not options.keys() <= KEYWORDS["run"]:
            check_keywords("run", options, KEYWORDS["run"])
        return self.call(SparseArguments(q, prefix, extend, **options))

    def call(self, given: SparseArguments) -> Result:
        """A call by this plan; see `run`. Of `given` only the arguments of `run` are read."""
        out, lse = given.out, given.lse
        tokens = self.check_inputs(given)
        if given.validate:
            check_values(given)
        if out is None:
            out = torch.empty(
                (tokens, self.num_qo_heads, HEAD_DIM), dtype=self.query_dtype, device=self.device
            )
        else:
            self.check_out(out, given, tokens)
        if self.writes_lse:
            if lse is None:
                lse = torch.empty((tokens, self.num_qo_heads), dtype=torch.float32, device=self.device)
            else:
                self.check_lse(lse, out, given)
        elif lse is not None:
            raise ValueError("lse must be None for a plan that does not write it: plan with return_lse=True")
        if tokens:
            self._attend(given, out, lse, tokens)
        return out if lse is None else (out, lse)

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

    def _attend(
        self, given: SparseArguments, out: torch.Tensor, lse: torch.Tensor | None, tokens: int
    ) -> None:
        """Launches the kernels of a checked call with at least one token."""
        q, prefix, extend, attn_sink = given[:4]
        heads = self.num_qo_heads
        rows = (0 if prefix is None else prefix.listed) + (0 if extend is None else extend.listed)
        mean_rows = rows // tokens
        if self.max_seq_len is not None:
            mean_rows = min(mean_rows, self.max_seq_len)
        reads = self.specialised is not None and self._specialised_reads(given, out)
        choice = self._choices.get((tokens, mean_rows, reads))
        config, splits = self._configuration(tokens, mean_rows, reads) if choice is None else choice
        programs = tokens * -(-heads // config.block_h)
        stride_t, stride_h, _ = out.stride()
        values: dict[str, Any] = {
            "out": out, "lse": lse, "sink": attn_sink, "tokens": tokens, "splits": splits,
            "programs": programs, "merged_rows": tokens * heads,
        }  # fmt: skip
        if config.family == "hopper":
            items = programs * splits
            values |= {"items": items, "programs": min(items, self.target.compute_units)}
        if splits > 1 and not self._scratch:
            for name, block in _partial_blocks(splits * tokens * heads).items():
                self._add_scratch(values, name, block)
        prefix_layout = extend_layout = None
        expands = self.mode == "prepass"
        if prefix is not None:
            values |= prefix.arguments["prefix"]
            prefix_layout = self._expanded(values, "prefix", prefix) if expands else prefix.layout
        if extend is not None:
            values |= extend.arguments["extend"]
            extend_layout = self._expanded(values, "extend", extend) if expands else extend.layout
        far = heads * stride_h > INT32_MAX
        if isinstance(q, torch.Tensor):
            values["q_nope"] = q
            token, head, _ = q.stride()
            query: SideLayout = (token, head), far or heads * head > INT32_MAX, ""
        else:
            query = self._quantised_query(values, q, config, tokens, far)
        stride_lt, stride_lh = (0, 0) if lse is None else lse.stride()
        key = (
            config.family, splits > 1, query, prefix_layout, extend_layout, out.dtype, stride_t, stride_h,
            stride_lt, stride_lh,
        )  # fmt: skip
        call = self.calls.get(key)
        if call is None:
            layout = SparseLayout(*key)
            made = prepare(self, config, layout, self._scratch, given)
            call = self.calls.keep(key, made)
        call.run(values)

    def _add_scratch(self, values: dict[str, Any], name: str, block: Block) -> torch.Tensor:
        """A tensor of the workspace; without one a new tensor, which becomes a value of the call."""
        found = self._scratch.get(name)
        if found is None:
            found = values[name] = torch.empty(block[0], dtype=block[1], device=self.device)
        return found

    def _quantised_query(
        self, values: dict[str, Any], q: DSV4Rows, config: SparseConfig, tokens: int, far: bool
    ) -> SideLayout:
        """Adds the query to the values, and scratch if the kernel reads no FP8; `far`: of offsets in out."""
        values |= named_values("q", q.bound.pointers)
        if config.family == "portable" and self.mode != "prepass":
            return q.bound.format_id, far, ""
        count = tokens * self.num_qo_heads
        self._add_scratch(values, "q_expanded", ((count, self.head_dim), self.query_dtype))
        values |= {"q_rows": count, "q_stored_rows": q.num_rows}
        values["q_blocks"] = -(-count // expand_block(self.target))
        return q.bound.format_id, far, "all"

    def _expanded(self, values: dict[str, Any], side: str, source: Source) -> SideLayout:
        """Adds scratch for a source's rows in 16 bits to the values, if they are quantised.

        If there are fewer indices than rows, only the rows that they name are expanded, one for each index.
        """
        if not isinstance(source.rows, DSV4Rows):
            return source.layout
        gather = source.nnz < source.num_rows
        count = source.nnz if gather else source.num_rows
        block = ((count, self.head_dim), self.query_dtype)
        expanded = self._add_scratch(values, f"{side}_expanded", block)
        if gather:
            self._add_scratch(values, f"{side}_places", ((count,), torch.int32))
        values |= {f"{side}_rows": count, f"{side}_stored_rows": source.num_rows}
        values[f"{side}_blocks"] = -(-count // expand_block(self.target))
        return source.format_id, expanded.numel() > INT32_MAX, "named" if gather else "all"

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
        return self._choices.keep((tokens, mean_rows, reads), (config, splits))

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
        q = given.q
        if isinstance(q, torch.Tensor):
            if q.data_ptr() % 16 or q.stride(0) % 16 or q.stride(1) % 16 or _offsets_pass_31_bits(q):
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
