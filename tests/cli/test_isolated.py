"""Isolated pipelines of the commands: killed, started again, joined by others. Real processes throughout."""

from __future__ import annotations

import os
import random
import signal
import stat
import subprocess
import sys
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest

from tests.cli.command import alive, children, environment, invoke, rows, strict
from tests.patience import limit, wait_until
from tests.scripts import WriteScript

pytestmark = pytest.mark.timeout(240)

BATCHES, SAMPLES = 40, 8
# Two epochs of as many batches. The first waits in its midst for a file, in every process alike.
SCRIPT = f"""
import os, time

class Batches:
    def __init__(self, epoch):
        self.epoch = epoch

    def __len__(self):
        return {BATCHES}

    def __iter__(self):
        draw = torch.Generator().manual_seed(self.epoch)
        for batch in range({BATCHES}):
            while (self.epoch, batch) == (0, 30) and not os.path.exists("GO"):
                time.sleep(0.01)
            yield torch.randn({SAMPLES}, 4, generator=draw), torch.randint(2, ({SAMPLES},), generator=draw)

def make():
    held_out = [(torch.randn(8, 4), torch.randint(2, (8,)))]
    return task(loader=lambda epoch: Batches(epoch), epochs=2, held_out=held_out)
"""
SIZES = ("--stages", "2", "--pipelines", "2", "--micro-batches", "4", "--validations", "4")


class Command:
    """A command that runs; what it says is in files. ``inside``: words before it."""

    def __init__(self, folder: Path, name: str, *arguments: str, inside: Sequence[str] = ()) -> None:
        self._files = [folder / f"{name}.{stream}" for stream in ("out", "err")]
        with self._files[0].open("w") as out, self._files[1].open("w") as err:
            words = [*inside, sys.executable, "-m", "avgpipe", *arguments]
            self.process = subprocess.Popen(words, env=environment(), stdout=out, stderr=err)

    @property
    def stdout(self) -> str:
        return self._files[0].read_text()

    @property
    def stderr(self) -> str:
        return self._files[1].read_text()

    def says(self, text: str) -> None:
        """Wait until it has said something."""
        wait_until(lambda: text in self.stderr or self.process.poll() is not None, 100)
        assert text in self.stderr, self.stderr

    def rank(self, pipeline: int, rank: int) -> int:
        """Return the process id of one of its workers."""
        wanted = {f"AVGPIPE_PIPELINE={pipeline}".encode(), f"RANK={rank}".encode()}
        for process in children(self.process.pid):
            with suppress(OSError):  # it has ended meanwhile
                if wanted <= set(Path(f"/proc/{process}/environ").read_bytes().split(b"\0")):
                    return process
        raise AssertionError(f"pipeline {pipeline} has no rank {rank}")

    def spares(self) -> list[int]:
        """Return the process ids of workers that were started without a pipeline."""
        variables = {p: Path(f"/proc/{p}/environ").read_bytes() for p in children(self.process.pid)}
        return [process for process, said in variables.items() if b"AVGPIPE_SPARE=" in said]

    def kill(self, pipeline: int, rank: int) -> None:
        os.kill(self.rank(pipeline, rank), signal.SIGKILL)

    def kill_all(self) -> None:
        for process in children(self.process.pid):
            os.kill(process, signal.SIGKILL)
        self.process.kill()
        self.process.wait()

    def end(self) -> int:
        """Return its exit code; all its workers must be gone."""
        workers = children(self.process.pid)
        code = self.process.wait(limit(100))
        wait_until(lambda: not any(map(alive, workers)), 10)
        return code


class Training(Command):
    def __init__(self, script: Path, *more: str, inside: Sequence[str] = ()) -> None:
        self.out, self._go = script.parent / "run", script.parent / "go"
        asked = ("train", f"{script}:make", *SIZES, "--isolate", "--out", str(self.out), "--json", *more)
        super().__init__(script.parent, "train", *asked, inside=inside)

    def trains(self, batches: int) -> None:
        """Wait until rows of so many batches are there."""
        metrics = self.out / "metrics.jsonl"
        wait_until(
            lambda: (metrics.is_file() and len(trained(self.out)) >= batches) or self.process.poll(), 100
        )
        assert self.process.poll() is None, self.stderr

    def go(self) -> None:
        self._go.touch()


@pytest.fixture
def start(write_script: WriteScript, tmp_path: Path) -> Iterator[Callable[..., Any]]:
    script = write_script(SCRIPT.replace("GO", str(tmp_path / "go")))
    started: list[Command] = []

    def begin(*more: str, join: str = "") -> Command:
        command = Command(tmp_path, join, "join", *more) if join else Training(script, *more)
        started.append(command)
        return command

    yield begin
    for command in started:
        command.kill_all()


