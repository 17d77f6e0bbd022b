"""One worker with emulated neighbours: the times of messages, lanes in turn, and a record that may be cut off."""

from __future__ import annotations

import json
import sys
from itertools import pairwise

import pytest
import torch

from benchmarks.one_card import issue, one_worker, stage_of_pipeline
from benchmarks.one_card.arrivals import DeviceWaits
from benchmarks.one_card.lane import Lane
from benchmarks.one_card.neighbours import Arrivals, Worker
from benchmarks.one_card.networks import stage_models
from benchmarks.one_card.record import RowsRecord

CPU = torch.device("cpu")


# ---- when messages arrive ---------------------------------------------------------------------------------------


@pytest.mark.parametrize("stage", range(4))
@pytest.mark.parametrize("micro_batches", [2, 4, 8])
@pytest.mark.parametrize("advance", [0, 4])
def test_a_batch_takes_every_stage_as_long_as_a_pipeline_that_flushes(stage, micro_batches, advance):
    worker = Worker(4, stage, micro_batches, advance, forward_s=1.0, backward_s=2.0)
    assert worker.batch_s() == (micro_batches + 4 - 1) * (1.0 + 2.0)


def test_messages_travel_at_once_and_arrive_at_the_neighbours_pace():
    gradients = Worker(4, 0, 4, 0, 1.0, 2.0).gradients
    assert gradients == Arrivals(9.0, 3.0)
    assert gradients.times([1.0, 2.0, 3.0, 40.0]) == [10.0, 13.0, 16.0, 49.0]


def test_a_wire_delays_messages_and_its_own_pace_counts():
    worker = Worker(4, 1, 4, 0, 1.0, 2.0, message_s=5.0)
    assert worker.gradients == Arrivals(2 * 13.0, 5.0)
    assert worker.inputs == Arrivals(13.0, 5.0)
    assert Worker(4, 0, 4).inputs is None
    assert Worker(4, 3, 4).gradients is None


def test_a_row_begins_with_the_warm_up_of_its_stage():
    kinds = [Worker(4, k, 4).row for k in (0, 3)]
    assert "".join(act.kind for act in kinds[0]) == "FFFFBBBB"
    assert "".join(act.kind for act in kinds[1]) == "FBFBFBFB"
    assert "".join(act.kind for act in Worker(4, 3, 4, advance=1).row) == "FFBFBFBB"


class Timed:
    """A stream that knows only the time at which its work is done; an event is that time."""

    device, now = "a device", 0.0

    def wait_event(self, event):
        self.now = max(self.now, event)

    def record_event(self):
        return self.now


@pytest.mark.parametrize("stage", range(4))
@pytest.mark.parametrize("micro_batches", [4, 8])
def test_delays_on_streams_are_the_times_of_the_rule(stage, micro_batches, monkeypatch):
    worker = Worker(4, stage, micro_batches, 4, forward_s=1.0, backward_s=2.0, message_s=0.25)
    current = []

    class Within:
        def __init__(self, stream):
            current.append(stream)

        def __enter__(self):
            return self

        def __exit__(self, *_):
            current.pop()

    def sleep(cycles):
        current[-1].now += cycles / 1000

    monkeypatch.setattr(torch.cuda, "Stream", lambda device: Timed())
    monkeypatch.setattr(torch.cuda, "stream", Within)
    monkeypatch.setattr(torch.cuda, "_sleep", sleep)
    lane = Timed()
    waits = DeviceWaits(worker, lane, 1000)
    for batch in (1, 2):
        waits.begin()
        for act in worker.row:
            waits.before(act)
            lane.now += worker.forward_s if act.kind == "F" else worker.backward_s
            waits.after(act)
        assert lane.now == pytest.approx(batch * worker.batch_s())


# ---- lanes ------------------------------------------------------------------------------------------------------


class Log:
    def __init__(self, number, log):
        self.number, self.log = number, log

    def begin(self):
        self.log.append((self.number, "begin"))

    def before(self, act):
        self.log.append((self.number, "wait", *act))

    def after(self, act):
        self.log.append((self.number, "done", *act))


def test_lanes_are_issued_in_turn_and_each_steps_at_the_end():
    log, worker = [], Worker(2, 1, 2)

    class Fake(Lane):
        def __init__(self, number):
            self.number, self._on_cuda = number, False

        def step(self):
            log.append((self.number, "step"))

    lanes = [Fake(n) for n in range(2)]
    issue.in_turn(worker, lanes, [Log(n, log) for n in range(2)], lambda n, act: log.append((n, *act)))
    of_one = ["begin", ("F", 0), ("B", 0), ("F", 1), ("B", 1), "step"]
    for number in range(2):
        own = [entry[1:] for entry in log if entry[0] == number]
        acts = [entry for entry in own if entry[0] not in ("wait", "done")]
        assert [entry[0] if len(entry) == 1 else entry for entry in acts] == of_one
        for before, run, after in zip(own[1::3], own[2::3], own[3::3]):
            assert (before[1:], after[1:]) == (run, run)
    order = [entry for entry in log if entry[1] in "FB"]
    assert [number for number, *_ in order] == [0, 1] * 4


