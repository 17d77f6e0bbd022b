"""The job of each process of a run, and its journal: a tiny language model on data that is made from a seed.

The journal of a process has a line of JSON for each event, with its time: all processes of a machine share
that clock.
"""

from __future__ import annotations

import hashlib
import json
import logging
import os
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
from torch import nn

from avgpipe import BitChecks, CheckpointError, Copies, Pipeline, Plan
from avgpipe.ranks.environment import RESTART
from avgpipe_lab.bench.chaos.draw import BATCH_SIZE, BATCHES, BATCHES_PER_EPOCH

VARIABLE = "AVGPIPE_CHAOS"  # holds the job's parameters; exactly the processes of a run have it
_WORDS, _LENGTH, _WIDTH = 24, 8, 32


class Journal(logging.Handler):
    """Writes the events of this process at once; warnings in the log report faults that are injected."""

    def __init__(self, folder: str) -> None:
        super().__init__(logging.WARNING)
        path = Path(folder, f"{os.getpid()}.jsonl")
        self._file = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o600)

    def write(self, event: str, **about: Any) -> None:
        who = {"process": os.getpid(), "rank": int(os.environ["RANK"])}
        who |= {"pipeline": int(os.environ.get("AVGPIPE_PIPELINE", "0"))}
        who |= {"life": int(os.environ.get(RESTART, "0"))}
        os.write(
            self._file,
            json.dumps({"at_s": time.monotonic(), "event": event, **who, **about}).encode() + b"\n",
        )

    def emit(self, record: logging.LogRecord) -> None:
        text = record.getMessage()
        if text.startswith("avgpipe.testing: "):
            self.write("fault", text=text.partition(": ")[2])


def train(about: str) -> None:
    """Train, evaluate and save as a process of a run; ``about`` is JSON, see ``episode``."""
    asked = json.loads(about)
    journal = Journal(asked["journals"])
    logging.getLogger("avgpipe").addHandler(journal)
    journal.write("start")
    try:
        _train(asked, journal)
    except Exception as error:
        journal.write("error", type=type(error).__name__, text=str(error))
        raise
    journal.write("end")


def _train(asked: dict[str, Any], journal: Journal) -> None:
    torch.manual_seed(asked["seed"])
    layers = [nn.Sequential(nn.Linear(_WIDTH, _WIDTH), nn.Tanh()) for _ in range(4)]
    model = nn.Sequential(nn.Embedding(_WORDS, _WIDTH), *layers, nn.Linear(_WIDTH, _WORDS)).double()
    data = _data()
    copies = [] if asked["copies_every_s"] is None else [Copies(asked["copies_every_s"])]
    with Pipeline(
        model,
        Plan(**asked["plan"]),
        loss_fn=lambda output, target: nn.functional.cross_entropy(output.flatten(0, 1), target.flatten()),
        optimizer=lambda parameters: torch.optim.AdamW(parameters, lr=3e-3),
        extensions=[BitChecks(wire=asked["verifies"]), *copies],
        **asked["options"],
    ) as pipeline:
        pipeline.enter()  # so that each epoch's loader begins at the right batch
        while pipeline.batches < BATCHES:
            first = pipeline.batches
            end = (first // BATCHES_PER_EPOCH + 1) * BATCHES_PER_EPOCH
            for result in pipeline.train(_paced(data[first:end], asked["pace_s"])):
                journal.write("result", batch=result.batch, samples=result.samples, loss=result.loss)
            loss = pipeline.evaluate(data[:4]).loss
            # Elsewhere a checksum would be one more call that cannot be repeated, and losses show the same.
            about = {"reference": _digest(pipeline)} if pipeline.plan.isolate else {}
            journal.write("evaluation", batch=pipeline.batches, loss=loss, **about)
            try:
                pipeline.save(asked["checkpoint"])
            except CheckpointError as error:  # the checkpoint before stays
                journal.write("not saved", text=str(error))
            else:
                if asked["loads"]:
                    pipeline.load(asked["checkpoint"])


def _digest(pipeline: Pipeline) -> str:
    """Return a checksum of the reference's bits."""
    weights = pipeline.state_dict().values()
    return hashlib.sha256(b"".join(w.numpy().tobytes() for w in weights)).hexdigest()


def _data() -> list[tuple[torch.Tensor, torch.Tensor]]:
    """Make batches of sentences in which each word mostly follows from the word before."""
    chance = torch.Generator().manual_seed(7)
    follows = torch.randperm(_WORDS, generator=chance)
    words = [torch.randint(_WORDS, (BATCHES * BATCH_SIZE,), generator=chance)]
    for _ in range(_LENGTH):
        other = torch.randint(_WORDS, words[0].shape, generator=chance)
        is_other = torch.rand(words[0].shape, generator=chance) < 0.1
        words.append(torch.where(is_other, other, follows[words[-1]]))
    text = torch.stack(words, 1)
    return [(one[:, :-1], one[:, 1:]) for one in torch.tensor_split(text, BATCHES)]


def _paced(batches: list[Any], pace_s: float) -> Iterator[Any]:
    """Yield batches with a delay, so that a restarted process finds a running job to join."""
    for batch in batches:
        time.sleep(pace_s)
        yield batch


def main() -> None:
    """Run as a process without tracebacks on standard error: an error is in the journal, too."""
    about = os.environ[VARIABLE]
    with Path(json.loads(about)["journals"], f"{os.getpid()}.err").open("w") as file:
        os.dup2(file.fileno(), 2)
    train(about)


if __name__ == "__main__":
    main()
