"""A stage's forward and backward as CUDA graphs: one launch each for all the kernels of a micro-batch.

A graph reads and writes fixed memory, so each micro-batch of a batch has its own pair of graphs: its memory
is free again when the next batch begins. It is captured when the micro-batch first runs, on the lane's
stream, which is the current one then. The two graphs of a micro-batch share a memory pool. All graphs of a
lane could share one only if they were always launched in the order of their capture, which an advance that
changes, or a short first batch, would break.

Gradients are summed inside the graph, in memory that the lane keeps for them and lays out like the weights. A
batch's first backward zeroes this memory and makes it the parameters' ``grad``; it stays that until an update
or the caller drops or replaces it. So autograd has no work for each parameter; neither does it call the hooks
that sum gradients over a group while the backward runs, so the group's sums begin when the backward has been
launched.

Running statistics stay outside: a graph writes the moments that its BatchNorms note of the micro-batch to its
own memory, and the end of the batch reads them there.
"""

from __future__ import annotations

import logging
from collections.abc import Iterable, Sequence
from typing import Any

import torch
from torch import nn
from torch.autograd.function import once_differentiable
from torch.utils import _pytree as pytree

from avgpipe.device import free_cached
from avgpipe.elastic.flat import Layout
from avgpipe.errors import StageError, reason
from avgpipe.links.link import tensors_of
from avgpipe.model.context import Position, generators, moved, position, set_position
from avgpipe.runtime.stage import Stage
from avgpipe.runtime.streams import captured

_log = logging.getLogger("avgpipe")
_WARM_UPS = 2  # passes before the first capture, in which libraries choose kernels and initialise themselves


class StageGraphs:
    """Runs a stage in training by its graphs; inputs of other shapes than the first batch's run without."""

    def __init__(self, stage: Stage) -> None:
        check_capturable(stage)
        self._stage = stage
        self._gradients = _Gradients(p for p in stage.parameters() if p.requires_grad)
        self._captured: dict[int, _Captured] = {}  # by micro-batch
        self._warm: set[Any] = set()  # signatures of inputs
        self._warned = False

    def __call__(self, value: Any, place: Position) -> Any:
        leaves, structure = pytree.tree_flatten(value)
        tensors = [x for x in leaves if isinstance(x, torch.Tensor)]
        signature = structure, tuple(_described(x) for x in leaves)
        pair = self._captured.get(place.micro_batch)
        if pair is None:
            pair = self._captured[place.micro_batch] = self._capture(value, tensors, signature, place)
        if pair.signature != signature:
            if not self._warned:
                _log.info(
                    "stage %d: %s has another shape: it runs without CUDA graphs", self._stage.index, place
                )
                self._warned = True
            return self._stage(value, place)
        return pair(tensors, place)

    def _capture(self, value: Any, tensors: list[torch.Tensor], signature: Any, place: Position) -> _Captured:
        stage = self._stage
        if not self._captured:
            free_cached(stage.device)  # graphs cannot use the allocator's cache
        before = set_position(place)
        try:
            return _Captured(stage, self._gradients, value, tensors, signature, self._warm)
        except (RuntimeError, StageError) as error:
            raise StageError(
                f"stage {stage.index} cannot be captured as a CUDA graph: {reason(error)}; leave CudaGraphs out"
            ) from error
        finally:
            set_position(before)


class _Gradients:
    """Memory in which the graphs of a lane sum its parameters' gradients."""

    def __init__(self, parameters: Iterable[nn.Parameter]) -> None:
        self.parameters = list(parameters)
        self._memory = Layout(self.parameters).zeros()
        self.tensors = self._memory.tensors()

    def begin(self, used: Sequence[int]) -> None:
        """Make this memory the gradients of these parameters; those that had none begin with zeros."""
        is_new = all(p.grad is None for p in self.parameters)
        if is_new:
            self._memory.zero_()  # one launch for all
        for n in used:
            p, here = self.parameters[n], self.tensors[n]
            if p.grad is here:
                continue
            if p.grad is not None:  # of a micro-batch that ran without graphs
                here.copy_(p.grad)
            elif not is_new:
                here.zero_()
            p.grad = here


