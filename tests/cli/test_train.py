"""Whole runs: what they write and print."""

import json
import math
import os
import shutil
import signal
import subprocess
import sys
from dataclasses import replace

import pytest
import torch

from avgpipe.checkpoint import verify_checkpoint
from avgpipe.cli import resolve, train, training
from avgpipe.cli.config import TrainConfig
from avgpipe.plan import Plan
from avgpipe.timeline.timeline import Timeline
from tests.cli.command import Run, avgpipe, children, environment, invoke, rank_of, rows, strict
from tests.patience import limit, wait_until

KEYS = [
    *("workload", "system", "stages", "pipelines", "micro_batches", "batch_size", "schedule", "advance"),
    *(
        "epochs",
        "batches",
        "samples",
        "train_seconds",
        "samples_per_second",
        "metric_name",
        "lower_is_better",
    ),
    *(
        "metric",
        "target",
        "seconds_to_target",
        "samples_to_target",
        "worker_busy_fraction",
        "bubble_fraction",
        "peak_memory_bytes",
    ),
    *("parameters", "seed", "versions", "preset", "title", "best_metric", "trivial_metric", "warnings"),
    "skipped_updates",
]


def finish(*arguments, **changes):
    process = avgpipe("train", "awd-lstm", *arguments, **changes)
    stdout, stderr = process.communicate(timeout=limit(100))
    return process.returncode, stdout, stderr


# ---- two stages, two pipelines, two epochs ---------------------------------------------------------------------------


@pytest.mark.ranks
@pytest.mark.slow
def test_json_is_the_summary_and_nothing_else(whole):
    assert strict(whole.stdout) == whole.summary
    assert sorted(whole.summary) == sorted(KEYS)


@pytest.mark.promise
def test_the_summary_tells_what_was_done(whole):
    s = whole.summary
    assert (s["system"], s["stages"], s["pipelines"], s["micro_batches"]) == ("avgpipe", 2, 2, 4)
    assert (s["batch_size"], s["schedule"], s["seed"]) == (4, "advance-forward", 0)
    assert (s["epochs"], s["batches"], s["samples"]) == (2, 130, 520)
    assert s["samples_per_second"] == pytest.approx(520 / s["train_seconds"])
    assert len(s["worker_busy_fraction"]) == len(s["peak_memory_bytes"]) == 2
    assert all(0 < share <= 1 for share in s["worker_busy_fraction"])
    assert s["bubble_fraction"] == pytest.approx(1 - sum(s["worker_busy_fraction"]) / 2)
    assert all(size > 2**26 for size in s["peak_memory_bytes"])
    assert (s["target"], s["seconds_to_target"], s["samples_to_target"]) == (None, None, None)
    assert s["versions"].keys() == {"avgpipe", "torch", "python"}
    assert s["preset"] == "tiny"
    assert s["title"].endswith("words of 42 types")
    assert s["best_metric"] == s["metric"] < s["trivial_metric"]


@pytest.mark.promise
def test_every_batch_and_validation_has_a_row(whole):
    train = [row for row in whole.rows if row["kind"] == "train"]
    assert [row["batch"] for row in train] == list(range(130))
    assert {row["pipeline"] for row in train} == {None}  # both train on each
    assert [row["epoch"] for row in train] == [0] * 65 + [1] * 65
    assert [row["samples"] for row in train] == [4 * (j + 1) for j in range(130)]
    seconds = [row["seconds"] for row in train]
    assert seconds == sorted(seconds)
    valid = [row for row in whole.rows if row["kind"] == "valid"]
    # Twenty equal shares of the batches; of two that are as near the later one.
    nearest = [int(130 * n / 20 + 0.5) for n in range(21)]
    assert [row["batch"] for row in valid] == nearest
    assert [row["samples"] for row in valid] == [4 * batch for batch in nearest]
    assert [row["epoch"] for row in valid] == [int(batch > 65) for batch in nearest]
    assert all(row["metric"] == pytest.approx(math.exp(row["loss"])) for row in valid)
    assert all(row["metrics"] == {"perplexity": row["metric"]} for row in valid)
    assert valid[-1]["metric"] == whole.summary["metric"]


