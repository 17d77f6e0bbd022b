"""Interrupted and killed runs: how they end, what they leave, how they go on. Real processes throughout."""

import json
import os
import signal
import time

import pytest

from avgpipe.checkpoint import verify_checkpoint
from avgpipe.faults.fault import Fault, to_json
from avgpipe.ranks.environment import VARIABLE
from tests.cli.command import alive, avgpipe, children, invoke, rank_of, rows, strict
from tests.patience import limit, wait_until

pytestmark = [
    pytest.mark.ranks,
    pytest.mark.timeout(240),
]


class Training:
    """A run of which a checkpoint of ``saved`` batches and rows of ``trained`` batches have been waited for.

    By default it saves at every opportunity, and is in the middle of an epoch. Later options win.
    """

    def __init__(self, out, options, *more, saved=6, trained=0):
        self.out = out
        self.process = avgpipe(
            "train", "awd-lstm", *options, "--out", str(out), "--checkpoint-minutes", "0.0001", *more
        )
        self.manifest = out / "checkpoints" / "last" / "manifest.json"
        wait_until(lambda: self.process.poll() is not None or self.saved() >= saved)
        wait_until(lambda: self.process.poll() is not None or len(self.trained()) >= trained)
        assert self.process.poll() is None, self.process.communicate()[1]
        self.workers = {rank_of(pid): pid for pid in children(self.process.pid)}
        self.workers.pop(None, None)

    def saved(self):
        try:
            return json.loads(self.manifest.read_text())["batches"]
        except FileNotFoundError:
            return 0

    def trained(self):
        lines = (self.out / "metrics.jsonl").read_text().splitlines()
        return [line for line in lines if '"train"' in line]

    def end(self, timeout_s):
        """Exit code, output and errors; every process must be gone."""
        stdout, stderr = self.process.communicate(timeout=limit(timeout_s))
        wait_until(lambda: not any(alive(pid) for pid in self.workers.values()), 1)
        return self.process.returncode, stdout, stderr


@pytest.fixture
def start(tmp_path, options):
    started = []

    def begin(*more, **wanted):
        started.append(Training(tmp_path / "run", options, *more, **wanted))
        return started[-1]

    yield begin
    for training in started:
        for pid in [training.process.pid, *training.workers.values()]:
            if alive(pid):
                os.kill(pid, signal.SIGKILL)
        training.process.communicate()


def resume_line(out):
    return f"avgpipe train awd-lstm --out {out} --resume"


def losses(found):
    return [(row["kind"], row["batch"], row["loss"]) for row in found]


@pytest.mark.slow
def test_ctrl_c_ends_all_and_the_run_resumes_bit_for_bit(start, whole):
    training = start()
    training.process.send_signal(signal.SIGINT)
    code, stdout, stderr = training.end(timeout_s=8)
    assert (code, stdout) == (130, "")
    last = stderr.splitlines()[-1]
    assert "interrupted by SIGINT" in last
    assert resume_line(training.out) in last
    assert "Traceback" not in stderr
    saved = verify_checkpoint(training.out / "checkpoints" / "last").batches
    assert 0 < saved < 130
    assert saved % 65

    options = ["--out", str(training.out), "--resume", "--checkpoint-minutes", "10", "--json"]
    again = avgpipe("train", "awd-lstm", *options)
    stdout, stderr = again.communicate(timeout=limit(100))
    assert again.returncode == 0, stderr
    assert losses(rows(training.out)) == losses(whole.rows)
    summary = strict(stdout)
    assert summary["metric"] == whole.summary["metric"]
    assert (summary["epochs"], summary["batches"], summary["samples"]) == (2, 130, 520)


def goes_on_bit_for_bit(out, whole):
    options = ["--out", str(out), "--resume", "--checkpoint-minutes", "10", "--json"]
    stdout, stderr = avgpipe("train", "awd-lstm", *options).communicate(timeout=limit(100))
    assert losses(rows(out)) == losses(whole.rows), stderr
    assert strict(stdout)["metric"] == whole.summary["metric"]


