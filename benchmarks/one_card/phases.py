"""A model, without a measurement: what N pipelines gain by bubbles, by how a device runs two of their actions at once.

    python -m benchmarks.one_card.phases

K equal workers, a backward twice a forward, M micro-batches, each pipeline flushes after its own batch, no messages:

    sharing      Actions on streams share the device, as kernels that fill it do: each of two takes twice as long. So
                 pipelines do everything together, and wait in the same bubbles.
    ranked       Pipelines share the device, but the first one's actions interrupt the second one's, and so on, as
                 kernels on streams of different priorities do, block by block.
    in turn      A device runs one action at a time, of those that are ready the one that was ready first.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field

from benchmarks.one_card.neighbours import Act, Worker
from benchmarks.tables.markdown import table

STAGES = 4
FORWARD_S, BACKWARD_S = 1.0, 2.0
WAYS = ("sharing", "ranked", "in turn")
_BATCHES = 60  # of each pipeline: their first and last ones count for little
_LITTLE = 1e-9


@dataclass
class _Running:
    act: Act
    left_s: float
    since_s: float


@dataclass
class _Device:
    """A worker with the next action of each pipeline."""

    row: list[Act]
    places: list[int]  # of each pipeline: how many actions it has done
    running: dict[int, _Running] = field(default_factory=dict)

    def next(self, pipeline: int) -> tuple[int, Act] | None:
        batch, place = divmod(self.places[pipeline], len(self.row))
        return (batch, self.row[place]) if batch < _BATCHES else None

    def rates(self, way: str) -> dict[int, float]:
        if way == "sharing" or not self.running:
            return {i: 1 / len(self.running) for i in self.running}
        first = min(self.running, key=lambda i: (self.running[i].since_s if way == "in turn" else 0.0, i))
        return {first: 1.0}


def makespan_s(pipelines: int, micro_batches: int, way: str, stages: int = STAGES) -> float:
    """Return the seconds in which each pipeline does ``_BATCHES`` batches."""
    devices = [_Device(Worker(stages, k, micro_batches).row, [0] * pipelines) for k in range(stages)]
    done: set[tuple[int, int, int, Act]] = set()  # stage, pipeline, batch, action
    now = 0.0
    while True:
        for k, i, act in list(_ready(devices, done, pipelines)):
            devices[k].running[i] = _Running(act, FORWARD_S if act.kind == "F" else BACKWARD_S, now)
        rates = [device.rates(way) for device in devices]
        ends = [devices[k].running[i].left_s / rate for k, of in enumerate(rates) for i, rate in of.items()]
        if not ends:
            return now
        step = min(ends)
        now += step
        for k, of in enumerate(rates):
            for i, rate in of.items():
                running = devices[k].running[i]
                running.left_s -= step * rate
                if running.left_s < _LITTLE:
                    batch = devices[k].places[i] // len(devices[k].row)
                    done.add((k, i, batch, running.act))
                    devices[k].places[i] += 1
                    del devices[k].running[i]


def _ready(
    devices: list[_Device], done: set[tuple[int, int, int, Act]], pipelines: int
) -> Iterator[tuple[int, int, Act]]:
    """Yield what can begin: the next action of a pipeline on a worker, if its input is there."""
    last = len(devices) - 1
    for k, device in enumerate(devices):
        for i in range(pipelines):
            following = device.next(i)
            if i in device.running or following is None:
                continue
            batch, act = following
            if act.kind == "F":
                ready = k == 0 or (k - 1, i, batch, act) in done
            else:
                ready = k == last or (k + 1, i, batch, act) in done
            if ready:
                yield k, i, act


def gain(pipelines: int, micro_batches: int, way: str) -> float:
    """Return batches per second relative to one pipeline."""
    return pipelines * makespan_s(1, micro_batches, way) / makespan_s(pipelines, micro_batches, way)


def phases_table() -> str:
    """Return the gains of two and four pipelines, in each way."""
    rows = [
        (m, f"{(m + STAGES - 1) / m:.2f}", *(f"{gain(n, m, way):.2f}" for n in (2, 4) for way in WAYS))
        for m in (4, 8)
    ]
    heads = [f"N = {n}, {way}:" for n in (2, 4) for way in WAYS]
    return table(" | ".join(["M:", "most:", *heads]), rows)


if __name__ == "__main__":
    print(phases_table())
