"""``avgpipe profile``: what it prints, writes and refuses."""

import json
from dataclasses import replace

import pytest
import torch.distributed as dist

from avgpipe.cli import measuring
from avgpipe.planning.profile import LinkProfile, Profile
from avgpipe_lab.workloads import awd_lstm
from tests.cli.command import invoke, strict

LINK = ("--bandwidth", "1Gbit", "--latency", "250us")


@pytest.fixture
def quick(monkeypatch, text):
    """Options of a small model on a small text, measured briefly, and in this process."""

    def run_here(target, workers, arguments, **_):
        assert (target, workers) == ("avgpipe.cli.measuring:profiled", 1)
        monkeypatch.setenv("RANK", "0")
        try:
            return json.loads(json.dumps([measuring.profiled(**arguments)]))
        finally:
            if dist.is_initialized():
                dist.destroy_process_group()

    monkeypatch.setattr(measuring, "run_on_ranks", run_here)
    presets = awd_lstm.PRESETS["awd-lstm"]
    small = replace(presets["tiny"], model=replace(presets["tiny"].model, embedding=8, hidden=12), length=5)
    monkeypatch.setitem(presets, "tiny", small)
    options = ("--data", str(text), "--batch-size", "4", "--micro-batch-sizes", "1,2,4")
    return ["profile", "awd-lstm", *options, "--budget", "0.1", *LINK]


def test_json_is_the_profile_that_is_written(quick, tmp_path):
    out = tmp_path / "p.json"
    result = invoke(*quick, "--out", str(out), "--json")
    assert result.exit_code == 0, result.stderr
    found = Profile.from_json(result.stdout)
    assert found == Profile.load(out)
    assert found.model == "awd-lstm tiny"
    assert found.micro_batch_sizes == (1, 2, 4)
    assert found.link == LinkProfile(pytest.approx(250e-6), 1.25e8)
    assert found.layers[0].name.startswith("0 ")
    assert found.layers[0].optimizer_bytes > 2 * found.layers[0].parameter_bytes > 0
    assert found.action_s > 0


def test_a_person_reads_a_table(quick, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    result = invoke(*quick)
    assert result.exit_code == 0, result.stderr
    for words in ("micro-batch of 4", "backward ms", "total", "per sample", "250 µs and 0.125 GB/s"):
        assert words in result.stdout
    assert result.stdout.strip().endswith("profile: profile.json")
    assert len(Profile.load("profile.json").layers) == 4


@pytest.mark.parametrize(
    ("options", "named"),
    [
        (("--micro-batch-sizes", "1,x"), "--micro-batch-sizes 1,x: write whole numbers of at least 1"),
        (("--micro-batch-sizes", "0,1"), "--micro-batch-sizes 0,1: write whole numbers of at least 1"),
        (("--bandwidth", "10Gbit"), "--bandwidth without --latency"),
        (("--latency", "1ms"), "--latency without --bandwidth"),
        (("--bandwidth", "fast", "--latency", "1ms"), "--bandwidth fast"),
        (("--bandwidth", "0bit", "--latency", "1ms"), "--bandwidth 0bit"),
        (("--bandwidth", "10", "--latency", "1ms"), "--bandwidth 10:"),
        (("--bandwidth", "1Gbit", "--latency", "50"), "--latency 50:"),
        (("--device", "tpu"), "--device tpu: torch"),
        (("--autocast", "float8"), "unknown autocast 'float8'"),
        (("--threads", "0"), "--threads 0"),
        (("--budget", "-1"), "--budget -1"),
        (("--budget", "nan"), "--budget nan"),
        (("--preset", "huge"), "unknown preset 'huge'"),
        (("--batch-size", "0"), "--batch-size 0: must be more than 0"),
        (("--data", "nowhere"), "nowhere"),
        (("--out", "nowhere/p.json"), "--out nowhere/p.json"),
    ],
)
def test_wrong_arguments_are_refused_in_one_line(options, named):
    result = invoke("profile", "awd-lstm", *options, "--json")
    assert result.exit_code == 2
    assert named in strict(result.stdout)["error"]
    assert result.stderr.count("\n") == 1


def test_an_unknown_workload_is_refused():
    result = invoke("profile", "awd-lstn")
    assert result.exit_code == 2
    assert "did you mean 'awd-lstm'" in result.stderr


def test_a_layer_that_cannot_be_timed_fails_the_command(quick, tmp_path, monkeypatch):
    from avgpipe_lab.workloads.awd_lstm import AWDLSTMLoss

    def refuse(self, output, target):
        raise RuntimeError("no loss today")

    monkeypatch.setattr(AWDLSTMLoss, "__call__", refuse)
    result = invoke(*quick, "--out", str(tmp_path / "p.json"), "--json")
    assert result.exit_code == 1
    assert "layer 3" in strict(result.stdout)["error"]
    assert "no loss today" in result.stderr
    assert not (tmp_path / "p.json").exists()
