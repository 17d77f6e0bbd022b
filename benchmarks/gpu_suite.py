"""Question: does everything that needs a GPU work on this one, and how fast?

    python benchmarks/gpu_suite.py                      (or: make gpu)
    python benchmarks/gpu_suite.py --stage 2            (or: make gpu STAGE=2)
    python benchmarks/gpu_suite.py --only build agree

Stages of at most ten minutes each, all together at most three quarters of an hour; docs/gpu.md says what each does.
Every step prints a line with its verdict, and is written into the day's record at once: a stage that is cut off loses
nothing of what was before it. A stage other than the first builds the libraries only where they are missing. On a
machine that keeps no files, give each call --out FILE; --merge FILES, later, makes one record of them.

Without a GPU it says what it leaves out, does the rest on the CPU, and writes the record into build/. Needs torch,
pytest, hypothesis, numpy, CMake and ninja; no installation of avgpipe (pybind11's headers come with torch).
"""

from __future__ import annotations

import argparse
import importlib.util
import json
import os
import platform
import re
import shutil
import signal
import subprocess
import sys
import sysconfig
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
BUILT = ROOT / "build" / "gpu"
TAIL_CHARACTERS = 4000
STAGES = {
    1: "the kernels are built for this GPU, agree with the CPU, and are timed",
    2: "the runtime on the device, and the order of its streams",
    3: "processes that share the device, without and with MPS",
    4: "what the hardware's counters say of four kernels, and answers to questions",
    5: "pipelines beside plain PyTorch",
    6: "accesses to memory that is not theirs",
    7: "lanes on one worker of four, with emulated neighbours",
    8: "four small GPUs in one: pipelines, torch's schedules and data parallelism",
}
_AGREE = "uneven and float32"  # every operator, with misaligned, odd and empty tensors; memcheck is slow
_LANES = "on_the_cpu and None and 2"  # lanes on streams, two pipelines
_MPS = "nvidia-cuda-mps-control"
_CAPABILITY = """
import torch
if torch.cuda.is_available():
    p = torch.cuda.get_device_properties(0)
    print(p.name, f"{p.major}.{p.minor}", p.total_memory, sep="|")
"""


@dataclass(frozen=True)
class Step:
    """One program of the suite.

    Attributes:
        needs: A program without which it is left out; "GPU" if it is one.
        report: "stdout", or the file, where the program leaves JSON for the record.
        says: What the verdict says of that.
        mps: Whether it runs under NVIDIA's Multi-Process Service.
    """

    stage: int
    name: str
    command: list[str]
    limit_s: int
    environment: dict[str, str] = field(default_factory=dict)
    needs: tuple[str, ...] = ()
    report: str | Path = ""
    says: Callable[[Any], str] | None = None
    mps: bool = False


@dataclass(frozen=True)
class Gpu:
    name: str
    capability: str
    memory_bytes: int


def main() -> None:
    options = _options()
    # What is under way is stopped, and MPS too, also where the suite is ended from outside.
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))
    gpu = find_gpu()
    path = options.out or _default_path(gpu)
    if options.merge:
        merge(path, [json.loads(file.read_text()) for file in options.merge])
        print("\n".join(_line(name, step) for name, step in json.loads(path.read_text())["steps"].items()))
        return
    print(
        f"GPU: {f'{gpu.name} ({gpu.capability})' if gpu else 'none, what needs one is left out'}", flush=True
    )
    failed = []
    for step in chosen(options, gpu):
        outcome = run(step, gpu)
        print(_line(step.name, outcome), flush=True)
        merge(path, [_record(gpu, {step.name: outcome})])
        if outcome["state"] == "failed":
            failed.append(step.name)
            if step.name in ("configure", "build"):
                break
    print(f"{'failed: ' + ', '.join(failed) if failed else 'nothing failed'}; record: {path}")
    sys.exit(1 if failed else 0)


def _options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    names = [step.name for step in steps(None)]
    parser.add_argument("--stage", type=int, choices=STAGES, help="one stage alone")
    parser.add_argument("--only", nargs="+", metavar="STEP", choices=names, help=f"of {', '.join(names)}")
    parser.add_argument("--no-build", action="store_true", help="use the libraries that are there")
    parser.add_argument("--list", action="store_true", help="say what would run, with its limit, and end")
    parser.add_argument("--out", type=Path, help="the record's file; steps are added to one that is there")
    parser.add_argument(
        "--merge", nargs="+", type=Path, metavar="RECORD", help="add these records, run nothing"
    )
    options = parser.parse_args()
    if options.list:
        for step in steps(find_gpu() or Gpu("pretended", "9.0", 0)):
            print(f"{step.stage} {step.name:12} at most {step.limit_s:3} s  {_shown(step)}")
        sys.exit(0)
    return options


