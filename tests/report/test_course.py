"""Where runs validate, what targets are, and what a run has come to."""

import math

import pytest

from avgpipe.cli.config import TrainConfig
from avgpipe.report.course import Course, Totals, Validations, parse_target, target_text

# ---- where a run validates -------------------------------------------------------------------------------------------


def places(found, batch_size, batches, begin=0):
    """Samples at which a run of whole batches validates, begun after so many samples."""
    done, places = begin, []
    while (rounds := found.rounds_to_next(done)) is not None:
        assert rounds >= 1
        done += rounds * found.round_samples
        places.append(done)
    assert done <= batch_size * batches
    return places


def test_validations_are_at_equal_shares_of_the_samples():
    assert places(Validations(640, 5, 16), 16, 40) == [128, 256, 384, 512]


@pytest.mark.parametrize("batch_size", [8, 16, 24, 32])
@pytest.mark.parametrize("pipelines", [1, 2, 3])
def test_they_are_at_the_same_samples_for_any_batch_as_nearly_as_it_allows(batch_size, pipelines):
    samples, count = 96 * 100, 20
    found = places(Validations(samples, count, pipelines * batch_size), batch_size, samples // batch_size)
    assert len(found) == count - 1
    for number, place in enumerate(found, 1):
        assert abs(place - number * samples / count) <= pipelines * batch_size / 2
        assert place % (pipelines * batch_size) == 0


@pytest.mark.parametrize(("samples", "count", "round_samples"), [(640, 20, 16), (1000, 7, 48), (999, 20, 27)])
def test_an_interruption_changes_no_place(samples, count, round_samples):
    found = Validations(samples, count, round_samples)
    whole = places(found, 1, samples)
    for done in range(0, samples, round_samples):
        after = [place for place in whole if place > done]
        assert places(found, 1, samples, begin=done) == after


def test_a_run_of_fewer_rounds_validates_after_each():
    assert places(Validations(64, 20, 16), 16, 4) == [16, 32, 48, 64]


def test_one_validation_is_that_at_the_end():
    assert Validations(64, 1, 16).rounds_to_next(0) is None


def test_a_short_batch_moves_no_later_place_by_more_than_half_a_round():
    assert Validations(1000, 10, 20).rounds_to_next(93) == 5  # 193, the nearest to 200


# ---- targets ---------------------------------------------------------------------------------------------------------


def test_a_target_is_a_number_of_the_metric_or_the_loss():
    assert parse_target("30") == parse_target(30) == (30.0, False)
    assert parse_target("loss=2.1") == (2.1, True)
    assert (target_text(30.0), target_text("loss=2.10")) == ("30", "loss 2.1")


@pytest.mark.parametrize("target", ["", "loss", "loss=", "bleu=3", "nan", "loss=inf"])
def test_other_targets_are_refused(target):
    with pytest.raises(ValueError, match="give a finite number for the metric, or loss="):
        parse_target(target)


# ---- what a run has come to ------------------------------------------------------------------------------------------


def train_row(batch, epoch, seconds):
    return {"kind": "train", "batch": batch, "epoch": epoch, "samples": 4 * (batch + 1), "seconds": seconds}


def valid_row(batch, loss, metric):
    return {"kind": "valid", "batch": batch, "loss": loss, "metric": metric}


ROWS = [
    valid_row(0, 4.5, 90.0),
    *(train_row(j, 0, j + 1.0) for j in range(4)),
    valid_row(4, 4.0, 50.0),
    *(train_row(j, 1, j + 1.0) for j in range(4, 8)),
    valid_row(8, 3.9, 60.0),
]


def recalled(rows, batches, target):
    result = Totals(True, target)
    for row in rows:
        result.take(row)
    result.batches = batches
    return result


def test_the_totals_go_on_where_the_rows_end():
    result = recalled(ROWS[:8], 6, 1.0)
    assert (result.batches, result.epoch, result.epoch_samples, result.samples) == (6, 1, 8, 24)
    assert (result.seconds, result.best, result.metric, result.validated) == (6.0, 50.0, 50.0, 4)
    assert math.isnan(result.seconds_to_target)
    assert result.samples_to_target is None


def test_the_target_is_reached_once():
    result = recalled(ROWS, 8, 60.0)
    assert (result.seconds_to_target, result.samples_to_target) == (4.0, 16)
    assert (result.best, result.metric) == (50.0, 60.0)


def test_a_target_of_the_loss():
    result = recalled(ROWS, 8, "loss=3.95")
    assert (result.seconds_to_target, result.samples_to_target) == (8.0, 32)
    assert result.reached


def test_a_validation_without_the_metric_may_reach_a_target_of_the_loss():
    result = Totals(lower_is_better=False, target="loss=2", batches=3, samples=12)
    assert not result.note_validation(3, 2.0, None)
    assert (result.samples_to_target, math.isnan(result.best)) == (12, True)


def test_untrained_weights_reach_no_target():
    result = recalled(ROWS[:1], 0, 100.0)
    assert math.isnan(result.seconds_to_target)
    result.note_batch(4, 1.0)
    assert not result.reached


def test_the_best_of_a_metric_that_should_rise():
    result, metrics = Totals(lower_is_better=False), [(0, 9.0), (2, 1.0), (4, 3.0), (6, 3.0)]
    improved = [result.note_validation(j, 0.0, m) for j, m in metrics]
    assert improved == [False, True, True, False]


# ---- how long a run trains -------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("wrong", "message"),
    [
        ({"epochs": 0}, "epochs=0: must be an int of at least 1"),
        ({"max_batches": 1.5}, "max_batches=1.5: must be"),
        ({"validations": 0}, "validations=0: must be"),
        ({"target": "loss"}, "target 'loss': give a finite number for the metric"),
    ],
)
def test_a_course_that_cannot_be_is_refused(wrong, message):
    with pytest.raises(ValueError, match=message):
        Course(**wrong)


def test_a_course_is_in_the_options_of_a_command():
    asked = TrainConfig.of(workload="mine", epochs=3, target=0.5, seed=4)
    assert Course.of(asked) == Course(epochs=3, target=0.5, seed=4)
