"""The losses of each way of training, and the samples that it needs."""

from __future__ import annotations

import statistics
from collections.abc import Callable
from functools import partial
from math import inf

from benchmarks.statistics.samples import (
    BASELINE,
    SLACK,
    Ways,
    best_rate,
    by_way,
    last_loss,
    loss_at,
    passes_to,
    rates,
    target_of,
)
from benchmarks.tables.markdown import Record, against, table

_TWO, _FOUR = 1.03, 1.08
BARS = {
    "N = 2": _TWO,
    "N = 4": _FOUR,
    "halves, predicted": _TWO,
    "halves, error feedback": _TWO,
    "quarters, predicted": _FOUR,
    "quarters, error feedback": _FOUR,
    "muon, 2bw": _TWO,
    "muon, 2bw, error feedback": _TWO,
}
"""Passes at most."""
_MUON = "muon"
_EARLY = {0.2: "a fifth", 0.4: "two fifths"}
_HIGHER = 0.02  # above the worst seed of the baseline


def statistics_passes(record: Record) -> str:
    """Return samples to the target relative to one pipeline with the same seed (for Muon, with Muon)."""
    return _by_workload(record, partial(_passes, slack=SLACK))


def statistics_passes_higher(record: Record) -> str:
    """The same for a target that is easier to reach."""
    return _by_workload(record, partial(_passes, slack=_HIGHER))


def statistics_losses(record: Record) -> str:
    """Return validation losses at the end: the mean of the seeds, and the range."""

    def cell(ways: Ways, way: str) -> str:
        ends = [loss_at(losses, _length(ways)) for losses in ways[way].values()]
        return f"{statistics.fmean(ends):.3f} ({max(ends) - min(ends):.3f})"

    return _by_workload(record, cell)


def statistics_early(record: Record) -> str:
    """Return validation losses early in the run: mean of the seeds, and difference from one pipeline."""
    names = _workloads(record)
    found = {name: by_way(record["runs"], name) for name in names}
    rows = [
        (text, way, *(_early(found[name], way, part) for name in names))
        for part, text in _EARLY.items()
        for way in dict.fromkeys(way for ways in found.values() for way in ways)
    ]
    return table("part of the run | way | " + " | ".join(f"{name}:" for name in names), rows)


def _early(ways: Ways, way: str, part: float) -> str:
    if way not in ways:
        return ""
    samples = round(part * _length(ways))
    losses = {seed: loss_at(run, samples) for seed, run in ways[way].items()}
    if way == BASELINE:
        return f"{statistics.fmean(losses.values()):.3f}"
    further = [loss - loss_at(ways[BASELINE][seed], samples) for seed, loss in losses.items()]
    return f"{statistics.fmean(losses.values()):.3f} ({statistics.fmean(further):+.3f})"


def _length(ways: Ways) -> int:
    """Return the samples of a run of one pipeline: others may be longer."""
    return max(losses[-1][0] for losses in ways[BASELINE].values())


def statistics_targets(record: Record) -> str:
    """The targets."""
    rows = []
    for name in _workloads(record):
        ways, by_rate = by_way(record["runs"], name), rates(record["runs"], name)
        for baseline in (BASELINE, _MUON):
            if baseline in ways:
                target, lr = target_of(ways, baseline=baseline), best_rate(by_rate[baseline])
                rows.append((name, baseline, f"{lr:g}", f"{target:.3f}", len(ways[baseline])))
    return table("workload | way | learning rate: | target: | seeds:", rows)


def statistics_search(record: Record) -> str:
    """Return last losses by learning rate, for the ways that were tried with several; the best in bold."""
    rows = []
    for name in _workloads(record):
        for way, by_rate in rates(record["runs"], name).items():
            best, cells = best_rate(by_rate), []
            for lr, seeds in sorted(by_rate.items()):
                end = f"{last_loss(seeds):.3f}"
                count = f" ({len(seeds)})" * (len(seeds) > 1)
                cells.append(f"{lr:g}: {f'**{end}**' if lr == best else end}{count}")
            if len(cells) > 1:
                rows.append((name, way, ", ".join(cells)))
    return table("workload | way | learning rate: last loss (seeds, where several)", rows)


def statistics_variants(record: Record) -> str:
    """Return losses of variants of elastic averaging by optimizer and rate: mean and range of the seeds."""
    found: dict[str, dict[str, list[Record]]] = {}
    for run in record["variants"]:
        of = found.setdefault(run["variant"], {})
        of.setdefault(f"{run['optimizer']}, {run['lr']:g}", []).append(run)
    settings = list(dict.fromkeys(setting for of in found.values() for setting in of))
    rows = [
        (variant, *(cell for setting in settings for cell in _variant(of.get(setting, []))))
        for variant, of in found.items()
    ]
    heads = " | ".join(f"{setting}: | mean of its last tenth:" for setting in settings)
    return table(f"variant | {heads}", rows)


def _variant(runs: list[Record]) -> tuple[str, str]:
    if not runs:
        return "", ""
    ends = [run["loss"] for run in runs]
    spread = f" ({max(ends) - min(ends):.3f})" * (len(ends) > 1)
    return f"{statistics.fmean(ends):.3f}{spread}", f"{statistics.fmean(run['tail'] for run in runs):.3f}"


def _passes(ways: Ways, way: str, slack: float) -> str:
    baseline = _MUON if way.startswith(_MUON) and _MUON in ways else BASELINE
    if way == baseline:
        return "1"
    bar = BARS.get(way.removesuffix(", warm-up").removesuffix(", default plan"))
    found = passes_to(ways, way, target_of(ways, slack, baseline), baseline)
    if found.median == inf:
        return "never" if bar is None else "**never**"
    text = against(found.median, most=bar, digits=3)
    ends = ["never" if end == inf else f"{end:.3f}" for end in (found.least, found.most)]
    return text if ends[0] == ends[1] else f"{text} ({ends[0]} to {ends[1]})"


def _by_workload(record: Record, cell: Callable[[Ways, str], str]) -> str:
    names = _workloads(record)
    found = {name: by_way(record["runs"], name) for name in names}
    listed = dict.fromkeys(way for ways in found.values() for way in ways)
    rows = [
        (way, *(cell(found[name], way) if way in found[name] else "" for name in names)) for way in listed
    ]
    return table("way | " + " | ".join(f"{name}:" for name in names), rows)


def _workloads(record: Record) -> list[str]:
    return list(dict.fromkeys(run["workload"] for run in record["runs"]))
