"""The configurations of Sage attention that `narrowkv tune` tries, and which plans take them."""

from __future__ import annotations

from dataclasses import dataclass, replace
from itertools import product

from narrowkv.runtime.targets import Target, least_columns
from narrowkv.runtime.tuned import check_fields, size_class, tuned_choice
from narrowkv.sage.config import SageConfig
from narrowkv.sage.options import SageArguments
from narrowkv.sage.shapes import SageShape

__all__ = ["SageChoice", "choices", "orders", "shape_class", "tuned_config", "with_choice"]

_STRATEGIES = ("", "iterative-ilp", "max-ilp")
_STRATEGY = "amdgpu-sched-strategy="
_TOGETHER, _XCD_ROWS = (1, 200, 400, 800, 1600, 3200), (0, 1, 4, 8, 16, 64)


@dataclass(frozen=True)
class SageChoice:
    """What a row of a tune file chooses; formats and the order of V's keys stay as they are shipped.

    Attributes:
        block_m, block_n: rows and keys of a tile.
        num_warps, num_stages: of the attention kernel.
        ahead: keys are loaded to registers a tile before they are multiplied.
        waves_per_eu: waves that the compiler leaves registers for on a SIMD of AMD, 0 for its own choice.
        maxnreg: the bound on a thread's registers on NVIDIA, 0 for none.
        strategy: LLVM's, on AMD; "" is its own choice.
        programs_together, xcd_rows: as in `SageConfig`.
    """

    block_m: int
    block_n: int
    num_warps: int
    num_stages: int
    ahead: bool
    waves_per_eu: int
    maxnreg: int
    strategy: str
    programs_together: int
    xcd_rows: int

    def __post_init__(self) -> None:
        known = {
            "block_m": (64, 128), "block_n": (64, 128), "num_warps": (4, 8), "num_stages": (1, 2, 3),
            "ahead": (False, True), "waves_per_eu": (0, 1, 2), "maxnreg": (0, 168), "strategy": _STRATEGIES,
            "programs_together": _TOGETHER, "xcd_rows": _XCD_ROWS,
        }  # fmt: skip
        check_fields(self, known)

    @classmethod
    def of(cls, config: SageConfig) -> SageChoice:
        """What a configuration has."""
        options = config.options
        return cls(
            config.block_m, config.block_n, options.num_warps, options.num_stages, config.ahead,
            options.waves_per_eu or 0, options.maxnreg or 0,
            (options.llvm_fn_attrs or "").removeprefix(_STRATEGY), config.programs_together, config.xcd_rows,
        )  # fmt: skip


def shape_class(shape: SageShape, options: SageArguments) -> str:
    """The class of a call: calls of one class share a row."""
    mask = "causal" if options.causal else "no mask"
    if options.window is not None:
        mask = f"{mask}, window"
    sequences = f"{'ragged' if shape.ragged else 'dense'} batch to {size_class(shape.batch)}"
    return (
        f"{shape.num_qo_heads}/{shape.num_kv_heads} heads of {shape.head_dim}, {options.qk_dtype} by "
        f"{options.q_granularity} and {options.k_granularity}{', Q smoothed' if options.smooth_q else ''}, "
        f"{mask}, {sequences}, queries to {size_class(shape.q_tokens)}, keys to {size_class(shape.k_tokens)}"
    )


def tuned_config(target: Target, shape: SageShape, options: SageArguments, shipped: SageConfig) -> SageConfig:
    """The configuration that a plan takes: the shipped one, or that of a tune file.

    Plans of a block mask keep the shipped one, whose tiles fit in its blocks.

    Raises:
        ValueError: the tune file is not of this GPU and this Triton.
    """
    if options.block_sizes is not None:
        return shipped
    choice, why = tuned_choice(target, "sage", shape_class(shape, options), SageChoice)
    return shipped if choice is None else replace(with_choice(shipped, choice), tuned=why)


def with_choice(shipped: SageConfig, choice: SageChoice) -> SageConfig:
    """The shipped configuration with what a row of a tune file chooses."""
    options = replace(
        shipped.options,
        num_warps=choice.num_warps,
        num_stages=choice.num_stages,
        waves_per_eu=choice.waves_per_eu or None,
        maxnreg=choice.maxnreg or None,
        llvm_fn_attrs=f"{_STRATEGY}{choice.strategy}" if choice.strategy else None,
    )
    return replace(
        shipped,
        block_m=choice.block_m,
        block_n=choice.block_n,
        ahead=choice.ahead,
        options=options,
        programs_together=choice.programs_together,
        xcd_rows=choice.xcd_rows,
    )


def choices(target: Target, shipped: SageConfig) -> list[SageChoice]:
    """Tiles to try, with the shipped order of programs; other orders are tried after that."""
    base = SageChoice.of(shipped)
    if target.name == "cpu":  # the interpreter knows neither warps nor stages
        return [base, replace(base, block_n=64)]
    if target.is_amd:
        # A wave has 32 rows of a tile.
        ways = product((64, 128), (1, 2), (False, True), (1, 2), _STRATEGIES)
        found = [
            replace(base, block_n=keys, num_stages=stages, ahead=ahead, waves_per_eu=waves, strategy=strategy)
            for keys, stages, ahead, waves, strategy in ways
        ]
    else:
        rows = ((64, 4, 168), (64, 4, 0), (128, 8, 168), (128, 8, 0))
        found = [
            replace(base, block_m=m, num_warps=warps, maxnreg=registers, block_n=keys, num_stages=stages)
            for (m, warps, registers), keys, stages in product(rows, (64, 128), (2, 3))
            if keys >= least_columns(target, m)
        ]
    return list(dict.fromkeys((base, *found)))


def orders(choice: SageChoice) -> list[SageChoice]:
    """The same tile with other orders of programs."""
    if choice.xcd_rows:
        return [replace(choice, xcd_rows=rows) for rows in _XCD_ROWS if rows != choice.xcd_rows]
    return [
        replace(choice, programs_together=programs)
        for programs in _TOGETHER
        if programs != choice.programs_together
    ]
