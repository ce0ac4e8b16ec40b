"""Plans of sparse attention, beside what tests/plans asks of every plan: splits, sizes, refusals."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch

from narrowkv.runtime.launch import executing, recording
from narrowkv.sparse_fp8 import (
    DSV4Rows,
    KVSource,
    RowsFormat,
    SparsePlan,
    plan_sparse,
    sparse_decode,
    sparse_prefill,
    sparse_prefill_fp8,
)
from narrowkv.sparse_fp8.options import (
    OPERATIONS,
    LatentArguments,
    LatentOptions,
    SparseArguments,
    SparseDecodeOptions,
    SparseFp8Options,
)
from narrowkv.testing.calls import LaunchRecorder, TorchOperations, functions_entered
from narrowkv.testing.cases.sparse import SparseCase, SparseInputs

W = SparseCase.small


@pytest.mark.parametrize("target", ["gfx942", "gfx950", "sm90", "cpu"])
@pytest.mark.parametrize("heads", [8, 64, 128])
def test_splits_of_any_call_fit_the_workspace(heads: int, target: str) -> None:
    """The number of splits is chosen by the call; what they leave must fit what the plan asked for."""
    rows = RowsFormat("packed584", page_size=64, format="fp8_e4m3fn", negative_zero_free=True)
    pool = DSV4Rows.quantize(torch.zeros(64, 512), layout="packed584")
    with executing(LaunchRecorder(target)) as recorder:
        plan = plan_sparse(
            num_qo_heads=heads, prefix=rows, device="cpu", max_num_tokens=40, max_indices=10**6
        )
        room = plan._scratch["m"].numel()
        for tokens in range(1, 41):
            indptr = torch.arange(0, tokens * 2048 + 1, 2048, dtype=torch.int32)
            source = KVSource(pool, indptr, torch.zeros(tokens * 2048, dtype=torch.int32))
            recorder.clear()
            plan.run(torch.zeros(tokens, heads, 512).bfloat16(), source)
            splits = recorder.launches[0].grid[1] if len(recorder.launches) > 1 else 0
            assert splits * tokens * heads <= room


def test_a_later_call_writes_over_no_quantised_query() -> None:
    """A call is checked once; where its tensors lie is looked at in each."""
    inputs = W(q="fp8", mode="fused", extend_lens=None).inputs("cpu")
    q, prefix, heads = inputs.q, inputs.prefix, inputs.case.num_qo_heads
    out = torch.empty(prefix.num_tokens, heads, 512, dtype=torch.bfloat16)
    storage = q.data.untyped_storage()
    storage.resize_(max(storage.nbytes(), out.nbytes))
    inside = torch.empty(0, dtype=out.dtype).set_(storage, 0, out.shape)
    with executing(LaunchRecorder("gfx942")) as recorder:
        plan = plan_sparse(
            num_qo_heads=heads, query=q.bound.format, prefix=prefix.format, device="cpu", mode="fused"
        )
        plan.run(q, prefix, out=out)
        recorder.clear()
        with pytest.raises(ValueError, match=r"out must not share memory with q\.data"):
            plan.run(q, prefix, out=inside)
        assert not recorder.launches


def test_a_later_call_refuses_a_sink_that_requires_a_gradient() -> None:
    inputs = W(q="bf16", mode="fused", extend_lens=None).inputs("cpu")
    heads = inputs.case.num_qo_heads
    sink = torch.zeros(heads, requires_grad=True)
    with executing(LaunchRecorder("gfx942")) as recorder:
        plan = plan_sparse(
            num_qo_heads=heads, prefix=inputs.prefix.format, device="cpu", mode="fused", has_sink=True
        )
        with torch.no_grad():
            plan.run(inputs.q, inputs.prefix, attn_sink=sink)
        recorder.clear()
        with pytest.raises(ValueError, match="attn_sink must not require grad"):
            plan.run(inputs.q, inputs.prefix, attn_sink=sink)
        assert not recorder.launches


@pytest.mark.parametrize("layout", ["bf16", "packed584"])
def test_nothing_is_compiled_for_the_number_of_rows(layout: str) -> None:
    """Nor of tokens, indices and splits, which Triton would make constants of or divide by 16."""
    with recording("gfx950") as recorder:
        for tokens, rows in ((1, 64), (16, 256), (7, 33)):
            inputs = W(layout=layout, prefix_lens=(16,) * tokens, pool_rows=rows, page_size=1).build()
            plan = plan_sparse(num_qo_heads=16, prefix=inputs.prefix.format, device="cpu", num_splits=2)
            plan.run(inputs.q, inputs.prefix)
    kernels = [bound.kernel for bound, _ in recorder.found.values()]
    assert len(set(kernels)) == len(kernels) == 2


def _inputs(layout: str = "bf16", **changes: Any) -> SparseInputs:
    sizes = {"prefix_lens": (9, 9), "extend_lens": (3, 3), "num_qo_heads": 8, "pool_rows": 64}
    return W(layout=layout, extend_rows=16, **{**sizes, **changes}).build()


def _plan(inputs: SparseInputs, **options: Any) -> SparsePlan:
    return plan_sparse(
        num_qo_heads=8, prefix=inputs.prefix.format, extend=inputs.extend.format, device="cpu",
        has_sink=True, return_lse=True, **options,
    )  # fmt: skip


@pytest.mark.parametrize(
    ("layout", "unplanned", "options", "most"),
    [
        ("bf16", sparse_prefill, {}, 13),
        ("packed584", sparse_prefill_fp8, {}, 13),
        ("row512", sparse_decode, {"num_splits": 3}, 14),
    ],
)
def test_calls_enter_few_python_functions(
    layout: str, unplanned: Callable[..., Any], options: dict[str, Any], most: int
) -> None:
    """Beside the launch itself, whose cost is the executor's."""
    inputs = _inputs(layout)
    given = {name: x for name, x in vars(inputs).items() if name != "case"}
    out = torch.empty_like(inputs.q)
    with executing(LaunchRecorder("gfx942")):
        plan = _plan(inputs, max_num_tokens=6, max_indices=300, **options)
        assert len(functions_entered(lambda: plan.run(**given, out=out))) <= most
        assert len(functions_entered(lambda: unplanned(**given, return_lse=True, **options))) <= 75


