"""Who has arrived in the current round, and what the last arrival does.

With staleness 1, z_r being the reference before round r:

    in one process                        on ranks of a group
    replica 0  step, force(z_r) ──┐       step, finish round r-1, force(z_r), start all-reduce ──┐
    replica 1  step, force(z_r) ──┤       (the local steps of round r+1 run meanwhile)           │
                                  └ z_r+1 step, finish round r: wait for it, z_r+1 <─────────────┘

With staleness 0 in one process a replica may arrive with its step still to be done (:meth:`Rounds.arrive_later`):

    replica 0  gradients ready ──┐
    replica 1  gradients ready ──┴ all steps, z_r+1 and all pulls in one pass over memory
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Collection, Sequence
from typing import TypeAlias

import torch
import torch.distributed as dist

from avgpipe.elastic import Buffers, Layout
from avgpipe.elastic.centre import Centre
from avgpipe.elastic.force import FusedForce, Whole
from avgpipe.elastic.replica import Replica
from avgpipe.rules import Elasticity

# Given z, writes a replica's update and applies the force that needs no other replica; returns counts of what was
# not finite.
Force: TypeAlias = Callable[[Buffers], list[torch.Tensor]]

# A step that is still to be done, and what to call once it needs the gradients no longer.
Waiting: TypeAlias = tuple[FusedForce, Callable[[], None]]


class Rounds:
    """The rounds of replicas that live in this process, but for those ``elsewhere``, whose updates are told."""

    def __init__(
        self, layout: Layout, centre: Centre, elasticity: Elasticity, elsewhere: Collection[int] = ()
    ) -> None:
        self.layout, self.centre, self.elasticity = layout, centre, elasticity
        self.elsewhere = frozenset(elsewhere)
        self.replicas: dict[int, Replica] = {}
        self.updates: dict[int, Buffers] = {}
        self.arrived: set[int] = set()
        self.arrivals_per_round = elasticity.replicas
        self.arrivals = 0  # arrivals in all
        e = elasticity
        self.follows = (
            e.coefficients.from_step == 1 and e.replicas == 1 and e.alpha == 0 and centre.outer is None
        )
        self._dropped = 0
        self._bad_counts: torch.Tensor | None = None  # bad updates on an accelerator, not waited for yet
        self._waiting: dict[int, Waiting] = {}  # of arrived ones, see arrive_later
        self._whole: Whole | None = None
        self._lock = threading.Lock()

    @property
    def round(self) -> int:
        """Completed rounds; a round of the asynchronous rule is N arrivals."""
        return self.arrivals // self.arrivals_per_round

    @property
    def dropped(self) -> int:
        if self._bad_counts is not None:
            self._dropped += int(self._bad_counts)
            self._bad_counts = None
        return self._dropped

    @dropped.setter
    def dropped(self, value: int) -> None:
        self._dropped, self._bad_counts = value, None

    def update_of(self, i: int) -> Buffers:
        if i not in self.updates:
            self.updates[i] = self.layout.zeros()
        return self.updates[i]

    def attach(self, i: int, tensors: list[torch.Tensor]) -> Replica:
        update = None if self.follows else self.update_of(i)
        self.replicas[i] = Replica(self.layout, tensors, self.elasticity, update)
        self._whole = None
        return self.replicas[i]

    def ready(self, i: int, finishes: bool) -> bool:
        """Whether replica i may step now; ``finishes``: with this step it would arrive again."""
        return i not in self.arrived or not (finishes or self.elasticity.pulls_at_the_end)

    def check(self, i: int, finishes: bool) -> None:
        """RuntimeError, before anything has changed, for a step that the rules do not allow now."""
        n = self.elasticity.replicas
        if not self.ready(i, finishes):
            missing = ", ".join(str(m) for m in range(n) if m not in self.arrived)
            raise RuntimeError(
                f"replica {i} would {'finish' if finishes else 'start'} round {self.round + 1} before round "
                f"{self.round} is complete: it still needs a step of replica {missing} "
                f"(step all {n} replicas in turn; opt.ready tells who may step)"
            )
        strangers = [m for m in range(n) if m not in self.replicas and m not in self.elsewhere]
        if finishes and strangers and self.elasticity.pulls_at_the_end and len(self.arrived) == n - 1:
            raise RuntimeError(
                f"round {self.round} ends with a pull of all {n} replicas, but replica "
                f"{', '.join(map(str, strangers))} has no optimizer: make its ElasticAveraging first"
            )

    def arrive(self, i: int, force: Force | None = None) -> None:
        """Replica i has done the last local step of its round, or does it now together with ``force``."""
        with self._lock, torch.no_grad():
            if self.follows:
                self._note(self.centre.follow(self.replicas[i].x))
                self.arrivals += 1
                return
            self._act(i, force or self.replicas[i].force)
            self._gather(i)

    @property
    def joins(self) -> bool:
        """A round may be one pass over memory, once all replicas' gradients are there."""
        e = self.elasticity
        return e.pulls_at_the_end and e.period == 1 and self.centre.outer is None and not self.elsewhere

    def accept(self, i: int, update: Sequence[torch.Tensor]) -> None:
        """Replica i, which is elsewhere, has arrived with this update, one flat tensor per buffer of the layout."""
        with self._lock, torch.no_grad():
            for mine, told in zip(self.update_of(i).flats, update, strict=True):
                mine.copy_(told)
            self._gather(i)

    def arrive_later(self, i: int, force: FusedForce, done: Callable[[], None]) -> None:
        """Replica i arrives, and ``force`` is done with those of the others, or by :meth:`complete` before.

        Only if ``joins``. ``done`` is called when the force needs the gradients no longer.
        """
        with self._lock, torch.no_grad():
            self._waiting[i] = force, done
            self._gather(i)

    def complete(self, i: int) -> None:
        """Do now what replica i has left for later, if anything."""
        if i in self._waiting:
            with self._lock, torch.no_grad():
                self._complete(i)

    def finish(self) -> None:
        """Wait for what is under way, do what has been left for later."""
        for i in sorted(self._waiting):
            self.complete(i)

    def _complete(self, i: int) -> None:
        force, done = self._waiting.pop(i)
        self._act(i, force)
        done()

    def _act(self, i: int, force: Force) -> None:
        if self._note(force(self.centre.z)):
            self.updates[i].zero_()

    def _gather(self, i: int) -> None:
        e = self.elasticity
        if e.asynchronous:
            self.centre.absorb([self.updates[i]])
            self.arrivals += 1
            return
        self.arrived.add(i)
        self.arrivals += 1
        if len(self.arrived) == e.replicas:
            if self._do_whole_round():
                self.arrived.clear()
                return
            for n in sorted(self._waiting):
                self._complete(n)
            # In replica order, whoever came last: the sum must not depend on timing.
            self.centre.absorb(self.updates[n] for n in range(e.replicas))
            self.arrived.clear()
            if e.pulls_at_the_end:
                for _, replica in sorted(self.replicas.items()):
                    replica.pull(self.centre.z)

    def _do_whole_round(self) -> bool:
        """All steps, the move of z and all pulls in one pass; False, with nothing done, if that cannot be."""
        n = self.elasticity.replicas
        if len(self._waiting) < n:
            return False
        forces = [self._waiting[i][0] for i in range(n)]
        if self._whole is None or not self._whole.serves(forces):
            self._whole = Whole([force.plan for force in forces])
        counts = self._whole.act(forces)
        if counts is None:
            return False
        if self._note(counts):  # in at least one replica: the others that are bad are counted here
            self._dropped += max(0, sum(not force.is_finite() for force in forces) - 1)
        for i in range(n):
            self._waiting.pop(i)[1]()
        return True

    def _note(self, counts: list[torch.Tensor]) -> bool:
        """Count an update with values that are not finite; whether it is one, if known without waiting."""
        if self.centre.on_cpu:
            bad = any(map(bool, counts))
            self._dropped += bad
            return bad
        if counts:
            device = counts[0].device
            one = torch.stack([c.to(device) for c in counts]).any().long()
            if self._bad_counts is None:
                self._bad_counts = one
            else:
                self._bad_counts += (
                    one  # in place: replicas on streams of their own must not free each other's sum
                )
        return False