def check_capturable(stage: Stage) -> None:
    """Refuse, with ValueError, a stage whose forward does not run the same kernels every time."""
    way_out = "leave CudaGraphs out, or use a model without it"
    if stage.carries:
        raise ValueError(
            f"CudaGraphs(): stage {stage.index} carries state from batch to batch, which a graph cannot; {way_out}"
        )
    for name, module in stage.layers.named_modules():
        rate = getattr(module, "p", None) if isinstance(module, nn.modules.dropout._DropoutNd) else None
        rate = getattr(module, "dropout", rate)
        if isinstance(module, nn.RReLU) or (isinstance(rate, float) and rate > 0):
            raise ValueError(
                f"CudaGraphs(): {type(module).__name__} ({name!r} of stage {stage.index}) draws random numbers, "
                f"which a graph would repeat; set its probability to 0, or leave CudaGraphs out"
            )


def draws_random_numbers(layers: _Layers, tensors: list[torch.Tensor]) -> bool:
    """Whether a forward uses a generator; its changes of buffers are undone."""
    device, buffers = layers.stage.device, [(b, b.clone()) for b in layers.buffers()]
    before = generators(device)
    with torch.no_grad():
        layers(*tensors)
        for buffer, kept in buffers:
            buffer.copy_(kept)
    return bool(moved(before, generators(device)))


class _Layers(nn.Module):
    """A stage's layers as a function from tensors to tensors, as capture requires."""

    stage: Stage

    def __init__(self, stage: Stage, value: Any) -> None:
        super().__init__()
        self.layers = stage.layers
        self.__dict__["stage"] = stage  # not as a submodule: its parameters are registered once already
        self._given = pytree.tree_map_only(torch.Tensor, lambda t: _HERE, value)
        self._made: Any = None

    def forward(self, *tensors: torch.Tensor) -> tuple[torch.Tensor, ...]:
        value = _filled(self._given, tensors)
        value = self.stage.inputs.run(self._run, value, position(), self.stage.training, True)
        if self.stage.statistics is not None:
            self.stage.statistics.end_forward()
        self._made = pytree.tree_map_only(torch.Tensor, lambda t: _HERE, value)
        return tuple(tensors_of(value))

    def _run(self, value: Any, place: Position) -> Any:
        if self.stage.statistics is not None:
            self.stage.statistics.begin_forward()
        for number, layer in enumerate(self.layers, self.stage.first):
            value = self.stage._call(number, layer, value)
        return value

    def result(self, tensors: Any) -> Any:
        """Return the value whose tensors the last forward returned."""
        return _filled(self._made, tensors)


_HERE = object()  # in place of a tensor


def _filled(form: Any, tensors: Iterable[torch.Tensor]) -> Any:
    """Return a value with these tensors in place of its marks."""
    rest = iter(tensors)
    return pytree.tree_map(lambda leaf: next(rest) if leaf is _HERE else leaf, form)


