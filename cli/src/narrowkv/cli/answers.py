"""What `probe` learns: what a backend said to a contract at a place, and what the contract compiles to."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

from narrowkv.cli.contracts import Contract
from narrowkv.testing.checking import Sample
from narrowkv.testing.codegen import KernelCode

PASS, FAIL, REFUSED, SKIPPED, INEXACT = "pass", "fail", "refused", "skipped", "inexact"


@dataclass(frozen=True)
class Compiled:
    """One contract compiled for one target.

    Attributes:
        target: the target.
        status: pass, fail or skipped.
        detail: the reason where it is not a pass.
        kernels: every kernel of the call.
        model: fields of the roofline of a pass through decode's hot loop; None where it was not emulated.
    """

    target: str
    status: str
    detail: str = ""
    kernels: tuple[KernelCode, ...] = ()
    model: dict[str, Any] | None = None


@dataclass(frozen=True)
class Answer:
    """What one backend said to one contract at one place.

    Attributes:
        contract: the question.
        backend: who was asked.
        place: where: "cpu", "gpu" or an emulated target.
        status: pass, fail or skipped; of another backend also refused, or inexact, which is over the bound.
        detail: the reason where it is not a pass.
        ran_on: where it ran; empty if it did not.
        relative_l1: kernel error against the fp32 reference on the same cache.
        max_abs: largest error.
        kv_bytes_per_token: bytes of K and V over all heads.
        time_us: device time on a GPU: median, p10, p90.
        compiled: by AMD target; narrowkv only.
        sample: where only a sample of the workgroups ran, which.
    """

    contract: Contract
    backend: str
    place: str
    status: str
    detail: str = ""
    ran_on: str = ""
    relative_l1: float | None = None
    max_abs: float | None = None
    kv_bytes_per_token: float | None = None
    time_us: dict[str, float] | None = None
    compiled: dict[str, Compiled] = field(default_factory=dict)
    sample: Sample | None = None


@dataclass(frozen=True)
class Outcome:
    """What a task found."""

    answers: tuple[Answer, ...] = ()
    compiled: Compiled | None = None
