"""Another cut of a run: layers by a profile, in the proportions that its stages were measured to have."""

from __future__ import annotations

from dataclasses import replace

import pytest

from avgpipe.planning import Costs
from avgpipe.planning.rebalance import rebalanced
from avgpipe.schedule import build_schedule
from tests.planning.chains import layer, profile

EVEN = profile(*[layer(1.0, 2.0, output=8.0) for _ in range(6)])
ORDER = build_schedule("1f1b", 2, 8)


def test_even_layers_of_uneven_stages_are_moved() -> None:
    """Two of six layers, and four: as many each."""
    found = rebalanced(EVEN, [0, 2, 6], Costs([0.2, 0.4], [0.4, 0.8]), ORDER, 1, "flush")
    assert found is not None
    assert found.boundaries == (3,)
    assert found.gain == pytest.approx(0.25, abs=0.05)  # 4 layers to 3 on the slower stage


def test_what_was_measured_counts_and_not_the_profiles_seconds() -> None:
    """The first three layers take three times as long as the profile says, for the others."""
    found = rebalanced(EVEN, [0, 3, 6], Costs([0.9, 0.3], [1.8, 0.6]), ORDER, 1, "flush")
    assert found is not None
    assert found.boundaries == (2,)
    assert 0.2 < found.gain < 0.4


def test_an_even_cut_stays() -> None:
    found = rebalanced(EVEN, [0, 3, 6], Costs([0.3, 0.3], [0.6, 0.6]), ORDER, 2, "flush")
    assert found is not None
    assert found.boundaries == (3,)
    assert found.gain == 0


def test_what_was_not_measured_is_not_known() -> None:
    assert rebalanced(EVEN, [0, 3, 6], Costs([0.3, 0.0], [0.6, 0.0]), ORDER, 1, "flush") is None


def test_large_messages_are_not_moved_to_a_slow_link() -> None:
    """Between layers 2 and 3 an activation is a hundred times as large as where the cut is."""
    layers = [layer(1.0, 2.0, output=800.0 if n == 2 else 8.0) for n in range(6)]
    measured = Costs([0.2, 0.4], [0.4, 0.8], 0.1)
    found = rebalanced(profile(*layers), [0, 2, 6], measured, ORDER, 1, "flush")
    assert found is not None
    assert found.boundaries != (3,)
    free = rebalanced(profile(*layers), [0, 2, 6], Costs([0.2, 0.4], [0.4, 0.8]), ORDER, 1, "flush")
    assert free is not None
    assert free.boundaries == (3,)


def test_rounding_of_measured_seconds_makes_no_costs_that_are_refused() -> None:
    """What is accumulated is all of a backward but the part for the input, whatever seconds were measured."""
    layers = [replace(layer(), input_backward_s=(0.6,), accumulate_s=5.0) for _ in range(5)]
    for n in range(1, 60):
        measured = Costs([1e-4 * n, 1e-4], [1.7e-4 * n, 3e-4])
        assert rebalanced(profile(*layers), [0, 2, 5], measured, ORDER, 1, "flush") is not None


def test_several_stages_on_a_worker() -> None:
    order = build_schedule("interleaved-1f1b", 4, 4, stages_per_worker=2)
    layers = profile(*[layer() for _ in range(8)])
    found = rebalanced(
        layers, [0, 1, 2, 3, 8], Costs([0.1, 0.1, 0.1, 0.5], [0.2, 0.2, 0.2, 1.0]), order, 1, "flush"
    )
    assert found is not None
    assert found.gain > 0.2
