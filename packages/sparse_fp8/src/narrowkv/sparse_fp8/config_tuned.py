"""The configurations of sparse attention that `narrowkv tune` tries, and which calls take them."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from itertools import product

from narrowkv.runtime.targets import Target
from narrowkv.runtime.tuned import check_fields, size_class, tuned_choice
from narrowkv.sparse_fp8.binding import RowsFormat
from narrowkv.sparse_fp8.config import SparseConfig
from narrowkv.sparse_fp8.operation import SparsePlan

__all__ = ["SparseChoice", "choices", "fills", "shape_class", "tuned_plan", "with_choice"]

_STRATEGIES = ("", "iterative-ilp", "max-ilp")
_STRATEGY = "amdgpu-sched-strategy="


@dataclass(frozen=True)
class SparseChoice:
    """What a row of a tune file chooses; heads of a program and columns of a tile stay as they are shipped.

    Attributes:
        specialised: the tile is that of the kernel for the target's family; the portable kernel, which then
            is as shipped, serves the calls that this one does not. Otherwise the portable kernel serves all.
        block_k: rows of a tile.
        num_warps: of a program.
        stages: of the loop.
        strategy: LLVM's, on AMD; "" is its own choice.
        fill: programs a compute unit that splits are to fill the target with; 0 for the shipped rule.
    """

    specialised: bool
    block_k: int
    num_warps: int
    stages: int
    strategy: str
    fill: int

    def __post_init__(self) -> None:
        known = {
            "specialised": (False, True), "block_k": (16, 32, 64), "num_warps": (2, 4, 8),
            "stages": (1, 2, 3), "strategy": _STRATEGIES, "fill": (0, 1, 2, 4),
        }  # fmt: skip
        check_fields(self, known)


def shape_class(plan: SparsePlan, tokens: int, indices: int) -> str:
    """The class of a call: calls of one class share a row. `indices`: of the longer source."""

    def rows(source: RowsFormat | None) -> str:
        if source is None:
            return "none"
        return f"{source.layout} {source.format}".rstrip() + ("" if source.aligned else " unaligned")

    return (
        f"{plan.num_qo_heads} heads, {rows(plan.query)} over {rows(plan.prefix)} and {rows(plan.extend)}, "
        f"{plan.mode}, tokens to {size_class(tokens)}, rows of a token to {size_class(-(-indices // tokens))}"
    )


def tuned_plan(plan: SparsePlan, tokens: int | None, indices: int | None) -> SparsePlan:
    """The plan with the configuration of a tune file, where there is one for calls of this size.

    Plans without a size, over a page table, with forced splits and batch-invariant ones stay as they are.

    Raises:
        ValueError: the tune file is not of this GPU and this Triton.
    """
    if not tokens or not indices or plan.pages is not None:
        return plan
    if plan.num_splits is not None or plan.batch_invariant:
        return plan
    choice, why = tuned_choice(plan.target, "sparse", shape_class(plan, tokens, indices), SparseChoice)
    return plan if choice is None else with_choice(plan, choice, why)


def with_choice(plan: SparsePlan, choice: SparseChoice, why: str = "") -> SparsePlan:
    """A plan with what a row of a tune file chooses; one for a kernel that it lacks stays as it is."""
    if not choice.specialised:
        return replace(plan, portable=_chosen(plan.portable, choice, why), specialised=None)
    if plan.specialised is None:
        return plan
    return replace(plan, specialised=_chosen(plan.specialised, choice, why))


def _chosen(shipped: SparseConfig, choice: SparseChoice, why: str) -> SparseConfig:
    options = replace(shipped.options, num_warps=choice.num_warps)
    if not shipped.stages:
        options = replace(options, num_stages=choice.stages)
    if shipped.options.matrix_instr_nonkdim or shipped.family == "cdna":
        attrs = f"{_STRATEGY}{choice.strategy}" if choice.strategy else None
        options = replace(options, llvm_fn_attrs=attrs)
    return replace(
        shipped,
        block_k=choice.block_k,
        guard=choice.stages if shipped.guard else 0,
        stages=choice.stages if shipped.stages else 0,
        options=options,
        fill=choice.fill,
        tuned=why,
    )


def choices(plan: SparsePlan) -> list[SparseChoice]:
    """Kernels and tiles to try, with the shipped number of splits; others are tried after that."""
    target = plan.target
    tiles = dict.fromkeys((_shipped(plan.portable, specialised=False), *_portable_tiles(target)))
    if plan.specialised is not None:
        tiles |= dict.fromkeys((_shipped(plan.specialised, specialised=True), *_specialised_tiles(target)))
    return list(tiles)


def _shipped(config: SparseConfig, *, specialised: bool) -> SparseChoice:
    strategy = (config.options.llvm_fn_attrs or "").removeprefix(_STRATEGY)
    stages = config.stages or config.guard or config.options.num_stages
    return SparseChoice(specialised, config.block_k, config.options.num_warps, stages, strategy, 0)


def _portable_tiles(target: Target) -> Iterator[SparseChoice]:
    if target.name == "cpu":  # the interpreter knows neither warps nor stages
        yield from (SparseChoice(False, rows, 4, 2, "", 0) for rows in (32, 64))
        return
    keys, strategies = ((16, 32), _STRATEGIES[:2]) if target.is_amd else ((32, 64), ("",))
    for rows, warps, stages, strategy in product(keys, (4, 8), (1, 2, 3), strategies):
        yield SparseChoice(False, rows, warps, stages, strategy, 0)


def _specialised_tiles(target: Target) -> Iterator[SparseChoice]:
    """Tiles of `kernels/cdna`; those for Hopper are laid out by hand."""
    if target.is_amd:
        for rows, stages, strategy in product((32, 64), (1, 2, 3), _STRATEGIES):
            yield SparseChoice(True, rows, 8, stages, strategy, 0)


def fills(choice: SparseChoice) -> list[SparseChoice]:
    """The same tile with other numbers of splits."""
    return [replace(choice, fill=programs) for programs in (1, 2, 4) if programs != choice.fill]
