"""What the adapter of vLLM does under decode context parallelism, with two ranks and without the engine."""

from __future__ import annotations

import engine_ranks

from narrowkv.context_parallel.ranks import run_ranks


def test_steps_over_two_ranks_equal_float32() -> None:
    ranks = run_ranks(engine_ranks.every_step, 2, timeout_s=120)
    for found in (steps for rank in ranks for steps in rank):
        assert found.pop("a chunk in a window") == 0
        assert len(found) == 5
        for name, error in found.items():
            # Rounding of the result to bf16, and of P.
            assert error <= 2.0**-8, name
