"""The pictures of a comparison: what the panels show, looked up in the figures."""

import pytest

from avgpipe.report.pictures import COLORS, Curve, Point, plot_curves
from avgpipe.schedule.row import Event
from avgpipe.timeline.timeline import Timeline
from avgpipe_lab.compare.pictures import plot_timelines


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


# ---- timelines -----------------------------------------------------------------------------------------------------


def steady(batches, batch_s, stages=2, pipelines=1, begin=0.0):
    """Batches one after the other: forward and backward on every stage, then an update."""
    events = []
    for j in range(batches):
        start, i = begin + j * batch_s, j % pipelines
        for k in range(stages):
            events.append(Event(k, i, j, 0, "F", start, start + batch_s / 4))
            events.append(Event(k, i, j, 0, "B", start + batch_s / 2, start + 0.75 * batch_s))
            events.append(Event(k, i, j, None, "U", start + 0.75 * batch_s, start + 0.8 * batch_s))
            events.append(Event(k, i, j, 0, "recv", start + batch_s / 4, start + batch_s / 2, "B"))
    return Timeline(stages, tuple(events))


def bars(axes):
    """Left and right ends of all bars of a panel."""
    paths = [path for collection in axes.collections for path in collection.get_paths()]
    return [(path.vertices[:, 0].min(), path.vertices[:, 0].max()) for path in paths]


def test_all_systems_have_a_panel_with_the_same_time_scale():
    figure = plot_timelines({"gpipe": steady(12, 0.1), "dapple": steady(12, 0.08, stages=3)}, "awd-lstm")
    assert [axes.get_title(loc="left") for axes in figure.axes] == [
        "gpipe: 100 ms per batch",
        "dapple: 80.0 ms per batch",
    ]
    assert [axes.get_xlim() for axes in figure.axes] == [(0.0, pytest.approx(240.0))] * 2
    assert [len(axes.get_yticks()) for axes in figure.axes] == [2, 3]


def test_a_slow_system_does_not_make_slivers_of_a_fast_one():
    figure = plot_timelines({"fast": steady(40, 0.01), "slow": steady(4, 1.0)}, "")
    assert figure.axes[0].get_xlim() == (0.0, pytest.approx(100.0))


def test_bars_lie_within_the_stretch_and_show_computations_alone():
    figure = plot_timelines({"gpipe": steady(12, 0.1, stages=1)}, "")
    found = sorted(bars(figure.axes[0]))
    assert all(-1e-6 <= left < right <= 300 + 1e-6 for left, right in found)
    assert found[:3] == [pytest.approx(span) for span in ((0, 25), (50, 75), (75, 80))]
    assert len(found) == 9


def test_the_stretch_is_a_typical_one():
    slow_start, pause = steady(3, 1.0), steady(9, 0.1, begin=13.0)
    later = tuple(e._replace(batch=e.batch + 3) for e in pause.events)
    figure = plot_timelines({"gpipe": Timeline(2, (*slow_start.events, *later))}, "")
    assert figure.axes[0].get_title(loc="left") == "gpipe: 100 ms per batch"
    assert len(bars(figure.axes[0])) == 2 * 9


def test_pipelines_have_hues_of_their_own():
    figure = plot_timelines({"avgpipe": steady(12, 0.1, pipelines=2)}, "")
    names = [text.get_text() for text in figure.legends[0].get_texts()]
    assert names == ["pipeline 0", "pipeline 1", "forward", "backward", "update"]
    from matplotlib.colors import to_hex

    colors = {to_hex(c) for collection in figure.axes[0].collections for c in collection.get_facecolor()}
    assert {COLORS[0], COLORS[1]} <= colors


@pytest.mark.parametrize("batches", [1, 2])
def test_a_run_of_few_batches_is_drawn_as_well(batches):
    figure = plot_timelines({"gpipe": steady(batches, 0.1)}, "")
    assert len(bars(figure.axes[0])) == 2 * 3 * batches


def test_what_computed_nothing_has_no_panel(tmp_path):
    assert plot_timelines({"gpipe": Timeline(2, ())}, "", tmp_path / "a.png").axes == []
    figure = plot_timelines({"gpipe": Timeline(2, ()), "dapple": steady(5, 0.1)}, "", tmp_path / "b.png")
    assert len(figure.axes) == 1
    assert (tmp_path / "b.png").read_bytes().startswith(b"\x89PNG")


def test_curves_are_written_as_a_file(tmp_path):
    plot_curves({"gpipe": Curve.of(ROWS)}, "heading", "perplexity", path=tmp_path / "curves.png")
    assert (tmp_path / "curves.png").read_bytes().startswith(b"\x89PNG")
