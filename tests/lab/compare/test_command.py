"""``avgpipe compare``: what it runs, writes, prints and refuses. Runs are faked but for one."""

import json
import os
import signal
import sys
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import pytest
import typer

from avgpipe.plan import Plan
from avgpipe.schedule.row import Event
from avgpipe.systems import SYSTEMS
from avgpipe.timeline.timeline import Timeline
from avgpipe_lab.commands import CompareConfig
from avgpipe_lab.compare import process as processes
from avgpipe_lab.compare import study
from avgpipe_lab.compare.command import answer, check
from avgpipe_lab.compare.comparison import SystemResult
from avgpipe_lab.compare.process import noting_signals, run_in_process, verdict
from avgpipe_lab.compare.study import Study, warm_up_warnings, words_of
from tests.cli.command import avgpipe, invoke, strict
from tests.patience import limit

MIB = 2**20
SUMMARY = {
    "workload": "awd-lstm", "batch_size": 16, "epochs": 1.0, "batches": 4, "samples": 64, "train_seconds": 2.0,
    "metric_name": "perplexity", "lower_is_better": True, "metric": 120.0,
    "seconds_to_target": None, "samples_to_target": None, "worker_busy_fraction": [0.4, 0.6],
    "peak_memory_bytes": [200 * MIB, 400 * MIB], "seed": 0, "preset": "tiny", "title": "a text", "best_metric": 110.0,
    "trivial_metric": 900.0,
    "warnings": [],
}  # fmt: skip


