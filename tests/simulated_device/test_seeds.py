"""The program that trains under many seeds: a sample of its seeds, and that it sees each order that is left out."""

from __future__ import annotations

import pytest

from tests.simulated_device.mutants import MUTANTS
from tests.simulated_device.seeds import POLICIES, first_seen, run_seed

WITHIN = 20  # seeds


@pytest.mark.parametrize("policy", POLICIES)
def test_training_is_the_cpu_s_in_every_order_and_replays(policy: str) -> None:
    first = run_seed(policy, 3)
    assert first.found == []
    assert run_seed(policy, 3) == first


@pytest.mark.parametrize("mutant", MUTANTS)
def test_an_order_that_is_left_out_is_seen_where_the_device_is_late(mutant: str) -> None:
    assert run_seed("eager", 0, mutant).found == []
    assert first_seen(mutant, "starved", WITHIN) is not None


@pytest.mark.slow
@pytest.mark.parametrize("policy", POLICIES)
def test_many_seeds(policy: str) -> None:
    assert [run for seed in range(100) if (run := run_seed(policy, seed)).found] == []
