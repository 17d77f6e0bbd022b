"""A process needs no more memory, however long it trains."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from tests.patience import limit

STATUS = Path("/proc/self/status")

# A string of 32 bytes that each call of an operator left behind, one call for each parameter group, came to megabytes
# over the batches that are measured here: every one of them lay in the way where a larger block was free.
TRAINING = """
import gc
from pathlib import Path
import torch
from torch import nn
from avgpipe import Pipeline, Plan
from avgpipe.ranks.environment import return_freed_memory

def anonymous_bytes():
    gc.collect()
    return_freed_memory()
    status = Path("/proc/self/status").read_text().splitlines()
    return 1024 * next(int(line.split()[1]) for line in status if line.startswith("RssAnon:"))

torch.manual_seed(0)
model = nn.Sequential(nn.Linear(16, 32), nn.Tanh(), nn.Linear(32, 8))
batch = torch.randn(8, 16), torch.zeros(8, dtype=torch.long)
with Pipeline(
    model,
    Plan(stages=2, pipelines=2, micro_batches=1),
    loss_fn=nn.CrossEntropyLoss(),
    optimizer=lambda params: torch.optim.SGD([{"params": [p]} for p in params], lr=0.01),
) as pipeline:
    for result in pipeline.train(batch for _ in range(23000)):
        if result.batch in (2999, 22999):  # the record of events for the timeline is full by then
            print(anonymous_bytes())
"""


@pytest.mark.ranks
@pytest.mark.slow
@pytest.mark.skipif(
    not STATUS.exists() or "RssAnon:" not in STATUS.read_text(), reason="the system does not tell RssAnon"
)
@pytest.mark.timeout(240)
def test_two_pipelines_need_no_more_memory_after_23000_batches_than_after_3000() -> None:
    done = subprocess.run(
        [sys.executable, "-c", TRAINING],
        env={**os.environ, "OMP_NUM_THREADS": "1"},
        capture_output=True,
        text=True,
        check=True,
        timeout=limit(220),
    )
    early, late = map(int, done.stdout.split())
    assert late - early < 512 << 10, f"{(late - early) / 20000:.1f} bytes more with each batch"