class Faked:
    """A runner whose systems write what a run would write, but for those in ``ends``: what they say, and exit with."""

    def __init__(self, ends=None, summaries=None, interrupted_in=None):
        self.ends, self.summaries, self.interrupted_in = ends or {}, summaries or {}, interrupted_in
        self.systems = []

    def __call__(self, words, log, caught, tick):
        out = log.with_suffix("")
        system = words[words.index("--system") + 1]
        self.systems.append(system)
        if system == self.interrupted_in:
            caught.append(signal.SIGINT)
            return 130
        if system in self.ends:
            code, text = self.ends[system]
            log.write_text(text)
            return code
        tick()
        out.mkdir()
        plan = Plan.for_system(system, stages=2, **self.choices(system))
        plan.save(out / "plan.json")
        facts = {n: getattr(plan, n) for n in ("stages", "pipelines", "micro_batches", "schedule")}
        summary = {**SUMMARY, "system": system, **facts, **self.summaries.get(system, {})}
        (out / "summary.json").write_text(json.dumps(summary))
        rows = [
            {"kind": "valid", "batch": 0, "loss": 6.8, "metric": 900.0, "seconds": 0.0},
            *(
                {"kind": "train", "batch": j, "samples": 16 * j + 16, "loss": 6.0, "seconds": j}
                for j in range(4)
            ),
        ]
        (out / "metrics.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
        Timeline(2, (Event(0, 0, 0, 0, "F", 0.0, 1.0),)).to_chrome_trace(out / "timeline.json")
        return 0

    @staticmethod
    def choices(system):
        return {} if "micro_batches" in SYSTEMS[system] else {"micro_batches": 4}


def question(out, *systems, **asked):
    return CompareConfig.of(workload="awd-lstm", systems=systems, out=str(out), **{"stages": 2, **asked})


def compared(capsys, asked, runner, code=0):
    """The object on standard output, and standard error."""
    Path(asked.out).mkdir(exist_ok=True)
    if code:
        with pytest.raises(typer.Exit) as exit_:
            answer(replace(asked, json=True), runner)
        assert exit_.value.exit_code == code
    else:
        answer(replace(asked, json=True), runner)
    captured = capsys.readouterr()
    return strict(captured.out), captured.err


# ---- which runs ------------------------------------------------------------------------------------------------------


def options_of(config, system):
    words = words_of(config, system, config.seed)
    assert words[:2] == ["train", "awd-lstm"]
    words.remove("--wait-for-checkpoints")  # the only flag
    return dict(zip(words[2::2], words[3::2]))


def test_all_systems_get_the_same_options_but_for_what_they_fix(tmp_path):
    asked = {"data": "d", "batch_size": 16, "seed": 3, "micro_batches": 8, "pipelines": 3, "timeout_s": 9.0}
    found = {s: options_of(question(tmp_path, *SYSTEMS, stages=4, **asked), s) for s in SYSTEMS}
    same = {"--data": "d", "--batch-size": "16", "--seed": "3", "--timeout": "9", "--stages": "4"}
    assert all(same.items() <= words.items() for words in found.values())
    assert all((words["--system"], words["--out"]) == (s, str(tmp_path / s)) for s, words in found.items())
    assert {s for s, words in found.items() if words.get("--pipelines") == "3"} == {
        "avgpipe",
        "avgpipe-elastic",
    }
    without = {s for s, words in found.items() if "--micro-batches" not in words}
    whole = {s for s, row in SYSTEMS.items() if row.get("weights") in ("stash", "predicted")}
    assert without == {s for s, row in SYSTEMS.items() if "micro_batches" in row} | whole


def test_what_is_given_is_what_train_takes():
    """Every option of a run is one of ``avgpipe train``."""
    help_text = invoke("train", "--help").stdout
    asked = dict.fromkeys(
        ("optimizer", "lr", "lr_scaling", "epochs", "max_batches", "target", "device", "link", "autocast"),
        "1",
    )
    config = question(Path(), "avgpipe", preset="tiny", timeout_s=1.0, **asked)
    words = words_of(config, "avgpipe", 0, Path("plan.json"))
    assert all(word in help_text for word in words if word.startswith("--"))


# ---- results ---------------------------------------------------------------------------------------------------------


def test_each_system_runs_in_turn_and_the_folder_has_table_json_and_pictures(capsys, tmp_path):
    runner = Faked(summaries={"dapple": {"train_seconds": 1.0, "warnings": ["it waits"]}})
    asked = question(tmp_path / "out", "gpipe", "dapple", "data-parallel", target=115.0)
    found, err = compared(capsys, asked, runner)
    assert [row["warnings"] for row in found["systems"]] == [[], ["it waits"], []]
    assert "dapple: it waits." in found["notes"]
    assert runner.systems == ["gpipe", "dapple", "data-parallel"]
    assert found == strict((tmp_path / "out" / "compare.json").read_text())
    assert [row["status"] for row in found["systems"]] == ["ok"] * 3
    assert found["systems"][2]["replicas"] == 2
    assert found["best"]["samples_per_second"] == ["dapple"]
    assert (found["workers"], found["metric_name"], found["trivial"], found["target"]) == (
        2,
        "perplexity",
        900,
        115,
    )
    assert found["what"] == "awd-lstm tiny (a text)"
    assert found["advice"].startswith("Advice: dapple is fastest here, 2.0 times as fast as")
    for name in ("bars.png", "curves.png", "timelines.png"):
        assert (tmp_path / "out" / name).read_bytes().startswith(b"\x89PNG")
    assert "| dapple | 2/1/4 | 1f1b |" in (tmp_path / "out" / "compare.md").read_text()
    begun = [line for line in err.splitlines() if line.endswith(("gpipe", "dapple", "data-parallel"))]
    assert begun == ["1 of 3: gpipe", "2 of 3: dapple", "3 of 3: data-parallel"]
    assert "3 of 3: data-parallel: done (" in err


def test_the_table_is_printed(capsys, tmp_path):
    answer(question(tmp_path, "gpipe", "dapple"), Faked(summaries={"gpipe": {"train_seconds": 1.0}}))
    out = capsys.readouterr().out
    assert "64.0*" in out
    assert "Equal for all: awd-lstm tiny (a text), 2 workers, seed 0, batches of 16 samples, 4 batches" in out
    assert "Advice: gpipe is fastest here, 2.0 times as fast as dapple: use it." in out
    assert f"folder: {tmp_path}" in " ".join(out.split())


def test_a_system_that_fails_is_a_row_and_stops_no_other(capsys, tmp_path):
    ends = {
        "gpipe": (
            1,
            "RuntimeError: DefaultCPUAllocator: can't allocate memory: you tried to allocate 9 bytes\n",
        ),
        "dapple": (-9, ""),
    }
    found, err = compared(capsys, question(tmp_path, "gpipe", "dapple", "avgpipe"), Faked(ends))
    assert [row["status"] for row in found["systems"]] == ["out of memory", "killed", "ok"]
    assert found["notes"][1] == "dapple: killed: by hand, or by the system when memory runs out."
    assert "1 of 3: gpipe: out of memory: RuntimeError: DefaultCPUAllocator" in err
    assert found["advice"] == "Advice: none, as figures exist for avgpipe only."


def test_what_a_system_cannot_do_is_a_row_without_a_run(capsys, tmp_path):
    runner = Faked()
    asked = question(tmp_path, "pipedream-2bw", "gpipe", stages=4, micro_batches=2)
    found, _ = compared(capsys, asked, runner)
    assert runner.systems == ["gpipe"]
    assert found["systems"][0]["status"] == "refused"
    assert "at least as many micro-batches as stages" in found["systems"][0]["reason"]


def test_more_memory_than_the_limit_does_not_fit_and_is_not_ranked(capsys, tmp_path):
    summaries = {"gpipe": {"train_seconds": 0.1}, "dapple": {"peak_memory_bytes": [300 * MIB]}}
    asked = question(tmp_path, "gpipe", "dapple", "avgpipe", memory_limit_bytes=399 * MIB, plans="given")
    summaries["avgpipe"] = {"peak_memory_bytes": [399 * MIB]}
    found, _ = compared(capsys, asked, Faked(summaries=summaries))
    assert [(row["status"], row["reason"]) for row in found["systems"]] == [
        ("does not fit", "needs 400 MiB"),
        ("ok", ""),
        ("ok", ""),
    ]
    assert found["systems"][0]["samples_per_second"] == 640
    assert "gpipe" not in found["best"]["samples_per_second"]
    assert found["memory_limit_bytes"] == 399 * MIB


def test_no_system_at_all_is_a_failure_with_its_reasons(capsys, tmp_path):
    found, err = compared(
        capsys, question(tmp_path, "gpipe"), Faked({"gpipe": (1, "avgpipe: error: no luck\n")}), code=1
    )
    assert found["systems"] == [{"system": "gpipe", "status": "failed", "reason": "no luck", "warnings": []}]
    assert err.endswith(f"avgpipe: error: no system trained to its end: see the logs in {tmp_path}\n")
    assert not (tmp_path / "curves.png").exists()


def test_ctrl_c_keeps_what_is_there(capsys, tmp_path):
    asked = question(tmp_path, "gpipe", "dapple", "avgpipe")
    found, err = compared(capsys, asked, Faked(interrupted_in="dapple"), code=130)
    assert [row["status"] for row in found["systems"]] == ["ok", "interrupted", "not run"]
    assert found["interrupted"] is True
    assert (tmp_path / "compare.md").is_file()
    assert "interrupted by SIGINT" in err


def test_several_seeds_are_one_row_with_their_spread(capsys, tmp_path):
    seconds = iter((20.0, 30.0, 22.0))
    runner = Faked()

    def run(words, log, caught, tick):
        reached = next(seconds)
        runner.summaries = {"gpipe": {"seconds_to_target": reached, "samples_to_target": 64}}
        return runner(words, log, caught, tick)

    asked = question(tmp_path, "gpipe", seeds=3, seed=5, target=115.0)
    found, err = compared(capsys, asked, run)
    (row,) = found["systems"]
    assert (row["seconds_to_target"], row["spread"]["seconds_to_target"]) == (22.0, [20.0, 30.0])
    assert sorted(p.name for p in (tmp_path / "gpipe").iterdir()) == ["seed-5", "seed-6", "seed-7"]
    assert "2 of 3: gpipe, seed 6" in err
    given = [words_of(asked, "gpipe", seed) for seed in (5, 6, 7)]
    assert [words[words.index("--seed") + 1] for words in given] == ["5", "6", "7"]


def test_a_seed_that_fails_is_reported(capsys, tmp_path):
    runner = Faked()

    def run(words, log, caught, tick):
        runner.ends = {"gpipe": (1, "avgpipe: error: no luck\n")} if log.stem == "seed-1" else {}
        return runner(words, log, caught, tick)

    found, _ = compared(capsys, question(tmp_path, "gpipe", seeds=2), run)
    assert found["systems"][0]["status"] == "ok"
    assert "gpipe: seed 1: failed: no luck." in found["notes"]


def test_plans_are_tuned_with_a_memory_limit_or_if_asked(tmp_path):
    assert question(tmp_path, "gpipe", memory_limit_bytes=2**30).tunes
    assert question(tmp_path, "gpipe", plans="tuned").tunes
    assert not question(tmp_path, "gpipe", memory_limit_bytes=2**30, plans="given").tunes
    assert not question(tmp_path, "gpipe").tunes


def test_a_system_without_a_plan_that_fits_is_a_row_without_a_run(capsys, tmp_path, monkeypatch):
    chosen = Plan.for_system("gpipe", stages=2, micro_batches=8)

    def best(system, *_):
        if system == "dapple":
            raise ValueError("nothing fits")
        return SimpleNamespace(plan=chosen, batch_s=0.5, memory_bytes=(MIB, 2 * MIB))

    monkeypatch.setattr(study, "best_of_system", best)
    monkeypatch.setattr(study.Cluster, "like", lambda *_: None)
    monkeypatch.setattr(Study, "profile", lambda _: (None, 16))
    runner, given = Faked(), []

    def run(words, *rest):
        given.append(words[words.index("--plan") + 1])
        return runner(words, *rest)

    found, err = compared(capsys, question(tmp_path, "gpipe", "dapple", memory_limit_bytes=2**30), run)
    assert [(row["status"], row["reason"]) for row in found["systems"]] == [
        ("ok", ""),
        ("does not fit", "nothing fits"),
    ]
    plan = tmp_path / "gpipe-plan.json"
    assert (given, found["tuned"], Plan.load(plan)) == ([str(plan)], True, chosen)
    predicted = "predicted 500 ms a batch, 2 MiB on the worker that needs most"
    assert err.splitlines()[0] == f"gpipe: pipelines 1, micro-batches 8, advance None; {predicted}"


@pytest.mark.parametrize(
    ("code", "log", "expected"),
    [
        (1, "", ("failed", "exit code 1")),
        (1, "avgpipe: error: rank 1 lost; there is no checkpoint yet\n", ("failed", "rank 1 lost")),
        (
            1,
            "avgpipe: error: loss is not finite\navgpipe: error: peer lost\n"
            "avgpipe: error: rank 0 failed with exit code 1; resume from the last checkpoint with: avgpipe ...\n",
            ("failed", "loss is not finite"),
        ),
        (
            1,
            "Traceback (most recent call last):\n  File x\nKeyError: 'y'\n"
            "avgpipe: error: rank 0 failed with exit code 1\n",
            ("failed", "KeyError: 'y'"),
        ),
        (
            2,
            "avgpipe: error: no data\navgpipe: error: rank 0 rejected its arguments\n",
            ("refused", "no data"),
        ),
        (
            1,
            "avgpipe: error: peer lost\n"
            "avgpipe: error: rank 1 was killed by SIGKILL (by hand); there is no checkpoint yet\n",
            ("killed", "rank 1 was killed by SIGKILL (by hand)"),
        ),
        (1, "avgpipe: error: CUDA out of memory. Tried\n", ("out of memory", "CUDA out of memory. Tried")),
    ],
)
def test_why_a_run_failed_in_a_few_words(code, log, expected):
    assert verdict(code, log) == expected


def test_a_long_reason_is_cut():
    assert len(verdict(1, "avgpipe: error: " + "x" * 1000)[1]) == 200


# ---- processes -------------------------------------------------------------------------------------------------------

WAITS = """
import signal, sys
def end(number, _):
    print("told", signal.Signals(number).name, flush=True)
    sys.exit(7)
signal.signal(signal.SIGINT, {interrupt})
signal.signal(signal.SIGTERM, end)
print("ready", flush=True)
while True:
    signal.pause()
"""


def run(tmp_path, script, caught=(), tick=lambda: None):
    log = tmp_path / "gpipe.log"
    code = run_in_process(["word"], log, caught, tick, (sys.executable, "-c", script))
    return code, log.read_text()


@pytest.mark.promise
def test_a_run_says_what_it_says_to_its_log(tmp_path):
    script = "import sys; print(sys.argv[1]); print('loud', file=sys.stderr); sys.exit(3)"
    code, said = run(tmp_path, script)
    assert (code, sorted(said.split())) == (3, ["loud", "word"])


@pytest.mark.promise(0)
@pytest.mark.parametrize(
    ("interrupt", "told"),
    [("end", "told SIGINT"), ("signal.SIG_IGN", "told SIGTERM")],
    ids=["ends", "ignores"],
)
def test_a_signal_ends_the_run_that_is_running(monkeypatch, tmp_path, interrupt, told):
    monkeypatch.setattr(processes, "_GRACE_S", {signal.SIGINT: 0.5, signal.SIGTERM: 30.0})
    caught = []
    with noting_signals(caught):
        log = tmp_path / "gpipe.log"
        code, said = run(
            tmp_path,
            WAITS.format(interrupt=interrupt),
            caught,
            lambda: os.kill(os.getpid(), signal.SIGINT) if "ready" in log.read_text() else None,
        )
    assert caught[0] == signal.SIGINT
    assert (code, said.splitlines()) == (7, ["ready", told])


def test_signals_are_noted_only_inside_the_block():
    before = signal.getsignal(signal.SIGTERM)
    caught = []
    with noting_signals(caught):
        os.kill(os.getpid(), signal.SIGTERM)
        os.kill(os.getpid(), signal.SIGINT)
    assert caught == [signal.SIGTERM, signal.SIGINT]
    assert signal.getsignal(signal.SIGTERM) is before


def test_after_a_signal_nothing_more_is_run(tmp_path):
    asked = Study(question(tmp_path, "gpipe", "dapple"), Faked())
    asked.caught.append(signal.SIGTERM)
    assert asked.compare(asked.plans()).outcomes == (
        SystemResult("gpipe", "not run"),
        SystemResult("dapple", "not run"),
    )


# ---- refusals --------------------------------------------------------------------------------------------------------


def refused(*options, workload="awd-lstm"):
    result = invoke("compare", workload, *options)
    assert result.exit_code == 2, result.stdout
    assert len(result.stderr.strip().splitlines()) == 1
    return result.stderr


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (("--systems", "gpip"), "unknown system 'gpip': did you mean 'gpipe'?"),
        (("--systems", ""), "unknown system ''"),
        (("--systems", "gpipe,dapple,gpipe"), "gpipe is named twice"),
        (("--systems", "gpipe", "--memory-limit", "-1GiB"), "--memory-limit -1GiB: write a size as"),
        (("--systems", "gpipe", "--memory-limit", "0"), "--memory-limit 0: must be more than 0"),
        (("--systems", "gpipe", "--stages", "0"), "--stages 0: must be more than 0"),
        (("--systems", "gpipe", "--pipelines", "0"), "--pipelines 0: must be more than 0"),
        (("--systems", "gpipe", "--micro-batches", "-1"), "--micro-batches -1: must be more than 0"),
        (("--systems", "all", "--stages", "99"), "99 stages are more than the"),
        (
            ("--systems", "gpipe", "--batch-size", "2", "--micro-batches", "3"),
            "no system can run: a batch of 2",
        ),
        (("--systems", "gpipe", "--preset", "big"), "unknown preset 'big'"),
        (("--systems", "gpipe", "--data", "/nowhere"), "/nowhere"),
        (
            ("--systems", "gpipe", "--target", "nan"),
            "--target nan: give a finite number for the metric, or loss=2.1",
        ),
    ],
)
def test_what_no_system_could_do_is_refused_in_one_line(tmp_path, options, message):
    out = tmp_path / "out"
    assert message in refused(*options, "--out", str(out))
    assert not out.exists()


