"""``avgpipe train path/to/script.py:make``: a user's own model in the commands."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import pytest
from torch import nn

from avgpipe.tasks import build_workload
from avgpipe_lab.commands import CompareConfig
from avgpipe_lab.compare.command import check
from avgpipe_lab.compare.study import words_of
from tests.cli.command import avgpipe, invoke, rows, strict
from tests.patience import limit
from tests.scripts import WriteScript

MAKE = """
def make(lr=0.1):
    held_out = [(torch.randn(8, 4), torch.randint(2, (8,)))]
    return task(held_out=held_out, optimizer=lambda params: torch.optim.SGD(params, lr=lr))
"""
STREAM = """
def make():
    def batches(epoch):
        for _ in range(6):
            yield torch.randn(8, 4), torch.randint(2, (8,))
    return task(loader=batches, epochs=2, held_out=[(torch.randn(8, 4), torch.randint(2, (8,)))])
"""


@pytest.fixture(autouse=True)
def alone(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("RANK", raising=False)
    monkeypatch.delenv("WORLD_SIZE", raising=False)


def train(path: Path, *arguments: object, function: str = "make") -> Any:
    """Train in this process, and return what the command printed as JSON."""
    result = invoke("train", f"{path}:{function}", "--stages", "1", "--json", *map(str, arguments))
    assert result.exit_code == 0, result.stderr
    return strict(result.stdout)


def losses(out: Path) -> list[float]:
    return [row["loss"] for row in rows(out) if row["kind"] == "train"]


def refused(*arguments: str) -> str:
    """The one line of a refusal."""
    result = invoke(*arguments)
    assert (result.exit_code, result.stdout) == (2, "")
    (line,) = result.stderr.splitlines()
    return str(line.removeprefix("avgpipe: error: "))


# ---- what a run comes to ---------------------------------------------------------------------------------------------


def test_the_folder_of_a_run_is_that_of_any_other(write_script: WriteScript, tmp_path: Path) -> None:
    path, out = write_script("print('loads')\n" + MAKE), tmp_path / "run"
    found = train(path, "--out", out, "--epochs", 2, "--validations", 2)
    assert found == strict((out / "summary.json").read_text())
    assert found["workload"] == f"{path}:make"
    assert (found["batches"], found["samples"], found["epochs"], found["batch_size"]) == (10, 80, 2, 8)
    assert (found["metric_name"], found["lower_is_better"], found["target"]) == ("loss", True, None)
    assert [row["batch"] for row in rows(out) if row["kind"] == "valid"] == [0, 5, 10]
    assert found["metric"] == rows(out)[-1]["loss"]
    assert (out / "checkpoints" / "best" / "manifest.json").is_file()


def plain_losses(path: Path, epochs: int) -> list[float]:
    """Those of a plain loop over the same batches."""
    workload = build_workload(f"{path}:make")
    model = workload.layers
    assert isinstance(model, nn.Module)
    optimizer, found = workload.optimizer(model.parameters()), []
    for epoch in range(epochs):
        for inputs, targets in workload.train_batches(epoch):
            loss = workload.loss_fn(model(inputs), targets)
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            found.append(loss.item())
    return found


def test_losses_are_those_of_a_plain_loop(write_script: WriteScript, tmp_path: Path) -> None:
    path = write_script(MAKE)
    train(path, "--out", tmp_path / "run", "--epochs", 2, "--pipelines", 1)
    assert losses(tmp_path / "run") == pytest.approx(plain_losses(path, 2), abs=1e-5)


@pytest.mark.slow
@pytest.mark.ranks
def test_two_stages_and_two_pipelines_in_processes(write_script: WriteScript, tmp_path: Path) -> None:
    """As they meet after each batch, losses are one device's, too."""
    path, sizes = write_script(MAKE), ["--stages", "2", "--pipelines", "2", "--staleness", "0"]
    command = ["train", f"{path}:make", *sizes, "--epochs", "2", "--out", str(tmp_path / "run"), "--json"]
    process = avgpipe(*command)
    stdout, stderr = process.communicate(timeout=limit(100))
    assert process.returncode == 0, stderr
    assert strict(stdout)["batches"] == 10
    assert losses(tmp_path / "run") == pytest.approx(plain_losses(path, 2), abs=1e-5)


def test_a_resumed_run_goes_on_as_if_nothing_had_happened(write_script: WriteScript, tmp_path: Path) -> None:
    """In the middle of an epoch whose order is drawn; the place of the script is remembered."""
    path, whole, parts = write_script(MAKE), tmp_path / "whole", tmp_path / "parts"
    train(path, "--out", whole, "--epochs", 3, "--max-batches", 13)
    train(path, "--out", parts, "--epochs", 3, "--max-batches", 7)
    found = train(path, "--out", parts, "--resume", "--max-batches", 13)
    assert found["batches"] == 13
    assert losses(parts) == losses(whole)


def test_arguments_of_the_function_are_options(write_script: WriteScript, tmp_path: Path) -> None:
    path = write_script(MAKE)
    for lr in (0.1, 0.5):
        train(path, "--out", tmp_path / str(lr), "--lr", lr)
    train(path, "--out", tmp_path / "default")
    assert losses(tmp_path / "default") == losses(tmp_path / "0.1") != losses(tmp_path / "0.5")


# ---- loaders without a length, tasks without validation, metrics and targets -----------------------------------------