@pytest.mark.parametrize(
    ("layout", "mode"), [("packed584", "prepass"), ("packed584", "fused"), ("bf16", "16bit")]
)
def test_a_call_without_a_workspace_allocates_one_block(layout: str, mode: str) -> None:
    """Expanded rows, their places and partial results are parts of it."""
    inputs = W(layout=layout, mode=mode).inputs("cpu")
    out = torch.empty_like(inputs.q)
    with executing(LaunchRecorder("gfx942")) as recorder:
        plan = plan_sparse(
            num_qo_heads=inputs.case.num_qo_heads, prefix=inputs.prefix.format, device="cpu", mode=mode,
            num_splits=2,
        )  # fmt: skip
        plan.run(inputs.q, inputs.prefix, out=out)
        recorder.clear()
        with TorchOperations() as seen:
            plan.run(inputs.q, inputs.prefix, out=out)
    assert len(recorder.launches) == (3 if mode == "prepass" else 2), "the rows, attention, the merge"
    assert seen.names.count("aten.empty.memory_format") == 1


REFUSED: dict[str, tuple[str, Callable[[SparsePlan, SparseInputs], Any]]] = {
    "other rows": (
        "prefix.rows must be stored as planned",
        lambda plan, i: plan.run(i.q, _inputs("packed584").prefix, i.extend, attn_sink=i.attn_sink),
    ),
    "no second source": (
        "extend must be a KVSource as planned",
        lambda plan, i: plan.run(i.q, i.prefix, attn_sink=i.attn_sink),
    ),
    "no sink": ("attn_sink must be a tensor", lambda plan, i: plan.run(i.q, i.prefix, i.extend)),
    "another operation": (
        "plan must have mode fused or prepass", lambda plan, i: sparse_prefill_fp8(i.q, i.prefix, plan=plan),
    ),
    "a scale beside the plan": (
        "sm_scale must be None with a plan",
        lambda plan, i: sparse_prefill(i.q, i.prefix, i.extend, sm_scale=1.0, plan=plan),
    ),
    "one maximum": ("both be given or both be None", lambda plan, i: _plan(i, max_num_tokens=3)),
    "129 heads": (
        "num_qo_heads must be at most 128",
        lambda plan, i: plan_sparse(num_qo_heads=129, prefix=RowsFormat("bf16"), device="cpu"),
    ),
    "FP8 rows to the kernel of 16-bit rows": (
        "must be a bf16 or fp16 tensor here",
        lambda plan, i: plan_sparse(
            num_qo_heads=8, prefix=RowsFormat("split", format="fp8_e4m3fn"), device="cpu", mode="16bit"
        ),
    ),
}  # fmt: skip


@pytest.mark.parametrize("what", REFUSED)
def test_what_a_plan_is_not_for_is_refused(what: str) -> None:
    message, call = REFUSED[what]
    inputs = _inputs()
    with pytest.raises(ValueError, match=message):
        call(_plan(inputs, mode="16bit", max_num_tokens=6, max_indices=300), inputs)


def test_options_are_the_keywords_of_the_arguments() -> None:
    both = SparseFp8Options.__annotations__ | SparseDecodeOptions.__annotations__
    assert both.keys() == SparseArguments._field_defaults.keys() - {"extend"}
    assert LatentOptions.__annotations__.keys() == LatentArguments._field_defaults.keys()


@pytest.mark.parametrize(
    ("operation", "keyword"),
    [
        (sparse_prefill, "mode"),
        (sparse_prefill_fp8, "num_splits"),
        (sparse_decode, "mode"),
        ("run", "sm_scale"),
    ],
)
def test_a_keyword_of_another_operation_is_refused(operation: Any, keyword: str) -> None:
    inputs = _inputs("packed584")
    call, name = (_plan(inputs).run, "run") if operation == "run" else (operation, operation.__name__)
    assert keyword in SparseArguments._fields
    assert keyword not in OPERATIONS[name].keywords
    with pytest.raises(TypeError, match=f"{name}.. got an unexpected keyword argument '{keyword}'"):
        call(inputs.q, inputs.prefix, inputs.extend, **{keyword: 1})
