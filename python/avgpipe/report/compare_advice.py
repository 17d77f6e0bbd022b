"""One sentence on which system to use, from the figures of a comparison."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence

from avgpipe.report.compare import Comparison, Figures, spell
from avgpipe.units import format_bytes

CLOSE = 0.05  # runs of one system on one machine differ by as much
_APART = f"less than {100 * CLOSE:.0f} % apart"


def advice(comparison: Comparison) -> str:
    """The system that reached the target first, else the fastest; differences within ``CLOSE`` are called none."""
    ranked = dict(comparison.ranked)
    if len(ranked) < 2:
        return f"Advice: none, for {listed(list(ranked)) or 'no system'} gave figures to rank{' alone' * len(ranked)}."
    times = _known(ranked, lambda f: f.seconds_to_target)
    if times:
        return f"Advice: {_by_target(times)}."
    speeds = _known(ranked, lambda f: f.samples_per_s)
    if not speeds:
        return "Advice: none, for no system trained long enough to be timed."
    return f"Advice: {_by_speed(comparison, ranked, speeds)}."


def listed(names: Sequence[str]) -> str:
    """ "a", "a and b", "a, b and c"."""
    return " and ".join([", ".join(names[:-1]), names[-1]]) if len(names) > 1 else "".join(names)


def _known(ranked: Mapping[str, Figures], value: Callable[[Figures], float | None]) -> dict[str, float]:
    return {name: found for name, figures in ranked.items() if (found := value(figures)) is not None}


def _by_target(times: Mapping[str, float]) -> str:
    order = sorted(times, key=times.__getitem__)
    first = order[0]
    level = [name for name in order if times[name] <= times[first] * (1 + CLOSE)]
    when = f"after {spell(times[first])} s of training"
    if len(order) == 1:
        return f"only {first} reached the target, {when}: use it"
    if len(level) > 1:
        return f"{listed(level)} reached the target first, {when}, {_APART}: take any of them"
    ratio = times[order[1]] / times[first]
    longer = f"{100 * (ratio - 1):.0f} % longer" if ratio < 2 else f"{ratio:.1f} times as long"
    return f"{first} reached the target first, {when}; {order[1]} needed {longer}: use {first}"


def _by_speed(comparison: Comparison, ranked: Mapping[str, Figures], speeds: Mapping[str, float]) -> str:
    order = sorted(speeds, key=speeds.__getitem__, reverse=True)
    fastest = [name for name in order if speeds[name] * (1 + CLOSE) >= speeds[order[0]]]
    sentence = _who_is_fastest(fastest, order, speeds)
    learner = _learned_more(comparison, ranked, fastest)
    if learner is not None:
        return f"{sentence}, but {learner}: a --target would tell which gets there first"
    for name in fastest:
        if ranked[name].stages == 1 and ranked[name].replicas > 1:
            simplest = "" if len(fastest) == 1 else f", {name} is the simplest of them"
            return f"{sentence}{simplest}, and its model fits into each worker: use it"
    if len(fastest) == 1:
        return f"{sentence}: use it"
    return f"{sentence}: {_least_memory({name: ranked[name].peak_memory_bytes for name in fastest})}"


def _who_is_fastest(fastest: Sequence[str], order: Sequence[str], speeds: Mapping[str, float]) -> str:
    if len(fastest) > 1:
        return f"{listed(fastest)} are equally fast here ({_APART})"
    if len(order) == 1:
        return f"{order[0]} is fastest here"
    ratio = speeds[order[0]] / speeds[order[1]]
    ahead = f"{100 * (ratio - 1):.0f} % faster than" if ratio < 2 else f"{ratio:.1f} times as fast as"
    return f"{order[0]} is fastest here, {ahead} {order[1]}"


def _learned_more(
    comparison: Comparison, ranked: Mapping[str, Figures], fastest: Sequence[str]
) -> str | None:
    """That another system than the fastest has a metric that is better by more than ``CLOSE``, if one has.

    Where none beats the trivial answer metrics say nothing yet; None then.
    """
    metrics = _known(ranked, lambda f: f.best_metric)
    if not comparison.beaten_trivial or not all(name in metrics for name in fastest):
        return None
    choose = min if comparison.lower_is_better else max
    best, ours = choose(metrics, key=metrics.__getitem__), choose(metrics[name] for name in fastest)
    if best in fastest or abs(metrics[best] - ours) <= CLOSE * abs(ours):
        return None
    figures = f"{comparison.metric_name} {spell(metrics[best])} against {spell(ours)}"
    return f"{best} learned more from the same samples ({figures})"


def _least_memory(memory: Mapping[str, int]) -> str:
    least = min(memory, key=memory.__getitem__)
    others = min(size for name, size in memory.items() if name != least)
    if others <= memory[least] * (1 + CLOSE):
        return "take any of them"
    return f"use {least}, which needs least memory ({format_bytes(memory[least])})"
