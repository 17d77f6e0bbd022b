"""What is evaluated, and how often a run is saved."""

from __future__ import annotations

import csv
from dataclasses import replace
from types import SimpleNamespace

import pytest

from avgpipe.cli.config import TrainConfig
from avgpipe.cli.resolve import resolve
from avgpipe.cli.training import TrainingRun
from avgpipe.pipeline import Pipeline
from avgpipe.report.course import read_metrics
from avgpipe.report.loop import averaging
from avgpipe_lab.workloads import awd_lstm


@pytest.mark.parametrize("pipelines", [1, 2])
def test_running_means_are_evaluated_once_there_are_some(pipelines, text, tmp_path, monkeypatch):
    presets = awd_lstm.PRESETS["awd-lstm"]
    training = replace(presets["tiny"].training, optimizer="nt-asgd", lr=0.5, decay="none", warmup=0.0)
    monkeypatch.setitem(presets, "tiny", replace(presets["tiny"], published=True, training=training))
    sizes = {"batch_size": 4, "stages": 1, "pipelines": pipelines, "max_batches": 8}
    asked = TrainConfig.of(workload="awd-lstm", data=str(text), out=str(tmp_path / "run"), **sizes)
    run = TrainingRun(resolve(asked))
    try:
        batches = list(run.workload.train_batches(0))
        list(run.pipeline.train(batches[:4]))
        before = run.evaluate()[0]
        assert before == run.pipeline.evaluate(run.workload.valid_batches()).loss
        for optimizer in run.pipeline.optimizers:
            getattr(optimizer, "inner", optimizer).trigger()
        list(run.pipeline.train(batches[4:12]))
        own = run.pipeline.evaluate(run.workload.valid_batches(), weights=0).loss
        mean = run.evaluate()[0]
        assert mean != own
        assert run.pipeline.evaluate(run.workload.valid_batches(), weights=0).loss == own
    finally:
        run.close()


def trained(config, **fields):
    """A finished run and its rows, its workload with other fields."""
    run = TrainingRun(resolve(config))
    try:
        run.workload = replace(run.workload, **fields)
        run.train()
    finally:
        run.close()
    return run, read_metrics(run.out)


@pytest.mark.parametrize(("target", "scored"), [(None, [1, 2, 3, 4]), (0.5, [1, 2, 3, 4]), ("loss=0", [4])])
def test_with_a_target_of_the_loss_only_the_ends_are_translated(target, scored, text, tmp_path):
    asked = {"data": str(text), "out": str(tmp_path / "run"), "batch_size": 4, "stages": 1, "pipelines": 1}
    config = TrainConfig.of(workload="awd-lstm", max_batches=8, validations=4, target=target, **asked)
    _, rows = trained(config, decode=lambda predict: {"words": 7.0})
    valid = [row["metrics"].get("words") for row in rows if row["kind"] == "valid"]
    assert [n for n, score in enumerate(valid) if score == 7.0] == scored


def test_optimizers_observe_the_losses_of_epochs_ends(text, tmp_path, monkeypatch):
    presets = awd_lstm.PRESETS["awd-lstm"]
    training = replace(presets["tiny"].training, optimizer="nt-asgd", lr=0.5, decay="none", warmup=0.0)
    monkeypatch.setitem(presets, "tiny", replace(presets["tiny"], training=training))
    asked = {"data": str(text), "out": str(tmp_path / "run"), "batch_size": 32, "stages": 1, "pipelines": 1}
    run, rows = trained(TrainConfig.of(workload="awd-lstm", epochs=3, validations=2, **asked))
    epoch = len(run.workload.train_batches(0))
    valid = {row["batch"]: row["loss"] for row in rows if row["kind"] == "valid"}
    assert list(valid) == sorted({0, epoch, (3 * epoch + 1) // 2, 2 * epoch, 3 * epoch})
    seen = averaging(run.pipeline)[0].param_groups[0]["validation_losses"]
    assert seen == pytest.approx([valid[n * epoch] for n in (1, 2, 3)])


def logged(text, out, **asked):
    sizes = {"data": str(text), "batch_size": 4, "stages": 1, "pipelines": 1, "validations": 2}
    return TrainConfig.of(workload="awd-lstm", out=str(out), **sizes, **asked)


def test_loggers_get_every_row_and_go_on_after_a_resumption(text, tmp_path):
    out = tmp_path / "run"
    trained(logged(text, out, max_batches=4, logger=("csv",)))
    trained(logged(text, out, max_batches=6, logger=("csv",), resume=True))
    with (out / "metrics.csv").open(newline="") as file:
        found = list(csv.DictReader(file))
    losses = {int(line["step"]): float(line["value"]) for line in found if line["name"] == "train/loss"}
    rows = read_metrics(out)
    assert losses == {row["batch"]: pytest.approx(row["loss"]) for row in rows if row["kind"] == "train"}
    assert {line["name"] for line in found} >= {
        "train/lr",
        "valid/metrics/perplexity",
        "valid/peak_memory_bytes/0",
    }


def test_a_result_that_has_a_gradient_norm_has_it_in_its_row(text, tmp_path, monkeypatch):
    results = Pipeline.train

    def with_norm(pipeline, loader):
        for result in results(pipeline, loader):
            yield SimpleNamespace(**{**vars(result), "grad_norm": 0.5})

    monkeypatch.setattr(Pipeline, "train", with_norm)
    _, rows = trained(logged(text, tmp_path / "run", max_batches=2))
    assert [row["grad_norm"] for row in rows if row["kind"] == "train"] == [0.5, 0.5]
