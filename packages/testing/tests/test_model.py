"""Modelled times of the families of kernels."""

from __future__ import annotations

import pytest

from narrowkv.testing.model import main_launch, model_call
from narrowkv.testing.operations import OPERATIONS, families


def test_every_family_belongs_to_an_operation() -> None:
    found = families("gfx950")
    # The timing model has no stored figures of the indexer yet.
    assert {family.operation for family in found.values()} == set(OPERATIONS) - {"indexer", "topk"}
    assert found.keys() == families("gfx942").keys()


@pytest.mark.slow
@pytest.mark.parametrize("target", ["gfx942", "gfx950"])
def test_every_family_has_a_loop_under_the_model(target: str) -> None:
    for name, family in families(target).items():
        prediction = main_launch(model_call(target, family.call, hbm_share=family.hbm_share)).full
        if prediction.flops == 0.0:
            continue  # an append to the cache only stores
        assert prediction.loop is not None, name
        assert prediction.loop_flops_per_second > 1e12, name
        # The clock under load is below the data sheet's, at which no loop is faster than the matrix units.
        peak = {"gfx942": 2.62e15, "gfx950": 5.04e15}[target]
        assert prediction.loop_flops_per_second < prediction.loop_flops_at_peak_clock < peak, name
        assert prediction.summary.startswith("model: ")
