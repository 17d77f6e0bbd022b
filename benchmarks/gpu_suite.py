"""Question: does everything that needs a GPU work on this one, and how fast?

    python benchmarks/gpu_suite.py            (or: make gpu)

Builds the extension, runs every CUDA test (a skip for want of a GPU is a failure), compute-sanitizer's memcheck and
racecheck over the operators, and memcheck over pipelines on streams, where the tool is there, the kernel benchmark, a
short training run, and pipelines on streams of one GPU against plain PyTorch with a trace of their kernels, and writes
one dated record into benchmarks/results/. Without a GPU it says what it leaves out, does the rest on the CPU, and
writes the record into build/. --only runs some of the steps, for a machine that is lent for minutes. Needs torch,
pytest, hypothesis, numpy, CMake and ninja; no installation of avgpipe (pybind11's headers come with torch).
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import re
import shutil
import subprocess
import sys
import time
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
TAIL_CHARACTERS = 4000
TESTS = ("tests/avgpipe_ext", "tests/elastic/test_cuda.py")
RUNTIME_TESTS = (
    "tests/runtime/test_cuda.py",
    "tests/runtime/test_streams.py",
    "tests/runtime/test_graphs.py",
)
RUNTIME_SANITIZED = "on_the_cpu and None and 2"  # lanes on streams, two pipelines
ONLY_WITH_GPU = ("CUDA tests", "compute-sanitizer", "kernel trace", "CUDA IPC and CUDA graphs")
SANITIZED = (
    "uneven and float32"  # every operator, with misaligned, odd and empty tensors; programs get slow under it
)
SMOKE = """
import sys, torch, avgpipe
device = sys.argv[1]
torch.manual_seed(0)
model = torch.nn.Sequential(*(torch.nn.Sequential(torch.nn.Linear(64, 64), torch.nn.Tanh()) for _ in range(4)))
plan = avgpipe.Plan(stages=2, pipelines=2, micro_batches=4)
x = torch.randn(4096, 64)
batches = [(x[i : i + 64], x[i : i + 64].roll(1, 1)) for i in range(0, len(x), 64)]
optimizer = lambda parameters: torch.optim.AdamW(parameters, lr=3e-3)
loss = torch.nn.functional.mse_loss
with avgpipe.Pipeline(model, plan, loss_fn=loss, optimizer=optimizer, device=device) as pipeline:
    losses = [result.loss for _ in range(4) for result in pipeline.train(batches)]
