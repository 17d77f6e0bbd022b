"""Loggers: what each library gets, and what happens without it or when it fails."""

from __future__ import annotations

import csv
import math
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import ClassVar

import pytest

from avgpipe.errors import LibraryNotFound
from avgpipe.report.loggers import (
    LOGGERS,
    Loggers,
    check_loggers,
    csv_file,
    flat_numbers,
    mlflow,
    tensorboard,
    wandb,
)

ROW = {"batch": 3, "loss": 1.5, "metric": None, "distances": {"to_reference": [0.1, 0.2]}, "warnings": ["no"]}


class Noting:
    """A logger that notes what it gets; ``fails``: in log, at that step."""

    def __init__(self, fails=None):
        self.seen, self.closed, self.fails = [], 0, fails

    def log(self, step, values):
        if step == self.fails:
            raise RuntimeError("no network\nat all")
        self.seen.append((step, dict(values)))

    def close(self):
        self.closed += 1


def test_numbers_are_named_by_their_places():
    assert flat_numbers(ROW, "valid/") == {
        "valid/batch": 3,
        "valid/loss": 1.5,
        "valid/distances/to_reference/0": 0.1,
        "valid/distances/to_reference/1": 0.2,
    }
    assert flat_numbers({"a": math.nan, "b": True, "c": math.inf, "d": "1"}) == {}


def test_rows_go_to_every_logger():
    first, second = Noting(), Noting()
    loggers = Loggers({"a": first, "b": second}, print)
    loggers.log(3, ROW, "train")
    loggers.close()
    assert first.seen == second.seen == [(3, flat_numbers(ROW, "train/"))]
    assert first.closed == second.closed == 1


def test_a_logger_that_fails_is_warned_of_once_and_left_out():
    failing, other, said = Noting(fails=1), Noting(), []
    loggers = Loggers({"wandb": failing, "csv": other}, said.append)
    for step in range(3):
        loggers.log(step, {"loss": 1.0}, "train")
    loggers.close()
    assert [step for step, _ in other.seen] == [0, 1, 2]
    assert [step for step, _ in failing.seen] == [0]
    assert failing.closed == 0
    assert said == ["warning: the logger wandb failed (no network); training continues without it"]


def test_a_logger_that_cannot_begin_is_refused(tmp_path, monkeypatch):
    def refuse(*_, **__):
        raise RuntimeError("api_key not configured")

    monkeypatch.setitem(LOGGERS, "wandb", refuse)
    with pytest.raises(ValueError, match=r"^--logger wandb: api_key not configured$"):
        Loggers.opened(["wandb"], tmp_path, {}, 0, print)


@pytest.mark.parametrize("name", ["tensorboard", "wandb", "mlflow"])
def test_a_missing_library_is_reported_with_how_to_get_it(name, monkeypatch, tmp_path):
    monkeypatch.setitem(sys.modules, name, None)
    with pytest.raises(LibraryNotFound, match=rf"--logger {name} needs {name}, .*: pip install {name}$"):
        check_loggers([name])
    with pytest.raises(LibraryNotFound, match=f"pip install {name}"):
        LOGGERS[name](tmp_path)


# ---- each of them ----------------------------------------------------------------------------------------------------


def test_csv_has_a_line_for_each_number(tmp_path):
    with csv_file(tmp_path / "new" / "run") as logger:
        logger.log(0, {"loss": 1.5, "a,b": 2})
    with csv_file(tmp_path / "new" / "run", first_step=1) as logger:
        logger.log(1, {"loss": 1.25})
    with (tmp_path / "new" / "run" / "metrics.csv").open(newline="") as file:
        assert list(csv.reader(file)) == [
            ["step", "name", "value"],
            ["0", "loss", "1.5"],
            ["0", "a,b", "2"],
            ["1", "loss", "1.25"],
        ]


def test_a_run_that_begins_again_begins_another_csv(tmp_path):
    for loss in (1.0, 2.0):
        with csv_file(tmp_path) as logger:
            logger.log(0, {"loss": loss})
    assert (tmp_path / "metrics.csv").read_text().splitlines() == ["step,name,value", "0,loss,2.0"]


