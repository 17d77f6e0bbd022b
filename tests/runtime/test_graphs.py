"""Runs whose batches are launched as graphs, by the rules of captures: the same, bit for bit, as without."""

from __future__ import annotations

import logging
import random
import threading
from functools import partial
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import nn

from avgpipe import Pipeline, Plan
from avgpipe.errors import StageError
from avgpipe.model.context import Carry
from avgpipe.runtime.graphs import RowGraphs
from avgpipe.runtime.options import TrainingOptions
from avgpipe.runtime.route import Step, StepKind
from avgpipe.runtime.streams import captured
from avgpipe.timeline import COMPUTE_KINDS
from tests.happens_before.on_cpu import on_streams
from tests.happens_before.operators import DEVICE
from tests.isolated import Isolated
from tests.options import grouped
from tests.runner import run
from tests.runtime.capture_rules import (
    CaptureError,
    GraphsAndStreams,
    RandomState,
    RecordedGraph,
    capture_rules,
)
from tests.runtime.cases import adamw, language_model, momentum, token_batches

LOSS = nn.CrossEntropyLoss()
WARM_UPS = 2  # batches of a form before its graph


@pytest.fixture
def captures():
    """The CPU has graphs, which are recorded operators; they are in the list."""
    with capture_rules() as backend:
        yield backend.graphs


def train(batches, graphs, plan=None, model=None, loss_fn=LOSS, **options):
    """Losses, evaluation loss and weights."""
    plan = plan or Plan(stages=3, pipelines=2, batch="per-pipeline", micro_batches=3)
    options = {"loss_fn": loss_fn, "optimizer": adamw, "cuda_graphs": graphs, **options}
    with Pipeline(language_model() if model is None else model(), plan, **grouped(**options)) as p:
        return [r.loss for r in p.train(batches)], p.evaluate(batches).loss, p.state_dict()


def assert_same(found, expected):
    assert found[:2] == expected[:2]
    assert all(torch.equal(value, found[2][name]) for name, value in expected[2].items())


def launches(graphs):
    return sum(graph.replays for graph in graphs)


# ---- equal to a run without --------------------------------------------------------------------------------

TWO = {"pipelines": 2, "stages": 2, "micro_batches": 3}
PLANS = [
    Plan(stages=2, micro_batches=3),
    Plan(**TWO, batch="per-pipeline", staleness=0),
    Plan(**TWO, batch="per-pipeline", staleness=1),
    Plan(**TWO, batch="global"),
    Plan(stages=2, micro_batches=2, replication=(2, 1)),
    Plan(stages=2, micro_batches=3, schedule="zero-bubble-h1"),
    Plan(stages=2, micro_batches=3, schedule="dualpipe-v"),
]
OPTIONS: list[dict[str, Any]] = [
    {},
    {"clip_grad_norm": 0.1},
    {"loss_scale": 8.0, "clip_grad_norm": 0.1},
    {"skip_nonfinite": True},
]


def linear_model() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(5, 7), nn.Tanh(), nn.Linear(7, 7), nn.LayerNorm(7), nn.Linear(7, 3))


@pytest.mark.parametrize("autocast", [None, torch.bfloat16], ids=str)
@pytest.mark.parametrize("plan", PLANS[:5], ids=str)
def test_products_that_add_gradients_up_are_captured_with_their_casts(captures, plan, autocast):
    draw = torch.Generator().manual_seed(0)
    batches = [
        (torch.randn(n, 5, generator=draw), torch.randint(3, (n,), generator=draw)) for n in [12] * 9 + [9]
    ]
    options = {"model": linear_model, "fuses_gradients": True, "autocast": autocast}
    plain, found = (train(batches, graphs, plan, **options) for graphs in (False, True))
    assert_same(found, plain)
    assert launches(captures) > 0


@pytest.mark.grid(10)
@pytest.mark.parametrize("plan", PLANS, ids=str)
@pytest.mark.parametrize("options", OPTIONS, ids=lambda options: "-".join(options) or "plain")
def test_every_plan_trains_as_without_and_launches_once_per_batch(captures, plan, options):
    batches = token_batches(11, 12, last=9)
    plain, found = (train(batches, graphs, plan, **options) for graphs in (False, True))
    assert_same(found, plain)
    per_pipeline = 11 if plan.batch == "global" else 6  # and 5 of the second one
    full = per_pipeline * plan.pipelines - (plan.batch != "global" and plan.pipelines > 1)
    short = 1 if plan.batch != "global" else plan.pipelines
    assert launches(captures) == full - short - WARM_UPS * plan.pipelines
    assert len(captures) == plan.pipelines  # a graph each


