"""Plans on the emulated cluster: stages take their time and have their sizes, scales, busy workers, and real runs."""

from contextlib import contextmanager
from dataclasses import asdict, replace
from functools import partial

import pytest
import torch

from avgpipe.pipeline import Pipeline
from avgpipe.plan import Plan
from avgpipe.schedule.row import Event
from avgpipe.timeline.timeline import Timeline
from avgpipe_lab.bench import schedules
from avgpipe_lab.bench.schedules import mean_loss
from benchmarks.papers import stages
from benchmarks.papers.cluster import profile_of
from benchmarks.papers.forecast import Contest, Outcome, StageWork
from benchmarks.papers.runs import emulation, measure, utilisation
from benchmarks.papers.stages import PaperStage, optimizer_of, scaled, stages_of, values
from tests.benchmarks.test_papers_forecast import chain_of
from tests.lab.bench.test_namespaces import needs_root

WORK = StageWork(2e-3, 6e-3, 2e-3, 0.0, 40.0, 80.0, 400.0, {})
TIED = replace(WORK, own_bytes=40.0, tied_bytes={0: 24.0})


@pytest.fixture
def taken(monkeypatch):
    """For how many seconds the device was occupied, each time."""
    times = []

    @contextmanager
    def occupied(seconds):
        times.append(seconds)
        yield

    for module in (schedules, stages):
        monkeypatch.setattr(module, "occupied", occupied)
    return times


def test_a_stage_takes_its_time_and_hands_on_what_it_should(taken):
    stage = PaperStage(1, WORK, [])
    x = torch.ones(3, 10, requires_grad=True)
    made = stage(x)
    assert taken == [2e-3]
    assert made.shape == (3, 20)
    made.sum().backward()
    assert sum(taken) == pytest.approx(8e-3)
    assert x.grad.shape == (3, 10)
    assert stage.own.grad.shape == (100,)


def test_the_halves_of_a_backward_can_run_apart(taken):
    stage = PaperStage(1, WORK, [])
    x = torch.ones(1, 10, requires_grad=True)
    output = stage(x).sum()
    torch.autograd.grad(output, x, retain_graph=True)
    torch.autograd.grad(output, stage.own)
    assert taken == pytest.approx([2e-3, 2e-3, 4e-3])


def test_without_a_gradient_of_its_input_a_stage_spends_all_on_its_weights(taken):
    stage = PaperStage(0, WORK, [])
    torch.autograd.grad(stage(torch.ones(1, 10)).sum(), stage.own)
    assert taken == pytest.approx([2e-3, 6e-3])


def test_stages_share_what_is_tied():
    first, middle, last = stages_of([TIED, WORK, TIED])
    assert first.tied[0] is last.tied[0]
    assert first.tied[0].shape == (6,)
    assert len(middle.tied) == 0


def test_what_does_not_travel_is_one_number():
    work = scaled(TIED, 1 / 4, 10.0, 0.0)
    assert [values(size) for size in (work.own_bytes, work.tied_bytes[0], work.output_bytes)] == [1, 2, 5]
    assert (work.forward_s, work.backward_s) == pytest.approx((20e-3, 60e-3))


@pytest.mark.parametrize(
    ("options", "share"),
    [
        ({}, 1.0),
        ({"pipelines": 2, "rule": "avgpipe"}, 1.0),
        ({"pipelines": 2, "rule": "mean-gradient"}, 2 / 3),
    ],
)
def test_a_round_of_steps_takes_as_long_as_the_pipelines_updates(taken, options, share):
    works = [replace(WORK, update_s=5e-3), replace(WORK, update_s=30e-3)]
    plan = Plan(stages=2, micro_batches=2, **options)
    optimizer = optimizer_of(works, plan, list(stages_of(works)[1].parameters()))
    optimizer.param_groups[0]["params"][0].grad = torch.ones(100)
    before = optimizer.param_groups[0]["params"][0].clone()
    optimizer.step()
    assert taken == pytest.approx([30e-3 * share])
    assert torch.equal(before, optimizer.param_groups[0]["params"][0])


@pytest.mark.parametrize(
    "plan",
    [
        Plan(stages=2, pipelines=2, micro_batches=4),
        Plan(stages=2, pipelines=2, micro_batches=4, rule="avgpipe"),
        Plan(stages=4, micro_batches=4, schedule="zero-bubble-v"),
        Plan.for_system("pipedream-predicted", stages=2, micro_batches=2),
        Plan.for_system("pipedream-2bw", stages=2, micro_batches=2, correction="error-feedback"),
        Plan.for_system("ea-pipe", stages=2),
    ],
    ids=lambda plan: f"{plan.system} {plan.schedule} {plan.rule}",
)
def test_the_runtime_takes_the_stages_in_one_process(plan):
    works = [
        replace(WORK, forward_s=0.0, backward_s=0.0, input_backward_s=0.0, input_bytes=80.0)
    ] * plan.stages
    works[0] = works[-1] = replace(works[0], own_bytes=40.0, tied_bytes={0: 24.0})
    inputs, targets = torch.ones(plan.micro_batches, 1), torch.zeros(plan.micro_batches, 1)
    plan = replace(plan, partition=tuple(range(1, plan.stages)))
    with Pipeline(
        stages_of(works), plan, loss_fn=mean_loss, optimizer=partial(optimizer_of, works, plan)
    ) as pipeline:
        losses = [result.loss for result in pipeline.train([(inputs, targets)] * 4)]
    assert len(losses) == 4
    assert losses == pytest.approx([losses[0]] * 4)  # nothing is learnt


# ---- scales ----------------------------------------------------------------------------------------------------------


