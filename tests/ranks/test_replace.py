"""Ranks that are replaced by the launcher: who takes the place, what it is told, and that nobody is left."""

import itertools
import os
import signal
import sys
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from torch.distributed import HashStore

from avgpipe import PeerLost
from avgpipe.errors import PipelineError
from avgpipe.fault.generation import announcement, next_generation, prospect
from avgpipe.fault.replace import Replacing, _WaitingRank
from avgpipe.ranks import launch
from avgpipe.ranks.environment import GENERATION
from avgpipe.ranks.launch import RanksFailed, StoppedTimer, tied
from avgpipe.ranks.limits import LIMITS
from avgpipe.ranks.rendezvous import Board, Silence

# A spare that never comes as far as its Pipeline; rank 0 is killed once it is there, and rank 1 waits for the next.
_SCRIPT = """
import os, pathlib, signal, sys, time
from avgpipe.fault.generation import next_generation, restored
from avgpipe.ranks.rendezvous import private_store
folder = pathlib.Path(sys.argv[1])
if os.environ["RANK"] == "-1":
    (folder / "new").write_text(str(os.getpid()))
    (folder / "new").rename(folder / "spare")
    signal.pause()
if os.environ["RANK"] == "1":
    next_generation(private_store(), 60)
    private_store().set(restored(1), "")
while os.environ["AVGPIPE_RESTART"] == "0" and not (folder / "spare").exists():
    time.sleep(0.01)
(folder / os.environ["AVGPIPE_RESTART"]).touch()
if os.environ["AVGPIPE_RESTART"] == "1":
    from avgpipe.fault.generation import become_a_rank
    become_a_rank(lambda: None)
if os.environ["AVGPIPE_RESTART"] == "0" and os.environ["RANK"] == "0":
    os.kill(os.getpid(), signal.SIGKILL)
"""


@pytest.mark.ranks
def test_a_spare_that_is_not_ready_stays_one_and_is_ended_with_the_run(tmp_path: Path) -> None:
    said: list[str] = []
    command = tied("stderr", sys.executable, "-c", _SCRIPT, str(tmp_path))
    Replacing(command, 2, 1, {}, said.append).run()
    assert said[0].endswith("a new process takes its place")
    assert sorted(os.listdir(tmp_path)) == ["0", "1", "spare"]  # each life knows how often it was started
    assert not Path("/proc", (tmp_path / "spare").read_text()).exists()


# Rank 0 is stopped at its start, which rank 1 does not know; that one ends with an exit code of its own.
_STOPS = """
import os, pathlib, signal, sys, time
here = pathlib.Path(sys.argv[1], "process")
if os.environ["RANK"] == "0":
    here.with_suffix(".new").write_text(str(os.getpid()))
    here.with_suffix(".new").rename(here)
    os.kill(os.getpid(), signal.SIGSTOP)
while not here.exists() or pathlib.Path("/proc", here.read_text(), "stat").read_text().split()[2] != "T":
    time.sleep(0.01)
sys.exit(1)
"""


@pytest.mark.ranks
def test_a_stopped_rank_is_to_blame(tmp_path: Path) -> None:
    command = tied("stderr", sys.executable, "-c", _STOPS, str(tmp_path))
    with pytest.raises(RanksFailed, match="worker 0 of 2 was stopped by a signal") as failure:
        Replacing(command, 2, 0, {}, print).run()
    assert failure.value.exit_codes == (-signal.SIGKILL, 0)


# Rank 0 is stopped, for which rank 1 has waited long enough.
_STANDS = """
import os, pathlib, signal, sys, time
from avgpipe.fault.generation import become_a_rank, next_generation, restored, waited_for
from avgpipe.ranks.rendezvous import private_store
here = pathlib.Path(sys.argv[1], "process")
if os.environ["RANK"] == "1":
    while not here.exists() or pathlib.Path("/proc", here.read_text(), "stat").read_text().split()[2] != "T":
        time.sleep(0.01)
    private_store().set(waited_for(0), "")
    assert next_generation(private_store(), 20) == [0]
    private_store().set(restored(1), "")
elif os.environ["AVGPIPE_RESTART"] == "0":
    here.with_suffix(".new").write_text(str(os.getpid()))
    here.with_suffix(".new").rename(here)
    os.kill(os.getpid(), signal.SIGSTOP)
become_a_rank(lambda: None)
"""


