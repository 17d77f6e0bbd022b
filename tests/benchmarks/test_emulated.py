"""The emulated cluster: its bounds, its simulated times, its reports, and rows that fail."""

import io
import json
import os

import pytest
from rich.console import Console

from avgpipe.errors import PipelineError
from avgpipe.schedule.row import Event
from avgpipe.timeline.timeline import Timeline
from benchmarks.common import emulated
from benchmarks.common.emulated import EmulatedSettings, action_costs, simulated_s, summarise
from benchmarks.common.report import plot_schedules, table
from benchmarks.common.rows import OurRow, Unavailable
from benchmarks.common.schedules import our_cases
from tests.cli.command import ROOT


def made(**options):
    rows = [
        {"name": "avgpipe advance-forward, N = 2", "seconds": [0.4, 0.36, 0.38], "actions": None},
        {"name": "torch 1f1b", "seconds": [0.76], "actions": None},
    ]
    rank = {
        "line_bytes_per_s": 1.2e8,
        "rows": rows,
        "unavailable": [{"name": "torch zero-bubble, 1 a rank", "reason": "M is odd"}],
    }
    return summarise(EmulatedSettings(**options), rank)


def test_the_limit_is_what_binds():
    assert made()["limit_s"] == pytest.approx(0.36)
    assert made(rate_bits_per_s=1e9)["limit_s"] == pytest.approx(0.36)
    assert made(rate_bits_per_s=1e9, activation_bytes=2**22)["limit_s"] == pytest.approx(0.8053, abs=1e-4)


def test_the_table_says_what_was_emulated_and_compares():
    console = Console(width=120, record=True, file=io.StringIO())
    console.print(table(made(rate_bits_per_s=1e9)))
    text = console.export_text()
    assert "emulated: K = 6, M = 12" in text
    assert "2.00x" in text
    assert "0.960 Gbit/s" in text
    assert "left out: torch zero-bubble, 1 a rank: M is odd" in text


def test_the_picture_has_a_bar_for_each_row_and_a_line_for_each_bound(tmp_path):
    result = made(rate_bits_per_s=1e9)
    figure = plot_schedules([result, made()], "a machine", tmp_path / "a.png")
    assert (tmp_path / "a.png").stat().st_size > 10_000
    axes = figure.axes[0]
    assert len(axes.patches) == len(result["rows"])
    assert len(axes.get_legend().get_texts()) == len(result["bounds"]) + 1  # and the simulated times


def test_a_bar_many_times_as_long_as_the_others_leaves_the_picture():
    rows = [{"name": "avgpipe model-parallel", "seconds": [6.0], "actions": None}]
    rows += [{"name": f"torch {n}", "seconds": [0.5], "actions": None} for n in range(3)]
    rank = {"line_bytes_per_s": None, "rows": rows, "unavailable": []}
    axes = plot_schedules([summarise(EmulatedSettings(), rank)], "a machine").axes[0]
    assert axes.get_xlim()[1] < 1000
    assert "6000 ms →" in [text.get_text() for text in axes.texts]


@pytest.mark.filterwarnings("error")
def test_samples_that_spread_widely_leave_room_for_the_bars(tmp_path):
    rows = [
        {"name": f"torch {n}", "seconds": [0.5, 0.5, late], "actions": None}
        for n, late in enumerate((0.5, 0.6, 90.0))
    ]
    rank = {"line_bytes_per_s": 1e9, "rows": rows, "unavailable": []}
    figure = plot_schedules([summarise(EmulatedSettings(), rank)], "a machine", tmp_path / "a.png")
    assert figure.axes[0].texts[2].get_position()[0] < figure.axes[0].get_xlim()[1]


def test_records_without_simulated_times_are_drawn():
    path = next((ROOT / "benchmarks" / "results").glob("overlap-emulated-*.json"))
    result = json.loads(path.read_text())["cases"][0]
    assert len(plot_schedules([result], "a machine").axes[0].patches) == len(result["rows"])


def all_rows(rate=None):
    settings = EmulatedSettings(only=("all",), rate_bits_per_s=rate)
    names = [case.name for case in our_cases(settings)] + ["torch advance-forward (ours)"]
    rank = {
        "line_bytes_per_s": 1.2e8,
        "rows": [{"name": name, "seconds": [1.0], "actions": None} for name in names],
        "unavailable": [],
    }
    return summarise(settings, rank)


def test_every_row_of_ours_has_its_simulated_time_and_what_was_measured_over_it():
    *ours, drop_in = all_rows()["rows"]
    assert [row["simulated_s"] is not None for row in ours] == [True] * 16
    assert ours[0]["simulated_s"] == pytest.approx(0.51)
    assert ours[0]["over_simulated"] == pytest.approx(1 / 0.51)
    assert drop_in["simulated_s"] is None


