"""Question: which system would be the quickest on the papers' cluster, and what holds each of them back?

    python -m benchmarks.papers.forecast gnmt bert awd-lstm

Simulated, nothing runs: every system on the emulated cluster of ``benchmarks.papers.cluster``, with the batch that
makes one update. N pipelines of AvgPipe share it: each has an N-th, in micro-batches of its own. Of each system the
quickest plan, by the simulated seconds of a batch where all times vary, over cuts, micro-batches, replicas of stages
and AvgPipe's advance, the one with fewest replicas and micro-batches where several are as quick to a hundredth: on all
six devices, and on whatever number of them. Every plan fits into the memory of a device;
AvgPipe (G) into what GPipe's quickest one needs of it, AvgPipe (P) into what data parallelism needs.

The pipelines of "AvgPipe" share one optimizer, those of "AvgPipe elastic" have one each; several may run a zero-bubble
schedule each. "Halves predicted" and "quarters predicted" are one pipeline without a flush, which updates after each
half or quarter of the batch, on weights predicted for that time; 2BW's corrections make up for a delay of a whole
batch. No gradient of them is later than that of as many parts less one, or of one batch. "Best" is, of all these, the
first one in the table that is within a hundredth of the quickest.

"A pipeline on each host", or a replica on each of its devices, has no activation on a line: the hosts average their
weights once in so many updates, the least with which that is hidden behind computing. What so long a period costs in
samples is not known, so it is none of the "best".

"16 bits": activations, their gradients and those of tied weights travel as bfloat16 (``Precision(wire_dtype=...)``).
All systems can have that, so they all have such rows; the published ones did not, so theirs without it are what stands
for the papers.

Beside the seconds stands what the busiest device and the busiest line of a host have to do for a batch. No schedule is
quicker than that, so where one of them is nearly all it is what binds; else it is waiting, in bubbles.
"""

from __future__ import annotations

import argparse
from collections import Counter
from collections.abc import Iterable, Iterator
from contextlib import suppress
from dataclasses import asdict, dataclass, replace
from itertools import chain, product
from math import ceil, inf
from operator import attrgetter
from typing import Any

from rich.console import Console
from rich.table import Table

from avgpipe.measure.forecast import OnCluster
from avgpipe.plan import Plan
from avgpipe.planning import Costs, LinkProfile, Profile
from avgpipe.planning.cluster import Cluster, ring_s
from avgpipe.planning.cuts import Cut, CutSearch
from avgpipe.rules import CORRECTIONS
from avgpipe.units import format_bytes, format_seconds
from benchmarks.common.record import write_record
from benchmarks.papers.cluster import (
    BETWEEN_BYTES_PER_S,
    DEVICES,
    HOSTS,
    V100,
    cluster,
    profile_of,
    shared_lines,
)
from benchmarks.papers.models import FLOAT_BYTES, MODELS, PaperModel

WORKERS = HOSTS * DEVICES
PIPELINES = (1, 2, 3, 4)
FLOAT_BITS, NARROW_BITS = 32, 16  # that travel of a number
# Of a pipeline, on one replica of each stage.
MICRO_BATCHES = (1, 2, 3, 4, 5, 6, 8, 10, 12, 16, 20, 24, 32, 40, 64)
AVGPIPES = ("gnmt", "bert", "awd-lstm")
BINDS = 0.9  # of a batch's time
_varied_s, _memory = attrgetter("varied_s"), attrgetter("memory_bytes")
_SHAPES = (
    (2, 1),
    (3, 1),
    (4, 1),
    (5, 1),
    (6, 1),
    (2, 2),
    (3, 2),
)  # stages, and replicas of each, in one host


@dataclass(frozen=True)
class StageWork:
    """What a stage does for a micro-batch, in seconds, and what it has, in bytes.

    Attributes:
        forward_s: On its device.
        backward_s: On its device.
        input_backward_s: Of ``backward_s``, what makes the gradient of the input.
        update_s: Of a pipeline's update, averaging included.
        input_bytes: That it gets from the stage before, and whose gradient it sends back.
        output_bytes: That it hands on.
        own_bytes: Of weights that no other stage has.
        tied_bytes: By the number of a tie, of weights that another stage has too.
    """

    forward_s: float
    backward_s: float
    input_backward_s: float
    update_s: float
    input_bytes: float
    output_bytes: float
    own_bytes: float
    tied_bytes: dict[int, float]


