"""``avgpipe simulate``: what it prints, draws and refuses."""

import pytest

from avgpipe.schedule import build_schedule
from tests.cli.command import invoke, strict

TIMES = ("--forward-ms", "10", "--backward-ms", "20")
LINE = ("--stages", "6", "--micro-batches", "12", *TIMES)
TRANSFERS = ("--transfer-ms", "8.7")


def answer(*options):
    result = invoke("simulate", *LINE, *options, "--json")
    assert result.exit_code == 0, result.stderr
    return strict(result.stdout)


def test_json_has_the_times_of_the_schedule():
    found = answer(*TRANSFERS, "--schedule", "1f1b", "--pipelines", "2", "--batches", "5")
    assert found["makespan_s"] == pytest.approx(2.475)
    assert found["steady_batch_s"] == pytest.approx(0.4296)
    assert found["batches"] == 5
    assert found["advance"] is None
    assert found["peak_in_flight"] == [6, 5, 4, 3, 2, 1]
    assert found["peak_memory_bytes"] is None
    assert found["choice"] is None


def test_the_default_is_advance_forward_with_one_batch():
    found = answer(*TRANSFERS)
    assert found["schedule"] == "advance-forward"
    assert found["makespan_s"] == 0.597
    assert found["batches"] == 1
    assert found["advance"] == [5, 4, 3, 2, 1, 0]
    assert found["bubble_fraction"] == pytest.approx(1 - 360 / 597)


def test_an_advance_is_a_number_or_one_per_stage():
    assert answer("--advance", "2")["advance"] == [2] * 6
    assert answer("--advance", "3,2,2,1,0,0")["peak_in_flight"] == [9, 7, 6, 4, 2, 1]


def test_auto_tells_what_was_chosen():
    found = answer(*TRANSFERS, "--advance", "auto")
    assert found["choice"]["advance"] == found["advance"]
    assert found["steady_batch_s"] == pytest.approx(0.597, rel=0.01)
    assert sum(found["peak_in_flight"]) < sum(answer(*TRANSFERS)["peak_in_flight"])
    result = invoke("simulate", *LINE, *TRANSFERS, "--advance", "auto")
    assert "within 1 % of the best" in result.stdout


def test_numbers_may_differ_from_stage_to_stage():
    line = ("--stages", "2", "--micro-batches", "1", "--forward-ms", "100,200", "--backward-ms", "300,400")
    result = invoke("simulate", *line, "--transfer-ms", "50", "--update-ms", "10,0", "--json")
    assert strict(result.stdout)["makespan_s"] == 1.11


def test_memory_is_printed_where_it_is_known():
    options = ("--activation-mib", "2", "--weight-mib", "10,10,10,10,10,20")
    found = answer("--schedule", "1f1b", *options)
    assert [b / 2**20 for b in found["peak_memory_bytes"]] == [22, 20, 18, 16, 14, 22]
    assert "22.0" in invoke("simulate", *LINE, "--schedule", "1f1b", *options).stdout


def test_a_person_reads_a_table():
    result = invoke("simulate", *LINE, *TRANSFERS, "--pipelines", "2", "--batches", "4")
    assert result.exit_code == 0
    assert "advance-forward: stages 6, micro-batches 12, pipelines 2" in result.stdout
    assert "steady state: 360.0 ms per batch" in result.stdout
    assert "in flight per pipeline" in result.stdout
    assert result.stdout.count(" % ") >= 6


def test_a_worker_may_have_several_stages():
    found = answer("--schedule", "interleaved-1f1b", "--stages-per-worker", "3", "--activation-mib", "1")
    assert found["workers"] == 2
    assert found["makespan_s"] == pytest.approx(
        12 * 3 * 0.030 + 0.030
    )  # one bubble of 2 workers, 3 times shorter
    assert len(found["worker_busy_fraction"]) == len(found["peak_memory_bytes"]) == 2
    assert len(found["peak_in_flight"]) == 6
    assert answer("--schedule", "1f1b")["workers"] == 6
    table = invoke("simulate", *LINE, "--schedule", "zero-bubble-v").stdout
    assert "worker" in table
    assert [line.split()[0] for line in table.splitlines()[-3:]] == ["0", "1", "2"]


def test_without_a_flush_batches_overlap():
    options = ("--schedule", "pipedream-2bw", "--batches", "3")
    assert answer(*options)["makespan_s"] == pytest.approx((3 * 12 + 5) * 0.030)
    assert answer(*options)["steady_batch_s"] == pytest.approx(12 * 0.030)
    assert answer(*options)["peak_in_flight"] == [6, 5, 4, 3, 2, 1]


