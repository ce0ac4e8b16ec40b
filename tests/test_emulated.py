"""The shipped kernels' own gfx942 and gfx950 machine code, run on the CPU, against the fp32 reference.

Decode's cases are lines of `narrowkv validate`; every contract of every set of `narrowkv probe` is run too,
so an operation that joins those is run here. Whole grids run, with their first, last and ragged workgroups.
"""

from __future__ import annotations

import itertools
import re
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch
from generated_code import both_targets, emulate

from narrowkv.attn_decode import (
    merge_states,
    merge_states_reference,
    paged_decode,
    paged_decode_reference,
    plan_decode,
)
from narrowkv.cdna_emulator import EmulatorError, RaceError, matrix
from narrowkv.paged_cache import PagedKVCache
from narrowkv.quant import KeyTransform
from narrowkv.quant.accuracy import relative_l1
from narrowkv.runtime.launch import executing
from narrowkv.testing import emulation
from narrowkv.testing.cases import parse_case
from narrowkv.testing.cases.decode import DecodeCase, DecodeInputs
from narrowkv.testing.checking import check
from narrowkv.testing.emulation import EmulateExecutor
from narrowkv.testing.operations import contract_sets
from narrowkv.testing.probing import PASS, Task, run_task

# Each compiles to a kernel of its own. Unsplit where splits are not the point: one compiles, not two.
SMALL = "head_dim=64,kv_heads=1,split=none,"
DECODE = {
    "as the probe asks": "ratio=12,lens=70+5+130,clean=1",
    "OCP that narrowkv wrote": SMALL + "clean=1",
    "OCP from elsewhere": SMALL,
    "FNUZ": SMALL + "format=fp8_e4m3fnuz",
    "E5M2": SMALL + "format=fp8_e5m2",
    "bf16": SMALL + "format=bf16",
    "fp16": SMALL + "format=fp16",
    "FP8 queries over OCP": SMALL + "q=fp8_e4m3fn,clean=1",
    "FP8 queries over FNUZ, two tokens": (
        "head_dim=64,kv_heads=1,split=per_sequence,q=fp8_e4m3fnuz,format=fp8_e4m3fnuz,q_len=2,ratio=3,"
        "window=20,soft_cap=5,sinks=1"
    ),
    "fp16 queries over bf16": SMALL + "format=bf16,q=fp16",
    "fp16 queries over OCP, fp32 out": SMALL + "q=fp16,out=fp32,clean=1",
    "fp16 queries over FP4, outliers in a window of one key": (
        "head_dim=128,kv_heads=1,q=fp16,format=fp4_e2m1,group=32,split=none,"
        "q_len=2,ratio=2,window=0,soft_cap=30.0,data=outlier"
    ),
    "FP4 with a scale for each 16 channels": SMALL + "format=fp4_e2m1,group=16,clean=1",
    "NVFP4 values, off 16-byte boundaries": (
        SMALL + "format=fp8_e4m3fn/fp4_e2m1,group=16,scale_format=e4m3,layout=padded,data=outlier"
    ),
    "MX, scales of a key in one word": "kv_heads=1,ratio=12,lens=150+65,format=fp4_e2m1,group=32,split=none",
    "NVFP4, two tokens": (
        "kv_heads=1,ratio=8,q_len=2,lens=130+65,layout=HND,split=none,"
        "format=fp4_e2m1,group=16,scale_format=e4m3"
    ),
    "FP4, keys and values loaded a tile ahead": "ratio=12,lens=200+5+130+0,format=fp4_e2m1,split=even",
    "FP8, splits of two small tiles": "kv_heads=64,ratio=2,lens=650,clean=1",
    "FP8 keys, FP4 values, a window": (
        "kv_heads=1,ratio=8,lens=200+64,format=fp8_e4m3fn/fp4_e2m1,window=70,split=none,layout=HND"
    ),
    "FP4 as FP8": "kv_heads=2,ratio=12,lens=200+5+0,format=fp4_e2m1,q=fp8_e4m3fn,kernel=fp8,window=70",
    "FP4, two tokens of two tiles": "kv_heads=1,ratio=4,q_len=2,lens=200+65,format=fp4_e2m1,split=none",
    "FP4, 32 rows": "kv_heads=1,ratio=17,lens=150,format=fp4_e2m1,group=32,split=none",
    "INT4": SMALL + "format=int4,clean=1",
    "K INT8, V INT4": SMALL + "format=int8/int4,descale=token_head,data=outlier",
    "INT4 over bf16, off 16-byte boundaries, fp16 queries": (
        SMALL + "format=int4/bf16,layout=padded,q=fp16,head_dim=80"
    ),
    "vectorised INT8": SMALL + "format=int8,layout=vectorised,clean=1",
    "K bf16, V FNUZ": SMALL + "format=bf16/fp8_e4m3fnuz",
    "page size 1": SMALL + "page_size=1,layout=tokens,clean=1",
    "page size 3, head_dim 80": "head_dim=80,kv_heads=1,split=none,page_size=3,ratio=3,clean=1",
    "head_dim 256, off 16-byte boundaries": SMALL + "head_dim=256,layout=padded,clean=1,lens=40",
    "head_dim 512, a tile ahead": "kv_heads=1,ratio=8,head_dim=512,lens=37+20,split=none,format=fp8_e4m3fn",
    "head_dim 512, bf16": "kv_heads=1,ratio=4,head_dim=512,lens=40,split=none,format=bf16",
    "head_dim 512, NVFP4 and a window": (
        "kv_heads=1,ratio=8,head_dim=512,lens=37,split=none,window=20,"
        "format=fp4_e2m1,group=16,scale_format=e4m3"
    ),
    "head_dim 320, two tokens of 32 rows": "kv_heads=1,ratio=12,q_len=2,head_dim=320,lens=37,split=none",
    "vectorised layout": SMALL + "layout=vectorised,clean=1",
    "vectorised bf16": SMALL + "layout=vectorised,format=bf16",
    "V narrower than K": "head_dim=192,v_head_dim=128,kv_heads=1,lens=70+5,clean=1,split=per_sequence",
    "V narrower than K, bf16": "head_dim=192,v_head_dim=128,kv_heads=1,lens=40,format=bf16,q_len=2,ratio=3",
    "HND, ragged table": SMALL + "layout=HND,table=ragged,clean=1",
    "descale by head": SMALL + "descale=sequence_head,clean=1",
    "descale by token": SMALL + "descale=token_head,clean=1",
    "ratio 71, 128 rows of four waves": SMALL + "ratio=71,clean=1",
    "ratio 17, one wave": SMALL + "ratio=17,clean=1",
    "speculative tokens in a window": SMALL + "q_len=2,ratio=5,window=20,clean=1,lens=64+37+1",
    "soft cap and sinks": SMALL + "soft_cap=5,sinks=1,clean=1",
    "empty sequences, even": "head_dim=64,split=even,lens=33+0+130,clean=1",
    "uniform splits": "head_dim=64,split=per_sequence,lens=64+37+1,sinks=1,descale=head,clean=1",
}


