"""The optimizer that steps the reference: of the replicas' gradients, or of the mean of their steps."""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence
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
        self._views = {region: region.view(self._grads.flats) for _, region in self.places}

    def move(self, updates: Sequence[list[torch.Tensor]], scale: float) -> None:
        """Step with ``-scale`` times the sum of the updates as the gradient."""
        for flat, us in zip(self._grads.flats, zip(*updates)):
            avgpipe_ext.reference_apply_(flat, list(us), -scale, zero=False, check_finite=True)
        there = set().union(*self.published.values()) if self.published else self._views.keys()
        self._step(there)

    def move_by(
        self,
        gradients: Sequence[Mapping[Region, torch.Tensor]],
        scale: float,
        waits: bool,
        found_inf: torch.Tensor | None = None,
    ) -> list[torch.Tensor] | None:
        """Step with ``scale`` times the sum of the replicas' gradients, given by place, in one pass over them.

        Returns counts of elements that were left out because they are not finite; None, with nothing done, if
        there are some and the caller ``waits`` to know. ``found_inf``: leaves the step out if it is 1, which only the
        device knows; then nothing is counted.
        """
        alike: dict[tuple[int, ...], list[Region]] = {}
        for _, region in self.places:
            members = tuple(i for i, own in enumerate(gradients) if region in own)
            alike.setdefault(members, []).append(region)
        there = {region for members, regions in alike.items() if members for region in regions}
        counts = [
            avgpipe_ext.reference_apply_(
                [self._views[region] for region in regions],
                [gradients[i][region] for i in members for region in regions],
                scale,
                zero=False,
                check_finite=True,
            )
            for members, regions in alike.items()
            if members
        ]
        if waits and any(map(bool, counts)):
            self._grads.zero_()
            return None
        self.published.clear()
        if found_inf is None:
            self._step(there)
            return counts
        from avgpipe.elastic.fused import skipping

        with skipping(self.optimizer, found_inf):
            self._step(there)
        return []

    def _step(self, there: Collection[Region]) -> None:
        """Step by the sums of gradients; ``there``: the places that have one."""
        for z, region in self.places:
            z.grad = self._views[region] if region in there else None
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
