"""Bad input: one line that names the value and the way out, exit code 2, nothing written."""

import json
import shutil

import pytest
import torch

from tests.cli.command import invoke, strict

# arguments, what the line must say
WRONG = {
    "workload": (["awd-lstn"], ["'awd-lstn'", "did you mean 'awd-lstm'"]),
    "preset": (["awd-lstm", "--preset", "smal"], ["'smal'", "did you mean 'small'"]),
    "system": (["awd-lstm", "--system", "gpip"], ["'gpip'", "did you mean 'gpipe'"]),
    "schedule": (["awd-lstm", "--schedule", "1f2b"], ["'1f2b'", "did you mean '1f1b'"]),
    "rule": (["awd-lstm", "--rule", "eagsd"], ["'eagsd'", "did you mean 'easgd'"]),
    "recompute": (["awd-lstm", "--recompute", "allways"], ["'allways'", "did you mean 'always'"]),
    "staleness": (["awd-lstm", "--staleness", "3"], ["staleness", "3"]),
    "device": (["awd-lstm", "--device", "gpu"], ["--device gpu", "'cpu'"]),
    "advance": (["awd-lstm", "--advance", "x"], ["--advance x", "whole numbers"]),
    "advance of other stages": (["awd-lstm", "--advance", "1,0,0"], ["(1, 0, 0)", "2 stages"]),
    "stages": (["awd-lstm", "--stages", "9"], ["9 stages", "4 layers", "--stages 1 to 4"]),
    "micro-batches": (
        ["awd-lstm", "--batch-size", "4", "--micro-batches", "5"],
        ["4 samples", "5 micro-batches", "--batch-size"],
    ),
    "fixed by the system": (
        ["awd-lstm", "--system", "gpipe", "--pipelines", "2"],
        ["gpipe", "pipelines = 1"],
    ),
    "no data folder": (["awd-lstm", "--data", "nowhere"], ["nowhere", "does not exist", "train.txt"]),
    "no plan file": (["awd-lstm", "--plan", "nowhere.json"], ["nowhere.json", "No such file"]),
    "resume without a folder": (["awd-lstm", "--resume"], ["--resume needs --out"]),
    "target": (["awd-lstm", "--target", "nan"], ["--target nan", "finite"]),
    "seed": (["awd-lstm", "--seed", "-1"], ["seed", "-1"]),
}
NUMBERS = (
    *("stages", "pipelines", "micro-batches", "batch-size", "epochs", "max-batches", "period", "timeout"),
    "checkpoint-minutes",
)


@pytest.fixture
def folder(tmp_path, monkeypatch):
    """Where the command runs; empty."""
    monkeypatch.delenv("RANK", raising=False)
    monkeypatch.chdir(tmp_path)
    return tmp_path


def refused(*arguments):
    """The one line of a refusal."""
    result = invoke("train", *arguments)
    assert result.exit_code == 2, result.output
    assert result.stdout == ""
    (line,) = result.stderr.splitlines()
    assert line.startswith("avgpipe: error: ")
    return line


@pytest.mark.parametrize("name", WRONG)
def test_a_wrong_argument_is_named_with_the_way_out(folder, name):
    arguments, expected = WRONG[name]
    line = refused(*arguments)
    assert [part for part in expected if part not in line] == []
    assert list(folder.iterdir()) == []


@pytest.mark.parametrize("option", NUMBERS)
@pytest.mark.parametrize("value", ["0", "-2"])
def test_numbers_must_be_positive(folder, option, value):
    assert f"--{option} {value}: must be more than 0" in refused(
        "awd-lstm", f"--{option}", value, "--out", "run"
    )
    assert list(folder.iterdir()) == []


def test_a_data_folder_without_the_files(folder):
    (folder / "data").mkdir()
    (folder / "data" / "train.txt").write_text("a b c\n")
    line = refused("awd-lstm", "--data", "data", "--out", "run")
    assert "data" in line
    assert "lacks valid.txt" in line
    assert not (folder / "run").exists()


