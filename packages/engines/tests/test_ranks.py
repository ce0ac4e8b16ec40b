"""What the adapter of vLLM does under decode context parallelism, with two ranks and without the engine."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

from narrowkv.context_parallel.ranks import run_ranks

sys.path.append(str(Path(__file__).resolve().parent))
import engine_ranks


@pytest.mark.parametrize(("interleave", "comm"), [(1, "a2a"), (16, "ag_rs")])
def test_steps_over_two_ranks_equal_float32(interleave: int, comm: str) -> None:
    for found in run_ranks(engine_ranks.steps, 2, interleave, comm, timeout_s=120):
        assert found.pop("a chunk in a window") == 0
        assert len(found) == 5
        for name, error in found.items():
            # Rounding of the result to bf16, and of P.
            assert error <= 2.0**-8, name
