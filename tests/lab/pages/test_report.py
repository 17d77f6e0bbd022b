"""avgpipe report: one page of folders."""

from __future__ import annotations

import sys

import pytest

from tests.cli.command import invoke, strict
from tests.lab.pages.folders import write_run


@pytest.fixture
def plotly():
    return pytest.importorskip("plotly", reason="pip install 'avgpipe[report]'")


def test_the_page_of_a_run_lies_in_its_folder(tmp_path, plotly):
    path = write_run(tmp_path / "run", batches=8)
    result = invoke("report", str(path))
    assert result.exit_code == 0
    assert result.stdout.startswith(f"report: {path / 'report.html'} (")
    assert (path / "report.html").read_text().startswith("<!doctype html>")


def test_the_page_of_several_lies_here(tmp_path, monkeypatch, plotly):
    monkeypatch.chdir(tmp_path)
    paths = [str(write_run(tmp_path / name, batches=8)) for name in ("one", "two")]
    found = strict(invoke("report", *paths, "--json").stdout)
    assert found["report"] == "report.html"
    assert found["runs"] == ["one", "two"]
    assert found["bytes"] == (tmp_path / "report.html").stat().st_size
    assert found["problems"] == []


def test_what_is_damaged_is_reported(tmp_path, plotly):
    path = write_run(tmp_path / "run", batches=8)
    (path / "plan.json").write_text("{")
    result = invoke("report", str(path), "--out", str(tmp_path / "a.html"))
    assert result.exit_code == 0
    assert result.stdout.startswith("run: plan.json: ")


@pytest.mark.parametrize("name", [".", "none"])
def test_what_is_no_run_is_refused_and_nothing_is_written(tmp_path, name):
    result = invoke("report", str(tmp_path / name))
    assert result.exit_code == 2
    assert list(tmp_path.iterdir()) == []


def test_a_page_that_cannot_be_written_is_refused(tmp_path):
    path = write_run(tmp_path / "run", batches=8)
    result = invoke("report", str(path), "--out", str(tmp_path / "none" / "a.html"))
    assert result.exit_code == 2
    assert "name a file in a folder that you may write to" in result.stderr


def test_without_plotly_it_says_how_to_get_it(tmp_path, monkeypatch):
    monkeypatch.setitem(sys.modules, "plotly.offline", None)
    result = invoke("report", str(write_run(tmp_path / "run", batches=8)))
    assert result.exit_code == 2
    assert "pip install 'avgpipe[report]'" in result.stderr