@pytest.mark.parametrize("name", ["dualpipe-v", "1f1b", "pipedream"])
def test_a_schedule_may_be_a_file(tmp_path, name):
    path, schedule = tmp_path / "mine.csv", build_schedule(name, 6, 12)
    texts = [schedule.to_csv()] if name == "pipedream" else [schedule.to_csv(), schedule.to_torch_csv()]
    for text in texts:
        path.write_text(text)
        result = invoke("simulate", *TIMES, "--schedule", str(path), "--json")
        assert result.exit_code == 0, result.stderr
        found, expected = strict(result.stdout), answer("--schedule", name)
        assert found.pop("schedule") == str(path)
        del expected["schedule"]
        assert found == expected


@pytest.mark.parametrize(
    ("text", "options", "named"),
    [
        ("0F0,0X0\n", (), "mine.csv: row 1 (rank 0), cell 2: '0X0' is not an action of torch's"),
        ("F0,X0,U\n", (), "mine.csv: row 1 (stage 0), cell 2: 'X0' is not an action"),
        ("0F0,1F0,0B0,1B0\n", (), "deadlock, worker 0 at 0B0 waits for 1B0"),
        ("", (), "mine.csv: the CSV text is empty"),
        ("0F0,0B0\n", ("--stages", "1"), "--stages: "),
        ("0F0,0B0\n", ("--micro-batches", "1"), "mine.csv has its own, leave the option out"),
        ("0F0,0B0\n", ("--advance", "auto"), "--advance: "),
        (None, (), "mine.csv: No such file"),
    ],
)
def test_a_file_that_has_no_schedule_is_refused(tmp_path, text, options, named):
    path = tmp_path / "mine.csv"
    if text is not None:
        path.write_text(text)
    result = invoke("simulate", *TIMES, "--schedule", str(path), *options)
    assert result.exit_code == 2
    assert named in result.stderr
    assert result.stderr.count("\n") == 1


def test_a_schedule_by_name_needs_its_sizes():
    result = invoke("simulate", *TIMES, "--schedule", "1f1b")
    assert result.exit_code == 2
    assert (
        "--schedule 1f1b needs --stages and --micro-batches, which only a CSV file contains" in result.stderr
    )
    result = invoke("simulate", *TIMES, "--stages", "2")
    assert "--schedule advance-forward needs --micro-batches" in result.stderr


@pytest.mark.parametrize("name", ["a.png", "a.svg"])
def test_a_picture_is_drawn(tmp_path, name):
    result = invoke("simulate", *LINE, *TRANSFERS, "--pipelines", "2", "--plot", str(tmp_path / name))
    assert result.exit_code == 0
    assert (tmp_path / name).stat().st_size > 5_000


@pytest.mark.parametrize(
    ("options", "named"),
    [
        (("--schedule", "1f2b"), "unknown schedule '1f2b': did you mean '1f1b'"),
        (("--stages", "0"), "--stages 0: must be more than 0"),
        (("--micro-batches", "-1"), "--micro-batches -1: must be more than 0"),
        (("--pipelines", "0"), "--pipelines 0: must be more than 0"),
        (("--batches", "0"), "--batches 0: must be more than 0"),
        (
            ("--batches", "1000000000"),
            "--batches 1000000000: must be at most 29127 with 6 workers and 12 micro",
        ),
        (("--pipelines", "1000000000"), "--pipelines 1000000000: must be at most 29127 with 6 workers"),
        (("--forward-ms", "ten"), "--forward-ms ten"),
        (("--backward-ms", "-20"), "--backward-ms -20"),
        (("--transfer-ms", "nan"), "--transfer-ms nan"),
        (("--transfer-ms", "1,2"), "transfer_s has 2 entries for 5 boundaries"),
        (("--forward-ms", "10,10"), "forward_s has 2 entries for 6 stages"),
        (("--advance", "most"), "--advance most"),
        (("--advance", "0,9"), "2 entries for 6 stages"),
        (("--advance", "auto", "--schedule", "1f1b"), "advance='auto'"),
        (("--stages-per-worker", "2"), "stages_per_worker=2: advance-forward takes none"),
        (
            ("--stages-per-worker", "4", "--schedule", "interleaved-1f1b"),
            "stages=6: interleaved-1f1b has 4 stages",
        ),
        (("--plot", "a.mp3"), "--plot a.mp3"),
        (("--plot", "nowhere/a.png"), "nowhere"),
    ],
)
def test_wrong_arguments_are_refused_in_one_line(options, named):
    result = invoke("simulate", *LINE, *options, "--json")
    assert result.exit_code == 2
    assert named in strict(result.stdout)["error"]
    assert result.stderr.count("\n") == 1


def test_a_picture_that_is_a_folder_is_refused(tmp_path):
    (tmp_path / "a.png").mkdir()
    result = invoke("simulate", *LINE, "--plot", str(tmp_path / "a.png"))
    assert result.exit_code == 2
    assert "a.png: cannot be written" in result.stderr
    assert result.stderr.count("\n") == 1
