"""Isolated pipelines that come and go: the rules in float64, replica by replica, turn by turn."""

from __future__ import annotations

import copy
import math
import os
import random
import re
import signal
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from avgpipe import Audit, MovingAverage, Pipeline, Plan
from avgpipe.model.batch import sizes_of
from tests.isolated import Isolated, die
from tests.options import grouped
from tests.patience import limit
from tests.runtime.cases import assert_same_state, language_model, token_batches
from tests.runtime.test_shared_batch import OPTIMIZERS

LOSS = nn.CrossEntropyLoss()
BATCHES = 24


def train(
    K: int,
    options: dict[str, Any],
    optimizer: str,
    deaths: Any = (),
    waits_at: int | None = None,
    timeout_s: float = 20,
    late_seed: int = 0,
    each: int = BATCHES,
    decay: float = 1.0,
    late_decay: float | None = None,
    evaluates: bool = False,
    **others: Any,
) -> Any:
    """Results, and the states of the reference and of this pipeline.

    Args:
        deaths: (pipeline, life, rank, call, how): who dies in which of its lives, in which call of one of its layers;
            "another comes": in the first one in which it knows of another that comes with a later turn.
        waits_at: the batch at whose result all wait until a pipeline that died is back.
        late_seed: of the batches of who was not there at the beginning.
        each: batches of a loader, after which comes the next one.
        decay: factor that the loop sets on the learning rates after each result; ``late_decay``: of who was not there
            at the beginning.
        evaluates: whether the loop does before it sets them, which ends the steps in flight, and only every third time.
        others: options of the Pipeline.
    """
    pipeline, group, rank = (int(os.environ[n]) for n in ("AVGPIPE_PIPELINE", "AVGPIPE_GROUP", "RANK"))
    decay = decay if late_decay is None or group < options["pipelines"] else late_decay
    model, calls, made = language_model(), 0, list[Pipeline]()
    life = 0 if group < options["pipelines"] else group - options["pipelines"] + 1

    def another_comes() -> bool:
        exchange = made[0]._session.policy.exchange if made else None
        terms = exchange.membership.known.roster.terms if exchange is not None else []
        return any(term.donor is not None and term.first > exchange.next_turn for term in terms)

    def count(*_: Any) -> None:
        nonlocal calls
        calls += 1
        for of_pipeline, of_life, of_rank, call, how in deaths:
            if (of_pipeline in (None, pipeline), of_life, of_rank) == (True, life, rank) and (
                calls == call or (call == "another comes" and another_comes())
            ):
                ENDS[how]()

    for layer in model:
        layer.register_forward_pre_hook(count)
    plan = Plan(stages=K, isolate=True, **options)
    data = token_batches(BATCHES, 12, last=7, seed=late_seed if group >= options["pipelines"] else 0)
    make = OPTIMIZERS[optimizer]
    with Pipeline(model, plan, **grouped(loss_fn=LOSS, optimizer=make, timeout_s=timeout_s, **others)) as p:
        made.append(p)
        membership = p.launcher
        results = []
        if each < BATCHES:
            p.enter()
        while p.batches < BATCHES:
            for result in p.train(data[p.batches : each * (p.batches // each + 1)]):
                results.append((result.batch, result.pipeline, result.samples, result.loss))
                if not evaluates or (result.batch % 3 == 2 and p.evaluate(data[:1])):
                    for options_of_group in (
                        of for optimizer in p.optimizers for of in optimizer.param_groups
                    ):
                        options_of_group["lr"] *= decay
                if result.batch == waits_at:
                    with membership._lock:
                        assert membership._lock.wait_for(
                            lambda: any(term.donor is not None for term in membership.known.roster.terms),
                            limit(20),
                        )
        return results, p.state_dict(), p.state_dict(weights=pipeline)


def fail() -> None:
    raise ValueError("a layer that fails")


def hang() -> None:
    while True:
        time.sleep(1)


ENDS = {
    "killed": die,
    "stopped": lambda: os.kill(os.getpid(), signal.SIGSTOP),
    "raised": fail,
    "hung": hang,
}


def parts_of(samples: int, M: int) -> list[slice]:
    M = min(M, samples)
    sizes = [samples // M + (m < samples % M) for m in range(M)]
    ends = [sum(sizes[: m + 1]) for m in range(M)]
    return [slice(a, b) for a, b in zip([0, *ends], ends)]


class Emulation:
    """N replicas and their reference, turn by turn: who counts is told by the run's history."""

    def __init__(
        self,
        run: Isolated,
        options: dict[str, Any],
        optimizer: str,
        each: int = BATCHES,
        decay: float = 1,
        counts: Callable[[int, int, int], list[int]] = lambda _, members, parts: sizes_of(parts, members),
    ) -> None:
        """Train.

        Args:
            each: batches of a loader.
            decay: of the learning rate, with each turn.
            counts: of a turn, and numbers of members and micro-batches, how many of these each member has.
        """
        self.counts = counts
        self.decay, self.place = decay, 0  # in a period
        self.run, self.options, self.make = run, options, OPTIMIZERS[optimizer]
        self.is_shared = options.get("batch") != "per-pipeline"
        self.rule = options.get("rule", "mean-gradient" if self.is_shared else "avgpipe")
        self.reference = copy.deepcopy(language_model())
        self.outer = self.make(self.reference.parameters())
        self.replicas: dict[int, nn.Module] = {}
        self.optimizers: dict[int, torch.optim.Optimizer] = {}
        self.results: list[Any] = []
        data = token_batches(BATCHES, 12, last=7)
        line = [(j, x, y, parts_of(len(x), options["micro_batches"])) for j, (x, y) in enumerate(data)]
        loaders = [line[first : first + each] for first in range(0, BATCHES, each)]
        lost: list[Any] = []
        given: dict[int, dict[int, Any]] = {}
        turn = 0
        while True:
            self._enter(turn)
            lost += self._lost(given, turn)
            loaders = [loader for loader in loaders if loader]
            if not (lost or loaders):
                break
            source = lost or loaders[0]
            assert run.members(turn), (run.said, run.why, run.failures)
            given[turn] = self._share_out(source, run.members(turn), turn)
            self._step(given[turn], run.counting(turn))
            turn += 1

    def _share_out(self, source: list[Any], members: list[int], turn: int) -> dict[int, Any]:
        if not self.is_shared:
            return {i: source.pop(0) for i in members if source}
        batch, x, y, slices = source.pop(0)
        shares, first = {}, 0
        for i, count in zip(members, self.counts(turn, len(members), len(slices))):
            shares[i] = batch, x, y, slices[first : first + count]
            first += count
        return shares

    def _lost(self, given: dict[int, dict[int, Any]], turn: int) -> list[Any]:
        """What those had who are no members any more from this turn on, and did not count."""
        found = []
        for term in self.run.terms:
            if term.end == turn:
                turns = [given.get(t, {}) for t in range(term.published, term.end)]
                found += [shares[term.pipeline] for shares in turns if term.pipeline in shares]
        return [part for part in found if part[3]]

    def _enter(self, turn: int) -> None:
        for term in self.run.terms:
            if term.first == turn:
                self.replicas[term.pipeline] = copy.deepcopy(self.reference)
                mine = self.optimizers[term.pipeline] = self.make(self.replicas[term.pipeline].parameters())
                if term.donor is not None and self.rule != "mean-gradient":
                    mine.load_state_dict(copy.deepcopy(self.optimizers[term.donor].state_dict()))

    def _step(self, shares: dict[int, Any], counting: list[int]) -> None:
        sizes = {i: sum(s.stop - s.start for s in slices) for i, (*_, slices) in shares.items()}
        losses, gradients = {}, {}
        if self.place == 0:  # a period begins
            self.divisor = len(shares) if self.is_shared else self.options["pipelines"]
        present, counting = counting, [i for i in counting if i in shares]
        for i in counting:
            _, x, y, slices = shares[i]
            model = self.replicas[i]
            loss = sum(
                (LOSS(model(x[s]), y[s]) * ((s.stop - s.start) / sizes[i]) for s in slices), torch.zeros(())
            )
            losses[i] = float(loss.detach())
            gradients[i] = [torch.zeros_like(p) for p in model.parameters()]
            if sizes[i]:
                scale = self.divisor * sizes[i] / len(x) if self.is_shared else 1.0
                gradients[i] = torch.autograd.grad(loss * scale, list(model.parameters()))
        if self.is_shared:
            samples = sum(sizes[i] for i in counting)
            if samples:
                whole = sum(losses[i] * sizes[i] for i in counting) / samples
                self.results.append((shares[counting[0]][0], None, samples, whole))
        else:
            self.results += [(shares[i][0], i, sizes[i], losses[i]) for i in counting]
        if self.rule == "mean-gradient":
            self._by_one_optimizer(gradients, present)
        elif gradients:
            self._by_force(gradients, present)
        for one in (self.outer, *self.optimizers.values()) if shares else ():
            for group in one.param_groups:
                group["lr"] *= self.decay

    def _by_one_optimizer(self, gradients: dict[int, Any], present: list[int]) -> None:
        trials = {}
        for i, grads in gradients.items():
            trial = copy.deepcopy(self.reference)
            own = self.make(trial.parameters())
            own.load_state_dict(copy.deepcopy(self.outer.state_dict()))
            for p, g in zip(trial.parameters(), grads):
                p.grad = g.clone()
            own.step()
            trials[i] = trial
        for p, *gs in zip(self.reference.parameters(), *gradients.values()):
            p.grad = sum(gs) / self.divisor
        self.outer.step()
        if self.options.get("staleness", 1) == 0:  # who has nothing of this turn has them, too
            trials = {i: copy.deepcopy(self.reference) for i in present}
        self.replicas |= trials

    @torch.no_grad()
    def _by_force(self, gradients: dict[int, Any], present: list[int]) -> None:
        alpha = self.options.get("alpha", 1 / self.options["pipelines"])
        if self.place == 0:
            self.begin = {i: [p.clone() for p in self.replicas[i].parameters()] for i in present}
            self.stepped = set[int]()
        for i, grads in gradients.items():
            for p, g in zip(self.replicas[i].parameters(), grads):
                p.grad = g.clone()
            self.optimizers[i].step()
        self.stepped |= set(gradients)
        self.place = (self.place + 1) % self.options.get("period", 1)
        if self.place:
            return
        stepped = sorted(self.stepped & set(present))
        for n, z in enumerate(self.reference.parameters()):
            old = z.clone()
            xs = {i: list(self.replicas[i].parameters())[n] for i in stepped}
            z += sum(xs[i] - self.begin[i][n] for i in stepped) / self.divisor
            if self.options.get("staleness", 1) == 0:  # who has nothing of this turn is pulled, too
                xs = {i: list(self.replicas[i].parameters())[n] for i in present}
            for i, x in xs.items():
                x += alpha * ((z - x) if self.options.get("staleness", 1) == 0 else (old - self.begin[i][n]))


def assert_as_emulated(run: Isolated, options: dict[str, Any], optimizer: str, **others: Any) -> None:
    emulated = Emulation(run, options, optimizer, **others)
    last = len(emulated.results)
    assert run.results, run.said
    for (pipeline, _), (results, reference, own) in run.results.items():
        expected = emulated.results[last - len(results) :]
        assert [r[:3] for r in results] == [r[:3] for r in expected], run.said
        assert all(abs(a[3] - b[3]) < 1e-10 for a, b in zip(results, expected))
        assert_same_state(reference, emulated.reference.state_dict())
        assert_same_state(own, emulated.replicas[pipeline].state_dict())


CASES: list[Any] = [
    (1, {"pipelines": 2, "micro_batches": 4}, "adamw"),
    (2, {"pipelines": 3, "micro_batches": 6}, "momentum"),
    (2, {"pipelines": 2, "micro_batches": 3, "staleness": 0}, "adamw"),
    (2, {"pipelines": 3, "micro_batches": 4, "rule": "avgpipe"}, "adamw"),
    (1, {"pipelines": 2, "micro_batches": 4, "rule": "avgpipe", "staleness": 0}, "momentum"),
    (2, {"pipelines": 2, "micro_batches": 2, "batch": "per-pipeline"}, "momentum"),
    (1, {"pipelines": 3, "micro_batches": 3, "batch": "per-pipeline", "staleness": 0}, "adamw"),
]


@pytest.mark.promise(1)
@pytest.mark.parametrize(("K", "options", "optimizer"), CASES, ids=str)
def test_while_all_are_there_they_follow_the_rules(K: int, options: dict[str, Any], optimizer: str) -> None:
    run = Isolated(options["pipelines"], K, train, K=K, options=options, optimizer=optimizer)
    assert not run.failures
    assert_as_emulated(run, options, optimizer)
    assert set(run.results) == {(i, k) for i in range(options["pipelines"]) for k in range(K)}


def decaying(optimizer: torch.optim.Optimizer) -> Any:
    return torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.9)


@pytest.mark.ranks
@pytest.mark.parametrize("staleness", [1, 0])
@pytest.mark.parametrize(
    ("K", "more", "optimizer"),
    [
        (1, {"rule": "mean-gradient"}, "adamw"),
        (2, {"rule": "mean-gradient"}, "momentum"),
        (1, {}, "momentum"),
        (2, {"period": 2}, "adamw"),
        (1, {"period": 3}, "momentum"),
    ],
    ids=str,
)
def test_a_pipeline_without_a_batch_in_a_step_keeps_up_with_the_others(
    K: int, more: dict[str, Any], optimizer: str, staleness: int
) -> None:
    options = {"pipelines": 2, "micro_batches": 2, "batch": "per-pipeline", "staleness": staleness, **more}
    arguments = {"K": K, "options": options, "optimizer": optimizer, "each": 3, "lr_scheduler": decaying}
    run = Isolated(2, K, train, **arguments)
    assert not run.failures
    assert_as_emulated(run, options, optimizer, each=3, decay=0.9)


@pytest.mark.ranks
@pytest.mark.parametrize("far", [(), (1,)], ids="far {}".format)
@pytest.mark.parametrize(("K", "options", "optimizer"), CASES[:5], ids=str)
def test_what_the_loop_sets_in_optimizers_counts_from_the_next_step_on_in_all_pipelines(
    K: int, options: dict[str, Any], optimizer: str, far: tuple[int, ...]
) -> None:
    calls = 9 * options["micro_batches"] // options["pipelines"] + 1
    death = 1, 0, K - 1, calls, "killed"
    arguments = {"K": K, "options": options, "optimizer": optimizer, "deaths": [death], "waits_at": 14}
    run = Isolated(options["pipelines"], K, train, far=far, decay=0.9, **arguments)
    assert {code for code, _ in run.failures.values()} == {-9}
    assert_as_emulated(run, options, optimizer, decay=0.9)
    assert set(run.results) == {(i, k) for i in range(options["pipelines"]) for k in range(K)}


@pytest.mark.promise(0)
@pytest.mark.parametrize("far", [(), (1,), (0, 1)], ids="far {}".format)
@pytest.mark.parametrize(("K", "options", "optimizer"), CASES, ids=str)
def test_one_is_lost_and_comes_again(
    K: int, options: dict[str, Any], optimizer: str, far: tuple[int, ...]
) -> None:
    each = options["micro_batches"] // (options["pipelines"] if options.get("batch") is None else 1)
    calls = (9 if options.get("batch") is None else 3) * each + 1
    death = 1, 0, K - 1, calls, "killed"
    arguments = {"K": K, "options": options, "optimizer": optimizer, "deaths": [death], "waits_at": 14}
    run = Isolated(options["pipelines"], K, train, far=far, **arguments)
    assert {code for code, _ in run.failures.values()} == {-9}
    assert [term.donor for term in run.terms] == [*[None] * options["pipelines"], 0]
    assert run.terms[1].published < run.terms[1].end <= run.terms[-1].first, run.said
    assert_as_emulated(run, options, optimizer)
    assert set(run.results) == {(i, k) for i in range(options["pipelines"]) for k in range(K)}
    samples = sum(r[2] for r in run.results[0, 0][0])
    assert samples == sum(len(x) for x, _ in token_batches(BATCHES, 12, last=7))


@pytest.mark.ranks
@pytest.mark.parametrize("is_far", [False, True])
@pytest.mark.parametrize(("K", "options", "optimizer"), CASES[::2], ids=str)
def test_one_more_than_planned_joins(K: int, options: dict[str, Any], optimizer: str, is_far: bool) -> None:
    N = options["pipelines"]
    run = Isolated(
        N, K, train, joins=[N], far=[N] * is_far, K=K, options=options, optimizer=optimizer, waits_at=6
    )
    assert not run.failures
    assert [term.pipeline for term in run.terms] == list(range(N + 1))
    assert_as_emulated(run, options, optimizer)
    assert set(run.results) == {(i, k) for i in range(N + 1) for k in range(K)}


@pytest.mark.ranks
@pytest.mark.parametrize("batch", ["global", "per-pipeline"] * 2)
def test_one_is_lost_just_before_another_joins_that_does_not_know_what_it_had(batch: str) -> None:
    options = {"pipelines": 3, "micro_batches": 6, "batch": batch}
    if batch == "global":
        del options["batch"]
    death = 1, 0, 0, "another comes", "killed"
    arguments = {"K": 1, "options": options, "optimizer": "adamw", "deaths": [death], "waits_at": 10}
    run = Isolated(3, 1, train, restarts=3, joins=[3], **arguments)
    assert_as_emulated(run, options, "adamw")
    assert {0, 2} <= {pipeline for pipeline, _ in run.results}, (run.terms, run.why)


@pytest.mark.promise(0)
@pytest.mark.parametrize("how", ["stopped", "raised"])
def test_a_process_that_stands_still_or_raises_costs_its_pipeline_alone(how: str) -> None:
    K, options = 2, {"pipelines": 2, "micro_batches": 4}
    arguments = {"K": K, "options": options, "optimizer": "adamw", "timeout_s": 6}
    run = Isolated(2, K, train, deaths=[(0, 0, 1, 15, how)], restarts=0, **arguments)
    assert_as_emulated(run, options, "adamw")
    assert {pipeline for pipeline, _ in run.results} == {1}
    if how == "stopped":
        assert "rank 1 (stage 1) sent no message for 6 s" in run.why[0]
    else:
        assert "a layer that fails" in run.failures[0, 1][1]


@pytest.mark.ranks
@pytest.mark.parametrize(("staleness", "clip_grad_norm"), [(1, None), (1, math.inf), (0, None)])
def test_a_layer_that_hangs_costs_its_pipeline_alone(staleness: int, clip_grad_norm: float | None) -> None:
    K, options = 2, {"pipelines": 3, "micro_batches": 6, "staleness": staleness}
    arguments = {"K": K, "options": options, "optimizer": "adamw", "clip_grad_norm": clip_grad_norm}
    run = Isolated(3, K, train, deaths=[(0, 0, 0, 15, "hung")], restarts=0, timeout_s=12, **arguments)
    assert {pipeline for pipeline, _ in run.results} == {1, 2}, run.why
    assert_as_emulated(run, options, "adamw")
    by_others, by_its_own = (
        "pipeline [12] has waited 12 s for pipeline 0's part",
        "rank 1 waited 12 s for .* stage 0 ",
    )
    assert re.match(f"{by_others}|{by_its_own}", run.why[0])


@pytest.mark.ranks
@pytest.mark.parametrize("far", [(), (1,), (0, 1, 2)], ids="far {}".format)
@pytest.mark.parametrize("seed", range(6))
def test_many_are_lost_at_any_time(seed: int, far: tuple[int, ...]) -> None:
    draw = random.Random(seed)
    K, N = draw.choice([1, 2]), draw.choice([2, 3])
    options = {"pipelines": N, "micro_batches": draw.choice([3, 4]), "staleness": draw.choice([0, 1])}
    options |= draw.choice([{}, {"rule": "avgpipe"}, {"batch": "per-pipeline"}])
    deaths = [
        (draw.randrange(N), 0, draw.randrange(K), draw.randint(1, 60), draw.choice(["killed", "raised"]))
        for _ in range(N - 1)
    ]
    deaths += [(None, life, draw.randrange(K), draw.randint(1, 20), "killed") for life in (1, 2)]
    run = Isolated(N, K, train, restarts=4, far=far, K=K, options=options, optimizer="adamw", deaths=deaths)
    assert_as_emulated(run, options, "adamw")


def use(folder: str, dies: Any = None) -> Any:
    """Train, evaluate, predict, save, and go on; BatchNorm's statistics are those of all."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(6, 8), nn.BatchNorm1d(8), nn.Tanh(), nn.Linear(8, 3)).double()
    plan = Plan(stages=2, pipelines=2, micro_batches=4, isolate=True)
    generator = torch.Generator().manual_seed(1)
    data = [
        (torch.randn(12, 6, generator=generator).double(), torch.randint(0, 3, (12,), generator=generator))
        for _ in range(12)
    ]
    pipeline = int(os.environ["AVGPIPE_PIPELINE"])
    if dies == (pipeline, int(os.environ["RANK"])):
        model[0].register_forward_pre_hook(lambda layer, _: None if layer.training else die())
    with Pipeline(
        model,
        plan,
        loss_fn=LOSS,
        optimizer=OPTIMIZERS["adamw"],
        timeout_s=20,
        extensions=[MovingAverage(0.9), Audit("off")],
    ) as p:
        losses = [r.loss for r in p.train(data[:6])]
        seen = [p.evaluate(data[:2], lambda output, _: output.mean()), p.evaluate(data[:3], weights="ema")]
        output = p.predict(data[0][0])
        p.save(folder)
        losses += [r.loss for r in p.train(data[6:])]
        p.step(*data[0])
        seen += [p.evaluate(data[:2]), p.once("who answers", lambda: pipeline)]
        with pytest.raises(ValueError, match=f"{pipeline}, the pipeline of this process"):
            p.evaluate(data, weights=1 - pipeline)
        return losses, seen, output, p.state_dict(), p.distances().to_reference


@pytest.mark.promise(0)
@pytest.mark.parametrize("far", [(), (0,)], ids="far {}".format)
def test_evaluation_and_checkpoints_are_one_pipeline_s_work_and_all_know(
    tmp_path: Any, far: tuple[int, ...]
) -> None:
    run = Isolated(2, 2, use, far=far, folder=str(tmp_path / "saved"))
    first, *others = run.results.values()
    for other in others:
        assert other[0] == first[0]
        assert other[1] == first[1]
        assert torch.equal(other[2], first[2])
        assert all(torch.equal(other[3][name], value) for name, value in first[3].items())
    model = nn.Sequential(nn.Linear(6, 8), nn.BatchNorm1d(8), nn.Tanh(), nn.Linear(8, 3)).double()
    plan = Plan(stages=1, pipelines=2, micro_batches=4)
    with Pipeline(model, plan, loss_fn=LOSS, optimizer=OPTIMIZERS["adamw"]) as p:
        p.load(tmp_path / "saved")
        generator = torch.Generator().manual_seed(1)
        x = torch.randn(12, 6, generator=generator).double()
        assert torch.allclose(p.predict(x), first[2], atol=1e-12)
        assert p.batches == 6


def go_back(folder: str) -> Any:
    """Train, save, train and load; return what is evaluated after both, and losses of the same batches."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(6, 8), nn.BatchNorm1d(8), nn.Tanh(), nn.Linear(8, 3)).double()
    plan = Plan(stages=2, pipelines=2, micro_batches=4, isolate=True, batch="per-pipeline")
    data = [(torch.randn(12, 6).double(), torch.randint(0, 3, (12,))) for _ in range(8)]
    with Pipeline(model, plan, loss_fn=LOSS, optimizer=OPTIMIZERS["adamw"], timeout_s=20) as p:
        list(p.train(data[:4]))
        p.save(folder)
        seen, losses = [p.evaluate(data).loss], [[r.loss for r in p.train(data[4:])]]
        p.load(folder)
        seen.append(p.evaluate(data).loss)
        before = p.state_dict()
        p.load_state_dict({}, strict=False)
        assert_same_state(p.state_dict(), before)
        losses.append([r.loss for r in p.train(data[p.batches :])])
        return seen, losses


@pytest.mark.ranks
def test_pipelines_load_what_they_have_saved_and_go_on(tmp_path: Any) -> None:
    run = Isolated(2, 2, go_back, restarts=0, folder=str(tmp_path / "saved"))
    assert not run.failures, run.failures
    for seen, losses in run.results.values():
        assert seen[1] == pytest.approx(seen[0], abs=1e-12)
        # They begin again with the reference, and each with the optimizer of one.
        assert losses[1][:2] != losses[0][:2]
        assert all(torch.isfinite(torch.tensor(losses[1])))


@pytest.mark.ranks
def test_another_pipeline_evaluates_for_one_that_is_lost_meanwhile(tmp_path: Any) -> None:
    whole = Isolated(2, 2, use, folder=str(tmp_path / "whole"))
    run = Isolated(2, 2, use, restarts=0, folder=str(tmp_path / "saved"), dies=(0, 0))
    assert {pipeline for pipeline, _ in run.results} == {1}, (run.said, run.why, run.failures)
    (losses, seen, *_), expected = run.results[1, 0], whole.results[1, 0]
    assert losses[:6] == expected[0][:6]
    assert seen[:2] == expected[1][:2]


def save_in_turn(folder: str) -> int:
    """Save twice into one folder, a pipeline after the other: who comes later finds that it is done."""
    plan, pipeline = Plan(pipelines=2, micro_batches=2, isolate=True), int(os.environ["AVGPIPE_PIPELINE"])
    torch.manual_seed(0)
    data = [(torch.randn(4, 2).double(), torch.zeros(4).long())]
    with Pipeline(nn.Linear(2, 2).double(), plan, loss_fn=LOSS, optimizer=OPTIMIZERS["sgd"]) as p:
        for saver in range(2):
            list(p.train(data))
            done = Path(folder, f"{saver} has saved")
            while pipeline != saver and not done.exists():
                time.sleep(0.01)
            p.save(Path(folder, "saved"))
            done.touch()
        return p.batches


@pytest.mark.ranks
def test_pipelines_save_into_one_folder_in_turn(tmp_path: Path) -> None:
    run = Isolated(2, 1, save_in_turn, restarts=0, folder=str(tmp_path))
    assert set(run.results.values()) == {2}, run.failures


def look_long(timeout_s: float) -> int:
    """Train 6 batches, evaluate for long, and train one more; the last pipeline comes for that one."""
    plan, comes = Plan(pipelines=2, micro_batches=2, isolate=True), os.environ["AVGPIPE_PIPELINE"] == "2"
    torch.manual_seed(0)
    model, made, has_waited = nn.Sequential(nn.Linear(2, 2)).double(), list[Pipeline](), False

    def wait_for_another(*_: Any) -> None:
        nonlocal has_waited
        if made and made[0].launcher.begun == 6 and not (comes or has_waited):  # the others' last batch
            has_waited, membership = True, made[0].launcher
            with membership._lock:
                assert membership._lock.wait_for(lambda: len(membership.known.roster.terms) == 3, 20)

    model[0].register_forward_pre_hook(wait_for_another)
    data = [(torch.randn(2, 2).double(), torch.zeros(2).long())]
    with Pipeline(model, plan, loss_fn=LOSS, optimizer=OPTIMIZERS["sgd"], timeout_s=timeout_s) as p:
        made.append(p)
        if comes:
            p.enter()
        else:
            list(p.train(6 * data))
            p.evaluate(data, lambda output, _: time.sleep(3 * timeout_s) or output.mean())
        list(p.train(data))
        return p.batches


@pytest.mark.ranks
def test_a_pipeline_that_joins_waits_without_limit_while_one_evaluates_for_the_others() -> None:
    run = Isolated(2, 1, look_long, joins=[2], restarts=0, timeout_s=2)
    assert run.results == {(0, 0): 7, (1, 0): 7, (2, 0): 7}, (run.said, run.why, run.failures)


def preempt_first() -> tuple[list[Any], bool, int]:
    """Be told to end before anything has begun."""
    plan = Plan(pipelines=2, micro_batches=2, isolate=True)
    torch.manual_seed(0)
    data = [(torch.randn(4, 2).double(), torch.zeros(4).long())]
    with Pipeline(nn.Linear(2, 2).double(), plan, loss_fn=LOSS, optimizer=OPTIMIZERS["sgd"]) as p:
        if os.environ["AVGPIPE_PIPELINE"] == "0":
            p.preempt()
        for what in ("an answer", "one more"):  # the launcher has heard of it before the second one
            p.once(what, lambda: 0)
        return list(p.train(3 * data)), p.preempted, p.batches


@pytest.mark.ranks
def test_a_pipeline_that_is_preempted_before_the_run_has_begun_ends_without_a_batch() -> None:
    run = Isolated(2, 1, preempt_first, restarts=0)
    assert run.results == {(0, 0): ([], True, 0), (1, 0): ([], True, 0)}, run.failures


def refuse(isolate: bool) -> str:
    plan = Plan(stages=1, pipelines=2, micro_batches=2, isolate=isolate)
    with pytest.raises(ValueError, match="isolate") as refusal:
        Pipeline(nn.Linear(2, 2), plan, loss_fn=LOSS, optimizer=OPTIMIZERS["sgd"])
    return str(refusal.value)


@pytest.mark.ranks
def test_plans_and_launchers_must_agree() -> None:
    assert "start it with avgpipe run --isolate" in refuse(True)
    run = Isolated(2, 1, refuse, isolate=False)
    assert all("give it isolate=True" in text for text in run.results.values())


def normalise() -> int:
    """Train with BatchNorm on batches of which the last one is short; return the samples."""
    plan = Plan(pipelines=2, micro_batches=4, isolate=True)
    model = nn.Sequential(nn.Linear(2, 4), nn.BatchNorm1d(4), nn.Linear(4, 2)).double()
    data = [(torch.ones(n, 2).double(), torch.zeros(n).long()) for n in (16, 16, 5)]
    with Pipeline(model, plan, loss_fn=LOSS, optimizer=OPTIMIZERS["sgd"], timeout_s=20) as p:
        return sum(result.samples for result in p.train(data))


@pytest.mark.ranks
def test_a_short_batch_has_no_micro_batch_of_one_sample_that_batch_norm_cannot_train_on() -> None:
    run = Isolated(2, 1, normalise)
    assert run.results == {(0, 0): 37, (1, 0): 37}, run


def differ(what: str) -> Any:
    pipeline = int(os.environ["AVGPIPE_PIPELINE"])
    torch.manual_seed(pipeline if what == "initial weights" else 0)
    model = nn.Linear(2, 2).double()
    lr = 0.1 * (1 + pipeline) if what == "optimizer" else 0.1
    plan = Plan(pipelines=2, micro_batches=2, isolate=True, staleness=pipeline if what == "plan" else 1)
    data = [(torch.randn(4, 2).double() + (pipeline if what == "loader" else 0), torch.zeros(4).long())] * 5
    optimizer = partial(torch.optim.SGD, lr=lr)
    with Pipeline(model, plan, loss_fn=LOSS, optimizer=optimizer, timeout_s=20) as p:
        try:
            for _ in p.train(data):
                if what == "options":
                    p.optimizers[0].param_groups[0]["lr"] = 0.1 * (1 + pipeline)
        except RuntimeError as error:
            return str(error)
    return "nothing was said"


@pytest.mark.promise(0)
@pytest.mark.parametrize("what", ["plan", "optimizer", "options", "initial weights", "loader"])
def test_pipelines_that_are_not_made_alike_are_refused(what: str) -> None:
    run = Isolated(2, 1, differ, restarts=0, what=what)
    texts = [*run.results.values(), *run.why.values()]
    expected = {
        "loader": "same loader",
        "options": "other options, such as the learning rate, than that of pipeline",
    }
    said = expected.get(what, f"is refused: {what} are not those of pipeline")
    assert any(said in text for text in texts), (run.results, run.said)


@pytest.mark.ranks
@pytest.mark.parametrize("batch", ["global", "per-pipeline"])
def test_a_pipeline_that_joins_with_another_loader_ends_alone(batch: str) -> None:
    options = {"pipelines": 2, "micro_batches": 6} | ({} if batch == "global" else {"batch": batch})
    arguments = {"K": 1, "options": options, "optimizer": "sgd", "waits_at": 6, "late_seed": 1}
    run = Isolated(2, 1, train, restarts=0, joins=[2], **arguments)
    assert set(run.failures) == {(2, 0)}
    assert "all must iterate over the same loader" in run.failures[2, 0][1]
    assert set(run.results) == {(0, 0), (1, 0)}
    samples = sum(r[2] for r in run.results[0, 0][0])
    assert samples == sum(len(x) for x, _ in token_batches(BATCHES, 12, last=7))


@pytest.mark.ranks
@pytest.mark.parametrize("waits_at", [12, 13, 14])
def test_a_pipeline_that_joins_gets_what_the_loop_sets_after_an_evaluation(waits_at: int) -> None:
    """An evaluation ends steps in flight: it must not hand over the state with which a pipeline joins."""
    options = {"pipelines": 2, "micro_batches": 4}
    arguments = {"K": 1, "options": options, "optimizer": "momentum", "waits_at": waits_at}
    deaths = [(1, 0, 0, 18, "killed")]
    run = Isolated(2, 1, train, restarts=1, deaths=deaths, decay=0.9, evaluates=True, **arguments)
    assert {code for code, _ in run.failures.values()} == {-9}, run.failures
    (_, reference, _), (_, other, _) = run.results[0, 0], run.results[1, 0]
    assert_same_state(reference, other)


@pytest.mark.ranks
def test_a_pipeline_that_joins_with_another_schedule_ends_alone() -> None:
    options = {"pipelines": 2, "micro_batches": 6}
    arguments = {"K": 1, "options": options, "optimizer": "sgd", "waits_at": 6, "late_decay": 0.9}
    run = Isolated(2, 1, train, restarts=0, joins=[2], **arguments)
    assert set(run.failures) == {(2, 0)}
    assert (
        "has other options, such as the learning rate, than that of pipeline 0 and 1" in run.failures[2, 0][1]
    )
    assert set(run.results) == {(0, 0), (1, 0)}
    deaths = [(1, 0, 0, 30, "killed")]
    run = Isolated(2, 1, train, **(arguments | {"waits_at": 14, "deaths": deaths}))
    assert {code for code, _ in run.failures.values()} == {-9, 1}
    assert set(run.results) == {(0, 0)}


def come(ahead: int) -> int:
    """Train; who comes later gives a loader that begins so many batches after the one that the run has come to."""
    is_late = int(os.environ["AVGPIPE_GROUP"]) == 2
    plan = Plan(pipelines=2, micro_batches=2, isolate=True)
    batch = torch.ones(4, 2).double(), torch.zeros(4).long()
    with Pipeline(
        nn.Linear(2, 2).double(), plan, loss_fn=LOSS, optimizer=OPTIMIZERS["sgd"], timeout_s=20
    ) as p:
        if is_late:
            p._session.feed.next_batch += ahead
            assert p.batches >= ahead
        membership = p.launcher
        for result in p.train([batch] * 50):
            if result.batch == 5 and not is_late:
                with membership._lock:
                    assert membership._lock.wait_for(lambda: len(membership.known.roster.terms) > 2, 20)
        return p.batches


@pytest.mark.ranks
def test_a_pipeline_that_joins_with_a_loader_that_begins_too_late_ends_alone_and_says_why() -> None:
    run = Isolated(2, 1, come, restarts=0, joins=[2], ahead=40)
    assert set(run.results) == {(0, 0), (1, 0)}
    assert "begins with batch 4" in run.failures[2, 0][1]
    assert "call enter() before" in run.failures[2, 0][1]
