"""Comparisons of systems on a caller's own model."""

import json
import subprocess
import sys
from functools import partial

import pytest
import torch
from torch import nn

import avgpipe
from avgpipe.ranks.environment import STORE_FILE
from avgpipe_lab.compare.own_model import trained
from tests.cli.command import environment
from tests.lab.compare.own_models import add_line, broken, data, held_out_loss, make_loader, make_model, sgd
from tests.patience import limit

pytestmark = pytest.mark.timeout(300)


def compared(**changes):
    asked = {"loss_fn": nn.MSELoss(), "optimizer": sgd, "evaluate": held_out_loss, "epochs": 2, **changes}
    return avgpipe.compare(make_model, make_loader, **asked)


@pytest.mark.ranks
@pytest.mark.slow
def test_systems_of_two_workers_train_the_same_and_are_compared(tmp_path):
    found = compared(systems=("avgpipe", "dapple", "data-parallel"), seeds=2, validations=6, name="sums")
    assert [(o.system, o.status, len(o.runs)) for o in found.outcomes] == [
        ("avgpipe", "ok", 2),
        ("dapple", "ok", 2),
        ("data-parallel", "ok", 2),
    ]
    rows = {row["system"]: row for row in found.to_json()}
    assert all((row["batches"], row["samples"], row["batch_size"]) == (24, 192, 8) for row in rows.values())
    assert [run["seed"] for run in rows["dapple"]["runs"]] == [0, 1]
    # One device's mathematics, whatever shares the work.
    assert rows["dapple"]["metric"] == pytest.approx(rows["data-parallel"]["metric"], rel=1e-4)
    for of_seed in (of_seed for outcome in found.outcomes for of_seed in outcome.rows):
        places = [row["samples"] for row in of_seed if row["kind"] == "valid"]
        assert places == [0, 32, 64, 96, 128, 160, 192]
        metrics = [row["metric"] for row in of_seed if row["kind"] == "valid"]
        assert metrics[-1] < metrics[0] / 2
    distances = [row["distances"] for row in found.outcomes[0].rows[0] if row["kind"] == "valid"]
    assert min(distances[-1]["to_reference"]) > 0
    assert "Equal for all: sums, 2 workers, 2 seeds, batches of 8 samples, 24 batches, 192 samples." in str(
        found
    )
    assert json.loads(json.dumps(found.to_json())) is not None
    found.plot(tmp_path / "bars.png")
    found.plot_curves(tmp_path / "curves.png")
    assert all((tmp_path / name).stat().st_size > 3_000 for name in ("bars.png", "curves.png"))


@pytest.mark.promise
def test_a_target_ends_runs_and_a_limit_has_plans_tuned():
    optimizer = partial(torch.optim.SGD, lr=0.05)
    found = compared(
        systems=("avgpipe", "gpipe"),
        optimizer=optimizer,
        target=2.0,
        memory_limit_bytes=2**32,
        validations=24,
    )
    assert [o.status for o in found.outcomes] == ["ok", "ok"]
    for row in found.to_json():
        assert row["samples_to_target"] == row["samples"] < 192
        assert row["seconds_to_target"] == row["train_seconds"]


@pytest.mark.ranks
@pytest.mark.slow
def test_what_cannot_be_or_fails_is_a_row():
    found = compared(systems=("gpipe", "pipedream-2bw"), workers=6, optimizer=broken)
    assert [o.status for o in found.outcomes] == ["failed", "failed"]
    found = compared(systems=("dapple",), workers=1, optimizer=broken)
    assert "no such optimizer" in found.outcomes[0].reason


SCRIPT = """
import torch
from torch import nn
import avgpipe

def make_model():
    return nn.Sequential(nn.Linear(2, 4), nn.Linear(4, 1))

def make_loader(epoch):
    return [(torch.ones(4, 2), torch.ones(4, 1))] * 3

def optimizer(params):
    return torch.optim.SGD(params, lr=0.01)

{guard}
    found = avgpipe.compare(make_model, make_loader, loss_fn=nn.MSELoss(), optimizer=optimizer, systems=["gpipe"])
    print([(o.status, o.reason) for o in found.outcomes])
"""


@pytest.mark.ranks
@pytest.mark.slow
@pytest.mark.parametrize(
    ("guard", "said"), [('if __name__ == "__main__":', "('ok', '')"), ("if True:", "put the call under")]
)
def test_a_script_compares_its_own_functions(guard, said, tmp_path):
    (tmp_path / "script.py").write_text(SCRIPT.format(guard=guard))
    command = [sys.executable, "script.py"]
    run = subprocess.run(
        command, cwd=tmp_path, env=environment(), capture_output=True, text=True, timeout=limit(200)
    )
    assert said in run.stdout, run.stderr


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"optimizer": lambda params: None}, "optimizer=.*cannot be sent to the workers"),
        ({"systems": ("gpip",)}, "unknown system 'gpip': did you mean 'gpipe'"),
        ({"systems": ("gpipe", "gpipe")}, "name each system once"),
        ({"evaluate": None, "target": 1.0}, "needs evaluate="),
        ({"workers": 0}, "workers=0: must be an int of at least 1"),
    ],
)
def test_what_is_wrong_is_refused_before_anything_runs(changes, message):
    with pytest.raises(ValueError, match=message):
        compared(**changes)


def test_a_worker_starts_no_comparison(monkeypatch):
    monkeypatch.setenv(STORE_FILE, "there")
    with pytest.raises(RuntimeError, match="put the call under if __name__"):
        compared()


@pytest.mark.ranks
@pytest.mark.slow
def test_a_callers_function_gets_each_row_in_the_first_worker(tmp_path):
    path = tmp_path / "rows"
    found = compared(systems=("gpipe",), epochs=1, validations=2, on_result=partial(add_line, str(path)))
    told = [json.loads(line) for line in path.read_text().splitlines()]
    assert {system for system, _ in told} == {"gpipe"}
    assert [row for _, row in told] == list(found.outcomes[0].rows[0])


def drawn_batches(epoch):
    """Batches without a length, in an order of no generator of their own."""
    for n in torch.randperm(5).tolist():
        yield data(1, n)[0]


def test_batches_that_are_drawn_follow_from_the_seed_and_need_no_length():
    made = {"make_model": make_model, "make_loader": drawn_batches, "loss_fn": nn.MSELoss(), "optimizer": sgd}
    given = {**made, "evaluate": None, "options": {"device": "cpu", "timeout_s": 60}}
    course = {"epochs": 2, "max_batches": 8, "validations": 1, "target": None, "lower_is_better": True}
    runs = [trained(given, course, avgpipe.Plan(stages=1), seed) for seed in (0, 0, 1)]
    losses = [[row["loss"] for row in run["rows"]] for run in runs]
    assert losses[0] == losses[1] != losses[2]
    assert [row["epoch"] for row in runs[0]["rows"]] == [0] * 5 + [1] * 3
    assert runs[0]["summary"]["epochs"] == pytest.approx(8 / 5)
