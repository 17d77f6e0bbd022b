"""Which pipelines the launcher takes for done, and when it ends one, with processes that are only noted."""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import replace
from multiprocessing import Pipe
from pathlib import Path
from typing import Any

import pytest

from avgpipe.fault import supervise
from avgpipe.fault.door import encoded, received
from avgpipe.fault.group import REFUSED
from avgpipe.fault.joining import Joined
from avgpipe.fault.supervise import TOO_FEW, IsolatedCounts, Supervisor, TooFewLeft, _Launched
from avgpipe.ranks.launch import Job, RanksFailed, Started
from avgpipe.ranks.limits import LIMITS
from avgpipe.ranks.process import host_here


class Noted(Started):
    """Processes that end when a test says so."""

    def __init__(self) -> None:
        self.end: RanksFailed | bool | None = None
        self.are_stopped: list[int] = []
        self.killed: list[tuple[str, int | None]] = []

    def poll_or_kill(self) -> RanksFailed | bool | None:
        return self.end

    def kill(self, why: str = "", blamed: int | None = None) -> None:
        self.killed.append((why, blamed))

    def stopped(self) -> list[int]:
        return self.are_stopped


@contextmanager
def supervised(folder: Path, count: int) -> Iterator[tuple[Supervisor, list[Noted], list[str]]]:
    """A launcher of pipelines of one process, which have been started."""
    said = list[str]()
    one = Supervisor(Job("stderr", [], 1, {}), IsolatedCounts(count, restarts=0), folder, said.append)
    noted = [Noted() for _ in range(count)]
    for pipeline, processes in enumerate(noted):
        number, _ = one._new_group(pipeline)
        one._groups[number] = _Launched(pipeline, processes, ExitStack())
    with one._resources:
        try:
            yield one, noted, said
        finally:
            one._coordinator.close()


def connect(one: Supervisor, number: int) -> None:
    about = {"name": "rank 0", "pipeline": number, "size": 1, "period": 1, "host": "here", "timeout_s": 60}
    one._members.hello(number, 0, about, time.monotonic())


def hear(one: Supervisor, number: int, kind: str, *values: Any) -> None:
    one._members.receive(number, 0, kind, values, time.monotonic())


def test_pipelines_that_train_on_nothing_are_done_once_all_have_ended(tmp_path: Path) -> None:
    with supervised(tmp_path, 2) as (one, noted, said):
        for number in range(2):
            connect(one, number)
        for number in range(2):
            hear(one, number, "leave", 0, 0)
            noted[number].end = True
            one._look()
            assert one._finished == (set() if number == 0 else {0, 1})
        assert one._is_over()
        assert not said


def test_a_pipeline_that_leaves_before_the_others_begin_is_lost(tmp_path: Path) -> None:
    with supervised(tmp_path, 2) as (one, noted, said):
        connect(one, 0)
        noted[1].end = True  # without a Pipeline
        one._look()
        assert not said
        hear(one, 0, "enter", 1, {"plan": "a"}, {})
        one._look()
        assert said == ["pipeline 1 is lost: it has left before its first step, and the others go on"]
        assert one._missing
        assert not one._finished


def test_a_run_that_fails_before_it_begins_is_not_done_though_a_pipeline_has_left(tmp_path: Path) -> None:
    with supervised(tmp_path, 2) as (one, noted, said):
        noted[1].end = True  # without a Pipeline
        one._look()
        noted[0].end = RanksFailed((1,), 0)
        one._look()
        assert said == ["pipeline 0 is lost: rank 0 failed with exit code 1"]
        assert [loss.pipeline for loss in one._missing] == [0]
        assert not one._finished


def test_a_joined_command_that_is_silent_is_waited_for_only_while_its_pipeline_trains(tmp_path: Path) -> None:
    here, there = Pipe()
    with supervised(tmp_path, 1) as (one, _, _), here, there:
        joined = Joined(here)
        number, _ = one._new_group(1)
        one._groups[number] = _Launched(1, joined, ExitStack())
        there.send_bytes(encoded(["alive"]))
        joined.heard_at -= 100
        one._look()
        assert one._groups[number].why is None
        joined.heard_at -= 100
        one._look()
        assert one._groups[number].why == "its command has sent no message for 30 s"
        assert received(there) == ["end", "its command has sent no message for 30 s"]


def test_one_that_is_refused_is_not_started_again(tmp_path: Path) -> None:
    with supervised(tmp_path, 2) as (one, noted, said):
        one._left = {0: 3, 1: 3}
        one._lose(1, 0, f"{REFUSED}model are not those of pipeline 0")
        noted[1].end = RanksFailed((-15,), 0)
        one._look()
        assert said == ["pipeline 1 is lost: it is refused: model are not those of pipeline 0"]
        assert one._missing


