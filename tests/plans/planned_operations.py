"""How to plan and to call each operation: what the tests of plans are parametrised over."""

from __future__ import annotations

import math
import random
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field, fields, is_dataclass, replace
from functools import partial
from typing import Any, ClassVar

import torch

from narrowkv.attn_decode import DecodeShape, paged_decode, paged_decode_reference, plan_decode
from narrowkv.attn_prefill import (
    PrefillShape,
    batch_prefill,
    batch_prefill_reference,
    plan_append,
    plan_prefill,
    prefill_append,
    prefill_append_reference,
)
from narrowkv.paged_cache import PageTable
from narrowkv.sage import SageShape, plan_sage, sage_attention
from narrowkv.sparse_fp8 import (
    DSV4Rows,
    RowsFormat,
    latent_decode,
    plan_latent,
    plan_sparse,
    sparse_decode,
    sparse_prefill,
    sparse_prefill_fp8,
)
from narrowkv.testing.cases.decode import DecodeCase
from narrowkv.testing.cases.latent import LatentCase
from narrowkv.testing.cases.prefill import PrefillCase
from narrowkv.testing.cases.sage import SageCase
from narrowkv.testing.cases.sparse import SparseCase

I32 = torch.int32
Arguments = dict[str, Any]


def mapped(value: Any, change: Callable[[torch.Tensor], torch.Tensor]) -> Any:
    """Arguments of a call with every tensor in them changed: also those of caches, tables and sources."""
    if isinstance(value, torch.Tensor):
        return change(value)
    if isinstance(value, dict):
        return {name: mapped(part, change) for name, part in value.items()}
    if isinstance(value, tuple | list):
        return type(value)(mapped(part, change) for part in value)
    if is_dataclass(value) and not isinstance(value, type):
        parts = {each.name: getattr(value, each.name) for each in fields(value) if each.init}
        return replace(value, **mapped(parts, change))
    return value


def tensors_in(value: Any) -> list[torch.Tensor]:
    """The tensors that `mapped` changes."""
    found: list[torch.Tensor] = []
    mapped(value, lambda tensor: found.append(tensor) or tensor)
    return found


def same_bits(one: Any, other: Any) -> bool:
    """Whether all tensors of two structures have the same bits."""
    pairs = zip(tensors_in(one), tensors_in(other), strict=True)
    return all(torch.equal(*(x.contiguous().view(torch.uint8) for x in pair)) for pair in pairs)


@dataclass(frozen=True)
class Operation:
    """An operation that is planned in one way; of which a class for each operation has

    `plan(device, **options)`: a plan from sizes alone, with its own workspace unless one is given;
    `arguments(size, device)`: the arguments of a call of this size;
    `prepare(plan, arguments)`: the call by a plan, or without one for None, which takes keywords of outputs;
    `change(arguments, turn)`: writes other lengths, pages and values into a call of the first of `sizes`.

    Attributes:
        name: for people; its first word is the operation.
        case: a call, of which `arguments` changes the sizes.
        largest: the sizes that `plan` plans for.
        sizes: of calls that the plan serves; the second is the smallest.
        larger: sizes that it refuses, with `refusal`.
        options: of the plan.
    """

    name: str
    case: Any
    largest: Any
    sizes: tuple[Any, ...]
    larger: tuple[Any, ...] = ()
    options: dict[str, Any] = field(default_factory=dict)

    refusal: ClassVar[str]
    most_functions: ClassVar[int]
    most_kernels: ClassVar[int]
    outputs_of_kernels: ClassVar[tuple[dict[str, Any], ...]] = ({},)
    """Outputs that calls must ask for to reach every kernel that the plan lists."""
    reaches_all_kernels: ClassVar[bool] = False
    """Whether `sizes` of `OF_MANY_SIZES` reach every kernel that the plan lists."""
    is_exact: ClassVar[bool] = False
    """Whether what is expected has the same bits, because it is a call without a plan."""

    def __str__(self) -> str:
        return self.name

    @property
    def kind(self) -> str:
        """The operation."""
        return self.name.split(",")[0]

    def calls(self) -> Iterator[Arguments]:
        """Those of a call of each size, of which the plan is to list every kernel; they do not run."""
        return (self.arguments(size) for size in self.sizes)

    def expected(self, arguments: Arguments) -> tuple[torch.Tensor, torch.Tensor]:
        """`(o, lse)`; of an append also what `arguments["cache"]` then holds."""
        return self.prepare(None, arguments)(return_lse=True)


