"""Question: do classification networks as they come, cut by default, train as on one device?

    nice python -m benchmarks.models.vision [NAME ...]

Thirty networks of torchvision and timm in float64, K = 2, 3 and 4 stages in one process, M = 2 micro-batches, three
steps of SGD with momentum, against plain training that adds up the gradients of the same two micro-batches; then
predictions in evaluation mode, against the network with the weights and statistics of the pipeline. A setting is equal
where losses, weights and predictions differ by less than 1e-5, or it is refused, in words, when the pipeline is made.
"""

from __future__ import annotations

import argparse
import copy
import gc
import os
import time
from collections.abc import Sequence
from typing import Any

import torch
from torch import nn
from torch.nn import functional

import avgpipe
from avgpipe import Pipeline, Plan
from avgpipe.model.layers import layers_of
from benchmarks.common.record import say, write_record
from benchmarks.models.networks import NETWORKS, batches, network

STAGES, PARTS, STEPS = (2, 3, 4), 2, 3
BOUND = 1e-5


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("names", nargs="*", help="default: all of them")
    parser.add_argument("--out", help="file of the record; default: a dated one in benchmarks/results")
    arguments = parser.parse_args()
    torch.set_num_threads(int(os.environ.get("OMP_NUM_THREADS", "1")))
    rows = {}
    for name in arguments.names or NETWORKS:
        rows[name] = tried(name)
        say(f"{name}: {rows[name]}")
        gc.collect()  # graphs hold themselves
    equal = sum(row["equal"] for row in rows.values())
    say(f"{equal} of {len(rows)} equal")
    found = {"bound": BOUND, "stages": STAGES, "micro_batches": PARTS, "steps": STEPS, "rows": rows}
    write_record(
        "models-vision", (__doc__ or "").splitlines()[0].removeprefix("Question: "), found, arguments.out
    )


def tried(name: str) -> dict[str, Any]:
    """Try a network with every number of stages."""
    begin = time.perf_counter()
    model, data = network(name), batches(name, STEPS)
    by, layers = tracer(model, data[0][0])
    # Exported once: that takes a minute, and a pipeline of the model would do the very same.
    how = (
        {"extensions": [avgpipe.Source(names_of=model)]}
        if by == "torch.export"
        else {"example_inputs": data[0][0]}
    )
    row: dict[str, Any] = {
        "parameters": sum(p.numel() for p in model.parameters()),
        "by": by,
        "layers": len(layers),
        "differences": {},
    }
    try:
        expected = plain(model, data)
        for stages in STAGES:
            row["differences"][str(stages)] = difference(
                layers if by == "torch.export" else model,
                model,
                data,
                Plan(stages=stages, micro_batches=PARTS),
                expected,
                how,
            )
    except (ValueError, TypeError) as error:
        row["refused"] = " ".join(str(error).split())
    except Exception as error:
        row["failed"] = " ".join(f"{type(error).__name__}: {error}".split())
    values = row["differences"].values()
    row["equal"] = len(values) == len(STAGES) and all(value < BOUND for value in values)
    return {**row, "seconds": time.perf_counter() - begin}


def tracer(model: nn.Module, inputs: Any) -> tuple[str, Sequence[nn.Module]]:
    """Say what traces a network, and return its layers."""
    try:
        return "torch.fx", layers_of(model)
    except ValueError:
        pass
    try:
        return "torch.export", layers_of(model, inputs)
    except ValueError:
        return "nothing", []


def momentum(params: Any) -> torch.optim.Optimizer:
    return torch.optim.SGD(params, lr=0.01, momentum=0.9)


def plain(
    model: nn.Module, data: list[Any], optimizer: Any = momentum
) -> tuple[list[float], dict[str, torch.Tensor]]:
    """Losses and final weights of training on one device, each micro-batch normalised by itself."""
    model = copy.deepcopy(model).train()
    optimizer = optimizer(model.parameters())
    losses = []
    for x, y in data:
        optimizer.zero_grad()
        total = 0.0
        for part, answer in zip(x.tensor_split(PARTS), y.tensor_split(PARTS)):
            loss = functional.cross_entropy(model(part), answer) * (len(part) / len(x))
            loss.backward()
            total += float(loss.detach())
        optimizer.step()
        losses.append(total)
    return losses, {name: p.detach() for name, p in model.named_parameters()}


def difference(
    given: nn.Module | Sequence[nn.Module],
    model: nn.Module,
    data: list[Any],
    plan: Plan,
    expected: Any,
    how: dict[str, Any],
) -> float:
    """Return the largest difference of a loss, weight or prediction, of the largest number where that is above 1.

    ``given``: to a Pipeline, with ``how``.
    """
    losses, weights = expected
    with Pipeline(given, plan, loss_fn=nn.CrossEntropyLoss(), optimizer=momentum, **how) as pipeline:
        found = [result.loss for result in pipeline.train(data)]
        state = pipeline.state_dict()
        predicted = pipeline.predict(data[0][0])
    whole = copy.deepcopy(model).eval()
    whole.load_state_dict(state)
    with torch.no_grad():
        pairs = [(predicted, whole(data[0][0])), *((state[n], weights[n]) for n in weights)]
    return max(
        *(abs(a - b) for a, b in zip(found, losses, strict=True)),
        *(float((a - b).abs().max() / b.abs().max().clamp(min=1.0)) for a, b in pairs),
    )


if __name__ == "__main__":
    main()
