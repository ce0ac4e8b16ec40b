"""A timing model of gfx942 and gfx950: how long code would take, what bounds it. Never a measurement."""

from .machine import MACHINES, SOURCE_NAMES, SOURCES, Machine
from .pipeline import Loop, Simulation, simulate
from .report import Prediction, predict
from .trace import Op, Trace, trace_text, trace_workgroup

__all__ = [
    "MACHINES", "SOURCES", "SOURCE_NAMES", "Loop", "Machine", "Op", "Prediction", "Simulation", "Trace",
    "predict", "simulate", "trace_text", "trace_workgroup",
]  # fmt: skip
