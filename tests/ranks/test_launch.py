"""Ranks answer, or are gone, and the one to blame is named."""

import os
import signal
import socket
import subprocess
import sys
import tempfile
import time
from contextlib import suppress
from dataclasses import replace

import pytest
import torch.distributed as dist

from avgpipe.errors import PipelineError
from avgpipe.fault.replace import Replacing
from avgpipe.ranks import launch, supervisor
from avgpipe.ranks.environment import cores
from avgpipe.ranks.launch import (
    RanksFailed,
    first_to_fail,
    loopback_store,
    run_command,
    run_on_ranks,
    start,
    tied,
)
from avgpipe.ranks.limits import LIMITS
from avgpipe.ranks.process import PEER_LOST
from tests.cli.command import PACKAGES, ROOT, alive, environment
from tests.patience import limit, wait_until

HERE = "tests.ranks.targets"
TWO = """
import os, pathlib, signal, sys, time
from avgpipe import PeerLost
from avgpipe.ranks.process import report_lost_peers
folder, rank = pathlib.Path(sys.argv[1]), int(os.environ["RANK"])
(folder / f"new-{rank}").write_text(str(os.getpid()))
(folder / f"new-{rank}").rename(folder / f"{rank}")
def wait_until_other_is(state):
    other = folder / f"{1 - rank}"
    while not other.exists() or pathlib.Path("/proc", other.read_text(), "stat").read_text().split()[2] != state:
        time.sleep(0.01)
"""
# Rank 0 has missed rank 1, which ends after it, for which the launcher must be waiting then.
MISSES = f"""
{TWO}
if rank == 0:
    report_lost_peers()
    raise PeerLost("rank 1 has closed its connection")
wait_until_other_is("Z")
sys.exit(1)
"""
# The same, and rank 1 stands still.
MISSES_A_STOPPED = f"""
{TWO}
if rank == 1:
    os.kill(os.getpid(), signal.SIGSTOP)
wait_until_other_is("T")
sys.exit(1)
"""
ALONE = """
import os, pathlib, signal, sys
if os.environ["RANK"] == "1":
    pathlib.Path(sys.argv[1], "process").write_text(str(os.getpid()))
    os.kill(os.getpid(), signal.SIGSTOP)
"""


def workers_of(folder, count=2):
    return [int(path.read_text()) for path in folder.iterdir() if path.read_text()][:count]


@pytest.mark.ranks
def test_every_rank_answers():
    said = []
    answers = run_on_ranks(f"{HERE}:adds", 2, {"a": 1, "b": 2}, timeout_s=60, say=said.append)
    assert answers == [{"sum": 3, "rank": rank, "ranks": 2} for rank in range(2)]
    assert set(said) <= {"rank 0 adds"}  # of rank 0 alone, if it was still there to be seen


@pytest.mark.ranks
def test_arguments_are_not_in_the_command_line():
    """Which every user of the host may read."""
    (words,) = run_on_ranks(f"{HERE}:command_line", 1, {"secret": "a path"}, timeout_s=60)
    assert f"{HERE}:command_line" in words
    assert not any("secret" in word or "a path" in word for word in words)


@pytest.mark.promise
def test_ranks_find_each_other():
    assert run_on_ranks(f"{HERE}:meets", 2, {}, timeout_s=60) == [3.0, 3.0]


@pytest.mark.ranks
@pytest.mark.slow
def test_a_failure_is_reported_with_its_reason_and_ends_the_others(tmp_path):
    with pytest.raises(
        RanksFailed, match="worker 1 of 2 failed with exit code 1: ValueError: one is enough"
    ) as failure:
        run_on_ranks(f"{HERE}:fails", 2, {"folder": str(tmp_path)}, timeout_s=60)
    assert failure.value.exit_codes == (128 + signal.SIGTERM, 1)
    assert not any(map(alive, workers_of(tmp_path)))


@pytest.mark.ranks
def test_who_leaves_without_an_error_is_to_blame_if_another_one_misses_it():
    with pytest.raises(RanksFailed, match="worker 1 of 2 ended with exit code 0 before the others were done"):
        run_on_ranks(f"{HERE}:leaves", 2, {}, timeout_s=60)


@pytest.mark.ranks
def test_an_end_without_a_result_is_no_success():
    with pytest.raises(RanksFailed, match="worker 0 of 1 ended with exit code 0 and without a result"):
        run_on_ranks(f"{HERE}:leaves_without_a_result", 1, {}, timeout_s=60)


