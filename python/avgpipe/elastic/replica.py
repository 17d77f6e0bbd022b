"""One replica's weights and the buffers that its part of a round needs."""

from __future__ import annotations

from collections.abc import Sequence

import torch

import avgpipe_ext
from avgpipe.elastic.layout import Buffers, Entry, Layout, real
from avgpipe.rules import Elasticity


class Weights:
    """A replica's tensors in the form that the operators take: dtype, device and strides of the reference's.

    Most tensors have it already and are used as they are. The others (sparse, with gaps, another dtype or
    device than the reference's) go through a copy: :meth:`load` makes it, :meth:`store` writes it back.
    """

    def __init__(self, layout: Layout, tensors: Sequence[torch.Tensor]) -> None:
        self.layout = layout
        self.tensors = list(tensors)  # in the order of layout.entries
        self._slots = layout.by_buffer(zip(layout.entries, self.tensors))
        # decided once: what is asked at every step is only the list of tensors
        self._staged = [
            [not _fits(t, e, key) for e, t in slots] for slots, key in zip(self._slots, layout.keys)
        ]
        self.any_staged = any(map(any, self._staged))

    def load(self) -> list[list[torch.Tensor]]:
        """The current values, one list per buffer of the layout."""
        return [
            [_stage(t, e, key) if staged else real(t) for (e, t), staged in zip(slots, flags)]
            for slots, flags, key in zip(self._slots, self._staged, self.layout.keys)
        ]

    def store(self, loaded: list[list[torch.Tensor]]) -> None:
        """Write back what the operators changed; nothing to do for tensors that they changed in place."""
        if not self.any_staged:
            return
        for slots, flags, values in zip(self._slots, self._staged, loaded):
            for (e, t), staged, value in zip(slots, flags, values):
                if staged:
                    value = torch.view_as_complex(value) if e.is_complex else value
                    t.copy_(value.to_sparse() if t.is_sparse else value)


class Replica:
    """One replica: its weights x, its update in the current round, and x when the round began.

    ``before``, which only rule avgpipe needs, is there from the first :meth:`begin`: a pass that steps and
    averages at once does without.
    """

    def __init__(
        self, layout: Layout, tensors: Sequence[torch.Tensor], elasticity: Elasticity, update: Buffers | None
    ) -> None:
        self.x = Weights(layout, tensors)
        self.elasticity = elasticity
        self.update = update  # None: z follows this replica
        self.remembers = update is not None and elasticity.coefficients.from_step != 0
        self.before: Buffers | None = None

    @torch.no_grad()
    def begin(self) -> Buffers:
        """Remember x at the beginning of a round, for rule avgpipe; returns the memory."""
        if self.before is None:
            self.before = self.x.layout.zeros()
        for views, xs in zip(self.before.views, self.x.load()):
            torch._foreach_copy_(views, xs)
        return self.before

    def force(self, z: Buffers) -> list[torch.Tensor]:
        """The replica's own part of a round: write its update, apply the force that needs no other replica.

        Returns one count per buffer of the non-finite values that the operators met.
        """
        assert self.update is not None, "z follows this replica; it has no update"
        options = {"accumulate": False, "check_finite": True}
        loaded = self.x.load()
        counts = []
        for b, xs in enumerate(loaded):
            zs, updates = z.views[b], self.update.views[b]
            if not self.remembers:
                from_force = self.elasticity.coefficients.from_force
                count = avgpipe_ext.easgd_step_(
                    xs, zs, updates, self.elasticity.alpha, from_force=from_force, **options
                )
            else:
                assert self.before is not None, "a round without beginning"
                before = self.before.views[b]
                shares = self.elasticity.shares | options
                count = avgpipe_ext.elastic_step_(xs, before, zs, updates, *self.elasticity.force, **shares)
            counts.append(count)
        self.x.store(loaded)
        return counts

    def pull(self, z: Buffers) -> None:
        """x = x + alpha (z - x)."""
        loaded = self.x.load()
        for xs, zs in zip(loaded, z.views):
            avgpipe_ext.elastic_pull_(xs, zs, self.elasticity.alpha)
        self.x.store(loaded)


def _fits(t: torch.Tensor, e: Entry, key: tuple[torch.dtype, torch.device]) -> bool:
    if t.layout != torch.strided or t.is_complex() != e.is_complex:
        return False
    r = real(t)
    narrow = key[0] == torch.float32 and r.dtype in (torch.bfloat16, torch.float16)  # the operators widen it
    return (r.dtype == key[0] or narrow) and r.device == key[1] and tuple(r.stride()) == e.strides


def _stage(t: torch.Tensor, e: Entry, key: tuple[torch.dtype, torch.device]) -> torch.Tensor:
    dtype, device = key
    copy = torch.empty_strided(e.shape, e.strides, dtype=dtype, device=device)
    return copy.copy_(real(t.detach().to_dense() if t.is_sparse else t))