def test_one_that_closes_its_connection_may_end_by_itself(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with supervised(tmp_path, 2) as (one, noted, said):
        one._lose(0, 0, "")
        one._look()
        assert not noted[0].killed
        noted[0].end = RanksFailed((7,), 0)
        one._look()
        assert said == ["pipeline 0 is lost: rank 0 failed with exit code 7"]
        monkeypatch.setattr(supervise, "LIMITS", replace(LIMITS, closed_end_s=0.0))
        one._groups[1].why = None  # the run is ended, as it has not begun
        noted[1].killed.clear()
        one._lose(1, 0, "")
        time.sleep(0.001)
        one._look()
        assert noted[1].killed == [("it has left the run, and its processes have not ended within 0 s", 0)]


def test_a_script_that_fails_at_its_start_is_not_started_again(tmp_path: Path) -> None:
    """The launcher has ended rank 1 for it."""
    with supervised(tmp_path, 2) as (one, noted, said):
        one._left = {0: 3, 1: 3}
        noted[0].end = RanksFailed((1, -15), 0, "RuntimeError: boom")
        one._look()
        why = "rank 0 failed with exit code 1"
        assert said == [f"pipeline 0 is lost: {why}"]
        assert str(TooFewLeft(1, one._missing, has_begun=False)) == (
            f"the run has not begun: pipeline 0: {why}: RuntimeError: boom"
        )


def test_one_that_is_lost_for_a_reason_is_killed_at_once(tmp_path: Path) -> None:
    with supervised(tmp_path, 2) as (one, noted, _):
        one._lose(0, 0, "rank 0 sent no message for 5 s")
        assert noted[0].killed == [("rank 0 sent no message for 5 s", 0)]


def test_a_silent_process_that_a_signal_has_stopped_is_named_as_such(tmp_path: Path) -> None:
    with supervised(tmp_path, 2) as (one, noted, _):
        noted[0].are_stopped = [0]
        one._lose(0, 0, "rank 0 sent no message for 5 s")
        assert noted[0].killed == [("rank 0 sent no message for 5 s; it was stopped by a signal", 0)]


def test_one_that_is_lost_for_good_has_a_line_that_starts_another_one(tmp_path: Path) -> None:
    with supervised(tmp_path, 2) as (one, noted, said):
        for number in range(2):
            connect(one, number)
            hear(one, number, "enter", 1, {"plan": "a"}, {})
        noted[1].end = RanksFailed((-9,), 0)
        one._look()
        assert said[0].endswith("; the others go on without it")
        assert said[1:] == [f"another one takes its place by: avgpipe join {tmp_path}"]


def test_one_that_fails_after_the_last_step_is_not_started_again(tmp_path: Path) -> None:
    with supervised(tmp_path, 2) as (one, noted, said):
        one._left = {0: 3, 1: 3}
        for number in range(2):
            connect(one, number)
            hear(one, number, "enter", 1, {"plan": "a"}, {})
        for number in range(2):
            hear(one, number, "leave", 0, 0)
        noted[1].end = RanksFailed((-6,), 0)
        one._look()
        assert said == ["pipeline 1 is lost: rank 0 was killed by SIGABRT; the others go on without it"]
        noted[0].end = True
        one._look()
        assert one._finished == {0}
        assert not one._missing


@pytest.mark.parametrize(
    "error", [OSError(28, "No space left"), MemoryError(), RuntimeError("can't start new thread")]
)
def test_a_start_without_room_is_tried_again_later(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, error: Exception
) -> None:
    def start(*_: Any) -> None:
        raise error

    monkeypatch.setattr(Job, "start", start)
    with supervised(tmp_path, 2) as (one, noted, said):
        one._left = {0: 3, 1: 3}
        for number in range(2):
            connect(one, number)
            hear(one, number, "enter", 1, {"plan": "a"}, {})
        noted[1].end = RanksFailed((-9,), 0)
        one._look()
        assert "it cannot be started again now, the next try is in 60 s" in said[-1]
        assert one._later


def test_a_command_with_other_options_starts_nothing(tmp_path: Path) -> None:
    with supervised(tmp_path, 1) as (one, _, said):
        one._isolation = IsolatedCounts(1, most=3)
        own = {"trains": "iso.py", "--stages": "2"}
        one._job = Job("stderr", [], 1, {}, options=own)
        about = {"host": host_here(), "name": "node7", "is_far": True}
        assert one._let_join(Pipe()[0], {**about, "options": {"trains": "x.py"}}) == {"options": own}
        assert not said
        for given in ({}, own):  # avgpipe join gives none
            assert "job" in one._let_join(Pipe()[0], {**about, "options": given})
        assert said == ["pipeline 1: started on node7", "pipeline 2: started on node7"]


def test_no_pipeline_joins_a_run_that_ends_because_too_few_are_left(tmp_path: Path) -> None:
    with supervised(tmp_path, 1) as (one, noted, _):
        connect(one, 0)
        hear(one, 0, "enter", 1, {"plan": "a"}, {})
        noted[0].end = RanksFailed((7,), 0)
        one._look()
        assert one._missing
        about = {"host": host_here(), "name": "another host", "is_far": True}
        assert one._let_join(Pipe()[0], about) == {"why": TOO_FEW}
        one._groups[9] = _Launched(0, late := Noted(), ExitStack())
        one._look()
        assert late.killed == [(TOO_FEW, None)]