@pytest.mark.ranks
@pytest.mark.slow
def test_who_only_missed_a_peer_is_not_to_blame():
    with pytest.raises(
        RanksFailed, match="worker 1 of 2 failed with exit code 1: ValueError: later"
    ) as failure:
        run_on_ranks(f"{HERE}:misses_its_peer", 2, {}, timeout_s=60)
    assert failure.value.exit_codes == (PEER_LOST, 1)


@pytest.mark.ranks
def test_who_only_waits_for_the_end_of_the_others_is_not_to_blame():
    why = "worker 1 of 2 failed with exit code 1: ValueError: at the very end"
    with pytest.raises(RanksFailed, match=why) as failure:
        run_on_ranks(f"{HERE}:fails_at_its_end", 2, {}, timeout_s=60)
    assert failure.value.exit_codes in [(PEER_LOST, 1), (128 + signal.SIGTERM, 1)]  # whichever is seen first


@pytest.mark.ranks
@pytest.mark.slow
def test_a_stopped_rank_is_to_blame_and_delays_no_other(tmp_path):
    """Whoever missed it, and ended with an exit code of its own."""
    begin = time.monotonic()
    with pytest.raises(RanksFailed, match="worker 0 of 2 was stopped by a signal") as failure:
        run_on_ranks(f"{HERE}:stops", 2, {"folder": str(tmp_path)}, timeout_s=60)
    assert failure.value.exit_codes == (-signal.SIGKILL, 1)
    assert time.monotonic() - begin < limit(20)


@pytest.mark.ranks
def test_who_stands_still_with_nobody_left_to_wait_for_it_is_ended(tmp_path, monkeypatch):
    monkeypatch.setattr(launch, "LIMITS", replace(LIMITS, stopped_s=0.2))
    with pytest.raises(RanksFailed, match="worker 1 of 2 was stopped by a signal") as failure:
        run_command([sys.executable, "-c", ALONE, str(tmp_path)], 2)
    assert failure.value.exit_codes == (0, -signal.SIGKILL)
    assert not alive(int((tmp_path / "process").read_text()))


# Rank 1 never reaches its Pipeline, where rank 0 waits for it.
HANGS_AT_ITS_START = """
import os, signal
if os.environ["RANK"] == "1":
    signal.pause()
from avgpipe.ranks.process import report_lost_peers
from avgpipe.ranks.rendezvous import join
report_lost_peers()
join(0.5, "gloo")
"""


# The error is reported, and then the process waits for ever, as a destructor may.
NEVER_ENDS = """
import atexit, signal
from avgpipe.ranks.process import report_lost_peers
report_lost_peers()
atexit.register(signal.pause)
raise ValueError("the first cause")
"""


@pytest.mark.ranks
def test_a_rank_that_does_not_end_after_its_last_error_is_killed(monkeypatch):
    monkeypatch.setattr(launch, "LIMITS", replace(LIMITS, reported_end_s=0.2))
    with pytest.raises(RanksFailed, match="worker 0 of 1 was killed by SIGKILL") as failed:
        run_command([sys.executable, "-c", NEVER_ENDS], 1)
    assert failed.value.said == "ValueError: the first cause"


@pytest.mark.ranks
@pytest.mark.parametrize("replaces", [False, True])
def test_a_rank_that_was_never_ready_is_to_blame(replaces):
    command = [sys.executable, "-c", HANGS_AT_ITS_START]
    with pytest.raises(RanksFailed, match="worker 1 of 2 did not reach its Pipeline"):
        Replacing(tied("stderr", *command), 2, 0, {}, print).run() if replaces else run_command(command, 2)


@pytest.mark.ranks
@pytest.mark.parametrize("kills", [False, True])
@pytest.mark.parametrize(
    ("script", "why"),
    [(MISSES, "failed with exit code 1"), (MISSES_A_STOPPED, launch.STOPPED)],
    ids=["told", "stopped"],
)
def test_a_script_that_has_only_missed_another_one_is_not_to_blame(tmp_path, kills, script, why):
    """It ends first, and with the same exit code."""
    (tmp_path / "ranks").mkdir()
    command = tied("stderr", sys.executable, "-c", script, str(tmp_path))
    with supervisor.keeping_handlers():
        started = start([command] * 2, tmp_path / "ranks", {"PYTHONPATH": PACKAGES})
        poll, found = started.poll_or_kill if kills else started.poll, []
        wait_until(lambda: found.append(poll()) or found[-1] is not None)
    assert (found[-1].rank, found[-1].reason) == (1, why)


@pytest.mark.ranks
def test_a_function_may_choose_its_exit_code():
    last = "what standard output gets is kept back, too"
    with pytest.raises(RanksFailed, match=f"worker 0 of 1 failed with exit code 2: {last}"):
        run_on_ranks(f"{HERE}:refuses", 1, {}, timeout_s=60)


