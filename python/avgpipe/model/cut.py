"""The cut of a model as a readable table: layers by name, their estimated costs, and the bytes between stages."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field
from itertools import pairwise
from typing import Any

import torch
from torch import nn
from torch.utils import _pytree as pytree

from avgpipe.model.batch import batch_size, split, to_device
from avgpipe.model.context import in_mode
from avgpipe.model.estimate import Estimate
from avgpipe.model.model import Model
from avgpipe.model.parts import Skips, extract_skips, insert_skips
from avgpipe.units import format_bytes, format_count

Traffic = dict[tuple[int, int], int]  # bytes of a micro-batch, by sending and receiving stage

_UNKNOWN = "unknown before the first batch, and then known for this process's stages; example_inputs= gives all at once"


@dataclass(frozen=True)
class Cut:
    """A model's layers in their stages.

    Attributes:
        names: Names of the layers, as in the model.
        parameters: Number of parameters of each layer.
        costs: Cost of each layer, in proportion to its estimated time.
        bounds: First layer of each stage, then the number of layers.
        traffic: If known, bytes of a micro-batch between stages, in the dtype of the layers' outputs.
        kind: One line on the kind of estimate of the costs.
    """

    names: tuple[str, ...]
    parameters: tuple[int, ...]
    costs: tuple[float, ...]
    bounds: tuple[int, ...]
    traffic: Mapping[tuple[int, int], int] = field(default_factory=dict)
    kind: str = ""

    @classmethod
    def of(
        cls,
        model: nn.Module | Sequence[nn.Module],
        layers: Sequence[nn.Module],
        bounds: Sequence[int],
        estimate: Estimate,
    ) -> Cut:
        """Describe ``layers``, with the names that they have in ``model``."""
        return cls(
            tuple(names_of_layers(model, layers)),
            tuple(sum(p.numel() for p in layer.parameters()) for layer in layers),
            estimate.costs,
            tuple(bounds),
            kind=estimate.kind,
        )

    def __str__(self) -> str:
        rows = [("stage", "layers", "parameters", "cost", "sends of a micro-batch")]
        last = len(self.bounds) - 2
        for k, (a, b) in enumerate(pairwise(self.bounds)):
            layers = self.names[a] if b == a + 1 else f"{self.names[a]} .. {self.names[b - 1]} ({b - a})"
            share = f"{100 * sum(self.costs[a:b]) / sum(self.costs):.0f} %"
            parameters = format_count(sum(self.parameters[a:b]))
            sizes = sorted((to, size) for (source, to), size in self.traffic.items() if source == k)
            sent = [f"{format_bytes(size)} to stage {to}" for to, size in sizes]
            sent = sent or ["-" if k == last else "unknown"]
            rows.append((str(k), layers, parameters, share, sent[0]))
            rows.extend(("", "", "", "", more) for more in sent[1:])
        widths = [max(map(len, column)) for column in zip(*rows)]
        lines = [
            "  ".join(
                cell.rjust(width) if n in (2, 3) else cell.ljust(width)
                for n, (cell, width) in enumerate(zip(row, widths))
            ).rstrip()
            for row in rows
        ]
        is_known = all((k, k + 1) in self.traffic for k in range(last))
        return "\n".join([*lines, self.kind, *([] if is_known else [_UNKNOWN])])


def names_of_layers(model: nn.Module | Sequence[nn.Module], layers: Sequence[nn.Module]) -> list[str]:
    """Name each layer as in ``model``, with its class if the name is only a number."""
    whole = model if isinstance(model, nn.Module) else nn.ModuleList(model)
    known = {id(module): name for name, module in whole.named_modules() if name}
    found = []
    for n, layer in enumerate(layers):
        calls = getattr(layer, "calls", None)
        name = calls if isinstance(calls, str) and calls else known.get(id(layer), str(n))
        found.append(f"{name} {type(layer).__name__}" if name.replace(".", "").isdigit() else name)
    return found


# ---- bytes between stages ------------------------------------------------------------------------------------------


def expected_traffic(model: Model, layers: Sequence[nn.Module], example_inputs: Any, parts: int) -> Traffic:
    """Return the bytes of a micro-batch between stages, without computing; nothing if that fails.

    Args:
        model: The cut model.
        layers: Its layers, which are unchanged.
        example_inputs: Inputs of one batch.
        parts: Micro-batches of the batch.
    """
    from torch._subclasses.fake_tensor import FakeTensorMode  # imported here, as it takes a second

    fake = FakeTensorMode(allow_non_fake_inputs=True)
    from avgpipe.model.example import device_of

    there = to_device(example_inputs, device_of(nn.ModuleList(layers)))
    first = split(there, min(parts, batch_size(there)))[0]
    try:
        value = pytree.tree_map_only(torch.Tensor, fake.from_tensor, first)
        with ExitStack() as modes, torch.no_grad(), fake:
            for layer in layers:
                modes.enter_context(in_mode(layer, False))
            return _passed_through(model, layers, value)
    except Exception:  # of any kind: a layer may fail on tensors without values
        return {}


def _passed_through(model: Model, layers: Sequence[nn.Module], value: Any) -> Traffic:
    found: Traffic = {}
    skipping: dict[tuple[int, int], list[Any]] = {}
    for k, (a, b) in enumerate(pairwise(model.bounds[:-1])):
        for layer in layers[a:b]:
            value = layer(value)
        found |= sent(k, value, model.skips[k])
        departures, arrivals = model.skips[k].departures, model.skips[k + 1].arrivals
        if departures:
            value, parts = extract_skips(value, departures)
            skipping |= {(k, route.stage): values for route, values in zip(departures, parts)}
        if arrivals:
            value = insert_skips(value, arrivals, [skipping[route.stage, k + 1] for route in arrivals])
    return found


def sent(stage: int, output: Any, skips: Skips) -> Traffic:
    """Return the bytes of a stage's output: to the next stage, and past others."""
    output, parts = extract_skips(output, skips.departures) if skips.departures else (output, [])
    return {(stage, stage + 1): _bytes(output)} | {
        (stage, route.stage): _bytes(values) for route, values in zip(skips.departures, parts)
    }


def _bytes(value: Any) -> int:
    return sum(t.nbytes for t in pytree.tree_leaves(value) if isinstance(t, torch.Tensor))
