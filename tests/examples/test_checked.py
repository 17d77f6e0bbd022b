"""Every workload, and the example that is one, trains on its plan as on one device: ``avgpipe check``."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from tests.cli.command import avgpipe, strict
from tests.examples.scripts import EXAMPLES
from tests.patience import limit

DATA = os.environ.get("AVGPIPE_DATA")
READS = {"gnmt": "multi30k-en-de", "resnet": "cifar10-jpeg", "vgg": "cifar10-jpeg", "alexnet": "cifar10-jpeg"}
WORKLOADS = ["awd-lstm", "gpt", "bert", f"{EXAMPLES / 'train_your_model.py'}:make", *READS]
PLANS = {
    "pipelines": ["--pipelines", "2", "--staleness", "0"],
    "as it comes": [],
    "late gradients": ["--system", "pipedream-2bw", "--pipelines", "1"],
}


@pytest.mark.ranks
@pytest.mark.slow
@pytest.mark.parametrize("plan", PLANS)
@pytest.mark.parametrize("workload", WORKLOADS, ids=lambda name: Path(name).name)
def test_a_workload_trains_as_on_one_device(workload: str, plan: str) -> None:
    options = [*PLANS[plan], "--stages", "2", "--batches", "3", "--json"]
    if workload in READS:
        if DATA is None:
            pytest.skip("it reads data that the project does not contain: set AVGPIPE_DATA")
        options += ["--data", str(Path(DATA, READS[workload]))]
    process = avgpipe("check", workload, *options)
    stdout, stderr = process.communicate(timeout=limit(300))
    assert process.returncode == 0, stdout + stderr
    found = strict(stdout)
    assert list(found) == ["in one process", "on 2 workers"]
    assert all(where["equal"] for where in found.values())