class GroupRounds(Rounds):
    """The rounds of replicas that live one on each rank of a process group; this rank's is ``rank``."""

    def __init__(
        self, layout: Layout, centre: Centre, elasticity: Elasticity, group: dist.ProcessGroup
    ) -> None:
        super().__init__(layout, centre, elasticity)
        self.group = group
        self.rank = dist.get_rank(group)
        self.arrivals_per_round = 1  # of this process
        self._works: list[dist.Work] = []
        for flat in centre.z.flats:  # one z for all, whatever the ranks' initial weights
            dist.broadcast(flat, group_src=0, group=group)

    @property
    def round(self) -> int:
        return self.arrivals - bool(self._works)

    @property
    def joins(self) -> bool:
        return False  # the others are elsewhere

    def ready(self, i: int, finishes: bool) -> bool:
        return True  # a step waits for the others instead

    def arrive(self, i: int, force: Force | None = None) -> None:
        self.finish()  # z of this round: all rounds before it
        super().arrive(i, force)

    def finish(self) -> None:
        if self._works:
            for work in self._works:
                work.wait()
            self._works = []
            with torch.no_grad():
                self.centre.absorb([self.updates[self.rank]])

    def _gather(self, i: int) -> None:
        update = self.updates[i]
        if not self.centre.on_cpu:  # else one rank's bad element would become everybody's
            for flat in update.flats:
                flat.nan_to_num_(nan=0.0, posinf=0.0, neginf=0.0)
        works = [dist.all_reduce(flat, group=self.group, async_op=True) for flat in update.flats]
        self._works = [work for work in works if work is not None]
        self.arrivals += 1
        if self.elasticity.staleness == 0:
            self.finish()
            if self.elasticity.pulls_at_the_end:
                self.replicas[i].pull(self.centre.z)
