"""Who has contributed to the current round, and what the last contribution does.

With staleness 1, z_r being the reference before round r:

    in one process                        on ranks of a group
    replica 0  step, force(z_r) ──┐       step, finish round r-1, force(z_r), start all-reduce ──┐
    replica 1  step, force(z_r) ──┤       (the local steps of round r+1 run meanwhile)           │
                                  └ z_r+1 step, finish round r: wait for it, z_r+1 <─────────────┘

With staleness 0 in one process a replica may contribute a step that is still to be done
(:meth:`Rounds.contribute_later`):

    replica 0  gradients ready ──┐
    replica 1  gradients ready ──┴ all steps, z_r+1 and all pulls in one pass over memory
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Collection, Iterable, Sequence
from typing import Any, TypeAlias

import torch
import torch.distributed as dist

import avgpipe_ext
from avgpipe.elastic.flat import FlatBuffers, Layout
from avgpipe.elastic.replica import FusedUpdate, Replica, step_together
from avgpipe.rules import Elasticity

# Given z, writes a replica's update and applies the force that needs no other replica; returns counts of what was
# not finite.
Contribution: TypeAlias = Callable[[FlatBuffers], list[torch.Tensor]]


class Rounds:
    """The reference z, and the rounds of replicas that live in this process.

    ``remote`` ones do not: their updates are accepted. With an outer optimizer, minus the mean or sum of the updates is
    the gradient with which it steps z (Douillard et al. 2023).
    """

    rank = 0  # the replica that an optimizer is made for unless told

    def __init__(
        self,
        layout: Layout,
        parameters: Sequence[torch.Tensor],
        elasticity: Elasticity,
        outer: Callable[[list[torch.Tensor]], torch.optim.Optimizer] | None,
        remote: Collection[int] = (),
    ) -> None:
        self.layout, self.elasticity, self.remote = layout, elasticity, frozenset(remote)
        self.z = layout.zeros()
        self.tensors = self.z.tensors()
        for z, p in zip(self.tensors, parameters):
            z.copy_(p.to_dense() if p.is_sparse else p)
        self.on_cpu = all(device.type == "cpu" for _, device in layout.keys)
        self.outer = None if outer is None else _make_outer(outer, self.tensors)
        self._grads = None if outer is None else layout.zeros()
        self.replicas: dict[int, Replica] = {}
        self.updates: dict[int, FlatBuffers] = {}
        self.contributed: set[int] = set()  # to the current round
        self.contributions_per_round = elasticity.replicas
        self.contributions = 0  # in all
        # the rule of one replica without elasticity: z is x
        alone = elasticity.replicas == 1 and elasticity.alpha == 0 and outer is None
        self.follows = alone and elasticity.coefficients.from_step == 1
        self._dropped = 0
        self._bad_counts: torch.Tensor | None = None  # bad updates on an accelerator, not waited for yet
        self._waiting: dict[int, tuple[FusedUpdate, Callable[[], None]]] = {}  # see contribute_later
        self._lock = threading.Lock()

    @property
    def round(self) -> int:
        """Completed rounds; a round of the asynchronous rule is N contributions."""
        return self.contributions // self.contributions_per_round

    @property
    def dropped(self) -> int:
        if self._bad_counts is not None:
            self._dropped += int(self._bad_counts)
            self._bad_counts = None
        return self._dropped

    @property
    def joins(self) -> bool:
        """A round may be one pass over memory, once all replicas' gradients are there."""
        e, rule = self.elasticity, self.elasticity.coefficients
        plain = rule.from_step == 1 and rule.averages and e.period == 1 and self.outer is None
        return e.pulls_at_the_end and plain and not self.remote

    def update_of(self, i: int) -> FlatBuffers:
        if i not in self.updates:
            self.updates[i] = self.layout.zeros()
        return self.updates[i]

    def detach(self, i: int) -> None:
        self.finish()
        del self.replicas[i]

    def restore(self, contributions: int, pending: dict[int, list[torch.Tensor]], dropped: int) -> None:
        """Continue where others left off; ``pending``: updates of the current round, tensor by tensor."""
        self.contributed, self.contributions = set(pending), contributions
        self._dropped, self._bad_counts = dropped, None
        for update in self.updates.values():
            update.zero_()
        for i, values in pending.items():
            for mine, value in zip(self.update_of(i).tensors(), values):
                mine.copy_(value)

    def ready(self, i: int, finishes: bool) -> bool:
        """Whether replica i may step now; ``finishes``: with this step it would contribute again."""
        return i not in self.contributed or not (finishes or self.elasticity.pulls_at_the_end)

    def check(self, i: int, finishes: bool) -> None:
        """RuntimeError, before anything has changed, for a step that the rules do not allow now."""
        n = self.elasticity.replicas
        if not self.ready(i, finishes):
            missing = ", ".join(str(m) for m in range(n) if m not in self.contributed)
            raise RuntimeError(
                f"replica {i} would {'finish' if finishes else 'start'} round {self.round + 1} before round "
                f"{self.round} is complete: it still needs a step of replica {missing} "
                f"(step all {n} replicas in turn; opt.ready tells who may step)"
            )
        strangers = [m for m in range(n) if m not in self.replicas and m not in self.remote]
        if finishes and strangers and self.elasticity.pulls_at_the_end and len(self.contributed) == n - 1:
            raise RuntimeError(
                f"round {self.round} ends with a pull of all {n} replicas, but replica "
                f"{', '.join(map(str, strangers))} has no optimizer: make its ElasticAveraging first"
            )

    def contribute(self, i: int, contribution: Contribution | None = None) -> None:
        """Take in replica i, which has done the last local step of its round, or does it now in ``contribution``."""
        with self._lock, torch.no_grad():
            if self.follows:
                self._note(self._follow(self.replicas[i]))
                self.contributions += 1
                return
            self._run(i, contribution or self.replicas[i].average)
            self._count(i)

    def accept(self, i: int, update: Sequence[torch.Tensor]) -> None:
        """Take in the update of the remote replica i, one flat tensor per buffer of the layout."""
        with self._lock, torch.no_grad():
            for mine, told in zip(self.update_of(i).flats, update, strict=True):
                mine.copy_(told)
            self._count(i)

    def contribute_later(self, i: int, update: FusedUpdate, done: Callable[[], None]) -> None:
        """Take in replica i, whose step is done with those of the others, or by :meth:`complete` before.

        Only if ``joins``. ``done`` is called when the gradients are needed no longer.
        """
        with self._lock, torch.no_grad():
            self._waiting[i] = update, done
            self._count(i)

    def complete(self, i: int) -> None:
        """Do now what replica i has left for later, if anything."""
        if i in self._waiting:
            with self._lock, torch.no_grad():
                self._run_waiting(i)

    def finish(self) -> None:
        """Wait for what is in flight, do what has been left for later."""
        for i in sorted(self._waiting):
            self.complete(i)

    def _run_waiting(self, i: int) -> None:
        update, done = self._waiting.pop(i)
        self._run(i, update)
        done()

    def _run(self, i: int, contribution: Contribution) -> None:
        if self._note(contribution(self.z)):
            self.updates[i].zero_()

    def _count(self, i: int) -> None:
        """Replica i has contributed; the last one completes the round."""
        self.contributions += 1
        if self.elasticity.asynchronous:
            self._apply([self.updates[i]])
            return
        self.contributed.add(i)
        if len(self.contributed) == self.elasticity.replicas:
            if not self._do_whole_round():
                self._complete_round()
            self.contributed.clear()

    def _complete_round(self) -> None:
        for i in sorted(self._waiting):
            self._run_waiting(i)
        # In replica order, whoever came last: the sum must not depend on timing.
        self._apply(self.updates[i] for i in range(self.elasticity.replicas))
        if self.elasticity.pulls_at_the_end:
            for _, replica in sorted(self.replicas.items()):
                replica.pull(self.z)

    def _do_whole_round(self) -> bool:
        """All steps, the move of z and all pulls in one pass; False, with nothing done, if that cannot be."""
        n = self.elasticity.replicas
        if len(self._waiting) < n:
            return False
        updates = [self._waiting[i][0] for i in range(n)]
        counts = step_together(updates)
        if counts is None:
            return False
        if self._note(counts):  # in at least one replica: the others that are bad are counted here
            self._dropped += max(0, sum(not update.is_finite() for update in updates) - 1)
        for i in range(n):
            self._waiting.pop(i)[1]()
        return True

    def _apply(self, updates: Iterable[FlatBuffers]) -> None:
        """Move z by ``updates``, in the order given. They stay as they are: the next round overwrites them."""
        scale = self.elasticity.scale
        target, scale = (self.z, scale) if self._grads is None else (self._grads, -scale)
        for flat, us in zip(target.flats, zip(*(update.flats for update in updates))):
            # Leaves out each element that would make z not finite; on an accelerator the only check there is.
            avgpipe_ext.reference_apply_(flat, list(us), scale, zero=False, check_finite=True)
        if self.outer is None or self._grads is None:
            return
        for z, grad in zip(self.tensors, self._grads.tensors()):
            z.grad = grad
        try:
            self.outer.step()
        finally:
            for z in self.tensors:
                z.grad = None
            self._grads.zero_()

    def _follow(self, replica: Replica) -> list[torch.Tensor]:
        """z = x, the rule of one replica without elasticity; z stays as it was if x is not finite.

        On an accelerator, which is not waited for, only the bad elements of x are left out. Returns counts of
        what was not finite, all zero if nothing.
        """
        replica.load()
        pairs = [pair for pair in zip(self.z.flats, replica.x.flats) if pair[0].numel()]
        if not self.on_cpu:
            finite = [x.isfinite() for _, x in pairs]
            for (z, x), good in zip(pairs, finite):
                z.copy_(torch.where(good, x, z))
            return [good.logical_not().sum() for good in finite]
        norms = torch._foreach_norm([x for _, x in pairs], float("inf")) if pairs else []
        bad = [~norm.isfinite() for norm in norms]
        if not any(map(bool, bad)):
            for z, x in pairs:
                z.copy_(x)
        return bad

    def _note(self, counts: list[torch.Tensor]) -> bool:
        """Count an update with values that are not finite; whether it is one, if known without waiting."""
        if self.on_cpu:
            bad = any(map(bool, counts))
            self._dropped += bad
            return bad
        if counts:
            device = counts[0].device
            one = torch.stack([c.to(device) for c in counts]).any().long()
            if self._bad_counts is None:
                self._bad_counts = one
            else:
                # in place: replicas on streams of their own must not free each other's sum
                self._bad_counts += one
        return False


