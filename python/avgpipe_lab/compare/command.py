"""``avgpipe compare``: runs ``avgpipe train`` with several systems on the same work."""

from __future__ import annotations

import json
import math
import re
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import asdict, fields, replace
from pathlib import Path
from typing import Any, NamedTuple

import typer

from avgpipe import systems
from avgpipe.cli.config import LearningOptions, ProfilingOptions, TrainConfig, WorkloadOptions
from avgpipe.cli.measuring import profile_of
from avgpipe.cli.options import words
from avgpipe.cli.output import FAILED, WRONG_ARGUMENTS, arguments, running, say, show, tell
from avgpipe.cli.resolve import check_device, check_folder, joined_ranks, resolve
from avgpipe.files import strict_json, write_atomically
from avgpipe.measure.search import profiled_sizes
from avgpipe.plan import Plan
from avgpipe.planning.cluster import Cluster
from avgpipe.ranks.launch import tied
from avgpipe.ranks.process import cores
from avgpipe.report.pictures import Curve, plot_curves
from avgpipe.report.runs import read_metrics
from avgpipe.systems import SYSTEMS
from avgpipe.tasks import check_workload, find_workload
from avgpipe.timeline.timeline import Timeline
from avgpipe.units import duration, format_bytes, format_seconds
from avgpipe_lab.commands import CompareConfig
from avgpipe_lab.compare import comparison as report
from avgpipe_lab.compare import text as text_of
from avgpipe_lab.compare.comparison import OK, Comparison, Figures, SystemResult
from avgpipe_lab.compare.pictures import plot_timelines
from avgpipe_lab.planning.of_system import best_of_system

_FILE_COLUMNS = 140  # width of a table that is not printed on a terminal
_NO_STAGES = tuple(name for name, row in SYSTEMS.items() if "stages" in row)
_COMMON = tuple(f.name for f in fields(LearningOptions) if f.name not in ("json", "given"))
_LOOK_S = 0.25  # seconds between two checks of a run
_GRACE_S = {signal.SIGINT: 20.0, signal.SIGTERM: 5.0}  # wait after each signal, then SIGKILL
_SAID = "avgpipe: error: "
_NO_MEMORY = re.compile(
    r"out of memory|can't allocate memory|cannot allocate memory|MemoryError", re.IGNORECASE
)
_RAISED = re.compile(r"[\w.]*(Error|Exception)\b")  # the last line of a traceback
_REASON_LETTERS = 200
_PROGRAM = (sys.executable, "-m", "avgpipe")

Caught = list[signal.Signals]
# Runs ``avgpipe`` with the given words until it ends or a signal ends it, and writes its output to the file;
# calls the function now and then; returns the exit code.
Runner = Callable[[Sequence[str], Path, Caught, Callable[[], None]], int]


def run(asked: CompareConfig) -> None:
    with arguments():
        name = find_workload(asked.workload).name
        config = replace(asked, out=asked.out or f"runs/compare-{name}-{time.strftime('%Y%m%d-%H%M%S')}")
        check(config)
        Path(config.out).mkdir(parents=True, exist_ok=True)
    with running():
        answer(config)


def check(config: CompareConfig) -> None:
    """Refuse what no system can do (ValueError, OSError); what only some cannot do becomes their rows."""
    if joined_ranks() is not None:
        raise ValueError("compare starts the workers of each system itself: run it once, without torchrun")
    # The system with the fewest requirements, except for a layer for each stage.
    splits = any(name not in _NO_STAGES for name in config.systems)
    least = {
        **common_options(config),
        "system": "model-parallel",
        "stages": config.stages if splits else 1,
        "out": config.out,
    }
    settings = resolve(TrainConfig.of(**least))
    out = Path(config.out)
    if out.is_dir() and any(out.iterdir()):
        raise ValueError(
            f"--out {out} is not empty ({min(p.name for p in out.iterdir())}): name a new folder"
        )
    check_folder(settings)
    check_device(settings.device)
    refused = [refusal(config, name) for name in config.systems]
    if all(refused):
        raise ValueError(f"no system can run: {refused[0]}")


