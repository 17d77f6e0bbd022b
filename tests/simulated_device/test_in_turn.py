"""Actions in turn on a device: the same numbers, few actions on it, and no action before its messages."""

from __future__ import annotations

from typing import Any
from unittest import mock

import pytest

from avgpipe import InTurn, Plan
from avgpipe.device import ReadyOnEvent
from avgpipe.errors import PipelineTimeout
from avgpipe.runtime.in_turn import InTurnScheduler
from avgpipe.runtime.lane import Lane
from tests.simulated_device import simulate
from tests.simulated_device.training import differences, train

PLAN = Plan(stages=3, pipelines=2, micro_batches=3, batch="per-pipeline")


@pytest.mark.parametrize(("policy", "seed"), [("late", 0), ("random", 1), ("random", 2)])
@pytest.mark.parametrize("actions", [1, 2, 3, None])
def test_actions_take_turns_and_compute_the_same(policy: str, seed: int, actions: int | None) -> None:
    before, early = (
        list[int](),
        list[Any](),
    )  # steps on the device when one is chosen; messages that were not there
    advance, choose = Lane.advance, InTurnScheduler._most_urgent

    def chosen(scheduler):
        found = choose(scheduler)
        before.extend([len(scheduler._issued)] * (found is not None))
        return found

    def advanced(lane, step):
        messages = (lane.port.messages[key] for key in step.needs)
        early.extend(m for m in messages if isinstance(m, ReadyOnEvent) and not m.has_happened)
        advance(lane, step)

    with (
        simulate(policy, seed),
        mock.patch.object(Lane, "advance", advanced),
        mock.patch.object(InTurnScheduler, "_most_urgent", chosen),
    ):
        found = train(PLAN, "sim:0", extensions=[InTurn(actions)] if actions else [])
    assert differences(found, train(PLAN, "cpu")) == []
    assert bool(early) == (actions is None)  # as usual they are on their way
    assert set(before) == set(range(actions or 0))


def test_a_device_that_never_ends_an_action_is_reported() -> None:
    never = mock.Mock()
    never.query.return_value = False
    with (
        simulate("eager"),
        mock.patch.object(InTurnScheduler, "_note_issued", lambda scheduler: scheduler._issued.append(never)),
        pytest.raises(PipelineTimeout, match="for its device to complete"),
    ):
        train(PLAN, "sim:0", extensions=[InTurn()], timeout_s=0.2)


def test_the_number_of_actions_is_checked() -> None:
    for actions in (0, True, 1.5):
        with pytest.raises(ValueError, match="actions must be an int of at least 1"):
            train(PLAN, "cpu", extensions=[InTurn(actions)])  # type: ignore[arg-type]
    found = train(PLAN, "cpu", extensions=[InTurn()])
    assert differences(found, train(PLAN, "cpu")) == []