class _Captured:
    """The two graphs of one micro-batch, and the memory that they read and write.

    Args:
        gradients: the memory that parameters' gradients are added to.
        signature: the description of ``value``.
        warm: signatures of the inputs that have been warmed up.
    """

    def __init__(
        self,
        stage: Stage,
        gradients: _Gradients,
        value: Any,
        tensors: list[torch.Tensor],
        signature: Any,
        warm: set[Any],
    ) -> None:
        self.signature = signature
        self._stage, self._gradients = stage, gradients
        self._layers = _Layers(stage, value)
        self._inputs = [t.detach().clone().requires_grad_(t.requires_grad) for t in tensors]
        # The only input that requires a gradient if the stage's inputs do not.
        self._anchor = torch.zeros((), device=stage.device, requires_grad=bool(gradients.parameters))
        kind = stage.device.type
        dtype = torch.get_autocast_dtype(kind)
        buffers = [(b, b.clone()) for b in self._layers.buffers()]
        # Cached casts would be memory of one graph that other graphs read.
        with torch.autocast(kind, dtype, torch.is_autocast_enabled(kind), cache_enabled=False):
            if signature not in warm:
                self._warm_up()
                warm.add(signature)
            self._capture()
        with torch.no_grad():  # all these passes have counted batches
            for buffer, kept in buffers:
                buffer.copy_(kept)
        # The last pass was the captured one: each launch of the graph writes these tensors again.
        self._noted = [] if stage.statistics is None else stage.statistics.of(position())

    def _warm_up(self) -> None:
        if draws_random_numbers(self._layers, self._inputs):
            raise ValueError(
                f"CudaGraphs(): a layer of stage {self._stage.index} draws random numbers, which a graph would "
                "repeat; leave CudaGraphs out"
            )
        # Hooks that count what is saved for backwards must count the captured pass alone.
        with torch.autograd.graph.saved_tensors_hooks(torch.Tensor.detach, lambda kept: kept):
            for _ in range(_WARM_UPS):
                outputs = self._layers(*self._inputs)
                self._backward(outputs, [torch.empty_like(o) for o in outputs])

    def _backward(
        self, outputs: Sequence[torch.Tensor], grads: Sequence[torch.Tensor]
    ) -> tuple[list[torch.Tensor | None], list[torch.Tensor | None]]:
        """Return the gradients of the inputs and of the parameters."""
        wanted = [x for x in self._inputs if x.requires_grad]
        pairs = [(o, g) for o, g in zip(outputs, grads) if o.requires_grad]
        of = (
            torch.autograd.grad(
                [o for o, _ in pairs],
                [*wanted, *self._gradients.parameters],
                [g for _, g in pairs],
                allow_unused=True,
            )
            if pairs
            else (None,) * (len(wanted) + len(self._gradients.parameters))
        )
        rest = iter(of)
        return [next(rest) if x.requires_grad else None for x in self._inputs], list(rest)

    def _capture(self) -> None:
        device = self._stage.device
        with captured(device) as self._forward:
            outputs = self._layers(*self._inputs)
        self._wants = [o.requires_grad for o in outputs]
        self._outputs = [o.detach() for o in outputs]
        self._output_grads = [torch.zeros_like(o) for o in self._outputs]
        with captured(device, self._forward.pool()) as self._backward_graph:
            self._input_grads, grads = self._backward(outputs, self._output_grads)
            made = {n: grad for n, grad in enumerate(grads) if grad is not None}
            if any(grad.is_sparse for grad in made.values()):
                raise RuntimeError("a gradient is sparse")
            if made:
                torch._foreach_add_([self._gradients.tensors[n] for n in made], list(made.values()))
        self._used = list(made)

    def __call__(self, tensors: list[torch.Tensor], place: Position) -> Any:
        if self._stage.statistics is not None:
            self._stage.statistics.put(place, self._noted)
        return self._layers.result(_Launched.apply(self, self._anchor, *tensors))  # type: ignore[no-untyped-call]

    def forward(self, ctx: Any, tensors: Sequence[torch.Tensor]) -> tuple[torch.Tensor, ...]:
        for mine, given in zip(self._inputs, tensors):
            mine.detach().copy_(given)
        self._forward.replay()
        outputs = [o.detach() for o in self._outputs]
        ctx.mark_non_differentiable(*(o for o, wants in zip(outputs, self._wants) if not wants))
        return tuple(outputs)

    def backward(self, grads: Sequence[torch.Tensor | None]) -> list[torch.Tensor | None]:
        """Add to the parameters' gradients, and return those of the inputs."""
        for mine, grad in zip(self._output_grads, grads):
            if grad is None:
                mine.zero_()
            else:
                mine.copy_(grad)
        self._gradients.begin(self._used)
        self._backward_graph.replay()
        # Copies: the graph's own memory is overwritten when it is launched again, and these are sent.
        return [None if g is None else g.clone() for g in self._input_grads]


class _Launched(torch.autograd.Function):
    """A micro-batch whose forward and backward are a launch each."""

    @staticmethod
    def forward(ctx: Any, of: _Captured, anchor: torch.Tensor, *tensors: torch.Tensor) -> Any:
        ctx.of = of
        ctx.set_materialize_grads(False)
        return of.forward(ctx, tensors)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *grads: torch.Tensor | None) -> Any:
        return (None, None, *ctx.of.backward(grads))


def _described(leaf: Any) -> Any:
    if isinstance(leaf, torch.Tensor):
        return tuple(leaf.shape), leaf.dtype, leaf.requires_grad
    return type(leaf), leaf