def answer(config: CompareConfig, runner: Runner | None = None) -> None:
    """Run all systems, fill the folder, print. Exits with 1 if no system finished, as after a signal."""
    plans = tuned_plans(config, able(config), _say) if config.tunes else {}
    with noting_signals() as caught:
        found = comparison(config, run_all(config, runner or run_in_process, caught, plans))
        text = write_results(config, found, bool(caught))
    if config.json:
        sys.stdout.write(text)
    else:
        best = ["*: the best of its column"] if len(found.ranked) > 1 else []
        notes = [*best, *text_of.notes(found), text_of.advice(found), f"folder: {config.out}"]
        show(text_of.table(found), *notes, columns=_FILE_COLUMNS)
    sys.stdout.flush()
    if caught:
        say(f"interrupted by {caught[0].name}: the system that was running is ended")
        raise typer.Exit(128 + caught[0])
    if all(outcome.figures is None for outcome in found.outcomes):
        say(f"no system trained to its end: see the logs in {config.out}")
        raise typer.Exit(FAILED)


@contextmanager
def noting_signals() -> Iterator[Caught]:
    """Note SIGINT and SIGTERM within the block instead of raising, so that results are still written."""
    caught: Caught = []
    here = threading.current_thread() is threading.main_thread()
    numbers = (signal.SIGINT, signal.SIGTERM) if here else ()
    handlers = {s: signal.signal(s, lambda n, _: caught.append(signal.Signals(n))) for s in numbers}
    try:
        yield caught
    finally:
        for number, handler in handlers.items():
            signal.signal(number, handler)


# ---- the runs --------------------------------------------------------------------------------------------------------


def common_options(config: CompareConfig) -> dict[str, Any]:
    """Return the options of ``avgpipe train`` that were given and are the same for all systems."""
    return {name: value for name, value in config.explicit.items() if name in _COMMON}


class Repetition(NamedTuple):
    """One run of a system.

    Attributes:
        out: Folder of the run.
        log: File with the output of the run.
    """

    system: str
    seed: int
    out: Path
    log: Path


def repetitions(config: CompareConfig, system: str) -> list[Repetition]:
    """Return a run for each seed; with several seeds each has a folder within the system's folder."""
    home = Path(config.out) / system
    seeds = range(config.seed, config.seed + config.seeds)
    outs = [home / f"seed-{seed}" if config.seeds > 1 else home for seed in seeds]
    return [Repetition(system, seed, out, out.with_name(f"{out.name}.log")) for seed, out in zip(seeds, outs)]


def able(config: CompareConfig) -> list[str]:
    """Return the systems that can run with these options."""
    return [system for system in config.systems if not refusal(config, system)]


def options_of(config: CompareConfig, system: str) -> dict[str, Any]:
    """Return the given options that the system does not set itself, and the ones that select the system."""
    row, found = SYSTEMS[system], common_options(config)
    if config.pipelines is not None and "pipelines" not in row:
        found["pipelines"] = config.pipelines
    wanted = config.micro_batches
    # PipeDream also has whole batches in flight.
    splits = wanted is not None and systems.micro_batches(system, config.stages, None, wanted) >= wanted
    if splits and "micro_batches" not in row:
        found["micro_batches"] = wanted
    # The copy for a thread that writes the checkpoint would count as the system's memory.
    found["wait_for_checkpoints"] = True
    return {**found, "system": system, "stages": config.stages, "out": str(Path(config.out) / system)}


def words_of(config: CompareConfig, run: Repetition, plan: Path | None = None) -> list[str]:
    """Return the words after ``avgpipe`` of a run; ``plan``: the file with the tuned plan."""
    options = {**options_of(config, run.system), "out": str(run.out)}
    if config.seeds > 1:
        options["seed"] = run.seed
    if plan is not None:
        options["plan"] = str(plan)
    return ["train", options.pop("workload"), *words(options)]


