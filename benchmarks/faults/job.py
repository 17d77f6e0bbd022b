"""What each process of a run trains that loses one of its processes, and what it writes down of it.

A small transformer in float32. The file of a process has a line of JSON for each event, with the time at which it was:
that clock is the same in all processes of a machine.
"""

from __future__ import annotations

import hashlib
import json
import os
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import torch
from torch import nn

from avgpipe import Copies, Pipeline, Plan
from avgpipe.ranks.environment import generation
from avgpipe_lab.bench.chaos.job import Journal
from benchmarks.overlap.models import Attention, Perceptron, loss

VARIABLE = "AVGPIPE_LOST"  # names that with what a process needs to know, as JSON
BATCH_SIZE, MICRO_BATCHES, EPOCH = 12, 6, 20  # samples, of a batch, batches
_WORDS, _LENGTH, _WIDTH, _HEADS, _BLOCKS = 512, 32, 128, 4, 3
Batch = tuple[torch.Tensor, torch.Tensor]


def layers() -> list[nn.Module]:
    """Make the model, with the same weights each time."""
    torch.manual_seed(0)
    made: list[nn.Module] = [nn.Embedding(_WORDS, _WIDTH)]
    for _ in range(_BLOCKS):
        made += [Attention(_WIDTH, _HEADS), Perceptron(_WIDTH)]
    return [*made, nn.Sequential(nn.LayerNorm(_WIDTH), nn.Linear(_WIDTH, _WORDS))]


def cut(stages: int) -> list[int]:
    """Return the layers at which the stages after the first begin."""
    count = 2 + 2 * _BLOCKS
    return [round(count * k / stages) for k in range(1, stages)]


def batches(epoch: int, start: int = 0) -> list[Batch]:
    """Make the batches of an epoch from ``start`` on: the same in every process, whenever it comes."""
    draw = torch.Generator().manual_seed(epoch)
    tokens = torch.randint(_WORDS, (EPOCH, BATCH_SIZE, _LENGTH + 1), generator=draw)
    return [(each[:, :-1].contiguous(), each[:, 1:].contiguous()) for each in tokens[start:]]


def optimizer(parameters: Iterable[torch.Tensor]) -> torch.optim.Optimizer:
    return torch.optim.AdamW(parameters, lr=1e-3)


def plan(stages: int, pipelines: int, isolate: bool = False) -> Plan:
    return Plan(stages, pipelines, MICRO_BATCHES, partition=cut(stages), isolate=isolate)


def digest(tensors: Iterable[torch.Tensor]) -> str:
    """Name the values of some weights, in every bit."""
    found = hashlib.sha256()
    for tensor in tensors:
        found.update(tensor.detach().contiguous().view(torch.uint8).numpy().data)
    return found.hexdigest()[:16]


def made(asked: dict[str, Any], journal: Journal | None = None) -> Pipeline:
    """Make this process's part of the run; each update is written down, and its number on this stage."""

    def note(inner: torch.optim.Optimizer) -> torch.optim.lr_scheduler.LambdaLR:
        def unchanged(updates: int) -> float:
            if journal is not None and updates:
                journal.write("update", number=updates, generation=generation())
            return 1.0

        return torch.optim.lr_scheduler.LambdaLR(inner, unchanged)

    return Pipeline(
        layers(),
        plan(asked["stages"], asked["pipelines"], asked["isolate"]),
        loss_fn=loss,
        optimizer=optimizer,
        lr_scheduler=note,
        timeout_s=asked["timeout_s"],
        extensions=[Copies(asked["copies_every_s"])] if asked.get("copies_every_s") else [],
    )


def main() -> None:
    """Train until the launcher has left a file that says so, or for so many epochs.

    Isolated pipelines write down their weights after each epoch, others at the end: between such a call and the copy
    after the next batch nobody could be replaced.
    """
    torch.set_num_threads(1)
    asked = json.loads(os.environ[VARIABLE])
    journal, enough, last = Journal(asked["journals"]), Path(asked["enough"]), asked["epochs"]
    which: list[str | int] = ["reference"]
    with made(asked, journal) as pipeline:
        if asked["isolate"]:
            which.append(int(os.environ["AVGPIPE_PIPELINE"]))
            pipeline.enter()
        epoch, start = divmod(pipeline.batches, EPOCH)
        is_over = epoch == last
        journal.write("begin", batch=pipeline.batches, generation=generation())
        while not is_over:
            for result in pipeline.train(batches(epoch, start)):
                journal.write("result", batch=result.batch, samples=result.samples, generation=generation())
            is_over = epoch + 1 == last
            if is_over or last is None:
                found = [digest(pipeline.state_dict(each).values()) for each in which]
                journal.write("weights", epoch=epoch, digests=found)
            if last is None:
                is_over = pipeline.once("enough", enough.exists)
            epoch, start = epoch + 1, 0


def saved_and_loaded(stages: int, pipelines: int, batch: int, epochs: int, folder: str) -> str:
    """Train as a rank of a run that is not disturbed, but saved and loaded after ``batch`` batches; its weights."""
    torch.set_num_threads(1)
    asked = {"stages": stages, "pipelines": pipelines, "isolate": False, "timeout_s": 60}

    def train(pipeline: Pipeline, end: int) -> None:
        while pipeline.batches < end:
            epoch, start = divmod(pipeline.batches, EPOCH)
            for _ in pipeline.train(batches(epoch)[start : end - epoch * EPOCH]):
                pass

    with made(asked) as pipeline:
        train(pipeline, batch)
        pipeline.save(folder)
    with made(asked) as pipeline:
        pipeline.load(folder)
        train(pipeline, epochs * EPOCH)
        return digest(pipeline.state_dict().values())


if __name__ == "__main__":
    main()
