"""Several ranks, a device each: right on any hardware, and what was wrong is seen."""

from __future__ import annotations

import pytest

from tests.simulated_device import Hardware
from tests.simulated_device.put_back import BUGS, POLICIES, first_seen
from tests.simulated_device.several import CASES, on_one, wrong

WITHIN = 24  # seeds
HARDWARE = {
    "generous": Hardware(),
    "32 queues": Hardware(queues=32, has_pool=True, loads_late=True),
    "8 queues": Hardware(queues=8, has_pool=True),
}


@pytest.mark.parametrize("hardware", HARDWARE)
@pytest.mark.parametrize("case", CASES)
def test_ranks_train_as_one_device_does_on_any_hardware(case: str, hardware: str) -> None:
    expected = on_one(CASES[case])
    for seed, policy in enumerate(POLICIES):
        assert wrong(CASES[case], policy, seed, HARDWARE[hardware], expected) == "", (policy, seed)


@pytest.mark.slow
@pytest.mark.parametrize("hardware", HARDWARE)
@pytest.mark.parametrize("case", CASES)
def test_many_seeds(case: str, hardware: str) -> None:
    expected = on_one(CASES[case])
    seeds = [(seed, policy) for seed in range(20) for policy in POLICIES]
    found = {
        at: text for at in seeds if (text := wrong(CASES[case], at[1], at[0], HARDWARE[hardware], expected))
    }
    assert found == {}


@pytest.mark.parametrize("name", BUGS)
def test_what_would_hang_is_seen_and_only_where_queues_are_few(name: str) -> None:
    bug = BUGS[name]
    assert first_seen(bug, WITHIN) != ""
    if not bug.shown_everywhere:
        assert first_seen(bug._replace(hardware=Hardware()), 3) == ""