def refusal(config: CompareConfig, system: str) -> str:
    """Return why a system cannot run with these options, "" if it can, as far as known without the data."""
    try:
        resolve(TrainConfig.of(**options_of(config, system)))
    except (ValueError, TypeError) as error:
        return str(error)
    return ""


# ---- one after the other ---------------------------------------------------------------------------------------------


def run_all(
    config: CompareConfig,
    runner: Runner,
    caught: Caught,
    plans: Mapping[str, Path | ValueError] | None = None,
) -> list[SystemResult]:
    """Run one after the other; after a signal the rest is NOT_RUN. ``plans``: the tuned plans, by system."""
    ended: dict[str, dict[int, SystemResult]] = {system: {} for system in config.systems}
    total = len(config.systems) * config.seeds
    order = [run for system in config.systems for run in repetitions(config, system)]
    for number, run in enumerate(order, 1):
        if caught:
            ended[run.system][run.seed] = SystemResult(run.system, report.NOT_RUN)
            continue
        name = run.system if config.seeds == 1 else f"{run.system}, seed {run.seed}"
        begun, place = time.monotonic(), f"{number} of {total}: {name}"
        plan = (plans or {}).get(run.system)
        if isinstance(plan, ValueError):
            result = SystemResult(run.system, report.DOES_NOT_FIT, reason=str(plan))
        elif refused := refusal(config, run.system):
            result = SystemResult(run.system, report.REFUSED, reason=refused)
        else:
            result = _run(config, run, plan, runner, caught, place)
        ended[run.system][run.seed] = result
        what = "done" if result.status == OK else ": ".join(filter(None, (result.status, result.reason)))
        _say(f"{place}: {what} ({duration(time.monotonic() - begun)})")
    return [SystemResult.joined(runs) for runs in ended.values()]


def _run(
    config: CompareConfig, run: Repetition, plan: Path | None, runner: Runner, caught: Caught, place: str
) -> SystemResult:
    begun = time.monotonic()
    run.log.parent.mkdir(parents=True, exist_ok=True)

    def said() -> str:
        return run.log.read_text(errors="replace").rstrip() if run.log.is_file() else ""

    def tick() -> None:
        last = "".join(said().splitlines()[-1:])
        tell(f"{place}, {duration(time.monotonic() - begun)}: {last}")

    if not sys.stderr.isatty():
        _say(place)
    code = runner(words_of(config, run, plan), run.log, caught, tick)
    if (run.out / "summary.json").is_file():  # it finished, whatever the exit code
        return _result(config, run)
    if caught:
        return SystemResult(run.system, report.INTERRUPTED)
    status, reason = verdict(code, said())
    return SystemResult(run.system, status, reason=reason)


def verdict(code: int, log: str) -> tuple[str, str]:
    """Return status and reason of a run without a summary, from its exit code and its log."""
    lines = [line for line in log.splitlines() if line.strip()]
    said = [line.removeprefix(_SAID) for line in lines if line.startswith(_SAID)]
    short = next((line for line in lines if _NO_MEMORY.search(line)), None)
    if short is not None:
        return report.OUT_OF_MEMORY, _plain(short)
    if code == -signal.SIGKILL or any("was killed by SIGKILL" in line for line in said):
        return report.KILLED, _plain(said[-1]) if said else "by hand, or by the system when memory runs out"
    status = report.REFUSED if code == WRONG_ARGUMENTS else report.FAILED
    raised = [line for line in lines if _RAISED.match(line)]
    # The first error is the cause: other workers then lost a peer, and the last line names the worker that
    # failed.
    if said and not (raised and "failed with exit code" in said[0]):
        return status, _plain(said[0])
    return status, _plain(raised[0] if raised else lines[-1]) if lines else f"exit code {code}"