@pytest.mark.ranks
@pytest.mark.slow
@pytest.mark.parametrize(("chosen", "threads", "found"), [("5", None, "5"), ("5", 3, "3"), (None, None, "")])
def test_threads_are_shared_unless_somebody_chose(monkeypatch, chosen, threads, found):
    monkeypatch.delenv("OMP_NUM_THREADS", raising=False)
    if chosen is not None:
        monkeypatch.setenv("OMP_NUM_THREADS", chosen)
    before = dict(os.environ)
    answers = run_on_ranks(f"{HERE}:threads", 2, {}, timeout_s=60, threads=threads)
    assert answers == 2 * [found or str(max(1, cores() // 2))]
    assert dict(os.environ) == before


@pytest.mark.ranks
@pytest.mark.slow
def test_workers_that_take_too_long_are_ended(tmp_path):
    with pytest.raises(PipelineError, match="not done after 3 s"):
        run_on_ranks(f"{HERE}:sleeps", 1, {"folder": str(tmp_path)}, timeout_s=3)
    assert not any(map(alive, workers_of(tmp_path)))


@pytest.mark.ranks
@pytest.mark.slow
@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM, signal.SIGKILL])
def test_workers_go_with_their_parent(tmp_path, number):
    code = (
        "from avgpipe.ranks.launch import *\n"
        f"run_on_ranks('{HERE}:sleeps', 2, {{'folder': {str(tmp_path)!r}}}, timeout_s=90)"
    )
    parent = subprocess.Popen(
        [sys.executable, "-c", code], env=environment(), cwd=ROOT, stderr=subprocess.DEVNULL
    )
    try:
        wait_until(lambda: len(workers_of(tmp_path)) == 2)
        parent.send_signal(number)
        assert parent.wait(limit(20)) != 0
        wait_until(lambda: not any(map(alive, workers_of(tmp_path))), 20)
    finally:
        parent.kill()


@pytest.mark.ranks
def test_nothing_waits_when_a_worker_cannot_be_started():
    begin = time.monotonic()
    with pytest.raises(PipelineError, match=r"No module named 'tests\.nothing'"):
        run_on_ranks("tests.nothing:here", 1, {}, timeout_s=60)
    assert time.monotonic() - begin < limit(30)


# Rank 0 ends by itself, once rank 1 has been killed.
KILLED = f"""
{TWO}
if rank == 1:
    os.kill(os.getpid(), signal.SIGKILL)
wait_until_other_is("Z")
sys.exit(1)
"""


@pytest.mark.promise
def test_who_was_killed_is_to_blame_before_who_has_ended_in_the_same_moment(tmp_path):
    (tmp_path / "ranks").mkdir()
    command = tied("stderr", sys.executable, "-c", KILLED, str(tmp_path))
    with supervisor.keeping_handlers():
        started = start([command] * 2, tmp_path / "ranks", {"PYTHONPATH": PACKAGES})
        wait_until(lambda: len(started._exit_codes()) == 2)
        found = started.poll_or_kill()
    assert (found.rank, found.exit_codes) == (1, (1, -signal.SIGKILL))


@pytest.mark.promise
def test_what_a_rank_has_started_is_killed_with_it(tmp_path):
    (tmp_path / "ranks").mkdir()
    script = "import pathlib, subprocess, sys; child = subprocess.Popen(['sleep', '100']); "
    script += "pathlib.Path(sys.argv[1], 'new').write_text(str(child.pid)); "
    script += "pathlib.Path(sys.argv[1], 'new').rename(sys.argv[1] + '/child'); child.wait()"
    command = tied("stderr", sys.executable, "-c", script, str(tmp_path))
    with supervisor.keeping_handlers():
        started = start([command], tmp_path / "ranks", {"PYTHONPATH": PACKAGES})
        wait_until((tmp_path / "child").exists)
        started.kill()
        wait_until(lambda: started.poll() is not None)
    wait_until(lambda: not alive(int((tmp_path / "child").read_text())))


@pytest.mark.ranks
def test_a_launcher_that_outlives_its_terminal_does_so(tmp_path):
    """As with nohup."""
    command = tied("stderr", sys.executable, "-c", "")
    with supervisor.keeping_handlers():
        signal.signal(signal.SIGHUP, signal.SIG_IGN)
        started = start([command], tmp_path, {"PYTHONPATH": PACKAGES})
        assert signal.getsignal(signal.SIGHUP) == signal.SIG_IGN
        wait_until(lambda: started.poll() is not None)


def test_a_second_signal_ends_all_at_once():
    calls = []

    def close(number):
        calls.append(number)
        if number != signal.SIGKILL:
            raise KeyboardInterrupt

    with (
        supervisor.keeping_handlers(),
        pytest.raises(supervisor.Interrupted, match="SIGINT"),
        supervisor.ending(close),
    ):
        raise KeyboardInterrupt
    assert calls == [signal.SIGINT, signal.SIGKILL]


@pytest.fixture
def number(request):
    """A signal, which is not ignored: under nohup SIGHUP is."""
    before = signal.getsignal(request.param)
    if before is signal.SIG_IGN:
        signal.signal(request.param, signal.SIG_DFL)
    yield request.param
    signal.signal(request.param, before)


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM, signal.SIGHUP], indirect=True)
def test_a_signal_before_the_processes_are_started_leaves_no_folder(tmp_path, monkeypatch, number):
    def start(*_):
        (folder,) = tmp_path.glob("avgpipe-*")
        os.kill(os.getpid(), number)
        raise AssertionError(f"the signal was lost in {folder}")

    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    monkeypatch.setattr(launch, "start", start)
    before = signal.getsignal(number)
    with pytest.raises(supervisor.Interrupted, match=number.name) as end:
        run_command([sys.executable, "-c", ""], 1)
    assert end.value.exit_code == 128 + number
    assert not list(tmp_path.iterdir())
    assert signal.getsignal(number) is before