@pytest.mark.promise
def test_validations_of_several_pipelines_tell_how_far_apart_they_are(whole):
    found = [row["distances"] for row in whole.rows if row["kind"] == "valid"]
    assert found[0]["to_reference"] == [0.0, 0.0]
    assert all(found[0]["norm"] > 1 and min(after["to_reference"]) > 0 for after in found[1:])
    assert all(after["between"][0][1] == after["between"][1][0] > 0 for after in found[1:])


@pytest.mark.promise
def test_rows_tell_rates_memory_and_busy_shares(whole):
    train = [row for row in whole.rows if row["kind"] == "train"]
    rates = [row["lr"] for row in train]
    assert rates[0] < max(rates) > rates[-1]  # warm-up, then decay
    first, *valid = [row for row in whole.rows if row["kind"] == "valid"]
    assert first.keys().isdisjoint({"samples_per_second", "worker_busy_fraction"})
    assert all(row["total_batches"] == 130 for row in (first, *valid))
    assert all(len(row["peak_memory_bytes"]) == 2 and row["skipped_updates"] == 0 for row in valid)
    peaks = [row["peak_memory_bytes"][0] for row in (first, *valid)]
    assert peaks == sorted(peaks)
    assert all(0 < share <= 1 for row in valid for share in row["worker_busy_fraction"])
    last = [row for row in train if row["batch"] >= valid[-2]["batch"]]
    seconds = valid[-1]["seconds"] - valid[-2]["seconds"]
    assert valid[-1]["samples_per_second"] == pytest.approx(4 * len(last) / seconds, rel=1e-4)


@pytest.mark.promise
def test_it_learns(whole):
    metrics = [row["metric"] for row in whole.rows if row["kind"] == "valid"]
    assert metrics[0] > 35
    assert metrics[-1] < 15


@pytest.mark.promise
def test_the_folder_has_plan_timeline_picture_and_checkpoints(whole):
    assert Plan.load(whole.out / "plan.json").partition is not None
    timeline = Timeline.from_chrome_trace(whole.out / "timeline.json")
    assert timeline.stages == 2
    assert {event.pipeline for event in timeline.events} == {0, 1}
    assert (whole.out / "curves.png").read_bytes().startswith(b"\x89PNG")
    assert (whole.out / "timeline.png").read_bytes().startswith(b"\x89PNG")
    for name in ("last", "best"):
        assert verify_checkpoint(whole.out / "checkpoints" / name).batches > 65
    assert verify_checkpoint(whole.out / "checkpoints" / "last").batches == 130
    assert not [p for p in whole.out.rglob("*") if p.suffix == ".tmp"]


@pytest.mark.ranks
@pytest.mark.slow
def test_a_finished_run_has_nothing_to_resume(whole, tmp_path):
    shutil.copytree(whole.out, tmp_path / "run")
    code, stdout, stderr = finish("--out", str(tmp_path / "run"), "--resume", "--json")
    assert code == 0, stderr
    assert strict(stdout) == whole.summary
    assert rows(tmp_path / "run") == whole.rows


# ---- one process -----------------------------------------------------------------------------------------------------


@pytest.mark.promise
def test_a_person_reads_before_after_speed_bubbles_and_where_the_picture_is(small):
    for part in ("perplexity:", "before", "after 4 batches", "samples/s", "bubbles", str(small.out)):
        assert part in small.stdout
    assert "timeline.png" in small.stdout
    assert "validation before training" in small.stderr


@pytest.mark.promise
def test_max_batches_end_in_the_middle_of_an_epoch_with_a_validation(small):
    assert small.summary["batches"] == 4
    assert 0 < small.summary["epochs"] < 1
    assert small.rows[-1]["kind"] == "valid"
    assert small.rows[-1]["batch"] == 4


