from __future__ import annotations

from dataclasses import replace

import pytest

from avgpipe.cli.loop import TrainingRun
from avgpipe.cli.settings import resolve
from avgpipe.workloads import language


@pytest.mark.parametrize("pipelines", [1, 2])
def test_running_means_are_evaluated_once_there_are_some(pipelines, text, tmp_path, monkeypatch):
    presets = language.PRESETS["awd-lstm"]
    training = replace(presets["tiny"].training, lr=0.5, decay="none", warmup=0.0)
    monkeypatch.setitem(presets, "tiny", replace(presets["tiny"], averaged=True, training=training))
    asked = {"data": str(text), "batch_size": 4, "stages": 1, "pipelines": pipelines, "max_batches": 8}
    run = TrainingRun(resolve("awd-lstm", {**asked, "out": str(tmp_path / "run")}))
    try:
        batches = list(run.workload.train_batches(0))
        list(run.pipeline.train(batches[:4]))
        before = run._evaluate()[0]
        assert before == run.pipeline.evaluate(run.workload.valid_batches()).loss
        for optimizer in run.pipeline.optimizers:
            getattr(optimizer, "inner", optimizer).trigger()
        list(run.pipeline.train(batches[4:12]))
        own = run.pipeline.evaluate(run.workload.valid_batches(), weights=0).loss
        mean = run._evaluate()[0]
        assert mean != own
        assert run.pipeline.evaluate(run.workload.valid_batches(), weights=0).loss == own
    finally:
        run.close()