@pytest.mark.sampled(always=[{"name": "as the probe asks", "target": "gfx950"}], most=8)
@both_targets
@pytest.mark.parametrize("name", DECODE)
def test_decode_machine_code_agrees_with_the_reference(name: str, target: str) -> None:
    result, _ = emulate(parse_case(DecodeCase, DECODE[name]), target)
    assert result.passed, result.detail


@pytest.mark.slow
@both_targets
@pytest.mark.parametrize("name", contract_sets())
def test_every_contract_of_every_set(name: str, target: str) -> None:
    """At the set's own shape, so with the configuration that is shipped for it, on a sample of workgroups."""
    contract_set = contract_sets()[name]
    for contract in contract_set.contracts:
        task = Task(contract, contract_set.shape, target=target, emulate=True)
        answers, compiled = run_task(task)
        assert compiled is not None
        assert compiled.status == PASS, (contract, compiled.detail)
        (answer,) = answers
        assert answer.status == PASS, (contract, answer.detail)


@pytest.mark.sampled(most=1)
@both_targets
def test_both_ways_of_merging_agree(target: str) -> None:
    case = DecodeCase(lens=(70, 5, 130), head_dim=64, clean=True)
    inputs = case.inputs()
    for in_launch in (False, True):
        with executing(EmulateExecutor(target)):
            plan = plan_decode(inputs.q, inputs.cache, inputs.table, tokens_per_split=32)
            plan = replace(plan, config=replace(plan.config, merge_in_launch=in_launch))
            results = paged_decode(inputs.q, inputs.cache, inputs.table, return_lse=True, plan=plan)
        result = check(case, inputs, results)
        assert result.passed, result.detail


# ---------------------------------------------------------------------------- planted faults

WATCHED = DecodeCase(lens=(70,), head_dim=64, split="none", clean=True, granularity="head")


@both_targets
def test_the_case_that_faults_are_planted_in_passes(target: str) -> None:
    assert emulate(WATCHED, target)[0].passed


