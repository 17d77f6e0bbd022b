"""A stage's forward and backward as CUDA graphs: one launch for all the kernels of a micro-batch.

A graph reads and writes fixed memory, so each micro-batch of a batch has a pair of its own: what it holds is free again
when the next batch comes. It is captured when the micro-batch is first seen. Parameters and their gradients' sums stay
outside: backwards add to them as ever. So do running statistics: a graph writes what its BatchNorms see of the
micro-batch to memory of its own, and the batch's end reads it there.
"""

from __future__ import annotations

import logging
from typing import Any

import torch
from torch import nn
from torch.utils import _pytree as pytree

from avgpipe.device import generators_of
from avgpipe.errors import StageError, reason
from avgpipe.runtime.context import Position, position, set_position
from avgpipe.runtime.stage import Stage

_log = logging.getLogger("avgpipe")


class StageGraphs:
    """Runs a stage that trains by its graphs. What has another shape than the first batch runs without."""

    def __init__(self, stage: Stage) -> None:
        check_capturable(stage)
        self._stage = stage
        self._captured: dict[int, _Captured] = {}  # by micro-batch
        self._warned = False

    def __call__(self, value: Any, place: Position) -> Any:
        leaves, structure = pytree.tree_flatten(value)
        tensors = [x for x in leaves if isinstance(x, torch.Tensor)]
        signature = structure, tuple(_described(x) for x in leaves)
        captured = self._captured.get(place.micro_batch)
        if captured is None:
            captured = _Captured(self._stage, value, tensors, signature, place)
            self._captured[place.micro_batch] = captured
        if captured.signature != signature:
            if not self._warned:
                _log.info(
                    "stage %d: %s has another shape: it runs without CUDA graphs", self._stage.index, place
                )
                self._warned = True
            return self._stage(value, place)
        return captured(tensors, place)


def check_capturable(stage: Stage) -> None:
    """Refuse, with ValueError, a stage whose forward is not the same kernels every time."""
    way_out = "leave cuda_graphs out, or use a model without it"
    if stage.carries:
        raise ValueError(
            f"cuda_graphs=True: stage {stage.index} carries state from batch to batch, which a graph cannot; {way_out}"
        )
    for name, module in stage.layers.named_modules():
        rate = getattr(module, "p", None) if isinstance(module, nn.modules.dropout._DropoutNd) else None
        rate = getattr(module, "dropout", rate)
        if isinstance(module, nn.RReLU) or (isinstance(rate, float) and rate > 0):
            raise ValueError(
                f"cuda_graphs=True: {type(module).__name__} ({name!r} of stage {stage.index}) draws random numbers, "
                f"which a graph would repeat; set its probability to 0, or leave cuda_graphs out"
            )


def draws_random_numbers(layers: _Layers, tensors: list[torch.Tensor]) -> bool:
    """Whether a forward moves the device's generator or the host's; what it does to buffers is undone."""
    device = layers.stage.device
    buffers = [(b, b.clone()) for b in layers.buffers()]

    def states() -> list[torch.Tensor]:
        return [generator.get_state() for generator in generators_of(device)]

    before = states()
    with torch.no_grad():
        layers(*tensors)
        for buffer, kept in buffers:
            buffer.copy_(kept)
    return any(not torch.equal(a, b) for a, b in zip(before, states()))


class _Layers(nn.Module):
    """A stage's layers as a function from tensors to tensors, as capturing wants it."""

    stage: Stage

    def __init__(self, stage: Stage, value: Any) -> None:
        super().__init__()
        self.layers = stage.layers
        self.__dict__["stage"] = stage  # not as a module: its parameters are there once already
        self._leaves, self._structure = pytree.tree_flatten(value)
        self._leaves = [None if isinstance(x, torch.Tensor) else (x,) for x in self._leaves]

    def forward(self, *tensors: torch.Tensor) -> tuple[torch.Tensor, ...]:
        stream = iter(tensors)
        leaves = [next(stream) if leaf is None else leaf[0] for leaf in self._leaves]
        value = pytree.tree_unflatten(leaves, self._structure)
        value = self.stage.inputs.run(self._run, value, position(), self.stage.training, True)
        self.stage.statistics.end_forward()
        results, self._result = pytree.tree_flatten(value)
        self._plain = [None if isinstance(x, torch.Tensor) else (x,) for x in results]
        return tuple(x for x in results if isinstance(x, torch.Tensor))

    def _run(self, value: Any, place: Position) -> Any:
        self.stage.statistics.begin_forward()
        for number, layer in enumerate(self.layers, self.stage.first):
            value = self.stage._call(number, layer, value)
        return value

    def result(self, tensors: Any) -> Any:
        """Return the value whose tensors the last forward returned."""
        stream = iter(tensors)
        leaves = [next(stream) if leaf is None else leaf[0] for leaf in self._plain]
        return pytree.tree_unflatten(leaves, self._result)


class _Captured:
    """The two graphs of one micro-batch, and how its value is described."""

    def __init__(
        self, stage: Stage, value: Any, tensors: list[torch.Tensor], signature: Any, place: Position
    ) -> None:
        self.signature = signature
        self._statistics = stage.statistics
        before = set_position(place)
        try:
            self._prepare(stage, value, tensors)
        finally:
            set_position(before)
        # The last pass was the captured one: whenever the graph is launched, it writes these tensors again.
        self._noted = stage.statistics.of(place)

    def _prepare(self, stage: Stage, value: Any, tensors: list[torch.Tensor]) -> None:
        self._layers = _Layers(stage, value)
        samples = [t.detach().clone().requires_grad_(t.requires_grad) for t in tensors]
        if draws_random_numbers(self._layers, samples):
            raise ValueError(
                f"cuda_graphs=True: a layer of stage {stage.index} draws random numbers, which a graph would repeat; "
                "leave cuda_graphs out"
            )
        buffers = [(b, b.clone()) for b in self._layers.buffers()]
        try:
            self._graphed = self._capture(samples)
        except (RuntimeError, StageError) as error:
            raise StageError(
                f"stage {stage.index} cannot be captured as a CUDA graph: {reason(error)}; leave cuda_graphs out"
            ) from error
        with torch.no_grad():  # the passes that warm up have counted batches
            for buffer, kept in buffers:
                buffer.copy_(kept)

    def _capture(self, samples: list[torch.Tensor]) -> Any:
        enabled = torch.is_autocast_enabled("cuda")
        dtype = torch.get_autocast_dtype("cuda")
        # Cached casts would be memory of one graph that others read.
        with torch.autocast("cuda", dtype=dtype, enabled=enabled, cache_enabled=False):
            capture: Any = torch.cuda.make_graphed_callables  # its types know only one of its two forms
            return capture(self._layers, tuple(samples), allow_unused_input=True)

    def __call__(self, tensors: list[torch.Tensor], place: Position) -> Any:
        self._statistics.put(place, self._noted)
        return self._layers.result(self._graphed(*(_own_gradient(t) for t in tensors)))


class _OwnGradient(torch.autograd.Function):
    """Copies the gradient on its way back: one that a graph made lies in its memory, and is overwritten."""

    @staticmethod
    def forward(ctx: Any, tensor: torch.Tensor) -> torch.Tensor:
        return tensor.view_as(tensor)

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> torch.Tensor:
        return grad.clone()


_own_gradient: Any = _OwnGradient.apply  # torch leaves it untyped


def _described(leaf: Any) -> Any:
    if isinstance(leaf, torch.Tensor):
        return tuple(leaf.shape), leaf.dtype, leaf.requires_grad
    return type(leaf), leaf