class GroupRounds(Rounds):
    """The rounds of replicas that live one on each rank of a process group; this rank's is ``rank``."""

    def __init__(
        self,
        layout: Layout,
        parameters: Sequence[torch.Tensor],
        elasticity: Elasticity,
        outer: Callable[[list[torch.Tensor]], torch.optim.Optimizer] | None,
        group: dist.ProcessGroup,
    ) -> None:
        super().__init__(layout, parameters, elasticity, outer, range(elasticity.replicas))
        self.group, self.rank = group, dist.get_rank(group)
        self.contributions_per_round = 1  # of this process
        self._works: list[dist.Work] = []
        for flat in self.z.flats:  # one z for all, whatever the ranks' initial weights
            dist.broadcast(flat, group_src=0, group=group)

    @property
    def round(self) -> int:
        return self.contributions - bool(self._works)

    def ready(self, i: int, finishes: bool) -> bool:
        return True  # a step waits for the others instead

    def contribute(self, i: int, contribution: Contribution | None = None) -> None:
        self.finish()  # z of this round: all rounds before it
        super().contribute(i, contribution)

    def finish(self) -> None:
        if self._works:
            for work in self._works:
                work.wait()
            self._works = []
            with torch.no_grad():
                self._apply([self.updates[self.rank]])

    def _count(self, i: int) -> None:
        update = self.updates[i]
        if not self.on_cpu:  # else one rank's bad element would become everybody's
            for flat in update.flats:
                flat.nan_to_num_(nan=0.0, posinf=0.0, neginf=0.0)
        works = [dist.all_reduce(flat, group=self.group, async_op=True) for flat in update.flats]
        self._works = [work for work in works if work is not None]
        self.contributions += 1
        if self.elasticity.staleness == 0:
            self.finish()
            if self.elasticity.pulls_at_the_end:
                self.replicas[i].pull(self.z)


def _make_outer(
    outer: Callable[[list[torch.Tensor]], Any], tensors: list[torch.Tensor]
) -> torch.optim.Optimizer:
    if isinstance(outer, torch.optim.Optimizer) or not callable(outer):
        raise TypeError(
            f"outer must be a function from parameters to an optimizer, such as "
            f"lambda params: torch.optim.SGD(params, lr=0.7, momentum=0.9, nesterov=True), "
            f"not {type(outer).__name__}"
        )
    made = outer(tensors)
    if not isinstance(made, torch.optim.Optimizer):
        raise TypeError(f"outer must return a torch.optim.Optimizer, not {type(made).__name__}")
    if {id(p) for group in made.param_groups for p in group["params"]} - {id(t) for t in tensors}:
        raise ValueError("outer must build its optimizer over the tensors it is called with, not over others")
    return made