@pytest.mark.host  # it has an account of its own
@pytest.mark.parametrize("plan", PLANS, ids=str)
def test_graphs_are_captured_and_launched_in_the_order_of_streams(plan):
    """What a graph reads and writes is the same memory each time: of another batch, or of another stage's lane."""
    batches = token_batches(8, 12)
    plain = train(batches, False, plan)
    with on_streams(GraphsAndStreams()) as account:
        found = train(batches, True, plan)
    assert launches(account.graphs)
    assert not account.memory.found
    assert_same(found, plain)


@pytest.mark.grid(4)
@pytest.mark.parametrize("staleness", [0, 1])
@pytest.mark.parametrize("pipelines", [1, 2, 4])
def test_dropout_draws_what_it_draws_without(captures, pipelines, staleness):
    plan = Plan(stages=3, pipelines=pipelines, micro_batches=2, staleness=staleness, batch="per-pipeline")
    batches = token_batches(5 * pipelines, 8)
    drops = lambda: language_model(dropout=0.4)  # noqa: E731
    plain, found = (train(batches, graphs, plan, drops) for graphs in (False, True))
    assert_same(found, plain)
    assert launches(captures) == 3 * pipelines


@pytest.mark.parametrize("recompute", ["always", "except-last"])
def test_a_forward_that_runs_again_draws_the_same(captures, recompute):
    plan = Plan(stages=2, micro_batches=3, recompute=recompute)
    drops = lambda: language_model(dropout=0.4)  # noqa: E731
    plain, found = (train(token_batches(5, 9), graphs, plan, drops) for graphs in (False, True))
    assert_same(found, plain)
    assert launches(captures) == 3


def test_a_loss_function_that_draws_draws_the_same(captures):
    def noisy(output, target):
        return LOSS(output + torch.rand_like(output), target)

    plain, found = (train(token_batches(5, 8), g, Plan(stages=2), loss_fn=noisy) for g in (False, True))
    assert_same(found, plain)


def test_shapes_take_turns_and_further_ones_run_without(captures, caplog):
    """The last batch of each epoch is short, and lengths vary: a few forms have a graph each, from one pool."""
    batches = [b for n in (8, 6, 10, 4, 12, 8, 6, 10, 4, 12) for b in token_batches(1, n, seed=n)] * 3
    plain = train(batches, False, Plan(stages=2, micro_batches=2))
    with caplog.at_level(logging.WARNING, logger="avgpipe"):
        found = train(batches, True, Plan(stages=2, micro_batches=2))
    assert_same(found, plain)
    assert len(captures) == 4
    assert len({id(graph.pool()) for graph in captures}) == 1
    assert sum("more than 4 forms" in record.message for record in caplog.records) == 1


class Carrying(nn.Module):
    """Adds what the batch before has left."""

    def __init__(self):
        super().__init__()
        self.lin, self.carry = nn.Linear(8, 8), Carry()

    def forward(self, x):
        before = self.carry.get()
        x = torch.tanh(self.lin(x) + (0 if before is None else before[0]))
        self.carry.set((x.detach().mean(0),))
        return x


def carrying_model():
    model = language_model(dropout=0.2)
    torch.manual_seed(3)
    return nn.Sequential(*model[:2], Carrying().double(), *model[5:])


@pytest.mark.parametrize("pipelines", [1, 2])
def test_state_is_carried_over_with_and_without_graphs_in_turn(captures, pipelines):
    plan = Plan(stages=2, pipelines=pipelines, micro_batches=2, batch="per-pipeline")
    sizes = [8] * 4 + [6] + [8] * 4 + [6] + [8] * 3
    batches = [b for n, size in enumerate(sizes) for b in token_batches(1, size, seed=n)]
    plain, found = (train(batches, graphs, plan, carrying_model) for graphs in (False, True))
    assert_same(found, plain)
    assert launches(captures)


