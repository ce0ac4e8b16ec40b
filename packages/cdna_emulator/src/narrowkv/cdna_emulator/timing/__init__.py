"""A timing model of gfx942 and gfx950: how long code would take, what bounds it. Never a measurement."""

from .caches import CacheShares, Reads, cache_shares
from .errors import IdleTraceError, ModelError, PeakError
from .machine import MACHINES, SOURCE_NAMES, SOURCES, Machine
from .pipeline import Loop, Simulation, simulate
from .report import Prediction, predict, predict_launch, until_the_last_ends
from .survey import Share, Survey, survey
from .trace import Op, Trace, trace_text, trace_workgroup

__all__ = [
    "MACHINES", "SOURCES", "SOURCE_NAMES", "CacheShares", "IdleTraceError", "Loop", "Machine", "ModelError",
    "Op", "PeakError", "Prediction", "Reads", "Share", "Simulation", "Survey", "Trace", "cache_shares",
    "predict", "predict_launch", "simulate", "survey", "trace_text", "trace_workgroup",
    "until_the_last_ends",
]  # fmt: skip
