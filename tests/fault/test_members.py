"""The promises of the membership, in drawn worlds of processes: whoever dies, joins or is cut off when."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import (
    RuleBasedStateMachine,
    initialize,
    invariant,
    precondition,
    rule,
    run_state_machine_as_test,
)

from avgpipe.fault.group import OVER, Command, Kill, Send
from avgpipe.fault.members import Members
from benchmarks.membership.world import SAMPLES, World

_BATCHES = 6


class Drawn(RuleBasedStateMachine):
    """A world whose events are drawn; at its end all that can happen does, and the promises are looked at."""

    @initialize(
        hosts=st.lists(st.integers(0, 2), min_size=1, max_size=4),
        size=st.integers(1, 2),
        rounds=st.integers(0, 8),
    )
    def begin(self, hosts: list[int], size: int, rounds: int) -> None:
        self.world = World(len(hosts), size, _BATCHES)
        self.killed = self.joined = 0
        for pipeline, host in enumerate(hosts):
            self.world.start(pipeline, f"host {host}")
        self.world.run_on(rounds)  # to where pipelines train

    def _draw(self, data: Any, among: list[Any]) -> Any:
        return data.draw(st.sampled_from(among))

    @rule(data=st.data(), times=st.integers(1, 12))
    def move(self, data: Any, times: int) -> None:
        for _ in range(times):
            moves = [(*place, name) for place, one in self.world.processes.items() for name in one.moves()]
            if not moves:
                return
            *place, name = self._draw(data, moves)
            self.world.processes[tuple(place)].move(name)

    @rule(data=st.data(), times=st.integers(1, 12))
    def deliver(self, data: Any, times: int) -> None:
        for _ in range(times):
            waiting = [("arrives", *place) for place, queue in self.world.up.items() if queue]
            waiting += [("hears", *place) for place, queue in self.world.down.items() if queue]
            if not waiting:
                return
            event, *place = self._draw(data, waiting)
            getattr(self.world, event)(tuple(place))

    @rule()
    def tick(self) -> None:
        self.world.notice()
        self.world.tick()

    @precondition(lambda self: self.killed < 3 and len(self._pipelines()) > 1)
    @rule(data=st.data())
    def kill(self, data: Any) -> None:
        self.killed += 1
        place = self._draw(data, [place for place, one in self.world.processes.items() if one.alive])
        self.world.end(self.world.processes[place])

    @precondition(lambda self: self.killed < 2 and len(self._hosts()) > 1)
    @rule(data=st.data())
    def kill_host(self, data: Any) -> None:
        self.killed += 1
        host = self._draw(data, self._hosts())
        for process in self.world.processes.values():
            if process.alive and process.host == host:
                self.world.end(process)

    @precondition(lambda self: self.joined < 3)
    @rule(data=st.data(), host=st.integers(0, 3))
    def join(self, data: Any, host: int) -> None:
        there = self._pipelines()
        free = [pipeline for pipeline in range(6) if pipeline not in there]
        if free and there:
            self.joined += 1
            self.world.start(free[0], f"host {host}")

    def _pipelines(self) -> set[int]:
        return {one.pipeline for one in self.world.processes.values() if one.alive}

    def _hosts(self) -> list[str]:
        return sorted({one.host for one in self.world.processes.values() if one.alive})

    # ---- promises ----------------------------------------------------------------------------------------------------

    @invariant()
    def all_that_ended_a_step_count_the_same(self) -> None:
        if not hasattr(self, "world"):
            return
        counted: dict[int, tuple[int, ...]] = {}
        for one in self.world.processes.values():
            if one.alive:
                for turn, pipelines in one.counted.items():
                    assert counted.setdefault(turn, pipelines) == pipelines, (turn, one)

    @invariant()
    def every_kill_has_a_reason(self) -> None:
        for kill in self.world.kills if hasattr(self, "world") else ():
            assert kill.why or kill.rank is not None

    def teardown(self) -> None:
        if not hasattr(self, "world"):
            return
        world = self.world
        world.run_on()
        assert not world.living(), "some wait for ever"
        done = [one for one in world.processes.values() if one.phase == "done" and one.counted]
        best = max((len(one.trained) for one in done), default=0)
        everything = list(range(_BATCHES * SAMPLES))
        for one in done:
            if world.members.is_done(one.group):
                assert sorted(one.trained) == everything, (best, one.trained)
        trained = [one for one in done if world.members.is_done(one.group)]
        assert all(one.trained == trained[0].trained or sorted(one.trained) == everything for one in trained)


def _drawn(examples: int, steps: int) -> Any:
    case = Drawn.TestCase
    case.settings = settings(max_examples=examples, stateful_step_count=steps, deadline=None)
    return case


TestMembers = _drawn(300, 60)


def _enter(members: Members, number: int, period: int) -> None:
    """A pipeline of one process, on a host of its own."""
    about = {"name": f"pipeline {number}", "pipeline": number, "size": 1, "period": period}
    members.started(number, 0.0)
    members.hello(number, 0, {**about, "host": f"host {number}", "timeout_s": 10.0}, 0.0)
    members.receive(number, 0, "enter", [1, {"plan": "a"}, {}], 0.0)


def test_one_that_waits_for_a_step_that_never_comes_does_not_make_the_others_leave_early() -> None:
    members = Members(1, "host 0")
    _enter(members, 0, period=4)
    members.receive(0, 0, "alive", ["a step", 5, 5, 5, 5], 1.0)
    _enter(members, 1, period=4)
    members.receive(0, 0, "begun", [1, 5, 5, 5, {}], 1.0)
    assert members.history[1].first == 8
    members.receive(1, 0, "alive", ["the state", 5, 8, 8, 0], 2.0)
    members.receive(0, 0, "leave", [5, 5], 3.0)
    commands = members.receive(1, 0, "begun", [2, 8, 5, 8, {}], 3.0) + members.tick(3.1)
    assert Kill(1, None, OVER) in commands
    members.gone(1, 3.2)
    assert members.is_done(0) is True


def test_what_a_lost_one_has_begun_does_not_grow_by_those_that_wait_to_begin() -> None:
    members = Members(2, "host 0")
    for number in (0, 1):
        _enter(members, number, period=8)
    _enter(members, 2, period=8)
    for number in (0, 1):
        members.receive(number, 0, "begun", [1, 9, 9, 8, {}], 1.0)
    assert members.history[2].first == 16
    members.closed(1, 0, 2.0)
    for number, begun in ((0, 10), (2, 16)):
        members.receive(number, 0, "begun", [2, begun, 9, 9 if number == 0 else 16, {}], 2.0)
    assert (members.history[1].published, members.history[1].end) == (9, 10)


def _begun(pipelines: int) -> Members:
    members = Members(pipelines, "host 0")
    for number in range(pipelines):
        _enter(members, number, period=1)
    assert members.has_begun
    return members


def _asks_to_freeze(commands: list[Command]) -> bool:
    return any(isinstance(one, Send) and one.message[0] == "freeze" for one in commands)


def test_each_event_that_needs_a_change_asks_for_it_at_once() -> None:
    assert not _asks_to_freeze(_begun(2).receive(0, 0, "alive", ["a step", 1, 1, 0, 0], 1.0))
    assert _asks_to_freeze(_begun(2).receive(0, 0, "stop", [], 1.0))
    assert _asks_to_freeze(_begun(2).closed(0, 0, 1.0))
    assert _asks_to_freeze(_begun(2).gone(0, 1.0))
    assert _asks_to_freeze(_begun(2).lose(0, 0, "why", 1.0))
    assert _asks_to_freeze(_begun(2).receive(0, 0, "gives up", ["why"], 1.0))
    assert _asks_to_freeze(_begun(2).receive(0, 0, "unseen", [1], 1.0))


def test_a_broken_sum_asks_for_a_change_by_the_time_alone() -> None:
    members = _begun(2)
    assert not _asks_to_freeze(members.receive(0, 0, "broken", [0], 1.0))
    assert not _asks_to_freeze(members.tick(2.9))
    assert _asks_to_freeze(members.tick(3.1))


def test_a_silent_process_is_ended_at_its_timeout_whenever_the_others_were_heard() -> None:
    members = _begun(2)
    members.receive(0, 0, "alive", ["a step", 1, 1, 0, 0], 0.5)
    members.tick(9.0)
    members.receive(1, 0, "alive", ["a step", 1, 1, 0, 0], 9.5)
    assert not any(isinstance(one, Kill) for one in members.tick(10.4))
    assert [one.group for one in members.tick(10.6) if isinstance(one, Kill)] == [0]


_NIGHTLY = 10_000


class Counted(Drawn):
    """As `Drawn`, and counts the steps of all that are made."""

    steps = 0

    def __init__(self) -> None:
        super().__init__()
        Counted.steps -= 1  # the first look follows the beginning, which is no step

    @invariant()
    def is_a_step(self) -> None:
        Counted.steps += 1


@pytest.mark.slow
@pytest.mark.timeout(1800)
def test_the_promises_hold_over_ten_thousand_steps(capsys: pytest.CaptureFixture[str]) -> None:
    long = settings(max_examples=200, stateful_step_count=100, deadline=None)
    while Counted.steps < _NIGHTLY:
        run_state_machine_as_test(Counted, settings=long)
    with capsys.disabled():
        print(f"\n{Counted.steps:,} drawn steps of the membership")


@pytest.mark.parametrize("names", [True, False])
def test_a_host_that_the_others_cannot_reach_is_ended_alone(names: bool) -> None:
    members, hosts = Members(6, "host 0"), range(6)
    for n in hosts:
        _enter(members, n, period=1)
    killed: list[int] = []
    for round_ in range(6):
        now = 30.0 * (round_ + 1)
        living = [group.number for group in members.living()]
        for n in living:
            members.receive(n, 0, "alive", ["a sum", 6, 6, 5, 6], now)
        for n in living:  # host 4 has lost its connections to the others, of which the first is host 0
            members.receive(n, 0, "late", [5, 30.0, ("host 0" if n == 4 else "host 4") if names else ""], now)
        members.tick(now)
        for n in living:
            members.receive(n, 0, "alive", ["a sum", 6, 6, 5, 6], now + 1.6)
        commands = members.tick(now + 1.6)
        for n in living:
            if not members.groups[n].is_lost:
                commands += members.receive(n, 0, "begun", [members.epoch + 1, 6, 6, 5, {}], now + 1.6)
        killed += [command.group for command in commands if isinstance(command, Kill)]
        if killed:
            break
    assert killed == ([4] if names else [1, 2, 3, 4, 5])