def test_normalisation_counts_whole_batches(captures):
    def model():
        layers = language_model()
        return nn.Sequential(*layers[:2], nn.BatchNorm1d(8).double(), *layers[2:])

    plain, found = (
        train(token_batches(5, 12), graphs, Plan(stages=2, micro_batches=3), model)
        for graphs in (False, True)
    )
    assert_same(found, plain)
    assert int(found[2]["2.num_batches_tracked"]) == 5


def test_a_scale_that_changes_is_not_captured(captures):
    """It falls with infinite gradients; what was captured before uses the new one, as float16 shows."""

    def explodes(output, target):
        return LOSS(output, target) * torch.where((target == 10).any(), torch.inf, 1.0)

    batches = [(x, y.clamp(max=9)) for x, y in token_batches(9, 8)]
    batches[4][1][0] = 10
    options = {"loss_scale": "dynamic", "autocast": torch.float16, "loss_fn": explodes, "optimizer": momentum}
    model = lambda: language_model().float()  # noqa: E731
    plain, found = (
        train(batches, g, Plan(stages=2, micro_batches=2), model, **options) for g in (False, True)
    )
    assert not torch.isfinite(torch.tensor(plain[0][4]))
    assert_same((found[0][:4] + found[0][5:], *found[1:]), (plain[0][:4] + plain[0][5:], *plain[1:]))
    assert launches(captures) == 7


def test_counts_and_metrics_are_the_same(captures):
    def counted(output, target):
        keeps = target > 2
        losses = nn.functional.cross_entropy(output, target, reduction="none")
        return ((losses * keeps).sum(), keeps.sum()), {"hits": (output.argmax(1) == target).double().sum()}

    def metrics(graphs):
        options = {"loss_fn": counted, "optimizer": adamw, "cuda_graphs": graphs}
        plan = Plan(stages=2, pipelines=2, micro_batches=4, batch="global")
        with Pipeline(language_model(), plan, **grouped(**options)) as p:
            return [(r.loss, r.metrics) for r in p.train(token_batches(6, 16))], p.state_dict()

    plain, found = metrics(False), metrics(True)
    assert found[0] == plain[0]
    assert all(torch.equal(value, found[1][name]) for name, value in plain[1].items())


def test_a_batch_that_counts_nothing_leaves_weights_finite(captures):
    def counted(output, target):
        keeps = target > 2
        return (nn.functional.cross_entropy(output, target, reduction="none") * keeps).sum(), keeps.sum()

    batches = [(x, y.clamp(max=2) if j in (1, 4) else y) for j, (x, y) in enumerate(token_batches(6, 16))]
    plan, options = Plan(stages=2, micro_batches=4), {"loss_fn": counted, "optimizer": adamw}
    plain, found = (train(batches, graphs, plan, **options) for graphs in (False, True))
    for losses in (plain[0], found[0]):
        assert [j for j, loss in enumerate(losses) if loss != loss] == [1, 4]
        losses[1] = losses[4] = 0.0
    assert_same(found, plain)
    assert all(bool(value.isfinite().all()) for value in found[2].values())
    assert launches(captures) > 0


def test_weights_that_are_loaded_are_those_that_train(captures):
    batches = token_batches(8, 8)

    def both(graphs):
        options = {"loss_fn": LOSS, "optimizer": momentum, "cuda_graphs": graphs}
        with Pipeline(language_model(), Plan(stages=2, micro_batches=2), **grouped(**options)) as p:
            begun = {name: value.clone() for name, value in p.state_dict().items()}
            list(p.train(batches[:4]))
            p.load_state_dict(begun)
            return [r.loss for r in p.train(batches)]

    assert both(True) == both(False)


def test_frozen_weights_get_graphs_of_their_own(captures):
    batches = token_batches(10, 8)

    def freezing(graphs):
        options = {"loss_fn": LOSS, "optimizer": momentum, "cuda_graphs": graphs}
        with Pipeline(language_model(), Plan(stages=2, micro_batches=2), **grouped(**options)) as p:
            losses = [r.loss for r in p.train(batches[:4])]
            p.requires_grad_("1", False)
            losses += [r.loss for r in p.train(batches[4:7])]
            p.requires_grad_("1", True)
            return losses + [r.loss for r in p.train(batches[7:])], 0.0, p.state_dict()

    assert_same(freezing(True), freezing(False))
    assert len(captures) == 3