def test_the_table_says_what_a_batch_is_and_fits_into_a_file():
    console = Console(width=120, record=True, file=io.StringIO())
    console.print(table(all_rows(rate=1e9)))
    text = console.export_text()
    assert "pipedream, ea-pipe, model-parallel: a batch is one micro-batch; M of them" in text
    assert "data-parallel: a worker runs M/K micro-batches" in text
    assert "1.961" not in text  # over the 510 ms without a line
    assert "all that a worker sends shares its line" in text
    assert f"{all_rows(rate=1e9)['rows'][0]['over_simulated']:.3f}" in text
    assert "\N{HORIZONTAL ELLIPSIS}" not in text


def test_a_row_that_failed_is_reported_with_the_others_that_are_left_out():
    rank = {"line_bytes_per_s": None, "rows": [], "unavailable": [{"name": "a", "reason": "b"}]}
    left_out = summarise(EmulatedSettings(), rank, [Unavailable("c", "d")])["unavailable"]
    assert [row["name"] for row in left_out] == ["a", "c"]


# ---- bounds and simulation -----------------------------------------------------------------------------------------


def bounds(measured=None, **options):
    return {b["name"].partition(":")[0]: b["seconds"] for b in EmulatedSettings(**options).bounds(measured)}


def test_bounds_of_the_case_that_they_were_made_for():
    assert bounds() == pytest.approx({"no bubble": 0.36, "flush": 0.51})
    found = bounds(1.2e8, rate_bits_per_s=1e9)
    assert found["flush and transfers"] == pytest.approx(0.5939, abs=1e-4)
    assert len(found) == 5
    assert bounds(rate_bits_per_s=1e9, activation_bytes=2**22)["link time at line rate"] == pytest.approx(
        0.8053, abs=1e-4
    )


@pytest.mark.parametrize(("stages", "tensors"), [(1, 0), (2, 1), (3, 2), (6, 2)])
def test_an_inner_worker_sends_activations_and_gradients(stages, tensors):
    assert EmulatedSettings(stages=stages).link_s(0.03) == pytest.approx(12 * tensors * 0.03)


def test_between_hosts_the_link_is_not_shared_memory():
    assert EmulatedSettings().link == "auto"
    assert EmulatedSettings(rate_bits_per_s=1e9).link == "gloo"
    with pytest.raises(ValueError, match="link shm with a rate"):
        EmulatedSettings(link="shm", rate_bits_per_s=1e9)


def by_name(settings):
    return {case.name.removeprefix("avgpipe "): case for case in our_cases(settings)}


def test_a_line_counts_where_tensors_travel():
    settings = EmulatedSettings(only=("all",), rate_bits_per_s=8e8, activation_bytes=10**6)
    found = by_name(settings)
    assert simulated_s(found["all-forward-all-backward"], settings) == pytest.approx(0.51 + 2 * 5 * 0.01)
    assert simulated_s(found["model-parallel"], settings) == pytest.approx(12 * (6 * 0.03 + 2 * 5 * 0.01))
    assert simulated_s(found["data-parallel"], settings) == pytest.approx(0.36)


def test_all_that_a_worker_sends_shares_its_line():
    settings = EmulatedSettings(
        stages=3,
        micro_batches=8,
        only=("all-forward-all-backward",),
        rate_bits_per_s=8e7,
        activation_bytes=10**6,
    )
    case = by_name(settings)["all-forward-all-backward"]
    # The worker in the middle sends 8 activations and 8 gradients, of 0.1 s each.
    assert 1.6 < simulated_s(case, settings) < 2.2
    assert simulated_s(case, settings, line_bytes_per_s=2e7) < 1.2
    unlimited = EmulatedSettings(stages=3, micro_batches=8, only=("all-forward-all-backward",))
    assert simulated_s(case, unlimited, line_bytes_per_s=2e7) == pytest.approx(0.3)


def test_actions_may_take_what_was_measured():
    settings = EmulatedSettings(stages=2, micro_batches=4, only=("1f1b", "zero-bubble-h1"))
    found = by_name(settings)
    whole = {"F": [0.011, 0.011], "B": [0.021, 0.021], "U": [0.001, 0.001]}
    assert simulated_s(found["1f1b"], settings, actions=whole) == pytest.approx(5 * 0.032 + 0.001)
    parts = {"F": [0.011, 0.011], "I": [0.0, 0.011], "W": [0.021, 0.010], "U": [0.001, 0.001]}
    assert simulated_s(found["zero-bubble-h1"], settings, actions=parts) == pytest.approx(
        4 * 0.032 + 0.012 + 0.001
    )


def made_timeline(*rows, workers=1):
    """Rows of worker, batch, kind, start, end, and perhaps detail and stage."""
    return Timeline(workers, tuple(event(*row) for row in rows))