def test_a_step_takes_the_sum_of_gradients_and_zeroes_it():
    torch.manual_seed(0)
    (model,) = (m for m in stage_models(True) if m.name == "gnmt")
    lane = Lane(model, 2, None, CPU)
    weights = [p.detach().clone() for p in lane._layers.parameters()]
    for act in Worker(1, 0, 2).row:
        lane.run(act)
    sums = [p.grad.clone() for p in lane._layers.parameters()]
    assert all(g.abs().sum() > 0 for g in sums)
    lane.step()
    assert all((p != w).any() for p, w in zip(lane._layers.parameters(), weights))
    assert all(not p.grad.any() for p in lane._layers.parameters())


def test_the_rows_that_answer_the_question_come_first():
    found = list(one_worker.cases(["bert", "gnmt"], list(issue.WAYS), "bf16"))
    assert len(set(found)) == len(found)
    assert {(case.how, case.k, case.M) for case in found[:10]} == {("row", 0, 4)}
    assert [(case.N, case.apart) for case in found[:5]] == [
        (1, False),
        (2, False),
        (2, True),
        (4, False),
        (4, True),
    ]
    assert {case.how for case in found[10:18]} == {"eager", "actions"}
    assert {case.model for case in found[:10]} == {"bert", "gnmt"}


def test_the_program_runs_and_names_what_it_leaves_out(tmp_path, monkeypatch):
    out = tmp_path / "record.json"
    words = [
        "--device",
        "cpu",
        "--small",
        "--dtype",
        "fp32",
        "--models",
        "bert",
        "--rows",
        "4",
        "--out",
        str(out),
    ]
    monkeypatch.setattr(sys, "argv", ["one_worker", *words])
    monkeypatch.setattr(one_worker, "_ROUND_S", 0.0)
    one_worker.main()
    record = json.loads(out.read_text())
    assert [row.get("failed") for row in record["rows"]] == [None] * 4
    assert [row.get("row", row.get("how")) for row in record["rows"]] == [*["eager"] * 3, "update"]
    assert record["rows"][3]["fused_adamw_ms"] > 0
    assert {row["how"] for row in record["left_out"]} == {"eager"}


# ---- one real stage in our runtime ------------------------------------------------------------------------------


def test_delays_pass_activations_and_gradients_on(monkeypatch):
    spent = []
    monkeypatch.setattr(stage_of_pipeline.time, "sleep", spent.append)
    layer = stage_of_pipeline.Delay(stage_of_pipeline.Taken(1.0, 2.0))
    x = torch.randn(3, 4, requires_grad=True)
    y = layer(x)
    assert torch.equal(y, x)
    y.backward(torch.full_like(x, 2.0))
    assert torch.equal(x.grad, torch.full_like(x, 2.0))
    assert spent == [1.0, 2.0]
    assert not layer.weight.grad.any()


def test_the_real_stage_is_where_it_should_be():
    (model,) = (m for m in stage_models(True) if m.name == "bert")
    layers, cuts = stage_of_pipeline.stage_among_delays(model, 1, 4, stage_of_pipeline.Taken(0.0, 0.0))
    assert cuts == [1, 2, 3]
    assert [isinstance(layer, stage_of_pipeline.Delay) for layer in layers] == [True, False, True, True]
    assert all(b > a for a, b in pairwise(cuts))


# ---- the record -------------------------------------------------------------------------------------------------


def test_a_record_has_every_row_at_once_also_those_that_fail(tmp_path):
    out = tmp_path / "record.json"
    record = RowsRecord({"question": "?"}, 100, out)
    assert json.loads(out.read_text())["verdict"] == "0 rows, 0 failed, 0 left out"
    record.measure({"name": "a"}, lambda: {"samples_per_s": 1.0})
    assert json.loads(out.read_text())["rows"][0]["samples_per_s"] == 1.0

    def fails():
        raise RuntimeError("out of\n memory")

    record.measure({"name": "b"}, fails)
    record.leave_out({"name": "c"})
    found = json.loads(out.read_text())
    assert found["rows"][1]["failed"] == "RuntimeError: out of memory"
    assert (found["left_out"], found["verdict"]) == ([{"name": "c"}], "1 rows, 1 failed, 1 left out")


def test_a_row_may_begin_within_the_budget():
    assert RowsRecord({}, -1).is_late
    assert not RowsRecord({}, 100).is_late


class Graph:
    def __init__(self, log):
        self.log = log

    def replay(self):
        self.log.append("replay")


@pytest.mark.parametrize(("way", "captures", "replays"), [("actions", 8, 8), ("row", 2, 2)])
def test_graphs_hold_an_action_or_a_batch_of_one_lane(way, captures, replays):
    log, worker = [], Worker(2, 0, 2)

    class Fake(Lane):
        def __init__(self):
            self._on_cuda = False

        def run(self, act):
            log.append(act)

        def step(self):
            log.append("step")

        def capture(self, work):
            log.append("capture")
            work()
            return Graph(log)

    lanes = [Fake(), Fake()]
    batch = issue.WAYS[way](worker, lanes, [Log(n, []) for n in range(2)])
    assert log.count("capture") == captures
    assert [entry for entry in log if entry in worker.row] == worker.row * 2
    assert log.count("step") == (2 if way == "row" else 0)  # of a batch that is a graph, it is in there
    log.clear()
    batch()
    assert log.count("replay") == replays
    assert log.count("step") == (0 if way == "row" else 2)
