"""A user's own script on several workers."""

import os
import signal
import tempfile

import pytest

from avgpipe.cli import output
from avgpipe.fault import replace
from avgpipe.ranks import launch, process
from tests.cli.command import avgpipe, invoke, strict
from tests.patience import limit, wait_until

# The workers share the pipe: what is to be one line must be one write.
SCRIPT = """
import os, sys
os.write(1, f'{os.environ["RANK"]} {os.environ["WORLD_SIZE"]} {sys.argv[1:]}\\n'.encode())
if os.environ["RANK"] in sys.argv[2:]:
    sys.exit(7)
"""


@pytest.fixture
def script(tmp_path):
    path = tmp_path / "script.py"
    path.write_text(SCRIPT)
    return str(path)


def finish(*arguments):
    process = avgpipe("run", *arguments)
    stdout, stderr = process.communicate(timeout=limit(60))
    return process.returncode, stdout, stderr


@pytest.mark.ranks
def test_every_worker_runs_the_script_with_its_arguments(script):
    code, stdout, stderr = finish("--stages", "2", script, "--stages", "x")
    assert code == 0, stderr
    assert sorted(stdout.splitlines()) == ["0 2 ['--stages', 'x']", "1 2 ['--stages', 'x']"]


@pytest.mark.promise
def test_json_is_all_there_is_on_standard_output(script):
    code, stdout, stderr = finish("--stages", "2", "--json", script, "fail-in:", "1")
    assert code == 1
    answer = strict(stdout)
    assert answer["exit_codes"][1] == 7
    assert "1 2 ['fail-in:', '1']" in stderr
    assert "avgpipe: error: rank 1 failed with exit code 7" in stderr


def test_wrong_arguments(script, tmp_path):
    for arguments, expected in [
        (["nowhere.py"], "'nowhere.py' does not exist"),
        ([str(tmp_path)], "does not exist"),
        (["--stages", "0", script], "--stages 0: must be more than 0"),
        (
            ["--isolate", "--spare-pipeline", "1", script],
            "no option --spare-pipeline; did you mean --spare-pipelines?",
        ),
        (["--stage=3", script], "no option --stage; did you mean --stages?"),
        (["--script", script], "no option --script; see avgpipe run --help"),
    ]:
        result = invoke("run", *arguments)
        assert (result.exit_code, result.stdout) == (2, "")
        assert expected in result.stderr
        assert len(result.stderr.splitlines()) == 1


@pytest.mark.ranks
def test_threads_are_shared_unless_the_user_says_otherwise(tmp_path):
    path = tmp_path / "threads.py"
    path.write_text("import os; os.write(1, os.environ['OMP_NUM_THREADS'].encode() + b'\\n')")
    process = avgpipe("run", "--stages", "2", str(path), OMP_NUM_THREADS="5")
    assert process.communicate(timeout=limit(60))[0].split() == ["5", "5"]


LOUD = """
import torch
from torch import nn
from avgpipe import Pipeline, Plan

data = [(torch.ones(4, 4), torch.ones(4, 4))] * 10_000
model = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4))
with Pipeline(model, Plan(stages=2), loss_fn=nn.MSELoss(), optimizer=torch.optim.SGD) as pipeline:
    for result in pipeline.train(data):
        print(result.loss, flush=True)
"""


@pytest.mark.ranks
def test_a_run_whose_output_is_closed_ends_quietly(tmp_path):
    path = tmp_path / "loud.py"
    path.write_text(LOUD)
    with avgpipe("run", "--stages", "2", str(path)) as run:
        assert run.stdout.readline()
        run.stdout.close()
        stderr = run.stderr.read()
        assert run.wait(limit(60)) == -signal.SIGPIPE
    assert stderr.splitlines() == [line for line in stderr.splitlines() if "are seeded with 0" in line]


