"""`index_topk`: the columns of the largest logits, as index lists of sparse attention."""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import cached_property, lru_cache
from typing import TYPE_CHECKING, Any, NamedTuple

import torch

from narrowkv.runtime.errors import (
    check_dtype,
    check_index_vector,
    check_instance,
    check_int32,
    check_last_dim_contiguous,
    check_no_grad,
    check_no_overlap,
    check_positive_int,
    check_same_device,
    check_shape,
    with_defaults,
)
from narrowkv.runtime.launch import BoundLaunch, LaunchOptions, Workspace, active_target
from narrowkv.runtime.launch.tracing import traceable
from narrowkv.runtime.launch.workspace import Block
from narrowkv.runtime.operation import Plan, signature_of
from narrowkv.runtime.targets import Target
from narrowkv.sparse_fp8.indexer.kernels.logits import Bounds
from narrowkv.sparse_fp8.indexer.kernels.topk import (
    BlockSpec,
    Candidates,
    RowMap,
    TopkSpec,
    _block_logits_kernel,
    _block_maxima_kernel,
    _index_topk_kernel,
)
from narrowkv.sparse_fp8.options import TOPK_DEFAULTS

if TYPE_CHECKING:
    from typing_extensions import Unpack

    from narrowkv.sparse_fp8.options import IndexTopkOptions

__all__ = ["MOST_COLUMNS", "MOST_TOPK", "IndexTopkPlan", "index_topk", "plan_index_topk"]

MOST_TOPK = 4096
MOST_COLUMNS = 1 << 24
MOST_BLOCK_SIZE = 64
_COLUMNS_OF_A_PROGRAM = 2048
"""Columns of a program that reads blocks."""
_CHUNKS = (8192, 16384)
"""Logits of a program that chooses candidates; the last is the most that a program holds in registers."""
_SCRATCH_BYTES = 1 << 27
"""Candidates of the tokens of one launch; more tokens take several launches."""
_SMALLEST = 1024
_CACHED_PLANS = 64
_INTEGERS = (torch.int32, torch.int64)


class _Level(NamedTuple):
    """One launch: `block` logits of each program, and programs of a token for the most columns."""

    block: int
    chunks: int