def test_a_loader_without_a_length_ends_its_epochs_itself(write_script: WriteScript, tmp_path: Path) -> None:
    path = write_script(STREAM)
    message = f"the loader of {path}:make has no length: say with --max-batches how many batches to train"
    assert refused("train", f"{path}:make", "--out", str(tmp_path / "run")) == message
    assert not (tmp_path / "run").exists()
    found = train(path, "--out", tmp_path / "run", "--max-batches", 100)
    assert (found["batches"], found["epochs"]) == (12, 2)
    assert [row["epoch"] for row in rows(tmp_path / "run") if row["kind"] == "train"] == [0] * 6 + [1] * 6
    assert rows(tmp_path / "run")[-1]["batch"] == 12  # it validates at the end
    assert train(path, "--out", tmp_path / "short", "--max-batches", 8)["batches"] == 8
    assert train(path, "--out", tmp_path / "short", "--resume", "--max-batches", 100)["epochs"] == 2
    assert losses(tmp_path / "short") == losses(tmp_path / "run")


def test_without_held_out_data_nothing_is_validated(write_script: WriteScript, tmp_path: Path) -> None:
    path, out = write_script("def make(): return task()"), tmp_path / "run"
    assert refused("train", f"{path}:make", "--target", "0.1", "--out", str(out)) == (
        "target 0.1: own_script has nothing to validate on: give it held_out"
    )
    result = invoke("train", f"{path}:make", "--stages", "1", "--out", str(out))
    assert result.exit_code == 0, result.stderr
    assert result.stdout.startswith("5 batches (40 samples, 1 epoch) in ")
    assert {row["kind"] for row in rows(out)} == {"train"}
    assert json.loads((out / "summary.json").read_text())["metric"] is None
    assert train(path, "--out", out, "--resume", "--epochs", 2)["batches"] == 10


def test_a_metric_ends_the_run_where_the_task_says(write_script: WriteScript, tmp_path: Path) -> None:
    path = write_script("""
def right(output, target):
    return (output.argmax(1) == target).double().mean()
def make():
    held_out = torch.utils.data.DataLoader(torch.utils.data.TensorDataset(torch.randn(8, 4), torch.ones(8).long()))
    return task(held_out=held_out, metric_fn=right, metric_name="accuracy", target=0.0, epochs=9)
""")
    found = train(path, "--out", tmp_path / "run", "--validations", 9)
    assert (found["metric_name"], found["lower_is_better"], found["target"]) == ("accuracy", False, 0.0)
    assert found["batches"] == 5  # the first validation of the training reaches it
    assert rows(tmp_path / "run")[0]["metrics"].keys() == {"loss", "accuracy"}
    assert train(path, "--out", tmp_path / "given", "--target", "loss=0", "--epochs", 2)["batches"] == 10


# ---- what is refused -------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "command", [["train"], ["profile"], ["tune", "--workers", "2"], ["partition", "--workers", "2"]]
)
def test_every_command_says_what_is_wrong_with_a_script(
    command: list[str], write_script: WriteScript, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = write_script("def make():\n    return 1 / 0")
    monkeypatch.chdir(tmp_path)
    name, *options = command
    line = refused(name, "own_script.py:make", *options)
    assert line.startswith(f"{path}, line ")
    assert line.endswith(", in make, 'return 1 / 0': ZeroDivisionError: division by zero")
    assert {p.name for p in tmp_path.iterdir()} <= {"own_script.py", "__pycache__"}


def test_compare_says_it_too(write_script: WriteScript, tmp_path: Path) -> None:
    path = write_script("def make():\n    return 1 / 0")
    line = refused("compare", f"{path}:make", "--systems", "gpipe", "--out", str(tmp_path / "out"))
    assert line.endswith("ZeroDivisionError: division by zero")
    assert not (tmp_path / "out").exists()


def test_json_of_a_refusal_is_one_object(write_script: WriteScript, tmp_path: Path) -> None:
    path = write_script("print('loads')\ndef make(): print('makes')")
    result = invoke("train", f"{path}:make", "--json", "--out", str(tmp_path / "run"))
    assert strict(result.stdout)["exit_code"] == 2
    assert "returned nothing instead of avgpipe.Task" in strict(result.stdout)["error"]


def test_a_script_is_no_profile(write_script: WriteScript) -> None:
    path = write_script(MAKE)
    line = refused("partition", str(path), "--workers", "2")
    assert line == f"'{path}' names no function of a script: write {path}:make"


def test_stages_are_at_most_layers(write_script: WriteScript) -> None:
    path = write_script(MAKE)
    line = refused("train", f"{path}:make", "--stages", "4")
    assert line == "4 stages are more than the 3 layers of own_script: choose --stages 1 to 3"


def test_a_script_that_has_moved_is_missed(write_script: WriteScript, tmp_path: Path) -> None:
    path, out = write_script(MAKE), tmp_path / "run"
    train(path, "--out", out, "--max-batches", 2)
    other = Path(shutil.copy(path, tmp_path / "moved_script.py"))
    resume = ["train", f"{other}:make", "--out", str(out), "--resume"]
    run_of = f"{out} is a run of '{path}:make', not of '{other}:make': "
    assert refused(*resume) == f"{run_of}name that workload"
    path.unlink()
    assert refused(*resume) == f"{run_of}put it back, or write its new path into {out}/run.json"
    run = out / "run.json"
    run.write_text(run.read_text().replace(str(path), str(other)))
    assert train(other, "--out", out, "--resume", "--max-batches", 3)["batches"] == 3


# ---- compare ---------------------------------------------------------------------------------------------------------


def test_each_system_trains_what_the_function_makes(
    write_script: WriteScript, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = write_script(MAKE)
    asked = CompareConfig.of(workload=f"{path}:make", systems=("gpipe",), lr=0.5, out=str(tmp_path / "out"))
    check(asked)
    words = words_of(asked, "gpipe", 0)
    assert words[:2] == ["train", f"{path}:make"]
    assert words[words.index("--lr") + 1] == "0.5"
    assert "--preset" not in words
