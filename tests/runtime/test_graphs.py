"""What may become a CUDA graph, and runs whose graphs are recorded operators, by the rules of captures."""

from __future__ import annotations

import logging
import threading

import pytest
import torch
from torch import nn

from avgpipe import Pipeline, Plan
from avgpipe.errors import StageError
from avgpipe.measure.memory import SavedBytes
from avgpipe.model.context import Carry, Position
from avgpipe.runtime.graphs import StageGraphs
from avgpipe.runtime.stage import Stage
from avgpipe.runtime.streams import captured
from tests.happens_before.on_cpu import on_streams
from tests.happens_before.operators import DEVICE
from tests.options import grouped
from tests.runtime.capture_rules import CaptureError, GraphsAndStreams, RecordedGraph, capture_rules
from tests.runtime.cases import adamw, language_model, token_batches

CPU = torch.device("cpu")


def stage_of(*layers: nn.Module) -> Stage:
    return Stage(layers, 0, 0, 0, CPU).train()


@pytest.fixture
def captures():
    """The CPU has graphs, which are recorded operators; they are in the list."""
    with capture_rules() as backend:
        yield backend.graphs


class Noise(nn.Module):
    def forward(self, x):
        return x + torch.rand_like(x)


class Carrying(nn.Module):
    def __init__(self):
        super().__init__()
        self.carry = Carry()

    def forward(self, x):
        return x


def test_stages_that_differ_from_pass_to_pass_are_refused(captures):
    for layers, reason in [
        (
            (nn.Linear(4, 4), nn.Dropout(0.1)),
            r"Dropout \('1' of stage 0\) draws random numbers.*probability to 0",
        ),
        ((nn.LSTM(4, 4, 2, dropout=0.5),), "LSTM .* draws random numbers"),
        ((Carrying(),), "carries state.*leave CudaGraphs out"),
    ]:
        with pytest.raises(ValueError, match=reason):
            StageGraphs(stage_of(*layers))
    graphs = StageGraphs(stage_of(nn.Linear(4, 4), Noise()))
    with pytest.raises(ValueError, match="a layer of stage 0 draws random numbers"):
        graphs(torch.ones(2, 4), Position(0, 0, 0))
    StageGraphs(stage_of(nn.Linear(4, 4), nn.Dropout(0.0)))


@pytest.mark.host
def test_the_cpu_has_no_graphs():
    options = {"loss_fn": nn.CrossEntropyLoss(), "optimizer": adamw, "cuda_graphs": True}
    with pytest.raises(ValueError, match="needs CUDA, not device 'cpu': leave it out"):
        Pipeline(language_model(), Plan(), **grouped(**options))


@pytest.mark.parametrize(
    "plan",
    [
        Plan(stages=2, micro_batches=2, schedule="pipedream", weights=weights)
        for weights in ("stash", "vertical-sync", "double-buffer")
    ],
    ids=lambda plan: plan.weights,
)
def test_versions_of_the_weights_are_refused(plan):
    """A graph reads the addresses that its capture saw, and a version is other memory that the parameters point to: it
    would train on stale weights without a word. The plan alone tells, on whatever device.
    """
    options = {"loss_fn": nn.CrossEntropyLoss(), "optimizer": adamw, "cuda_graphs": True}
    with pytest.raises(ValueError, match=rf"CudaGraphs\(\) .* weights='{plan.weights}'.*flushes.*leave"):
        Pipeline(language_model(), plan, **grouped(**options))


def train(batches, graphs, plan=None, **options):
    """Losses, evaluation loss and weights."""
    plan = plan or Plan(stages=3, pipelines=2, batch="per-pipeline", micro_batches=3)
    options = {"loss_fn": nn.CrossEntropyLoss(), "optimizer": adamw, "cuda_graphs": graphs, **options}
    with Pipeline(language_model(), plan, **grouped(**options)) as p:
        return [r.loss for r in p.train(batches)], p.evaluate(batches).loss, p.state_dict()