def event(worker, batch, kind, start_s, end_s, detail="", stage=None):
    return Event(worker if stage is None else stage, 0, batch, 0, kind, start_s, end_s, detail, worker)


def test_what_a_worker_does_after_an_action_belongs_to_it():
    timeline = made_timeline(
        (0, 0, "F", 0.0, 9.0),
        (0, 1, "F", 10.0, 11.0),
        (0, 1, "send", 11.0, 11.5),
        (0, 1, "recv", 11.5, 20.0, "B"),
        (0, 1, "B", 20.0, 22.0),
        (0, 1, "host", 22.0, 22.25),
        (0, 2, "F", 23.0, 25.0),
        (0, 2, "host", 25.0, 25.5, "loader"),
    )
    assert action_costs(timeline, first_batch=1) == {"F": [2.0], "B": [2.25]}


def test_a_worker_may_have_several_stages():
    timeline = made_timeline(
        (0, 0, "F", 0.0, 1.0, "", 0),
        (0, 0, "F", 1.0, 3.0, "", 2),
        (1, 0, "F", 0.0, 4.0, "", 1),
        (1, 0, "U", 4.0, 4.5, "", 1),
        workers=2,
    )
    assert action_costs(timeline, first_batch=0) == {"F": [1.0, 4.0, 2.0], "U": [0.0, 0.5, 0.0]}


def test_of_replicas_it_is_the_mean():
    timeline = made_timeline((0, 0, "F", 0.0, 1.0, "", 0), (1, 0, "F", 0.0, 2.0, "", 0), workers=2)
    assert action_costs(timeline, first_batch=0)["F"] == pytest.approx([1.5])


# ---- runs ----------------------------------------------------------------------------------------------------------


def short(*rows):
    return EmulatedSettings(
        stages=2,
        micro_batches=2,
        forward_s=1e-3,
        backward_s=2e-3,
        activation_bytes=4096,
        batches=1,
        rounds=1,
        only=rows,
    )


def one_row_fails(settings, without=()):
    """The worker, but rank 1 fails at pipedream's second batch."""
    whole = OurRow.losses

    def losses(self, batches):
        for n, loss in enumerate(whole(self, batches)):
            if self.name == "avgpipe pipedream" and n == 1 and os.environ["RANK"] == "1":
                raise ValueError("rank 1 had enough")
            yield loss

    OurRow.losses = losses
    return emulated.worker(settings, without)


@pytest.mark.ranks
@pytest.mark.slow
def test_a_row_that_fails_is_reported_and_the_others_are_measured(monkeypatch):
    monkeypatch.setattr(emulated, "_WORKER", "tests.benchmarks.test_emulated:one_row_fails")
    said = []
    result = emulated.run(short("1f1b", "pipedream", "model-parallel"), said.append)
    assert [row["name"] for row in result["rows"]] == ["avgpipe 1f1b", "avgpipe model-parallel"]
    (left_out,) = result["unavailable"]
    assert left_out["name"] == "avgpipe pipedream"
    assert left_out["reason"] == "worker 1 of 2 failed with exit code 1: ValueError: rank 1 had enough"
    assert any(line.startswith("avgpipe pipedream failed; restarting the others") for line in said)


def refusing(rows, said):
    """In place of the workers: fails at what ``said`` tells next, then measures nothing or one row."""

    def run_on_ranks(target, workers, arguments, *, say, **_):
        if said:
            say(said.pop(0))
            raise PipelineError("a worker failed")
        assert arguments["without"] == rows
        return [{"line_bytes_per_s": None, "rows": [], "unavailable": []}]

    return run_on_ranks


def test_a_failure_between_rows_ends_the_run(monkeypatch):
    monkeypatch.setattr(emulated, "run_on_ranks", refusing([], ["measuring the line"]))
    with pytest.raises(PipelineError, match="a worker failed"):
        emulated.run(short())


def test_where_every_row_fails_the_run_does(monkeypatch):
    rows = ["avgpipe 1f1b", "torch gpipe"]
    said = ["building: avgpipe 1f1b", "round 0 of 1: torch gpipe"]
    monkeypatch.setattr(emulated, "run_on_ranks", refusing(rows, said))
    with pytest.raises(PipelineError, match="no row is left; torch gpipe: a worker failed"):
        emulated.run(short("1f1b", "torch-gpipe"))


def test_after_some_rows_have_failed_something_else_is_wrong(monkeypatch):
    said = [f"building: row {n}" for n in range(20)]
    monkeypatch.setattr(emulated, "run_on_ranks", refusing([], said))
    with pytest.raises(PipelineError, match="a worker failed"):
        emulated.run(short())
    assert said[0] == "building: row 6"