def _with_descale(inputs: DecodeInputs, **descales: Any) -> DecodeInputs:
    return replace(inputs, cache=replace(inputs.cache, **descales))


def _as_fnuz(inputs: DecodeInputs) -> DecodeInputs:
    cache = inputs.cache
    fnuz = PagedKVCache.from_tensors(
        cache.k.view(torch.uint8), cache.v.view(torch.uint8), format="fp8_e4m3fnuz", layout="NHD",
        k_descale=cache.k_descale, v_descale=cache.v_descale, k_granularity="head", v_granularity="head",
    )  # fmt: skip
    return replace(inputs, cache=fnuz)


WRONG_INPUTS: dict[str, Callable[[DecodeInputs], DecodeInputs]] = {
    "softmax scale 2% off": lambda i: replace(i, options={**i.options, "sm_scale": 1.02 * 64**-0.5}),
    "K's descale 2% off": lambda i: _with_descale(i, k_descale=i.cache.k_descale * 1.02),
    "V's descale 1% off": lambda i: _with_descale(i, v_descale=i.cache.v_descale * 1.01),
    "K's descales of other heads": lambda i: _with_descale(i, k_descale=i.cache.k_descale.flip(0)),  # type: ignore[union-attr]
    "V's descales of other heads": lambda i: _with_descale(i, v_descale=i.cache.v_descale.flip(0)),  # type: ignore[union-attr]
    "OCP bytes read as FNUZ": _as_fnuz,
}


@pytest.mark.sampled
@both_targets
@pytest.mark.parametrize("fault", WRONG_INPUTS)
def test_a_wrong_scale_or_descale_is_caught(fault: str, target: str) -> None:
    assert not emulate(WATCHED, target, WRONG_INPUTS[fault](WATCHED.inputs()))[0].passed


def _edited(monkeypatch: pytest.MonkeyPatch, edit: Callable[[str], str]) -> list[str]:
    """Has the emulator run edited assembly; gives the texts before the edits."""
    right, seen = emulation.load_program, []

    def load(text: str, **options: Any) -> Any:
        seen.append(text)
        assert edit(text) != text, "nothing was planted"
        return right(edit(text), **options)

    monkeypatch.setattr(emulation, "load_program", load)
    return seen


def _once(pattern: str, replacement: str) -> Callable[[str], str]:
    return lambda text: re.sub(pattern, replacement, text, count=1)


# The first matrix instruction is of Q K^T, the last of P V.
WRONG_CODE = {
    "operands of an MFMA swapped": _once(
        r"(v_mfma_f32_16x16x\S+) (\S+), (v\[\S+\]), (v\[\S+\]),", r"\1 \2, \4, \3,"
    ),
    "an MFMA of another type": _once(r"(v_mfma_f32_16x16x\d+)_f16", r"\1_bf16"),
    "an MFMA that forgets what was accumulated": lambda text: re.sub(
        r"(.*)(v_mfma_f32_16x16x\S+ \S+ \S+ \S+ )v\[\S+\]", r"\g<1>\g<2>0", text, count=1, flags=re.S
    ),
    "an LDS access one element on": lambda text: re.sub(
        r"(ds_\w+ .*?offset(\d?):)(\d+)",
        lambda m: m.group(1) + str(int(m.group(3)) + (1 if m.group(2) else 8)),
        text,
        count=1,
    ),
    "a load of 16 bytes further on": _once(r"(buffer_load_dwordx4 .*? 0 offen)\n", r"\1 offset:16\n"),
    "exp2 of half": _once(r"v_exp_f32_e32 (v\d+), (v\d+)", r"v_exp_f32_e64 \1, \2 div:2"),
}


@pytest.mark.sampled
@both_targets
@pytest.mark.parametrize("fault", WRONG_CODE)
def test_a_wrong_instruction_is_caught(fault: str, target: str, monkeypatch: pytest.MonkeyPatch) -> None:
    _edited(monkeypatch, WRONG_CODE[fault])
    assert not _survives(target)


def _survives(target: str) -> bool:
    try:
        return emulate(WATCHED, target)[0].passed
    except EmulatorError:
        return False