@pytest.mark.promise
def test_a_rank_that_is_stopped_for_too_long_is_replaced(tmp_path: Path) -> None:
    said: list[str] = []
    Replacing(tied("stderr", sys.executable, "-c", _STANDS, str(tmp_path)), 2, 0, {}, said.append).run()
    assert said[0] == "rank 0 was stopped by a signal; a new process takes its place"


@pytest.mark.ranks
def test_ranks_that_are_all_stopped_are_ended(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(launch, "LIMITS", replace(LIMITS, stopped_s=0.2))
    command = tied("stderr", sys.executable, "-c", "import os, signal; os.kill(os.getpid(), signal.SIGSTOP)")
    with pytest.raises(RanksFailed, match=r"worker [01] of 2 was stopped by a signal"):
        Replacing(command, 2, 0, {}, print).run()


class _Rank:
    """As a rank that was started: one that may be stopped, and ends with what the test says."""

    def __init__(self, is_stopped: bool) -> None:
        self.is_stopped, self.is_killed = is_stopped, False
        self.end: dict[int, Any] | None = None

    def stopped(self) -> list[int]:
        return [0] if self.is_stopped else []

    def poll(self) -> dict[int, Any] | None:
        return self.end

    def kill(self) -> None:
        self.is_killed = True


def test_standing_still_counts_from_the_stop_though_another_one_went_on_to_its_end(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    ticks = itertools.count()
    monkeypatch.setattr(launch, "time", SimpleNamespace(monotonic=lambda: next(ticks) * 0.02))
    replacing, still, other = Replacing([], 2, 0, {}, print), _Rank(True), _Rank(False)
    replacing._ranks = {0: still, 1: other}  # type: ignore[dict-item]
    replacing._folder = tmp_path
    monkeypatch.setattr(replacing, "_is_there", lambda *_, **__: False)
    monkeypatch.setattr(replacing, "_put", lambda *_: None)
    for _ in range(int(LIMITS.stopped_s / 0.02) + 2):
        replacing._look()
    assert not still.is_killed
    other.end = {}
    replacing._look()
    replacing._look()
    assert still.is_killed


def test_a_rank_is_back_once_all_have_restored_their_state(monkeypatch: pytest.MonkeyPatch) -> None:
    said: list[str] = []
    replacing = Replacing([], 2, 0, {}, said.append)
    replacing._returning = {1}
    for is_restored, expected in (
        (False, []),
        (True, ["rank 1 is back; training continues"]),
        (True, ["rank 1 is back; training continues"]),
    ):
        monkeypatch.setattr(replacing, "_is_restored", lambda is_restored=is_restored: is_restored)
        replacing._look_for_spares()
        assert said == expected


# Rank 0 is killed, and its new process comes to its Pipeline only after its imports, for which rank 1 waits longer than
# its limit of 0.2 s.
_LATE = """
import os, pathlib, signal, sys, time
from avgpipe.fault.generation import become_a_rank, next_generation, restored
from avgpipe.ranks.rendezvous import private_store
folder = pathlib.Path(sys.argv[1])
if os.environ["RANK"] == "1":
    (folder / "1").touch()
    assert next_generation(private_store(), 2) == [0]
    private_store().set(restored(1), "")
    (folder / "met").touch()
elif os.environ["AVGPIPE_RESTART"] == "0":
    while not (folder / "1").exists():
        time.sleep(0.01)
    os.kill(os.getpid(), signal.SIGKILL)
else:
    time.sleep(3)  # as long as imports may take
    assert not (folder / "met").exists()
    become_a_rank(lambda: None)
    assert (os.environ["RANK"], os.environ["AVGPIPE_GENERATION"]) == ("0", "1")
"""


@pytest.mark.ranks
@pytest.mark.slow
def test_the_start_of_a_new_process_does_not_count_as_a_wait_for_it(tmp_path: Path) -> None:
    said: list[str] = []
    Replacing(tied("stderr", sys.executable, "-c", _LATE, str(tmp_path)), 2, 0, {}, said.append).run()
    assert said[0].endswith("a new process takes its place")
    assert (tmp_path / "met").exists()


@pytest.mark.ranks
def test_a_new_process_that_never_comes_to_its_pipeline_ends_the_run(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("avgpipe.fault.replace.LIMITS", replace(LIMITS, start_s=0.5))
    late = _SCRIPT.replace('if os.environ["RANK"] == "-1"', 'if os.environ["AVGPIPE_RESTART"] == "1"')
    (tmp_path / "spare").touch()  # nobody waits for it
    command = tied("stderr", sys.executable, "-c", late + "\nsignal.pause()", str(tmp_path))
    with pytest.raises(RanksFailed, match="worker 0 of 2 has not reached its Pipeline within 0 s"):
        Replacing(command, 2, 0, {}, print).run()


# Rank 0 is killed, and when its new process is there rank 1 fails: at once, or when all have restored their state.
_FAILS = """
import os, pathlib, signal, sys, time
from avgpipe.fault.generation import become_a_rank, next_generation, restored
from avgpipe.ranks.rendezvous import private_store
folder = pathlib.Path(sys.argv[1])
if os.environ["RANK"] == "1":
    (folder / "1").touch()
    next_generation(private_store(), 60)
    if sys.argv[2] == "restored":
        private_store().set(restored(1), "")
    sys.exit(4)
elif os.environ["AVGPIPE_RESTART"] == "0":
    while not (folder / "1").exists():
        time.sleep(0.01)
    os.kill(os.getpid(), signal.SIGKILL)
become_a_rank(lambda: None)
signal.pause()
"""


@pytest.mark.ranks
@pytest.mark.slow
@pytest.mark.parametrize(
    ("when", "says"),
    [
        ("lost", "worker 0 of 2 was killed by SIGKILL .*: rank 1 failed with exit code 4"),
        ("restored", "worker 1 of 2 failed with exit code 4"),
    ],
)
def test_who_was_lost_is_to_blame_until_the_others_have_their_state_again(
    when: str, says: str, tmp_path: Path
) -> None:
    command = tied("stderr", sys.executable, "-c", _FAILS, str(tmp_path), when)
    with pytest.raises(RanksFailed, match=says):
        Replacing(command, 2, 0, {}, print).run()


@pytest.mark.ranks
def test_a_new_process_that_is_killed_each_time_ends_the_run(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("avgpipe.fault.replace.LIMITS", replace(LIMITS, start_s=1.0))
    script = """
import os, signal
if os.environ["RANK"] == "1":
    signal.pause()
os.kill(os.getpid(), signal.SIGKILL)
"""
    with pytest.raises(RanksFailed, match="worker 0 of 2 has not reached its Pipeline within 1 s"):
        Replacing(tied("stderr", sys.executable, "-c", script), 2, 0, {}, print).run()


@pytest.mark.ranks
def test_where_no_new_process_can_be_started_the_run_ends(monkeypatch: pytest.MonkeyPatch) -> None:
    begun = Replacing._start

    def start(self: Replacing, rank: int, **others: str) -> Any:
        if others:
            raise OSError(28, "No space left on device")
        return begun(self, rank, **others)

    monkeypatch.setattr(Replacing, "_start", start)
    script = "import os, signal; os.kill(os.getpid(), signal.SIGKILL) if os.environ['RANK'] == '0' else signal.pause()"
    why = r"was killed by SIGKILL .*, and no new process can be started: \[Errno 28\] No space left on device"
    with pytest.raises(RanksFailed, match=why):
        Replacing(tied("stderr", sys.executable, "-c", script), 2, 0, {}, print).run()


# Rank 0 has missed rank 1, which ends later, with the same exit code.
_MISSES = """
import os, pathlib, sys, time
from avgpipe import PeerLost
from avgpipe.errors import PipelineError
from avgpipe.ranks.process import report_lost_peers
here = pathlib.Path(sys.argv[1], "process")
if os.environ["RANK"] == "0":
    here.with_suffix(".new").write_text(str(os.getpid()))
    here.with_suffix(".new").rename(here)
    report_lost_peers()
    raise PeerLost("rank 1 has closed its connection")
while not here.exists() or pathlib.Path("/proc", here.read_text()).exists():
    time.sleep(0.01)
sys.exit(1)
"""


@pytest.mark.ranks
def test_who_has_only_missed_another_one_is_not_to_blame(tmp_path: Path) -> None:
    command = tied("stderr", sys.executable, "-c", _MISSES, str(tmp_path))
    with pytest.raises(RanksFailed, match="worker 1 of 2 failed with exit code 1"):
        Replacing(command, 2, 0, {}, print).run()


def test_a_new_process_that_is_stopped_while_it_starts_is_killed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    ticks = itertools.count()
    monkeypatch.setattr(launch, "time", SimpleNamespace(monotonic=lambda: next(ticks) * 0.02))
    replacing, new = Replacing([], 2, 0, {}, print), _Rank(True)
    replacing._starting = {0: _WaitingRank(new, tmp_path / "pipe", float("inf"), StoppedTimer())}  # type: ignore[arg-type]
    for _ in range(int(LIMITS.stopped_s / 0.02) - 2):
        replacing._look_for_new()
    assert not new.is_killed
    for _ in range(4):
        replacing._look_for_new()
    assert new.is_killed
    assert replacing._killed_stopped == {0}  # which the launcher says then


@pytest.mark.parametrize(
    ("code", "says"),
    [
        (1, "worker 1 of 2 ended with exit code 0 before the others were done"),
        (-9, "worker 0 of 2 was killed by SIGKILL"),
    ],
)
def test_nobody_is_replaced_once_a_rank_has_ended(
    code: int, says: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    replacing, missing, left = Replacing([], 2, 0, {}, print), _Rank(False), _Rank(False)
    replacing._ranks = {0: missing, 1: left}  # type: ignore[dict-item]
    replacing._folder = tmp_path
    (tmp_path / "missed-0").touch()
    monkeypatch.setattr(replacing, "_is_there", lambda *_, **__: False)
    monkeypatch.setattr(replacing, "_put", lambda *_: None)
    left.end = {}
    replacing._look()
    missing.end = RanksFailed([code], 0)  # type: ignore[assignment]
    with pytest.raises(RanksFailed, match=says):
        replacing._look()


def test_a_run_whose_store_does_not_answer_any_more_ends_with_a_message(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A write to a full disk may leave half a record, at whose end torch reads for ever."""
    replacing, rank = Replacing([], 1, 0, {}, print), _Rank(True)
    replacing._ranks = {0: rank}  # type: ignore[dict-item]
    replacing._folder = tmp_path
    replacing._board = Board(SimpleNamespace(check=_silent, get=_silent))
    monkeypatch.setattr("avgpipe.fault.replace.LIMITS", replace(LIMITS, store_s=-1.0))
    assert replacing._is_there("a", silent=True)  # a stopped rank may hold the store
    assert not replacing._is_there("a", silent=False)
    rank.is_stopped = False
    with pytest.raises(PipelineError, match=r"the ranks cannot meet any more, as .*store cannot be read"):
        replacing._is_there("a", silent=True)


def _silent(*_: object) -> None:
    raise Silence


@pytest.mark.parametrize("is_there", [False, True])
def test_the_run_ends_at_once_where_a_rank_ends_before_a_new_process_has_its_state(
    is_there: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    replacing, lost, other = Replacing([], 2, 0, {}, lambda _: None), _Rank(False), _Rank(False)
    replacing._ranks = {0: lost, 1: other}  # type: ignore[dict-item]
    replacing._folder = tmp_path
    new = SimpleNamespace(
        process=_Rank(False), deadline=float("inf"), is_there=is_there, pipe=tmp_path / "pipe"
    )
    new.stopped_timer = StoppedTimer()
    monkeypatch.setattr(replacing, "_start_waiting", lambda *_: new)
    monkeypatch.setattr(replacing, "_is_there", lambda *_, **__: False)
    monkeypatch.setattr(replacing, "_put", lambda *_: None)
    lost.end = RanksFailed([-9], 0)  # type: ignore[assignment]
    replacing._look()
    replacing._look_for_new()
    assert (set(replacing._ranks) == {0, 1}) is is_there
    other.end = {}
    with pytest.raises(
        RanksFailed, match=r"worker 0 of 2 was killed by SIGKILL .*, and rank 1 has ended, so that"
    ):
        replacing._look()


# Rank 0 is stopped while it keeps the file in which ranks meet, so that rank 1 cannot even say that it waits.
_LOCKS = """
import fcntl, os, pathlib, signal, sys, time
from avgpipe.fault.generation import become_a_rank, next_generation, restored, waited_for
from avgpipe.ranks.rendezvous import private_store
locked = pathlib.Path(sys.argv[1], "locked")
if os.environ["RANK"] == "1":
    while not locked.exists():
        time.sleep(0.01)
    private_store().set(waited_for(0), "")
    assert next_generation(private_store(), 20) == [0]
    private_store().set(restored(1), "")
elif os.environ["AVGPIPE_RESTART"] == "0":
    private_store().set("here", "")
    with open(os.environ["AVGPIPE_STORE"]) as store:
        fcntl.flock(store, fcntl.LOCK_EX)
        locked.touch()
        os.kill(os.getpid(), signal.SIGSTOP)
become_a_rank(lambda: None)
"""


def test_nobody_waits_on_where_another_rank_has_given_up(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(GENERATION, "0")
    store = HashStore()
    for timeout_s in (0.05, 60):
        with pytest.raises(PeerLost, match="no rank is replaced"):
            next_generation(store, timeout_s)
    store.set(prospect(1), "")
    store.set(announcement(1), "[1]")
    assert next_generation(store, 60) == [1]


# The spare is stopped where it waits, as rank 0 sees, which is killed then; rank 1 waits for the next generation.
_STOPPED_SPARE = """
import os, pathlib, signal, sys, threading, time
from avgpipe.fault import generation
from avgpipe.ranks.rendezvous import private_store
here = pathlib.Path(sys.argv[1], "spare")
if os.environ["RANK"] == "-1":
    select = generation.select.select
    def stop_and_select(*arguments):
        here.with_suffix(".new").write_text(str(os.getpid()))
        here.with_suffix(".new").rename(here)
        threading.Timer(0.1, os.kill, (os.getpid(), signal.SIGSTOP)).start()
        return select(*arguments)
    generation.select.select = stop_and_select
if os.environ["RANK"] == "1":
    assert generation.next_generation(private_store(), 60) == [0]
    private_store().set(generation.restored(1), "")
elif os.environ["AVGPIPE_RESTART"] == "0" and os.environ["RANK"] == "0":
    while not here.exists() or pathlib.Path("/proc", here.read_text(), "stat").read_text().split()[2] != "T":
        time.sleep(0.01)
    os.kill(os.getpid(), signal.SIGKILL)
else:
    generation.become_a_rank(lambda: None)
"""


@pytest.mark.ranks
def test_a_spare_that_is_stopped_takes_nobodys_place(tmp_path: Path) -> None:
    said: list[str] = []
    Replacing(
        tied("stderr", sys.executable, "-c", _STOPPED_SPARE, str(tmp_path)), 2, 1, {}, said.append
    ).run()
    assert said[0].endswith("a new process takes its place")


# Rank 1 misses somebody, and nobody is lost.
_ASKS = """
import os, pathlib, sys, time
from avgpipe import PeerLost
from avgpipe.errors import PipelineError
from avgpipe.fault.generation import next_generation
from avgpipe.ranks.rendezvous import private_store
told = pathlib.Path(sys.argv[1], "told")
if os.environ["RANK"] == "1":
    try:
        next_generation(private_store(), 600)
    except PeerLost as error:
        told.with_suffix(".new").write_text(str(error))
        told.with_suffix(".new").rename(told)
while not told.exists():
    time.sleep(0.01)
"""


@pytest.mark.ranks
def test_a_rank_that_misses_a_peer_gets_the_answer_that_none_is_lost(tmp_path: Path) -> None:
    Replacing(tied("stderr", sys.executable, "-c", _ASKS, str(tmp_path)), 2, 0, {}, print).run()
    assert (tmp_path / "told").read_text() == "no rank is replaced"


@pytest.mark.ranks
def test_a_stopped_rank_that_holds_the_store_is_replaced(tmp_path: Path) -> None:
    said: list[str] = []
    Replacing(tied("stderr", sys.executable, "-c", _LOCKS, str(tmp_path)), 2, 0, {}, said.append).run()
    assert said[0] == "rank 0 was stopped by a signal; a new process takes its place"