def test_batches_that_are_run_again_to_be_checked_run_without(captures):
    plan, check = Plan(stages=2, micro_batches=2), {"verify_every": 3}
    plain, found = (train(token_batches(9, 8), graphs, plan, **check) for graphs in (False, True))
    assert_same(found, plain)
    assert 0 < launches(captures) < 9 - WARM_UPS


@pytest.mark.host
def test_timelines_show_a_launch_on_each_stage():
    plan = Plan(stages=3, pipelines=2, batch="per-pipeline", micro_batches=3)
    options = {"loss_fn": LOSS, "optimizer": momentum, "cuda_graphs": True}
    with on_streams(GraphsAndStreams()), Pipeline(language_model(), plan, **grouped(**options)) as p:
        list(p.train(token_batches(8, 9)))
        events = [event for event in p.timeline().events if event.batch >= 2 * WARM_UPS]
    for stage in range(3):
        kinds = [
            (event.batch, event.kind)
            for event in events
            if event.stage == stage and event.kind in COMPUTE_KINDS
        ]
        assert sorted(kinds) == [(batch, kind) for batch in range(4, 8) for kind in ("U", "graph")]


# ---- between processes -------------------------------------------------------------------------------------


def on_ranks(link: str, plan: dict[str, Any], dropout: float) -> Any:
    found = []
    batches = token_batches(5 * plan.get("pipelines", 1), 8)
    for graphs in (False, True):
        with capture_rules() as backend:
            options = {
                "loss_fn": LOSS,
                "optimizer": adamw,
                "cuda_graphs": graphs,
                "link": link,
                "timeout_s": 30,
            }
            model = language_model(dropout=dropout)
            with Pipeline(model, Plan(**plan), **grouped(**options)) as p:
                found.append(([r.loss for r in p.train(batches)], p.evaluate(batches).loss, p.state_dict()))
            count = launches(backend.graphs)
    return found, count


ON_RANKS: list[tuple[int, dict[str, Any]]] = [
    (2, {"stages": 2, "micro_batches": 3}),
    (2, {"stages": 2, "micro_batches": 3, "schedule": "zero-bubble-h1"}),
    (2, {"stages": 4, "micro_batches": 2, "stages_per_worker": 2, "schedule": "interleaved-1f1b"}),
    (2, {"stages": 2, "micro_batches": 2, "pipelines": 2, "batch": "per-pipeline"}),
    (3, {"stages": 2, "micro_batches": 2, "replication": (2, 1)}),
]


@pytest.mark.ranks
@pytest.mark.ranks
@pytest.mark.host
@pytest.mark.parametrize("link", ["shm", "gloo"])
@pytest.mark.parametrize(("ranks", "plan"), ON_RANKS, ids=str)
def test_a_row_is_cut_where_it_waits_for_another_process(ranks, plan, link):
    for found, count in run(ranks, on_ranks, link=link, plan=plan, dropout=0.3):
        plain, graphed = found
        assert_same(graphed, plain)
        assert count >= 3


def isolated(graphs: bool, plan: dict[str, Any]) -> Any:
    options = {"loss_fn": LOSS, "optimizer": adamw, "cuda_graphs": graphs, "timeout_s": 30}
    with (
        capture_rules() as backend,
        Pipeline(
            language_model(dropout=0.3),
            Plan(stages=2, pipelines=2, isolate=True, **plan),
            **grouped(**options),
        ) as p,
    ):
        results = [(r.batch, r.pipeline, r.loss) for r in p.train(token_batches(16, 8))]
        return results, 0.0, p.state_dict(), launches(backend.graphs)


@pytest.mark.ranks
@pytest.mark.ranks
@pytest.mark.host
@pytest.mark.parametrize(
    "plan",
    [{"micro_batches": 3, "batch": "per-pipeline", "staleness": 1}, {"micro_batches": 4, "staleness": 0}],
    ids=str,
)
def test_isolated_pipelines_launch_graphs_too(plan):
    plain, graphed = (Isolated(2, 1, isolated, graphs=graphs, plan=plan) for graphs in (False, True))
    assert not plain.failures
    assert not graphed.failures
    assert set(plain.results) == set(graphed.results) == {(0, 0), (1, 0)}
    for place, found in graphed.results.items():
        assert_same(found, plain.results[place])
        assert found[3] == (8 if plan.get("batch") else 16) - WARM_UPS


