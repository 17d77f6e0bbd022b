"""The same line on every host, by real processes: in any order, under schedulers, again when the first is gone."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from avgpipe_lab.bench.namespaces import check_namespaces, network
from tests.cli.command import PACKAGES, ROOT
from tests.cli.test_isolated import SCRIPT, SIZES, Command, assert_whole
from tests.examples.scripts import EXAMPLES
from tests.examples.test_several_hosts import free_port
from tests.patience import limit, wait_until
from tests.scripts import WriteScript

pytestmark = pytest.mark.timeout(240)

SECRET = "a secret that all hosts know"
# Saves each tenth batch, and waits in its midst for a file.
RESUMES = """
import os, pathlib, signal, time, torch, avgpipe
from torch import nn

BATCHES, folder, go = 60, pathlib.Path("checkpoint"), pathlib.Path("go")

class Batches:
    def __init__(self, start):
        self.start = start

    def __len__(self):
        return BATCHES - self.start

    def __iter__(self):
        for number in range(self.start, BATCHES):
            while number == 30 and not go.exists():
                time.sleep(0.01)
            x = torch.randn(12, 4, generator=torch.Generator().manual_seed(number))
            yield x, x.sum(1, keepdim=True)

torch.manual_seed(0)
model = nn.Sequential(nn.Linear(4, 8), nn.Tanh(), nn.Linear(8, 1))
plan = avgpipe.Plan(stages=2, pipelines=2, micro_batches=2, isolate=True)
sgd = lambda params: torch.optim.SGD(params, lr=0.01)
with avgpipe.Pipeline(model, plan, loss_fn=nn.MSELoss(), optimizer=sgd, timeout_s=60) as pipeline:
    def preempt(*_):
        pipeline.preempt()
        pathlib.Path("noticed").touch()

    signal.signal(signal.SIGUSR2, preempt)
    if folder.exists():
        pipeline.load(folder)
    for result in pipeline.train(Batches(pipeline.batches)):
        if result.batch % 10 == 9:
            pipeline.save(folder)
        if pipeline.preempted:
            break
    pipeline.save(folder)
    print(f"pipeline {os.environ['AVGPIPE_PIPELINE']} ends after batch {pipeline.batches}", flush=True)
