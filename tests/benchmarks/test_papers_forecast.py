"""Simulated systems on the papers' cluster: what binds them, and that pipelines share a batch."""

from dataclasses import replace
from itertools import product

import pytest

from avgpipe.plan import Plan
from avgpipe.planning import steady_batch_s
from benchmarks.papers.cluster import BETWEEN_BYTES_PER_S, cluster, profile_of
from benchmarks.papers.forecast import Contest, OnHosts, average_s, plans, rows, summary, table, tell_s
from benchmarks.papers.models import MODELS, PaperLayer, PaperModel, Product, SharedWeights

PEAK, LINE = 0.7 * 15.7e12, BETWEEN_BYTES_PER_S


def chain_of(layers, flops, cut_bytes, shared=()):
    """Make a model of equal layers of a million weights, without an optimizer's state."""
    made = [
        PaperLayer(
            f"layer {n}", 10**6, (Product(flops),), cut_bytes if n < layers - 1 else 0.0, 8 * cut_bytes
        )
        for n in range(layers)
    ]
    return PaperModel("a chain", "this test", 24, (), 1000, 0, tuple(made), shared)


def on_hosts(model, plan):
    return OnHosts(profile_of(model), plan, model.batch_size, cluster())


def test_the_middle_host_sends_activations_and_gradients():
    model = chain_of(6, 1e6, 10_000.0)
    problem = on_hosts(model, Plan.for_system("dapple", stages=6, micro_batches=4))
    assert problem.line_s((1, 2, 3, 4, 5)) == pytest.approx(24 * 2 * 10_000 / LINE)
    assert Contest(model, profile_of(model)).quickest("DAPPLE", workers=6).binds == "line"


def test_where_little_is_sent_computing_binds():
    model = chain_of(6, 1e9, 100.0)
    found = Contest(model, profile_of(model)).quickest("DAPPLE", workers=6)
    assert found.device_s == pytest.approx(24 * 3e9 / PEAK, rel=0.01)  # and the update
    assert found.binds in ("compute", "bubble")
    assert found.line_s < 0.01 * found.batch_s


def test_pipelines_share_the_batch():
    model = chain_of(6, 1e9, 1000.0)
    problem = on_hosts(model, Plan(stages=6, pipelines=2, micro_batches=8))
    cut = (1, 2, 3, 4, 5)
    each = Plan(stages=6, micro_batches=4).build_schedule()
    assert 2 * problem.seconds(cut) == pytest.approx(
        2 * steady_batch_s(each, problem.costs(cut), pipelines=2)
    )
    assert problem.device_s(cut) == pytest.approx(24 * 3e9 / PEAK, rel=0.01)


def test_gradients_of_tied_weights_go_between_hosts_for_each_pipeline():
    tied = (SharedWeights((0, 5), 10**6),)
    plain, model = chain_of(6, 1e6, 100.0), chain_of(6, 1e6, 100.0, tied)
    cut = (1, 2, 3, 4, 5)
    for n in (1, 2):
        plan = Plan(stages=6, pipelines=n, micro_batches=4)
        more_s = on_hosts(model, plan).line_s(cut) - on_hosts(plain, plan).line_s(cut)
        # The line of the first or the last host, which otherwise has half of what the middle one's has.
        assert more_s == pytest.approx(n * 4e6 / LINE, rel=1e-3)


def test_every_replica_sends_its_gradients_of_tied_weights():
    tied = (SharedWeights((0, 5), 10**6),)
    plan = Plan.for_system("gpipe", stages=3, micro_batches=4, replication=[2, 2, 2])
    plain_s, tied_s = (on_hosts(chain_of(6, 1e6, 100.0, t), plan).line_s((2, 4)) for t in ((), tied))
    assert tied_s - plain_s == pytest.approx(2 * 4e6 / LINE, rel=1e-3)


def test_a_stage_says_what_it_does_and_has():
    model = chain_of(6, 1e9, 1000.0, (SharedWeights((0, 5), 10**6),))
    first, second, third = on_hosts(model, Plan(stages=3, micro_batches=8)).stages((2, 4))
    micro_batch_s = 3 * 2 * 1e9 / PEAK  # of three samples, two layers
    assert [work.forward_s for work in (first, second, third)] == pytest.approx([micro_batch_s] * 3)
    assert second.backward_s == pytest.approx(2 * micro_batch_s)
    assert second.input_backward_s == pytest.approx(micro_batch_s)
    assert (first.input_bytes, first.output_bytes, third.output_bytes) == (0, 3000, 0)
    assert [work.own_bytes for work in (first, second, third)] == [4e6, 8e6, 4e6]
    assert [work.tied_bytes for work in (first, second, third)] == [{0: 4e6}, {}, {0: 4e6}]


def test_data_parallelism_sends_its_gradients_around_a_ring():
    model = chain_of(6, 1e6, 100.0)
    found = Contest(model, profile_of(model)).quickest("data parallel", workers=6)
    assert found.line_s == average_s(model, 6) == pytest.approx(2 * 5 / 6 * 24e6 / LINE)
    assert found.binds == "line"


def test_hosts_average_as_often_as_they_can_while_they_compute():
    model = chain_of(6, 1e9, 1000.0)
    contest = Contest(model, profile_of(model))
    found = contest.on_each_host()
    assert found.device_s == pytest.approx(
        24 / 3 * 3 * 3e9 / PEAK, rel=0.01
    )  # a third of the samples, half the layers
    assert found.line_s == tell_s(model, 3) / found.period < found.batch_s
    assert tell_s(model, 3) / (found.period - 1) > 0.9 * found.batch_s