@both_targets
def test_a_wrong_lane_map_of_the_matrix_result_is_caught(
    target: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Were the emulator's map wrong, or the compiler's, results would differ: neither can hide it."""
    right = matrix._result_registers
    rows = {
        "two lane groups exchanged": lambda x: x.reshape(*x.shape[:-1], 4, 16)[..., [1, 0, 2, 3], :].reshape(
            x.shape
        ),
        "two registers exchanged": lambda x: x[[1, 0, *range(2, len(x))]],
        "rows for columns": None,
    }
    for name, wrong in rows.items():
        if wrong is None:
            monkeypatch.setattr(matrix, "_result_registers", lambda p, s: right(p.swapaxes(-1, -2), s))
        else:
            monkeypatch.setattr(matrix, "_result_registers", lambda p, s, wrong=wrong: wrong(right(p, s)))
        assert not _survives(target), name
    monkeypatch.setattr(matrix, "_result_registers", right)
    assert _survives(target)


@both_targets
def test_a_wrong_lane_map_of_one_matrix_operand_is_caught(
    target: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The order of K in A alone; in A and B alike it would make no difference."""
    right = matrix._matrix_reader
    readers = itertools.count()

    def wrong(*arguments: Any) -> Any:
        read, is_a = right(*arguments), next(readers) % 2 == 0
        return (lambda w: read(w)[..., ::-1]) if is_a else read

    monkeypatch.setattr(matrix, "_matrix_reader", wrong)
    assert not _survives(target)


FOUR_WAVES = replace(
    WATCHED, gqa_ratio=40, num_kv_heads=1, granularity="float"
)  # which share tiles through LDS


@pytest.mark.sampled(most=1)
@both_targets
def test_every_removed_barrier_of_a_shipped_kernel_is_a_race(
    target: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    executor = EmulateExecutor(target)
    with executing(executor):
        FOUR_WAVES.inputs().call()
    (text,) = {run.artifact.assembly for run in executor.runs}
    barriers = [match.start() for match in re.finditer(r"\ts_barrier", text)]
    assert len(barriers) >= 2
    caught = {at for at in barriers if _races(target, _without_barrier(at), monkeypatch)}
    assert caught == set(barriers)


def _races(target: str, edit: Callable[[str], str], monkeypatch: pytest.MonkeyPatch) -> bool:
    with monkeypatch.context() as patch:
        _edited(patch, edit)
        try:
            with executing(EmulateExecutor(target, detect_races=True)):
                FOUR_WAVES.inputs().call()
        except RaceError:
            return True
    return False


def _without_barrier(at: int) -> Callable[[str], str]:
    return lambda text: text[:at] + text[at:].replace("\ts_barrier", "\ts_nop 0", 1)


@pytest.mark.sampled(most=1)
@both_targets
@pytest.mark.parametrize("line", ["q_len=2", "format=fp4_e2m1,scale_format=e4m3"])
def test_decode_machine_code_transforms_queries(line: str, target: str) -> None:
    q, cache, table = parse_case(DecodeCase, "lens=70+9,ratio=3,head_dim=64," + line).build()
    random = torch.Generator().manual_seed(1)
    balance = torch.rand(2, 64, generator=random) + 0.5
    cache = replace(cache, key_transform=KeyTransform(torch.randn(2, 64, generator=random), balance))
    sinks = torch.linspace(-2.0, 2.0, 6)
    call: dict[str, Any] = {"sinks": sinks, "return_lse": True, "out_dtype": torch.float32}
    with executing(EmulateExecutor(target, detect_hazards=True)):
        o, lse = paged_decode(
            q, cache, table, plan=plan_decode(q, cache, table, split="per_sequence"), **call
        )
    wanted, wanted_lse = paged_decode_reference(q, cache, table, **call)
    assert relative_l1(o, wanted) <= 0.002
    torch.testing.assert_close(lse, wanted_lse, rtol=0, atol=2e-3)


@pytest.mark.sampled(most=2)
@both_targets
@pytest.mark.parametrize(
    ("dtype", "head_dim"), [(torch.float32, 64), (torch.bfloat16, 80), (torch.float16, 64)]
)
def test_merge_states_machine_code(dtype: torch.dtype, head_dim: int, target: str) -> None:
    random = torch.Generator().manual_seed(4)
    o = torch.randn(3, 2, 4, head_dim, generator=random).to(dtype)
    lse = torch.randn(3, 2, 4, generator=random) * 5
    lse[0, 0], lse[:, 1, 2] = -torch.inf, -torch.inf
    o[0, 0] = torch.nan
    with executing(EmulateExecutor(target)):
        merged, total = merge_states(o, lse)
    expected, expected_total = merge_states_reference(o, lse)
    close = {"rtol": 1e-5, "atol": 1e-6} if dtype is torch.float32 else {"rtol": 2**-7, "atol": 1e-6}
    torch.testing.assert_close(merged.float(), expected.float(), **close)
    torch.testing.assert_close(total, expected_total, rtol=1e-5, atol=1e-5)
