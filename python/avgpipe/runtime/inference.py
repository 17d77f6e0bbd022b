"""Forward-only passes through all stages: evaluation and prediction.

The stages form a pipeline here too. A stage may run ahead of the last one by a few batches only: the first asks for the
result of an earlier batch, which every stage receives anyway, before it begins the next one.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from contextlib import ExitStack
from typing import Any, Protocol

from avgpipe.links.message import Key
from avgpipe.runtime.batch import batch_size, sample_count, split, to_device
from avgpipe.runtime.context import Position
from avgpipe.runtime.export import average_buffers
from avgpipe.runtime.skips import join, part
from avgpipe.runtime.worker import Worker

_AHEAD = 4  # batches that the first stage may be ahead of the last one's results


class LastStage(Protocol):
    """What the last stage does with a batch: sees each micro-batch's output, then makes the result that all ranks
    get.
    """

    def add(self, output: Any, target: Any, samples: int) -> None: ...

    def result(self) -> Any: ...


class Inference:
    """Passes of one kind over a worker's stages with the weights ``which``."""

    def __init__(self, worker: Worker, micro_batches: int, which: str | int) -> None:
        self._worker, self._micro_batches = worker, micro_batches
        self._pipeline = 0 if which == "reference" else int(which)
        self._speakers = worker.placement.speakers(self._pipeline)
        self._channel = self._pipeline if worker.placement.is_spread else 0
        self._owned = [k for k, seat in enumerate(self._speakers) if seat in worker.seats]
        self._has_last = len(self._speakers) - 1 in self._owned
        self._which = which

    def run(self, batches: Iterable[tuple[Any, Any]], last: Callable[[], LastStage]) -> Iterator[Any]:
        """The results of ``batches`` of (inputs, targets), in order, on every rank."""
        worker = self._worker
        with ExitStack() as stack:
            for k, seat in enumerate(self._speakers):
                is_reference = self._which == "reference"
                buffers = average_buffers(worker, k) if is_reference else {}
                if k in self._owned:
                    reference = worker.references[seat] if is_reference else None
                    replica = worker.replicas[seat, self._pipeline]
                    stack.enter_context(replica.inference(reference, buffers))
            pending: list[tuple[int, Any]] = []
            for batch, (inputs, targets) in enumerate(batches):
                pending.append((batch, self._forward(batch, inputs, targets, last())))
                if len(pending) > _AHEAD:
                    yield self._result(*pending.pop(0))
            for item in pending:
                yield self._result(*item)

    def _forward(self, batch: int, inputs: Any, targets: Any, last: LastStage) -> Any:
        samples = sample_count(inputs)
        parts = min(self._micro_batches, samples)
        chunks, answers = split(inputs, parts), split(targets, parts)
        for m in range(parts):
            value = chunks[m]
            skipped: dict[tuple[int, int], Any] = {}
            for k in self._owned:
                value = self._stage(k, batch, m, value, skipped)
            if self._has_last:
                last.add(value, to_device(answers[m], self._worker.device), batch_size(chunks[m]))
        if not self._has_last:
            return None
        result = last.result()
        placement = self._worker.placement
        for rank in range(placement.ranks):
            seat = placement.held_by(rank)[0]
            if seat not in self._worker.seats:
                self._worker.links[seat].send(
                    Key("R", self._channel, self._speakers[-1], seat, batch, 0), result
                )
        return result

    def _stage(self, k: int, batch: int, m: int, value: Any, skipped: dict[tuple[int, int], Any]) -> Any:
        """Stage ``k`` of a micro-batch: takes over from the stage before if that is elsewhere, and hands on.

        ``skipped``: what goes past other stages from one stage of this worker to another, by both.
        """
        worker = self._worker
        arrivals, departures = worker.model.skips[k]
        if k > 0 and k - 1 not in self._owned:
            value = self._receive(k - 1, k, batch, m)
        if arrivals:
            ends = [(route.stage, k) for route in arrivals]
            parts = [skipped.pop(e) if e[0] in self._owned else self._receive(*e, batch, m) for e in ends]
            value = join(value, arrivals, parts)
        value = to_device(value, worker.device)
        replica = worker.replicas[self._speakers[k], self._pipeline]
        output = replica.stage(value, Position(self._pipeline, batch, m))
        output, parts = part(output, departures) if departures else (output, [])
        if k + 1 < len(self._speakers) and k + 1 not in self._owned:
            self._send(k, k + 1, batch, m, output)
        for route, values in zip(departures, parts):
            if route.stage in self._owned:
                skipped[k, route.stage] = values
            else:
                self._send(k, route.stage, batch, m, values)
        return output

    def _send(self, k: int, to: int, batch: int, m: int, value: Any) -> None:
        self._worker.links[self._speakers[to]].send(self._key(k, to, batch, m), value)

    def _receive(self, source: int, k: int, batch: int, m: int) -> Any:
        key = self._key(source, k, batch, m)
        self._worker.scheduler.wait_for([key])
        return self._worker.mailbox.take(key)

    def _key(self, source: int, to: int, batch: int, m: int) -> Key:
        return Key("E", self._channel, self._speakers[source], self._speakers[to], batch, m)

    def _result(self, batch: int, result: Any) -> Any:
        """The result of a batch: made here, or received from the last stage."""
        if self._has_last:
            return result
        key = Key("R", self._channel, self._speakers[-1], self._worker.seats[0], batch, 0)
        self._worker.scheduler.wait_for([key])
        return self._worker.mailbox.take(key)