def test_a_captured_run_is_the_run_without(captures, caplog):
    batches = token_batches(6, 9, last=7)
    plain = train(batches, False)
    with caplog.at_level(logging.INFO, logger="avgpipe"):
        captured = train(batches, True)
    assert captured[:2] == plain[:2]
    assert all(torch.equal(value, captured[2][name]) for name, value in plain[2].items())
    assert len(captures) == 2 * 3 * 2 * 3  # forward and backward, stages, pipelines, micro-batches
    # The last batch's micro-batches have 3, 2 and 2 samples: each lane of pipeline 1 says once that it runs without.
    assert sum("without CUDA graphs" in record.message for record in caplog.records) == 3


@pytest.mark.host  # it has an account of its own
@pytest.mark.parametrize("batch", ["per-pipeline", "global"])
@pytest.mark.parametrize("staleness", [0, 1])
def test_graphs_are_launched_in_the_order_of_streams(batch, staleness):
    """What a graph reads and writes is the same memory each time: of another batch, or of another stage's lane."""
    plan = Plan(stages=3, pipelines=2, batch=batch, micro_batches=4, staleness=staleness)
    batches = token_batches(6, 9, last=7)
    plain = train(batches, False, plan)
    with on_streams(GraphsAndStreams()) as account:
        found = train(batches, True, plan)
    assert account.graphs
    assert not account.memory.found
    assert found[:2] == plain[:2]


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


def test_capturing_leaves_buffers_and_gradients_as_they_were(captures):
    stage = stage_of(nn.Linear(4, 4), nn.BatchNorm1d(4))
    graphs = StageGraphs(stage)
    x = torch.randn(6, 4)
    expected = nn.functional.batch_norm(stage.layers[0](x), None, None, training=True)
    output = graphs(x, Position(0, 0, 0))
    torch.testing.assert_close(output, expected)
    assert int(stage.layers[1].num_batches_tracked) == 0
    assert stage.statistics is not None
    stage.statistics.commit(0)
    assert int(stage.layers[1].num_batches_tracked) == 1
    assert all(p.grad is None for p in stage.parameters())


def test_what_is_sent_back_is_not_the_graph_s_memory(captures):
    x = torch.ones(2, 4, requires_grad=True)
    graphs = StageGraphs(stage_of(nn.Linear(4, 4)))
    graphs(x, Position(0, 0, 0)).sum().backward()
    first, again = x.grad, x.grad.clone()
    graphs(torch.zeros(2, 4, requires_grad=True), Position(0, 1, 0)).prod().backward()
    assert torch.equal(first, again)


def test_values_keep_their_structure(captures):
    class Fork(nn.Module):
        def forward(self, value):
            return {"x": value[0] * value[1], "mask": value[0] > 0, "text": "plain", "scale": value[1]}

    graphs = StageGraphs(stage_of(Fork()))
    for n in range(3):
        result = graphs((torch.full((2,), float(n)), 0.5), Position(0, n, 0))
        assert (result["text"], result["scale"]) == ("plain", 0.5)
        assert torch.equal(result["x"], torch.full((2,), n * 0.5))
        assert result["mask"].dtype == torch.bool


# ---- gradients in fixed memory ---------------------------------------------------------------------------------------

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


@pytest.mark.grid(10)
@pytest.mark.parametrize("plan", PLANS, ids=str)
@pytest.mark.parametrize(
    "options",
    [{}, {"clip_grad_norm": 0.1}, {"loss_scale": 8.0, "clip_grad_norm": 0.1}, {"skip_nonfinite": True}],
    ids=lambda options: "-".join(options) or "plain",
)
def test_every_way_of_updates_gets_the_gradients_of_a_run_without(captures, plan, options):
    batches = token_batches(6, 12, last=9)
    plain, captured = (train(batches, graphs, plan, **options) for graphs in (False, True))
    assert captures
    assert captured[:2] == plain[:2]
    assert all(torch.equal(value, captured[2][name]) for name, value in plain[2].items())


