"""Weights that torch.distributed has sharded or replicated as DTensors: torch holds each rank's part."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, distribute_tensor

from avgpipe.elastic.flat import Arena, Layout


class ShardedArena(Arena):
    """Leaves ``parameters`` in place, as flat buffers hold no DTensors: ``weights`` are this rank's parts.

    Methods that need whole tensors, or all parts of one, are collectives over the meshes of the parameters:
    every rank of them calls these in the same order.
    """

    def __init__(self, parameters: Iterable[nn.Parameter]) -> None:
        self.parameters = list(parameters)
        self.weights = [_part(p.detach()) for p in self.parameters]
        self.layout = Layout(self.weights)

    @property
    def grads(self) -> list[torch.Tensor]:
        return [grad for grad in self.local_grads() if grad is not None]

    def settle_grads(self) -> None:
        """Reduce gradients that layers have left as partial sums over ranks to their parameters' form."""
        for p in self.parameters:
            if isinstance(p, DTensor) and isinstance(p.grad, DTensor) and p.grad.placements != p.placements:
                p.grad = p.grad.redistribute(placements=p.placements)

    def local_grads(self) -> list[torch.Tensor | None]:
        return [None if p.grad is None else _part(p.grad) for p in self.parameters]

    def put_local_grad(self, number: int, grad: torch.Tensor) -> None:
        p = self.parameters[number]
        if isinstance(p, DTensor):
            grad = DTensor.from_local(
                grad, p.device_mesh, p.placements, run_check=False, shape=p.shape, stride=p.stride()
            )
        p.grad = grad

    def squared_norm(self, tensors: Sequence[torch.Tensor]) -> torch.Tensor:
        """Return the squared norm of whole tensors: each part counts once, also if several ranks have it."""
        parts: dict[tuple[DeviceMesh | None, tuple[int, ...]], list[torch.Tensor]] = {}
        for t in tensors:
            parts.setdefault(_sharding(t), []).append(_part(t))
        total = None
        for (mesh, dims), held in parts.items():
            square = super().squared_norm(held)
            for dim in dims:
                assert mesh is not None
                dist.all_reduce(square, group=mesh.get_group(dim))
            total = square if total is None else total + square
        assert total is not None
        return total

    def tensors(self) -> list[torch.Tensor]:
        return [p.detach() for p in self.parameters]

    def local_tensors(self) -> list[torch.Tensor]:
        return self.weights

    def gathered(self, layout: Layout) -> list[torch.Tensor]:
        buffers = layout.zeros()
        for view, p in zip(buffers.tensors(), self.parameters):
            view.copy_(self.whole(p))
        return buffers.flats

    def whole(self, tensor: torch.Tensor) -> torch.Tensor:
        tensor = tensor.detach()
        return tensor.full_tensor() if isinstance(tensor, DTensor) else tensor

    def fill(self, target: torch.Tensor, value: torch.Tensor) -> None:
        if isinstance(target, DTensor):
            # Without a source no rank sends anything: each takes its own part.
            value = distribute_tensor(
                value.to(target.device), target.device_mesh, target.placements, src_data_rank=None
            )
        target.copy_(value)


def _part(tensor: torch.Tensor) -> torch.Tensor:
    """Return this rank's part of a tensor, in the same memory."""
    return tensor.to_local() if isinstance(tensor, DTensor) else tensor


def _sharding(tensor: torch.Tensor) -> tuple[DeviceMesh | None, tuple[int, ...]]:
    """Return the mesh of a tensor, and its dimensions along which ranks have different parts."""
    if not isinstance(tensor, DTensor):
        return None, ()
    dims = (dim for dim, placement in enumerate(tensor.placements) if not placement.is_replicate())
    return tensor.device_mesh, tuple(dims)
