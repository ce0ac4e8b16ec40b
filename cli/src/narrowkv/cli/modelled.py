"""Modelled times: what calls take on gfx942 and gfx950 by the emulator's timing model. Never measured."""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

import torch

from narrowkv.attn_decode.cases import DecodeCase
from narrowkv.attn_prefill.cases import QUERIES, PrefillCase
from narrowkv.cdna_emulator import EmulatorError, load_program
from narrowkv.cdna_emulator.timing import Prediction, Trace, predict, trace_text, trace_workgroup
from narrowkv.cli.cases import KINDS
from narrowkv.cli.environment import versions
from narrowkv.cli.report import ExitCode, Report, UnsupportedHereError, UsageError
from narrowkv.cli.sheet import Column, Sheet, keys, numbers
from narrowkv.paged_cache import append
from narrowkv.runtime.cases import Case
from narrowkv.runtime.launch import LaunchOptions, executing
from narrowkv.runtime.launch.artifact import CompiledArtifact
from narrowkv.runtime.launch.compiler import compile_launch
from narrowkv.sage.cases import SageCase
from narrowkv.sparse_fp8.cases import SparseCase
from narrowkv.testing.codegen import amd_backend_missing
from narrowkv.testing.emulation import EmulateExecutor

_READ_LATER = ("_widen_kernel",)  # kernels that write what a later launch finds its way by


@dataclass(frozen=True)
class Scale:
    """How much larger the launches of the call that is asked about are than those of the call that is traced.

    Attributes:
        workgroups: factor of the workgroups.
        passes: factor of the passes of the loop with the matrix instructions.
        keys: factor of the workgroups of kernels that go through the keys once, such as those that widen.
    """

    workgroups: float = 1.0
    passes: float = 1.0
    keys: float = 1.0


@dataclass(frozen=True)
class Modelled:
    """One kernel under the timing model.

    Attributes:
        name: what it is called in tables.
        prediction: of its launch.
        full: of as many workgroups as the chip holds at a time, which shows the loop as a large call runs it.
        loaded_bytes: what the workgroups of the launch ask of vector memory, each lane counted.
    """

    name: str
    prediction: Prediction
    full: Prediction
    loaded_bytes: float

    def as_dict(self) -> dict[str, Any]:
        """Plain values; every key that holds a time says that it is a model's."""
        return {
            "name": self.name,
            "model": {**asdict(self.prediction), "flops_per_second": self.prediction.flops_per_second},
            "model_full": {**asdict(self.full), "loop_flops_per_second": self.full.loop_flops_per_second},
        }


