"""What folders hold."""

from __future__ import annotations

import json
import shutil

import pytest

from avgpipe.report.course import stretches
from avgpipe_lab.compare.comparison import OUT_OF_MEMORY, SystemResult
from avgpipe_lab.pages.folders import Run, read_folders
from avgpipe_lab.pages.page import report_page
from tests.lab.compare.comparisons import PLAIN, at, compared
from tests.lab.pages.folders import train_row, valid_row, write_run

BROKEN = SystemResult("pipedream", OUT_OF_MEMORY, None, "RuntimeError: out of memory")
COMPARISON = compared(BROKEN, gpipe=PLAIN, avgpipe=at(12))


def write_comparison(path, comparison=COMPARISON):
    """A folder of avgpipe compare, with a run for each of its systems."""
    path.mkdir()
    facts = ("what", "workers", "metric_name", "lower_is_better", "trivial", "target", "memory_limit_bytes")
    content = {**{name: getattr(comparison, name) for name in facts}, "systems": comparison.to_json()}
    (path / "compare.json").write_text(json.dumps(content))
    for outcome in comparison.outcomes:
        write_run(path / outcome.system)
    return path


def test_a_run_is_read_whole(tmp_path):
    run = Run.read(write_run(tmp_path / "first", batches=8))
    assert (run.name, len(run.rows), run.summary["batches"], run.problems) == ("first", 13, 8, ())
    assert run.title == "awd-lstm tiny (a text)"
    assert run.warnings == ["stages idle more"]
    assert run.plan["stages"] == 2


def test_a_run_that_has_not_ended_has_rows_and_no_more(tmp_path):
    run = Run.read(write_run(tmp_path / "run", ended=False))
    assert run.rows
    assert not run.summary
    assert run.timeline is run.recent() is None
    assert run.problems == ()


@pytest.mark.parametrize("content", ["[1, 2]", "{", '"text"'])
def test_files_that_are_no_objects_are_reported(tmp_path, content):
    run = write_run(tmp_path / "run", batches=4)
    for name in ("summary.json", "plan.json", "timeline.json"):
        (run / name).write_text(content)
    read = Run.read(run)
    assert [problem.partition(":")[0] for problem in read.problems] == [
        "summary.json",
        "plan.json",
        "timeline.json",
    ]
    assert not read.summary
    assert read.timeline is None


def test_stretches_lie_between_validations_and_epochs():
    rows = [
        valid_row(0),
        *map(train_row, range(6)),
        valid_row(6),
        train_row(6, epoch=0),
        train_row(7, epoch=1),
    ]
    assert stretches(rows) == [(0, 5), (6, 6), (7, 7)]
    assert stretches([*rows, train_row(7, epoch=1)]) == [(0, 5), (6, 6), (7, 7)]


def test_where_time_went_leaves_pauses_out(tmp_path):
    run = Run.read(write_run(tmp_path / "run", batches=20, shown=20))
    assert {event.batch for event in run.recent().events} == set(range(5))


# ---- several, and comparisons ----------------------------------------------------------------------------------------


def test_runs_of_one_name_are_kept_apart(tmp_path):
    paths = [write_run(tmp_path / place / "run", batches=4) for place in "ab"]
    runs, _ = read_folders(paths)
    assert [run.name for run in runs] == [str(path) for path in paths]


def test_a_comparison_is_its_table_and_its_runs_in_the_order_of_the_table(tmp_path):
    runs, (found,) = read_folders([write_comparison(tmp_path / "compared")])
    assert [run.name for run in runs] == [outcome.system for outcome in COMPARISON.outcomes]
    assert str(found) == str(COMPARISON)


def test_several_seeds_are_runs_of_their_own(tmp_path):
    folder = write_comparison(tmp_path / "compared")
    system = COMPARISON.outcomes[0].system
    for name in [p.name for p in (folder / system).iterdir()]:
        (folder / system / name).unlink()
    for seed in (0, 1, 10):
        write_run(folder / system / f"seed-{seed}", batches=4)
    runs, _ = read_folders([folder])
    assert [run.name for run in runs][:3] == [f"{system}/seed-{seed}" for seed in (0, 1, 10)]


def test_names_in_a_comparison_lead_nowhere_else(tmp_path):
    write_run(tmp_path / "secret", batches=4)
    folder = write_comparison(tmp_path / "compared")
    content = json.loads((folder / "compare.json").read_text())
    content["systems"][0]["system"] = "../secret"
    (folder / "compare.json").write_text(json.dumps(content))
    runs, _ = read_folders([folder])
    assert all(run.path.parent == folder for run in runs)


@pytest.mark.parametrize("change", [{"systems": [{"system": "a"}]}, {"what": None, "systems": 3}])
def test_a_damaged_comparison_has_no_table(tmp_path, change):
    folder = write_comparison(tmp_path / "compared")
    content = json.loads((folder / "compare.json").read_text())
    (folder / "compare.json").write_text(json.dumps({**content, **change}))
    with pytest.raises(ValueError, match=r"compare\.json is damaged .*: give the folders of its runs$"):
        read_folders([folder])


def test_a_run_that_is_named_twice_is_there_once(tmp_path):
    folder = write_comparison(tmp_path / "compared")
    runs, _ = read_folders([folder, folder / "gpipe", folder])
    assert len(runs) == 3
    assert runs[1].name == "compared/gpipe"


def test_a_comparison_of_systems_that_could_not_run_has_no_runs(tmp_path):
    folder = tmp_path / "compared"
    write_comparison(folder, compared(BROKEN))
    shutil.rmtree(folder / "pipedream")
    runs, found = read_folders([folder])
    assert (runs, len(found)) == ([], 1)
    assert report_page(runs, found).sections[0].title == "Systems compared"


def test_a_folder_without_a_run_is_refused_with_those_inside(tmp_path):
    for name in "ab":
        write_run(tmp_path / name, batches=4)
    with pytest.raises(ValueError, match=rf"holds neither .* did you mean {tmp_path}/a, {tmp_path}/b\?"):
        read_folders([tmp_path])
    (tmp_path / "empty").mkdir()
    with pytest.raises(ValueError, match=r"empty: holds neither .*; give one that avgpipe train"):
        read_folders([tmp_path / "empty"])
    with pytest.raises(ValueError, match="none: no such folder"):
        read_folders([tmp_path / "none"])