def contest_of(model):
    return Contest(model, profile_of(model))


def row_of(outcome, system="GPipe"):
    return {"system": system, **asdict(outcome)}


def made(plan, system="GPipe", batch_s=1.0, cut_bytes=1000.0, **options):
    model = chain_of(6, 1e9, cut_bytes)
    return emulation(
        contest_of(model), row_of(Outcome(plan, batch_s, batch_s, 0.0, 0.0, 0.0, **options), system)
    )


def test_weights_are_few_and_bytes_true_where_none_travel():
    found = made(Plan.for_system("gpipe", stages=6, micro_batches=4, partition=[1, 2, 3, 4, 5]))
    assert (found.scale, found.slower) == (1, 4)
    assert [work.own_bytes for work in found.stages] == [0.0] * 6
    assert found.stages[1].input_bytes == 6 * 1000
    assert found.stages[1].forward_s == pytest.approx(4 * found.works[1].forward_s)
    assert found.rate_bits_per_s == 1e9 / 4


def test_weights_that_travel_are_scaled_with_the_lines():
    plan = Plan.for_system("gpipe", stages=3, micro_batches=4, partition=[2, 4], replication=[2, 2, 2])
    found = made(plan, cut_bytes=1e6)  # 6 MB of a micro-batch
    assert (found.scale, found.slower) == (16, 4)
    assert made(plan, cut_bytes=40_000.0).scale == 2
    assert made(plan, cut_bytes=1000.0).scale == 1
    assert found.stages[1].own_bytes == 2 * 4e6 / 16
    assert found.stages[1].input_bytes == found.works[1].input_bytes / 16
    assert found.rate_bits_per_s == 1e9 / 16 / 4
    assert made(plan, batch_s=10.0, cut_bytes=1e6).slower == 1


def test_what_is_added_up_makes_it_slower():
    plan = Plan.for_system("gpipe", stages=3, micro_batches=4, partition=[2, 4], replication=[2, 2, 2])
    found = made(plan, batch_s=0.01)
    assert found.summed_bytes == 2 * 2 * 4e6  # two micro-batches of a replica, two layers
    assert found.slower * 0.01 >= (found.actions * 1.5e-3 + 16e-3) / 0.05


def test_the_hosts_work_is_a_small_part_of_a_batch():
    plan = Plan.for_system("dapple", stages=6, micro_batches=12, partition=[1, 2, 3, 4, 5])
    found = made(plan, batch_s=0.05)
    assert found.actions == 25  # 12 forwards, 12 backwards and the update
    assert found.slower * 0.05 >= 25 * 1.5e-3 / 0.05 > (found.slower - 1) * 0.05
    halves = made(replace(plan, micro_batches=6), batch_s=0.05, updates=2)
    assert halves.actions == 26


def test_a_round_has_whole_periods_and_few_batches_that_take_long():
    plan = Plan.for_system("gpipe", stages=6, micro_batches=4, partition=[1, 2, 3, 4, 5])
    assert [made(plan, batch_s=batch_s).batches(4) for batch_s in (0.5, 1.0, 20.0)] == [4, 2, 1]


def test_a_pipeline_on_each_host_averages_less_in_a_shorter_period():
    plan = Plan(stages=2, micro_batches=4, partition=[3])
    found = made(plan, "AvgPipe, a pipeline on each host", period=80)
    assert (found.plan.pipelines, found.plan.micro_batches, found.plan.spread) == (3, 12, True)
    assert found.plan.workers == 6
    assert (found.plan.period, found.measured.period) == (80, 8)
    assert found.stages[0].own_bytes == pytest.approx(3 * 4e6 * 8 / 80)
    assert found.batches(4) == 8


# ---- what was measured -----------------------------------------------------------------------------------------------


def test_utilisation_is_of_the_middle_half_and_counts_overlaps_once():
    # Worker 0 is busy every other second, worker 1 all the time, in two ways at once.
    events = [Event(0, 0, n, 0, "F", 2.0 * n, 2.0 * n + 1) for n in range(20)]
    events += [Event(1, i, n, 0, "B", float(n), n + 1.0) for n in range(40) for i in range(2)]
    events += [Event(0, 0, 0, 0, "recv", 0.0, 40.0)]
    found = utilisation(Timeline(2, tuple(events)), 1.0)
    assert found["busy"] == pytest.approx([0.5, 1.0])
    assert found["seconds"] == 4.0
    assert len(found["over_time"]) == 120
    assert set(found["over_time"]) == {0.5, 1.0}
    assert sum(found["over_time"]) / 120 == pytest.approx(0.75)


@pytest.mark.ranks
@pytest.mark.root
@needs_root
@pytest.mark.parametrize(
    ("plan", "system", "options"),
    [
        (Plan(stages=3, pipelines=2, micro_batches=4, partition=[2, 4]), "AvgPipe, N = 2", {}),
        (Plan(stages=2, micro_batches=2, partition=[3]), "AvgPipe, a pipeline on each host", {"period": 2}),
    ],
    ids=["three workers", "each host"],
)
def test_the_real_runtime_drives_the_cluster(plan, system, options):
    model = chain_of(6, 1e9, 1000.0)
    outcome = Outcome(plan, 0.02, 0.02, 0.0, 0.0, 0.0, **options)
    found = measure(emulation(contest_of(model), row_of(outcome, system), slower=1), rounds=1, batches=1)
    workers = 6 if options else 3
    assert len(found["samples_s"]) == 1
    assert found["median_s"] > 0
    assert len(found["busy_fraction"]) == workers
    assert all(0 < busy <= 1 for busy in found["busy_fraction"])
    assert found["simulated_s"] == 0.02