@pytest.mark.ranks
@pytest.mark.slow
def test_a_longer_run_in_another_layout_goes_on_from_the_checkpoint(small, tmp_path):
    shutil.copytree(small.out, tmp_path / "run")
    code, stdout, stderr = finish(
        *("--out", str(tmp_path / "run"), "--resume", "--max-batches", "9"),
        *("--stages", "1", "--pipelines", "3", "--batch-size", "3", "--micro-batches", "2", "--json"),
    )
    assert code == 0, stderr
    summary = strict(stdout)
    assert (summary["pipelines"], summary["batches"], summary["samples"]) == (3, 9, 4 * 4 + 5 * 3)
    after = rows(tmp_path / "run")
    assert after[: len(small.rows)] == small.rows
    train = [row for row in after[len(small.rows) :] if row["kind"] == "train"]
    assert [row["batch"] for row in train] == list(range(4, 9))


@pytest.mark.parametrize(("target", "said"), [("1000", "1000"), ("loss=9", "loss 9")])
def test_a_target_ends_the_run_at_a_validation(target, said, text, tmp_path):
    out = tmp_path / "run"
    sizes = ("--batch-size", "16", "--micro-batches", "1", "--stages", "1", "--epochs", "5")
    result = invoke(
        *("train", "awd-lstm", "--data", str(text), "--system", "gpipe", *sizes, "--validations", "10"),
        *("--valid-batches", "2", "--target", target, "--out", str(out), "--json"),
    )
    assert result.exit_code == 0, result.output
    summary = strict(result.stdout)
    assert (summary["system"], summary["epochs"]) == ("gpipe", 0.5)
    assert summary["target"] == (target if "=" in target else float(target))
    assert summary["seconds_to_target"] == summary["train_seconds"]
    assert summary["samples_to_target"] == summary["samples"]
    assert f"target {said} reached" in result.stderr
    again = invoke("train", "awd-lstm", "--out", str(out), "--resume", "--json")
    assert strict(again.stdout) == summary


@pytest.mark.promise
def test_settings_are_kept_for_resuming(small, text):
    stored = json.loads((small.out / "run.json").read_text())
    assert (stored["data"], stored["batch_size"], stored["max_batches"]) == (str(text), 4, 4)


def test_batches_with_infinities_are_left_out_and_counted(text, tmp_path, monkeypatch):
    """The second batch's loss is infinite."""

    def prepare(config):
        workload, plan = resolve.prepare(config)
        trained = []

        def loss_fn(output, target):
            loss = workload.loss_fn(output, target)
            if torch.is_grad_enabled() and loss.dtype == torch.float32:  # others look at the function alone
                trained.append(loss)
            return loss * torch.inf if len(trained) == 2 else loss

        return replace(workload, loss_fn=loss_fn), plan

    monkeypatch.setattr(training, "prepare", prepare)
    out = tmp_path / "run"
    arguments = ("--data", str(text), "--batch-size", "4", "--stages", "1", "--micro-batches", "1")
    arguments += ("--max-batches", "4", "--skip-nonfinite", "--out", str(out))
    result = invoke("train", "awd-lstm", *arguments)
    assert result.exit_code == 0, result.output
    assert "updates skipped so far: 1" in result.stderr
    assert "updates skipped because gradients had infinities or NaN: 1" in result.stdout
    assert strict((out / "summary.json").read_text())["skipped_updates"] == 1
    assert strict((out / "run.json").read_text())["skip_nonfinite"] is True
    resumed = TrainConfig.of(workload="awd-lstm", out=str(out), resume=True)
    assert resolve.resolve(resumed).skip_nonfinite


def test_what_workers_do_is_not_in_their_command_line(tmp_path, monkeypatch):
    """Which every user of the host may read."""
    seen = []
    monkeypatch.setattr(train, "run_on_ranks", lambda *words, **_: seen.extend(words) or [False])
    config = resolve.resolve(TrainConfig.of(workload="awd-lstm", out=str(tmp_path / "secret")))
    train.train_on_workers(config)
    target, _, arguments = seen
    assert "secret" not in target
    assert TrainConfig.from_json(arguments["config"]) == config