def _starts(lens: tuple[int, ...], device: str = "cpu") -> torch.Tensor:
    return torch.tensor([0, *lens], device=device).cumsum(0).to(I32)


def _empty_table(batch: int, pages: int, lens: str = "seq_lens") -> PageTable:
    zeros = torch.zeros(batch, pages, dtype=I32)
    return PageTable.from_block_table(zeros, **{lens: torch.zeros(batch, dtype=I32)}, page_size=16)


class Decode(Operation):
    """`paged_decode`; sizes are lengths."""

    refusal = r"or a larger batch .* call plan_decode again"
    most_functions = 6
    most_kernels = 8
    reaches_all_kernels = True

    def plan(self, device: str = "cpu", **options: Any) -> Any:
        return plan_decode(self.largest, self.case.format, device=device, **self.options, **options)

    def arguments(self, size: tuple[int, ...], device: str = "cpu") -> Arguments:
        q, cache, table = replace(self.case, lens=size).build(device)
        return {"q": q, "cache": cache, "page_table": table}

    def calls(self) -> Iterator[Arguments]:
        """Sizes are the number of sequences and the width of the page table."""
        arguments = self.arguments((1,))
        for batch, pages in self.sizes:
            yield {
                **arguments,
                "q": arguments["q"].expand(batch, -1, -1).contiguous(),
                "page_table": _empty_table(batch, pages),
            }

    def prepare(self, plan: Any, arguments: Arguments) -> Callable[..., Any]:
        return partial(paged_decode, **arguments, plan=plan)

    def expected(self, arguments: Arguments) -> tuple[torch.Tensor, torch.Tensor]:
        return paged_decode_reference(**arguments, return_lse=True)

    def change(self, arguments: Arguments, turn: int) -> None:
        table = arguments["page_table"]
        lens = ((500, 300, 17), (1, 299, 0), (433, 16, 12))[turn]
        table.seq_lens.copy_(torch.tensor(lens[: table.batch_size]))
        table.page_ids.copy_(table.page_ids.clamp(0, arguments["cache"].num_pages - 1).roll(turn, 1))


