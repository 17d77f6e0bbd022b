"""avgpipe watch: a page on a terminal, lines elsewhere."""

from __future__ import annotations

import io
import json

import pytest
from rich.console import Console

from avgpipe_lab.pages import watch
from avgpipe_lab.pages.live import LiveRun
from tests.cli.command import invoke, strict
from tests.lab.pages.folders import summary, train_row, valid_row, write_run


@pytest.fixture
def going(tmp_path):
    """A run of which 100 of 1,000 batches are done."""
    path = write_run(tmp_path / "run", batches=0, ended=False)
    rows = [*map(train_row, range(100)), valid_row(100, skipped_updates=2, warnings=["stages idle more"])]
    add(path, *rows)
    return path


def add(path, *rows):
    with (path / "metrics.jsonl").open("a") as file:
        file.write("".join(json.dumps(row) + "\n" for row in rows))


def end(path):
    (path / "summary.json").write_text(json.dumps(summary(100)))


def looked(path):
    live = LiveRun(path)
    live.look()
    return live


def printed(item, width=100):
    console = Console(width=width, file=io.StringIO(), record=True)
    console.print(item)
    return console.export_text()


def test_a_line_without_a_terminal(going):
    said = invoke("watch", str(going), "--once").stdout
    assert said.startswith("running: batch 100/1000  loss 1.5507")
    for fact in ("speed 200.0 samples/s", "left 36 s", "busy 80 %, 60 %", "drift 0.01 of the norm"):
        assert fact in said
    assert said.endswith("validation perplexity 20 after 100 batches\n")
    assert said.count("\n") == 1


def test_a_page_has_it_all(going):
    said = printed(watch.page(looked(going)))
    for fact in (
        "awd-lstm, tiny, avgpipe, running",
        "800 samples in 4 s",
        "256 MiB, 128 MiB",
        "updates skipped",
    ):
        assert fact in said
    assert "warning: stages idle more" in said
    assert "▁" in said


def test_names_of_a_run_are_no_markup_of_a_terminal(going):
    (going / "run.json").write_text(json.dumps({"workload": "[red]x[/red]"}))
    assert "[red]x[/red]" in printed(watch.page(looked(going)))


@pytest.mark.parametrize("width", [20, 40, 80])
def test_a_narrow_terminal_is_no_trouble(going, width):
    assert max(map(len, printed(watch.page(looked(going)), width).splitlines())) <= width


def test_json_is_one_object(going):
    found = strict(invoke("watch", str(going), "--json").stdout)
    assert (found["status"], found["batches"], found["validation"]["batch"]) == ("running", 100, 100)


def test_lines_come_now_and_then_until_the_run_ends(going, capsys):
    steps = iter([None] * 5)

    def sleep(_):
        if next(steps, end) is end:
            end(going)

    watch._print_lines(looked(going), 1.0, sleep)
    lines = capsys.readouterr().out.splitlines()
    assert [line.partition(":")[0] for line in lines] == ["running", "running", "running", "ended"]


def test_the_page_follows_until_the_run_ends(going):
    console = Console(width=100, file=io.StringIO(), force_terminal=True)

    def sleep(_):
        add(going, train_row(100), valid_row(101))
        end(going)

    watch._show(looked(going), console, sleep)
    assert "101/1000" in console.file.getvalue()
    assert "ended" in console.file.getvalue()


def test_a_run_that_stopped_is_said_to_have(going, monkeypatch):
    monkeypatch.setattr(LiveRun, "_find_status", lambda _: "stopped")
    assert "stopped: no process of this machine" in printed(watch.page(looked(going)))


@pytest.mark.parametrize("number", ["NaN", "1e400", "-1e400", "9" * 400])
def test_numbers_that_no_run_has_are_left_out(going, number):
    with (going / "metrics.jsonl").open("a") as file:
        for name in ("batch", "epoch", "samples", "seconds"):
            file.write(json.dumps(train_row(500) | {name: "X"}).replace('"X"', number) + "\n")
        file.write(json.dumps(train_row(100, loss="X", lr="X")).replace('"X"', number) + "\n")
        measured = {
            "loss": "X",
            "metrics": {"loss": "X"},
            "worker_busy_fraction": ["X"],
            "skipped_updates": "X",
        }
        more = {"peak_memory_bytes": ["X", 1], "total_batches": "X", "distances": {"norm": "X"}}
        file.write(json.dumps(valid_row(101, **measured, **more)).replace('"X"', number) + "\n")
    said = invoke("watch", str(going), "--once").stdout
    assert said.startswith("running: batch 101  loss 1.5507")  # of the batch before
    assert "speed 200.0 samples/s" in said
    found = strict(invoke("watch", str(going), "--json").stdout)
    assert (found["batches"], found["validation"]["loss"], found["lr"]) == (101, None, None)


def test_a_run_that_diverges_is_followed(going):
    add(going, train_row(100, loss=float("nan")), train_row(101, loss=None))
    assert invoke("watch", str(going), "--once").stdout.startswith("running: batch 102/1000  loss 1.5507")


def test_what_is_no_run_is_refused(tmp_path):
    result = invoke("watch", str(tmp_path))
    assert result.exit_code == 2
    assert "holds no run; give the folder that avgpipe train writes" in result.stderr


def test_a_sparkline_goes_from_the_least_to_the_most():
    assert watch.sparkline([0, 1, 2, 3, 4, 5, 6, 7], 8) == "▁▂▃▄▅▆▇█"
    assert watch.sparkline([3.0] * 9, 4) == "▁▁▁▁"
    assert len(watch.sparkline(list(range(1000)), 56)) == 56
