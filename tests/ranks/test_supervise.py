"""The launcher of isolated pipelines, where it cannot start what it would, or starts what must end again."""

from __future__ import annotations

import sys
from contextlib import ExitStack
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from avgpipe.fault import supervise
from avgpipe.fault.supervise import IsolatedCounts, Supervisor, TooFewLeft
from avgpipe.ranks.environment import RESTART, SPARE
from avgpipe.ranks.launch import Job, same_modules
from avgpipe.ranks.limits import LIMITS

pytestmark = pytest.mark.ranks

# It trains until a file is there. Pipeline 1 is killed at its first result; when it comes again it may have another
# loader.
_SCRIPT = """
import os, signal, sys
import torch, avgpipe
from torch import nn
life, over, differs = os.environ["AVGPIPE_RESTART"], sys.argv[1], sys.argv[2:]
plan = avgpipe.Plan(pipelines=2, micro_batches=2, isolate=True)
sgd = lambda params: torch.optim.SGD(params, lr=0.1)
torch.manual_seed(0)
batch = torch.ones(4, 2) * (2 if differs and life != "0" else 1), torch.ones(4, 2)
with avgpipe.Pipeline(nn.Linear(2, 2), plan, loss_fn=nn.MSELoss(), optimizer=sgd, timeout_s=20) as pipeline:
    pipeline.enter()
    while not pipeline.once("it is over", lambda: os.path.exists(over)):
        for result in pipeline.train([batch] * 3):
            if (os.environ["AVGPIPE_PIPELINE"], life) == ("1", "0"):
                os.kill(os.getpid(), signal.SIGKILL)
"""


def supervised(folder: Path, until: str, isolation: IsolatedCounts, *more: str) -> list[str]:
    """Run the script until the launcher has said something with ``until``; what it has said."""
    said: list[str] = []
    (folder / "run").mkdir()

    def say(line: str) -> None:
        said.append(line)
        if until in line:
            (folder / "over").touch()

    command = [sys.executable, "-c", _SCRIPT, str(folder / "over"), *more]
    assert not Supervisor(Job("stderr", command, 1, same_modules()), isolation, folder / "run", say).run()
    return said


@pytest.mark.ranks
def test_what_cannot_be_started_is_tried_once_more_and_costs_the_others_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    why, begin = "[Errno 28] No space left on device", Job.start
    fails = [OSError(28, "No space left on device")]

    def start(self: Job, stack: ExitStack, place: Any) -> Any:
        if SPARE in place:
            raise OSError(28, "No space left on device")
        if place[RESTART] != "0" and fails:
            raise fails.pop()
        return begin(self, stack, place)

    monkeypatch.setattr(Job, "start", start)
    monkeypatch.setattr(supervise, "LIMITS", replace(LIMITS, again_s=1.0))
    said = supervised(tmp_path, "pipeline 1 trains with the others", IsolatedCounts(2, spares=1))
    assert f"no spare pipeline can be started: {why}" in said
    lost = next(line for line in said if line.startswith("pipeline 1 is lost: rank 0"))
    assert f"; it cannot be started again now, the next try is in 1 s: {why}" in lost
    assert lost.endswith(", and the others go on")
    assert "pipeline 1: it is started again" in said


def test_a_pipeline_with_another_loader_is_not_started_for_ever(tmp_path: Path) -> None:
    said = supervised(
        tmp_path, "exit code 1; the others go on without it", IsolatedCounts(2, restarts=2), "differs"
    )
    assert sum("failed with exit code 1" in line for line in said) == 2


# Rank 0 fails at its start, where rank 1 waits.
_FAILS = """
import os, signal
from avgpipe.ranks.process import report_lost_peers
report_lost_peers()
if os.environ["RANK"] == "0":
    raise ValueError("the first line" + chr(10) + "more")
signal.pause()
"""


def test_the_last_line_has_the_error_of_a_script_that_fails_at_its_start(tmp_path: Path) -> None:
    said: list[str] = []
    job = Job("stderr", [sys.executable, "-c", _FAILS], 2, same_modules())
    with pytest.raises(TooFewLeft, match=r"rank 0 failed with exit code 1: ValueError: the first line$"):
        Supervisor(job, IsolatedCounts(1), tmp_path, said.append).run()
    assert said == ["pipeline 0 is lost: rank 0 failed with exit code 1"]


def test_a_script_without_a_pipeline_is_noted(tmp_path: Path) -> None:
    said: list[str] = []
    job = Job("stderr", [sys.executable, "-c", ""], 1, same_modules())
    Supervisor(job, IsolatedCounts(2), tmp_path, said.append).run()
    assert said == ["no process made a Pipeline; each has run the script by itself"]


def test_a_pipeline_that_other_commands_start_is_given_how_often_it_was_started_before(
    tmp_path: Path,
) -> None:
    supervisor = Supervisor(Job("stderr", [], 1, {}), IsolatedCounts(1), tmp_path, print)
    with supervisor._resources:
        assert [supervisor._new_group(1)[1][RESTART] for _ in range(3)] == ["0", "1", "2"]
        assert supervisor._new_group(0)[1][RESTART] == "0"
        supervisor._coordinator.close()
