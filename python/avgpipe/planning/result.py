"""What a partitioner found."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from itertools import pairwise

from avgpipe.units import format_bytes, format_seconds


@dataclass(frozen=True)
class Partition:
    """Which layers and how many workers each stage has, as ``Plan`` takes them, and what the method predicts.

    - boundaries: the first layers of stages 1 to K-1. replication: workers of each stage.
    - stage_s: per stage, the predicted seconds between two micro-batches that it finishes if it never waits: forward
      and backward over its replicas, or their synchronisation where that is longer.
    - value: of ``objective``, what the method made best: seconds, bytes or, for "2bw", samples per second.
    - memory_bytes: per stage, of one of its workers; empty where the method does not count memory.
    - micro_batch_size: samples. workers: how many there were to use. layers: of the model.
    - recompute: of "2bw": activations are computed again in the backward. placement: of "dapple": per stage, how many
      devices it has on each machine. notes: what to know besides, a sentence each.
    """

    method: str
    layers: int
    boundaries: list[int]
    replication: list[int]
    stage_s: list[float]
    objective: str
    value: float
    micro_batch_size: float
    workers: int
    memory_bytes: list[float] = field(default_factory=list)
    recompute: bool = False
    placement: list[list[int]] | None = None
    notes: tuple[str, ...] = ()

    def __post_init__(self) -> None:
        bounds = self.bounds
        if any(a >= b for a, b in pairwise(bounds)):
            raise ValueError(f"boundaries={self.boundaries}: must rise between 0 and {self.layers} layers")
        if len(self.replication) != self.stages or len(self.stage_s) != self.stages:
            raise ValueError(
                f"replication={self.replication} and stage_s={self.stage_s}: give one for each of {self.stages} stages"
            )

    @property
    def stages(self) -> int:
        return len(self.boundaries) + 1

    @property
    def bounds(self) -> list[int]:
        """First layer of every stage, then the number of layers."""
        return [0, *self.boundaries, self.layers]

    def __str__(self) -> str:
        """What was predicted, then a line for each stage."""
        used = min(sum(self.replication), self.workers)  # a worker may have several stages
        spare = "" if used == self.workers else f" of {self.workers}"
        many = "s" if self.stages > 1 else ""
        lines = [
            f"{self.method}: {self.layers} layers in {self.stages} stage{many} on {used}{spare} workers, micro-batches "
            f"of {self.micro_batch_size:g} samples",
            f"{self.objective}: {self._value()}",
        ]
        for k, (first, last) in enumerate(pairwise(self.bounds)):
            layers = f"layer {first}" if last == first + 1 else f"layers {first} to {last - 1}"
            lines.append(f"stage {k}: {layers}, {', '.join(self._about(k))}")
        return "\n".join([*lines, *self.notes])

    def _about(self, k: int) -> list[str]:
        workers = self.replication[k]
        said = [
            f"{workers} worker{'s' if workers > 1 else ''}",
            f"{format_seconds(self.stage_s[k])} per micro-batch",
        ]
        if self.memory_bytes:
            said.append(format_bytes(self.memory_bytes[k]))
        if self.placement is not None:
            machines = [(m, n) for m, n in enumerate(self.placement[k]) if n]
            said.append("on " + _machines(machines))
        return said

    def _value(self) -> str:
        if "bytes" in self.objective:
            return format_bytes(self.value)
        if "per second" in self.objective:
            return f"{self.value:.4g}"
        return format_seconds(self.value)


def _machines(machines: Sequence[tuple[int, int]]) -> str:
    """Runs of machines with as many devices each: "4 devices of machines 0 to 2, 1 of machine 3"."""
    runs: list[list[int]] = []
    for machine, count in machines:
        if runs and runs[-1][1] == machine - 1 and runs[-1][2] == count:
            runs[-1][1] = machine
        else:
            runs.append([machine, machine, count])
    words = [
        f"{count} of machine {a}" if a == b else f"{count} of each of machines {a} to {b}"
        for a, b, count in runs
    ]
    return ", ".join(words)
