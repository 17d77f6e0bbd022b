"""Isolated pipelines without processes: all in one thread, in an order that a test decides.

Members, mailboxes and workers are stand-ins. What decides who trains on what, and what a step adds to the reference, is
the product's: ``TurnFeed``, ``Turns``, ``Reference`` and ``ElasticAveraging``.
"""

from __future__ import annotations

import copy
import random
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from itertools import count
from types import SimpleNamespace
from typing import Any, NamedTuple

import torch
from torch import nn

from avgpipe import Plan
from avgpipe.elastic.flat import Arena
from avgpipe.elastic.optimizer import ElasticAveraging
from avgpipe.elastic.reference import Reference
from avgpipe.fault.exchange import Published
from avgpipe.fault.paces import SharesByPace
from avgpipe.fault.roster import Roster, Term
from avgpipe.fault.turn_feed import Counts, TurnFeed
from avgpipe.fault.turns import Turns
from avgpipe.model.batch import SAMPLES_FIRST
from avgpipe.runtime.compute import Work
from avgpipe.runtime.feed import Prefetch

Batch = tuple[torch.Tensor, torch.Tensor]


class Odometer(nn.Module):
    """A weight for each sample; a loss that adds up outputs moves it by the factor that the sample is trained with."""

    def __init__(self, samples: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.zeros(samples, dtype=torch.float64))

    def forward(self, numbers: torch.Tensor) -> torch.Tensor:
        return self.weight[numbers]