def trained(out: Path) -> list[dict[str, Any]]:
    return [row for row in rows(out) if row["kind"] == "train"]


def assert_whole(out: Path) -> None:
    """Every sample of the epochs once, and rows in their order."""
    found, before, samples = trained(out), 0, Counter[int]()
    for row in found:
        samples[row["batch"]] += row["samples"] - before
        before = row["samples"]
    assert samples == dict.fromkeys(range(2 * BATCHES), SAMPLES)
    new = [row["batch"] for row in found if "taken_over" not in row]
    assert new == sorted(set(new))
    seconds = [row["seconds"] for row in rows(out)]
    assert seconds == sorted(seconds)
    validated = [row["batch"] for row in rows(out) if row["kind"] == "valid"]
    assert validated == [0, 20, 40, 60, 80]
    assert (out / "timeline.png").is_file()
    assert (out / "curves.png").is_file()


def refused(*arguments: str) -> str:
    """Return the one line of a refusal, before anything is started or written."""
    result = invoke(*arguments)
    assert (result.exit_code, result.stdout) == (2, "")
    (line,) = result.stderr.splitlines()
    return str(line)


def test_options_of_isolated_pipelines_must_fit(
    write_script: WriteScript, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    script, out = f"{write_script(SCRIPT)}:make", tmp_path / "run"
    train = ("train", script, *SIZES, "--out", str(out))
    assert "--restarts without --isolate" in refused(*train, "--restarts", "1")
    assert "--max-pipelines, --pipelines without --isolate" in refused(
        "run", "--pipelines", "2", "--max-pipelines", "3", str(tmp_path / "own_script.py")
    )
    for option, number in (("--min-pipelines", "3"), ("--max-pipelines", "1")):
        assert "the 2 pipelines that the run begins with must lie between" in refused(
            *train, "--isolate", option, number
        )
    assert f"{out}: no run with --isolate is active there" in refused("join", str(out))
    monkeypatch.setenv("RANK", "0")
    monkeypatch.setenv("WORLD_SIZE", "2")
    assert "--isolate under torchrun" in refused(*train, "--isolate")
    assert not out.exists()


@pytest.mark.promise(0)
@pytest.mark.slow
@pytest.mark.parametrize("batch", ["global", "per-pipeline"])
def test_a_killed_rank_costs_no_sample_and_its_pipeline_comes_again(start: Any, batch: str) -> None:
    training = start("--batch", batch, "--checkpoint-minutes", "0.0001")
    training.trains(5)
    pipeline, rank = random.randrange(2), random.randrange(2)
    training.kill(pipeline, rank)
    training.says(f"pipeline {pipeline} trains with the others from step")
    training.go()
    assert training.end() == 0, training.stderr
    assert_whole(training.out)
    summary = strict(training.stdout)
    assert (summary["batches"], summary["samples"], summary["epochs"]) == (80, 640, 2)
    (lost,), (joined,) = summary["lost"], summary["joined"]
    assert (lost["pipeline"], joined["pipeline"]) == (pipeline, pipeline)
    assert lost["step"] < joined["step"]
    assert f"rank {rank} (stage {rank}) was killed by SIGKILL" in lost["why"]
    taken_over = [row for row in trained(training.out) if row.get("taken_over")]
    assert len(taken_over) <= lost["steps_lost"] <= 3
    says = [line for line in training.stderr.splitlines() if line.startswith("pipeline ")]
    is_lost = f"pipeline {pipeline} is lost: {lost['why']}; it is started again, and the others"
    # The members may know of the loss before the processes have ended.
    assert sum(line.startswith(is_lost) for line in says[:2]) == 1, says
    assert len(says) == 2 + bool(lost["steps_lost"]), training.stderr
    assert "error" not in training.stderr
    assert not (training.out / "join.json").is_symlink()


@pytest.mark.ranks
@pytest.mark.slow
def test_spare_processes_take_the_place_of_a_lost_pipeline(
    start: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folders = tmp_path / "temporary"
    folders.mkdir()
    monkeypatch.setenv("TMPDIR", str(folders))
    training = start("--spare-pipelines", "1")
    training.trains(5)
    wait_until(lambda: len(list(folders.glob("*/place-of-?"))) == 2, 100)  # they are ready
    spares = training.spares()
    training.kill(1, 0)
    training.says("pipeline 1 trains with the others from step")
    assert all(map(alive, spares))
    training.go()
    assert training.end() == 0, training.stderr
    assert_whole(training.out)
    summary = strict(training.stdout)
    assert [of["pipeline"] for of in summary["joined"]] == [1]
    assert not list(folders.glob("avgpipe-*"))


@pytest.mark.ranks
@pytest.mark.slow
def test_when_all_are_lost_the_first_is_named_and_the_run_resumes(start: Any) -> None:
    training = start("--restarts", "0", "--checkpoint-minutes", "0.0001")
    training.trains(10)
    training.kill(1, 0)
    training.says("pipeline 1 is lost: rank 0 (stage 0) was killed by SIGKILL")
    training.says("; the others go on without it")
    training.kill(0, 1)
    assert training.end() == 1
    line = training.stderr.splitlines()[-1]
    first = "avgpipe: error: no pipeline is left: pipeline 1: rank 0 (stage 0) was killed by SIGKILL"
    assert line.startswith(first)
    assert "; pipeline 0: rank 1 (stage 1) was killed by SIGKILL" in line
    assert line.endswith(f"--out {training.out} --resume")

    training.go()
    again = start("--resume")
    assert again.end() == 0, again.stderr
    assert_whole(again.out)
    assert strict(again.stdout)["lost"] == []


@pytest.mark.ranks
def test_a_run_ends_with_fewer_pipelines_than_it_must_have(start: Any) -> None:
    training = start("--min-pipelines", "2")
    training.trains(5)
    training.kill(0, 1)
    assert training.end() == 1
    says = training.stderr.splitlines()
    killed = "rank 1 (stage 1) was killed by SIGKILL"
    assert says[-1].startswith(f"avgpipe: error: fewer than 2 pipelines are left: pipeline 0: {killed}")
    assert not any(line.startswith("pipeline 1") for line in says), training.stderr


@pytest.mark.promise
def test_another_command_takes_the_place_of_a_lost_pipeline(start: Any) -> None:
    training = start("--restarts", "0")
    training.trains(5)
    full = start(str(training.out), join="full")
    assert full.process.wait(limit(60)) == 2
    (line,) = full.stderr.splitlines()
    assert line.endswith("the run has 2 pipelines, and may have no more: see its --max-pipelines")
    address = training.out / "join.json"
    assert stat.S_IMODE(address.stat().st_mode) == 0o600
    training.kill(1, 0)
    training.says("pipeline 1 is lost")

    joined = start(str(training.out), join="joined")
    training.says("pipeline 1 trains with the others from step")
    training.go()
    assert training.end() == 0, training.stderr
    assert joined.end() == 0, joined.stderr
    assert_whole(training.out)
    assert [of["pipeline"] for of in strict(training.stdout)["joined"]] == [1]
    assert not address.is_symlink()
    late = start(str(training.out), join="late")
    assert late.process.wait(limit(60)) == 2
    assert late.stderr == f"avgpipe: error: {training.out}: no run with --isolate is active there\n"


@pytest.mark.ranks
def test_what_another_command_has_started_ends_with_it_or_with_the_run(start: Any) -> None:
    training = start("--max-pipelines", "3", "--restarts", "0")
    training.trains(5)
    interrupted = start(str(training.out), join="interrupted")
    training.says("pipeline 2 trains with the others from step")
    interrupted.process.send_signal(signal.SIGINT)
    assert interrupted.end() == 130
    assert interrupted.stderr.endswith("SIGINT: its processes are ended; the run goes on without them\n")
    training.says("pipeline 2 is lost")

    stopped = start(str(training.out), join="stopped")
    training.says("pipeline 2: started by avgpipe join")
    stopped.says("pipeline 2 is started")
    wait_until(lambda: len(children(stopped.process.pid)) == 2)
    os.kill(stopped.rank(2, 1), signal.SIGSTOP)
    workers = children(stopped.process.pid)
    os.kill(stopped.process.pid, signal.SIGSTOP)
    training.process.send_signal(signal.SIGTERM)
    assert training.end() == 143
    os.kill(stopped.process.pid, signal.SIGCONT)
    assert stopped.process.wait(limit(60)) == 1
    wait_until(lambda: not any(map(alive, workers)), 10)
    # As it ends, or where it asks after that.
    ends = (
        f"the run at {training.out} has ended before its last step",
        "pipeline 2 was ended: too few pipelines are left",
        "pipeline 2 was ended: its command has sent no message for 30 s",
    )
    assert stopped.stderr.splitlines()[-1] in {f"avgpipe: error: {why}" for why in ends}


@pytest.mark.ranks
@pytest.mark.slow
def test_every_process_of_every_pipeline_says_what_it_is_doing(start: Any) -> None:
    training = start()
    training.trains(5)
    training.process.send_signal(signal.SIGUSR1)
    for rank in (0, 1):
        wait_until(lambda rank=rank: training.stderr.count(f"avgpipe: rank {rank}") >= 2, 20)
    training.go()
    assert training.end() == 0, training.stderr
    assert_whole(training.out)


@pytest.mark.ranks
@pytest.mark.slow
@pytest.mark.parametrize("batch", ["global", "per-pipeline"])
def test_a_preempted_run_saves_and_goes_on_later(start: Any, batch: str, tmp_path: Path) -> None:
    training = start("--batch", batch)
    training.trains(5)
    training.process.send_signal(signal.SIGTERM)
    training.go()
    assert training.end() == 0, training.stderr
    assert strict(training.stdout) == {"preempted": True}
    assert "preempted by SIGTERM: the run is saved; resume from the last checkpoint with:" in training.stderr
    before = len(trained(training.out))
    assert before < 2 * BATCHES
    script = f"{tmp_path / 'own_script.py'}:make"
    resumed = Command(tmp_path, "resumed", "train", script, "--out", str(training.out), "--resume", "--json")
    assert resumed.end() == 0, resumed.stderr
    assert_whole(training.out)


TRAINS = """
import torch, avgpipe
from torch import nn
K = int(os.environ["WORLD_SIZE"])
plan = avgpipe.Plan(stages=K, pipelines=2, micro_batches=2, isolate=True)
sgd = lambda params: torch.optim.SGD(params, lr=0.1)
torch.manual_seed(0)
model = nn.Sequential(*[nn.Linear(2, 2) for _ in range(K)])
with avgpipe.Pipeline(model, plan, loss_fn=nn.MSELoss(), optimizer=sgd, timeout_s=20) as pipeline:
    steps = len(list(pipeline.train([(torch.ones(4, 2), torch.ones(4, 2))] * 3)))
    os.write(1, f"{steps} steps\\n".encode())  # whole lines, as several processes write
"""
STOPS = f"""
import os, signal
if os.environ["AVGPIPE_RESTART"] == "0":
    os.kill(os.getpid(), signal.SIGSTOP)
{TRAINS}
"""
# Rank 1 of a pipeline is stopped before it says hello, when rank 0 waits to be let into the run.
STOPS_LATER = f"""
import os, signal, time
from avgpipe.fault.membership import Membership
hello, enter = Membership.__init__, Membership.enter
there = __file__ + ".there"
def hello_late(*given):
    while not os.path.exists(there):
        time.sleep(0.01)
    os.kill(os.getpid(), signal.SIGSTOP)
    hello(*given)
def enter_and_say(*given):
    open(there, "w").close()
    return enter(*given)
if (os.environ["AVGPIPE_PIPELINE"], os.environ["AVGPIPE_RESTART"]) == ("1", "0"):
    if os.environ["RANK"] == "1":
        Membership.__init__ = hello_late
    else:
        Membership.enter = enter_and_say
{TRAINS}
"""


@pytest.mark.ranks
@pytest.mark.slow
def test_a_run_whose_processes_all_stand_still_at_their_start_begins_again(tmp_path: Path) -> None:
    (tmp_path / "own_script.py").write_text(STOPS)
    sizes = ("--isolate", "--stages", "1", "--pipelines", "2")
    run = Command(tmp_path, "run", "run", *sizes, str(tmp_path / "own_script.py"))
    assert run.end() == 0, run.stderr
    assert run.stdout.splitlines() == ["3 steps"] * 2
    for pipeline in (0, 1):
        why = "rank 0 was stopped by a signal; it is started again"
        assert f"pipeline {pipeline} is lost: {why}" in run.stderr


@pytest.mark.ranks
@pytest.mark.slow
def test_a_pipeline_that_is_stopped_in_its_start_begins_again(tmp_path: Path) -> None:
    (tmp_path / "own_script.py").write_text(STOPS_LATER)
    sizes = ("--isolate", "--stages", "2", "--pipelines", "2")
    run = Command(tmp_path, "run", "run", *sizes, str(tmp_path / "own_script.py"))
    assert run.end() == 0, run.stderr
    assert run.stdout.splitlines() == ["3 steps"] * 4
    why = "rank 1 was stopped by a signal; it is started again"
    assert f"pipeline 1 is lost: {why}" in run.stderr


@pytest.mark.ranks
@pytest.mark.slow
def test_spares_of_the_example_are_ready_to_take_a_place(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("TMPDIR", str(tmp_path))
    example = str(Path(__file__).parents[2] / "examples" / "isolated.py")
    sizes = ("--isolate", "--stages", "2", "--pipelines", "2", "--spare-pipelines", "1")
    run = Command(tmp_path, "run", "run", *sizes, example, str(10**6))
    try:
        wait_until(lambda: len(list(tmp_path.glob("*/place-of-?"))) == 2, 100)
    finally:
        run.kill_all()