def test_unknown_workloads_are_refused():
    assert "unknown workload 'awd-lstn'" in refused("--systems", "gpipe", workload="awd-lstn")


def test_a_folder_with_content_is_left_alone(tmp_path):
    (tmp_path / "mine.txt").write_text("mine")
    said = refused("--systems", "gpipe", "--out", str(tmp_path))
    assert f"--out {tmp_path} is not empty (mine.txt): name a new folder" in said
    assert "is a file" in refused("--systems", "gpipe", "--out", str(tmp_path / "mine.txt"))
    refused("--systems", "gpipe", "--out", "/proc/compare")  # where nobody may make a folder
    assert os.listdir(tmp_path) == ["mine.txt"]


def test_more_workers_than_layers_are_fine_for_replicas_alone(tmp_path):
    check(question(tmp_path / "out", "data-parallel", stages=9, micro_batches=9))


def test_workers_of_torchrun_are_refused(monkeypatch):
    monkeypatch.setenv("RANK", "0")
    monkeypatch.setenv("WORLD_SIZE", "2")
    assert "without torchrun" in refused("--systems", "gpipe")


def test_a_refusal_in_json_is_one_object():
    result = invoke("compare", "awd-lstm", "--systems", "gpip", "--json")
    assert strict(result.stdout)["exit_code"] == 2