class Here:
    """Pipelines that all train an :class:`Odometer` on ``batches``, and that a test lets leave and join.

    Args:
        batches: numbers of samples, and targets.
        given: whether they are given to ``step``, one by one; else to ``train``.
        paces: of a pipeline, by its number.
        loss_fn: of the odometer's outputs and the targets.
        makes: the optimizer of parameters.

    Attributes:
        living: the pipelines that are not lost.
        turn: the first step that has not ended.
        sizes: for each step that has ended, by pipeline that counts, how many micro-batches it had.
    """

    def __init__(
        self,
        plan: Plan,
        batches: Sequence[Batch],
        loss_fn: Any,
        makes: Callable[[Any], torch.optim.Optimizer] = lambda params: torch.optim.SGD(params, lr=1.0),
        loss_weight: Any = None,
        given: bool = False,
        paces: Callable[[int], SharesByPace | None] = lambda pipeline: None,
    ) -> None:
        self.plan, self.batches, self.makes, self.given = plan, batches, makes, given
        self.paces = paces
        self.model = Odometer(1 + max(int(numbers.max()) for numbers, _ in batches))
        self.options = SimpleNamespace(
            accumulate=1,
            batch_dims=SAMPLES_FIRST,
            loss_fn=loss_fn,
            loss_weight=loss_weight,
            loss_modes=None,
            cuda_graphs=False,
            sums_loss=getattr(loss_fn, "reduction", "mean") == "sum",
            skips=False,
        )
        self.roster, self.living, self.turn = Roster(), dict[int, One](), 0
        self.published: dict[tuple[int, int], tuple[Any, list[torch.Tensor]]] = {}  # by step and pipeline
        self.sizes: list[dict[int, int]] = []
        self._numbers, self._clean = count(), 0
        for pipeline in range(plan.pipelines):
            self._enter(pipeline, 0, None)

    # ---- members -----------------------------------------------------------------------------------------------------

    @property
    def training(self) -> list[int]:
        """The pipelines that have joined."""
        return [i for i, one in self.living.items() if one.first <= self.turn]

    @property
    def begun(self) -> int:
        return max(one.membership.begun for one in self.living.values())

    def join(self, pipeline: int) -> None:
        """Let a pipeline join from the first step that none has begun, after those for what others have lost."""
        period = self.plan.period
        self._enter(pipeline, -(-max(self.begun, self._clean) // period) * period, min(self.training))

    def _enter(self, pipeline: int, first: int, donor: int | None) -> None:
        self.roster.enter(Term(pipeline, next(self._numbers), first, donor))
        self.living[pipeline] = One(self, pipeline, first, donor is not None)

    def lose(self, pipeline: int, leaves: bool = False) -> list[int]:
        """Lose a pipeline, or have it leave; return it, and those that joined too late to know what it has lost."""
        one = self.living.pop(pipeline)
        begun = max(self.begun, one.membership.begun)
        term = self.roster.leave(pipeline, one.published, begun, was_lost=not leaves)
        lost = term.end - term.published // self.plan.period * self.plan.period
        self._clean = max(self._clean, begun) + lost
        late = [i for i, other in self.living.items() if term.published < other.first < self._clean]
        return [pipeline, *(gone for other in late if lost for gone in self.lose(other))]

    # ---- steps -------------------------------------------------------------------------------------------------------

    def begin(self, pipeline: int, most: int = 2) -> None:
        """Let a pipeline begin steps until it has ``most`` in flight."""
        one = self.living[pipeline]
        while one.first <= self.turn and one.in_flight < most and one.begin():
            pass

    def publish(self, pipeline: int) -> None:
        """Let a pipeline compute and publish the oldest step."""
        one = self.living[pipeline]
        self.begin(pipeline, 1)
        if one.in_flight and one.published == self.turn:
            one.compute()

    def end(self) -> bool:
        """End the oldest step in every pipeline; False if there is none."""
        there = self.training
        for i in there:
            self.publish(i)
        if not any(self.living[i].in_flight for i in there):
            return False
        counting = list(self.roster.counting(self.turn))
        values, tensors = zip(*(self.published[self.turn, i] for i in counting))
        self.sizes.append({i: v["part"][2] for i, v in zip(counting, values) if v["part"] is not None})
        for i in there:
            updates = [list(of) for value, of in zip(values, tensors) if value["has_update"]]
            self.living[i].finish(Published(counting, list(values), updates, [[]] * len(counting)))
        self.turn += 1
        return True

    def run_drawn(self, draw: random.Random, until: int, losses: float) -> None:
        """Train to the end; until a step pipelines are lost with a probability for each step, and join again.

        Each may leave before or after it has published the oldest step, with one step or two in flight.
        """
        absent: list[int] = []
        while self.turn < until:
            for i in self.living:
                self.begin(i, draw.choice([1, 2]))
            if len(self.training) > 1 and draw.random() < losses:
                lost = draw.choice(self.training)
                if draw.random() < 0.5:
                    self.publish(lost)
                absent += self.lose(lost)
            assert self.end()
            if absent and draw.random() < 0.3:
                self.join(absent.pop())
        self.run()

    def run(self, steps: int = 10**6) -> None:
        """Train for ``steps`` steps, or until the end, with two steps in flight."""
        for _ in range(steps):
            for i in self.living:
                self.begin(i)
            if not self.end():
                return

    def weights(self) -> torch.Tensor:
        """Return the reference, which is the same in all pipelines."""
        there = [self.living[i].reference.z.tensors()[0] for i in self.training]
        assert all(torch.equal(there[0], other) for other in there)
        return there[0]


class One:
    """A pipeline: its feed, and its only stage."""

    def __init__(self, here: Here, pipeline: int, first: int, is_late: bool) -> None:
        self.here, self.pipeline, self.first, self.is_late = here, pipeline, first, is_late
        self.published = first  # the next step
        self._works: list[Work] = []  # begun and not published
        self.membership = SimpleNamespace(
            batches=0,
            has_begun=is_late,
            is_late=is_late,
            begun=first,
            has_stopped=False,
            known=SimpleNamespace(roster=here.roster),
            stops_at=lambda turn: False,
            begin=self._begin_step,
        )
        self.mailbox = _Mailbox()
        self.exchange: Any = SimpleNamespace(
            membership=self.membership,
            turns={},
            key=lambda pipeline, place, turn: _Key(turn),
            publish=self._publish,
            forget_published=lambda: None,
            note_applied=lambda place, turn: None,
        )
        self._make_stage()
        self._make_feed()

    def _make_stage(self) -> None:
        plan, makes = self.here.plan, self.here.makes
        layers = copy.deepcopy(self.here.model)
        self.layers, self.arena = layers, Arena(layers.parameters())
        layout = self.arena.layout

        def outer(flats: list[torch.Tensor]) -> torch.optim.Optimizer:
            return makes([nn.Parameter(view) for view in layout.tensors(flats)])

        self.reference = Reference(
            self.arena.weights,
            plan.pipelines,
            alpha=plan.alpha,
            rule=plan.rule or "",
            staleness=plan.staleness,
            period=plan.period,
            outer=outer if plan.rule == "mean-gradient" else None,
            open=True,
        )
        weights = self.arena.weights
        inner = makes(self.arena.parameters)
        self.elastic = ElasticAveraging(inner, self.reference, self.pipeline, parameters=weights)
        trained: Any = _Trained(self.elastic)
        route: Any = SimpleNamespace(pipeline=self.pipeline, replica=0, publishes=False)
        states: Any = SimpleNamespace(hand_over=lambda place, turn: None)
        worker: Any = SimpleNamespace(
            trained={(0, self.pipeline): trained},
            references={0: self.reference},
            mailbox=self.mailbox,
            spec=SimpleNamespace(options=SimpleNamespace(verify_every=None)),
        )
        self.turns = Turns(worker, route, self.exchange, states)
        self.turns.resume(self.first)

    def _make_feed(self) -> None:
        here = self.here
        worker: Any = SimpleNamespace(
            placement=SimpleNamespace(pipelines=(self.pipeline,)),
            world=SimpleNamespace(rank=0),
            model=SimpleNamespace(normalises=False),
            running=_running,
            look=lambda batch, given: None,
            alike=SimpleNamespace(end=lambda batches: None),
            scheduler=SimpleNamespace(note_host=lambda *_: None, run_until=_run_until),
            lanes={0: SimpleNamespace(remote=self.turns, has_ended=lambda _: True, finish=lambda _: None)},
            held=[0],
            notice=SimpleNamespace(loss=lambda *_: None),
            pace=None,
            rows=[SimpleNamespace(start=self._works.append, drain=lambda: None)],
            device=torch.device("cpu"),
        )
        self._loader = Prefetch(lambda pairs: None)
        if not here.given:
            self._loader.open(here.batches)
        options: Any = here.options
        spec = SimpleNamespace(running=here.plan, options=options)
        session: Any = SimpleNamespace(worker=worker, spec=spec, loader=self._loader, verification=None)
        self.feed = TurnFeed(session, self.exchange, self._enter, here.paces(self.pipeline))

    def _enter(self) -> Counts | None:
        """Begin with the state of another that has ended all steps before the first one here."""
        if not self.is_late:
            return None
        donor = next(one for one in self.here.living.values() if one.first < self.first)
        for flats in (self.reference.z.flats, self.arena.weights):
            torch._foreach_copy_(list(flats), list(donor.reference.z.flats))
        return donor.feed.before(self.first)

    # ---- steps -------------------------------------------------------------------------------------------------------

    @property
    def in_flight(self) -> int:
        return self.membership.begun - max(self.first, self.here.turn)

    def _begin_step(self, is_first: bool) -> int:
        self.membership.begun += 1
        return int(self.membership.begun) - 1

    def begin(self) -> bool:
        """Begin a step; False if there is nothing to train on."""
        if not self.here.given:
            return self.feed.fetch()
        self.feed.enter()
        self.feed.resume()
        if self.feed.next_batch == len(self.here.batches):
            if self.feed._has_losses:
                self.feed._begin_turn()
                return True
            return False
        self.feed.begin([self.here.batches[self.feed.next_batch]], None)
        return True

    def compute(self) -> None:
        work = self._works.pop(0)
        assert work.batch == self.published == self.here.turn
        loss = torch.zeros((), dtype=torch.float64)
        if work.idles:
            if work.is_step:
                self.elastic.idle()
        else:
            loss = self._train_on(work)
        state: Any = SimpleNamespace(work=work, outcome=loss, metrics=None, norm=None, lr=None)
        self.turns.publish(state)
        self.turns.note_step()

    def _train_on(self, work: Work) -> torch.Tensor:
        """Train as the runtime does with these weights of micro-batches; return the loss."""
        weights, whole = work.weights, torch.zeros((), dtype=torch.float64)
        assert weights is not None
        for factor, numbers, targets in zip(weights.factors, work.inputs, work.targets, strict=True):
            if factor:
                loss = self.here.options.loss_fn(self.layers(numbers), targets)
                (loss * factor * weights.scale).backward()
                whole += factor * loss.detach()
        (p,) = self.arena.parameters
        p.grad = torch.zeros_like(p) if p.grad is None else p.grad * weights.shares
        self.elastic.step()
        self.arena.drop_grads()
        return whole

    def _publish(
        self,
        place: int,
        turn: int,
        values: Any,
        updates: Sequence[torch.Tensor],
        buffers: Sequence[torch.Tensor],
    ) -> None:
        self.here.published[turn, self.pipeline] = values, [tensor.clone() for tensor in updates]
        self.published = turn + 1

    def finish(self, published: Published) -> None:
        """Apply what counts in the oldest step, and end it."""
        turn = self.here.turn
        self.mailbox[turn] = published
        self.exchange.turns[turn] = dict(zip(published.pipelines, published.values))
        self.feed.finish_oldest()
        self.feed.results.clear()


class _Key(NamedTuple):
    batch: int


class _Mailbox(dict[int, Published]):
    def __contains__(self, key: object) -> bool:
        return super().__contains__(getattr(key, "batch", key))

    def take(self, key: _Key) -> Published:
        return self.pop(key.batch)


class _Trained:
    def __init__(self, elastic: ElasticAveraging) -> None:
        self.elastic = self.optimizer = elastic

    @property
    def reference_update(self) -> list[torch.Tensor] | None:
        return self.elastic.update

    def buffers(self) -> dict[str, torch.Tensor]:
        return {}


@contextmanager
def _running(*_: Any) -> Iterator[Any]:
    yield SimpleNamespace()


def _run_until(ended: Callable[[], bool], *_: Any) -> None:
    assert ended()