def chosen(options: argparse.Namespace, gpu: Gpu | None) -> list[Step]:
    """The steps that were asked for, after a build where one is needed."""
    every = steps(gpu)
    made = [s for s in every if options.stage in (None, s.stage) and s.name in (options.only or [s.name])]
    builds = [step for step in every if step.name in ("configure", "build")]
    rest = [step for step in made if step not in builds]
    asked = options.only is None and options.stage in (None, 1)
    wanted = asked or any(step in builds for step in made) or not built()
    return rest if options.no_build or not wanted else builds + rest


def steps(gpu: Gpu | None) -> list[Step]:
    """The suite, for a machine with that GPU or with none."""
    python, device = sys.executable, "cuda" if gpu else "cpu"
    required = {"AVGPIPE_REQUIRE_CUDA": "1"} if gpu else {}
    pytest = [python, "-m", "pytest"]
    many = ["-n", str(min(8, os.cpu_count() or 1))] if importlib.util.find_spec("xdist") else []
    kernels = [python, "-m", "avgpipe", "bench", "kernels", "--device", device, "--no-compile"]
    kernels += ["--json", "--elements"]
    kernels += (
        ["100e6,25e6", "--rounds", "7"] if gpu else ["1e5", "--rounds", "1", "--only", "limit,adamw,pull"]
    )
    runtime, operators = "tests/runtime/test_cuda.py", "tests/avgpipe_ext/test_cuda.py"
    ordered = ["-p", "tests.happens_before.on_gpu", runtime, "tests/happens_before/test_on_gpu.py"]
    pipelines = [python, "benchmarks/gpu_pipelines.py", "--device", device]
    pipelines += ["--trace", str(BUILT / "trace.json.gz")]
    pipelines += (
        ["--rounds", "3", "--batches", "16", "--budget", "360"]
        if gpu
        else ["--small", "--rounds", "1", "--batches", "4", "--budget", "60"]
    )
    worker = [python, "-m", "benchmarks.one_card.one_worker", "--device", device]
    worker += ["--budget", "180"] if gpu else ["--small", "--dtype", "fp32", "--rows", "8"]
    quarters = [python, "-m", "benchmarks.one_card.quarters", "--budget", "300"]
    # The caching allocator hands out parts of what it holds: an access beyond one would go unseen.
    memcheck = ["compute-sanitizer", "--tool", "memcheck", "--error-exitcode", "9", *pytest, "-x"]
    uncached = required | {"PYTORCH_NO_CUDA_MEMORY_CACHING": "1"}

    device_tests = [runtime, "tests/runtime/test_graphs.py", "tests/elastic/test_cuda.py", "-m", "not ranks"]
    return [
        *_build_steps(gpu),
        Step(1, "agree", [*pytest, *many, operators], 130, required),
        Step(1, "kernels", kernels, 110, report="stdout", says=says_kernels),
        Step(2, "runtime", [*pytest, *many, *device_tests], 180, required),
        Step(2, "order", [*pytest, *many, *ordered, "-m", "not ranks", "-k", "not graphs"], 140, required),
        Step(3, "ranks", [*pytest, runtime, "-m", "ranks"], 150, required, ("GPU",)),
        Step(3, "ranks, MPS", [*pytest, runtime, "-m", "ranks"], 150, required, ("GPU", _MPS), mps=True),
        _reporting(4, "counters", [python, "benchmarks/gpu_counters.py"], 110, ("GPU", "ncu")),
        _reporting(4, "questions", [python, "benchmarks/gpu_questions.py"], 130),
        _reporting(5, "pipelines", pipelines, 400),
        Step(6, "memory", [*memcheck, operators, "-k", _AGREE], 100, uncached, ("GPU", memcheck[0])),
        Step(6, "lanes", [*memcheck, runtime, "-k", _LANES], 80, uncached, ("GPU", memcheck[0])),
        _reporting(7, "one worker", worker, 230),
        _reporting(8, "quarters", quarters, 370, ("GPU", _MPS)),
    ]


def _reporting(stage: int, name: str, command: list[str], limit_s: int, needs: tuple[str, ...] = ()) -> Step:
    """Return a step that writes its report as it goes, so that what was found by its limit is kept."""
    file = BUILT / f"{name}.json"
    return Step(
        stage, name, [*command, "--out", str(file)], limit_s, needs=needs, report=file, says=says_verdict
    )