@pytest.mark.ranks
@pytest.mark.slow
def test_it_joins_torchruns_workers(text, tmp_path):
    out = tmp_path / "run"
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2"]
    command += ["-m", "avgpipe", "train", "awd-lstm", "--data", str(text), "--batch-size", "4"]
    command += ["--max-batches", "4", "--out", str(out), "--json"]
    run = subprocess.run(command, env=environment(), capture_output=True, text=True, timeout=limit(100))
    assert run.returncode == 0, run.stderr
    assert strict(run.stdout)["stages"] == 2
    assert Run(out, run.stdout, run.stderr).summary["batches"] == 4


@pytest.mark.ranks
@pytest.mark.slow
def test_torchrun_starts_a_killed_run_again_from_its_checkpoint(text, tmp_path):
    out = tmp_path / "run"
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2"]
    command += ["--max-restarts", "1", "-m", "avgpipe", "train", "awd-lstm", "--data", str(text)]
    command += ["--batch-size", "4", "--max-batches", "32", "--out", str(out)]
    with subprocess.Popen(
        command, env=environment(), stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
    ) as torchrun:
        wait_until(lambda: (out / "metrics.jsonl").is_file() and len(rows(out)) > 4)
        victim = next(pid for pid in children(torchrun.pid) if rank_of(pid) == 1)
        os.kill(victim, signal.SIGKILL)
        stdout, stderr = torchrun.communicate(timeout=limit(100))
    assert torchrun.returncode == 0, stderr
    assert "resumes after batch " in stderr
    assert Run(out, stdout, stderr).summary["batches"] == 32
    assert [row["batch"] for row in rows(out) if row["kind"] == "train"] == list(range(32))


@pytest.mark.ranks
@pytest.mark.slow
def test_a_link_and_a_wire_can_be_chosen_and_the_link_is_named(text, tmp_path):
    out = tmp_path / "run"
    arguments = ("--data", str(text), "--batch-size", "4", "--stages", "2", "--max-batches", "12")
    choices = ("--link", "gloo", "--wire-dtype", "bfloat16", "--advance", "auto")
    code, stdout, stderr = finish(*arguments, *choices, "--out", str(out), "--json")
    assert code == 0, stderr
    assert "links: stage 0 to stage 1 by torch.distributed (gloo)\n" in stderr
    stored = strict((out / "run.json").read_text())
    assert (stored["link"], stored["wire_dtype"], stored["advance"]) == ("gloo", "bfloat16", "auto")
    assert len(strict(stdout)["advance"]) == 2  # what measuring chose


@pytest.mark.ranks
@pytest.mark.slow
def test_an_optimizer_and_its_rate_can_be_chosen_and_stay_when_the_run_goes_on(text, tmp_path):
    out = tmp_path / "run"
    chosen = ("--data", str(text), "--batch-size", "4", "--optimizer", "muon", "--lr", "0.02")
    code, _, stderr = finish(*chosen, "--max-batches", "40", "--out", str(out))
    assert code == 0, stderr
    stored = strict((out / "run.json").read_text())
    assert (stored["optimizer"], stored["lr"]) == ("muon", 0.02)
    before, *_, after = (row["loss"] for row in rows(out) if row["kind"] == "valid")
    assert after < before - 0.5
    longer = ("--resume", "--stages", "1", "--max-batches", "44", "--out", str(out))
    code, _, stderr = finish(*longer)
    assert code == 0, stderr
    assert strict((out / "summary.json").read_text())["batches"] == 44
    code, _, stderr = finish(*longer, "--lr", "0.01")
    assert code == 2
    assert "trains with 0.02" in stderr


@pytest.mark.parametrize(
    ("option", "value"),
    [
        ("--link", "tcp"),
        ("--wire-dtype", "float8"),
        ("--autocast", "int8"),
        ("--lr-scaling", "log"),
        ("--optimizer", "nadam"),
    ],
)
def test_unknown_links_and_wires_are_refused_before_anything_is_written(option, value, tmp_path):
    result = invoke("train", "awd-lstm", option, value, "--out", str(tmp_path / "run"))
    assert result.exit_code == 2
    assert f"unknown {option[2:]} {value!r}" in result.stderr
    assert not (tmp_path / "run").exists()