def test_tensorboard_reads_what_was_logged(tmp_path):
    pytest.importorskip("tensorboard", reason="pip install tensorboard")
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    with tensorboard(tmp_path, {"preset": "tiny"}) as logger:
        for step in range(3):
            logger.log(step, {"train/loss": 2.0 - step})
    found = EventAccumulator(str(tmp_path / "tensorboard")).Reload()
    assert [(event.step, event.value) for event in found.Scalars("train/loss")] == [
        (0, 2.0),
        (1, 1.0),
        (2, 0.0),
    ]
    assert b"preset: tiny" in found.Tensors("run/text_summary")[0].tensor_proto.string_val[0]


def test_wandb_gets_the_run_and_its_numbers(tmp_path, monkeypatch):
    run = SimpleNamespace(logged=[], finished=0)
    run.log = lambda values, step: run.logged.append((step, values))
    run.finish = lambda: setattr(run, "finished", run.finished + 1)
    asked = {}
    stand_in = SimpleNamespace(init=lambda **options: asked.update(options) or run)
    monkeypatch.setitem(sys.modules, "wandb", stand_in)
    monkeypatch.delenv("WANDB_PROJECT", raising=False)
    with wandb(tmp_path / "mine", {"preset": "tiny"}) as logger:
        logger.log(2, {"loss": 1.0})
    assert (run.logged, run.finished) == ([(2, {"loss": 1.0})], 1)
    assert asked == {
        **dict.fromkeys(("name", "group"), "mine"),
        "project": "avgpipe",
        "dir": str(tmp_path / "mine"),
        "config": {"preset": "tiny"},
    }
    assert (tmp_path / "mine").is_dir()


class Client:
    """The part of MLflow's client that is used."""

    made: ClassVar[list[Client]] = []

    def __init__(self):
        self.calls = []
        self.made.append(self)

    def get_experiment_by_name(self, name):
        return None

    def create_experiment(self, name):
        self.calls.append(("experiment", name))
        return "7"

    def create_run(self, experiment, run_name):
        self.calls.append(("run", experiment, run_name))
        return SimpleNamespace(info=SimpleNamespace(run_id="id"))

    def log_param(self, run, name, value):
        self.calls.append(("param", run, name, value))

    def log_batch(self, run, metrics):
        self.calls.append(("metrics", run, [(m.key, m.value, m.step) for m in metrics]))

    def set_terminated(self, run):
        self.calls.append(("end", run))


def test_mlflow_gets_the_run_and_its_numbers(tmp_path, monkeypatch):
    def metric(key, value, timestamp, step):
        return SimpleNamespace(key=key, value=value, timestamp=timestamp, step=step)

    monkeypatch.setitem(sys.modules, "mlflow", SimpleNamespace(MlflowClient=Client))
    monkeypatch.setitem(sys.modules, "mlflow.entities", SimpleNamespace(Metric=metric))
    with mlflow(tmp_path / "mine", {"preset": "tiny"}) as logger:
        logger.log(2, {"loss": 1.0})
    assert Client.made[-1].calls == [
        ("experiment", "avgpipe"),
        ("run", "7", "mine"),
        ("param", "id", "preset", "tiny"),
        ("metrics", "id", [("loss", 1.0, 2)]),
        ("end", "id"),
    ]


def test_loggers_serve_a_loop_of_ones_own(tmp_path):
    import torch
    from torch import nn

    from avgpipe import Pipeline, Plan

    torch.manual_seed(0)
    batches = [(torch.randn(4, 3), torch.randn(4, 2)) for _ in range(3)]
    plan = Plan(stages=1, micro_batches=2)
    optimizer = torch.optim.SGD
    with (
        csv_file(tmp_path) as logger,
        Pipeline(
            nn.Sequential(nn.Linear(3, 2)),
            plan,
            loss_fn=nn.MSELoss(),
            optimizer=lambda p: optimizer(p, lr=0.1),
        ) as pipeline,
    ):
        for result in pipeline.train(batches):
            logger.log(result.batch, {"loss": result.loss})
    lines = Path(tmp_path / "metrics.csv").read_text().splitlines()
    assert [line.split(",")[0] for line in lines[1:]] == ["0", "1", "2"]
