"""Three ways to issue a batch of each lane: kernel by kernel, a graph for each action, or a graph for the batch."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

from benchmarks.one_card.arrivals import Waits
from benchmarks.one_card.lane import Lane
from benchmarks.one_card.neighbours import Act, Worker

Batch = Callable[[], None]  # issues a batch of each lane


def in_turn(
    worker: Worker, lanes: Sequence[Lane], waits: Sequence[Waits], run: Callable[[int, Act], None]
) -> None:
    """Issue the actions of all lanes in turn, as one thread of a scheduler does, then their steps."""
    for lane, wait in zip(lanes, waits):
        with lane.on_stream():
            wait.begin()
    for act in worker.row:
        for number, (lane, wait) in enumerate(zip(lanes, waits)):
            with lane.on_stream():
                wait.before(act)
                run(number, act)
                wait.after(act)
    for lane in lanes:
        with lane.on_stream():
            lane.step()


def eager(worker: Worker, lanes: Sequence[Lane], waits: Sequence[Waits]) -> Batch:
    return lambda: in_turn(worker, lanes, waits, lambda number, act: lanes[number].run(act))


def graph_per_action(worker: Worker, lanes: Sequence[Lane], waits: Sequence[Waits]) -> Batch:
    graphs: list[dict[Act, Any]] = [
        {act: lane.capture(partial(lane.run, act)) for act in worker.row} for lane in lanes
    ]
    return lambda: in_turn(worker, lanes, waits, lambda number, act: graphs[number][act].replay())


def graph_per_batch(worker: Worker, lanes: Sequence[Lane], waits: Sequence[Waits]) -> Batch:
    """Forwards, backwards, the neighbours and the step of a lane in one launch."""
    graphs = [lane.capture(eager(worker, [lane], [wait])) for lane, wait in zip(lanes, waits)]

    def batch() -> None:
        for lane, graph in zip(lanes, graphs):
            with lane.on_stream():
                graph.replay()

    return batch


WAYS: dict[str, Callable[[Worker, Sequence[Lane], Sequence[Waits]], Batch]] = {
    "eager": eager,
    "actions": graph_per_action,
    "row": graph_per_batch,
}
