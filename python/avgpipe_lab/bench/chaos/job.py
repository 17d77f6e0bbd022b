"""The job of each process of a run, and its journal: a tiny language model on data that is made from a seed.

Every layer counts in its weights how often each sample was trained on, whichever process did it: see
:class:`Counted`.

The journal of a process has a line of JSON for each event, with its time: all processes of a machine share
that clock.
"""

from __future__ import annotations

import hashlib
import json
import logging
import os
import time
from collections.abc import Iterable, Iterator
from itertools import islice
from pathlib import Path
from typing import Any

import torch
import torch._dynamo  # as the first optimizer of a process does: the journal's "start" follows all imports
from torch import nn

from avgpipe import BitChecks, CheckpointError, Copies, Pipeline, Plan
from avgpipe.ranks.environment import RESTART
from avgpipe_lab.bench.chaos.draw import BATCH_SIZE, BATCHES, BATCHES_PER_EPOCH

VARIABLE = "AVGPIPE_CHAOS"  # holds the job's parameters; exactly the processes of a run have it
SAMPLES = BATCHES * BATCH_SIZE
_WORDS, _LENGTH, _WIDTH = 24, 8, 32
_ALONE_S = 1.0
_MOST_MISCOUNTED = 20  # entries of an event


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


class Counted(nn.Module):
    """A layer with an odometer: a parameter for each sample, from which each training on the sample subtracts 1.

    The loss adds the odometers of a sample, so that their gradient is exactly 1, and their optimizer is SGD with rate
    1. Before the words of a sample comes a row with its number and the sum of its odometers.
    """

    def __init__(self, inner: nn.Module) -> None:
        super().__init__()
        self.inner, self.odometer = inner, nn.Parameter(torch.zeros(SAMPLES))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        samples, words = x[:, 0], self.inner(x[:, 1:])
        if samples.dim() == 1:  # the first layer: the rest of its row is free
            head = nn.functional.pad(samples[:, None].to(words.dtype), (0, words.shape[-1] - 1))
        else:
            head = samples
        counts = self.odometer[head[:, 0].detach().round().long()]
        column = nn.functional.one_hot(torch.tensor(1), words.shape[-1])
        head = head[:, : words.shape[-1]] + counts[:, None] * column
        return torch.cat([head[:, None], words], 1)


class _SumOfLosses(nn.Module):
    reduction = "sum"

    def forward(self, output: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
        words = output[:, 1:].flatten(0, 1)
        return nn.functional.cross_entropy(words, target.flatten(), reduction="sum") + output[:, 0, 1].sum()


def _optimizer(parameters: Iterable[nn.Parameter]) -> torch.optim.Optimizer:
    """Return SGD that counts exactly in odometers, and has a state for everything else."""
    odometers: list[nn.Parameter] = []
    others: list[nn.Parameter] = []
    for parameter in parameters:
        (odometers if parameter.shape == (SAMPLES,) else others).append(parameter)
    return torch.optim.SGD([{"params": odometers, "lr": 1.0}, {"params": others, "momentum": 0.9}], lr=3e-4)


def _train(asked: dict[str, Any], journal: Journal) -> None:
    torch.manual_seed(asked["seed"])
    layers = [nn.Sequential(nn.Linear(_WIDTH, _WIDTH), nn.Tanh()) for _ in range(4)]
    parts = [nn.Embedding(_WORDS, _WIDTH), *layers, nn.Linear(_WIDTH, _WORDS)]
    data = _data()
    copies = [] if asked["copies_every_s"] is None else [Copies(asked["copies_every_s"])]
    with Pipeline(
        nn.Sequential(*map(Counted, parts)).double(),
        Plan(**asked["plan"]),
        loss_fn=_SumOfLosses(),
        optimizer=_optimizer,
        extensions=[BitChecks(wire=asked["verifies"]), *copies],
        **asked["options"],
    ) as pipeline:
        pipeline.enter()  # so that each epoch's loader begins at the right batch
        while pipeline.batches < BATCHES:
            first = pipeline.batches
            end = (first // BATCHES_PER_EPOCH + 1) * BATCHES_PER_EPOCH
            for result in pipeline.train(_paced(data[first:end], asked["pace_s"], asked["together"])):
                journal.write("result", batch=result.batch, samples=result.samples, loss=result.loss)
            loss = pipeline.evaluate(data[:4]).loss
            # Elsewhere a checksum would be one more call that cannot be repeated, and losses show the same.
            about = _weights(pipeline) if pipeline.plan.isolate else {}
            journal.write("evaluation", batch=pipeline.batches, loss=loss, **about)
            try:
                pipeline.save(asked["checkpoint"])
            except CheckpointError as error:  # the checkpoint before stays
                journal.write("not saved", text=str(error))
            else:
                if asked["loads"]:
                    pipeline.load(asked["checkpoint"])
        if not pipeline.plan.isolate:
            journal.write("weights", batch=pipeline.batches, **_weights(pipeline))


def _weights(pipeline: Pipeline) -> dict[str, Any]:
    """Return a checksum of the reference's bits, and the counts of samples that its odometers have wrong."""
    weights = pipeline.state_dict()
    digest = hashlib.sha256(b"".join(w.numpy().tobytes() for w in weights.values())).hexdigest()
    expected = -(torch.arange(SAMPLES) < pipeline.batches * BATCH_SIZE).double()
    wrong = (
        (f"{name}[{sample}]", float(weight[sample]))
        for name, weight in weights.items()
        if name.endswith("odometer")
        for sample in (weight != expected).nonzero().flatten().tolist()
    )
    return {"reference": digest, "miscounted": dict(islice(wrong, _MOST_MISCOUNTED))}


def _data() -> list[tuple[torch.Tensor, torch.Tensor]]:
    """Make batches of sentences in which each word mostly follows from the word before."""
    chance = torch.Generator().manual_seed(7)
    follows = torch.randperm(_WORDS, generator=chance)
    words = [torch.randint(_WORDS, (SAMPLES,), generator=chance)]
    for _ in range(_LENGTH):
        other = torch.randint(_WORDS, words[0].shape, generator=chance)
        is_other = torch.rand(words[0].shape, generator=chance) < 0.1
        words.append(torch.where(is_other, other, follows[words[-1]]))
    text, samples = torch.stack(words, 1), torch.arange(SAMPLES)[:, None]
    inputs, targets = torch.cat([samples, text[:, :-1]], 1), text[:, 1:]
    return list(zip(torch.tensor_split(inputs, BATCHES), torch.tensor_split(targets, BATCHES)))


def _paced(batches: list[Any], pace_s: float, together: str | None) -> Iterator[Any]:
    """Yield batches with a delay, so that a restarted process finds a running job to join.

    ``together``: file without which the delay is longer, as not all hosts have joined.
    """
    for batch in batches:
        time.sleep(pace_s if together is None or os.path.exists(together) else _ALONE_S)
        yield batch


def main() -> None:
    """Run as a process without tracebacks on standard error: an error is in the journal, too."""
    about = os.environ[VARIABLE]
    with Path(json.loads(about)["journals"], f"{os.getpid()}.err").open("w") as file:
        os.dup2(file.fileno(), 2)
    train(about)


if __name__ == "__main__":
    main()
