"""The page of a report, as far as no browser is needed."""

from __future__ import annotations

import json
import re
from html import unescape
from typing import Any

import pytest

from avgpipe.timeline.page import Chart, Line, Page, Section, Sentences, chart_data, policy, script_json
from avgpipe_lab.pages.folders import Run, read_folders
from avgpipe_lab.pages.page import report_page, thinned
from tests.lab.pages.folders import summary, train_row, valid_row, write_run
from tests.lab.pages.test_runs import COMPARISON, write_comparison

MOST_BYTES = 6_000_000
EVIL = "</script><script>alert(1)</script><img src=x onerror=alert(2)>"


def charts(page):
    return {block.id: block for section in page.sections for block in section.blocks if hasattr(block, "id")}


def titles(page):
    return [section.title for section in page.sections]


def table_of(page, title):
    (found,) = [section for section in page.sections if section.title == title]
    return {row[0]: row[1:] for row in found.blocks[0].rows}


def test_a_run_has_all_panels(tmp_path):
    page = report_page([Run.read(write_run(tmp_path / "run"))])
    assert titles(page) == [
        *("Summary", "Learning", "Timeline", "Where time went", "Workers over time", "Warnings"),
        "Plan and versions",
    ]
    assert charts(page).keys() == {
        *("loss", "metric", "valid-loss", "rate", "speed", "drift", "timeline", "time", "memory", "busy")
    }
    assert table_of(page, "Summary")["busy"] == ("80 %, 60 %",)
    assert table_of(page, "Plan and versions")["version of torch"] == ("2.13",)


def test_values_are_those_of_the_rows(tmp_path):
    found = charts(report_page([Run.read(write_run(tmp_path / "run", batches=60))]))
    each, smoothed = found["loss"].lines
    assert (each.samples[0], each.seconds[0], each.values[0]) == (8, 0.04, 4.0)
    assert len(smoothed.values) == 60
    assert found["speed"].lines[0].values == pytest.approx([200.0] * 60)
    assert found["memory"].lines[1].values == (128.0,) * 5
    assert found["drift"].lines[0].values[-1] == pytest.approx(0.01)


def test_a_gradient_norm_is_drawn_where_rows_have_one(tmp_path):
    run = write_run(tmp_path / "run", batches=0)
    rows = [json.dumps(train_row(batch, grad_norm=2.0)) + "\n" for batch in range(3)]
    (run / "metrics.jsonl").write_text("".join(rows))
    assert charts(report_page([Run.read(run)]))["norm"].lines[0].values == (2.0, 2.0, 2.0)


def test_an_older_folder_lacks_what_it_has_not_recorded_and_says_so(tmp_path):
    run = write_run(tmp_path / "run")
    gone = (
        "lr",
        "peak_memory_bytes",
        "worker_busy_fraction",
        "total_batches",
        "samples_per_second",
        "skipped_updates",
    )
    rows = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
    kept = [json.dumps({n: v for n, v in row.items() if n not in gone}) + "\n" for row in rows]
    (run / "metrics.jsonl").write_text("".join(kept))
    page = report_page([Run.read(run)])
    assert charts(page).keys() == {"loss", "metric", "valid-loss", "speed", "drift", "timeline", "time"}
    assert "Workers over time" in titles(page)
    (workers,) = [section for section in page.sections if section.title == "Workers over time"]
    assert workers.blocks[0].items[0].startswith("run: no memory was recorded over time")


def test_a_run_that_goes_on_is_shown_as_far_as_it_is(tmp_path):
    page = report_page([Run.read(write_run(tmp_path / "run", batches=8, ended=False))])
    assert table_of(page, "Summary")["batches"] == ("8 of 1000, not finished",)
    assert "Timeline" not in titles(page)


@pytest.mark.parametrize("number", ["NaN", "1e400", "9" * 400])
def test_numbers_that_no_run_has_are_left_out(tmp_path, number):
    path = write_run(tmp_path / "run", batches=8, ended=False)
    wrong: dict[str, Any] = {"train_seconds": "X", "samples_per_second": "X", "batches": "X", "metric": "X"}
    wrong |= {
        "worker_busy_fraction": ["X"],
        "peak_memory_bytes": ["X"],
        "seconds_to_target": "X",
        "target": 1.0,
    }
    (path / "summary.json").write_text(json.dumps(summary(8) | wrong).replace('"X"', number))
    with (path / "metrics.jsonl").open("a") as file:
        file.write(json.dumps(train_row(8, seconds="X")).replace('"X"', number) + "\n")
        file.write(json.dumps(train_row(8, loss="X", lr="X", grad_norm="X")).replace('"X"', number) + "\n")
        file.write(json.dumps(valid_row(9, loss="X", distances={"norm": "X"})).replace('"X"', number) + "\n")
    page = report_page([Run.read(path)])
    facts = table_of(page, "Summary")
    assert (facts["batches"], facts["best"], facts["target"]) == (
        ("9",),
        ("perplexity 19.0",),
        ("1.0: not reached",),
    )
    assert not {"training", "samples/s", "last"} & set(facts)
    assert max(charts(page)["loss"].lines[0].samples) == 64