@pytest.mark.slow
@pytest.mark.parametrize("to_all", [False, True])
def test_a_preempted_run_is_saved_and_goes_on_bit_for_bit(to_all, start, whole):
    """SIGTERM for the command alone, as from a scheduler of containers, and for all processes of a job."""
    training = start("--checkpoint-minutes", "10", saved=1, trained=20)
    for pid in [training.process.pid, *(training.workers.values() if to_all else ())]:
        os.kill(pid, signal.SIGTERM)
    code, stdout, stderr = training.end(timeout_s=30)
    assert (code, stdout) == (0, ""), stderr
    last = stderr.splitlines()[-1]
    assert last.startswith("avgpipe: preempted by SIGTERM: the run is saved; ")
    assert resume_line(training.out) in last
    trained = len(training.trained())
    assert verify_checkpoint(training.out / "checkpoints" / "last").batches == trained
    assert 20 <= trained < 130
    assert not (training.out / "summary.json").exists()
    goes_on_bit_for_bit(training.out, whole)


def is_pending(number, pid):
    with open(f"/proc/{pid}/status") as file:
        mask = next(line for line in file if line.startswith("ShdPnd:")).split()[1]
    return int(mask, 16) >> (number - 1) & 1


@pytest.mark.slow
@pytest.mark.parametrize("impatient", ["a second SIGTERM", "SIGINT", "the limit"])
def test_a_preempted_run_that_cannot_end_in_time_is_ended(impatient, start):
    late = ["--preemption-seconds", "0.5"] if impatient == "the limit" else []
    training = start("--epochs", "50", *late)
    os.kill(training.workers[1], signal.SIGSTOP)  # so that nothing ends by itself
    training.process.send_signal(signal.SIGTERM)
    if impatient != "the limit":
        wait_until(lambda: is_pending(signal.SIGUSR2, training.workers[1]))  # which the launcher has sent
        training.process.send_signal(signal.SIGINT if impatient == "SIGINT" else signal.SIGTERM)
    os.kill(training.workers[1], signal.SIGCONT)
    code, _, stderr = training.end(timeout_s=15)
    assert code == (130 if impatient == "SIGINT" else 143)
    assert resume_line(training.out) in stderr.splitlines()[-1]


@pytest.mark.slow
def test_every_rank_says_what_it_is_doing(start):
    training = start("--epochs", "50")
    training.process.send_signal(signal.SIGUSR1)
    os.set_blocking(training.process.stderr.fileno(), True)
    seen = ""
    while not (all(f"avgpipe: rank {k} (stage {k}): " in seen for k in (0, 1))):
        seen += training.process.stderr.readline()
    assert seen.count("Current thread 0x") + seen.count("Thread 0x") > 4
    assert "training.py" in seen
    training.process.send_signal(signal.SIGINT)
    assert training.end(timeout_s=15)[0] == 130


@pytest.mark.slow
@pytest.mark.parametrize("killed", [0, 1])
def test_a_killed_worker_is_named_by_the_others_and_the_checkpoint_loads(start, killed):
    # it trains without a pause from the checkpoint at the end of the first epoch to that of the second
    training = start("--checkpoint-minutes", "10", "--epochs", "50", saved=65, trained=69)
    os.kill(training.workers[killed], signal.SIGKILL)
    begun = time.monotonic()
    wait_until(lambda: not alive(training.workers[1 - killed]), 15)
    code, stdout, stderr = training.end(timeout_s=15)
    assert time.monotonic() - begun < limit(15)
    assert (code, stdout) == (1, "")
    lines = [line for line in stderr.splitlines() if line.startswith("avgpipe: error: ")]
    peer, parent = lines
    assert f"rank {killed} (stage {killed})" in peer
    assert f"rank {1 - killed}" in peer
    assert f"rank {killed} (stage {killed}) was killed by SIGKILL" in parent
    assert resume_line(training.out) in parent
    assert "Traceback" not in stderr

    saved = verify_checkpoint(training.out / "checkpoints" / "last").batches
    again = avgpipe(
        *("train", "awd-lstm", "--out", str(training.out), "--resume", "--json"),
        *("--stages", "1", "--pipelines", "1", "--max-batches", str(saved + 3)),
    )
    stdout, stderr = again.communicate(timeout=limit(100))
    assert again.returncode == 0, stderr
    assert strict(stdout)["batches"] == saved + 3


