"""`index_logits`: how much each token wants each index key."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property, lru_cache
from typing import TYPE_CHECKING, Any

import torch

from narrowkv.quant import get_format
from narrowkv.quant.formats import BITS, NATIVE, widening_exponent
from narrowkv.runtime.errors import (
    check_choice,
    check_dtype,
    check_index_vector,
    check_instance,
    check_last_dim_contiguous,
    check_no_grad,
    check_no_overlap,
    check_positive_int,
    check_same_device,
    check_shape,
    check_tensor,
    with_defaults,
)
from narrowkv.runtime.launch import BoundLaunch, active_target
from narrowkv.runtime.launch.tracing import traceable
from narrowkv.runtime.operation import Plan, signature_of
from narrowkv.runtime.targets import Target
from narrowkv.sparse_fp8.indexer.config import TABLE, LogitsConfig, choose_logits_config, columns_of_program
from narrowkv.sparse_fp8.indexer.kernels.logits import (
    TABLE_EXPONENT,
    Bounds,
    IndexQueries,
    KeyPages,
    LogitsSpec,
    _index_logits_kernel,
)
from narrowkv.sparse_fp8.indexer.keys import SHUFFLED_TILE, IndexKeys, IndexKeysFormat
from narrowkv.sparse_fp8.options import LOGITS_DEFAULTS

if TYPE_CHECKING:
    from typing_extensions import Unpack

    from narrowkv.sparse_fp8.options import IndexLogitsOptions

__all__ = ["MOST_HEADS", "MOST_Q_LEN", "IndexLogitsPlan", "index_logits", "plan_index_logits"]

MOST_HEADS = 128
MOST_Q_LEN = 8
_QUERIES = ("fp8_e4m3fn", "fp8_e4m3fnuz")
_Q_DTYPES = (torch.float8_e4m3fn, torch.float8_e4m3fnuz)
_INT32_MAX = 2**31 - 1
_CACHED_PLANS = 64


@dataclass(frozen=True, eq=False, kw_only=True)
class IndexLogitsPlan(Plan):
    """Index logits of queries and keys that are stored in one way, for any number of tokens and keys.

    Made by `plan_index_logits`. A call takes no scratch memory: it allocates only its result, if none is
    given, so that a graph can capture it. Two plans are equal only if they are the same object.

    Attributes:
        num_heads: index heads.
        query: format of the queries.
        keys: how the keys are stored.
        q_len: tokens of a sequence over pages; 1 for keys without pages.
        clean: whether logits outside a token's keys become -inf.
        config: how work is divided.
    """

    num_heads: int
    query: str
    keys: IndexKeysFormat
    q_len: int
    clean: bool
    config: LogitsConfig

    def explain(self) -> str:
        """One line: how the work is divided."""
        return self.config.explain()

    def kernels(self) -> list[BoundLaunch]:
        """The kernel that a call launches, for compiling it beforehand."""
        return [self._kernel]

    @cached_property
    def _kernel(self) -> BoundLaunch:
        """The kernel, bound by the first call."""
        config, keys = self.config, self.keys
        if config.route == TABLE:
            exponent = TABLE_EXPONENT
        else:
            route = NATIVE if config.route == NATIVE else BITS
            exponent = sum(widening_exponent(each, route) for each in (self.query, keys.format))
        spec = LogitsSpec(
            HEADS=self.num_heads,
            BLOCK_H=config.block_h,
            HEAD_DIM=keys.head_dim,
            PAGE_SIZE=keys.page_size,
            Q_LEN=self.q_len,
            BLOCK_T=config.block_t,
            BLOCK_N=config.block_n,
            CLEAN=self.clean,
            SHUFFLED=SHUFFLED_TILE if keys.shuffled else 0,
            INT64=keys.offsets_64_bit,
            Q_FORMAT=self.query,
            K_FORMAT=keys.format,
            ROUTE=config.route,
            EXPONENT=exponent,
        )
        return self.bind(_index_logits_kernel, config.options, SPEC=spec)

    def run(
        self,
        q: torch.Tensor,
        weights: torch.Tensor,
        keys: IndexKeys,
        **options: Unpack[IndexLogitsOptions],
    ) -> torch.Tensor:
        """Scores; see `index_logits`."""
        check_instance("keys", keys, IndexKeys)
        where: dict[str, Any] = with_defaults("run", options, LOGITS_DEFAULTS)
        out: torch.Tensor | None = where.pop("out")
        num_columns = where.pop("num_columns")
        given = (q, weights, keys.values, keys.scale, *where.values(), num_columns, out)
        signature = (keys.format, keys.shuffled, signature_of(*given))
        columns: int | None = self.calls.find(signature)
        if columns is None:
            columns = self._check(q, weights, keys, where, num_columns, out)
            self.calls.keep(signature, columns)
        if out is None:
            out = torch.empty((q.shape[0], columns), dtype=torch.float32, device=q.device)
        else:
            check_no_overlap("out", out, q=q, weights=weights, values=keys.values, scale=keys.scale, **where)
        self._launch(q, weights, keys, where, out)
        return out

    def _check(
        self, q: torch.Tensor, weights: torch.Tensor, keys: IndexKeys, where: dict[str, torch.Tensor | None],
        num_columns: int | None, out: torch.Tensor | None,
    ) -> int:  # fmt: skip
        """Refuses what differs from the plan; the columns of the result."""
        check_dtype("q", q, get_format(self.query).storage_dtype)
        check_shape("q", q, ("num_tokens", self.num_heads, self.keys.head_dim))
        check_last_dim_contiguous("q", q)
        check_dtype("weights", weights, torch.float32)
        check_shape("weights", weights, (q.shape[0], self.num_heads))
        if keys.stored != self.keys:
            raise ValueError(f"keys must be stored as planned, {self.keys}, got {keys.stored}")
        check_same_device(q=q, weights=weights, values=keys.values, **where, out=out)
        check_no_grad(weights=weights)
        if q.device != self.device:
            raise ValueError(f"q must be on {self.device} like the plan, got {q.device}")
        wanted = ("block_table", "seq_lens") if keys.is_paged else ("starts", "ends")
        for name, tensor in where.items():
            if (tensor is not None) != (name in wanted):
                kind = "keys in pages" if keys.is_paged else "keys without pages"
                raise ValueError(
                    f"{kind} go with {wanted[0]} and {wanted[1]} alone, got {name}"
                    f"{' = None' if tensor is None else ''}"
                )
        if keys.is_paged:
            columns = self._check_pages(q, where["block_table"], where["seq_lens"])
            if num_columns is not None:
                columns = check_positive_int("num_columns", num_columns)
        else:
            for name in wanted:
                check_index_vector(name, check_tensor(name, where[name]), q.shape[0])
            columns = keys.num_pages
            if num_columns is not None:
                raise ValueError(f"num_columns must be None for keys without pages, got {num_columns}")
        if columns > _INT32_MAX // 2:
            raise ValueError(f"there must be at most {_INT32_MAX // 2} columns, got {columns}")
        if out is not None:
            check_dtype("out", out, torch.float32)
            check_shape("out", out, (q.shape[0], columns))
            check_last_dim_contiguous("out", out)
        return columns

    def _check_pages(self, q: torch.Tensor, block_table: Any, seq_lens: Any) -> int:
        """Checks the metadata of pages; the most keys of a sequence."""
        check_dtype("block_table", block_table, (torch.int32, torch.int64))
        check_shape("block_table", block_table, ("batch", "max_pages"))
        batch, max_pages = block_table.shape
        check_index_vector("seq_lens", seq_lens, batch)
        if q.shape[0] != batch * self.q_len:
            raise ValueError(
                f"q must have {batch * self.q_len} tokens, {self.q_len} for each of {batch} sequences, got "
                f"{q.shape[0]}"
            )
        return int(max_pages) * self.keys.page_size

    def _launch(
        self, q: torch.Tensor, weights: torch.Tensor, keys: IndexKeys, where: dict[str, Any],
        out: torch.Tensor,
    ) -> None:  # fmt: skip
        native = self.config.route == NATIVE
        values, queries = (keys.native, q) if native else (keys.values.view(torch.uint8), q.view(torch.uint8))
        if keys.is_paged:
            table, lens = where["block_table"], where["seq_lens"]
            bounds = Bounds(None, lens, table, 0, lens.stride(0), table.stride(0), table.stride(1))
            pages = KeyPages(
                values, keys.scale, values.stride(0), values.stride(1), keys.scale.stride(0),
                keys.scale.stride(1),
            )  # fmt: skip
            max_pages = table.shape[1]
        else:
            starts, ends = where["starts"], where["ends"]
            bounds = Bounds(starts, ends, None, starts.stride(0), ends.stride(0), 0, 0)
            pages = KeyPages(values, keys.scale, values.stride(0), 0, keys.scale.stride(0), 0)
            max_pages = 0
        tokens, columns = out.shape
        blocks = -(-tokens // self.config.block_t)
        run = columns_of_program(self.target, self.config.block_n, blocks, columns)
        self._kernel(
            (blocks, -(-columns // run)),
            (
                IndexQueries(
                    queries, weights, q.stride(0), q.stride(1), weights.stride(0), weights.stride(1)
                ),
                pages, bounds, out, out.stride(0), tokens, columns, keys.num_pages, max_pages, run,
            ),
        )  # fmt: skip


def plan_index_logits(
    *,
    num_heads: int,
    keys: IndexKeysFormat,
    query: str = "fp8_e4m3fn",
    q_len: int = 1,
    clean: bool = True,
    device: torch.device | str,
) -> IndexLogitsPlan:
    """Plans `index_logits` from formats and a device, before there are tensors.

    Args:
        num_heads: index heads, 1 to 128; 64 in DeepSeek-V3.2.
        keys: how the keys are stored (of keys that are there: `keys.stored`).
        query: format of the queries, "fp8_e4m3fn" or "fp8_e4m3fnuz".
        q_len: tokens of each sequence over pages, 1 to 8; 1 for keys without pages.
        clean: as for `index_logits`.
        device: where all tensors lie.

    Raises:
        TypeError, ValueError: naming the argument, what was expected and what was given.

    Example:
        >>> plan = plan_index_logits(num_heads=64, keys=IndexKeysFormat(page_size=64), device="cpu")
        >>> plan.workspace_bytes()
        0
    """
    if check_positive_int("num_heads", num_heads) > MOST_HEADS:
        raise ValueError(f"num_heads must be at most {MOST_HEADS}, got {num_heads}")
    check_choice("query", query, _QUERIES)
    check_instance("keys", keys, IndexKeysFormat)
    most = MOST_Q_LEN if keys.page_size else 1
    if check_positive_int("q_len", q_len) > most:
        raise ValueError(f"q_len must be at most {most}, got {q_len}")
    check_instance("clean", clean, bool)
    place = torch.empty(0, device=device).device  # with the index of the current GPU
    return _make_plan(active_target(place), place, num_heads, query, keys, q_len, clean)


@lru_cache(maxsize=_CACHED_PLANS)
def _make_plan(
    target: Target, device: torch.device, num_heads: int, query: str, keys: IndexKeysFormat, q_len: int,
    clean: bool,
) -> IndexLogitsPlan:  # fmt: skip
    config = choose_logits_config(
        target, num_heads=num_heads, query=query, keys=keys, q_len=q_len if keys.page_size else 2
    )
    return IndexLogitsPlan(
        target=target, device=device, num_heads=num_heads, query=query, keys=keys, q_len=q_len, clean=clean,
        config=config,
    )  # fmt: skip


@traceable
def index_logits(
    q: torch.Tensor,
    weights: torch.Tensor,
    keys: IndexKeys,
    *,
    clean: bool = True,
    plan: IndexLogitsPlan | None = None,
    **options: Unpack[IndexLogitsOptions],
) -> torch.Tensor:
    """Logits of DeepSeek's indexer: how much each token wants each key.

    The logit of token t and key n is the sum over index heads h of `weights[t, h] * relu(q[t, h] . k[n])`.
    Scales of queries, and of the sum, belong into `weights`. A product that is NaN counts as 0.

    Args:
        q: `[num_tokens, num_heads, head_dim]`, float8_e4m3fn or float8_e4m3fnuz, last dimension contiguous;
            num_heads 1 to 128. Over pages, q_len tokens (1 to 8) of each sequence one after another.
        weights: fp32 `[num_tokens, num_heads]`, any strides.
        keys: `IndexKeys`.
        clean: False leaves the logits outside a token's keys as they are in `out`; `index_topk` with the same
            bounds does not read them.
        plan: from `plan_index_logits`, which then fixes `clean`.
        **options: `starts` and `ends`, or `block_table`, `seq_lens` and `num_columns`; `out`: see
            `IndexLogitsOptions`.

    Returns:
        fp32 `[num_tokens, num_columns]`; without pages there are as many columns as keys. Logits outside
        a token's keys are -inf. A number of `starts`, `ends` or `seq_lens` that is out of range stands for
        the nearest that is not; keys of a page id out of range have -inf.

    Raises:
        TypeError, ValueError: before any launch, naming the argument, what was expected and what was given.

    Source: DeepSeek-V3.2's lightning indexer; the shapes are those of DeepGEMM's `fp8_mqa_logits` and
    `fp8_paged_mqa_logits`.

    Example:
        >>> keys = IndexKeys.quantize(torch.eye(32)[:3])
        >>> q, bound = torch.ones(1, 2, 32).to(torch.float8_e4m3fn), torch.tensor([2], dtype=torch.int32)
        >>> index_logits(q, torch.tensor([[1.0, 0.5]]), keys, starts=bound - 2, ends=bound)
        tensor([[1.5000, 1.5000,   -inf]])
    """
    if plan is None:
        plan = _plan_of(q, keys, options.get("block_table"), clean)
    elif check_instance("plan", plan, IndexLogitsPlan) and clean is not True:
        raise ValueError("clean must be left out with a plan: give it to plan_index_logits")
    return plan.run(q, weights, keys, **options)


def _plan_of(
    q: torch.Tensor, keys: IndexKeys, block_table: torch.Tensor | None, clean: bool
) -> IndexLogitsPlan:
    """The plan of a call that was not planned."""
    check_dtype("q", q, _Q_DTYPES)
    check_shape("q", q, ("num_tokens", "num_heads", "head_dim"))
    stored = check_instance("keys", keys, IndexKeys).stored
    q_len = 1
    if block_table is not None and stored.page_size:
        check_shape("block_table", block_table, ("batch", "max_pages"))
        batch = max(block_table.shape[0], 1)
        if q.shape[0] % batch or q.shape[0] // batch > MOST_Q_LEN:
            raise ValueError(
                f"q must have 1 to {MOST_Q_LEN} tokens for each of {batch} sequences, got {q.shape[0]}"
            )
        q_len = max(q.shape[0] // batch, 1)
    return plan_index_logits(
        num_heads=q.shape[1], keys=stored, query=get_format(q.dtype).name, q_len=q_len, clean=clean,
        device=q.device,
    )  # fmt: skip