def test_gradients_add_up_in_one_place_until_they_are_dropped(captures):
    stage = stage_of(nn.Linear(4, 3))
    graphs, (weight, bias) = StageGraphs(stage), stage.parameters()
    x = torch.randn(2, 4)
    graphs(x, Position(0, 0, 0)).sum().backward()
    memory, once = weight.grad, weight.grad.clone()
    graphs(x, Position(0, 0, 1)).sum().backward()
    assert weight.grad is memory
    torch.testing.assert_close(weight.grad, 2 * once)
    bias.grad = None  # somebody drops one alone
    graphs(x, Position(0, 0, 0)).sum().backward()
    assert torch.equal(bias.grad, torch.full((3,), 2.0))
    torch.testing.assert_close(weight.grad, 3 * once)
    weight.grad = once.clone()  # of a micro-batch that ran without graphs
    graphs(x, Position(0, 0, 0)).sum().backward()
    assert weight.grad is memory
    torch.testing.assert_close(weight.grad, 2 * once)
    weight.grad = bias.grad = None
    graphs(x, Position(0, 1, 0)).sum().backward()
    assert torch.equal(weight.grad, once)


def test_parameters_that_are_not_used_have_no_gradient(captures):
    class Half(nn.Module):
        def __init__(self):
            super().__init__()
            self.used, self.idle = nn.Linear(4, 4), nn.Linear(4, 4)

        def forward(self, x):
            return self.used(x), self.idle(x).detach()

    stage = stage_of(Half())
    outputs = StageGraphs(stage)(torch.ones(2, 4), Position(0, 0, 0))
    assert [o.requires_grad for o in outputs] == [True, False]
    outputs[0].sum().backward()
    half = stage.layers[0]
    assert half.used.weight.grad is not None
    assert half.idle.weight.grad is None


# ---- rules of captures -----------------------------------------------------------------------------------------------


class Looks(nn.Module):
    def forward(self, x):
        return x * 2 if float(x.detach().sum()) > 0 else x


class DrawsLate(nn.Module):
    """Draws with a generator of its own, which nobody would miss."""

    def __init__(self):
        super().__init__()
        self.generator = torch.Generator()

    def forward(self, x):
        return x + torch.rand(x.shape, generator=self.generator)


@pytest.mark.parametrize(("layer", "why"), [(Looks(), "waits for the device"), (DrawsLate(), "draws random")])
def test_what_a_capture_forbids_is_said(captures, layer, why):
    with pytest.raises(
        StageError, match=f"stage 0 cannot be captured as a CUDA graph: .*{why}.*leave CudaGraphs"
    ):
        StageGraphs(stage_of(nn.Linear(4, 4), layer))(torch.ones(2, 4), Position(0, 0, 0))
    assert RecordedGraph.current is None  # the capture has ended


def test_weights_that_move_are_noticed(captures):
    stage = stage_of(nn.Linear(4, 4))
    graphs = StageGraphs(stage)
    graphs(torch.ones(2, 4), Position(0, 0, 0))
    stage.layers[0].weight.data = torch.zeros(4, 4)
    with pytest.raises(CaptureError, match="has moved"):
        graphs(torch.ones(2, 4), Position(0, 1, 0))


def test_captures_warm_up_once_and_empty_the_cache_once():
    class Counts(nn.Module):
        calls = 0

        def forward(self, x):
            Counts.calls += 1
            return x * 2

    with capture_rules() as backend:
        graphs = StageGraphs(stage_of(nn.Linear(4, 4), Counts()))
        for m in range(3):
            graphs(torch.ones(2, 4), Position(0, 0, m))
        assert backend.emptied == 1
        assert Counts.calls == 3 + 3  # the look for random numbers, two to warm up; a capture each
        for m in range(3):
            graphs(torch.ones(2, 4), Position(0, 1, m))
        assert Counts.calls == 6
        pools = [graph.pool() for graph in backend.graphs]
        assert pools[0::2] == pools[1::2]  # a forward's and its backward's
        assert len(set(pools)) == 3


def test_what_is_saved_counts_once(captures):
    layers = nn.Linear(4, 4), nn.Tanh()
    x = torch.ones(2, 4)
    counts = []
    for run in (stage_of(*layers), StageGraphs(stage_of(*layers))):
        saved = SavedBytes([])
        with saved.counting():
            run(x.clone(), Position(0, 0, 0))
        counts.append(saved.bytes)
    assert counts[0] == counts[1]