def test_several_runs_share_charts(tmp_path):
    runs = [Run.read(write_run(tmp_path / name, batches=8)) for name in ("one", "two")]
    page = report_page(runs)
    assert page.runs == ("one", "two")
    assert table_of(page, "Summary")["busy"] == ("80 %, 60 %",) * 2
    assert [line.run for line in charts(page)["metric"].lines] == [0, 1]
    assert [t["name"] for t in charts(page)["timeline"].timelines] == ["one", "two"]


def test_a_comparison_has_its_table_and_advice(tmp_path):
    page = report_page(*read_folders([write_comparison(tmp_path / "compared")]))
    assert titles(page)[0] == "Systems compared"
    assert table_of(page, "Systems compared")["avgpipe"][3].endswith("★")
    assert page.sections[0].blocks[1].items[-1].startswith("Advice: ")
    assert page.title == f"{COMPARISON.what}: systems compared"


def test_a_long_line_keeps_its_spikes():
    numbers = list(range(10_000))
    values = [100.0 if n == 7777 else float(n % 3) for n in numbers]
    kept = thinned(Line(0, 0, "loss", numbers, [n / 10 for n in numbers], values), 500)
    assert len(kept.values) <= 500
    assert kept.samples[kept.values.index(100.0)] == 7777
    assert kept.seconds == sorted(kept.seconds) == [n / 10 for n in kept.samples]


# ---- the document ----------------------------------------------------------------------------------------------------


@pytest.fixture
def plotly():
    return pytest.importorskip("plotly", reason="pip install 'avgpipe[report]'")


def test_texts_of_a_strangers_run_are_no_markup(tmp_path, plotly):
    run = write_run(
        tmp_path / "run",
        batches=8,
        warnings=[EVIL],
        title=EVIL,
        metric_name=EVIL,
        versions={EVIL: EVIL},
        system=EVIL,
        schedule=EVIL,
        target=EVIL,
    )
    (run / "plan.json").write_text(json.dumps({EVIL: EVIL, "nested": {EVIL: [EVIL]}}))
    (run / "run.json").write_text(json.dumps({"workload": EVIL, "preset": EVIL}))
    trace = json.loads((run / "timeline.json").read_text())
    trace["otherData"]["labels"] = [EVIL, EVIL]
    for row in trace["traceEvents"]:
        if row.get("ph") == "X":
            row["cat"] = EVIL
    (run / "timeline.json").write_text(json.dumps(trace))
    document = report_page([Run.read(run, EVIL)]).html()
    assert EVIL not in document
    assert "alert(1)</script>" not in document
    assert document.count("<img") == document.partition("<script>")[0].count("<img") + plotly_images()
    assert len(re.findall(r"<script[ >]", document.replace(plotly_script(), ""))) == 3
    assert EVIL in unescape(document.partition('<script type="application/json"')[0])


def plotly_script():
    from avgpipe.timeline.page import plotly_js

    return plotly_js()


def plotly_images():
    return plotly_script().count("<img")


@pytest.mark.slow
def test_a_page_of_a_thousand_batches_is_small_enough(tmp_path, plotly):
    run = Run.read(write_run(tmp_path / "run", batches=1000, shown=1000))
    assert len(run.timeline.events) == 40_000
    assert len(report_page([run]).html().encode()) <= MOST_BYTES


@pytest.mark.slow
def test_a_page_of_many_long_runs_is_small_enough(tmp_path, plotly):
    runs = [Run.read(write_run(tmp_path / str(n), batches=2000, shown=100), str(n)) for n in range(20)]
    assert len(report_page(runs).html().encode()) <= MOST_BYTES


def test_the_policy_names_the_scripts_and_allows_nothing_else():
    assert policy(["a"]) == (
        "default-src 'none'; script-src 'sha256-ypeBEsobvcr6wjGzmiPcTaeG7/gUfE5yuYB3ha/uSLs='; "
        "style-src 'unsafe-inline'; img-src data:; base-uri 'none'; form-action 'none'"
    )


def test_data_cannot_end_its_script():
    assert script_json(["</script>", "<!--"]) == r'["\u003c/script>","\u003c!--"]'


def test_what_is_not_finite_is_a_gap():
    line = Line(0, 0, "a", (1, 2), (0.1234567, 2.0), (float("nan"), None))
    data = chart_data(Chart("c", "C", "u", (line,)))["lines"][0]
    assert (data["values"], data["seconds"], data["samples"]) == ([None, None], [0.123457, 2.0], [1, 2])


def test_without_plotly_a_page_says_how_to_get_it(monkeypatch):
    import sys

    monkeypatch.setitem(sys.modules, "plotly", None)
    monkeypatch.setitem(sys.modules, "plotly.offline", None)
    page = Page("t", "", ("a",), (Section("s", (Sentences(("x",)),)),))
    with pytest.raises(ImportError, match=r"a page needs plotly, .*pip install 'avgpipe\[report\]'"):
        page.html()
