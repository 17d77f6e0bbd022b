"""``avgpipe bench faults``: injects faults at places drawn from a seed, and checks the runs."""

from __future__ import annotations

import secrets
import shlex
import statistics
import sys
import time
from collections import defaultdict
from collections.abc import Iterator, Sequence
from itertools import count

import typer
from rich.text import Text

from avgpipe.cli.options import words
from avgpipe.cli.output import FAILED, answer, arguments, grid, note, show_status
from avgpipe.faults.fault import KINDS
from avgpipe.units import format_seconds
from avgpipe_lab.bench import check_names, measuring
from avgpipe_lab.bench.chaos.draw import OF_LINES, WAYS, Scenario, draw
from avgpipe_lab.bench.chaos.episode import RunShape, SeenRun, play
from avgpipe_lab.bench.chaos.judge import Verdict, judge
from avgpipe_lab.bench.namespaces import check_namespaces
from avgpipe_lab.commands import FaultsConfig

_WRONG = ("hangs", "ended", "exit codes", "wrong blame", "left over", "samples", "losses")
_NOTES = """\
kind: of the drawn fault; faults: those that happened, with kills from outside. pause: the longest time without a
result of the others, from the fault on. went on: runs that finished. All other numbers must be 0: hangs: waits longer
than --timeout and 5 s; ended: runs that should have continued; exit codes: of commands on several hosts; wrong blame:
of ranks that cannot be at fault; left over: processes, files, memory; samples: lost, or trained on twice, by the
results or the weights; losses: other than without faults."""


def run(config: FaultsConfig) -> None:
    with arguments():
        check(config)
        ways = _ways(config)
    seed = secrets.randbelow(10**6) if config.seed is None else config.seed
    given = {name: value for name, value in config.complete.items() if name in config.given}
    command = shlex.join(["avgpipe", "bench", "faults", *words({**given, "seed": seed})])
    print(f"seed {seed}: {command}", file=sys.stderr, flush=True)
    verdicts: list[Verdict] = []
    undisturbed: dict[str, dict[int, float]] = {}
    began = time.monotonic()
    with measuring():
        for name, link, scenario in _scenarios(config, ways, seed, began):
            shape = RunShape(config.stages, config.pipelines, link, config.timeout_s)
            if scenario.way not in undisturbed:
                undisturbed[scenario.way] = _undisturbed(scenario.way, shape)
            show_status(f"{name}: {scenario.faults}")
            seen = play(scenario, shape)
            verdict = judge(seen, shape, undisturbed[scenario.way])
            verdicts.append(verdict)
            _say(verdict, scenario, seen)
    seconds = time.monotonic() - began
    faults = sum(len(verdict.faults) for verdict in verdicts)
    found = {"command": command, "seed": seed, "seconds": seconds, "faults": faults}
    violations = [
        f"{v.name}: {column}: {text}" for v in verdicts for column, texts in v.wrong.items() for text in texts
    ]
    found |= {"violations": violations, "runs": [vars(verdict) for verdict in verdicts]}
    counts = f"{faults} faults in {len(verdicts)} runs and {seconds:.0f} s"
    broken = f"{len(violations)} broken promises" if violations else "no broken promises"
    answer(
        config.json,
        found,
        Text(command, style="bold"),
        grid(_rows(verdicts), texts=2),
        Text("\n".join([_NOTES, counts, broken, *violations])),
    )
    if violations:
        raise typer.Exit(FAILED)


def check(config: FaultsConfig) -> None:
    """Refuse unknown names with ValueError."""
    check_names("--kinds", config.kinds, tuple(KINDS))
    check_names("--ways", config.ways, WAYS)
    check_names("--links", config.links, ("auto", "shm", "gloo"))
    if config.stages == 1 and config.kinds and set(config.kinds) <= set(OF_LINES):
        raise ValueError(
            f"--kinds {','.join(config.kinds)}: these faults need messages between stages, and --stages is 1"
        )


def _ways(config: FaultsConfig) -> tuple[str, ...]:
    """Return the ways that this machine has; ValueError if it lacks one that was asked for."""
    if "hosts" not in config.ways:
        return config.ways
    try:
        check_namespaces("--ways hosts")
    except ValueError as error:
        if "ways" in config.given:
            raise
        note(f"runs over several hosts are left out: {error}")
        return tuple(way for way in config.ways if way != "hosts")
    return config.ways


def _scenarios(
    config: FaultsConfig, ways: Sequence[str], seed: int, began: float
) -> Iterator[tuple[str, str, Scenario]]:
    """Yield runs with their names and links, each way in turn, until the time is up."""
    names = set(config.only)
    for number in count():
        for way in ways:
            if names.isdisjoint({f"{way}-{number}"}) and config.only:
                continue
            if time.monotonic() > began + config.seconds and not config.only:
                return
            kinds = config.kinds or tuple(KINDS)
            scenario = draw(seed, way, number, kinds, config.stages, config.pipelines, config.mean_seconds)
            yield scenario.name, config.links[number % len(config.links)], scenario
            names.discard(scenario.name)
        if config.only and not names:
            return


def _undisturbed(way: str, shape: RunShape) -> dict[int, float]:
    """Return the losses by batch of a run without faults."""
    seen = play(Scenario(f"{way} undisturbed", way), shape)
    if seen.failure is not None:  # without it there is nothing to compare with
        raise seen.failure
    return {event["batch"]: event["loss"] for event in seen.of("result")}


def _say(verdict: Verdict, scenario: Scenario, seen: SeenRun) -> None:
    """Print the broken promises of a run at once, on standard error."""
    for column, texts in verdict.wrong.items():
        for text in texts:
            print(f"{verdict.name}: {column}: {text}", file=sys.stderr, flush=True)
    if verdict.wrong:
        print(f"    {list(scenario.faults)}", file=sys.stderr)
        for event in (e for e in seen.events if e["event"] in ("fault", "error")):
            who = f"pipeline {event['pipeline']}, rank {event['rank']}, life {event['life']}"
            print(f"    {event['at_s']:.2f} {event['event']} {who}: {event['text'][:300]}", file=sys.stderr)
        for at_s, line in seen.said:
            print(f"    {at_s:.2f} {line}", file=sys.stderr)
        print(f"    {seen.ended_at_s:.2f} end: {seen.failure}", file=sys.stderr, flush=True)


def _rows(verdicts: Sequence[Verdict]) -> list[dict[str, str]]:
    """Make a row for each way and kind."""
    of: dict[tuple[str, str], list[Verdict]] = defaultdict(list)
    for verdict in verdicts:
        of[verdict.way, verdict.kind].append(verdict)
    rows = []
    for (way, kind), some in sorted(of.items()):
        faults = [fault for verdict in some for fault in verdict.faults]
        pauses = [fault["pause_s"] for fault in faults if fault["pause_s"] is not None]
        row = {"way": way, "kind": kind, "runs": str(len(some)), "faults": str(len(faults))}
        row["went on"] = str(sum(not verdict.ended for verdict in some))
        if pauses:
            row |= {
                "median pause": format_seconds(statistics.median(pauses)),
                "worst": format_seconds(max(pauses)),
            }
        row["trained again"] = str(sum(verdict.repeated for verdict in some))
        rows.append(row | {column: str(sum(bool(v.wrong.get(column)) for v in some)) for column in _WRONG})
    return rows
