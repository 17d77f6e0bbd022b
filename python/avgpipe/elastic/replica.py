"""One replica: its weights, and its part of a round."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, TypeAlias

import torch
from torch.autograd.graph import increment_version

import avgpipe_ext
from avgpipe.elastic.flat import FlatBuffers, Layout, Region, dense_strides, rehome
from avgpipe.rules import Elasticity

Tensors: TypeAlias = torch.Tensor | list[torch.Tensor]
Group: TypeAlias = dict[str, Any]

STATE = {  # what the optimizers keep of each parameter, beside Adam's step counter
    torch.optim.SGD: ("momentum_buffer",),
    torch.optim.Adam: ("exp_avg", "exp_avg_sq"),
    torch.optim.AdamW: ("exp_avg", "exp_avg_sq"),
}
CHECKED: dict[str, Any] = {"accumulate": False, "check_finite": True}  # updates are overwritten


class Replica:
    """The weights ``x`` of one replica, its update in the current round, and x when the round began.

    The tensors become views of flat buffers, which the operators use. If that is impossible,
    ``x`` is a copy: :meth:`load` fills it, :meth:`store` writes it back.

    Attributes:
        tensors: In the order of the reference's layout.
        not_flat: Why the tensors are not in flat buffers; None if they are views of ``x``.
        update: Its update of the reference; None if z follows this replica.
        remembers: Whether the rule needs x from the beginning of a round, so that it is kept.
        before: That x, from the first :meth:`begin` on: a pass that steps and averages at once does not need
            it.
    """

    def __init__(
        self,
        layout: Layout,
        tensors: Sequence[torch.Tensor],
        elasticity: Elasticity,
        update: FlatBuffers | None,
        optimizer: torch.optim.Optimizer,
        applied: set[int],
    ) -> None:
        """``applied``: ids of the tensors that are z at the moment."""
        self.tensors, self.elasticity, self.update = list(tensors), elasticity, update
        home = rehome(layout, self.tensors, optimizer)
        self.not_flat = home if isinstance(home, str) else None
        self.x = layout.zeros() if isinstance(home, str) else home
        self._views = self.x.tensors()
        self._pointers = [t.data_ptr() for t in self.tensors] if self.not_flat is None else []
        self._applied = applied
        needs_start = elasticity.coefficients.from_step != 0 or elasticity.force[1] == 1
        self.remembers = update is not None and needs_start
        self.before: FlatBuffers | None = None

    @torch.no_grad()
    def load(self) -> None:
        """Copy the tensors to ``x``, unless they are views of it."""
        if self.not_flat is not None:
            if self._applied and any(id(t) in self._applied for t in self.tensors):
                raise RuntimeError(
                    "the model holds the reference's weights: leave reference.applied_to first"
                )
            for view, t in zip(self._views, self.tensors):
                view.copy_(t)
        elif list(map(torch.Tensor.data_ptr, self.tensors)) != self._pointers:
            for t, view, pointer in zip(self.tensors, self._views, self._pointers):
                if t.data_ptr() != pointer and id(t) not in self._applied:  # after an assignment to its data
                    t.data = view.copy_(t)

    def store(self) -> None:
        """Copy ``x`` to the tensors, unless they are views of it."""
        if self.not_flat is None:
            increment_version(self.tensors)  # so that a backward pass that needs the old values fails
            return
        for view, t in zip(self._views, self.tensors):
            t.copy_(view)

    @torch.no_grad()
    def begin(self) -> FlatBuffers:
        """Keep x from the beginning of a round; return the memory."""
        if self.before is None:
            self.before = self.x.layout.zeros()
        self.load()
        torch._foreach_copy_(self.before.flats, self.x.flats)
        return self.before

    def average(self, z: FlatBuffers) -> list[torch.Tensor]:
        """Do the replica's own part of a round after its step.

        It writes its update, and applies the force that needs no other replica. Returns one count per buffer of the
        nonfinite values that the operators found.
        """
        assert self.update is not None, "z follows this replica; it has no update"
        self.load()
        if self.remembers:
            assert self.before is not None, "a round without beginning"
            rows = zip(self.x.flats, self.before.flats, z.flats, self.update.flats)
            options = self.elasticity.shares | CHECKED
            counts = [avgpipe_ext.elastic_step_(*row, *self.elasticity.force, **options) for row in rows]
        else:
            counts = [self.force(*row) for row in zip(self.x.flats, z.flats, self.update.flats)]
        self.store()
        return counts

    def force(self, x: Tensors, z: Tensors, update: Tensors) -> torch.Tensor:
        """Apply the rule without a step."""
        e = self.elasticity
        return avgpipe_ext.easgd_step_(
            x, z, update, e.force[0], from_force=e.coefficients.from_force, **CHECKED
        )

    def pull(self, z: FlatBuffers) -> None:
        """Move x by alpha (z - x)."""
        self.load()
        for x, target in zip(self.x.flats, z.flats):
            if self.elasticity.alpha == 1:
                x.copy_(target)
            else:
                avgpipe_ext.elastic_pull_(x, target, self.elasticity.alpha)
        self.store()


def region_of(p: torch.Tensor, flats: Sequence[torch.Tensor]) -> Region | None:
    """Return a parameter's place in flat buffers; None if it is no dense part of one, or has no elements."""
    if p.numel() == 0 or p.stride() != dense_strides(p):
        return None
    for b, flat in enumerate(flats):
        start, odd = divmod(p.data_ptr() - flat.data_ptr(), flat.element_size())
        is_inside = 0 <= start <= flat.numel() - p.numel() and not odd
        if is_inside and (p.dtype, p.device) == (flat.dtype, flat.device):
            return Region(b, start, tuple(p.shape), p.stride())
    return None


def same_strides(g: torch.Tensor, p: torch.Tensor) -> bool:
    """Whether strides are equal in all dimensions of more than one element."""
    mine, theirs = g.stride(), p.stride()
    return mine == theirs or all(a == b for size, a, b in zip(p.shape, mine, theirs) if size != 1)


def settings_of(optimizer: type, group: Group, *, first: bool = False) -> Group:
    """Return a parameter group's settings as the operators' options; ``first``: SGD's momentum becomes the gradient."""
    common = {name: float(group[name]) for name in ("lr", "weight_decay")} | {"maximize": group["maximize"]}
    if optimizer is torch.optim.SGD:
        momentum = {"mu": float(group["momentum"]), "dampening": float(group["dampening"])}
        return common | momentum | {"nesterov": group["nesterov"], "first_step": first}
    betas = {"beta1": float(group["betas"][0]), "beta2": float(group["betas"][1])}
    return common | betas | {"eps": float(group["eps"]), "decoupled": group["decoupled_weight_decay"]}