def test_a_pipe_has_a_reader_until_it_is_closed():
    reading, writing = os.pipe()
    before = os.dup(1)
    try:
        os.dup2(writing, 1)
        had = process.has_reader()
        os.close(reading)
        has = process.has_reader()
    finally:
        os.dup2(before, 1)
        os.close(before)
        os.close(writing)
    assert (had, has) == (True, False)


@pytest.mark.parametrize("has_reader", [True, False])
def test_a_command_ends_quietly_only_if_its_own_output_has_no_reader(monkeypatch, has_reader):
    ended = []
    monkeypatch.setattr(output, "has_reader", lambda: has_reader)
    monkeypatch.setattr(output, "end_without_reader", lambda: ended.append(True))

    def command():
        with output.reporting(False), output.running():
            raise BrokenPipeError(32, "Broken pipe")

    if has_reader:
        with pytest.raises(output.typer.Exit):
            command()
    else:
        command()
    assert ended == ([] if has_reader else [True])


# ---- signals before any worker is started ----------------------------------------------------------------------------

HOW = [
    ("--stages", "2"),
    ("--stages", "2", "--spares", "1"),
    ("--isolate", "--pipelines", "2", "--stages", "1"),
]


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
@pytest.mark.parametrize("how", HOW, ids=" ".join)
def test_an_early_signal_leaves_nothing(script, tmp_path, monkeypatch, how, number):
    temporary = tmp_path / "temporary"
    temporary.mkdir()
    found = []

    def start(*_, **__):
        found.extend(temporary.iterdir())
        os.kill(os.getpid(), number)
        raise AssertionError("the signal was lost")

    monkeypatch.setattr(tempfile, "tempdir", str(temporary))
    for module in (launch, replace):
        monkeypatch.setattr(module, "start", start)
    result = invoke("run", *how, script)
    assert found
    assert result.exit_code == 128 + number, result.stderr
    assert result.stderr.splitlines()[-1] == f"avgpipe: error: {number.name}: all workers are ended"
    assert not list(temporary.iterdir())


@pytest.mark.parametrize("how", [("--stages", "2"), ("--isolate", "--pipelines", "2")], ids=" ".join)
def test_an_early_signal_to_a_training_leaves_nothing_temporary(text, tmp_path, monkeypatch, how):
    temporary = tmp_path / "temporary"
    temporary.mkdir()
    monkeypatch.setattr(tempfile, "tempdir", str(temporary))
    monkeypatch.setattr(launch, "start", lambda *_, **__: os.kill(os.getpid(), signal.SIGTERM))
    out = tmp_path / "run"
    result = invoke("train", "awd-lstm", "--data", str(text), "--out", str(out), *how)
    assert result.exit_code == 143, result.stderr
    last = result.stderr.splitlines()[-1]
    assert last.endswith("interrupted by SIGTERM: all workers are ended; there is no checkpoint yet")
    assert not list(temporary.iterdir())


@pytest.mark.ranks
@pytest.mark.slow
@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
@pytest.mark.parametrize("how", HOW, ids=" ".join)
def test_a_signal_as_soon_as_there_is_a_folder_leaves_nothing(tmp_path, how, number):
    """Most of that time torch is imported. Within the milliseconds before the folder is locked, it may be left."""
    temporary, endless = tmp_path / "temporary", tmp_path / "endless.py"
    temporary.mkdir()
    endless.write_text("import signal\nsignal.pause()\n")
    process = avgpipe("run", *how, str(endless), TMPDIR=str(temporary))
    try:
        wait_until(lambda: list(temporary.glob("avgpipe-*/owner")))
        process.send_signal(number)
        _, stderr = process.communicate(timeout=limit(60))
    finally:
        process.kill()
    assert process.returncode == 128 + number, stderr
    assert stderr.splitlines()[-1] == f"avgpipe: error: {number.name}: all workers are ended"
    assert "Traceback" not in stderr
    assert not list(temporary.iterdir())
