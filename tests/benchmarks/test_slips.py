"""What the generator of slips tries, compares and says."""

import random

import pytest

from benchmarks.slips import train
from benchmarks.slips.catalogue import SLIPS
from benchmarks.slips.models import MODELS, build
from benchmarks.slips.run import kept
from benchmarks.slips.slip import Slip
from benchmarks.slips.trial import EQUAL, PLANS, REFUSED, SILENT, WARNED, Bench, apart
from benchmarks.tables.slips import slips_count, slips_plans, slips_silent

TWO = {"two stages": PLANS["two stages"]}


def test_a_slip_that_changes_nothing_is_equal_and_a_wrong_loss_is_warned_of():
    assert Bench(SLIPS["detach in the middle"], "lora", 0).run(TWO)[0].verdict == EQUAL
    found = Bench(SLIPS["contrastive"], "lora", 0).run(TWO)[0]
    assert found.verdict == WARNED
    assert "no mean" in found.said


def test_what_is_refused_says_why():
    found = Bench(SLIPS["a foreign parameter"], "lora", 0).run(TWO)[0]
    assert found.verdict == REFUSED
    assert "which a Pipeline would never train" in found.said


def test_what_differs_without_a_word_is_silent():
    def make(script, draw):
        calls = []

        def loss(output, target):
            calls.append(0)
            return output.square().mean() * len(calls)

        script.loss_fn = loss

    found = Bench(Slip("a loss that counts", "", make), "lora", 0).run(TWO)[0]
    assert found.verdict == SILENT
    assert found.apart > 0.1


def test_a_seed_gives_the_same_script():
    for name in MODELS:
        mine, theirs = (train.plainly(build(name, 3)) for _ in range(2))
        assert apart(mine, theirs)[0] == 0.0


def test_another_loss_weight_or_buffer_is_a_difference():
    mine, theirs = (train.plainly(build("buffer", 0)) for _ in range(2))
    theirs.state["1.total"] = theirs.state["1.total"] + 1
    assert apart(mine, theirs)[1] == "1.total"
    assert apart(mine, theirs, buffers=False)[0] == 0.0
    theirs.losses.pop()
    assert apart(mine, theirs)[0] == float("inf")


def test_micro_batches_of_a_plain_loop_move_running_statistics_once():
    """They do so by the whole batch: with one micro-batch, as the plain loop itself."""
    whole, once = train.plainly(build("cnn", 0)), train.in_micro_batches(build("cnn", 0), 1)
    assert apart(whole, once)[0] < 1e-12
    assert int(train.in_micro_batches(build("cnn", 0), 4).state["0.1.num_batches_tracked"]) == 6


@pytest.mark.filterwarnings("ignore:.*weight_norm:FutureWarning")
def test_each_slip_fits_a_model():
    scripts = {name: build(name, 0) for name in MODELS}
    for slip in SLIPS.values():
        fitting = [name for name, script in scripts.items() if slip.applies(script)]
        assert fitting, slip.name
        slip.make(build(fitting[0], 0, slip.dtype), random.Random(0))


def test_tables_count_verdicts_and_mark_what_is_silent():
    trial = {"slip": "a", "model": "lm", "plan": "two stages"}
    record = {
        "plans": TWO,
        "verdicts": [EQUAL, SILENT],
        "slips": {"a": {"what": "Something.", "design": ""}},
        **kept([{**trial, "verdict": EQUAL}, {**trial, "verdict": SILENT, "apart": 0.25, "where": "loss 1"}]),
    }
    assert slips_count(record).splitlines()[2] == "| a | Something. | 1 | **1** |"
    assert slips_plans(record).splitlines()[2] == "| two stages | 1 | **1** |"
    assert slips_silent(record).splitlines()[2] == "| a | lm | all | 0.2 | `loss 1` of lm, two stages |"