def levels_of(num_columns: int, topk: int) -> list[_Level]:
    """The launches for so many columns: all but the last leave `topk` candidates of each chunk.

    Example:
        >>> levels_of(65536, 2048)
        [_Level(block=8192, chunks=8), _Level(block=16384, chunks=1)]
    """
    found, width, most = [], num_columns, _CHUNKS[-1]
    while width > most:
        fitting = (each for each in _CHUNKS if -(-width // each) * topk <= most)
        block = next(fitting, most)
        found.append(_Level(block, -(-width // block)))
        width = found[-1].chunks * topk
    return [*found, _Level(max(_SMALLEST, 1 << (max(width, 1) - 1).bit_length()), 1)]


@dataclass(frozen=True, eq=False, kw_only=True)
class IndexTopkPlan(Plan):
    """Selection of `topk` columns from rows of up to `num_columns` logits.

    Made by `plan_index_topk`. With `max_num_tokens` it allocates only its result, if none is given, so that a
    graph can capture it. Two plans are equal only if they are the same object.

    Attributes:
        topk: columns that are chosen.
        num_columns: the most logits of a token.
        max_num_tokens: the most tokens; None if calls allocate their candidates.
        block_size, num_blocks: columns of a block, and the most blocks that columns are chosen from; None
            without blocks, and None where blocks are chosen.
    """

    topk: int
    num_columns: int
    max_num_tokens: int | None = None
    block_size: int | None = None
    num_blocks: int | None = None

    def _width(self, num_columns: int, num_blocks: int | None) -> int:
        """Numbers of a token that its result is chosen from: logits, maxima of blocks or logits of blocks."""
        if self.block_size is None:
            return num_columns
        return -(-num_columns // self.block_size) if num_blocks is None else num_blocks * self.block_size

    @cached_property
    def levels(self) -> list[_Level]:
        """The launches of a call of `num_columns`, after that which reads blocks."""
        return levels_of(self._width(self.num_columns, self.num_blocks), self.topk)

    @cached_property
    def tokens_at_once(self) -> int:
        """Tokens whose candidates are held at the same time."""
        most = max((level.chunks for level in self.levels[:-1]), default=0) * self.topk
        if self.block_size is not None:
            most = max(most, self._width(self.num_columns, self.num_blocks))
        return max(1, _SCRATCH_BYTES // (8 * most)) if most else 1 << 30

    def blocks(self) -> dict[str, Block]:
        """Candidates of the largest call."""
        width = self._width(self.num_columns, self.num_blocks)
        return self._blocks(self.max_num_tokens or 0, width, [level.chunks for level in self.levels])

    def _blocks(self, tokens: int, width: int, chunks: list[int]) -> dict[str, Block]:
        tokens = min(tokens, self.tokens_at_once)
        found: dict[str, Block] = {}
        widths = {str(number): count * self.topk for number, count in enumerate(chunks[:-1])}
        if self.block_size is not None:
            widths["of blocks"] = width
        for name, count in widths.items():
            found[f"logits {name}"] = ((tokens, count), torch.float32)
            found[f"columns {name}"] = ((tokens, count), torch.int32)
        return found

    def explain(self) -> str:
        """One line: launches, logits of a program, scratch memory."""
        steps = ", ".join(f"{level.block} logits a program" for level in self.levels)
        launches = len(self.levels)
        if self.block_size is not None:
            steps, launches = f"blocks of {self.block_size} columns, {steps}", launches + 1
        return f"{launches} launches: {steps}; workspace {self.workspace_bytes()} bytes"

    @cached_property
    def _kernels(self) -> dict[tuple[str, int, int], list[BoundLaunch]]:
        """The kernels of calls so far, by the arguments of `kernels`."""
        return {}

    def kernels(self, bounds: str = "", q_len: int = 1, page_size: int = 1) -> list[BoundLaunch]:
        """The kernels that a call launches, for compiling them beforehand.

        Args:
            bounds: "" for none, "ends" for `starts` or `ends`, "seq_lens".
            q_len, page_size: as in the call.
        """
        last, has_blocks = len(self.levels) - 1, self.block_size is not None
        lanes = max(32, self.target.wave_size)
        # A lane holds 32 logits at most, and then 8 of them at a time.
        warps = [max(4, level.block // (32 * lanes)) for level in self.levels]
        found = []
        if self.block_size is not None:
            spec = BlockSpec(
                SIZE=self.block_size,
                BLOCKS=_COLUMNS_OF_A_PROGRAM // self.block_size,
                HAS_BOUNDS=bounds != "",
                BY_LENGTH=int(bounds == "seq_lens"),
                Q_LEN=q_len,
            )
            kernel = _block_maxima_kernel if self.num_blocks is None else _block_logits_kernel
            found.append(self.bind(kernel, LaunchOptions(num_warps=4, num_stages=1), SPEC=spec))
        return found + [
            self.bind(
                _index_topk_kernel,
                LaunchOptions(num_warps=warps[number], num_stages=1),
                SPEC=TopkSpec(
                    TOPK=self.topk,
                    BLOCK_K=1 << (self.topk - 1).bit_length(),
                    BLOCK=level.block,
                    TILE=min(level.block, 8 * lanes * warps[number]),
                    FIRST=number == 0 and not has_blocks,
                    LAST=number == last,
                    HAS_BOUNDS=bounds != "" and number == 0 and not has_blocks,
                    BY_LENGTH=int(bounds == "seq_lens" and number == 0),
                    Q_LEN=q_len if number in (0, last) else 1,
                    PAGE_SIZE=page_size if number == last else 1,
                ),
            )
            for number, level in enumerate(self.levels)
        ]

    def run(
        self,
        logits: torch.Tensor,
        **options: Unpack[IndexTopkOptions],
    ) -> torch.Tensor:
        """Selects; see `index_topk`."""
        where: dict[str, Any] = with_defaults("run", options, TOPK_DEFAULTS)
        out: torch.Tensor | None = where.pop("out")
        page_size, block_size = where.pop("page_size"), where.pop("block_size")
        signature = signature_of(logits, *where.values(), page_size, block_size, out)
        q_len: int | None = self.calls.find(signature)
        if q_len is None:
            self._check_blocks(logits, where, block_size)
            q_len = self._check(logits, where, page_size, out)
            self.calls.keep(signature, q_len)
        if out is None:
            out = torch.empty((logits.shape[0], self.topk), dtype=torch.int32, device=logits.device)
        else:
            check_no_overlap("out", out, logits=logits, **where)
        if logits.shape[1] == 0 or ((blocks := where["blocks"]) is not None and blocks.shape[1] == 0):
            return out.fill_(-1)
        self._launch(logits, where, page_size or 1, q_len, out)
        return out

    def _check(
        self, logits: torch.Tensor, where: dict[str, torch.Tensor | None], page_size: int | None,
        out: torch.Tensor | None,
    ) -> int:  # fmt: skip
        """Refuses what differs from the plan; the tokens of a sequence."""
        check_dtype("logits", logits, torch.float32)
        check_shape("logits", logits, ("num_tokens", "num_columns"))
        check_last_dim_contiguous("logits", logits)
        check_no_grad(logits=logits)
        check_same_device(logits=logits, **where, out=out)
        tokens, columns = logits.shape
        if logits.device != self.device:
            raise ValueError(f"logits must be on {self.device} like the plan, got {logits.device}")
        if columns > self.num_columns:
            raise ValueError(f"logits must have at most {self.num_columns} columns, got {columns}")
        if self.max_num_tokens is not None and tokens > self.max_num_tokens:
            raise ValueError(f"logits must have at most {self.max_num_tokens} tokens, got {tokens}")
        for name in ("starts", "ends"):
            if (vector := where[name]) is not None:
                check_index_vector(name, vector, tokens)
        starts, ends, lens = where["starts"], where["ends"], where["seq_lens"]
        if lens is not None and (starts is not None or ends is not None):
            raise ValueError("seq_lens must be None beside starts and ends, got all of them")
        if starts is not None and ends is None:
            raise ValueError("ends must be given with starts, got None")
        q_len = self._check_rows(tokens, columns, lens, where, page_size)
        if out is not None:
            check_int32("out", out)
            check_shape("out", out, (tokens, self.topk))
            check_last_dim_contiguous("out", out)
        return q_len

    def _check_blocks(
        self, logits: torch.Tensor, where: dict[str, torch.Tensor | None], block_size: int | None
    ) -> None:
        """Refuses blocks that differ from the plan's."""
        if block_size != self.block_size:
            raise ValueError(f"block_size must be {self.block_size} like the plan's, got {block_size}")
        blocks = where["blocks"]
        if (blocks is None) != (self.num_blocks is None):
            planned = "chooses blocks" if self.block_size else "has no blocks"
            raise ValueError(f"blocks must be given only with a plan for some, got a plan that {planned}")
        if blocks is not None:
            check_dtype("blocks", blocks, _INTEGERS)
            check_shape("blocks", blocks, (logits.shape[0], "num_blocks"))
            if blocks.shape[1] > (self.num_blocks or 0):
                raise ValueError(f"blocks must have at most {self.num_blocks} columns, got {blocks.shape[1]}")
        elif block_size is not None:
            for name in ("block_table", "slots"):
                if where[name] is not None:
                    raise ValueError(f"{name} must be None where blocks are chosen, which are no rows")

    @staticmethod
    def _check_rows(
        tokens: int, columns: int, lens: torch.Tensor | None, where: dict[str, torch.Tensor | None],
        page_size: int | None,
    ) -> int:  # fmt: skip
        """Checks lengths, and what turns columns into rows."""
        table, slots = where["block_table"], where["slots"]
        if (table is None) != (page_size is None):
            raise ValueError("block_table and page_size must both be given or both be None, got one")
        if table is not None and slots is not None:
            raise ValueError("slots must be None beside block_table, got both")
        if page_size is not None:
            check_positive_int("page_size", page_size)
        batches = {}
        if lens is not None:
            check_index_vector("seq_lens", lens, "batch")
            batches["seq_lens"] = lens.shape[0]
        if table is not None:
            check_dtype("block_table", table, _INTEGERS)
            check_shape("block_table", table, ("batch", "max_pages"))
            batches["block_table"] = table.shape[0]
        if slots is not None:
            check_index_vector("slots", slots, columns)
        for name, batch in batches.items():
            if batch != next(iter(batches.values())) or (tokens % batch if batch else tokens):
                raise ValueError(
                    f"{name} must have a row for each sequence, whose tokens are equally many, got {batch} "
                    f"for {tokens} tokens"
                )
        return max(1, tokens // max(1, *batches.values())) if batches else 1

    def _launch(
        self, logits: torch.Tensor, where: dict[str, Any], page_size: int, q_len: int, out: torch.Tensor
    ) -> None:
        starts, ends, lens = where["starts"], where["ends"], where["seq_lens"]
        kind, bounds = "", Bounds(None, None, None, 0, 0, 0, 0)
        if lens is not None:
            kind, bounds = "seq_lens", Bounds(None, lens, None, 0, lens.stride(0), 0, 0)
        elif ends is not None:
            first, step = (None, 0) if starts is None else (starts, starts.stride(0))
            kind, bounds = "ends", Bounds(first, ends, None, step, ends.stride(0), 0, 0)
        rows, max_pages = RowMap(None, 0, 0), 0
        if (table := where["block_table"]) is not None:
            rows, max_pages = RowMap(table, table.stride(0), table.stride(1)), table.shape[1]
        elif (slots := where["slots"]) is not None:
            rows, max_pages = RowMap(slots, 0, slots.stride(0)), slots.shape[0]
        tokens, columns = logits.shape
        blocks = where["blocks"]
        num_blocks, which = (None, ()) if blocks is None else (blocks.shape[1], (blocks, *blocks.stride()))
        # As planned, but for chunks that this call does not have.
        chunks, candidates = [], self._width(columns, num_blocks)
        width = candidates
        for level in self.levels:
            chunks.append(-(-width // level.block))
            width = chunks[-1] * self.topk
        scratch = self._scratch or {
            name: torch.empty(shape, dtype=dtype, device=logits.device)
            for name, (shape, dtype) in self._blocks(tokens, candidates, chunks).items()
        }
        key = kind, q_len, page_size
        kernels = self._kernels.get(key) or self._kernels.setdefault(key, self.kernels(*key))
        for first_token in range(0, tokens, self.tokens_at_once):
            num_rows = min(self.tokens_at_once, tokens - first_token)
            read, num_candidates, levels = Candidates(None, None), 0, kernels
            if self.block_size is not None:
                read = Candidates(scratch["logits of blocks"], scratch["columns of blocks"])
                num_candidates, (of_blocks, *levels) = candidates, kernels
                count = candidates if num_blocks is None else num_blocks
                of_blocks(
                    (num_rows, -(-count * self.block_size // _COLUMNS_OF_A_PROGRAM)),
                    (
                        logits, logits.stride(0), *which, read, bounds, first_token, tokens, columns, count,
                    ),
                )  # fmt: skip
            for number, kernel in enumerate(levels):
                left = Candidates(scratch.get(f"logits {number}"), scratch.get(f"columns {number}"))
                kernel(
                    (num_rows, chunks[number]),
                    (
                        logits, logits.stride(0), read, left, out, out.stride(0), bounds, rows,
                        first_token, tokens, columns, num_candidates, max_pages,
                    ),
                )  # fmt: skip
                read, num_candidates = left, chunks[number] * self.topk


def plan_index_topk(
    *,
    topk: int,
    num_columns: int,
    device: torch.device | str,
    max_num_tokens: int | None = None,
    block_size: int | None = None,
    num_blocks: int | None = None,
    workspace: Workspace | None = None,
) -> IndexTopkPlan:
    """Plans `index_topk` from sizes and a device.

    Args:
        topk: columns that are chosen, 1 to 4096; 2048 in DeepSeek-V3.2.
        num_columns: the most logits of a token, up to 2**24.
        device: where all tensors lie.
        max_num_tokens: the most tokens of a call; without it a call allocates its candidates itself.
        block_size: columns of a block, a power of two up to 64; 8 in DeepSeek-V4.1. None without blocks.
        num_blocks: the most columns of `blocks`, from which a call chooses; None if calls choose blocks.
        workspace: memory to use, at least `workspace_bytes()`; None makes one.

    Raises:
        TypeError, ValueError: naming the argument, what was expected and what was given.

    Example:
        >>> plan_index_topk(topk=2048, num_columns=65536, device="cpu", max_num_tokens=1).explain()
        '2 launches: 8192 logits a program, 16384 logits a program; workspace 131072 bytes'
    """
    if check_positive_int("topk", topk) > MOST_TOPK:
        raise ValueError(f"topk must be at most {MOST_TOPK}, got {topk}")
    if check_positive_int("num_columns", num_columns) > MOST_COLUMNS:
        raise ValueError(f"num_columns must be at most {MOST_COLUMNS}, got {num_columns}")
    if num_blocks is not None and check_positive_int("num_blocks", num_blocks) and block_size is None:
        raise ValueError("block_size must be given with num_blocks, got None")
    if block_size is not None:
        size = check_positive_int("block_size", block_size)
        if size > MOST_BLOCK_SIZE or size & (size - 1):
            raise ValueError(f"block_size must be a power of two up to {MOST_BLOCK_SIZE}, got {size}")
        if (num_blocks or 0) * size > MOST_COLUMNS:
            raise ValueError(f"num_blocks must be at most {MOST_COLUMNS // size}, got {num_blocks}")
    if workspace is not None and max_num_tokens is None:
        raise ValueError("workspace must be None without max_num_tokens, which it is sized by")
    place = torch.empty(0, device=device).device  # with the index of the current GPU
    plan = _make_plan(active_target(place), place, topk, num_columns, block_size, num_blocks)
    if max_num_tokens is None:
        return plan
    most = check_positive_int("max_num_tokens", max_num_tokens)
    return replace(plan, max_num_tokens=most).with_workspace(workspace)


@lru_cache(maxsize=_CACHED_PLANS)
def _make_plan(
    target: Target, device: torch.device, topk: int, num_columns: int, block_size: int | None,
    num_blocks: int | None,
) -> IndexTopkPlan:  # fmt: skip
    return IndexTopkPlan(
        target=target, device=device, topk=topk, num_columns=num_columns, block_size=block_size,
        num_blocks=num_blocks,
    )  # fmt: skip


def _few_widths(width: int) -> int:
    """A power of two, so that rows that grow are not compiled for again and again."""
    return 1 << (max(width, 1) - 1).bit_length()


@traceable
def index_topk(
    logits: torch.Tensor,
    topk: int,
    *,
    plan: IndexTopkPlan | None = None,
    **options: Unpack[IndexTopkOptions],
) -> torch.Tensor:
    """The columns of each token's `topk` largest logits. Equal logits give equal columns in every call.

    Of equal logits the lower columns are chosen; 0 and -0 are equal. -inf and NaN are never chosen.

    Args:
        logits: fp32 `[num_tokens, num_columns]`, last dimension contiguous: what `index_logits` returns.
        topk: columns of each token, 1 to 4096.
        plan: from `plan_index_topk`, for the same `topk`.
        **options: `starts`, `ends`, `seq_lens`, `block_table`, `page_size`, `slots`, `block_size`, `blocks`
            and `out`; see `IndexTopkOptions`.

    Returns:
        int32 `[num_tokens, topk]`: chosen columns or blocks, ascending, or rows in that order; then -1.
        Flattened, with `indptr = arange(0, num_tokens * topk + 1, topk)`, they are the index list of a
        `KVSource`. A number of `starts`, `ends` or `seq_lens` that is out of range stands for the nearest
        that is not; the row of a page id or slot that is negative or no int32 is -1.

    Raises:
        TypeError, ValueError: before any launch, naming the argument, what was expected and what was given.

    Example:
        >>> logits = torch.tensor([[1.0, 3.0, 2.0, 3.0, 3.0], [0.5, -torch.inf, -1.0, 7.0, 0.0]])
        >>> index_topk(logits, 2), index_topk(logits, 3, ends=torch.tensor([1, 3]))
        (tensor([[1, 3],
                [0, 3]], dtype=torch.int32), tensor([[ 0, -1, -1],
                [ 0,  2, -1]], dtype=torch.int32))
        >>> blocks = index_topk(logits, 2, block_size=2)  # columns 0 and 1, 2 and 3, 4
        >>> blocks, index_topk(logits, 2, block_size=2, blocks=blocks)
        (tensor([[0, 2],
                [1, 2]], dtype=torch.int32), tensor([[1, 4],
                [3, 4]], dtype=torch.int32))
    """
    if plan is None:
        check_shape("logits", logits, ("num_tokens", "num_columns"))
        blocks = options.get("blocks")
        if blocks is not None:
            check_shape("blocks", blocks, ("num_tokens", "num_blocks"))
        plan = plan_index_topk(
            topk=topk,
            num_columns=max(_SMALLEST, _few_widths(logits.shape[1])),
            device=logits.device,
            block_size=options.get("block_size"),
            num_blocks=None if blocks is None else _few_widths(blocks.shape[1]),
        )
    elif check_instance("plan", plan, IndexTopkPlan).topk != topk:
        raise ValueError(f"topk must be {plan.topk} like the plan's, got {topk}")
    return plan.run(logits, **options)
