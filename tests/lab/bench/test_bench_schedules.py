"""``avgpipe bench schedules``: what it prints, draws and refuses."""

import pytest
import torch

from tests.cli.command import avgpipe, invoke, strict
from tests.patience import limit

V_RUNS = torch.__version__ >= (2, 13)  # of torch's schedules, over gloo
SMALL = [
    "bench",
    "schedules",
    "--stages",
    "2",
    "--micro-batches",
    "4",
    "--forward-ms",
    "1",
    "--backward-ms",
    "2",
]
SHORT = (*SMALL, "--activation", "4KiB", "--rounds", "1", "--batches", "1", "--pipelines", "1,2")


@pytest.mark.ranks
@pytest.mark.slow
def test_json_is_one_object_with_bounds_and_all_rows():
    process = avgpipe(*SHORT, "--json")
    stdout, stderr = process.communicate(timeout=limit(100))
    assert process.returncode == 0, stderr
    assert stderr == ""
    answer = strict(stdout)
    assert answer["command"].startswith("avgpipe bench schedules --stages 2 --micro-batches 4 ")
    (section,) = answer["sections"]
    rows = {row["name"]: row for row in section["rows"]}
    assert list(rows) == [
        "no bubble: M (t_f + t_b)",
        "flush: (M+K-1) (t_f + t_b)",
        "avgpipe 1f1b",
        "avgpipe all-forward-all-backward",
        "avgpipe advance-forward, N = 1",
        "avgpipe advance-forward, N = 2",
        "torch 1f1b",
        "torch gpipe",
        "torch interleaved-1f1b, 1 a rank",
        "torch interleaved-1f1b, 2 a rank",
        "torch zero-bubble, 1 a rank",
        "torch zero-bubble, 2 a rank",
    ]
    assert rows["no bubble: M (t_f + t_b)"]["median_ms"] == pytest.approx(12)
    assert (
        rows["flush: (M+K-1) (t_f + t_b)"]["median_ms"]
        == rows["avgpipe 1f1b"]["simulated_ms"]
        == pytest.approx(15)
    )
    # Of one or two batches only: a late first one makes the time from its end to the next one's too short.
    assert all(row["median_ms"] > 4 for row in section["rows"])


@pytest.mark.ranks
def test_a_person_reads_a_table():
    result = invoke(*SHORT, "--rows", "1f1b,torch-gpipe")
    assert result.exit_code == 0, result.stderr
    assert "emulated: stages 2, micro-batches 4" in result.stdout
    assert "no bubble: M (t_f + t_b)" in result.stdout
    assert "torch gpipe" in result.stdout


@pytest.mark.ranks
@pytest.mark.slow
def test_schedules_of_several_stages_stand_beside_torchs():
    rows = ("looped-bfs", "interleaved-zero-bubble", "zero-bubble-v", "dualpipe-v")
    beside = ("torch-looped-bfs", "torch-zero-bubble-v", "torch-dualpipe-v")
    result = invoke(*SHORT, "--rows", ",".join((*rows, *beside)), "--json")
    assert result.exit_code == 0, result.stderr
    (section,) = strict(result.stdout)["sections"]
    found = [row["name"] for row in (*section["rows"], *section["skipped"])]
    assert found[2:] == [
        *(f"avgpipe {name}, 2 a rank" for name in rows),
        *(f"{name.replace('-', ' ', 1)}, 2 a rank" for name in beside),
    ]
    assert [row["name"] for row in section["skipped"]] == ([] if V_RUNS else found[-2:])


@pytest.mark.ranks
@pytest.mark.slow
def test_a_schedule_that_torch_refuses_is_left_out_with_its_reason():
    result = invoke(
        *SHORT[:4], "--micro-batches", "1", *SHORT[6:], "--rows", "advance-forward,torch-1f1b", "--json"
    )
    assert result.exit_code == 0, result.stderr
    (section,) = strict(result.stdout)["sections"]
    assert [row["name"] for row in section["skipped"]] == ["avgpipe advance-forward, N = 2", "torch 1f1b"]


@pytest.mark.parametrize(
    ("options", "named"),
    [
        (("--stages", "0"), "--stages 0"),
        (("--forward-ms", "-1"), "--forward-ms -1"),
        (("--backward-ms", "nan"), "--backward-ms nan"),
        (("--pipelines", "1,0"), "--pipelines 1,0"),
        (("--link", "rope"), "unknown link 'rope'"),
        (("--activation", "big"), "--activation big"),
        (("--rows", "none"), "--rows none"),
    ],
)
def test_wrong_arguments_are_refused_in_one_line(options, named):
    result = invoke(*SMALL, *options, "--json")
    assert result.exit_code == 2
    assert named in strict(result.stdout)["error"]
    assert result.stderr.count("\n") == 1
