"""Random numbers of layers in a graph: the same as without, from a generator's state for each layer that draws.

Without graphs, each layer seeds the generators by its place in the run before it draws. A graph cannot seed: it
keeps the addresses of seeds. So each drawing of a layer in a batch has a state of its own, which is registered with
the graph and seeded by the host before each launch. The drawings are found while batches run without graphs.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from typing import Any, NamedTuple

import torch

from avgpipe import device as devices
from avgpipe.device import generator_of
from avgpipe.errors import StageError
from avgpipe.model.context import callers_generators, mix, mix_more, moved, seed_generators, watch_draws
from avgpipe.runtime.compute import Work
from avgpipe.runtime.route import Step, StepKind


class Drawing(NamedTuple):
    """A layer that draws in a step, once it has begun there for the ``begun``-th time, from 0."""

    stage: int
    kind: StepKind
    micro_batch: int
    layer: int
    begun: int


class SeenDraws:
    """Finds the layers of a pipeline that draw random numbers, while batches run without graphs.

    Attributes:
        drawings: of the batch.
        elsewhere: names of generators that layers draw from, and that a graph cannot repeat.
    """

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self.drawings: set[Drawing] = set()
        self.elsewhere: set[str] = set()
        self._step: Step | None = None
        self._begun: Counter[int] = Counter()  # by layer, in this step
        # The layer that draws now, and the generators' states after it was seeded.
        self._open: tuple[int, torch.Tensor, torch.Tensor] | None = None

    @contextmanager
    def watching(self, step: Step) -> Iterator[None]:
        """Note what layers draw in a step, which runs inside the block."""
        self._step, before = step, callers_generators()
        self._begun.clear()
        watch_draws(self)
        try:
            yield
        finally:
            self._close()
            watch_draws(None)
            self.elsewhere.update(moved(before, callers_generators()))

    def begin_layer(self, device: torch.device, key: int, number: int) -> None:
        self._close()
        seed_generators(device, mix_more(key, number))
        self._begun[number] += 1
        self._open = number, torch.default_generator.get_state(), generator_of(self._device).get_state()

    def _close(self) -> None:
        if self._open is None or self._step is None:
            return
        layer, host, device = self._open
        self._open = None
        if not torch.equal(device, generator_of(self._device).get_state()):
            place = self._step.stage, self._step.kind, self._step.micro_batch
            self.drawings.add(Drawing(*place, layer, self._begun[layer] - 1))
        if self._device.type != "cpu" and not torch.equal(host, torch.default_generator.get_state()):
            self.elsewhere.add("torch, on the CPU")


class Seeded(NamedTuple):
    """The state from which a layer draws in a graph, and the place that seeds it."""

    drawing: Drawing
    state: Any


class Draws:
    """The states from which the layers in a row's graphs draw.

    Args:
        seed: of the run.
        pipeline: whose row it is.
        seen: the drawings, as :class:`SeenDraws` has found them.
    """

    def __init__(self, device: torch.device, seed: int, pipeline: int, seen: Iterable[Drawing]) -> None:
        self._device, self._seed, self._pipeline = device, seed, pipeline
        self._seeded = [Seeded(drawing, devices.backend.random_state(device)) for drawing in sorted(seen)]
        # No graph knows it: a capture fails if a layer draws from it.
        self._nothing = devices.backend.random_state(device)
        # Of the step that is captured: states by layer and how often it has begun before.
        self._states: dict[tuple[int, int], Any] = {}
        self._begun: Counter[int] = Counter()

    def of(self, steps: Iterable[Step]) -> list[Seeded]:
        """Return the states from which layers draw in these steps."""
        places = {(step.stage, step.kind, step.micro_batch) for step in steps}
        return [one for one in self._seeded if one.drawing[:3] in places]

    @contextmanager
    def capturing(self, step: Step) -> Iterator[None]:
        """Make layers draw from their states in a step, which is captured inside the block."""
        self._states = {(of.layer, of.begun): state for of, state in self.of([step])}
        self._begun.clear()
        before = devices.backend.draw_from(self._device, self._nothing)
        watch_draws(self)
        try:
            yield
        finally:
            watch_draws(None)
            devices.backend.draw_from(self._device, before)

    def begin_layer(self, device: torch.device, key: int, number: int) -> None:
        devices.backend.draw_from(
            self._device, self._states.get((number, self._begun[number]), self._nothing)
        )
        self._begun[number] += 1

    def seed(self, work: Work, those: Iterable[Seeded]) -> None:
        """Seed states for a batch, before the graph that draws from them is launched."""
        for drawing, state in those:
            key = mix(self._seed, *work.place(self._pipeline, drawing.micro_batch))
            state.manual_seed(mix_more(key, drawing.layer))

    def check(self) -> None:
        """Refuse, after a launch, draws that no batch has made before the capture.

        Raises:
            StageError: there were such draws, of unknown seeds.
        """
        if self._nothing.get_offset():
            raise StageError(
                "CudaGraphs(): a layer draws random numbers in a captured batch that it has not drawn in the batches "
                "before: leave CudaGraphs out"
            )