def test_a_limit_of_memory_excludes_plans():
    model = chain_of(6, 1e9, 1000.0)
    contest = Contest(model, profile_of(model))
    free = contest.quickest("AvgPipe", 2, workers=6)
    assert free.plan.pipelines == 2
    assert contest.quickest("AvgPipe", 2, workers=6, limit=free.memory_bytes / 4) is None
    assert contest.quickest("AvgPipe", 2, workers=6, limit=free.memory_bytes).batch_s == free.batch_s


@pytest.mark.parametrize("updates", [2, 4])
def test_parts_of_a_batch_are_predicted_for_no_more_than_the_other_parts(updates):
    system = {2: "AvgPipe halves predicted", 4: "AvgPipe quarters predicted"}[updates]
    found = list(plans(system, 24 / updates, workers=6))
    assert {plan.correction for plan in found} == {"predicted"}
    assert max(max(plan.delays) for plan in found) == max(1, updates - 1)
    assert {0, (5, 4, 3, 2, 1, 0)} <= {plan.advance or 0 for plan in plans(system, 24, workers=6)}


def test_a_batch_of_several_updates_takes_as_many_of_its_plans():
    model = chain_of(6, 1e9, 1000.0)
    found = Contest(model, profile_of(model)).quickest("AvgPipe halves predicted", workers=6)
    assert found.updates == 2
    assert found.plan.system == "pipedream-predicted"
    assert found.device_s == pytest.approx(24 * 3e9 / PEAK, rel=0.01)
    assert found.line_s == pytest.approx(24 * 2 * 1000 / LINE)
    assert f"M = 2 x {found.plan.micro_batches}" in found.described


def test_a_correction_holds_a_copy_of_the_weights_more():
    model, cut = chain_of(6, 1e9, 1000.0), (1, 2, 3, 4, 5)
    plain = Plan.for_system("pipedream-2bw", stages=6, micro_batches=6)
    for correction in ("error-feedback", "predicted"):
        more = on_hosts(model, replace(plain, correction=correction)).forecast(cut).memory_bytes
        kept = on_hosts(model, plain).forecast(cut).memory_bytes
        assert [a - b for a, b in zip(more, kept)] == pytest.approx([4e6] * 6)


def test_one_optimizer_needs_less_than_one_for_each_pipeline():
    model, cut = replace(chain_of(6, 1e9, 1000.0), optimizer_bytes=8), (1, 2, 3, 4, 5)
    options = {"stages": 6, "pipelines": 3, "micro_batches": 6}
    one, each = (
        on_hosts(model, Plan.for_system(system, **options)).forecast(cut).memory_bytes
        for system in ("avgpipe", "avgpipe-elastic")
    )
    # Two states of 8 bytes less, a buffer of gradients more.
    assert [b - a for a, b in zip(one, each)] == pytest.approx([2 * 8e6 - 4e6] * 6)


@pytest.mark.parametrize(
    "system", ["GPipe", "DAPPLE", "PipeDream", "PipeDream-2BW", "EA-Pipe", "zero bubble", "AvgPipe"]
)
def test_a_system_has_plans_on_six_devices(system):
    found = list(plans(system, 32, workers=6))
    assert found
    assert {plan.workers for plan in found} == {6}
    assert all(plan.micro_batches <= 32 for plan in found)


@pytest.mark.slow
def test_every_system_is_a_row_and_says_what_binds():
    model = replace(MODELS["awd-lstm"], batch_size=8)
    contest = Contest(model, profile_of(model, reading=True))
    found = rows(contest, None)
    names = [name for name, _ in found]
    assert names[:8] == [
        "data parallel",
        "GPipe",
        "DAPPLE",
        "PipeDream",
        "PipeDream-2BW",
        "EA-Pipe",
        "zero bubble",
        "AvgPipe, N = 1",
    ]
    assert "AvgPipe (G), a pipeline on each host" in names
    for mark, bits in product(("", " (P)", " (G)"), ("", ", 16 bits")):
        ways = [name for name in names if name.startswith(f"AvgPipe{mark},") and ("16" in name) == bool(bits)]
        best = dict(found)[f"AvgPipe{mark}{bits}, best"]
        others = [dict(found)[n] for n in ways if "best" not in n and "host" not in n]
        assert len(others) == 11
        assert best.varied_s <= 1.01 * min(o.varied_s for o in others if o is not None)
        assert best.way in best.described
    assert table("a title", found).row_count == len(found)
    assert "24.2 M parameters in 5 layers" in summary(model)[0]
    limit = dict(found)["GPipe"].memory_bytes
    assert all(f is None or f.memory_bytes <= limit for name, f in found if "(G)" in name)


def test_half_the_bits_take_half_the_time_on_a_line():
    model, cut = chain_of(6, 1e6, 10_000.0, (SharedWeights((0, 5), 10**6),)), (1, 2, 3, 4, 5)
    plan = Plan.for_system("dapple", stages=6, micro_batches=4)
    wide, narrow = (OnHosts(profile_of(model), plan, 24, cluster(), bits).line_s(cut) for bits in (32, 16))
    assert narrow == pytest.approx(wide / 2)
    found = Contest(model, profile_of(model)).quickest("DAPPLE", workers=6, wire_bits=16)
    assert (found.wire_bits, found.described[-9:]) == (16, ", 16 bits")


def test_plans_that_have_something_in_hand_are_chosen_among_equals():
    model, cut = chain_of(6, 1e6, 10_000.0), (1, 2, 3, 4, 5)
    few, many = (Plan(stages=6, micro_batches=12, advance=advance) for advance in (0, (5, 4, 3, 2, 1, 0)))
    seconds = [on_hosts(model, plan).forecast(cut).batch_s for plan in (few, many)]
    assert seconds[1] < seconds[0]
