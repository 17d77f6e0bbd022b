"""Comparisons of systems on a caller's own model."""

import json
import subprocess
import sys

import pytest

import avgpipe
from tests.cli.command import environment
from tests.lab.compare import own_models
from tests.lab.compare.own_models import make
from tests.patience import limit

pytestmark = pytest.mark.timeout(300)


def compared(make=make, validations=20, **asked):
    return avgpipe.compare(make, course=avgpipe.Course(validations=validations), **asked)


@pytest.mark.ranks
@pytest.mark.slow
def test_systems_of_two_workers_train_the_same_and_are_compared(tmp_path):
    found = compared(systems=("avgpipe", "dapple", "data-parallel"), seeds=2, validations=6)
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
    assert (
        "Equal for all: own_models, 2 workers, 2 seeds, batches of 8 samples, 24 batches, 192 samples."
        in str(found)
    )
    assert json.loads(json.dumps(found.to_json())) is not None
    found.plot(tmp_path / "bars.png")
    found.plot_curves(tmp_path / "curves.png")
    assert all((tmp_path / name).stat().st_size > 3_000 for name in ("bars.png", "curves.png"))


@pytest.mark.ranks
def test_a_target_ends_runs_and_a_limit_has_plans_tuned(tmp_path):
    given = {"systems": ("avgpipe", "gpipe"), "memory_limit_bytes": 2**32, "validations": 24}
    found = compared(own_models.to_target, out=tmp_path / "kept", **given)
    assert json.loads((tmp_path / "kept" / "compare.json").read_text())["systems"] == found.to_json()
    assert [o.status for o in found.outcomes] == ["ok", "ok"]
    for row in found.to_json():
        assert row["samples_to_target"] == row["samples"] < 192
        assert row["seconds_to_target"] == row["train_seconds"]


@pytest.mark.ranks
@pytest.mark.slow
def test_what_fails_is_a_row():
    found = compared(own_models.broken, systems=("gpipe", "pipedream-2bw"), workers=3)
    assert [o.status for o in found.outcomes] == ["refused", "refused"]
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
    ("guard", "said"),
    [('if __name__ == "__main__":', "('ok', '')"), ("if True:", "call it under if __name__")],
)
def test_a_script_compares_its_own_functions(guard, said, tmp_path):
    (tmp_path / "script.py").write_text(SCRIPT.format(guard=guard))
    command = [sys.executable, "script.py"]
    run = subprocess.run(
        command, cwd=tmp_path, env=environment(), capture_output=True, text=True, timeout=limit(200)
    )
    assert said in run.stdout + run.stderr


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"make": lambda: make()}, "make=.*workers import it by its name"),
        ({"systems": ("gpip",)}, "unknown system 'gpip': did you mean 'gpipe'"),
        ({"systems": ("gpipe", "gpipe")}, "gpipe is named twice"),
        ({"seeds": 0}, "seeds=0: must be an int of at least 1"),
        ({"workers": 0}, "workers=0: must be an int of at least 1"),
        ({"make": own_models.no_task}, "returned Sequential instead of avgpipe.Task"),
        ({"validations": 0}, "validations=0: must be an int of at least 1"),
    ],
)
def test_what_is_wrong_is_refused_before_anything_runs(changes, message):
    with pytest.raises(ValueError, match=message):
        compared(**changes)
