"""The same line on every host: who begins the run, how the others wait for it, and what all of them know."""

from __future__ import annotations

import os
import signal
import socket
import stat
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import pytest

from avgpipe.cli import hosts
from avgpipe.cli.config import IsolationOptions, RunConfig, TrainConfig
from avgpipe.cli.output import CommandFailed
from avgpipe.errors import PipelineError
from avgpipe.fault.group import OVER
from avgpipe.fault.joining import TOO_FEW, NoPlace, RunEnded, RunLost
from avgpipe.ranks.hosts import RANK_VARIABLES, HostPlace
from tests.cli.command import invoke
from tests.cli.test_isolated import refused
from tests.ranks.test_hosts import PYTORCHJOB, SLURM
from tests.scripts import WriteScript

SECRET = "a secret that all hosts know"
ELSEWHERE = "240.0.0.1"  # of the addresses that no host may have


@pytest.fixture(autouse=True)
def said(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> list[str]:
    """Lines for the user; the commands run in a folder of their own, without schedulers, and never sleep."""
    monkeypatch.chdir(tmp_path)
    for name in (*RANK_VARIABLES, hosts.JOIN_TOKEN, hosts.TOKEN_FILE, *SLURM):
        monkeypatch.delenv(name, raising=False)
    lines: list[str] = []
    monkeypatch.setattr(hosts, "note", lines.append)
    monkeypatch.setattr(hosts, "_ASK_S", 0.0)
    return lines


@pytest.fixture
def free() -> int:
    with socket.create_server(("127.0.0.1", 0)) as one:
        return int(one.getsockname()[1])


# ---- whose address it is ---------------------------------------------------------------------------------------------


def listens(place: HostPlace) -> str | None:
    """Return where a command listens that begins a run; None where it begins none."""
    listening = hosts.listening_at(place)
    if listening is None:
        return None
    with listening:
        assert listening.getsockname()[1] == place.port
        return str(listening.getsockname()[0])


def test_the_host_that_has_the_address_begins(free: int) -> None:
    assert listens(HostPlace("127.0.0.1", free, "--at")) == "127.0.0.1"
    assert listens(HostPlace("localhost", free, "--at")) == "127.0.0.1"
    assert listens(HostPlace(ELSEWHERE, free, "--at")) is None
    assert listens(HostPlace("a.host.that.is.not.there.invalid", free, "--at")) is None


def test_a_second_command_on_that_host_joins_the_first(free: int) -> None:
    place = HostPlace("127.0.0.1", free, "--at")
    with hosts.listening_at(place) or socket.socket():
        assert listens(place) is None


def test_a_number_of_the_scheduler_decides_where_there_is_one(free: int) -> None:
    assert listens(HostPlace("127.0.0.1", free, "Slurm", 1, 2)) is None
    assert listens(HostPlace("127.0.0.1", free, "Slurm", 0, 2)) == "127.0.0.1"
    assert listens(HostPlace(ELSEWHERE, free, "a service", 0, 2)) == "0.0.0.0"
    with socket.create_server(("127.0.0.1", free)):
        place = HostPlace("127.0.0.1", free, "Slurm (step 1.0)", 0, 2, job="1.0.0")
        text = (
            f"cannot listen at 127.0.0.1:{free} .Slurm .step 1.0..: Address already in use; MASTER_PORT gives"
        )
        with pytest.raises(ValueError, match=text):
            hosts.listening_at(place)


def test_a_name_that_means_loopback_on_its_own_host_alone_listens_on_all_addresses(
    free: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    found = [(socket.AF_INET, socket.SOCK_STREAM, 6, "", ("127.0.1.1", free))]
    monkeypatch.setattr(socket, "getaddrinfo", lambda *_, **__: found)
    assert listens(HostPlace("node7", free, "--at")) == "0.0.0.0"
    assert listens(HostPlace("localhost", free, "the master pod of a PyTorchJob", 0, 2)) == "0.0.0.0"


# ---- waiting and joining ---------------------------------------------------------------------------------------------


class Attempts:
    """Attempts whose ends are listed; ``again``: the argument of each. "late" precedes one of more than a minute."""

    def __init__(self, *ends: Any) -> None:
        self.ends, self.again, self.now = list(ends), list[bool](), 0.0

    def __call__(self, is_again: bool) -> Any:
        self.again.append(is_again)
        end = self.ends.pop(0)
        self.now += 1
        if end == "late":
            self.now += 61
            end = self.ends.pop(0)
        if isinstance(end, Exception):
            raise end
        return end


@pytest.fixture
def attempted(monkeypatch: pytest.MonkeyPatch) -> Callable[..., Any]:
    def attempt(attempts: Attempts, restarts: int = 0, wait_s: float | None = 10, again_s: float = 10) -> Any:
        monkeypatch.setattr(hosts.time, "monotonic", lambda: attempts.now)
        return hosts.attempts(attempts, restarts, wait_s, again_s)

    return attempt


def silent() -> NoPlace:
    return NoPlace("head:7000: no run is active there")


def lost() -> PipelineError:
    return PipelineError("pipeline 1: rank 0 failed with exit code 1")


def test_a_run_that_does_not_listen_yet_is_waited_for_and_that_is_said_once(
    attempted: Any, said: list[str]
) -> None:
    assert attempted(Attempts(silent(), silent(), silent(), 3)) == 3
    assert said == ["head:7000: no run is active there; it is waited for, up to 10 s"]


def test_the_wait_has_a_limit(attempted: Any) -> None:
    with pytest.raises(
        CommandFailed, match="head:7000: no run is active there; given up after 10 s"
    ) as failed:
        attempted(Attempts(*(silent() for _ in range(20))), wait_s=10)
    assert failed.value.exit_code == 1
    for wait_s, error in ((None, NoPlace), (0, CommandFailed)):  # the one of another host may come again
        attempts = Attempts(silent(), silent())
        with pytest.raises(error):
            attempted(attempts, wait_s=wait_s)
        assert len(attempts.ends) == 1


def test_a_run_that_begins_again_is_joined_again(attempted: Any, said: list[str]) -> None:
    attempts = Attempts(silent(), lost(), silent(), silent(), 2)
    assert attempted(attempts, restarts=1) == 2
    assert attempts.again == [False, False, True, True, True]
    assert [line.rpartition("; ")[2] for line in said] == [
        "it is waited for, up to 10 s",
        "it is started again",
        "it is waited for, up to 60 s",
    ]


def test_a_run_that_has_ended_early_is_waited_for_in_one_line(attempted: Any, said: list[str]) -> None:
    ended = RunLost("the run at head:7000 has ended before its last step")
    assert attempted(Attempts(ended, silent(), silent(), 2), restarts=1, again_s=300) == 2
    assert said == [f"{ended}; it is waited for, up to 300 s (Ctrl-C ends this command)"]


def test_restarts_are_counted_in_a_row(attempted: Any) -> None:
    with pytest.raises(PipelineError, match="exit code 1"):
        attempted(Attempts(lost(), lost(), 1), restarts=1)
    assert attempted(Attempts(lost(), "late", lost(), 1), restarts=1) == 1


def test_who_starts_again_as_the_run_ends_has_ended_well(attempted: Any) -> None:
    assert attempted(Attempts(RunEnded("head:7000", OVER)), restarts=3) is None
    assert attempted(Attempts(lost(), silent(), RunEnded("head:7000", OVER)), restarts=3) is None
    with pytest.raises(RunEnded):
        attempted(Attempts(RunEnded("pipeline 1 was ended", TOO_FEW), 1), restarts=3)


@pytest.fixture
def begin(monkeypatch: pytest.MonkeyPatch) -> Iterator[Callable[..., Any]]:
    """Begin or join; ``far``: what joining does."""
    monkeypatch.setenv(hosts.JOIN_TOKEN, SECRET)
    with ExitStack() as stack:

        def begin(place: HostPlace, far: Callable[..., int], **options: Any) -> Any:
            monkeypatch.setattr(hosts, "join_far", far)
            beginning = hosts.begin_or_join(place, IsolationOptions.of(**options), {}, stack)
            if beginning is not None:
                stack.enter_context(beginning.listening)
            return beginning

        yield begin


def test_a_command_that_has_joined_never_begins_the_run_itself(
    begin: Any, free: int, said: list[str]
) -> None:
    """Its address may be free once the run has ended: it would train everything once more."""
    place = HostPlace("127.0.0.1", free, "--at")
    first = hosts.listening_at(place)
    assert first is not None

    def join_once(address: str, token: str, *_: Any) -> int:
        assert (address, token) == (f"127.0.0.1:{free}", SECRET)
        if said:
            raise RunEnded(address, OVER)
        first.close()
        raise lost()

    assert begin(place, join_once) is None
    assert said[0].endswith("it is started again")


def test_a_command_begins_where_its_name_becomes_known_late(
    begin: Any, free: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As a pod's, which is known once the pod is ready."""
    known, tries = socket.getaddrinfo, list[str]()

    def getaddrinfo(host: str, *more: Any, **options: Any) -> Any:
        tries.append(host)
        if len(tries) == 1:
            raise socket.gaierror("Name or service not known")
        return known("127.0.0.1", *more, **options)

    monkeypatch.setattr(socket, "getaddrinfo", getaddrinfo)

    def far(address: str, token: str, *_: Any) -> int:
        raise NoPlace(f"{address}: its launcher cannot be reached: Name or service not known")

    beginning = begin(HostPlace("10.255.255.1.example", free, "PET_RDZV_ENDPOINT", None, 4), far)
    assert (beginning.token, beginning.most) == (SECRET, 4)


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_a_signal_while_waiting_is_an_interrupt(begin: Any, free: int, number: signal.Signals) -> None:
    def far(address: str, token: str, *_: Any) -> int:
        os.kill(os.getpid(), number)
        raise AssertionError("the signal was lost")

    with pytest.raises(CommandFailed, match=f"{number.name}: this command was waiting for a run") as failed:
        begin(HostPlace(ELSEWHERE, free, "--at"), far)
    assert failed.value.exit_code == 128 + number


# ---- the secret ------------------------------------------------------------------------------------------------------


def written(path: Path, mode: int, text: str = f"{SECRET}\n") -> Path:
    path.write_text(text)
    path.chmod(mode)
    return path


def test_the_secret_is_a_variable_or_a_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(
        ValueError, match="AVGPIPE_JOIN_TOKEN must be set to a secret of 16 characters or more"
    ):
        hosts.secret()
    for mode in (0o600, 0o400):
        monkeypatch.setenv(hosts.TOKEN_FILE, str(written(tmp_path / f"secret-{mode:o}", mode)))
        assert hosts.secret() == SECRET
    monkeypatch.setenv(hosts.JOIN_TOKEN, "another secret of this command")
    assert hosts.secret() == "another secret of this command"
    monkeypatch.setenv(hosts.JOIN_TOKEN, "short")
    with pytest.raises(ValueError, match="16 characters or more"):
        hosts.secret()


@pytest.mark.parametrize("mode", [0o640, 0o604, 0o620, 0o666])
def test_a_file_that_others_can_read_or_write_is_refused(
    mode: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = written(tmp_path / "secret", mode)
    monkeypatch.setenv(hosts.TOKEN_FILE, str(path))
    with pytest.raises(ValueError, match=f"{path} has mode {mode:o} and .* so: chmod 600 {path}"):
        hosts.secret()


def test_a_pipe_is_no_secret(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    os.mkfifo(tmp_path / "secret", 0o600)
    monkeypatch.setenv(hosts.TOKEN_FILE, str(tmp_path / "secret"))
    with pytest.raises(ValueError, match="must be a file of your own"):
        hosts.secret()


def test_a_file_of_another_user_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = written(tmp_path / "secret", 0o600)
    monkeypatch.setenv(hosts.TOKEN_FILE, str(path))
    monkeypatch.setattr(os, "getuid", lambda: path.stat().st_uid + 1)
    if path.stat().st_uid:  # root's files are trusted, as those that Kubernetes mounts are
        with pytest.raises(ValueError, match="must be a file of your own"):
            hosts.secret()
    else:
        assert hosts.secret() == SECRET


def test_the_first_task_of_a_job_makes_the_secret_for_the_others(tmp_path: Path) -> None:
    first = HostPlace("gpu07", 7000, "Slurm (step 17.0)", 0, 2, job="17.0.0")
    other = HostPlace("gpu07", 7000, "Slurm (step 17.0)", 1, 2, job="17.0.0")
    file = written(tmp_path / ".avgpipe-17.0.0", 0o644, "what was left here before")
    with ExitStack() as stack:
        token = hosts.secret(first, 0, stack)
        assert len(token) == 32
        assert stat.S_IMODE(file.stat().st_mode) == 0o600
        assert hosts.secret(other, 0, stack) == token
    assert not list(tmp_path.iterdir())
    with (
        ExitStack() as stack,
        pytest.raises(CommandFailed, match=r"has left no secret in .* that all hosts share"),
    ):
        hosts.secret(other, 0, stack)


def test_the_others_read_no_secret_that_somebody_else_could_have_written(tmp_path: Path) -> None:
    written(tmp_path / ".avgpipe-17.0.0", 0o644)
    with ExitStack() as stack, pytest.raises(ValueError, match="has mode 644"):
        hosts.secret(HostPlace("gpu07", 7000, "Slurm (step 17.0)", 1, 2, job="17.0.0"), 0, stack)


# ---- options ---------------------------------------------------------------------------------------------------------


def script(tmp_path: Path) -> str:
    path = tmp_path / "script.py"
    path.write_text("print('it runs')")
    return str(path)


def test_options_must_fit(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = script(tmp_path)
    monkeypatch.setenv(hosts.JOIN_TOKEN, SECRET)
    at = ("run", "--isolate", "--at")
    assert "'node7' is no address: write HOST:PORT" in refused(*at, "node7", path)
    assert "--at node7:0: all hosts must know the port" in refused(*at, "node7:0", path)
    assert "--at without --isolate" in refused("run", "--at", "node7:7000", path)
    several = refused(*at, "node7:7000", "--pipelines", "2", path)
    assert "--pipelines with several commands (--at): each starts one pipeline" in several
    assert "--wait -1" in refused(*at, "node7:7000", "--wait", "-1", path)
    alone = "--wait without --at, or commands on several hosts: there is no other one to wait for"
    assert alone in refused("run", "--isolate", "--wait", "5", path)
    assert "--requeue: this is no job of Slurm" in refused("run", "--requeue", path)


def test_options_are_checked_before_the_run_listens(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, write_script: WriteScript
) -> None:
    monkeypatch.setenv(hosts.JOIN_TOKEN, SECRET)
    one, error = f"{write_script('def make(): return task()')}:make", "avgpipe: error: a run by --at"
    for command, what in (("run", script(tmp_path)), ("train", one)):
        line = (command, "--isolate", "--at", "127.0.0.1:7000")
        few = f"{error} begins with one pipeline: --min-pipelines must be 1"
        assert refused(*line, "--min-pipelines", "2", what) == few
        listens = f"{error} listens at 127.0.0.1:7000: leave out --listen"
        assert refused(*line, "--listen", "127.0.0.1:0", what) == listens
    alone = "--wait without --at, or commands on several hosts: there is no other one to wait for"
    assert alone in refused("train", "--isolate", "--wait", "5", one)


def test_what_decides_the_training_must_be_the_same_on_all_hosts() -> None:
    own = RunConfig.of(script="iso.py", restarts=5, wait_s=1.0, json=True, at="a:1", requeue=True)
    common = {"trains": "iso.py --lr '1 2'", "--stages": "2", "--seed": "0", "--shares": "pace"}
    assert hosts.training_of(own, "iso.py", "--lr", "1 2") == common
    unseeded = RunConfig.of(script="iso.py", seed=-1)
    assert hosts.training_of(unseeded, "iso.py")["--seed"] == "none"
    train = TrainConfig.of(workload="awd-lstm", spread=True, out="x", resume=True, keep=3, restarts=5)
    found = hosts.training_of(train, "awd-lstm")
    assert (found["trains"], found["--spread"]) == ("awd-lstm", "")
    assert {"--seed", "--timeout", "--link", "--shares"} < found.keys()
    assert not {"--out", "--resume", "--keep", "--restarts", "--wait"} & found.keys()


@pytest.mark.parametrize(
    ("options", "text"),
    [
        (
            ("--stages", "4"),
            "--stages 4: this command is one worker of 6 (Slurm (step 1731344.0)); leave it out",
        ),
        (("--spares", "1"), "--spares: this command is one worker of 6"),
        (("--json",), "--json: this command is one worker of 6"),
    ],
)
def test_a_worker_of_several_hosts_has_no_launcher(
    options: tuple[str, ...], text: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name, value in SLURM.items():
        monkeypatch.setenv(name, value)
    assert text in invoke("run", *options, script(tmp_path)).stderr


@pytest.mark.parametrize("given", [SLURM, PYTORCHJOB], ids=["srun", "PyTorchJob"])
def test_a_task_becomes_one_rank_of_all(
    given: dict[str, str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    class Became(Exception):
        pass

    def execve(path: str, words: list[str], environ: dict[str, str]) -> None:
        raise Became(words, dict(environ))

    for name in RANK_VARIABLES:
        monkeypatch.setenv(name, "x")  # so that what the command sets is removed after the test
        monkeypatch.delenv(name)
    for name, value in given.items():
        monkeypatch.setenv(name, value)
    monkeypatch.setattr(os, "execve", execve)
    with pytest.raises(Became) as became:
        invoke("run", "--seed", "7", script(tmp_path), "--lr", "3")
    words, environ = became.value.args
    assert words[1:] == ["-u", "-m", "avgpipe.ranks.seeded", "7", script(tmp_path), "--lr", "3"]
    wanted = {
        "RANK": "3",
        "WORLD_SIZE": "6",
        "LOCAL_RANK": "1",
        "LOCAL_WORLD_SIZE": "2",
        "MASTER_ADDR": "gpu07",
    }
    if given is PYTORCHJOB:
        wanted = {**PYTORCHJOB, "LOCAL_RANK": "0", "LOCAL_WORLD_SIZE": "1"}
    assert {name: environ[name] for name in wanted} == wanted


# ---- Slurm's queue ---------------------------------------------------------------------------------------------------


@pytest.fixture
def scontrol(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Put a command of that name into PATH, which writes down its arguments; job 13 has no way back."""
    folder = tmp_path / "bin"
    folder.mkdir()
    program, log = folder / "scontrol", tmp_path / "scontrol.log"
    program.write_text(
        f'#!/bin/sh\necho "$@" >> {log}\n[ "$2" != 13 ] || {{ echo "Job is disabled" >&2; exit 1; }}\n'
    )
    program.chmod(0o755)
    monkeypatch.setenv("PATH", f"{folder}:{os.environ['PATH']}")
    monkeypatch.setenv("SLURM_JOB_ID", "12")
    return log


def test_a_job_goes_back_into_the_queue_once_sigterm_has_ended_it(scontrol: Path, said: list[str]) -> None:
    hosts.check_requeue(True)
    with pytest.raises(CommandFailed), hosts.requeuing(True):
        raise CommandFailed("SIGTERM: all workers are ended", 143)
    assert scontrol.read_text() == "requeue 12\n"
    assert said == ["job 12 is in the queue again, and continues from its last checkpoint"]
    for failure, is_asked in (
        (CommandFailed("rank 1 failed", 1), True),
        (CommandFailed("SIGTERM", 143), False),
    ):
        with pytest.raises(CommandFailed), hosts.requeuing(is_asked):
            raise failure
    assert scontrol.read_text() == "requeue 12\n"


def test_one_job_of_an_array_goes_back_alone(scontrol: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SLURM_ARRAY_JOB_ID", "10")
    monkeypatch.setenv("SLURM_ARRAY_TASK_ID", "2")
    hosts.requeue()
    assert scontrol.read_text() == "requeue 10_2\n"


def test_a_job_that_cannot_go_back_says_why(scontrol: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SLURM_JOB_ID", "13")
    with pytest.raises(CommandFailed, match="job 13 cannot be put back into the queue: Job is disabled"):
        hosts.requeue()
    monkeypatch.setenv("PATH", "")
    with pytest.raises(ValueError, match="--requeue: there is no scontrol in PATH on this host"):
        hosts.check_requeue(True)
