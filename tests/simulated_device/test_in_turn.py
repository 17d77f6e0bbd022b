"""Actions in turn on a device: the same numbers, at most two actions on it, and no action before its messages."""

from __future__ import annotations

from contextlib import nullcontext
from unittest import mock

import pytest

from avgpipe import Plan
from avgpipe.device import ReadyOnEvent
from avgpipe.runtime.lane import Lane
from benchmarks.one_card.in_turn import in_turn
from tests.simulated_device import simulate
from tests.simulated_device.training import differences, train

PLAN = Plan(stages=3, pipelines=2, micro_batches=3, batch="per-pipeline")


@pytest.mark.parametrize(("policy", "seed"), [("late", 0), ("random", 1)])
@pytest.mark.parametrize("takes_turns", [True, False])
def test_actions_take_turns_and_compute_the_same(policy: str, seed: int, takes_turns: bool) -> None:
    before, early = [], []  # actions on the device when one more is issued; messages that were not there
    advance = Lane.advance

    with simulate(policy, seed), in_turn() if takes_turns else nullcontext([]) as issued:

        def advanced(lane, step):
            before.append(len(issued))
            messages = (lane.port.messages[key] for key in step.needs)
            early.extend(m for m in messages if isinstance(m, ReadyOnEvent) and not m._ready.query())
            return advance(lane, step)

        with mock.patch.object(Lane, "advance", advanced):
            found = train(PLAN, "sim:0")
    assert differences(found, train(PLAN, "cpu")) == []
    assert max(before) == (1 if takes_turns else 0)
    assert bool(early) != takes_turns  # as usual they are on their way