class OnHosts(OnCluster):
    """A plan on the cluster, where all that a host sends goes through one line.

    Gradients of tied weights are exchanged after the backward, which keeps no device busy. ``wire_bits``: of a number
    that travels between stages.
    """

    def __init__(
        self, profile: Profile, plan: Plan, batch_size: int, cluster: Cluster, wire_bits: int = FLOAT_BITS
    ) -> None:
        self._wire = wire_bits / FLOAT_BITS
        super().__init__(profile, plan, batch_size, cluster)

    def _link(self, here: range, there: range) -> LinkProfile:
        found = super()._link(here, there)
        return replace(found, bytes_per_s=found.bytes_per_s / self._wire)

    def costs(self, cut: Cut) -> Costs:
        found = super().costs(cut)
        sums: Any = found.allreduce_s
        return replace(
            found,
            shared_links=shared_lines(self._workers, DEVICES),
            allreduce_s=[sum_s + self._exchanged_s(cut, k) for k, sum_s in enumerate(sums)],
        )

    def bytes_with(self, k: int, first: Any, last: Any, in_flight: int) -> Any:
        """Count a copy of the weights more for a correction, but for versions that are predictions themselves."""
        held = super().bytes_with(k, first, last, in_flight)
        corrects = self.plan.correction in CORRECTIONS and self.plan.weights != "predicted"
        return held + corrects * self._chain.parameter_bytes(first, last)

    def _exchanged_s(self, cut: Cut, stage: int, least_height: int = 0) -> float:
        """Seconds that a stage needs to send gradients of weights that another one, so far away, has too.

        Every replica tells one of the other stage, all through the line of their host.
        """
        seconds = 0.0
        for tie in self._chain.profile.ties:
            ends = [sum(layer >= first for first in cut) for layer in (tie.layers[0], tie.layers[-1])]
            here, there = (self._workers[k][0] for k in ends)
            if stage in ends and here != there and self._cluster.height(here, there) >= least_height:
                link = self._cluster.link([here], [there])
                seconds += self._wire * self._width * tie.parameter_bytes / link.bytes_per_s
        return seconds

    def stages(self, cut: Cut) -> list[StageWork]:
        """Return what each stage does and has."""
        costs = self.costs(cut).of_stages(self.plan.stages, self.micro_batches)
        sent, made = self._chain.boundary_bytes, []
        for k, first, last in self._blocks(cut):
            tied: dict[int, float] = {}
            for number, tie in enumerate(self._chain.profile.ties):
                held = [first <= layer < last for layer in tie.layers]
                if any(held) and not all(held):
                    tied[number] = tie.parameter_bytes
            made.append(
                StageWork(
                    forward_s=float(costs.forward_s[k, 0]),
                    backward_s=float(costs.backward_s[k, 0]),
                    input_backward_s=float(costs.input_backward_s[k, 0]),
                    update_s=float(costs.update_s[k]),
                    input_bytes=float(sent[first]),
                    output_bytes=float(sent[last]),
                    own_bytes=float(self._chain.parameter_bytes(first, last)) - sum(tied.values()),
                    tied_bytes=tied,
                )
            )
        return made

    def device_s(self, cut: Cut) -> float:
        """What the busiest device has to do for a batch."""
        work = [float(self.work_s(*block)) for block in self._blocks(cut)]
        return self.plan.shares * max(sum(work[k] for k in stages) for stages in self.placement)

    def line_s(self, cut: Cut) -> float:
        """What the busiest line of a host has to carry for a batch."""
        costs, sent_s = self.costs(cut), Counter[int]()
        transfers: Any = costs.transfer_s
        hosts = [workers[0] // DEVICES for workers in self._workers]
        for link in chain.from_iterable(costs.shared_links):
            sent_s[hosts[link[0]]] += self.micro_batches * transfers[min(link)]
        for k, host in enumerate(hosts):
            sent_s[host] += self._exchanged_s(cut, k, least_height=1)
        if self._width > DEVICES:  # of the whole model, on all hosts
            size = self._chain.parameter_bytes(0, self.layers)
            sent_s[0] += ring_s(size, self._width, self._ring(self._workers[0]).bytes_per_s)
        return self.plan.shares * max(sent_s.values(), default=0.0)


@dataclass(frozen=True)
class Outcome:
    """A system's plan; seconds are of a batch of the model, bytes of the device that needs most.

    Attributes:
        plan: Of a host, where ``period`` is not 1; else of all.
        batch_s: Simulated.
        varied_s: The same where all times vary, but no less: plans are chosen by it.
        device_s: What the busiest device computes.
        line_s: How long the busiest line is taken.
        memory_bytes: Of the device.
        period: In how many updates hosts average once.
        updates: That a batch makes, one with each of as many parts, which are the plan's batches.
        way: Of several that were to choose from, the one that this is.
        wire_bits: Of a number that travels between stages.
    """

    plan: Plan
    batch_s: float
    varied_s: float
    device_s: float
    line_s: float
    memory_bytes: float
    period: int = 1
    updates: int = 1
    way: str = ""
    wire_bits: int = FLOAT_BITS

    @property
    def described(self) -> str:
        """Say what was chosen."""
        plan = self.plan
        words = [self.way] * bool(self.way) + [f"K = {plan.stages}"] * (plan.stages > 1)
        if plan.replication is not None:
            words.append(f"{plan.replication[0]} replicas")
        words.append(
            f"M = {plan.pipelines} x {plan.micro_batches_each}"
            if plan.pipelines > 1
            else f"M = {self.updates} x {plan.micro_batches}" * (self.updates > 1)
            or f"M = {plan.micro_batches}"
        )
        if plan.schedule == "advance-forward" or plan.advance is not None:
            ahead = plan.advance in (None, _ahead(plan.stages))
            words.append("advance K-1-k" if ahead else f"advance {plan.advance}")
        if plan.schedule.startswith("zero-bubble"):
            words.append(plan.schedule.removeprefix("zero-bubble-"))
        if plan.partition:
            words.append("cuts " + " ".join(map(str, plan.partition)))
        if self.period > 1:
            words.append(f"period {self.period}")
        if self.wire_bits < FLOAT_BITS:
            words.append(f"{self.wire_bits} bits")
        return ", ".join(words)

    @property
    def binds(self) -> str:
        """What keeps a batch from being quicker."""
        if max(self.line_s, self.device_s) < BINDS * self.batch_s:
            return "bubble"
        return "line" if self.line_s > self.device_s else "compute"


# ---- the plans of a system -------------------------------------------------------------------------------------------


def _ahead(stages: int) -> tuple[int, ...]:
    """Return the advance K-1-k of each stage."""
    return tuple(range(stages - 1, -1, -1))


_SYSTEMS: dict[str, list[dict[str, Any]]] = {
    "data parallel": [{"system": "data-parallel"}],
    "GPipe": [{"system": "gpipe"}],
    "DAPPLE": [{"system": "dapple"}],
    "PipeDream": [{"system": "pipedream"}],
    "PipeDream-2BW": [{"system": "pipedream-2bw"}],
    "EA-Pipe": [{"system": "ea-pipe"}],
    "zero bubble": [{"schedule": "zero-bubble-h1"}, {"schedule": "zero-bubble-v"}],
    "AvgPipe": [{"advance": advance} for advance in (0, None, 2, 4, 8)],
    "AvgPipe elastic": [{"system": "avgpipe-elastic", "advance": advance} for advance in (0, None, 2, 4, 8)],
    **{
        f"AvgPipe {parts} predicted": [{"system": "pipedream-predicted", "advance": a} for a in (0, _ahead)]
        for parts in ("halves", "quarters")
    },
    **{
        f"AvgPipe 2BW, {what}": [
            {"system": "pipedream-2bw", "correction": what, "advance": a} for a in (0, _ahead)
        ]
        for what in ("predicted", "error-feedback")
    },
}
"""Options of ``Plan.for_system``, each a way to run the system; a function makes one from the number of stages."""
_WHOLE = ("PipeDream", "EA-Pipe")  # whose batches are not cut
# That a batch makes; with other systems it makes one.
_UPDATES = {"AvgPipe halves predicted": 2, "AvgPipe quarters predicted": 4}
_LATE = tuple(name for name in _SYSTEMS if name.startswith("AvgPipe ") and name != "AvgPipe elastic")
_NEARLY = 1.01  # as quick


def plans(system: str, batch_size: float, pipelines: int = 1, workers: int | None = None) -> Iterator[Plan]:
    """Make the plans of a system, without cuts; those on exactly so many workers, if that is said.

    batch_size: of a plan's batch, which is the part of a batch that makes an update.
    """
    if system == "data parallel":
        counts = (DEVICES, WORKERS) if workers is None else (workers,)
        yield from (Plan.for_system("data-parallel", stages=n) for n in counts)
        return
    shapes = [(k, r) for k, r in _SHAPES if workers in (None, k * r)]
    parts = (1,) if system in _WHOLE else MICRO_BATCHES
    ways = _SYSTEMS[system] + (_SYSTEMS["zero bubble"] if system == "AvgPipe" and pipelines > 1 else [])
    most = max(1, _UPDATES.get(system, 1) - 1) if system in _LATE else None
    for (stages, replicas), own, options in product(shapes, parts, ways):
        if own * replicas * pipelines <= batch_size:
            with suppress(ValueError):  # a schedule without replicas, an advance that would deadlock
                plan = _plan(stages, replicas, own * replicas * pipelines, pipelines, options)
                if most is None or max(plan.delays) <= most:
                    yield plan


def _plan(stages: int, replicas: int, micro_batches: int, pipelines: int, options: dict[str, Any]) -> Plan:
    if options.get("schedule") == "zero-bubble-v":
        stages *= 2  # two on each worker
    sizes: dict[str, Any] = {"stages": stages, "micro_batches": micro_batches}
    if replicas > 1:
        sizes["replication"] = [replicas] * stages
    if pipelines > 1:
        sizes["pipelines"] = pipelines
    if callable(advance := options.get("advance")):
        sizes["advance"] = advance(stages)
        options = {name: value for name, value in options.items() if name != "advance"}
    return Plan.for_system(**{"system": "avgpipe", **sizes, **options})


def average_s(model: PaperModel, workers: int) -> float:
    """Seconds in which so many workers sum what is as large as the weights, over lines between hosts."""
    return float(ring_s(FLOAT_BYTES * model.parameters, workers, BETWEEN_BYTES_PER_S))


def tell_s(model: PaperModel, hosts: int) -> float:
    """Seconds in which a host tells each of the others an update as large as the weights."""
    return (hosts - 1) * FLOAT_BYTES * model.parameters / BETWEEN_BYTES_PER_S


@dataclass(frozen=True)
class Contest:
    """A model on the cluster.

    Attributes:
        model: Of a paper.
        profile: Of its layers on a device.
        memory_bytes: Of a device.
    """

    model: PaperModel
    profile: Profile
    memory_bytes: float = V100.memory_bytes

    def quickest(
        self,
        system: str,
        pipelines: int = 1,
        *,
        workers: int | None = None,
        limit: float | None = None,
        wire_bits: int = FLOAT_BITS,
    ) -> Outcome | None:
        """Find a system's quickest plan; None where nothing fits. limit: bytes of a device; None: all that it has."""
        net, updates = cluster(min(limit or inf, self.memory_bytes)), _UPDATES.get(system, 1)
        tried = plans(system, self.model.batch_size / updates, pipelines, workers)
        found = self._quickest(tried, net, updates, wire_bits)
        return found and _repeated(found, updates)

    def on_each_host(self, limit: float | None = None) -> Outcome | None:
        """Find the quickest plan with a pipeline on every host, or a replica on each of its devices."""
        net = cluster(min(limit or inf, self.memory_bytes), hosts=1)
        share = self.model.batch_size / HOSTS
        ways = ("AvgPipe", "zero bubble", "data parallel")
        tried = chain.from_iterable(plans(way, share, workers=DEVICES) for way in ways)
        found = self._quickest(tried, net, HOSTS)
        if found is None:
            return None
        exchange_s = tell_s(self.model, HOSTS)
        period = ceil(exchange_s / (BINDS * found.batch_s))
        return replace(found, line_s=exchange_s / period, period=period)

    def problem(self, plan: Plan, net: Cluster, parts: int = 1, wire_bits: int = FLOAT_BITS) -> OnHosts:
        """Return a plan, but for its partition, as the search has it; ``parts``: its batches in one of the model."""
        size: Any = self.model.batch_size / parts
        return OnHosts(self.profile, replace(plan, partition=None), size, net, wire_bits)

    def _quickest(
        self, tried: Iterable[Plan], net: Cluster, parts: int = 1, wire_bits: int = FLOAT_BITS
    ) -> Outcome | None:
        """``parts``: how many batches of such plans are one of the model."""

        def problem(plan: Plan) -> OnHosts:
            return self.problem(plan, net, parts, wire_bits)

        found = []
        for on in (problem(plan) for plan in tried if plan.stages <= len(self.profile.layers)):
            cut = CutSearch(on, on.limits).first()
            if cut is not None:
                found.append(_outcome(on, cut))
        if not found:
            return None
        best = _simplest(found)
        on = problem(best.plan)
        best = _thrifty([best, _outcome(on, CutSearch(on, on.limits).best()[0])])
        return replace(best, wire_bits=wire_bits)


def _simplest(found: Iterable[Outcome]) -> Outcome:
    """Return, of those that are nearly as quick as the quickest, the one with fewest replicas and micro-batches."""
    return min(_nearly_quickest(found), key=lambda o: (max(o.plan.replication or [1]), o.plan.micro_batches))


def _thrifty(found: Iterable[Outcome]) -> Outcome:
    """Return, of those that are nearly as quick as the quickest, the one that needs least memory."""
    return min(_nearly_quickest(found), key=_memory)


def _nearly_quickest(found: Iterable[Outcome]) -> list[Outcome]:
    outcomes = list(found)
    least_s = min(map(_varied_s, outcomes))
    return [outcome for outcome in outcomes if outcome.varied_s <= _NEARLY * least_s]


def _outcome(problem: OnHosts, cut: Cut) -> Outcome:
    forecast = problem.forecast(cut)
    device_s, line_s = problem.device_s(cut), problem.line_s(cut)
    # Exchanges of tied gradients delay what waits for them in the simulation, but leave the line to others; and the few
    # batches of several pipelines that it times may be quicker than all are.
    exact_s = problem.plan.shares * problem.seconds(cut)
    batch_s = max(exact_s, line_s, device_s)
    varied_s = max(batch_s, forecast.batch_s)
    return Outcome(forecast.plan, batch_s, varied_s, device_s, line_s, max(forecast.memory_bytes))


def _repeated(outcome: Outcome, updates: int) -> Outcome:
    """Return what so many of the plan's batches take."""
    seconds = {
        name: updates * getattr(outcome, name) for name in ("batch_s", "varied_s", "device_s", "line_s")
    }
    return replace(outcome, updates=updates, **seconds)


# ---- the tables ------------------------------------------------------------------------------------------------------

_LIMITS = {"GPipe": " (G)", "data parallel": " (P)"}
Rows = list[tuple[str, Outcome | None]]


def rows(contest: Contest, workers: int | None) -> Rows:
    """Make every system's row, those of AvgPipe without and with the memory limits of its paper."""
    others = [system for system in _SYSTEMS if not system.startswith("AvgPipe")]
    found: Rows = [(system, contest.quickest(system, workers=workers)) for system in others]
    used = {_LIMITS[system]: f.memory_bytes for system, f in found if system in _LIMITS and f is not None}
    limits = {"": None, **used}
    wide, narrow = (_of_avgpipe(contest, workers, limits, bits) for bits in (FLOAT_BITS, NARROW_BITS))
    for mark, limit in limits.items():
        found += wide[mark]
        if workers is None:
            found.append((f"AvgPipe{mark}, a pipeline on each host", contest.on_each_host(limit)))
        found += narrow[mark]
    for system in others[1:]:  # without data parallelism, which has no activations to send
        name = f"{system}, {NARROW_BITS} bits"
        found.append((name, contest.quickest(system, workers=workers, wire_bits=NARROW_BITS)))
    return found


def _of_avgpipe(
    contest: Contest, workers: int | None, limits: dict[str, float | None], wire_bits: int
) -> dict[str, Rows]:
    """Make AvgPipe's rows under each limit, the first of which is none; the last of them is the best one."""
    bits = f", {wire_bits} bits" * (wire_bits < FLOAT_BITS)
    free: dict[str, Outcome | None] = {}
    made: dict[str, Rows] = {}
    for mark, limit in limits.items():
        found: Rows = []
        for system, pipelines in _ways():
            way = f"{system}, N = {pipelines}" if system not in _LATE else system
            way = way.removeprefix("AvgPipe").lstrip(", ")
            kept = free.get(way)
            if limit is None or (kept is not None and kept.memory_bytes > limit):
                kept = contest.quickest(system, pipelines, workers=workers, limit=limit, wire_bits=wire_bits)
            if limit is None:
                free[way] = kept
            found.append((way, kept))
        found.append(("best", _best(found)))
        made[mark] = [(f"AvgPipe{mark}{bits}, {way}", outcome) for way, outcome in found]
    return made


def _ways() -> list[tuple[str, int]]:
    """Return the ways of AvgPipe with the pipelines of each: the sooner, the less is known to be lost in samples."""
    elastic = [("AvgPipe elastic", n) for n in PIPELINES if n > 1]
    return [("AvgPipe", n) for n in PIPELINES] + [(name, 1) for name in _LATE] + elastic


def _best(found: Rows) -> Outcome | None:
    """Return the first outcome that is nearly as quick as the quickest, and which way it is."""
    there = [(way, outcome) for way, outcome in found if outcome is not None]
    if not there:
        return None
    least_s = min(outcome.varied_s for _, outcome in there)
    way, best = next((w, o) for w, o in there if o.varied_s <= _NEARLY * least_s)
    return replace(best, way=way)


def summary(model: PaperModel) -> list[str]:
    """Say what there is to compute, and what to send, per sample and per update."""
    cuts = [layer.cut_bytes for layer in model.layers[:-1]]
    sent_ms = [1e3 * size / BETWEEN_BYTES_PER_S for size in (min(cuts), max(cuts))]
    device_s, stored = format_seconds(V100.seconds(model.flops)), format_bytes(model.stored_bytes)
    return [
        f"{model.name} ({model.source}): {model.parameters / 1e6:.1f} M parameters in {len(model.layers)} layers",
        f"a sample: {model.flops / 1e9:.1f} GFLOP forward and backward, {device_s} on a device; {stored} stored for "
        f"the backward; at a cut {format_bytes(min(cuts))} to {format_bytes(max(cuts))}, {sent_ms[0]:.2f} to "
        f"{sent_ms[1]:.2f} ms on a line, each way",
        f"gradients summed over {WORKERS} devices: {average_s(model, WORKERS):.2f} s; an update told to {HOSTS - 1} "
        f"other hosts: {tell_s(model, HOSTS):.2f} s",
    ]


def table(title: str, found: Rows) -> Table:
    made = Table("system", "plan", "batch", "device", "line", "memory", "binds", title=title)
    for name, outcome in found:
        if outcome is None:
            made.add_row(name, "nothing fits")
            continue
        times = map(format_seconds, (outcome.batch_s, outcome.device_s, outcome.line_s))
        made.add_row(name, outcome.described, *times, format_bytes(outcome.memory_bytes), outcome.binds)
    return made


def _arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("models", nargs="*", metavar="model", help=f"some of {', '.join(MODELS)}")
    parser.add_argument(
        "--batch-size",
        type=lambda text: [int(size) for size in text.split(",")],
        default=[0],
        help="samples of a batch, or several such numbers: 32,64,128; default: as published",
    )
    parser.add_argument(
        "--reading", action="store_true", help="products take at least what reading their weights does"
    )
    parser.add_argument("--out", help="file of the record; default: in benchmarks/results")
    asked = parser.parse_args()
    unknown = [name for name in asked.models if name not in MODELS]
    if unknown:
        parser.error(f"no model {', '.join(unknown)}: use some of {', '.join(MODELS)}")
    return asked


def main() -> None:
    asked = _arguments()
    screen = Console(highlight=False, width=130)
    cases = []
    for name, size in product(asked.models or AVGPIPES, asked.batch_size):
        model = replace(MODELS[name], batch_size=size or MODELS[name].batch_size)
        contest = Contest(model, profile_of(model, reading=asked.reading))
        screen.print("\n".join(summary(model)))
        for workers, where in ((WORKERS, "all devices"), (None, "as many devices as are best")):
            found = rows(contest, workers)
            screen.print(table(f"{model.name}, {where}, batches of {model.batch_size}", found))
            listed = [
                {"system": system, **asdict(o), "described": o.described, "binds": o.binds}
                for system, o in found
                if o
            ]
            cases.append({"model": name, "batch_size": model.batch_size, "devices": where, "rows": listed})
    question = "the papers' systems on their emulated cluster, simulated"
    write_record("papers-forecast", question, {"reading": asked.reading, "cases": cases}, asked.out)


if __name__ == "__main__":
    main()
