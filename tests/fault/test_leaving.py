"""Pipelines whose scripts stop in the midst of a step, such as by a break, or that start late."""

from __future__ import annotations

import pytest

from avgpipe.fault.group import Kill
from avgpipe.fault.members import Members
from benchmarks.membership.world import SAMPLES, World

_BATCHES = 6


def training(pipelines: int) -> World:
    """A world in which each pipeline has begun a step that has not ended."""
    world = World(pipelines, 1, _BATCHES)
    for pipeline in range(pipelines):
        world.start(pipeline, "host 0")
    for name in ("connect", "enter"):
        for process in [*world.processes.values()]:
            process.move(name)
    for place in world.processes:
        world.arrives(place)
    for place, waiting in world.down.items():
        while waiting:
            world.hears(place)
    for process in world.processes.values():
        process.move("begin")
    return world


def test_one_that_leaves_in_the_midst_of_a_step_is_lost_where_others_go_on() -> None:
    world = training(2)
    world.processes[1, 0].move("leave")
    world.run_on()
    why = "it has left before the end of a step, and the others go on"
    assert [(kill.group, kill.why) for kill in world.kills] == [(1, why)]
    assert sorted(world.processes[0, 0].trained) == [*range(_BATCHES * SAMPLES)]
    assert world.members.is_done(0)
    assert not world.members.is_done(1)


@pytest.mark.parametrize("waited_s", [0.0, 1.5])
def test_all_may_leave_in_the_midst_of_a_step(waited_s: float) -> None:
    world = training(2)
    for number in range(2):
        world.processes[number, 0].move("leave")
        world.arrives((number, 0))
        world.now += waited_s
        world.tick()
    world.run_on()
    assert world.kills == []
    assert [world.members.is_done(number) for number in range(2)] == [True, True]


def test_a_pipeline_that_starts_again_may_take_as_long_as_the_others_took_to_start() -> None:
    members, limit_s = Members(2), 10.0
    about = {"name": "rank 0", "size": 1, "period": 1, "host": "here", "timeout_s": limit_s}
    for number in range(2):
        members.started(number, 0.0)
    members.hello(0, 0, {**about, "pipeline": 0}, 40.0)
    members.receive(0, 0, "enter", [1, {"plan": "a"}, {}], 40.0)
    assert members.tick(49.0) == []
    assert members.gone(1, 49.0) == []
    members.started(2, 49.0)
    for now in range(50, 98):
        members.receive(0, 0, "alive", ["a wait", 0, 0, 0, 0], float(now))
        assert members.tick(float(now)) == []
    members.receive(0, 0, "alive", ["a wait", 0, 0, 0, 0], 100.0)
    why = "it has not reached its first batch, for which the others have waited"
    assert members.tick(100.0) == [Kill(2, None, why)]


def test_a_lost_pipeline_does_not_leave_by_what_its_other_processes_say_later() -> None:
    members = Members(1)
    about = {"size": 2, "period": 1, "host": "here", "timeout_s": 10.0}
    members.started(0, 0.0)
    for rank in range(2):
        members.hello(0, rank, {**about, "name": f"rank {rank}", "pipeline": 0}, 0.0)
    for rank in range(2):
        members.receive(0, rank, "enter", [1, {"plan": "a"}, {}], 0.0)
    members.receive(0, 0, "leave", [5, 5], 1.0)
    members.closed(0, 0, 2.0)
    members.receive(0, 1, "leave", [5, 5], 3.0)
    assert members.is_done(0) is False
    assert members.training == set()