def test_a_row_begins_once_the_averages_of_all_its_lanes_have_arrived():
    """Each lane takes in what has arrived for it when it is asked, and no bell rings after the first one was."""

    class Remote:
        is_taken = False

        def collect(self):
            self.is_taken = True

    def lane():
        remote = Remote()
        return SimpleNamespace(remote=remote, is_flushed=lambda batch: remote.is_taken)

    graphs = RowGraphs(TrainingOptions(loss_fn=LOSS, optimizer=adamw), torch.device("cpu"), 0)
    graphs.lanes = [lane(), lane()]
    assert graphs.is_ready(graphs.lanes[0], Step(StepKind.BEGIN_ROW, 0, 3, -1, (), begins=True))


# ---- what graphs cannot repeat -----------------------------------------------------------------------------


class Looks(nn.Module):
    def forward(self, x):
        return x * 2 if float(x.detach().sum()) > 1e9 else x


class DrawsByItself(nn.Module):
    """Draws with a generator of its own."""

    def __init__(self):
        super().__init__()
        self.generator = torch.Generator()

    def forward(self, x):
        return x + torch.rand(x.shape, generator=self.generator)


class SkippedAtRandom(nn.Module):
    """As LayerDrop: the host decides, by its own generator."""

    def forward(self, x):
        return x if random.random() < 0.5 else torch.tanh(x)


class Counts(nn.Module):
    def __init__(self):
        super().__init__()
        self.calls = 0

    def forward(self, x):
        self.calls += 1
        return x / self.calls


class CountsUnseen(nn.Module):
    """Counts in a private attribute, or in a list."""

    def __init__(self, private: bool):
        super().__init__()
        self._calls, self.listed, self.private = 0, [0], private

    def forward(self, x):
        self._calls += self.private
        self.listed[0] += not self.private
        return x / (self._calls + self.listed[0])


class CarriesANumber(nn.Module):
    def __init__(self):
        super().__init__()
        self.carry = Carry()

    def forward(self, x):
        calls = 1 if (before := self.carry.get()) is None else before[0] + 1
        self.carry.set((calls, x.detach()))
        return x / calls


class Remembers(nn.Module):
    def __init__(self):
        super().__init__()
        self.register_buffer("before", torch.zeros(8, dtype=torch.float64))

    def forward(self, x):
        self.before = (self.before + x.detach().mean(0)) / 2
        return x + self.before


class DrawsSometimes(nn.Module):
    def __init__(self):
        super().__init__()
        self.register_buffer("calls", torch.zeros(()))
        self.hidden = iter((False,))

    def forward(self, x):
        return nn.functional.dropout(x, 0.5) if next(self.hidden, True) else x


@pytest.mark.parametrize(
    ("layer", "why"),
    [
        (Looks, "waits for the device during a capture"),
        (DrawsByItself, r"generator.* is assigned in each batch"),
        (SkippedAtRandom, r"draws from a generator of the host \(random\)"),
        (Counts, "calls.* is assigned in each batch"),
        (partial(CountsUnseen, True), "_calls.* is assigned in each batch"),
        (partial(CountsUnseen, False), r"listed\[0\].* is assigned in each batch"),
        (CarriesANumber, "a Carry holds a number that changes"),
        (Remembers, "before.* is assigned in each batch.*add_.*Carry"),
        (DrawsSometimes, "draw random numbers in some batches and not in others"),
    ],
    ids=lambda value: value.__name__ if isinstance(value, type) else "",
)
def test_what_a_graph_would_get_wrong_is_refused(captures, layer, why):
    def model():
        layers = language_model()
        return nn.Sequential(*layers[:3], layer(), *layers[5:])

    with pytest.raises(StageError, match=f"(?s){why}.*leave CudaGraphs out"):
        train(token_batches(5, 8), True, Plan(stages=2, micro_batches=1), model)
    assert RecordedGraph.current is None  # the capture has ended


class Weighted(nn.Module):
    """A loss with a factor that the caller changes, or it itself."""

    def __init__(self, counts=False):
        super().__init__()
        self.factor, self.counts = 1.0, counts

    def forward(self, output, target):
        self.factor += self.counts
        return LOSS(output, target) * self.factor