def _plain(line: str) -> str:
    """Return the message without its hint about resuming, cut to a limit: the log has all of it."""
    line = re.sub(
        r"; (there is no checkpoint yet|resume from the last checkpoint with: .*)$", "", line.strip()
    )
    line = line.removeprefix(_SAID)
    return line if len(line) <= _REASON_LETTERS else line[: _REASON_LETTERS - 3].rstrip() + "..."


def run_in_process(
    command: Sequence[str],
    log: Path,
    caught: Caught,
    tick: Callable[[], None],
    program: Sequence[str] = _PROGRAM,
) -> int:
    """Run in a new session, so that Ctrl-C reaches this process only, which then ends the run once.

    After a signal the run gets SIGINT, then SIGTERM, then SIGKILL; another signal meanwhile shortens the
    wait. Its workers end with it.
    """

    def wait(signals: int, seconds: float) -> None:
        """Wait ``seconds`` for the process to end, or until there are more than ``signals`` signals."""
        deadline = time.monotonic() + seconds
        while len(caught) == signals and time.monotonic() < deadline:
            with suppress(subprocess.TimeoutExpired):
                process.wait(_LOOK_S)
                return
            tick()

    with log.open("wb") as file:
        process = subprocess.Popen(
            tied("stdout", *program, *command),
            stdin=subprocess.DEVNULL,
            stdout=file,
            stderr=subprocess.STDOUT,
            start_new_session=True,
        )
    try:
        wait(0, math.inf)
        for number, grace_s in _GRACE_S.items():
            if process.poll() is None:
                process.send_signal(number)
                wait(len(caught), grace_s)
    finally:
        if process.poll() is None:
            process.kill()
            process.wait()
    return process.returncode


def _say(line: str) -> None:
    tell("")
    print(line, file=sys.stderr, flush=True)


# ---- results in the folders ------------------------------------------------------------------------------------------


def _result(config: CompareConfig, run: Repetition) -> SystemResult:
    """Read the folder of a run that ended."""
    limit = config.memory_limit_bytes
    summary, plan = json.loads((run.out / "summary.json").read_text()), Plan.load(run.out / "plan.json")
    replicas = plan.pipelines if plan.spread else max(plan.replication or [1])
    figures = Figures.of(summary, replicas)
    warnings = (*summary["warnings"], *_warmed_up(plan, figures.batches))
    found = SystemResult(run.system, OK, figures, warnings=warnings)
    peak = max(summary["peak_memory_bytes"])
    if limit is None or peak <= limit:
        return found
    return replace(found, status=report.DOES_NOT_FIT, reason=f"needs {format_bytes(peak)}")


def _warmed_up(plan: Plan, batches: int) -> list[str]:
    """Warn of a run whose batches were mostly warm-up, which is slower than the rest of a long run."""
    rounds = plan.warmup_rounds or 0
    waiting = min(batches, rounds * plan.batches_per_round)
    if 2 * waiting <= batches:
        return []
    return [
        f"{waiting} of its {batches} batches are the warm-up, in which pipelines wait for each other: a long run is "
        "faster; --warmup-rounds 0 leaves it out"
    ]


def comparison(config: CompareConfig, outcomes: Sequence[SystemResult]) -> Comparison:
    """Return the outcomes, with the facts that all runs share, which the first run that finished has."""
    runs = (run for o in outcomes if o.figures is not None for run in repetitions(config, o.system))
    summaries = (run.out / "summary.json" for run in runs)
    known: dict[str, Any] = next((json.loads(path.read_text()) for path in summaries if path.is_file()), {})
    name, title = find_workload(config.workload).name, known.get("title")
    preset = known.get("preset", config.preset)
    return Comparison(
        what=name + (f" {preset}" if preset else "") + (f" ({title})" if title else ""),
        workers=config.stages,
        outcomes=tuple(outcomes),
        metric_name=known.get("metric_name", "metric"),
        lower_is_better=known.get("lower_is_better", True),
        trivial=known.get("trivial_metric"),
        target=known.get("target", config.target),
        memory_limit_bytes=config.memory_limit_bytes,
    )


