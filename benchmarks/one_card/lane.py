"""A lane without avgpipe: a copy of a stage with a batch, an optimizer, a stream and a generator of its own."""

from __future__ import annotations

from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch

from benchmarks.one_card.neighbours import Act
from benchmarks.one_card.networks import StageModel


class Lane:
    """Gradients are added up in memory that stays; a step takes them and zeroes it.

    Graphs that run at once must not share the seed that a replay writes: each lane draws from its own generator.
    """

    def __init__(
        self, model: StageModel, micro_batches: int, autocast: torch.dtype | None, device: torch.device
    ) -> None:
        with device:
            self._layers = model.module().train()
        self._autocast, self.device = autocast, device
        self._on_cuda = device.type == "cuda"
        shape = (model.batch // micro_batches, *model.sample)
        self._inputs = [torch.randn(shape, device=device) for _ in range(micro_batches)]
        self._gradients = [torch.randn(shape, device=device) for _ in range(micro_batches)]
        for p in self._layers.parameters():
            p.grad = torch.zeros_like(p)
        on_device: dict[str, Any] = {"capturable": True, "fused": True} if self._on_cuda else {}
        self._optimizer = torch.optim.AdamW(self._layers.parameters(), lr=1e-4, **on_device)
        self._forwards: dict[int, tuple[torch.Tensor, torch.Tensor]] = {}
        self.stream: Any = torch.cuda.Stream(device) if self._on_cuda else None
        self._generator = self._default.clone_state() if self._on_cuda else None

    @property
    def _default(self) -> Any:
        return torch.cuda.default_generators[self.device.index or 0]

    @property
    def parameters(self) -> int:
        return sum(p.numel() for p in self._layers.parameters())

    @property
    def activation_elements(self) -> int:
        return self._inputs[0].numel()

    def on_stream(self) -> AbstractContextManager[Any]:
        return torch.cuda.stream(self.stream) if self._on_cuda else nullcontext()

    def run(self, act: Act) -> None:
        (self._forward if act.kind == "F" else self._backward)(act.micro_batch)

    def _forward(self, m: int) -> None:
        x = self._inputs[m].detach().requires_grad_()
        enabled = self._autocast is not None
        # What is cached during a capture would be read by later ones.
        with torch.autocast(self.device.type, self._autocast, enabled=enabled, cache_enabled=False):
            self._forwards[m] = x, self._layers(x)

    def _backward(self, m: int) -> None:
        _, y = self._forwards.pop(m)
        torch.autograd.backward(y, self._gradients[m].to(y.dtype))

    def step(self) -> None:
        self._optimizer.step()
        self._optimizer.zero_grad(set_to_none=False)

    def warm_up(self) -> None:
        """Let libraries choose kernels and allocate, which a capture cannot."""
        with self.on_stream():
            for _ in range(2):
                self._forward(0)
                self._backward(0)
            self.step()

    def capture(self, work: Any) -> Any:
        """Return a CUDA graph of what ``work`` enqueues on the lane's stream."""
        graph = torch.cuda.CUDAGraph()
        default = self._default
        before = default.graphsafe_get_state()
        graph.register_generator_state(self._generator)
        default.graphsafe_set_state(self._generator)
        try:
            with torch.cuda.graph(graph, stream=self.stream, capture_error_mode="thread_local"):
                work()
        finally:
            default.graphsafe_set_state(before)
        return graph