def test_a_loss_function_that_the_caller_changes_is_captured_again(captures, caplog):
    batches = token_batches(14, 8)

    def losses(graphs):
        loss_fn = Weighted()
        options = {"loss_fn": loss_fn, "optimizer": momentum, "cuda_graphs": graphs}
        found = []
        with Pipeline(language_model(), Plan(stages=2, micro_batches=2), **grouped(**options)) as p:
            for n in range(0, 14, 7):
                found += [r.loss for r in p.train(batches[n : n + 7])]
                loss_fn.factor = 0.5
            return found, 0.0, p.state_dict()

    plain = losses(False)
    with caplog.at_level(logging.WARNING, logger="avgpipe"):
        found = losses(True)
    assert_same(found, plain)
    assert [graph.replays for graph in captures] == [5, 5]
    assert any("'loss_fn.factor' has changed" in record.getMessage() for record in caplog.records)


def test_a_loss_function_that_counts_is_refused(captures):
    with pytest.raises(StageError, match=r"loss_fn\.factor' is assigned in each batch"):
        train(token_batches(9, 8), True, Plan(stages=2), loss_fn=Weighted(counts=True), check="off")


class Evaluated(nn.Module):
    """Trains in another way once it has been evaluated."""

    def __init__(self):
        super().__init__()
        self.scale = 1.0

    def forward(self, x):
        if not self.training:
            self.scale = 2.0
        return x * self.scale


def test_layers_that_an_evaluation_changes_are_captured_again(captures):
    def model():
        layers = language_model()
        return nn.Sequential(*layers[:3], Evaluated(), *layers[5:])

    def losses(graphs):
        options = {"loss_fn": LOSS, "optimizer": momentum, "cuda_graphs": graphs, "check": "off"}
        with Pipeline(model(), Plan(stages=2, micro_batches=2), **grouped(**options)) as p:
            found = [r.loss for r in p.train(token_batches(5, 8))]
            found.append(p.evaluate(token_batches(1, 8)).loss)
            return found + [r.loss for r in p.train(token_batches(5, 8))], 0.0, p.state_dict()

    assert_same(losses(True), losses(False))
    assert [graph.replays for graph in captures] == [3, 3]


class Remembering(nn.Module):
    def __init__(self):
        super().__init__()
        self.carry = Carry()

    def forward(self, x):
        before = self.carry.get()
        self.carry.set(x.detach().mean(0))
        return x if before is None else x + before


def test_a_state_that_is_dropped_begins_again(captures):
    """An infinite value drops what layers carry: batches that begin without are another form, with a graph in time."""

    def model():
        torch.manual_seed(2)
        layers = nn.Sequential(nn.Embedding(11, 8), Remembering(), nn.Linear(8, 11)).double()
        with torch.no_grad():
            layers[0].weight[10] = torch.inf
        return layers

    bad = range(4, 14, 2)
    batches = [(x.clamp(max=9), y) for x, y in token_batches(18, 8)]
    for n in bad:
        batches[n][0][0] = 10
    options = {"skip_nonfinite": True, "optimizer": momentum, "check": "off"}
    runs = [train(batches, graphs, Plan(stages=2), model, **options) for graphs in (False, True)]
    finite = [[loss for n, loss in enumerate(run[0]) if n not in bad] for run in runs]
    assert finite[0] == finite[1]
    assert all(torch.equal(value, runs[1][2][name]) for name, value in runs[0][2].items())
    assert len(captures) == 2  # with a carried value, and without


def test_inputs_that_require_gradients_run_without(captures):
    def model():
        torch.manual_seed(1)
        return nn.Sequential(nn.Linear(4, 8), nn.Tanh(), nn.Linear(8, 3)).double()

    def gradients(graphs):
        given = [
            (torch.ones(8, 4, dtype=torch.float64).requires_grad_(), torch.arange(8) % 3) for _ in range(4)
        ]
        train(given, graphs, Plan(stages=2, micro_batches=2), model)
        return [x.grad for x, _ in given]

    assert all(
        (a is None and b is None) or torch.equal(a, b) for a, b in zip(gradients(False), gradients(True))
    )
    assert not captures