class Prefill(Operation):
    """`batch_prefill`; sizes are query tokens and keys of each sequence."""

    refusal = "or more, got a plan for 64 of 3: call plan_prefill again"
    most_functions = 7
    most_kernels = 12

    def plan(self, device: str = "cpu", **options: Any) -> Any:
        cache = self.arguments(((1,), (1,)), device)["cache"]
        return self._make_plan(self.largest, cache, **self.options, **options)

    _make_plan = staticmethod(plan_prefill)

    def arguments(self, size: Any, device: str = "cpu") -> Arguments:
        call = replace(self.case, q_lens=size[0], lens=size[1]).inputs(device)
        new = zip(("k_new", "v_new"), call.new, strict=False)
        tensors = {"cache": call.cache, "page_table": call.table, "cu_seqlens_q": call.starts}
        return {"q": call.q, **dict(new), **tensors, **call.options}

    def calls(self) -> Iterator[Arguments]:
        """Sizes are the number of sequences and of query tokens."""
        arguments = self.arguments(((1,), (1,)))
        lens = "cached_lens" if self.case.appends else "seq_lens"
        tokens = {name: arguments[name] for name in ("q", "k_new", "v_new") if name in arguments}
        for batch, count in self.sizes:
            yield {
                **arguments,
                **{name: tensor.expand(count, -1, -1) for name, tensor in tokens.items()},
                "page_table": _empty_table(batch, self.largest.max_seq_len // 16, lens),
                "cu_seqlens_q": torch.zeros(batch + 1, dtype=I32),
            }

    def prepare(self, plan: Any, arguments: Arguments) -> Callable[..., Any]:
        return partial(batch_prefill, **arguments, plan=plan)

    def expected(self, arguments: Arguments) -> tuple[torch.Tensor, torch.Tensor]:
        return batch_prefill_reference(**arguments, return_lse=True)

    def change(self, arguments: Arguments, turn: int) -> None:
        q_lens, lens, order = (
            ((200, 60, 40), (1500, 900, 700), (0, 1, 2)),
            ((1, 298, 1), (40, 1200, 3), (2, 0, 1)),
            ((0, 150, 150), (7, 550, 800), (2, 0, 1)),
        )[turn]
        table = arguments["page_table"]
        arguments["cu_seqlens_q"].copy_(_starts(q_lens))
        table.seq_lens.copy_(torch.tensor(lens))
        table.page_ids.copy_(table.page_ids[list(order)])


class Append(Prefill):
    """`prefill_append`; sizes are new tokens and keys of each sequence, the new ones included."""

    refusal = "or more, got a plan for 64 of 3: call plan_append again"

    _make_plan = staticmethod(plan_append)

    def prepare(self, plan: Any, arguments: Arguments) -> Callable[..., Any]:
        return partial(prefill_append, **arguments, plan=plan)

    def expected(self, arguments: Arguments) -> tuple[torch.Tensor, torch.Tensor]:
        return prefill_append_reference(**arguments, return_lse=True)


class Sage(Operation):
    """`sage_attention`; sizes are query tokens and keys of each sequence."""

    refusal = r"must have at most 2 sequences and \d+ tokens as planned, got \d"
    most_functions = 10
    most_kernels = 9
    outputs_of_kernels = ({}, {"return_lse": True})
    reaches_all_kernels = True
    is_exact = True

    def plan(self, device: str = "cpu", workspace: Any = None) -> Any:
        return plan_sage(self.largest, device=device, **self.options).with_workspace(workspace)

    def arguments(self, size: Any, device: str = "cpu") -> Arguments:
        names = ("q", "k", "v", "cu_seqlens_q", "cu_seqlens_k")
        case = replace(self.case, q_lens=size[0], k_lens=size[1])
        arguments = dict(zip(names, case.build(device), strict=True))
        if "block_sizes" in self.options:
            sizes = self.options["block_sizes"]
            blocks = [-(-lens[0] // block) for lens, block in zip(size, sizes, strict=True)]
            heads = case.num_kv_heads * case.gqa_ratio
            flags = torch.arange(len(size[0]) * heads * math.prod(blocks), device=device) % 3 > 0
            arguments["block_mask"] = flags.view(len(size[0]), heads, *blocks)
        return arguments

    def prepare(self, plan: Any, arguments: Arguments) -> Callable[..., Any]:
        if plan is None:
            return partial(sage_attention, **arguments, **self.options)
        q, k, v, starts, starts_k, *flags = arguments.values()
        given = {} if starts is None else {"cu_seqlens_q": starts}
        given |= {"block_mask": flags[0]} if flags else {}
        return partial(plan.attend, q, plan.quantize_kv(k, v, cu_seqlens_k=starts_k), **given)

    def change(self, arguments: Arguments, turn: int) -> None:
        if self.case.ragged:
            lens = ((70, 7, 73), (1, 149, 0), (0, 60, 90))[turn]
            for name in ("cu_seqlens_q", "cu_seqlens_k"):
                arguments[name].copy_(_starts(lens))
        for name in ("q", "k", "v"):
            arguments[name].copy_(torch.randn_like(arguments[name]))
        if "block_mask" in arguments:
            arguments["block_mask"].logical_not_()


class Sparse(Operation):
    """Sparse attention; sizes are rows of each query token."""

    refusal = r"as planned, got \d"
    most_kernels = 7
    is_exact = True

    def plan(self, device: str = "cpu", **options: Any) -> Any:
        tensors = self.case.build(device)
        return plan_sparse(
            num_qo_heads=self.case.num_qo_heads, prefix=tensors.prefix.format, extend=tensors.extend.format,
            device=device, has_sink=True, return_lse=True,
            **{"mode": self.case.mode, **self.largest, **self.options, **options},
        )  # fmt: skip

    def arguments(self, size: Any, device: str = "cpu") -> Arguments:
        call = replace(self.case, prefix_lens=size, extend_lens=(3,) * len(size)).inputs(device)
        return {name: x for name, x in vars(call).items() if name != "case"}

    def prepare(self, plan: Any, arguments: Arguments) -> Callable[..., Any]:
        if self.case.mode == "16bit":
            function, options = sparse_prefill, {}
        else:
            function, options = sparse_prefill_fp8, {"num_qo_heads": self.case.num_qo_heads}
        if self.options:
            function, options = sparse_decode, {**options, **({} if plan else self.options)}
        elif plan is None and function is sparse_prefill_fp8:
            options["mode"] = self.case.mode
        return partial(function, **arguments, **options, plan=plan)

    def change(self, arguments: Arguments, turn: int) -> None:
        prefix = arguments["prefix"]
        prefix.indptr.copy_(_starts(((40, 3, 33), (0, 76, 0), (1, 0, 2))[turn]))
        prefix.indices.copy_(prefix.indices.roll(5))
        arguments["q"].copy_(torch.randn_like(arguments["q"]))


class Latent(Operation):
    """`latent_decode`; sizes are lengths."""

    most_kernels = 4

    def plan(self, device: str = "cpu", **options: Any) -> Any:
        rows = replace(self.case, lens=(1,)).build(device)[1]
        stored = (
            rows.bound.format if isinstance(rows, DSV4Rows) else RowsFormat("bf16", columns=rows.shape[-1])
        )
        return plan_latent(
            num_qo_heads=self.case.num_qo_heads, rows=stored, page_size=16, q_len=self.case.q_len,
            ragged=self.case.ragged, device=device, return_lse=True,
            **{**self.largest, **self.options, **options},
        )  # fmt: skip

    def arguments(self, size: Any, device: str = "cpu") -> Arguments:
        # `change` moves pages to where each of their rows is read.
        q, rows, table = replace(self.case, lens=size).build(device, unread=0.0)
        return {"q": q, "rows": rows, "page_table": table}

    def prepare(self, plan: Any, arguments: Arguments) -> Callable[..., Any]:
        return partial(latent_decode, **arguments, plan=plan)

    def change(self, arguments: Arguments, turn: int) -> None:
        table = arguments["page_table"]
        table.seq_lens.copy_(torch.tensor(((500, 300, 17), (1, 299, 0), (433, 16, 12))[turn]))
        table.page_ids.copy_(table.page_ids.clamp(0).roll(turn, 1))
        arguments["q"].copy_(torch.randn_like(arguments["q"]))


def _latent(name: str, size: tuple[int, ...], **changes: Any) -> Latent:
    case = LatentCase(num_qo_heads=6, **changes)
    return Latent(f"latent, {name}", case, {"max_batch": 3, "max_seq_len": 512}, (size,), (), {})


def _decode(name: str, gqa_ratio: int = 2, **options: Any) -> Decode:
    shape = DecodeShape(
        batch=3, q_len=1, num_qo_heads=gqa_ratio, num_kv_heads=1, head_dim=64, page_size=16, capacity=96
    )
    case = DecodeCase.small(num_kv_heads=1, gqa_ratio=gqa_ratio, clean=True)
    sizes = ((70, 5, 33), (33,), (70, 5))
    return Decode(name, case, shape, sizes, ((5, 6, 7, 8, 9),), options)


_PREFILL_SHAPE = PrefillShape(
    batch=3, num_tokens=64, max_q_len=64, num_qo_heads=3, num_kv_heads=1, head_dim=64, page_size=16,
    max_seq_len=160, kv_tokens=480,
)  # fmt: skip
_PREFILL_SIZES = (
    ((20, 1, 9), (40, 5, 130)), ((1, 1), (7, 90)), ((30,), (64,)), ((2, 0, 62), (2, 9, 160)),
)  # fmt: skip
_LARGER_PREFILLS = (((65,), (65,)), ((1, 1, 1, 1), (5, 6, 7, 8)))
_PREFILL: dict[str, Any] = {"num_kv_heads": 1, "gqa_ratio": 3, "clean": True}


def _prefill(name: str, **options: Any) -> Prefill:
    case = PrefillCase.small(**_PREFILL)
    return Prefill(name, case, _PREFILL_SHAPE, _PREFILL_SIZES, _LARGER_PREFILLS, options)


def _append(name: str, rope: str | None = None, **options: Any) -> Append:
    case = PrefillCase.append(format="bf16", rope=rope, **_PREFILL)
    return Append(name, case, _PREFILL_SHAPE, _PREFILL_SIZES, _LARGER_PREFILLS, options)


def _sage(name: str, **options: Any) -> Sage:
    sizes = (((20, 20), (130, 130)), ((5,), (3,)), ((130,), (140,)))
    larger = (((131,), (1,)), ((1,) * 3, (1,) * 3))
    shape = SageShape(2, 130, 140, 2, 1, 64, ragged=False)
    return Sage(f"sage, {name}", SageCase.small(), shape, sizes, larger, options)


def _sparse(name: str, layout: str, mode: str, **options: Any) -> Sparse:
    case = SparseCase.small(
        layout=layout, mode=mode, num_qo_heads=8, pool_rows=64, extend_rows=16, prefix_lens=(1,),
        extend_lens=(1,),
    )  # fmt: skip
    sizes = ((70, 0, 9), (9,), (5, 130, 64, 1, 0, 33))
    largest = {"max_num_tokens": 6, "max_indices": 300}
    return Sparse(f"sparse, {name}", case, largest, sizes, ((1,) * 7, (301,)), options)


OPERATIONS: tuple[Operation, ...] = (
    _decode("decode"),
    _decode("decode, splits of 32", gqa_ratio=17, tokens_per_split=32),
    _prefill("prefill"),
    _prefill("prefill, dense", kernel="dense"),
    _prefill("prefill, fused", kernel="fused"),
    _append("append"),
    _append("append, rope", rope="neox"),
    _append("append, first", kernel="append_then_attend"),
    _append("append, first, rope", rope="neox", kernel="append_then_attend"),
    _append("append, fused", kernel="fused"),
    _append("append, fused, rope", rope="neox", kernel="fused"),
    _sage("int8", causal="bottom_right"),
    _sage("both means", qk_dtype="int4", smooth_q=True),
    _sage("one descale, FP8", qk_dtype="fp8", q_granularity="per_tensor", k_granularity="per_tensor"),
    _sage("no mean", smooth_k=False, window=(40, 3)),
    _sage("block mask", causal="bottom_right", block_sizes=(128, 64)),
    Sage(
        "sage, ragged", SageCase.small(ragged=True), SageShape(5, 200, 304, 2, 1, 64, ragged=True),
        (((70, 0, 7), (1, 130, 80)), ((16,), (304,)), ((1, 2, 3, 4, 5), (9, 8, 7, 6, 0))),
    ),
    _sparse("16bit", "bf16", "16bit"),
    _sparse("fused", "packed584", "fused"),
    _sparse("prepass", "split", "prepass"),
    _sparse("splits", "row512", "fused", num_splits=3),
    _sparse("batch invariant", "bf16", "16bit", batch_invariant=True),
)  # fmt: skip
BY_NAME = {str(each): each for each in OPERATIONS}
ONE_EACH = tuple(
    BY_NAME[name] for name in ("decode", "prefill", "append, rope", "sage, int8", "sparse, 16bit")
)


def _random_prefills(count: int) -> Iterator[tuple[int, int]]:
    """Sequences and query tokens of calls."""
    draw = random.Random(1)
    for _ in range(count):
        batch = draw.choice((1, 1, 2, 3, 16, 17, draw.randint(1, 60)))
        longest = draw.choice((1, 2, 7, 64, 120))
        yield batch, min(sum(draw.randint(1, longest) for _ in range(batch)), 8192)


def _of_a_model(capacity: int) -> Iterator[Prefill]:
    shape = PrefillShape(
        batch=64, num_tokens=8192, max_q_len=8192, num_qo_heads=96, num_kv_heads=8, head_dim=128,
        page_size=16, max_seq_len=capacity, kv_tokens=64 * capacity,
    )  # fmt: skip
    sizes = tuple(_random_prefills(60))
    case = PrefillCase.small(num_kv_heads=8, gqa_ratio=12, head_dim=128)
    yield Prefill(f"prefill, {capacity} keys", case, shape, sizes)
    yield Append(f"append, {capacity} keys", replace(case, operation="append"), shape, sizes)


# Plans, and calls of the many sizes that reach their kernels.
OF_MANY_SIZES: tuple[Operation, ...] = (
    Decode(
        "decode", DecodeCase.small(),
        DecodeShape(batch=64, q_len=1, num_qo_heads=24, num_kv_heads=2, head_dim=64, page_size=16,
                    capacity=65536),
        tuple((batch, 1 + batch % 7) for batch in range(1, 65)),
    ),
    *(each for capacity in (256, 1024, 6400) for each in _of_a_model(capacity)),
    *(each for each in OPERATIONS if each.kind == "sage"),
    *(replace(each, largest={}, sizes=((250,), (5, 130, 64, 1, 0, 33), (1,) * 80))
      for each in OPERATIONS if each.kind == "sparse"),
)  # fmt: skip


def _captured_prefill(kind: type[Prefill], fmt: str, head_dim: int = 128) -> Prefill:
    operation = "append" if kind is Append else "prefill"
    case = PrefillCase.small(operation=operation, gqa_ratio=12, head_dim=head_dim, format=fmt)
    shape = PrefillShape(
        batch=3, num_tokens=300, max_q_len=300, num_qo_heads=24, num_kv_heads=2, head_dim=head_dim,
        page_size=16, max_seq_len=1712, kv_tokens=3 * 1712,
    )  # fmt: skip
    return kind(f"{operation}, {fmt}, head_dim {head_dim}", case, shape, (((200, 60, 40), (1700, 960, 740)),))


def _captured_decode(batch: int, head_dim: int = 64, **options: Any) -> Decode:
    shape = DecodeShape(
        batch=8, q_len=1, num_qo_heads=24, num_kv_heads=2, head_dim=head_dim, page_size=16, capacity=1024
    )
    case = DecodeCase.small(clean=True, head_dim=head_dim)
    return Decode(
        f"decode, {batch}, head_dim {head_dim}, {options}",
        case,
        shape,
        ((500, 300, 17)[:batch],),
        (),
        options,
    )


# Calls that are captured in a graph.
CAPTURED: tuple[Operation, ...] = (
    *(_captured_decode(batch, **options) for batch in (1, 3)
      for options in ({}, {"batch_invariant": True}, {"tokens_per_split": 64})),
    _captured_decode(3, 320),
    *(_captured_prefill(kind, fmt) for kind in (Prefill, Append) for fmt in ("fp8_e4m3fn", "bf16")),
    *(_captured_prefill(kind, "fp8_e4m3fn", 320) for kind in (Prefill, Append)),
    Sage("sage, dense", SageCase.small(), SageShape(1, 150, 150, 2, 1, 64, ragged=False),
         (((150,), (150,)),), (), {"causal": "bottom_right"}),
    Sage("sage, block mask", SageCase.small(), SageShape(1, 150, 150, 2, 1, 64, ragged=False),
         (((150,), (150,)),), (), {"block_sizes": (128, 64)}),
    Sage("sage, ragged", SageCase.small(ragged=True), SageShape(3, 150, 150, 2, 1, 64, ragged=True),
         (((70, 7, 73), (70, 7, 73)),), (), {"causal": "bottom_right"}),
    *(replace(each, sizes=((40, 3, 33),)) for each in OPERATIONS if each.kind == "sparse"),
    _latent("bf16", (500, 300, 17), columns=512),
    _latent("one scale, two query tokens", (500, 300, 17), layout="tensor512", q_len=2),
)  # fmt: skip
