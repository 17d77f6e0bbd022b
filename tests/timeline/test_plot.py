import subprocess
import sys
import time

import pytest
from matplotlib.collections import PolyCollection
from matplotlib.colors import to_hex

from avgpipe.timeline import Event, Timeline
from tests.patience import limit


def run(stages=2, pipelines=2, batches=6, micro_batches=3, together=False):
    """A run in which every device does one thing after another, or all pipelines at once."""
    events, clock = [], [0.0] * stages
    for j in range(batches):
        i = j % pipelines
        for k in range(stages):
            start = clock[k] if not together else (j // pipelines) * micro_batches * 3.0
            for m in range(micro_batches):
                events.append(Event(k, i, j, m, "F", start, start + 1))
                events.append(Event(k, i, j, m, "B", start + 1, start + 2.5))
                start += 2.5
            events.append(Event(k, i, j, None, "U", start, start + 0.25))
            events.append(Event(k, i, j, 0, "recv", start + 0.25, start + 0.5))
            clock[k] = start + 0.5
    return Timeline(stages, tuple(events))


def bars(figure):
    return [
        (path.get_extents(), to_hex(collection.get_facecolor()[0]))
        for collection in figure.axes[0].collections
        if isinstance(collection, PolyCollection)
        for path in collection.get_paths()
    ]


def legend(figure):
    return [text.get_text() for text in figure.axes[0].get_legend().get_texts()]


def test_every_event_is_a_bar_at_its_time_in_the_row_of_its_stage():
    timeline = run(batches=2)
    drawn = [box for box, _ in bars(timeline.plot())]
    assert len(drawn) == len(timeline.events)
    for event in timeline.events:
        assert any(
            box.x0 == pytest.approx(event.start_s)
            and box.x1 == pytest.approx(event.end_s)
            and event.stage - 0.5 < box.y0 < box.y1 < event.stage + 0.5
            for box in drawn
        )


def test_pipelines_have_their_own_hues_and_directions_their_shades():
    figure = Timeline(
        1,
        tuple(
            Event(0, i, i, 0, kind, 2 * i + n, 2 * i + n + 1) for i in range(3) for n, kind in enumerate("FB")
        ),
    ).plot()
    assert len({color for _, color in bars(figure)}) == 6
    assert legend(figure) == ["pipeline 0", "pipeline 1", "pipeline 2", "forward", "backward"]


def test_bars_carry_their_micro_batch_where_it_fits():
    texts = [text.get_text() for text in run(batches=1).plot().axes[0].texts]
    assert [text for text in texts if text.isdigit()] == ["0", "0", "1", "1", "2", "2"] * 2
    crowded = Timeline(1, tuple(Event(0, 0, 0, m, "F", m, m + 1) for m in range(5000))).plot()
    assert not [text for text in crowded.axes[0].texts if text.get_text().isdigit()]


def test_numbers_are_on_all_bars_of_a_kind_or_on_none():
    """Forwards have no room for two digits, backwards have."""
    spans = [(m, "F", 2.5 * m, 2.5 * m + 0.5) for m in range(40)]
    spans += [(m, "B", 2.5 * m + 0.5, 2.5 * m + 2.5) for m in range(40)]
    figure = Timeline(1, tuple(Event(0, 0, 0, *span) for span in spans)).plot()
    texts = [text.get_text() for text in figure.axes[0].texts]
    assert [text for text in texts if text.isdigit()] == [str(m) for m in range(40)]


def test_work_waits_sends_and_the_host_look_different():
    looks = [("F", ""), ("B", ""), ("recv", "F"), ("recv", "B"), ("recv", "U"), ("send", ""), ("host", "loader"),
             ("host", "caller"), ("host", "mending"), ("average", ""), ("U", "")]  # fmt: skip
    events = tuple(Event(0, 0, 0, 0, kind, n, n + 1, detail) for n, (kind, detail) in enumerate(looks))
    figure = Timeline(1, events).plot()
    assert legend(figure) == [
        "pipeline 0", "forward", "backward", "update", "averaging", "waiting for an activation",
        "waiting for a gradient", "waiting", "data loader", "between results", "host", "sending (below)",
    ]  # fmt: skip
    drawn = [c for c in figure.axes[0].collections if isinstance(c, PolyCollection)]
    assert (
        len({(*c.get_facecolor()[0], c.get_hatch(), *c.get_edgecolor()[0][:3]) for c in drawn})
        >= len(looks) - 1
    )
    height = {box.x0: box.height for box, _ in bars(figure)}
    assert height[2] == height[3] < 0.5 * height[0]  # waits are a thin band
    assert height[5] < 0.2 * height[0]  # sends a strip
    assert height[6] == height[7] == height[0]  # the host has the worker


def test_a_legend_is_as_long_as_its_words():
    few = Timeline(1, tuple(Event(0, i, 0, 0, "F", i, i + 1) for i in range(3))).plot()
    many = Timeline(1, tuple(Event(0, i, 0, 0, "F", i, i + 1) for i in range(30))).plot()
    assert few.axes[0].get_legend()._ncols == 4
    assert 4 < many.axes[0].get_legend()._ncols < 16


def test_pipelines_that_compute_at_once_lie_beside_each_other():
    boxes = [box for box, _ in bars(run(batches=2, pipelines=2, together=True).plot())]
    for n, one in enumerate(boxes):
        for other in boxes[n + 1 :]:
            assert min(one.x1, other.x1) - max(one.x0, other.x0) < 1e-9 or (
                min(one.y1, other.y1) - max(one.y0, other.y0) < 1e-9
            )


def test_a_long_run_shows_its_last_batches_quickly():
    timeline = run(stages=4, batches=1000, micro_batches=4)
    begin = time.perf_counter()
    figure = timeline.plot()
    assert time.perf_counter() - begin < limit(10)
    assert len(timeline.events) == 40_000
    assert 50 * 4 < len(bars(figure)) < 150 * 4
    assert "of 1000 batches" in figure.axes[0].get_title(loc="left")
    assert figure.axes[0].get_xlim()[1] == pytest.approx(timeline.makespan_s)


def test_the_number_of_batches_can_be_chosen():
    timeline = run(batches=6, pipelines=1)
    figure = timeline.plot(batches=2)
    last_two = [event.start_s for event in timeline.window(4, 5).events]
    assert figure.axes[0].get_xlim() == pytest.approx((min(last_two), timeline.makespan_s))
    assert "last 2 of 6 batches" in figure.axes[0].get_title(loc="left")
    assert "batches: 6" in timeline.plot(batches=99).axes[0].get_title(loc="left")


@pytest.mark.parametrize("batches", [0, -1, True, 1.5])
def test_a_number_of_batches_that_is_none_is_refused(batches):
    with pytest.raises(ValueError, match="batches="):
        run().plot(batches=batches)


@pytest.mark.parametrize(
    ("span_s", "unit", "right"), [(3600.0, "(s)", 3600.0), (0.5, "(ms)", 500.0), (2e-5, "(µs)", 20.0)]
)
def test_the_time_axis_starts_at_the_first_event_in_a_fitting_unit(span_s, unit, right):
    axes = Timeline(1, (Event(0, 0, 0, 0, "F", 50.0, 50.0 + span_s),)).plot().axes[0]
    assert axes.get_xlabel().endswith(unit)
    assert axes.get_xlim() == pytest.approx((0.0, right))


@pytest.mark.parametrize(
    "timeline",
    [
        Timeline(3, ()),
        Timeline(1, (Event(0, 0, 0, 0, "F", 1.0, 1.0),)),
        Timeline(1, (Event(0, 7, 0, None, "mending", 0.0, 1.0), Event(0, 9, 0, None, "send", 0.0, 1.0))),
        run(stages=12, pipelines=9, batches=18),
    ],
)
def test_unusual_timelines_are_drawn_too(tmp_path, timeline):
    timeline.plot(tmp_path / "picture.png")
    assert (tmp_path / "picture.png").read_bytes().startswith(b"\x89PNG")


def test_the_ending_of_the_path_chooses_the_format(tmp_path):
    run().plot(tmp_path / "picture.svg")
    assert b"<svg" in (tmp_path / "picture.svg").read_bytes()
    run().plot(tmp_path / "picture")
    assert (tmp_path / "picture").read_bytes().startswith(b"\x89PNG")


def test_an_unknown_format_is_refused_and_nothing_written(tmp_path):
    with pytest.raises(ValueError, match=r"picture.doc'.*\.png"):
        run().plot(tmp_path / "picture.doc")
    assert list(tmp_path.iterdir()) == []


@pytest.mark.promise
def test_drawing_needs_no_display_and_leaves_pyplot_alone(tmp_path):
    code = (
        "import sys; from avgpipe.timeline import Event, Timeline; "
        f"Timeline(1, (Event(0, 0, 0, 0, 'F', 0.0, 1.0),)).plot({str(tmp_path / 'a.png')!r}); "
        "assert 'matplotlib.pyplot' not in sys.modules"
    )
    subprocess.run([sys.executable, "-c", code], check=True)
