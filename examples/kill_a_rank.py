"""Tests of one's own scripts: what becomes of a run in which a rank is killed, and of a save that finds no room.

pytest examples/kill_a_rank.py, or python examples/kill_a_rank.py
"""

import os
import pathlib
import subprocess
import sys

import pytest
import torch
from torch import nn

import avgpipe
from avgpipe.testing import environment, fail_at

HERE = pathlib.Path(__file__).parent


def run(command, fault):
    words = [sys.executable, "-m", *command]
    variables = {**os.environ, **environment([fault])}
    return subprocess.run(words, env=variables, capture_output=True, text=True, timeout=200)


def test_a_killed_rank_is_named():
    script = ["avgpipe", "run", "--stages", "2", str(HERE / "skip_connection.py")]
    done = run(script, {"kind": "kill", "rank": 1, "batch": 60})
    assert done.returncode == 1
    assert "batch 40: loss" in done.stdout
    assert "rank 1 was killed by SIGKILL" in done.stderr


def test_torchrun_starts_again_from_the_checkpoint(tmp_path):
    torchrun = ["torch.distributed.run", "--standalone", "--nproc-per-node", "2", "--max-restarts", "1"]
    script = [str(HERE / "several_hosts.py"), str(tmp_path / "checkpoint")]
    done = run(torchrun + script, {"kind": "kill", "stage": 1, "batch": 50, "restart": 0})
    assert done.returncode == 0
    assert done.stdout.count("batch 39:") == 1  # it did not start over
    assert "batch 399:" in done.stdout


def test_a_full_disk_costs_the_save_alone(tmp_path):
    model, plan = nn.Sequential(nn.Linear(2, 8), nn.Linear(8, 1)), avgpipe.Plan(stages=2)
    data = [(torch.rand(8, 2), torch.rand(8, 1))] * 4
    with avgpipe.Pipeline(model, plan, loss_fn=nn.MSELoss(), optimizer=torch.optim.SGD) as pipeline:
        with (
            fail_at(kind="full disk", stage=1, room_bytes=1000) as disk,
            pytest.raises(avgpipe.CheckpointError, match="No space left on device"),
        ):
            pipeline.save(tmp_path)
        assert disk.fired == 1
        assert len(list(pipeline.train(data))) == 4
        pipeline.save(tmp_path)


if __name__ == "__main__":
    raise SystemExit(pytest.main([__file__]))