def test_a_text_too_short_for_the_batch(folder):
    (folder / "data").mkdir()
    for split in ("train", "valid", "test"):
        (folder / "data" / f"{split}.txt").write_text("a b c\n")
    assert "valid has 4 tokens" in refused("awd-lstm", "--data", "data", "--out", "run")
    assert not (folder / "run").exists()


def test_a_damaged_plan_file(folder):
    (folder / "plan.json").write_text('{"stages": 2, "pipeline": 2}')
    line = refused("awd-lstm", "--plan", "plan.json", "--out", "run")
    assert "plan.json: plan: unknown key 'pipeline': did you mean 'pipelines'" in line
    assert not (folder / "run").exists()


def test_cuda_where_there_is_none(folder, monkeypatch):
    monkeypatch.setattr(torch.accelerator, "current_accelerator", lambda check_available=False: None)
    line = refused("awd-lstm", "--device", "cuda", "--out", "run")
    assert "--device cuda" in line
    assert "use 'cpu'" in line
    assert not (folder / "run").exists()


def test_json_tells_of_the_error_too(folder):
    result = invoke("train", "awd-lstm", "--stages", "9", "--json")
    assert result.exit_code == 2
    answer = strict(result.stdout)
    assert answer["exit_code"] == 2
    assert "9 stages" in answer["error"]


# ---- folders and checkpoints -----------------------------------------------------------------------------------------


@pytest.fixture
def run(folder, small):
    """A copy of a run's folder, and how it looked."""
    shutil.copytree(small.out, folder / "run")
    return folder / "run"


def contents(path):
    return {p.relative_to(path): p.read_bytes() for p in path.rglob("*") if p.is_file()}


@pytest.mark.ranks
@pytest.mark.slow
def test_a_folder_with_another_run_is_left_alone(run, text):
    before = contents(run)
    line = refused("awd-lstm", "--data", str(text), "--out", "run")
    assert "--out run holds another run" in line
    assert "--resume" in line
    assert contents(run) == before


def test_a_file_is_no_folder(folder):
    (folder / "run").write_text("mine")
    assert "--out run is a file" in refused("awd-lstm", "--out", "run")
    assert (folder / "run").read_text() == "mine"


def test_resume_without_a_checkpoint(folder):
    line = refused("awd-lstm", "--out", "run", "--resume")
    assert "no checkpoint in run/checkpoints/last" in line
    assert list(folder.iterdir()) == []


@pytest.mark.ranks
def test_a_checkpoint_of_another_model(run):
    before = contents(run)
    line = refused("awd-lstm", "--preset", "small", "--out", "run", "--resume")
    assert "is the checkpoint of another model" in line
    assert contents(run) == before


@pytest.mark.promise
def test_a_corrupt_checkpoint(run):
    file = next((run / "checkpoints" / "last").glob("*.pt"))
    content = bytearray(file.read_bytes())
    content[len(content) // 2] ^= 1
    file.write_bytes(content)
    before = contents(run)
    line = refused("awd-lstm", "--out", "run", "--resume")
    assert "corrupt checkpoint" in line
    assert file.name in line
    assert contents(run) == before


@pytest.mark.promise
def test_a_damaged_manifest(run):
    (run / "checkpoints" / "last" / "manifest.json").write_text("{")
    assert "corrupt checkpoint" in refused("awd-lstm", "--out", "run", "--resume")


@pytest.mark.promise
def test_a_stored_run_that_cannot_be_read_is_refused_until_its_file_is_removed(run, text):
    asked = ("awd-lstm", "--out", "run", "--resume", "--preset", "small", "--data", str(text))
    (run / "run.json").write_text("[]")
    assert "run/run.json: holds a list instead of an object: remove that file" in refused(*asked)
    assert json.loads((run / "run.json").read_text()) == []
    (run / "run.json").unlink()
    assert "another model" in refused(*asked)
