"""A timing model of gfx942 and gfx950: how long code would take, what bounds it. Never a measurement."""

from .caches import CacheShares, Reads, cache_shares
from .errors import IdleTraceError, ModelError, PeakError
from .machine import MACHINES, SOURCE_NAMES, SOURCES, Machine
from .pipeline import Simulation, SteadyLoop, simulate
from .report import Prediction, predict, predict_launch, until_the_last_ends
from .survey import Survey, WorkgroupClass, survey
from .trace import Trace, TracedInstruction, trace_text, trace_workgroup

__all__ = [
    "MACHINES", "SOURCES", "SOURCE_NAMES", "CacheShares", "IdleTraceError", "Machine", "ModelError",
    "PeakError", "Prediction", "Reads", "Simulation", "SteadyLoop", "Survey", "Trace", "TracedInstruction",
    "WorkgroupClass", "cache_shares", "predict", "predict_launch", "simulate", "survey", "trace_text",
    "trace_workgroup", "until_the_last_ends",
]  # fmt: skip