def write_results(config: CompareConfig, found: Comparison, interrupted: bool) -> str:
    """Write compare.json, compare.md and the pictures; returns the content of compare.json."""
    facts = {name: value for name, value in asdict(found).items() if name != "outcomes"}
    content = {
        "workload": config.workload,
        **facts,
        "interrupted": interrupted,
        "systems": found.to_json(),
        "tuned": config.tunes,
        "best": {column.key: found.best_systems(column) for column in found.columns()},
        "notes": text_of.notes(found),
        "advice": text_of.advice(found),
        "out": config.out,
    }
    text = strict_json(content, indent=2) + "\n"
    write_atomically(Path(config.out) / "compare.json", text)
    write_atomically(Path(config.out) / "compare.md", text_of.markdown(found))
    _write_pictures(config, found)
    return text


def _write_pictures(config: CompareConfig, found: Comparison) -> None:
    """Draw the results of all systems, also of those that did not finish."""
    curves, timelines = {}, {}
    for outcome in found.outcomes:
        runs = repetitions(config, outcome.system)
        name = outcome.system if outcome.status == OK else f"{outcome.system} ({outcome.status})"
        if learnt := [curve for run in runs if (curve := Curve.of(read_metrics(run.out))).loss]:
            curves[name] = learnt
        timeline = next((path for run in runs if (path := run.out / "timeline.json").is_file()), None)
        if timeline is not None:
            timelines[name] = Timeline.from_chrome_trace(timeline)
    if found.ranked:
        found.plot(Path(config.out) / "bars.png")
    heading = f"{found.what}, {found.workers} workers"
    if curves:
        path = Path(config.out) / "curves.png"
        plot_curves(curves, heading, found.metric_name, found.trivial, found.target, path)
    if timelines:
        plot_timelines(timelines, heading, Path(config.out) / "timelines.png")


# ---- the plans of systems, where the tuner chooses them --------------------------------------------------------------


def tuned_plans(
    config: CompareConfig, systems: Iterable[str], say: Callable[[str], None]
) -> dict[str, Path | ValueError]:
    """Profile the workload and write the best plan of each system to the folder, or return why not.

    The profile is written there, too. Raises PipelineError when profiling fails.
    """
    out = Path(config.out)
    batch_size = check_workload(config.workload, config.build_options()).batch_size
    asked = {f.name: getattr(config, f.name) for f in fields(WorkloadOptions) if f.name in config.explicit}
    profiling = ProfilingOptions.of(**{**asked, "workload": config.workload})
    say(f"profiling for about {profiling.budget_s:g} s, to choose plans")
    at_once = min(config.stages, cores()) if config.device == "cpu" else 1
    profile = profile_of(profiling, profiled_sizes(batch_size), at_once)
    profile.save(out / "profile.json")
    cluster = Cluster.like(profile, config.stages, config.memory_limit_bytes)
    given: dict[str, Any] = {
        name: config.explicit[name] for name in ("pipelines", "micro_batches") if name in config.explicit
    }
    found: dict[str, Path | ValueError] = {}
    for system in systems:
        try:
            best = best_of_system(system, profile, cluster, batch_size, given)
        except ValueError as error:
            found[system] = error
            continue
        path = out / f"{system}-plan.json"
        best.plan.save(path)
        found[system] = path
        say(
            f"{system}: {_chosen(best.plan)}; predicted {format_seconds(best.batch_s)} a batch, "
            f"{format_bytes(max(best.memory_bytes))} on the worker that needs most"
        )
    return found


def _chosen(plan: Plan) -> str:
    recompute = "" if plan.recompute == "never" else f", recomputes {plan.recompute}"
    return (
        f"pipelines {plan.pipelines}, micro-batches {plan.micro_batches}, advance {plan.advance}{recompute}"
    )
