"""The pictures of a comparison: what the panels show, looked up in the figures."""

import pytest

from avgpipe.report.pictures import COLORS, Curve, Point, plot_curves


def train(batch, loss, seconds):
    return {"kind": "train", "batch": batch, "samples": 4 * (batch + 1), "loss": loss, "seconds": seconds}


def valid(batch, metric, seconds):
    return {"kind": "valid", "batch": batch, "loss": 1.0, "metric": metric, "seconds": seconds}


ROWS = [valid(0, 900.0, 0.0), train(0, 6.0, 1.5), train(1, 5.0, 2.5), valid(2, 300.0, 2.5)]


# ---- curves --------------------------------------------------------------------------------------------------------


def test_a_curve_has_what_was_written_batch_by_batch():
    curve = Curve.of(ROWS)
    assert curve.loss == (Point(1.5, 4, 6.0), Point(2.5, 8, 5.0))
    assert curve.metric == (Point(0.0, 0, 900.0), Point(2.5, 8, 300.0))


def test_values_that_were_not_finite_are_left_out():
    curve = Curve.of([train(0, None, 1.0), valid(1, None, 1.0), train(1, 5.0, 2.0)])
    assert (curve.loss, curve.metric) == ((Point(2.0, 8, 5.0),), ())


def test_smoothing_is_a_running_mean_that_begins_with_the_first_loss():
    curve = Curve.of([train(j, 6.0 if j % 2 else 4.0, j) for j in range(400)])
    smooth = [point.value for point in curve.smoothed()]
    assert smooth[0] == 4.0
    assert all(abs(value - 5.0) < 0.1 for value in smooth[100:])
    assert Curve.of([]).smoothed() == ()
    assert all(
        p.value == pytest.approx(3.0) for p in Curve.of([train(j, 3.0, j) for j in range(9)]).smoothed()
    )


def lines(axes):
    return {line.get_label(): line for line in axes.get_lines()}


def test_every_system_has_a_line_against_time_and_against_samples():
    curves = {f"system {n}": Curve.of(ROWS) for n in range(9)}
    figure = plot_curves(curves, "awd-lstm tiny", "perplexity", trivial=700.0, target=250.0)
    loss_by_time, loss_by_samples, metric_by_time, metric_by_samples = figure.axes
    assert list(lines(loss_by_time)) == list(curves)
    assert list(lines(loss_by_time)["system 0"].get_xdata()) == [1.5, 2.5]
    assert list(lines(loss_by_samples)["system 0"].get_xdata()) == [4, 8]
    assert list(lines(metric_by_time)["system 8"].get_ydata()) == [900.0, 300.0]
    assert list(lines(metric_by_samples)["system 8"].get_xdata()) == [0, 8]
    looks = {(line.get_color(), line.get_linestyle()) for line in list(lines(loss_by_time).values())}
    assert len(looks) == 9
    assert metric_by_time.get_ylabel() == "validation perplexity"
    assert [t.get_text() for t in figure.legends[0].get_texts()][-2:] == [
        "trivial answer: 700",
        "target: 250",
    ]


def test_of_several_seeds_the_others_are_thin_lines_of_the_same_color():
    figure = plot_curves({"gpipe": [Curve.of(ROWS)] * 3, "dapple": Curve.of(ROWS)}, "", "perplexity")
    drawn = figure.axes[2].get_lines()
    assert [line.get_color() for line in drawn] == [COLORS[0]] * 3 + [COLORS[1]]
    assert drawn[0].get_linewidth() > drawn[1].get_linewidth() == drawn[2].get_linewidth()
    assert [text.get_text() for text in figure.legends[0].get_texts()] == ["gpipe", "dapple"]


def test_the_trivial_answer_is_a_dashed_line_among_the_metrics_alone():
    figure = plot_curves({"gpipe": Curve.of(ROWS)}, "", "perplexity", trivial=700.0)
    loss, metric = figure.axes[0], figure.axes[2]
    trivial = lines(metric)["trivial answer: 700"]
    assert (trivial.get_linestyle(), list(trivial.get_ydata())) == ("--", [700.0, 700.0])
    assert list(lines(loss)) == ["gpipe"]
    assert not any("target" in label for label in lines(metric))


@pytest.mark.parametrize(("last", "scale"), [(300.0, "linear"), (9.0, "log"), (-9.0, "linear")])
def test_a_metric_that_falls_far_is_drawn_on_a_logarithmic_axis(last, scale):
    figure = plot_curves({"gpipe": Curve.of([*ROWS[:3], valid(2, last, 2.5)])}, "", "perplexity")
    assert figure.axes[2].get_yscale() == figure.axes[3].get_yscale() == scale
    assert figure.axes[0].get_yscale() == "linear"


def test_a_run_without_validations_says_so():
    figure = plot_curves({"gpipe": Curve.of([train(0, 6.0, 1.5), train(1, 5.0, 2.5)])}, "", "loss")
    assert [[text.get_text() for text in axes.texts] for axes in figure.axes] == [
        [],
        [],
        ["nothing was validated"],
        ["nothing was validated"],
    ]


def test_distances_of_replicas_are_a_third_row_over_the_norm_of_the_reference():
    apart = {"norm": 4.0, "to_reference": [1.0, 3.0], "between": [[0.0, 2.0], [2.0, 0.0]]}
    curve = Curve.of([*ROWS[:-1], {**ROWS[-1], "distances": apart}])
    assert (curve.to_reference, curve.between) == ((Point(2.5, 8, 0.5),), (Point(2.5, 8, 0.5),))
    figure = plot_curves({"avgpipe": curve, "gpipe": Curve.of(ROWS)}, "", "perplexity")
    assert len(figure.axes) == 6
    drawn = [line for line in figure.axes[5].get_lines() if line.get_label() == "avgpipe"]
    assert [list(line.get_xdata()) for line in drawn] == [[8], [8]]
    assert figure.axes[4].get_ylabel() == "distance over norm of reference"


def test_replicas_in_different_processes_have_distances_from_the_reference_alone():
    apart = {"norm": 4.0, "to_reference": [1.0, 3.0], "between": None}
    curve = Curve.of([{**ROWS[-1], "distances": apart}])
    assert (len(curve.to_reference), curve.between) == (1, ())
    assert len(plot_curves({"avgpipe": curve}, "", "perplexity").axes) == 6


def test_with_a_target_of_the_loss_validations_are_drawn_by_it():
    metric = plot_curves({"gpipe": Curve.of(ROWS)}, "", "perplexity", 700.0, "loss=0.5").axes[2]
    assert metric.get_ylabel() == "validation loss"
    assert list(lines(metric)) == ["gpipe", "target: 0.5"]
    assert list(lines(metric)["gpipe"].get_ydata()) == [1.0, 1.0]


def test_curves_are_written_as_a_file(tmp_path):
    plot_curves({"gpipe": Curve.of(ROWS)}, "heading", "perplexity", path=tmp_path / "curves.png")
    assert (tmp_path / "curves.png").read_bytes().startswith(b"\x89PNG")
