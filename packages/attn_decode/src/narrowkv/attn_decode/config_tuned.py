"""The configurations of decode that `narrowkv tune` tries."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from itertools import product

from narrowkv.runtime.launch import LaunchOptions
from narrowkv.runtime.targets import Target
from narrowkv.runtime.tuned import check_fields

MERGE_IN_LAUNCH = (0, 0)
# Splits that are merged at once, and warps of the merge.
_MERGES = ((4, 1), (8, 1), (16, 1), (16, 2), (32, 2), (64, 4), (128, 4), (128, 8))


@dataclass(frozen=True)
class DecodeChoice:
    """What a row of a tune file chooses; rows of a tile, formats and prefetch stay as they are shipped.

    Attributes:
        block_n: keys of a tile.
        num_warps, num_stages: of the attention kernel.
        split: see `DecodeConfig`.
        items_per_unit: programs that a compute unit gets; 0 without a split.
        merge_splits, merge_warps: of the second kernel; both 0 for a merge in the launch, or without one.
    """

    block_n: int
    num_warps: int
    num_stages: int
    split: str
    items_per_unit: int
    merge_splits: int
    merge_warps: int

    def __post_init__(self) -> None:
        merge = (self.merge_splits, self.merge_warps)
        known = {
            "block_n": (16, 32, 64, 128), "num_warps": (1, 2, 4), "num_stages": (1, 2, 3),
            "split": ("none", "even", "per_sequence"), "items_per_unit": (0, 1, 2, 3, 4, 6, 8, 12),
            "merge_splits": tuple({splits for splits, _ in (MERGE_IN_LAUNCH, *_MERGES)}),
            "merge_warps": tuple({warps for _, warps in (MERGE_IN_LAUNCH, *_MERGES)}),
        }  # fmt: skip
        check_fields(self, known)
        if (self.split == "none") != (self.items_per_unit == 0) or merge not in (MERGE_IN_LAUNCH, *_MERGES):
            raise ValueError(f"split, items_per_unit and merge must belong together, got {self}")

    def options(self, shipped: LaunchOptions, block_n: int) -> LaunchOptions:
        """Compiler options. Bounds of registers are for the shipped tile alone, which has `block_n` keys."""
        options = replace(shipped, num_warps=self.num_warps, num_stages=self.num_stages)
        if (options, self.block_n) == (shipped, block_n):
            return shipped
        return replace(options, maxnreg=None, waves_per_eu=None)


def choices(target: Target, head_dim: int, capacity: int) -> list[DecodeChoice]:
    """Tiles and splits to try for tiles of few rows; how the splits are merged is tried after that."""
    merge = (16, 2) if target.is_amd else (16, 1)

    def splits() -> Iterator[tuple[str, int, tuple[int, int]]]:
        yield "none", 0, MERGE_IN_LAUNCH
        for items in (2, 4, 8):
            yield "per_sequence", items, merge
        for items in (4, 8):
            yield "even", items, merge

    def tiles() -> Iterator[tuple[int, int, int]]:
        wide = head_dim > 128
        for block_n, warps in product((16, 32, 64) if wide else (32, 64, 128), (1, 2, 4)):
            if target.is_amd:
                yield block_n, warps, 1
            elif target.name == "cpu":
                yield block_n, 4, 2
            else:
                yield block_n, warps, 2 if wide or block_n == 128 else 3
                if block_n == 128 and warps == 4:
                    yield block_n, warps, 1

    found = (
        DecodeChoice(*tile, *split[:2], *split[2])
        for tile, split in product(dict.fromkeys(tiles()), splits())
    )
    return [choice for choice in found if choice.split == "none" or capacity > choice.block_n]


def merges(target: Target, choice: DecodeChoice) -> list[DecodeChoice]:
    """The same tile and splits with every other way to merge them."""
    if choice.split == "none":
        return []
    # Chiplets of AMD share no L2: a second kernel is the fence.
    ways = _MERGES if target.is_amd else (MERGE_IN_LAUNCH, *_MERGES)
    found = (replace(choice, merge_splits=splits, merge_warps=warps) for splits, warps in ways)
    return [other for other in found if other != choice]