def _build_steps(gpu: Gpu | None) -> list[Step]:
    configure = [
        *("cmake", "-S", str(ROOT), "-B", str(BUILT), "-G", "Ninja", f"-DPython_EXECUTABLE={sys.executable}"),
        *(f"-DAVGPIPE_CUDA={1 if gpu else 'auto'}", "-DAVGPIPE_WERROR=0", "-DAVGPIPE_BUILD_TESTS=OFF"),
        f"-DTORCH_CUDA_ARCH_LIST={gpu.capability if gpu else '9.0'}",  # no other is needed here
    ]
    build = ["cmake", "--build", str(BUILT), "--target", "avgpipe"]
    return [Step(1, "configure", configure, 40), Step(1, "build", build, 140)]


def built() -> bool:
    """Whether the libraries are there, for this Python."""
    native = f"_native{sysconfig.get_config_var('EXT_SUFFIX')}"
    return all((ROOT / "avgpipe_ext" / name).exists() for name in ("libavgpipe.so", native))


# ---- one step --------------------------------------------------------------------------------------------------


def run(step: Step, gpu: Gpu | None) -> dict[str, Any]:
    """Run a step to its end, or to its limit, and judge it."""
    missing = [n for n in step.needs if (gpu is None if n == "GPU" else shutil.which(n) is None)]
    if missing:
        return _outcome(step, "left out", f"no {missing[0]} here")
    try:
        served: AbstractContextManager[dict[str, str]] = mps() if step.mps else nullcontext({})
        with served as shared:
            return _run(step, shared)
    except (OSError, subprocess.SubprocessError) as error:
        return _outcome(step, "left out" if step.mps else "failed", str(error).strip()[:200])


def _run(step: Step, more: dict[str, str]) -> dict[str, Any]:
    path = f"{ROOT / 'python'}{os.pathsep}{ROOT}"
    environment = os.environ | {"PYTHONPATH": path} | step.environment | more
    if isinstance(step.report, Path):
        step.report.parent.mkdir(parents=True, exist_ok=True)
        step.report.unlink(missing_ok=True)
    begin = time.perf_counter()
    code, out, err = _communicate(step, environment)
    report = _report(step, out)
    tail = "" if code == 0 else (out + err)[-TAIL_CHARACTERS:].replace(f"{ROOT}/", "")
    tests, state = _test_counts(out), "failed" if code else "ok"
    says = ", ".join(f"{n} {kind}" for kind, n in tests.items())
    if report is not None and step.says is not None:
        says = step.says(report)
        state = "refused" if code == 0 and isinstance(report, dict) and report.get("refused") else state
    found = next((line for line in out.splitlines() if line.startswith("happens-before:")), "")
    if code == 0 and step.report and report is None:
        state, says, tail = "failed", "it left no report", out + err
    if code == 124:
        says = f"stopped after {step.limit_s} s. {says}"
    made = _outcome(step, state, "; ".join(filter(None, (says, found))), time.perf_counter() - begin)
    return made | {"exit_code": code, "tests": tests, "output_tail": tail, "report": report}


def _communicate(step: Step, environment: dict[str, str]) -> tuple[int, str, str]:
    """Exit code, 124 at the limit, and what was printed. Nothing that it started stays behind."""
    program = subprocess.Popen(
        step.command,
        cwd=ROOT,
        env=environment,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        errors="replace",
        preexec_fn=os.setpgrp,
    )
    late = False
    try:
        out, err = program.communicate(timeout=step.limit_s)
    except subprocess.TimeoutExpired:
        late = True
    finally:
        try:
            os.killpg(program.pid, signal.SIGKILL)
        except ProcessLookupError:
            pass  # all have ended
    if late:
        out, err = program.communicate()
    return 124 if late else program.returncode, out, err


def _report(step: Step, out: str) -> Any:
    """What a program leaves for the record, also if it came to no good end."""
    text = out if step.report == "stdout" else ""
    if isinstance(step.report, Path) and step.report.exists():
        text = step.report.read_text()
    try:
        return json.loads(text)
    except ValueError:
        return None


@contextmanager
def mps() -> Iterator[dict[str, str]]:
    """The Multi-Process Service, in a folder of its own, for programs with these variables; stopped in any case."""
    with tempfile.TemporaryDirectory() as folder:
        own = {f"CUDA_MPS_{what}_DIRECTORY": folder for what in ("PIPE", "LOG")}
        told: dict[str, Any] = {"env": os.environ | own, "text": True, "timeout": 30, "capture_output": True}
        started = subprocess.run([_MPS, "-d"], **told)
        if started.returncode:
            raise OSError(f"{_MPS} -d: {(started.stderr or started.stdout).strip() or started.returncode}")
        try:
            yield own
        finally:
            subprocess.run([_MPS], input="quit -t 5\n", **told)


