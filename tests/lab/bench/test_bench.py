"""``avgpipe bench kernels``: what it prints, draws and refuses."""

import pytest
import torch

from tests.cli.command import avgpipe, invoke, strict
from tests.patience import limit

SMALL = ("bench", "kernels", "--elements", "2000", "--threads", "1", "--rounds", "2", "--no-compile")


def test_json_is_one_object_with_machine_versions_command_and_rows():
    result = invoke(*SMALL, "--only", "pull,limit", "--json")
    assert result.exit_code == 0
    answer = strict(result.stdout)
    assert answer["command"].startswith("avgpipe bench kernels --elements 2000 --threads 1 ")
    assert answer["versions"]["torch"] == torch.__version__
    assert answer["machine"]["threads"] == 1
    assert [section["question"] for section in answer["sections"]] == ["limit", "pull", "pull"]
    row = answer["sections"][1]["rows"][1]
    assert row["name"] == "elastic_pull_"
    assert row["bytes_per_element"] == 12
    assert row["quartile1_ms"] <= row["median_ms"] <= row["quartile3_ms"]
    assert row["gb_per_s"] > 0
    assert row["fraction_of_limit"] > 0
    assert set(row["ratios"]) == {"_foreach_lerp_", "_foreach_mul_ + _foreach_add_"}


def test_a_person_reads_tables():
    result = invoke(*SMALL, "--only", "apply")
    assert result.exit_code == 0
    assert "apply, 61 tensors, 0.002 M elements" in result.stdout
    assert "reference_apply_" in result.stdout
    assert "limit: mul_ in place" in result.stdout


@pytest.mark.ranks
@pytest.mark.slow
def test_nothing_but_json_reaches_standard_output_of_the_process():
    process = avgpipe(*SMALL, "--only", "easgd", "--json")
    stdout, stderr = process.communicate(timeout=limit(100))
    assert process.returncode == 0, stderr
    assert strict(stdout)["sections"]
    assert stderr == ""


@pytest.mark.parametrize(
    ("options", "named"),
    [
        (("--elements", "few"), "--elements few"),
        (("--elements", "1e15"), "use --elements"),
        (("--only", "everything"), "--only everything"),
        (("--dtype", "int8"), "unknown dtype 'int8'"),
        (("--device", "tpu"), "--device tpu: torch"),
        (("--rounds", "0"), "--rounds 0"),
    ],
)
def test_wrong_arguments_are_refused_in_one_line(options, named):
    result = invoke(*SMALL, *options, "--json")
    assert result.exit_code == 2
    assert named in strict(result.stdout)["error"]
    assert result.stderr.count("\n") == 1


def test_a_missing_gpu_is_refused(monkeypatch):
    monkeypatch.setattr(torch.accelerator, "current_accelerator", lambda check_available=False: None)
    result = invoke(*SMALL, "--device", "cuda")
    assert result.exit_code == 2
    assert "--device cuda" in result.stderr
