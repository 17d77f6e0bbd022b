"""The optimizer that steps the reference: of the replicas' gradients, or of the mean of their steps."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch

import avgpipe_ext
from avgpipe.elastic.flat import FlatBuffers, Region
from avgpipe.elastic.replica import region_of

# From tensors to an optimizer of them.
Outer = Callable[[list[torch.Tensor]], torch.optim.Optimizer]


class OuterSteps:
    """The steps of a reference by an optimizer of its own.

    Args:
        make: Makes the optimizer of z's tensors, or of views of them.
        z: The reference in flat buffers.
        tensors: Its tensors, of which the optimizer is made.

    Attributes:
        optimizer: What was made.
        places: Its parameters, with their places in z.
        published: By replica, the places of its published gradients, if all replicas share the optimizer.
    """

    def __init__(self, make: Outer, z: FlatBuffers, tensors: list[torch.Tensor]) -> None:
        self.optimizer = _made(make, tensors)
        self.places = _places_in(z, self.optimizer)
        self.published: dict[int, set[Region]] = {}
        self._grads = z.layout.zeros()

    def move(self, updates: Sequence[list[torch.Tensor]], scale: float) -> None:
        """Step with ``-scale`` times the sum of the updates as the gradient."""
        for flat, us in zip(self._grads.flats, zip(*updates)):
            avgpipe_ext.reference_apply_(flat, list(us), -scale, zero=False, check_finite=True)
        there = set().union(*self.published.values())
        for z, region in self.places:
            has_gradient = region in there or not self.published
            z.grad = region.view(self._grads.flats) if has_gradient else None
        try:
            self.optimizer.step()
        finally:
            for z, _ in self.places:
                z.grad = None
            self._grads.zero_()

    def without_gradient(self, replica: int) -> list[int]:
        """Return the numbers of the optimizer's parameters without a gradient from a replica."""
        there = self.published.get(replica)
        return (
            [] if there is None else [n for n, (_, region) in enumerate(self.places) if region not in there]
        )

    def set_without(self, without: Mapping[int, Sequence[int]]) -> None:
        """Set what the replicas of a round have published, by the results of :meth:`without_gradient`."""
        for i, numbers in without.items() if self.places else ():
            self.published[i] = {region for n, (_, region) in enumerate(self.places) if n not in numbers}
        self.published = {i: self.published[i] for i in without if i in self.published}


def _places_in(z: FlatBuffers, outer: torch.optim.Optimizer) -> list[tuple[torch.Tensor, Region]]:
    """Return the parameters of an outer optimizer with their places in z, of the same sizes."""
    whole = {t.data_ptr(): region for t, region in zip(z.tensors(), z.layout.regions)}
    found = []
    for p in (p for group in outer.param_groups for p in group["params"] if p.numel()):
        region = region_of(p, z.flats) or whole.get(p.data_ptr())
        if region is None:
            raise ValueError(
                "outer must build its optimizer over the tensors it is called with, not over others"
            )
        found.append((p, region))
    return found


def _made(outer: Callable[[list[torch.Tensor]], Any], tensors: list[torch.Tensor]) -> torch.optim.Optimizer:
    if isinstance(outer, torch.optim.Optimizer) or not callable(outer):
        raise TypeError(
            f"outer must be a function from parameters to an optimizer, such as "
            f"lambda params: torch.optim.SGD(params, lr=0.7, momentum=0.9, nesterov=True), "
            f"not {type(outer).__name__}"
        )
    made = outer(tensors)
    if not isinstance(made, torch.optim.Optimizer):
        raise TypeError(f"outer must return a torch.optim.Optimizer, not {type(made).__name__}")
    return made