def _test_counts(output: str) -> dict[str, int]:
    """pytest's closing line, as {"passed": 3, "skipped": 1}."""
    closing = [
        line
        for line in output.splitlines()
        if re.search(r"\d+ (passed|failed|skipped|error)s?\b.* in ", line)
    ]
    return (
        {k: int(n) for n, k in re.findall(r"(\d+) (\w+)", closing[-1].partition(" in ")[0])}
        if closing
        else {}
    )


def says_kernels(report: Any) -> str:
    """The copy's GB/s, and what part of it the operators reach, at the largest size."""
    first = report["sections"][0]
    sections = [s for s in report["sections"] if s["elements"] == first["elements"]]
    ours = [(s["question"], s["rows"], s["case"]) for s in sections if s["case"] == "one tensor"]
    parts = [
        f"{question} {row['fraction_of_limit']:.2f}"
        for question, rows, _ in ours
        for row in rows
        if row["role"] == "ours"
    ]
    return f"{first['limit']} {first['rows'][0]['gb_per_s']:.0f} GB/s; of it: {', '.join(parts)}"


def says_verdict(report: Any) -> str:
    return str(report["verdict"])


# ---- the record ------------------------------------------------------------------------------------------------


def _shown(step: Step) -> str:
    return " ".join(
        "python" if part == sys.executable else part.replace(f"{ROOT}/", "") for part in step.command
    )


def _outcome(step: Step, state: str, says: str, seconds: float = 0.0) -> dict[str, Any]:
    head = {"stage": step.stage, "state": state, "says": says, "seconds": round(seconds, 1)}
    return head | {"limit_s": step.limit_s, "command": _shown(step)}


def _line(name: str, outcome: dict[str, Any]) -> str:
    head = (
        f"{outcome['stage']} {name:10} {outcome['seconds']:6.1f} s  {outcome['state']:8}  {outcome['says']}"
    )
    return (
        f"{head}\n{outcome['output_tail']}"
        if outcome["state"] == "failed" and outcome.get("output_tail")
        else head
    )


def _record(gpu: Gpu | None, outcomes: dict[str, dict[str, Any]]) -> dict[str, Any]:
    import torch

    at = {"gpu": gpu.name if gpu else None, "time": time.strftime("%Y-%m-%d %H:%M")}
    return {
        "question": "does everything that needs a GPU work, and how fast?",
        "date": time.strftime("%Y-%m-%d"),
        "command": "python benchmarks/gpu_suite.py",
        "gpu": vars(gpu) if gpu else None,
        "versions": {
            "python": platform.python_version(),
            "torch": torch.__version__,
            "cuda": torch.version.cuda,
        },
        "steps": {name: outcome | at for name, outcome in outcomes.items()},
    }


def merge(path: Path, records: list[dict[str, Any]]) -> None:
    """Add the steps of records to the one in a file; of two runs of a step the later one counts."""
    steps: dict[str, Any] = {}
    if path.exists():
        records = [json.loads(path.read_text()), *records]
    for record in records:
        for name, step in record["steps"].items():
            if name not in steps or steps[name]["time"] <= step["time"]:
                steps[name] = step
    ordered = sorted(steps.items(), key=lambda item: item[1]["stage"])
    path.parent.mkdir(parents=True, exist_ok=True)
    new = path.with_suffix(".part")  # whoever is cut off leaves the old one
    new.write_text(json.dumps(records[-1] | {"steps": dict(ordered)}, indent=1) + "\n")
    new.replace(path)


def _default_path(gpu: Gpu | None) -> Path:
    name = f"gpu_suite-{time.strftime('%Y-%m-%d')}.json"
    return (ROOT / "benchmarks" / "results" if gpu else ROOT / "build") / name


def find_gpu() -> Gpu | None:
    """The first GPU that torch sees."""
    done = subprocess.run([sys.executable, "-c", _CAPABILITY], capture_output=True, text=True, timeout=120)
    if done.returncode:
        sys.exit(f"torch does not work in {sys.executable}: {done.stderr.strip().splitlines()[-1]}")
    found = done.stdout.strip().split("|")
    return Gpu(found[0], found[1], int(found[2])) if len(found) == 3 else None


if __name__ == "__main__":
    main()
