"""Comparisons of systems on a caller's own model."""

import json
import subprocess
import sys
from dataclasses import replace
from functools import partial

import pytest
import torch

import avgpipe
from avgpipe.cli.config import TrainConfig
from avgpipe.ranks.environment import STORE_FILE
from avgpipe_lab.compare.own_model import Job, trained
from tests.cli.command import environment
from tests.lab.compare.own_models import add_line, broken, drawn_batches, make, no_task
from tests.patience import limit

pytestmark = pytest.mark.timeout(300)


def compared(make=make, validations=20, **asked):
    return avgpipe.compare(make, course=avgpipe.Course(validations=validations), **asked)


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
    given = {"systems": ("avgpipe", "gpipe"), "memory_limit_bytes": 2**32, "validations": 24}
    found = compared(partial(make, lr=0.04, target=2.0), **given)
    assert [o.status for o in found.outcomes] == ["ok", "ok"]
    for row in found.to_json():
        assert row["samples_to_target"] == row["samples"] < 192
        assert row["seconds_to_target"] == row["train_seconds"]


@pytest.mark.ranks
@pytest.mark.slow
def test_what_cannot_be_or_fails_is_a_row():
    found = compared(systems=("gpipe", "pipedream-2bw"), workers=6, make=partial(make, optimizer=broken))
    assert [o.status for o in found.outcomes] == ["failed", "failed"]
    found = compared(systems=("dapple",), workers=1, make=partial(make, optimizer=broken))
    assert "no such optimizer" in found.outcomes[0].reason


SCRIPT = """
import torch
from torch import nn
import avgpipe

def make():
    return avgpipe.Task(
        model=nn.Sequential(nn.Linear(2, 4), nn.Linear(4, 1)),
        loader=[(torch.ones(4, 2), torch.ones(4, 1))] * 3,
        loss_fn=nn.MSELoss(),
        optimizer=lambda params: torch.optim.SGD(params, lr=0.01),
    )

{guard}
    found = avgpipe.compare(make, ["gpipe"])
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
        ({"make": lambda: make()}, "make=.*cannot be sent to the workers"),
        ({"on_result": lambda system, row: None}, "on_result=.*cannot be sent to the workers"),
        ({"systems": ("gpip",)}, "unknown system 'gpip': did you mean 'gpipe'"),
        ({"systems": ("gpipe", "gpipe")}, "gpipe is named twice"),
        ({"seeds": 0}, "seeds=0: must be an int of at least 1"),
        ({"make": partial(make, held_out=None, target=1.0)}, "nothing to validate on: give it held_out"),
        ({"workers": 0}, "workers=0: must be an int of at least 1"),
        ({"validations": 0}, "validations=0: must be an int of at least 1"),
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
    given = {"systems": ("gpipe",), "on_result": partial(add_line, str(path))}
    found = compared(partial(make, epochs=1), validations=2, **given)
    told = [json.loads(line) for line in path.read_text().splitlines()]
    assert {system for system, _ in told} == {"gpipe"}
    assert [row for _, row in told] == list(found.outcomes[0].rows[0])


def test_batches_that_are_drawn_follow_from_the_seed_and_need_no_length():
    drawn = partial(make, loader=drawn_batches, held_out=None)
    config = TrainConfig.of(workload="drawn", max_batches=8)
    runs = [trained(Job(drawn), replace(config, seed=seed), avgpipe.Plan(stages=1)) for seed in (0, 0, 1)]
    losses = [[row["loss"] for row in run["rows"]] for run in runs]
    assert losses[0] == losses[1] != losses[2]
    assert [row["epoch"] for row in runs[0]["rows"]] == [0] * 5 + [1] * 3
    assert runs[0]["summary"]["epochs"] == pytest.approx(8 / 5)


def test_extensions_are_the_pipelines_and_take_the_place_of_the_tasks_own():
    lower = partial(make, autocast=torch.bfloat16, epochs=1)
    plan, config = avgpipe.Plan(stages=1), TrainConfig.of(workload="sums", max_batches=3)
    wide = (avgpipe.Precision(), avgpipe.MovingAverage(0.9))
    losses = []
    for given, extensions in ((lower, ()), (lower, wide), (partial(make, epochs=1), ())):
        run = trained(Job(given, extensions), config, plan)
        losses.append([row["loss"] for row in run["rows"] if row["kind"] == "train"])
    assert losses[0] != losses[1] == losses[2]


def test_a_function_that_makes_no_task_is_refused():
    with pytest.raises(TypeError, match="it must return an avgpipe"):
        compared(no_task)