# ---- for real --------------------------------------------------------------------------------------------------------


@pytest.mark.ranks
def test_tuned_plans_of_two_seeds_for_real(text, tmp_path):
    out = tmp_path / "out"
    process = avgpipe(
        *(
            "compare",
            "awd-lstm",
            "--systems",
            "avgpipe,data-parallel-asp",
            "--stages",
            "2",
            "--data",
            str(text),
        ),
        *("--batch-size", "4", "--max-batches", "6", "--memory-limit", "4GiB", "--seeds", "2"),
        *("--target", "loss=0", "--validations", "3", "--out", str(out), "--json"),
    )
    stdout, stderr = process.communicate(timeout=limit(300))
    assert process.returncode == 0, stderr
    found = strict(stdout)
    assert [(row["status"], len(row["runs"])) for row in found["systems"]] == [("ok", 2), ("ok", 2)]
    assert all(row["seconds_to_target"] is None for row in found["systems"])
    for system in ("avgpipe", "data-parallel-asp"):
        tuned, ran = (Plan.load(out / name) for name in (f"{system}-plan.json", f"{system}/seed-1/plan.json"))
        assert tuned.workers == ran.workers == 2
        assert (tuned.pipelines, tuned.micro_batches) == (ran.pipelines, ran.micro_batches)