"""
LINE = ("run", "--isolate", "--stages", "1")
# Of srun --ntasks 2, without a secret: the tasks share a folder.
JOB = {
    "SLURM_JOB_ID": "12",
    "SLURM_STEP_ID": "0",
    "SLURM_STEP_NODELIST": "127.0.0.1",
    "SLURM_STEP_NUM_TASKS": "2",
    "SLURM_STEP_TASKS_PER_NODE": "2",
    "SLURM_NODEID": "0",
}


@pytest.fixture
def start(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Any]:
    """Start a command under a name in the folder that all hosts share, with more variables, inside something."""
    monkeypatch.chdir(tmp_path)
    (tmp_path / "script.py").write_text(RESUMES)
    monkeypatch.setenv("AVGPIPE_JOIN_TOKEN", SECRET)
    started: list[Command] = []

    def begin(name: str, *words: str, inside: Any = (), **variables: str) -> Command:
        with monkeypatch.context() as changed:
            for variable, value in variables.items():
                changed.setenv(variable, value)
            started.append(Command(tmp_path, name, *words, inside=inside))
        return started[-1]

    yield begin
    for command in started:
        command.kill_all()


@pytest.fixture(params=["one host", pytest.param("two hosts", marks=pytest.mark.root)])
def places(request: Any) -> Iterator[tuple[str, list[Any]]]:
    """The address of the first host, and words before the commands on each; both may be on this host."""
    if request.param == "one host":
        yield f"127.0.0.1:{free_port()}", [(), ()]
        return
    try:
        check_namespaces("this test")
    except ValueError as error:
        pytest.skip(f"emulated hosts need network namespaces: {error}")
    with network(2, 1e9) as hosts:
        yield f"{hosts.address(0)}:7000", [hosts.inside(0), hosts.inside(1)]


@pytest.mark.promise(0)
@pytest.mark.ranks
def test_the_others_wait_for_the_first_and_join_it_again_when_it_begins_again(
    start: Any, places: tuple[str, list[Any]], tmp_path: Path
) -> None:
    address, (own, other) = places
    line = (*LINE, "--at", address, "script.py")
    if own:  # on one host, whichever comes first has the address
        second = start("second", *line, inside=other)
        second.says(f"{address}: ")
        assert "it is waited for, up to 300 s" in second.stderr
    first = start("first", *line, inside=own)
    first.says(f"the run begins here, and others join it at {address} (--at)")
    second = second if own else start("second", *line)
    first.says("trains with the others from step")
    wait_until((tmp_path / "checkpoint").exists, 60)
    first.process.kill()
    second.says(f"the run at {address} has ended before its last step; it is waited for, up to 300 s (Ctrl-C")
    assert "other hosts start" not in first.stderr
    assert "pipeline 1: started on " in first.stderr
    again = start("again", *line, inside=own)
    again.says("trains with the others from step")
    (tmp_path / "go").touch()
    assert (again.end(), second.end()) == (0, 0), again.stderr + second.stderr
    assert "ends after batch 60" in again.stdout


@pytest.mark.ranks
def test_tasks_of_srun_are_the_stages_of_one_pipeline(start: Any, tmp_path: Path) -> None:
    words = ("run", str(EXAMPLES / "several_hosts.py"), "checkpoint")
    tasks = [start(f"task {n}", *words, **JOB, SLURM_PROCID=str(n), SLURM_LOCALID=str(n)) for n in (0, 1)]
    assert [task.end() for task in tasks] == [0, 0], tasks[0].stderr + tasks[1].stderr
    assert "batch 399: loss" in tasks[0].stdout
    assert "batch" not in tasks[1].stdout


@pytest.mark.ranks
@pytest.mark.parametrize("command", ["run", "train"])
def test_workers_of_torchrun_are_isolated_pipelines(
    command: str, start: Any, tmp_path: Path, write_script: WriteScript
) -> None:
    (tmp_path / "go").touch()
    script = write_script(SCRIPT.replace("GO", str(tmp_path / "go")))
    line = LINE if command == "run" else ("train", f"{script}:make", *SIZES, "--isolate", "--out", "run")
    torchrun = ("-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2", "-m", "avgpipe")
    done = subprocess.run(
        [sys.executable, *torchrun, *line, *(["script.py"] if command == "run" else [])],
        env={**os.environ, "PYTHONPATH": f"{PACKAGES}:{ROOT}", "OMP_NUM_THREADS": "1"},
        capture_output=True,
        text=True,
        timeout=limit(120),
    )
    assert done.returncode == 0, done.stderr
    assert "the run begins here" in done.stderr
    assert "(torchrun (MASTER_ADDR, RANK, WORLD_SIZE))" in done.stderr
    if command == "run":
        assert "pipeline 0 ends after batch 60" in done.stdout
    else:
        assert_whole(tmp_path / "run")


@pytest.fixture
def scontrol(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Put a command of that name into PATH, which writes down its arguments."""
    program, log = tmp_path / "scontrol", tmp_path / "scontrol.log"
    program.write_text(f'#!/bin/sh\necho "$@" > {log}\n')
    program.chmod(0o755)
    monkeypatch.setenv("PATH", f"{tmp_path}:{os.environ['PATH']}")
    return log


@pytest.mark.ranks
def test_a_script_saves_before_its_job_goes_back_into_the_queue(start: Any, scontrol: Path) -> None:
    line = (*LINE, "--pipelines", "1", "--requeue", "script.py")
    first = start("first", *line, SLURM_JOB_ID="12")
    wait_until(Path("checkpoint").exists, 60)
    first.process.send_signal(signal.SIGTERM)
    wait_until(Path("noticed").exists, 60)
    Path("go").touch()
    assert first.end() == 0, first.stderr
    assert scontrol.read_text() == "requeue 12\n"
    again = start("again", *line, SLURM_JOB_ID="12")
    assert again.end() == 0, again.stderr
    assert "pipeline 0 ends after batch 60" in again.stdout


@pytest.mark.ranks
def test_a_job_of_slurm_goes_back_into_its_queue_and_continues(
    start: Any, scontrol: Path, tmp_path: Path, write_script: WriteScript, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("AVGPIPE_JOIN_TOKEN")
    script = write_script(SCRIPT.replace("GO", str(tmp_path / "go")))
    line = ("train", f"{script}:make", *SIZES, "--isolate", "--requeue", "--out", "run")

    def tasks(attempt: str) -> list[Command]:
        of_task = [{"SLURM_PROCID": str(n), "SLURM_LOCALID": str(n)} for n in (1, 0)]
        job = {**JOB, "SLURM_RESTART_COUNT": attempt}
        return [start(f"{attempt} {n}", *line, **job, **variables) for n, variables in enumerate(of_task)]

    second, first = tasks("0")
    first.says("trains with the others from step")
    for task in (second, first):
        task.process.send_signal(signal.SIGTERM)
    (tmp_path / "go").touch()
    assert first.end() == 0, first.stderr
    second.end()
    assert "preempted by SIGTERM: the run is saved" in first.stderr
    assert scontrol.read_text() == "requeue 12\n"
    assert not list(tmp_path.glob(".avgpipe-*"))

    second, first = tasks("1")
    assert (first.end(), second.end()) == (0, 0), first.stderr + second.stderr
    assert "resumes after batch" in first.stderr
    assert_whole(tmp_path / "run")