class ModelExecutor(EmulateExecutor):
    """Compiles every launch, traces its middle workgroup in the emulator, and predicts its time.

    Outputs stay incomplete: only that workgroup runs, except of launches that later ones find their way by.

    Args:
        target: "gfx942" or "gfx950".
        hbm_share: see `predict`; None: as far as the buffers' sizes say how often a byte is loaded.

    Attributes:
        modelled: the predictions, launch by launch.
        scale: of what is launched from now on. With one, `Modelled.full` is the launch itself.
    """

    def __init__(self, target: str, hbm_share: float | None = None) -> None:
        super().__init__(target)
        self._hbm_share = hbm_share
        self.scale: Scale | None = None
        self.modelled: list[Modelled] = []

    def launch(
        self,
        kernel: Any,
        grid: tuple[int, ...],
        args: tuple[Any, ...],
        constexprs: dict[str, Any],
        options: LaunchOptions,
    ) -> None:
        """Models the launch."""
        artifact = compile_launch(self.target, kernel, grid, args, constexprs, options)
        x, y, z = (*grid, 1, 1)[:3]
        memory, values = self._device_pointers(artifact.args)
        program = load_program(artifact.assembly, lds_bytes=artifact.lds_bytes)
        trace = trace_workgroup(
            program, grid=(x, y, z), args=values, memory=memory, workgroup=(x // 2, y // 2, z // 2)
        )
        held = float(sum(buffer.data.size for buffer in memory.buffers))
        self.modelled.append(_modelled(artifact, trace, x * y * z, held, self._hbm_share, self.scale))
        if artifact.name in _READ_LATER:
            super().launch(kernel, grid, args, constexprs, options)


def _modelled(
    artifact: CompiledArtifact, trace: Trace, workgroups: int, held_bytes: float, hbm_share: float | None,
    scale: Scale | None,
) -> Modelled:  # fmt: skip
    loaded = sum(op.bytes for wave in trace.waves for op in wave if op.kind == "load")
    share = min(1.0, held_bytes / max(loaded * workgroups, 1)) if hbm_share is None else hbm_share
    figures: dict[str, Any] = {
        "registers": artifact.registers.vgprs + artifact.registers.agprs,
        "lds_bytes": artifact.lds_bytes, "hbm_share": share,
    }  # fmt: skip
    passes = 1.0
    if scale is not None:
        multiplies = any(op.kind == "mfma" for wave in trace.waves for op in wave)
        workgroups = round(workgroups * (scale.workgroups if multiplies else scale.keys))
        passes = scale.passes if multiplies else 1.0
    launch = predict(trace, workgroups=workgroups, pass_factor=passes, **figures)
    full = predict(trace, **figures) if scale is None else launch
    return Modelled(artifact.name, launch, full, float(loaded * workgroups))


def model_call(target: str, call: Callable[[], object], *, hbm_share: float | None = None) -> list[Modelled]:
    """Models every launch of a call on CPU tensors.

    Raises:
        EmulatorError: the emulator cannot run one of them.
    """
    executor = ModelExecutor(target, hbm_share)
    with executing(executor):
        call()
    return executor.modelled


def model_peer(path: Path) -> Modelled:
    """Models the hot loop of assembly text: without arguments, so conflict-free and coalesced.

    The text does not say how much LDS a workgroup has; occupancy is by registers alone.

    Raises:
        UsageError: the file cannot be read, or holds no kernel with a loop.
    """
    try:
        text = path.read_text()
        trace = trace_text(load_program(text))
    except (OSError, UnicodeDecodeError, EmulatorError, ValueError) as error:
        raise UsageError(f"--peer {path}: {error}") from None
    prediction = predict(trace, lds_bytes=0)
    return Modelled(f"{path.name}: {prediction.kernel}", prediction, prediction, 0.0)


# ---------------------------------------------------------------------------- one call of every family


def _call(case: Case) -> Callable[[], object]:
    return lambda: case.inputs().call()


def _cache_append() -> None:
    made = PrefillCase(operation="append", **_PREFILL).inputs()
    slots = torch.arange(made.new[0].shape[0], dtype=torch.int32)
    k_new, v_new = made.new
    append(made.cache, k_new, v_new, slots)


def _sage(qk_dtype: str) -> Callable[[], object]:
    from narrowkv.sage import plan_sage

    def call() -> object:
        workload = SageCase.small(q_lens=(256,), k_lens=(1024,), head_dim=128, gqa_ratio=1)
        q, k, v, starts_q, starts_k = workload.build()
        plan = plan_sage(q, k, cu_seqlens_q=starts_q, cu_seqlens_k=starts_k, qk_dtype=qk_dtype)
        return plan.attend(q, plan.quantize_kv(k, v))

    return call


_FNUZ = "fp8_e4m3fnuz"
_DECODE: dict[str, Any] = {"lens": (1024,), "num_kv_heads": 1, "split": "none"}
_PREFILL: dict[str, Any] = {
    "q_lens": (256,), "lens": (1024,), "num_kv_heads": 1, "gqa_ratio": 4, "clean": True,
}  # fmt: skip
_SPARSE: dict[str, Any] = {"num_qo_heads": 64, "prefix_lens": (512,) * 320}  # so many that none is split
# Share of the loaded bytes that come from HBM: every sequence has its own keys, which the query tiles of a
# prefill read one after another from L2; the tokens of a sparse call read many of the same rows.
_OWN, _SHARED, _SOME = 1.0, 0.1, 0.5


@dataclass(frozen=True)
class Family:
    """A call that stands for a family of kernels, and the share of its bytes that HBM serves.

    Attributes:
        call: it.
        hbm_share: see `narrowkv.cdna_emulator.timing.predict`; None: as the buffers' sizes say.
        operation: the command of `narrowkv inspect` that it belongs to.
    """

    call: Callable[[], object]
    hbm_share: float | None
    operation: str = ""


def families(target: str) -> dict[str, Family]:
    """One call for every family of kernels, small enough to trace, whose loop has many passes."""
    fp8 = "fp8_e4m3fnuz" if target == "gfx942" else "fp8_e4m3fn"
    found = {
        "decode, E4M3FN": Family(_call(DecodeCase(clean=True, **_DECODE)), _OWN),
        "decode, E4M3FNUZ": Family(_call(DecodeCase(format=_FNUZ, **_DECODE)), _OWN),
        "decode, bf16": Family(_call(DecodeCase(format="bf16", **_DECODE)), _OWN),
        "dense prefill": Family(_call(PrefillCase(kernel="dense", **_PREFILL)), _SHARED),
        "fused prefill": Family(_call(PrefillCase(kernel="fused", **_PREFILL)), _SHARED),
        "prefill, FP8 queries": Family(
            _call(PrefillCase(kernel="fused", q_dtype=QUERIES[fp8], format=fp8, **_PREFILL)), _SHARED
        ),
        "append": Family(_call(PrefillCase(operation="append", kernel="paged", **_PREFILL)), _SHARED),
        "append to the cache": Family(_cache_append, _OWN),
        "sparse, fused": Family(_call(SparseCase(**_SPARSE)), _SOME),
        "sparse, 16-bit rows": Family(_call(SparseCase(mode="wide", layout="bf16", **_SPARSE)), _SOME),
        "sparse, FP8 query": Family(_call(SparseCase(q="fp8", **_SPARSE)), _SOME),
        "sparse decode": Family(
            _call(SparseCase(mode="decode", num_qo_heads=64, prefix_lens=(512, 512))), _SOME
        ),
        "Sage, int8": Family(_sage("int8"), _SHARED),
        "Sage, FP8": Family(_sage("fp8"), _SHARED),
    }
    operations = {"decode": "decode", "sparse": "sparse", "Sage": "sage"}
    return {
        name: replace(family, operation=operations.get(re.split("[ ,]", name)[0], "prefill"))
        for name, family in found.items()
    }


def main_kernel(modelled: Sequence[Modelled]) -> Modelled:
    """The kernel with the most matrix flops."""
    return max(modelled, key=lambda m: m.full.flops)


def waits(prediction: Prediction) -> str:
    """What the waves of the loop wait for, most first."""
    stalls = prediction.loop.stalls if prediction.loop is not None else {}
    return ", ".join([f"{why} {share:.0%}" for why, share in stalls.items() if why != "issue"][:3])


def sheet(rows: Sequence[tuple[str, Sequence[Modelled]]]) -> Sheet:
    """Calls under the timing model: the hot loop of each on a full chip, and the time of all its launches."""
    table = Sheet([
        *keys("target", "call"),
        *numbers("model us", "waves/CU", "loop clk", "matrix", "VALU", "LDS", "memory", "TFLOP/s"),
        Column("bound by"), Column("waves wait for"),
    ])  # fmt: skip
    for name, launches in rows:
        p = main_kernel(launches).full
        seconds = sum(m.prediction.seconds for m in launches)
        cells: list[str] = [p.target, name, f"{1e6 * seconds:.0f}", str(p.waves_per_unit)]
        loop = p.loop
        if loop is None:
            table.add(*cells, *[""] * 6, p.bound, "no loop of four passes")
            continue
        shares = [f"{loop.busy[unit]:.0%}" for unit in ("matrix", "vector ALU", "LDS", "memory")]
        rate = f"{p.loop_flops_per_second / 1e12:.0f}"
        cells += [f"{loop.clocks:.0f}", *shares, rate, p.bound.split(" (")[0], waits(p)]
        table.add(*cells)
    return table


def parse_case(text: str) -> Family:
    """A call by its operation and case: ``decode:lens=4096,ratio=12``.

    Raises:
        UsageError: the operation is none of decode, prefill and sparse, or the case is none of its.
    """
    operation, _, line = text.partition(":")
    if operation not in KINDS:
        raise UsageError(f"--case must begin with decode:, prefill: or sparse:, got {text!r}")
    return Family(_call(KINDS[operation].parse(line)), None)


def model_families(target: str, chosen: Mapping[str, Family]) -> list[tuple[str, list[Modelled]]]:
    """Models calls on a target.

    Raises:
        UsageError: an operation refuses its call, or the emulator cannot run it.
    """
    rows = []
    for name, family in chosen.items():
        try:
            rows.append((name, model_call(target, family.call, hbm_share=family.hbm_share)))
        except (ValueError, TypeError, EmulatorError) as error:
            raise UsageError(f"{target}, {name}: {error}") from None
    return rows


def show_model(report: Report, rows: Sequence[tuple[str, Sequence[Modelled]]]) -> list[dict[str, Any]]:
    """Shows calls under the model, and gives them for the document."""
    report.line("timing model, not a measurement; loop figures are of a full chip")
    report.show(sheet(rows))
    return [{"call": name, "launches": [m.as_dict() for m in launches]} for name, launches in rows]


def inspect_model(
    report: Report,
    *,
    targets: tuple[str, ...],
    names: Sequence[str] = (),
    cases: Sequence[str] = (),
    peers: Sequence[Path] = (),
) -> ExitCode:
    """Models calls on each target, and the hot loops of other assembly beside them.

    Args:
        report: where it goes.
        targets: AMD targets.
        names: families to model, of `families`; without names and cases, all.
        cases: calls as `parse_case` reads them.
        peers: files of assembly.

    Raises:
        UnsupportedHereError: this Triton cannot compile for AMD.
        UsageError: a name, case or file is wrong.
    """
    if (missing := amd_backend_missing()) is not None:
        raise UnsupportedHereError(missing)
    rows: list[tuple[str, list[Modelled]]] = [(m.name, [m]) for m in map(model_peer, peers)]
    for target in targets:
        known = families(target)
        if wrong := [name for name in names if name not in known]:
            raise UsageError(f"--family must be one of {'; '.join(known)}; got {wrong[0]!r}")
        chosen = {name: known[name] for name in (names or ([] if cases or peers else known))}
        rows += model_families(target, chosen | {case: parse_case(case) for case in cases})
    body = {"versions": versions(), "model": show_model(report, rows)}
    return report.finish(body, ExitCode.OK)