@pytest.mark.slow
def test_workers_end_with_a_killed_parent(start):
    training = start()
    assert sorted(training.workers) == [0, 1]
    training.process.kill()
    wait_until(lambda: not any(alive(pid) for pid in training.workers.values()), 15)


@pytest.mark.slow
def test_a_run_in_one_process_is_interrupted_alike(tmp_path, text):
    options = [
        "--data",
        str(text),
        "--batch-size",
        "4",
        "--stages",
        "1",
        "--pipelines",
        "2",
        "--epochs",
        "50",
    ]
    training = Training(tmp_path / "run", options)
    training.process.send_signal(signal.SIGINT)
    code, stdout, stderr = training.end(timeout_s=8)
    assert (code, stdout) == (130, "")
    assert "interrupted by SIGINT" in stderr.splitlines()[-1]
    assert resume_line(training.out) in stderr.splitlines()[-1]
    verify_checkpoint(training.out / "checkpoints" / "last")


ISOLATED = ["--isolate", "--pipelines", "2"]
# one write, as the workers share the pipe
SLEEPS = """
import os, time
try:
    os.write(1, f"{os.getpid()}\\n".encode())
    time.sleep(100)
finally:
    os.write(1, b"ended\\n")
"""


@pytest.mark.promise
@pytest.mark.parametrize(("count", "options"), [(2, []), (3, ["--spares", "1"]), (4, ISOLATED)])
def test_a_users_script_ends_with_the_interrupted_command(count, options, tmp_path):
    script = tmp_path / "script.py"
    script.write_text(SLEEPS)
    process = avgpipe("run", "--stages", "2", *options, str(script))
    pids = [int(process.stdout.readline()) for _ in range(count)]
    process.send_signal(signal.SIGINT)
    stdout, stderr = process.communicate(timeout=limit(20))
    assert process.returncode == 130
    assert stdout == "ended\n" * count
    assert "Traceback" not in stderr
    assert stderr.endswith("avgpipe: error: SIGINT: all workers are ended\n")
    assert not any(alive(pid) for pid in pids)


PLACES = {
    "start": {"phase": "start"},
    "first validation": {"phase": "evaluation"},
    "first save": {"phase": "save", "action": "written"},
    "first epoch": {"phase": "training", "batch": 50},
    "later save": {"phase": "save", "action": "written", "after": 1},
    "second epoch": {"phase": "update", "batch": 110},
}


@pytest.mark.slow
@pytest.mark.parametrize("place", PLACES)
@pytest.mark.parametrize("rank", [0, 1])
def test_a_killed_rank_is_replaced_and_the_record_is_that_of_the_undisturbed_run(
    rank, place, tmp_path, options, whole
):
    fault = to_json([Fault("kill", rank=rank, restart=0, **PLACES[place])])
    arguments = ["--spares", "1", "--checkpoint-minutes", "10", "--out", str(tmp_path / "run"), "--json"]
    process = avgpipe("train", "awd-lstm", *options, *arguments, **{VARIABLE: fault})
    stdout, stderr = process.communicate(timeout=limit(150))
    assert process.returncode == 0, stderr
    assert stderr.count("takes its place") == 1
    assert losses(rows(tmp_path / "run")) == losses(whole.rows)
    summary = strict(stdout)
    assert summary["metric"] == whole.summary["metric"]
    assert (summary["epochs"], summary["batches"], summary["samples"]) == (2, 130, 520)


def test_spares_are_refused_where_no_process_could_replace_another(tmp_path, options):
    for more, says in (
        (["--isolate"], "--spare-pipelines"),
        (["--stages", "1"], "with one worker"),
    ):
        found = invoke("train", "awd-lstm", *options, *more, "--spares", "1", "--out", str(tmp_path / "run"))
        assert found.exit_code == 2
        assert says in found.stderr