first, last = sum(losses[:8]) / 8, sum(losses[-8:]) / 8
print(f"loss {first:.4f} -> {last:.4f} on {device}")
sys.exit(0 if last < 0.7 * first else "the loss did not fall")
"""


@dataclass(frozen=True)
class Step:
    """One program of the suite. ``reports``: its standard output is one JSON object for the record."""

    name: str
    command: list[str]
    limit_s: int
    environment: dict[str, str] = field(default_factory=dict)
    reports: bool = False


@dataclass
class Outcome:
    name: str
    command: str
    seconds: float
    exit_code: int
    tests: dict[str, int]
    output_tail: str
    report: Any = None


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument(
        "--no-build", action="store_true", help="use the libraries in avgpipe_ext as they are"
    )
    parser.add_argument("--only", nargs="+", metavar="STEP", help="the steps to run, by name")
    parser.add_argument("--out", type=Path, help="the record's file")
    options = parser.parse_args()
    gpu = _gpu()
    print(f"GPU: {gpu or 'none; left out: ' + ', '.join(ONLY_WITH_GPU)}", flush=True)
    suite = steps(gpu, build=not options.no_build)
    if unknown := set(options.only or ()) - {step.name for step in suite}:
        parser.error(f"no steps {sorted(unknown)} here: use some of {[step.name for step in suite]}")
    outcomes = []
    for step in suite:
        if options.only and step.name not in options.only:
            continue
        outcomes.append(run(step))
        print(_line(outcomes[-1]), flush=True)
        if step.name == "build" and outcomes[-1].exit_code:
            break
    path = options.out or _default_path(gpu)
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps(_record(gpu, outcomes), indent=1) + "\n")
    failed = [o.name for o in outcomes if o.exit_code]
    print(f"{'failed: ' + ', '.join(failed) if failed else 'all steps passed'}; record: {path}")
    sys.exit(1 if failed else 0)


def steps(gpu: str, *, build: bool) -> list[Step]:
    """The suite, for a machine with that GPU or, if empty, with none."""
    python, device = sys.executable, "cuda" if gpu else "cpu"
    required = {"AVGPIPE_REQUIRE_CUDA": "1"} if gpu else {}
    sizes = "100e6,25e6" if gpu else "1e5"
    suite = _build_steps("1" if gpu else "auto") if build else []
    suite.append(Step("tests", [python, "-m", "pytest", *TESTS], 240, required))
    suite.append(Step("runtime", [python, "-m", "pytest", *RUNTIME_TESTS], 300, required))
    sanitizer = shutil.which("compute-sanitizer")
    if gpu and sanitizer:
        tests = [python, "-m", "pytest", "-x", "tests/avgpipe_ext/test_cuda.py", "-k", SANITIZED]
        suite += [
            Step(tool, [sanitizer, "--tool", tool, "--error-exitcode", "9", *tests], 100, required)
            for tool in ("memcheck", "racecheck")
        ]
        tests = [python, "-m", "pytest", "-x", RUNTIME_TESTS[0], "-k", RUNTIME_SANITIZED]
        suite.append(
            Step("lanes", [sanitizer, "--tool", "memcheck", "--error-exitcode", "9", *tests], 150, required)
        )
    kernels = [python, "-m", "avgpipe.cli.main", "bench", "kernels", "--elements", sizes, "--device", device]
    suite.append(Step("kernels", [*kernels, "--rounds", "7", "--no-compile", "--json"], 150, reports=True))
    suite.append(Step("training", [python, "-c", SMOKE, device], 60))
    size = ["--rounds", "5", "--batches", "12", "--trace", "build/gpu_pipelines-trace.json.gz"]
    size = size if gpu else ["--small", "--rounds", "1", "--batches", "2"]
    pipelines = [python, "benchmarks/gpu_pipelines.py", "--device", device, *size]
    suite.append(Step("pipelines", pipelines, 240, reports=True))
    return suite


def _build_steps(cuda: str) -> list[Step]:
    folder = ROOT / "build" / "gpu"
    configure = [
        *("cmake", "-S", str(ROOT), "-B", str(folder), "-G", "Ninja"),
        *(f"-DPython_EXECUTABLE={sys.executable}", f"-DAVGPIPE_CUDA={cuda}", "-DAVGPIPE_BUILD_TESTS=OFF"),
    ]
    return [
        Step("configure", configure, 60),
        Step("build", ["cmake", "--build", str(folder), "--target", "avgpipe"], 240),
    ]


def run(step: Step) -> Outcome:
    """Run it to the end, or to its time limit (exit code 124)."""
    environment = os.environ | {"PYTHONPATH": f"{ROOT / 'python'}{os.pathsep}{ROOT}"} | step.environment
    begin = time.perf_counter()
    try:
        done = subprocess.run(
            step.command, cwd=ROOT, env=environment, timeout=step.limit_s, capture_output=True, text=True
        )
        code, out, err = done.returncode, done.stdout, done.stderr
    except subprocess.TimeoutExpired as late:
        code, out, err = 124, _text(late.stdout), f"{_text(late.stderr)}\nstopped after {step.limit_s} s"
    except OSError as error:
        code, out, err = 127, "", str(error)
    outcome = Outcome(
        step.name,
        " ".join(part for part in step.command if "\n" not in part),
        round(time.perf_counter() - begin, 1),
        code,
        _test_counts(out),
        "" if step.reports and code == 0 else (out + err)[-TAIL_CHARACTERS:],
    )
    if step.reports and code == 0:
        outcome.report = json.loads(out)
    return outcome


def _text(output: bytes | str | None) -> str:
    return output.decode(errors="replace") if isinstance(output, bytes) else output or ""


def _test_counts(output: str) -> dict[str, int]:
    """pytest's closing line, as {"passed": 3, "skipped": 1}."""
    closing = [line for line in output.splitlines() if re.search(r"\d+ (passed|failed|skipped|error)", line)]
    return {k: int(n) for n, k in re.findall(r"(\d+) (\w+)", closing[-1])} if closing else {}


def _line(outcome: Outcome) -> str:
    counts = ", ".join(f"{n} {kind}" for kind, n in outcome.tests.items())
    state = "ok" if outcome.exit_code == 0 else f"FAILED ({outcome.exit_code})\n{outcome.output_tail}"
    return f"{outcome.name:10} {outcome.seconds:6.1f} s  {counts}  {state}"


def _record(gpu: str, outcomes: list[Outcome]) -> dict[str, Any]:
    import torch

    return {
        "question": "does everything that needs a GPU work, and how fast?",
        "date": time.strftime("%Y-%m-%d"),
        "command": "python benchmarks/gpu_suite.py",
        "gpu": gpu or None,
        "seconds": round(sum(o.seconds for o in outcomes), 1),
        "versions": {
            "python": platform.python_version(),
            "torch": torch.__version__,
            "cuda": torch.version.cuda,
        },
        "steps": [asdict(o) for o in outcomes],
    }


def _default_path(gpu: str) -> Path:
    name = f"gpu_suite-{time.strftime('%Y-%m-%d')}.json"
    return (ROOT / "benchmarks" / "results" if gpu else ROOT / "build") / name


def _gpu() -> str:
    """The name of the first GPU that torch sees, or nothing."""
    program = "import torch; print(torch.cuda.get_device_name(0) if torch.cuda.is_available() else '')"
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, timeout=120)
    if done.returncode:
        sys.exit(f"torch does not work in {sys.executable}: {done.stderr.strip().splitlines()[-1]}")
    return done.stdout.strip()


if __name__ == "__main__":
    main()