def test_a_signal_whose_exception_is_lost_ends_all_once_they_are_started():
    """As in a callback of Python's imports."""
    closed = []

    class Policy(supervisor.LaunchPolicy):
        def begin(self):
            with suppress(KeyboardInterrupt):
                os.kill(os.getpid(), signal.SIGTERM)

        def all_started(self):
            return []

        def look(self):
            raise AssertionError("the run goes on")

        def close(self, number):
            closed.append(number)

    for _ in range(2):
        with pytest.raises(supervisor.Interrupted, match="SIGTERM"), supervisor.raising_on_signals():
            supervisor.watch(Policy())
    assert closed == [signal.SIGTERM] * 2


def test_signals_that_are_ignored_or_handled_stay_so():
    heard = []
    with supervisor.keeping_handlers():
        signal.signal(signal.SIGHUP, signal.SIG_IGN)
        signal.signal(signal.SIGTERM, lambda number, _: heard.append(number))
        with supervisor.raising_on_signals():
            os.kill(os.getpid(), signal.SIGHUP)
            os.kill(os.getpid(), signal.SIGTERM)
        assert heard == [signal.SIGTERM]


@pytest.mark.ranks
def test_a_handler_of_the_caller_is_there_again_afterwards(tmp_path):
    before = signal.getsignal(signal.SIGTERM)
    with pytest.raises(RanksFailed):
        run_on_ranks("tests.nothing:here", 1, {}, timeout_s=60)
    assert signal.getsignal(signal.SIGTERM) == before


def test_the_store_of_scripts_listens_on_loopback_alone():
    with loopback_store() as address:
        port = int(address["MASTER_PORT"])
        store = dist.TCPStore("127.0.0.1", port, is_master=False, wait_for_workers=False)
        store.set("a", "b")
        assert store.get("a") == b"b"
        for _, _, _, _, (host, *_) in socket.getaddrinfo(socket.gethostname(), port, socket.AF_INET):
            if not str(host).startswith("127."):
                with pytest.raises(ConnectionRefusedError):
                    socket.create_connection((str(host), port), 2)


# ---- who is to blame -------------------------------------------------------------------------------------------------

TERMINATED = -signal.SIGTERM


def test_a_killed_rank_comes_before_those_that_lost_it():
    assert first_to_fail({0: (PEER_LOST, 10), 1: (-signal.SIGKILL, 11), 2: (TERMINATED, 11)}) == 1


def test_a_refusal_comes_before_its_consequences():
    assert first_to_fail({0: (PEER_LOST, 10), 1: (2, 10)}) == 1


def test_a_failure_comes_before_its_consequences():
    assert first_to_fail({0: (PEER_LOST, 9), 1: (128 + signal.SIGTERM, 9), 2: (1, 10)}) == 2


def test_a_stopped_rank_comes_before_those_that_missed_it():
    assert first_to_fail({0: (-signal.SIGKILL, 11), 1: (1, 10)}, [0]) == 0
    assert first_to_fail({0: (-signal.SIGKILL, 11), 1: (-signal.SIGSEGV, 11)}, [0]) == 1


def test_among_equals_the_earliest():
    assert first_to_fail({0: (1, 12), 1: (1, 11)}) == 1


def test_the_reason_names_signal_or_exit_code():
    assert RanksFailed([0, -signal.SIGKILL], 1).reason.startswith("was killed by SIGKILL")
    assert RanksFailed([4, 0], 0).reason == "failed with exit code 4"
