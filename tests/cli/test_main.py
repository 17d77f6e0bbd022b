"""The app: help that is quick and complete."""

import subprocess
import sys

import pytest

from avgpipe import __version__
from avgpipe.cli.output import CommandFailed, arguments, note, say
from tests.cli.command import environment, invoke

OPTIONS = {
    "train": [
        *("--data", "--preset", "--batch-size", "--seed", "--system", "--stages", "--pipelines"),
        *("--micro-batches", "--schedule", "--advance", "--rule", "--staleness", "--alpha", "--period"),
        *("--recompute", "--plan", "--epochs", "--max-batches", "--target", "--device", "--out", "--resume"),
        *("--pretrained", "--loader-workers", "--lr-scaling", "--autocast", "--skip-nonfinite", "--link"),
        *("--optimizer", "--lr"),
        *("--wire-dtype", "--weights", "--replication", "--stages-per-worker", "--spread"),
        *("--checkpoint-minutes", "--timeout", "--json", "awd-lstm", "model-parallel"),
    ],
    "compare": [
        *("--systems", "--stages", "--pipelines", "--micro-batches", "--memory-limit", "--target", "--out"),
        *("--data", "--preset", "--epochs", "--max-batches", "--optimizer", "--lr", "--json"),
    ],
    "profile": [
        *(
            "--data",
            "--preset",
            "--batch-size",
            "--micro-batch-sizes",
            "--bandwidth",
            "--latency",
            "--workers",
        ),
        *("--device", "--autocast", "--threads", "--budget", "--out", "--json"),
    ],
    "tune": [
        *(
            "--data",
            "--preset",
            "--batch-size",
            "--workers",
            "--memory-limit",
            "--pipelines",
            "--micro-batches",
        ),
        *("--profile", "--cluster", "--bandwidth", "--latency", "--device", "--budget", "--trials"),
        *("--out", "--json"),
    ],
    "partition": [
        *("PROFILE", "--method", "--workers", "--cluster", "--stages", "--batch-size", "--micro-batches"),
        *("--pipelines", "--schedule", "--memory-limit", "--bandwidth", "--latency", "--out", "--json"),
    ],
    "simulate": [
        *("--schedule", "--stages", "--micro-batches", "--forward-ms", "--backward-ms", "--transfer-ms"),
        *("--update-ms", "--pipelines", "--batches", "--advance", "--plot", "--json"),
    ],
    "doctor": ["--json"],
    "run": ["--stages", "--json", "SCRIPT", "ARGS"],
}


def test_help_names_every_command():
    result = invoke("--help")
    assert result.exit_code == 0
    for name in OPTIONS:
        assert name in result.stdout


@pytest.mark.parametrize("command", OPTIONS)
def test_a_commands_help_names_its_options(command):
    result = invoke(command, "--help")
    assert result.exit_code == 0
    missing = [option for option in OPTIONS[command] if option not in result.stdout]
    assert missing == []


def test_version():
    assert invoke("--version").stdout == f"avgpipe {__version__}\n"


@pytest.mark.promise
def test_the_app_loads_neither_torch_nor_numpy_nor_matplotlib():
    code = "import sys, avgpipe.cli.main; print(*{'torch', 'numpy', 'matplotlib'} & sys.modules.keys())"
    run = subprocess.run(
        [sys.executable, "-c", code], env=environment(), capture_output=True, text=True, check=True
    )
    assert run.stdout.split() == []


@pytest.mark.parametrize(
    "arguments",
    [["trian"], ["train"], ["train", "awd-lstm", "--stages", "two"], ["train", "awd-lstm", "--no"]],
)
def test_usage_errors_exit_with_2(arguments):
    result = invoke(*arguments)
    assert result.exit_code == 2
    assert result.stdout == ""


def test_a_line_without_a_reader_ends_no_run(monkeypatch):
    class Gone:
        def write(self, text):
            raise BrokenPipeError

        def flush(self):
            pass

    monkeypatch.setattr(sys, "stderr", Gone())
    note("pipeline 1 is lost")
    say("the run has ended")


@pytest.mark.parametrize(
    ("error", "said"),
    [
        (MemoryError(), "this needs more memory than there is"),
        (MemoryError("the simulation does not fit into memory"), "the simulation does not fit into memory"),
        (RecursionError("maximum recursion depth exceeded"), "maximum recursion depth exceeded"),
        (OverflowError("int too large to convert to float"), "int too large to convert to float"),
    ],
)
def test_what_is_too_large_for_a_check_is_refused_in_one_line(error: Exception, said: str) -> None:
    with pytest.raises(CommandFailed, match=f"^{said}$") as raised, arguments():
        raise error
    assert raised.value.exit_code == 2