@pytest.mark.ranks
@pytest.mark.slow
def test_two_systems_for_real(text, tmp_path):
    out = tmp_path / "out"
    process = avgpipe(
        *("compare", "awd-lstm", "--systems", "gpipe,model-parallel", "--stages", "1", "--data", str(text)),
        *("--batch-size", "4", "--max-batches", "4", "--out", str(out), "--json"),
    )
    stdout, stderr = process.communicate(timeout=limit(100))
    assert process.returncode == 0, stderr
    found = strict(stdout)
    assert [row["status"] for row in found["systems"]] == ["ok", "ok"]
    assert all(row["samples"] == 16 and row["samples_per_second"] > 0 for row in found["systems"])
    assert stderr.splitlines()[0] == "1 of 2: gpipe"
    assert sorted(p.name for p in out.iterdir()) == [
        *("bars.png", "compare.json", "compare.md", "curves.png"),
        *("gpipe", "gpipe.log", "model-parallel", "model-parallel.log"),
        "timelines.png",
    ]


def test_a_run_that_is_mostly_warm_up_is_warned_of():
    plan = Plan(stages=2, pipelines=2, micro_batches=2, warmup_rounds=100)
    (warning,) = warm_up_warnings(plan, 150)
    assert warning.startswith("100 of its 150 batches are the warm-up")
    assert not warm_up_warnings(plan, 200)
    assert not warm_up_warnings(Plan(stages=2, micro_batches=2), 3)
