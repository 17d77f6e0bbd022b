"""The launcher of isolated pipelines, where it cannot start what it would."""

from __future__ import annotations

import sys
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import pytest

from avgpipe.faults import RESTART
from avgpipe.ranks.generation import SPARE
from avgpipe.ranks.launch import Job, same_modules
from avgpipe.ranks.supervise import Isolation, Supervisor

# Pipeline 1 is killed at its second batch.
_SCRIPT = """
import os, signal
import torch, avgpipe
from torch import nn
plan = avgpipe.Plan(pipelines=2, micro_batches=2, isolate=True)
sgd = lambda params: torch.optim.SGD(params, lr=0.1)
torch.manual_seed(0)
with avgpipe.Pipeline(nn.Linear(2, 2), plan, loss_fn=nn.MSELoss(), optimizer=sgd, timeout_s=20) as pipeline:
    for result in pipeline.train([(torch.ones(4, 2), torch.ones(4, 2))] * 9):
        if os.environ["AVGPIPE_PIPELINE"] == "1":
            os.kill(os.getpid(), signal.SIGKILL)
"""


@pytest.mark.ranks
def test_a_pipeline_that_cannot_be_started_again_costs_the_others_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    said: list[str] = []
    begin = Job.start

    def start(self: Job, stack: ExitStack, place: Any) -> Any:
        if SPARE in place or place[RESTART] != "0":
            raise OSError(28, "No space left on device")
        return begin(self, stack, place)

    monkeypatch.setattr(Job, "start", start)
    job = Job("stderr", [sys.executable, "-c", _SCRIPT], 1, same_modules())
    assert not Supervisor(job, Isolation(2, spares=1), tmp_path, said.append).run()
    why = "[Errno 28] No space left on device"
    assert f"no spare pipeline can be started: {why}" in said
    lost = next(line for line in said if line.startswith("pipeline 1 is lost: rank 0"))
    assert lost.endswith(f"; it cannot be started again: {why}; the others go on without it")