def test_inputs_in_another_order_of_memory_are_another_form(captures):
    def model():
        torch.manual_seed(1)
        return nn.Sequential(nn.Conv2d(3, 8, 3), nn.Flatten(), nn.Linear(32, 3))

    draw = torch.Generator().manual_seed(3)
    images = [torch.randn(4, 3, 4, 4, generator=draw) for _ in range(10)]
    given = [
        (x.to(memory_format=torch.channels_last) if n % 2 else x, torch.arange(4) % 3)
        for n, x in enumerate(images)
    ]
    plain, found = (train(given, graphs, Plan(stages=2, micro_batches=2), model) for graphs in (False, True))
    assert_same(found, plain)
    assert len(captures) == 2


def test_sparse_gradients_are_refused(captures):
    def model():
        torch.manual_seed(0)
        return nn.Sequential(nn.Embedding(11, 8, sparse=True), nn.Linear(8, 11)).double()

    sgd = lambda params: torch.optim.SGD(params, lr=0.1)  # noqa: E731
    with pytest.raises(StageError, match="a gradient is sparse; leave CudaGraphs out"):
        train(token_batches(4, 8), True, Plan(stages=2, micro_batches=2), model, optimizer=sgd)


def test_hooks_are_warned_of(captures, caplog):
    def model():
        layers = language_model()
        layers[1].register_forward_hook(lambda module, given, made: made * 1.5)
        return layers

    plain = train(token_batches(5, 8), False, Plan(stages=2), model)
    with caplog.at_level(logging.WARNING, logger="avgpipe"):
        found = train(token_batches(5, 8), True, Plan(stages=2), model)
    assert_same(found, plain)
    assert any("modules with hooks (1)" in record.message for record in caplog.records)


@pytest.mark.host
def test_the_cpu_has_no_graphs():
    options = {"loss_fn": LOSS, "optimizer": adamw, "cuda_graphs": True}
    with pytest.raises(ValueError, match="needs CUDA, not device 'cpu': leave it out"):
        Pipeline(language_model(), Plan(), **grouped(**options))


@pytest.mark.parametrize("weights", ["stash", "vertical-sync", "double-buffer"])
def test_versions_of_the_weights_are_refused(weights):
    """A graph reads the addresses that its capture saw, and a version is other memory that the parameters point to: it
    would train on stale weights without a word. The plan alone tells, on whatever device.
    """
    plan = Plan(stages=2, micro_batches=2, schedule="pipedream", weights=weights)
    options = {"loss_fn": LOSS, "optimizer": adamw, "cuda_graphs": True}
    with pytest.raises(ValueError, match=rf"CudaGraphs\(\) .* weights='{weights}'.*flushes.*leave"):
        Pipeline(language_model(), plan, **grouped(**options))


# ---- the stand-in ------------------------------------------------------------------------------------------


@pytest.mark.host
def test_no_other_thread_issues_on_a_stream_that_is_captured():
    refused = []

    def issue(stream):
        try:
            with stream:
                torch.ones(2, device=DEVICE)
        except CaptureError as error:
            refused.append(str(error))

    with on_streams(GraphsAndStreams()) as account:
        lane, other = account.Stream(), account.Stream()
        with lane, captured(DEVICE):
            torch.ones(2, device=DEVICE)
            for stream in (lane, other):
                thread = threading.Thread(target=issue, args=(stream,))
                thread.start()
                thread.join()
    assert len(refused) == 1
    assert "another thread issues aten.ones" in refused[0]


def test_a_capture_computes_nothing_and_each_launch_draws_by_its_seed(captures):
    device, state, total = torch.device("cpu"), RandomState(), torch.zeros(3)
    graph = RecordedGraph()
    graph.register_generator_state(state)
    graph.capture_begin(capture_error_mode="thread_local")
    RecordedGraph.drawn_from = state
    graph.draw_from(state)
    total.add_(torch.rand(3, device=device))
    RecordedGraph.drawn_from = None
    with pytest.raises(CaptureError, match="draws random numbers"):
        torch.rand(3)
    graph.capture_end()
    assert torch.equal(total, torch.zeros(3))
    for seed in (5, 6):
        state.manual_seed(seed)
        graph.replay()
    expected = [torch.rand(3, generator=torch.Generator().manual_seed(seed)) for seed in (5, 6)]
    assert torch.equal(total, sum(expected))
