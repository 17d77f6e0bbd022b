"""The sizes of plans that are considered: how many stages, replicas, pipelines and micro-batches."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import NamedTuple

from avgpipe.plan import Plan

PIPELINES = (1, 2, 3)
_FEW_WORKERS = 16  # up to which every number of stages is tried, also where it leaves workers idle
_IDLE = 0.02  # the share of the workers that more may leave idle
_OF_A_REPLICA = (1, 2, 3, 4, 6, 8, 12, 16, 24, 32, 48, 64, 96, 128, 192, 256, 384, 512)


class Shape(NamedTuple):
    """width: replicas of each stage. micro_batches: of a batch, which the replicas share."""

    stages: int
    width: int
    pipelines: int
    micro_batches: int

    @property
    def workers(self) -> int:
        return self.stages * self.width

    def plan(self, recompute: str = "never") -> Plan:
        """Without partition, and with the schedule's own advance."""
        return Plan(
            stages=self.stages,
            pipelines=self.pipelines,
            micro_batches=self.micro_batches,
            system="data-parallel" if self.stages == 1 < self.width else "avgpipe",
            schedule="1f1b" if self.stages == 1 else "advance-forward",
            replication=[self.width] * self.stages if self.width > 1 else None,
            recompute=recompute,
        )


@dataclass(frozen=True)
class Space:
    """workers, layers: of the cluster and the model. batch_size: samples of one pipeline's batch. pipelines,
    micro_batches: what to try; micro_batches None: a sensible few. lanes: whether pipelines that share one device may
    gain by that alone.

    ValueError for what cannot be.
    """

    workers: int
    layers: int
    batch_size: int
    pipelines: tuple[int, ...] = PIPELINES
    micro_batches: tuple[int, ...] | None = None
    lanes: bool = False

    def __post_init__(self) -> None:
        if type(self.batch_size) is not int or self.batch_size < 1:
            raise ValueError(f"batch_size={self.batch_size!r}: must be a whole number of at least 1")
        for name in ("pipelines", "micro_batches"):
            values = getattr(self, name)
            if values is not None and (not values or any(type(v) is not int or v < 1 for v in values)):
                raise ValueError(f"{name}={values!r}: must be whole numbers of at least 1")
        over = [m for m in self.micro_batches or () if m > self.batch_size]
        if over:
            raise ValueError(
                f"micro_batches={over}: a batch of {self.batch_size} samples has not so many parts"
            )

    def shapes(self) -> Iterator[Shape]:
        alone = self.pipelines if self.lanes else (1,)
        yield from self._of(1, 1, alone)
        if self.replicas > 1:
            yield from self._of(1, self.replicas, alone)
        widths = {k: self._width(k) for k in range(2, min(self.workers, self.layers) + 1)}
        most = max((k * width for k, width in widths.items()), default=0)
        for stages, width in widths.items():
            if self.workers <= _FEW_WORKERS or stages * width >= (1 - _IDLE) * most:
                yield from self._of(stages, width, self.pipelines)

    @property
    def replicas(self) -> int:
        """Of the whole model, for data parallelism."""
        return self._width(1)

    def _width(self, stages: int) -> int:
        """As many replicas as there are workers for, but none without a sample, and all with as many micro-batches."""
        most = self.workers // stages
        if self.micro_batches is None:
            return min(most, self.batch_size)
        return max(w for m in self.micro_batches for w in range(1, min(m, most) + 1) if m % w == 0)

    def _of(self, stages: int, width: int, pipelines: Sequence[int]) -> Iterator[Shape]:
        for m in self.parts(width):
            for n in pipelines:
                yield Shape(stages, width, n, m)

    def parts(self, width: int) -> list[int]:
        """Micro-batches of a batch that ``width`` replicas share alike."""
        if self.micro_batches is not None:
            return [m for m in self.micro_batches if m % width == 0]
        return [width * m for m in _OF_A_REPLICA if width * m <= self.batch_size]


def profiled_sizes(samples: int) -> tuple[int, ...]:
    """Micro-batches that tell of all up to a whole batch: a few powers of two below, and the batch."""
    sizes = [samples]
    while len(sizes) < 5 and sizes[-1] > 1:
        sizes.append(-(-sizes[-1] // 2))
    return tuple(sorted(set(sizes)))
