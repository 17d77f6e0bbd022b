"""The reference model of elastic averaging, which replicas follow and move in rounds.

With staleness 1, z_r being the reference before round r:

    in one process                        on ranks of a group
    replica 0  step, force(z_r) ──┐       step, finish round r-1, force(z_r), start all-reduce ──┐
    replica 1  step, force(z_r) ──┤       (the local steps of round r+1 run meanwhile)           │
                                  └ z_r+1 step, finish round r: wait for it, z_r+1 <─────────────┘

With staleness 0 in one process a replica may contribute a step that is postponed
(:meth:`Reference._contribute_later`):

    replica 0  gradients ready ──┐
    replica 1  gradients ready ──┴ all steps, z_r+1 and all pulls in one pass over memory; with rule mean-gradient
                                   one step by all gradients, and copies of z_r+1
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any, TypeAlias

import torch
import torch.distributed as dist
from torch import nn

import avgpipe_ext
from avgpipe.device import has_streams
from avgpipe.elastic.flat import FlatBuffers, Layout
from avgpipe.elastic.matching import averaged, check_shapes, list_tensors, starting_alike
from avgpipe.elastic.outer import Outer, OuterSteps
from avgpipe.elastic.replica import Replica
from avgpipe.rules import Elasticity

if TYPE_CHECKING:
    from avgpipe.elastic.fused import FusedUpdate
    from avgpipe.elastic.group import GroupRounds
    from avgpipe.elastic.trial import WaitingGradient
    from avgpipe.elastic.versions import WeightAverage

# Given z, writes a replica's update and applies the force that needs no other replica; returns counts of
# nonfinite values.
Contribution: TypeAlias = Callable[[FlatBuffers], list[torch.Tensor]]


class Reference:
    """Weights z that N replicas are averaged with: their updates move it, and it pulls them together.

    z moves by the *mean* of N updates, so N replicas need a learning rate like that of an N-fold batch.

    With staleness 0 and 1 results do not depend on the order in which replicas step: updates are added in
    replica order. An update with infinities or NaN does not reach z; ``dropped_updates`` counts such updates
    (in a group: this rank's). On an accelerator, where the check would wait for the device, and in a pipeline's
    round that is one pass over memory (staleness 0), only the bad elements of such an update are left out;
    such a round on an accelerator counts once. Buffers of the model (such as running means) are not averaged.

    Args:
        parameters: The initial z, copied; their order is the order in which replicas give theirs. Parameters
            that are frozen now are held but take no part (parameters to be unfrozen later must be trainable
            here). Plain floating tensors take part, so z can be that of flat buffers. A replica may have
            another dtype than z, such as bfloat16 replicas of a float32 reference.
        replicas: N, all in this process, or one on each rank of ``group``.
        alpha: Elasticity a from 0 to 1; by default 1/N with rule avgpipe (0 for N = 1, where z simply follows x),
            0.9/N with rule easgd (also for N = 1, where z is then a moving average of x).
        rule: With d_i the step of replica i's optimizer in a round, and z' the reference after it,
            "avgpipe" (Chen et al., PPoPP 2023): z' = z + (1/N) sum_i d_i, and a force pulls each x_i + d_i;
            "easgd" (Zhang, Choromanska, LeCun 2015): e_i = a (x_i + d_i - z) leaves x_i, and z' = z + sum_i e_i;
            "mean-gradient": ``outer`` is the optimizer of all, with one state: it steps z by the mean of the replicas'
            gradients, and x_i becomes the result of its step from z with the gradient of replica i alone, or
            with staleness 0 z'. The replicas' own optimizers define the steps: they are of the same kind,
            their groups' settings (such as learning rates) count, and their states are the reference's.
        staleness: Of rule avgpipe,
            0: the force is a (z' - (x_i + d_i)), and the step that completes a round pulls all replicas;
            1: the force is a (z - x_i), both from the beginning of the round, so no replica waits;
            "asynchronous": as 1 with the z at hand, and an update is applied on arrival (not reproducible).
            Rule easgd uses z from before the round with 0 and 1 alike.
        period: Local steps tau in a round.
        warmup_rounds: Of rule mean-gradient, rounds at the beginning that have staleness 0 whatever ``staleness`` is:
            while gradients change fast, those of old weights cost most.
        outer: A function from parameters to an optimizer that steps z, with -(1/N) sum_i d_i (easgd: -sum_i e_i;
            mean-gradient: (1/N) sum_i g_i) as its gradient (Douillard et al. 2023); ``reference.outer`` is what it
            returned. Its parameters may be views of its arguments.
        group: Process group of the replicas: replica = rank in the group, N = its size. z is its first rank's.
            With staleness 1 the all-reduce runs during the next round's local steps. Time limits are the group's.
        remote: Replicas of other processes whose updates the caller transfers: :meth:`accept` adds
            one, when :meth:`ready` allows it.
        ema: An average of the flat z, updated with every move of z.
        open: Whether the caller decides which replicas have a part in a round, and ends each by
            :meth:`complete`. ``replicas`` is the usual number, for the default of alpha.
    """

    def __init__(
        self,
        parameters: Iterable[torch.Tensor],
        replicas: int,
        *,
        alpha: float | None = None,
        rule: str = "avgpipe",
        staleness: int | str = 0,
        period: int = 1,
        warmup_rounds: int = 0,
        outer: Outer | None = None,
        group: dist.ProcessGroup | None = None,
        remote: Collection[int] = (),
        ema: WeightAverage | None = None,
        open: bool = False,
    ) -> None:
        given = list_tensors("parameters", parameters)
        self.elasticity = e = Elasticity.checked(replicas, alpha, rule, staleness, period, warmup_rounds)
        e.warn_of_overshooting()
        self._ema = ema
        self.averaged = averaged(given)  # which of ``parameters`` take part in the averaging
        layout = Layout(given[i] for i in self.averaged)
        self._ranks = None if group is None else _rounds_of(group, e, layout, outer is not None)
        self._spans_ranks = group is not None and replicas > 1
        self._on_cpu = not any(has_streams(device) for _, device in layout.keys)
        self.z = layout.zeros()  # the weights that take part, in flat buffers
        zs = self.z.tensors()
        with torch.no_grad():
            for i, z in zip(self.averaged, zs):
                z.copy_(given[i])
            if self._spans_ranks and self._ranks is not None:
                self._ranks.share(self.z)
            places = dict(zip(self.averaged, zs))
            self.parameters = [places[i] if i in places else p.detach().clone() for i, p in enumerate(given)]
        if e.coefficients.tries and outer is None:
            raise ValueError(
                f"rule {rule!r} needs outer, the optimizer that steps the reference: a function such as "
                "lambda params: torch.optim.AdamW(params, lr=1e-3)"
            )
        self.outer_steps = None if outer is None else OuterSteps(outer, self.z, zs)
        self._remote = frozenset(range(replicas) if self._spans_ranks else remote)
        # the rule of one replica without elasticity: z is x
        self._follows = replicas == 1 and e.alpha == 0 and outer is None and e.coefficients.from_step == 1
        self._replicas: dict[int, Replica] = {}
        self._updates: dict[int, FlatBuffers] = {}
        self._contributed: set[int] = set()  # to the current round
        self._idle: set[int] = set()  # that have no part in the current round, and are pulled at its end
        self._contributions = 0  # of this process, in all
        self._is_open = open
        self._per_round = 1 if self._spans_ranks or open else replicas
        self._dropped = 0
        self._bad_counts: torch.Tensor | None = None  # bad updates on an accelerator, not read yet
        self._waiting: dict[
            int, tuple[FusedUpdate | WaitingGradient, Callable[[], None]]
        ] = {}  # see _contribute_later
        self._lock = threading.Lock()
        self._applied: set[int] = set()  # ids of the parameters that are z now, see applied_to

    @property
    def replicas(self) -> int:
        return self.elasticity.replicas

    @property
    def outer(self) -> torch.optim.Optimizer | None:
        """The optimizer that steps z; None if z moves by the mean of the replicas' steps."""
        return None if self.outer_steps is None else self.outer_steps.optimizer

    @property
    def _rank(self) -> int:
        """The default replica of an optimizer."""
        return 0 if self._ranks is None else self._ranks.rank

    @property
    def round(self) -> int:
        """Completed rounds. Asynchronous: contributions // N."""
        is_summing = self._ranks is not None and self._ranks.is_summing
        return self._contributions // self._per_round - is_summing

    @property
    def dropped_updates(self) -> int:
        """Updates left out because they were not finite; on an accelerator, in part."""
        if self._bad_counts is not None:
            self._dropped += int(self._bad_counts)
            self._bad_counts = None
        return self._dropped

    # ---- replicas ----------------------------------------------------------------------------------------------------
    def _replica_of(
        self, replica: int, tensors: list[torch.Tensor], optimizer: torch.optim.Optimizer
    ) -> Replica:
        """Make replica ``replica`` of ``tensors``, one for each of ``averaged``."""
        n = self.replicas
        is_number = isinstance(replica, int) and not isinstance(replica, bool) and replica >= 0
        if not is_number or not (replica < n or self._is_open):
            raise ValueError(
                f"replica must be from 0 to {n - 1} (the reference has {n} replicas), not {replica!r}"
            )
        if self._spans_ranks and replica != self._rank:
            raise ValueError(f"replica must be this process's rank in the group, {self._rank}, not {replica}")
        if replica in self._replicas:
            free = ", ".join(str(i) for i in range(n) if i not in self._replicas)
            raise ValueError(
                f"replica {replica} has an optimizer already; "
                f"{f'pass replica= one of {free}' if free else 'all have'}, or free it with "
                f"reference.release({replica})"
            )
        owners = {f"replica {i}": r.tensors for i, r in self._replicas.items()}
        for whose, theirs in {**owners, "the reference": self.parameters}.items():
            for t in starting_alike(tensors, theirs):
                raise ValueError(
                    f"replica {replica} shares a tensor of shape {tuple(t.shape)} with {whose}: "
                    f"give each replica its own copy, such as copy.deepcopy(model)"
                )
        update = None if self._follows else self._update_of(replica)
        return Replica(self.z.layout, tensors, self.elasticity, update, optimizer, self._applied)

    def release(self, replica: int) -> None:
        """Drop a replica's weights, so that another optimizer can be made for it between two rounds."""
        if replica in self._contributed:
            raise RuntimeError(
                f"replica {replica} is in the middle of round {self.round}: complete the round first"
            )
        if replica not in self._replicas:
            raise ValueError(f"replica {replica!r} has no optimizer; these have: {sorted(self._replicas)}")
        self._finish()
        del self._replicas[replica]

    @torch.no_grad()
    def align(self, replica: int, layout: Layout, regions: Sequence[int]) -> None:
        """Give parts of a replica z's values, now and at the start of its round; remove them from updates.

        Args:
            replica: The replica.
            layout: Of parameters in the tensors that the reference was built over, one for each of its buffers.
            regions: The indices of these parameters.
        """
        z, mine = layout.tensors(self.z.flats), self._replicas[replica]
        for buffers in (mine.x, mine.before):
            values = layout.tensors(buffers.flats) if buffers is not None else []
            for n in regions if values else ():
                values[n].copy_(z[n])
        for update in self._updates.values():  # published already in an unfinished round
            values = layout.tensors(update.flats)
            for n in regions:
                values[n].zero_()

    # ---- rounds ------------------------------------------------------------------------------------------------------
    def ready(self, replica: int) -> bool:
        """Whether :meth:`accept` may add an update of this remote replica: its round has begun."""
        return self._may_step(replica, True)

    def accept(self, replica: int, update: Sequence[torch.Tensor]) -> None:
        """Add a remote replica's update, one flat tensor per buffer, as from ``ElasticAveraging.update``."""
        with self._lock, torch.no_grad():
            for mine, theirs in zip(self._update_of(replica).flats, update, strict=True):
                mine.copy_(theirs)
            self._count(replica)

    def without_gradient(self, replica: int) -> list[int]:
        """Return the numbers of the outer optimizer's parameters without a gradient from a replica."""
        return [] if self.outer_steps is None else self.outer_steps.without_gradient(replica)

    def complete(
        self, updates: Sequence[Sequence[torch.Tensor]], without: Mapping[int, Sequence[int]], divisor: int
    ) -> None:
        """End a round of an open reference.

        Args:
            updates: Of the replicas with a part in it, in a global order, each as ``ElasticAveraging.update``; or their
                sum alone.
            without: By replica with a part in it, the result of its :meth:`without_gradient`.
            divisor: Of the sum of the updates, where the rule averages them.
        """
        with self._lock, torch.no_grad():
            if self.outer_steps is not None:
                self.outer_steps.set_without(without)
            scale = 1 / divisor if self.elasticity.coefficients.averages else 1.0
            self._move([list(update) for update in updates], scale)
            self._update_ema()
            self._contributions += 1
            self._contributed.clear()
            self._idle.clear()
            self._pull()

    @property
    def _joins(self) -> bool:
        """Whether a round may be one pass over memory, once all replicas have their gradients."""
        e, rule = self.elasticity, self.elasticity.coefficients
        plain = rule.from_step == 1 and rule.averages and e.period == 1 and self.outer is None
        return e.pulls_at_the_end(self.round) and plain and not self._remote

    @property
    def _joins_gradients(self) -> bool:
        """Whether this round may be one step by all gradients, once they are there: none is tried alone."""
        is_here = not (self._remote or self._spans_ranks or self._is_open)
        return self.elasticity.coefficients.tries and self.elasticity.synchronous(self.round) and is_here

    def _update_of(self, i: int) -> FlatBuffers:
        if i not in self._updates:
            self._updates[i] = self.z.layout.zeros()
        return self._updates[i]

    def _may_step(self, i: int, finishes: bool) -> bool:
        """Whether replica i may step now; ``finishes``: with this step it would contribute again."""
        waits = finishes or self.elasticity.pulls_at_the_end(self.round)
        return self._spans_ranks or not (waits and i in self._contributed)

    def _check_step(self, i: int, finishes: bool) -> None:
        """Raise RuntimeError, before anything has changed, for a step that the rules do not allow now."""
        n = self.replicas
        if not self._may_step(i, finishes):
            missing = ", ".join(str(m) for m in range(n) if m not in self._contributed)
            raise RuntimeError(
                f"replica {i} would {'finish' if finishes else 'start'} round {self.round + 1} before round "
                f"{self.round} is complete: it still needs a step of replica {missing} "
                f"(step all {n} replicas in turn; opt.ready is True when a step may run)"
            )

    def _contribute(self, i: int, contribution: Contribution | None = None) -> None:
        """Add replica i, whose last local step of the round is done, or happens now in ``contribution``."""
        self._await_ranks()  # z of this round: all rounds before it
        with self._lock, torch.no_grad():
            if self._follows:
                self._note(self._follow(self._replicas[i]))
                self._contributions += 1
                self._update_ema()
                return
            self._run(i, contribution or self._replicas[i].average)
            self._count(i)

    def _contribute_later(
        self, i: int, update: FusedUpdate | WaitingGradient, done: Callable[[], None]
    ) -> None:
        """Add replica i, whose step runs with those of the others, or in :meth:`_complete` before.

        Only if ``_joins`` or ``_joins_gradients``. ``done`` is called when the gradients are not needed any more.
        """
        with self._lock, torch.no_grad():
            self._waiting[i] = update, done
            self._count(i)

    def _complete(self, i: int) -> None:
        """Do now what replica i has postponed, if anything."""
        if i in self._waiting:
            with self._lock, torch.no_grad():
                self._run_waiting(i)

    def _finish(self) -> None:
        """Wait for all-reduces in flight, and do what has been postponed."""
        self._await_ranks()
        for i in sorted(self._waiting):
            self._complete(i)

    def _await_ranks(self) -> None:
        if self._ranks is not None and self._ranks.wait():
            self._apply([self._updates[self._rank]])

    def _run_waiting(self, i: int) -> None:
        update, done = self._waiting.pop(i)
        self._run(i, update)
        done()

    def _run(self, i: int, contribution: Contribution) -> None:
        if self._note(contribution(self.z)):
            self._updates[i].zero_()

    def _count(self, i: int) -> None:
        """Count a contribution of replica i; the last one completes the round."""
        if self._is_open:
            self._contributed.add(i)
            return
        self._contributions += 1
        if self.elasticity.asynchronous:
            self._apply([self._updates[i]])
        elif self._spans_ranks:
            self._reduce(self._updates[i])
        else:
            self._contributed.add(i)
            if len(self._contributed) == self.replicas:
                if not self._do_whole_round():
                    self._complete_round()
                self._contributed.clear()

    def _sit_out(self, i: int) -> None:
        """Note that replica i is past the current round, in which it has no part."""
        if self._is_open:
            self._idle.add(i)

    def _reduce(self, update: FlatBuffers) -> None:
        """Start summing the update over the ranks of the group; with staleness 0, also complete the round."""
        assert self._ranks is not None
        self._ranks.sum(update, self._on_cpu)
        if self.elasticity.synchronous(self.round):
            self._await_ranks()
            self._pull()

    def _complete_round(self) -> None:
        for i in sorted(self._waiting):
            self._run_waiting(i)
        # In replica order, whichever was last: the sum must not depend on timing.
        self._apply(self._updates[i] for i in range(self.replicas))
        self._pull()

    def _pull(self) -> None:
        """Pull the replicas if the round that has just been completed requires it."""
        if self.elasticity.pulls_at_the_end(self.round - 1):
            for _, replica in sorted(self._replicas.items()):
                replica.pull(self.z)

    def _do_whole_round(self) -> bool:
        """Do all steps, the move of z and all pulls in one pass; False, with nothing done, if impossible."""
        if len(self._waiting) < self.replicas:
            return False
        updates: list[Any] = [self._waiting[i][0] for i in range(self.replicas)]
        if self.outer_steps is not None:
            from avgpipe.elastic.trial import step_by_all

            counts = step_by_all(updates, self)
        else:
            from avgpipe.elastic.fused import step_together

            counts = step_together(updates)
        if counts is None:
            return False
        if self._note(counts):  # counts one bad update: further ones are counted here
            self._dropped += max(0, sum(not update.is_finite() for update in updates) - 1)
        if self.outer_steps is not None:
            self._pull()
        for i in range(self.replicas):
            self._waiting.pop(i)[1]()
        self._update_ema()
        return True

    def _update_ema(self) -> None:
        if self._ema is not None:
            self._ema.update(self.z.flats)

    def _apply(self, updates: Iterable[FlatBuffers]) -> None:
        self._move([update.flats for update in updates], self.elasticity.scale)
        self._update_ema()

    @torch.no_grad()
    def _move(self, updates: Sequence[list[torch.Tensor]], scale: float) -> None:
        """Move z by ``updates``, in the order given. They are not changed: the next round overwrites them."""
        if self.outer_steps is not None:
            self.outer_steps.move(updates, scale)
            return
        for flat, us in zip(self.z.flats, zip(*updates)):
            # Leaves out each element that would make z not finite; on an accelerator the only check there is.
            avgpipe_ext.reference_apply_(flat, list(us), scale, zero=False, check_finite=True)

    def _follow(self, replica: Replica) -> list[torch.Tensor]:
        """Set z = x, without bad elements: the rule of one replica without elasticity; return their counts."""
        replica.load()
        pairs = list(zip(self.z.flats, replica.x.flats))
        finite = [x.isfinite() for _, x in pairs]
        for (z, x), good in zip(pairs, finite):
            z.copy_(torch.where(good, x, z))
        return [good.logical_not().sum() for good in finite]

    def _note(self, counts: list[torch.Tensor]) -> bool:
        """Count an update with nonfinite values; return whether it is one, if known without waiting."""
        if self._on_cpu:
            bad = any(map(bool, counts))
            self._dropped += bad
            return bad
        if counts:
            device = counts[0].device
            is_bad = counts[0] != 0 if len(counts) == 1 else torch.stack([c.to(device) for c in counts]).any()
            if self._bad_counts is None:
                self._bad_counts = is_bad.long()
            else:
                # in place: replicas on different streams must not free each other's sum
                self._bad_counts += is_bad
        return False

    # ---- weights and state -------------------------------------------------------------------------------------------
    @contextmanager
    def applied_to(self, model: nn.Module | Iterable[torch.Tensor]) -> Iterator[None]:
        """Make the parameters of ``model`` (or the given tensors) z inside the block, and restore them after.

        No copies are made unless dtype or device differ. Training inside the block is refused. ValueError if
        number or shapes differ from the reference's.
        """
        self._finish()
        tensors = self._counterparts(model)
        own = [t.data for t in tensors]
        inside = {id(t) for t in tensors} - self._applied
        try:
            self._applied |= inside
            for t, z in zip(tensors, self.parameters):
                t.data = z.to(device=t.device, dtype=t.dtype)
            yield
        finally:
            for t, data in zip(tensors, own):
                t.data = data
            self._applied -= inside

    def is_applied_to(self, tensors: Iterable[torch.Tensor]) -> bool:
        return bool(self._applied) and any(id(t) in self._applied for t in tensors)

    def _counterparts(self, model: nn.Module | Iterable[torch.Tensor]) -> list[torch.Tensor]:
        tensors = list_tensors("model", model.parameters() if isinstance(model, nn.Module) else model)
        check_shapes("the model's parameters", tensors, self.parameters)
        return tensors

    def state_dict(self) -> dict[str, Any]:
        """Return z, the round, the updates of an unfinished round, and the outer optimizer's state.

        The tensors are the live ones, as in torch's state dicts: save or copy them before the next step.
        """
        self._finish()
        return {
            "parameters": list(self.parameters),
            "round": self.round,
            "arrivals_in_round": self._contributions % self._per_round,
            "pending": {i: self._updates[i].tensors() for i in sorted(self._contributed)},
            "dropped_updates": self.dropped_updates,
            "outer": None if self.outer is None else self.outer.state_dict(),
        }

    @torch.no_grad()
    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Load a :meth:`state_dict`, of this or another process.

        ``torch.load`` reads it with weights_only=True. ValueError if number or shapes of the parameters, the presence
        of an outer optimizer, or, in the middle of a round, the number of replicas differ; then nothing has changed.
        """
        self._finish()
        lacking = sorted({"parameters", "pending", "round", "arrivals_in_round", "outer"} - set(state))
        if lacking:
            raise ValueError(
                f"the state lacks {', '.join(lacking)}: pass what Reference.state_dict() returned"
            )
        values, pending = state["parameters"], state["pending"]
        check_shapes("the state's parameters", values, self.parameters)
        for i, update in pending.items():
            if not 0 <= i < self.replicas:
                raise ValueError(
                    f"the state holds an update of replica {i}, but there are {self.replicas} replicas"
                )
            check_shapes(f"the state's pending[{i}]", update, self.z.tensors())
        if (state["outer"] is None) != (self.outer is None):
            has, lacks = ("reference", "state") if self.outer is not None else ("state", "reference")
            raise ValueError(f"the {has} has an outer optimizer and the {lacks} has none: build both alike")
        if self.outer is not None:
            self.outer.load_state_dict(state["outer"])
        for mine, value in zip(self.parameters, values):
            mine.copy_(value)
        self._contributed = set(pending)
        self._contributions = state["round"] * self._per_round + state["arrivals_in_round"]
        self._dropped, self._bad_counts = state.get("dropped_updates", 0), None
        for flats in self._updates.values():
            flats.zero_()
        for i, update in pending.items():
            for mine, value in zip(self._update_of(i).tensors(), update):
                mine.copy_(value)

    def __repr__(self) -> str:
        e = self.elasticity
        return (
            f"Reference({len(self.parameters)} tensors, replicas={e.replicas}, alpha={e.alpha:.4g}, "
            f"rule={e.rule!r}, staleness={e.staleness!r}, period={e.period}, round={self.round})"
        )


def _rounds_of(
    group: dist.ProcessGroup, elasticity: Elasticity, layout: Layout, has_outer: bool
) -> GroupRounds:
    from avgpipe.elastic.group import GroupRounds  # only for replicas on several ranks

    return GroupRounds(group, elasticity, layout, has_outer)
