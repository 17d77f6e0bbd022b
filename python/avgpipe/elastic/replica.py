"""One replica's weights and the buffers that its part of a round needs."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch.autograd.graph import increment_version

import avgpipe_ext
from avgpipe.elastic.flat import FlatBuffers, Layout, rehome
from avgpipe.rules import Elasticity


class Replica:
    """The weights ``x`` of one replica, its update in the current round, and x when the round began.

    The tensors become views of flat buffers, with which the operators work. Where that cannot or shall not be, ``x`` is
    a copy: :meth:`load` fills it, :meth:`store` writes it back.

    Attributes:
        tensors: In the order of the reference's layout.
        not_flat: Why the tensors stay where they are; None if they are views of ``x``.
        update: What it tells the reference; None where z follows this replica.
        remembers: The rule needs x from the beginning of a round, so it is kept.
        before: That x, from the first :meth:`begin` on: a pass that steps and averages at once does without.
    """

    def __init__(
        self,
        layout: Layout,
        tensors: Sequence[torch.Tensor],
        elasticity: Elasticity,
        update: FlatBuffers | None,
        optimizer: torch.optim.Optimizer,
        flat: bool,
        applied: set[int],
    ) -> None:
        """``applied``: ids of the tensors that are z for now."""
        self.tensors, self.elasticity, self.update = list(tensors), elasticity, update
        home = rehome(layout, self.tensors, optimizer) if flat else "flat=False"
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
        """Make ``x`` what the tensors are."""
        if self.not_flat is not None:
            if self._applied and any(id(t) in self._applied for t in self.tensors):
                raise RuntimeError(
                    "the model holds the reference's weights: leave reference.applied_to first"
                )
            for view, t in zip(self._views, self.tensors):
                view.copy_(t.to_dense() if t.is_sparse else t)
        elif list(map(torch.Tensor.data_ptr, self.tensors)) != self._pointers:
            for t, view, pointer in zip(self.tensors, self._views, self._pointers):
                if t.data_ptr() != pointer and id(t) not in self._applied:  # as by an assignment to its data
                    t.data = view.copy_(t)

    def store(self) -> None:
        """Make the tensors what ``x`` is."""
        if self.not_flat is None:
            increment_version(self.tensors)  # so that a backward pass that needs the old values fails
            return
        for view, t in zip(self._views, self.tensors):
            t.copy_(view.to_sparse() if t.is_sparse else view)

    @torch.no_grad()
    def begin(self) -> FlatBuffers:
        """Remember x at the beginning of a round; returns the memory."""
        if self.before is None:
            self.before = self.x.layout.zeros()
        self.load()
        torch._foreach_copy_(self.before.flats, self.x.flats)
        return self.before

    def average(self, z: FlatBuffers) -> list[torch.Tensor]:
        """Do the replica's own part of a round after its step.

        It writes its update, and applies the force that needs no other replica. Returns one count per buffer of the
        non-finite values that the operators met.
        """
        assert self.update is not None, "z follows this replica; it has no update"
        self.load()
        alpha, staleness = self.elasticity.force
        options = self.elasticity.shares | {"accumulate": False, "check_finite": True}
        if self.remembers:
            assert self.before is not None, "a round without beginning"
            rows = zip(self.x.flats, self.before.flats, z.flats, self.update.flats)
            counts = [avgpipe_ext.elastic_step_(*row, alpha, staleness, **options) for row in rows]
        else:
            del options["from_step"]
            moved = zip(self.x.flats, z.flats, self.update.flats)
            counts = [avgpipe_ext.easgd_step_(*row, alpha, **options) for row in moved]
        self.store()
        return counts

    def pull(self, z: FlatBuffers) -> None:
        """Move x by alpha (z - x)."""
        self.load()
        for x, target in zip(self.x.flats, z.flats):
            avgpipe_ext.elastic_pull_(x, target, self.elasticity.alpha)
        self.store()
