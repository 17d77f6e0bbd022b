"""Question: on one worker of K stages, what do N lanes gain when neighbours are emulated and nothing else is?

    python -m benchmarks.one_card.one_worker --out build/one-worker.json          within --budget seconds, on a GPU
    python -m benchmarks.one_card.one_worker --device cpu --small                 anywhere: to see that it runs

The upper bound of any scheduler, so without avgpipe. The GPU is worker k of K. A lane is a copy of the stage with its
own batch; its neighbours' messages arrive when they would (``neighbours.py``), so bubbles, waits and small
micro-batches are real. The same batches are issued in three ways (``issue.py``). The most important rows are first,
each is in --out when it is done, and rows for which no time is left are named there. Some more rows need the kernels of
avgpipe: how much of an elastic update is hidden beside compute, and what it takes beside AdamW (``updates.py``); and
how far kernels fill the multiprocessors, from torch.profiler's trace (``fill_measured.py``).
"""

from __future__ import annotations

import argparse
import gc
import os
import statistics
import time
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path
from typing import Any

import torch

from benchmarks.one_card.arrivals import DeviceWaits, HostWaits, Waits, cycles_per_s
from benchmarks.one_card.issue import WAYS, Batch
from benchmarks.one_card.lane import Lane
from benchmarks.one_card.neighbours import Act, Worker
from benchmarks.one_card.networks import StageModel, stage_models
from benchmarks.one_card.record import RowsRecord

STAGES = 4
PCIE_3 = 1 / 12e9  # seconds for a byte
DTYPES = {"bf16": torch.bfloat16, "tf32": None, "fp32": None}
_ROUNDS, _ROUND_S = 3, 0.5


@dataclass(frozen=True)
class Case:
    """One row.

    Attributes:
        dtype: "bf16" by autocast, "tf32" or "fp32".
        how: A key of ``WAYS``.
        k: The stage.
        wire: Seconds for a byte between neighbours.
        apart: Whether lanes begin an N-th of a batch after one another, not together.
    """

    model: str
    dtype: str
    M: int
    N: int
    how: str
    k: int
    wire: float = 0.0
    apart: bool = False


def cases(models: list[str], ways: list[str], dtype: str) -> Iterator[Case]:
    """Yield what to measure, by its worth: groups of cases, each for all models.

    Lanes that begin together share the device, and may wait in the same bubbles, so they also begin apart.
    """
    one: dict[str, Any] = {"M": 4, "how": "row", "k": 0}
    all_counts: list[dict[str, Any]] = [{"N": 1}]
    all_counts += [{"N": n, "apart": apart} for n in (2, 4) for apart in (False, True)]
    slow_ways: list[dict[str, Any]] = [{"how": way, "N": n} for way in ("eager", "actions") for n in (1, 2)]
    groups: list[list[dict[str, Any]]] = [
        [one | more for more in all_counts],
        [one | more for more in slow_ways],
        [one | {"M": 8} | more for more in all_counts],
        [one | {"k": 3} | more for more in all_counts],
        [one | {"wire": PCIE_3} | more for more in all_counts[:3]],
        [one | {"how": way, "N": 4} for way in ("eager", "actions")],
        [one | {"k": 1} | more for more in all_counts],
        [one | {"M": 8} | more for more in (*slow_ways, {"how": "actions", "N": 4})],
        [one | {"M": 8, "k": 3} | more for more in all_counts],
    ]
    for group in groups:
        for model in models:
            for case in group:
                if case["how"] in ways:
                    yield Case(model, dtype, **case)


class Card:
    """The device on which lanes run, and the times of a stage that is alone there."""

    def __init__(self, device: torch.device, models: list[StageModel]) -> None:
        self.device, self._models = device, {model.name: model for model in models}
        self.on_cuda = device.type == "cuda"
        self.cycles_per_s = cycles_per_s() if self.on_cuda else 0.0
        self._alone: dict[tuple[str, str, int], tuple[float, float]] = {}

    def has(self, name: str) -> bool:
        return name in self._models

    def model(self, name: str) -> StageModel:
        return self._models[name]

    def lanes(self, case: Case, count: int) -> list[Lane]:
        made = [Lane(self.model(case.model), case.M, DTYPES[case.dtype], self.device) for _ in range(count)]
        for lane in made:
            lane.warm_up()
        self.wait()
        return made

    def worker(self, case: Case) -> Worker:
        """The worker of a case, with the times of its stage alone."""
        forward_s, backward_s = self._times(case)
        model = self.model(case.model)
        element = 2 if case.dtype == "bf16" else 4
        size = model.batch // case.M * model.sample[0] * model.sample[1] * element
        # Forwards may run ahead as far as there are stages: messages then hide behind compute.
        return Worker(STAGES, case.k, case.M, STAGES, forward_s, backward_s, size * case.wire)

    def waits(self, worker: Worker, lane: Lane) -> Waits:
        return DeviceWaits(worker, lane.stream, self.cycles_per_s) if self.on_cuda else HostWaits(worker)

    def _times(self, case: Case) -> tuple[float, float]:
        """Seconds of a forward and of a backward, as graphs where there are any: the device's own."""
        key = case.model, case.dtype, case.M
        if key not in self._alone:
            (lane,) = self.lanes(case, 1)
            runs = [partial(lane.run, Act(kind, 0)) for kind in "FB"]
            if self.on_cuda:
                graphs = [lane.capture(run) for run in runs]
                runs = [graph.replay for graph in graphs]
            forward_s, both_s = (self._best(lane, runs[: n + 1]) for n in (0, 1))
            self._alone[key] = forward_s, max(both_s - forward_s, 0.0)
        return self._alone[key]

    def _best(self, lane: Lane, runs: list[Any]) -> float:
        found = []
        for _ in range(5):
            with lane.on_stream():
                self.wait()
                begin = time.perf_counter()
                for _ in range(4):
                    for run in runs:
                        run()
                self.wait()
            found.append((time.perf_counter() - begin) / 4)
        return min(found)

    def begin(self, lanes: list[Lane], after_s: float) -> None:
        """Hold each lane up so long after the one before."""
        for number, lane in enumerate(lanes):
            if self.on_cuda and number and after_s:
                with lane.on_stream():
                    torch.cuda._sleep(int(number * after_s * self.cycles_per_s))

    def wait(self) -> None:
        if self.on_cuda:
            torch.cuda.synchronize()

    def clear(self) -> None:
        """Give back what earlier rows held, and forget their peak."""
        gc.collect()
        if self.on_cuda:
            torch.cuda.empty_cache()
            torch.cuda.reset_peak_memory_stats()


def measure(card: Card, case: Case) -> dict[str, Any]:
    """Return samples per second of all lanes, the host's share of the time, and the peak of memory."""
    worker = card.worker(case)
    card.clear()
    lanes = card.lanes(case, case.N)
    batch = WAYS[case.how](worker, lanes, [card.waits(worker, lane) for lane in lanes])
    after_s = worker.batch_s() / case.N if case.apart else 0.0
    seconds, issued = timed(card, batch, lambda: card.begin(lanes, after_s))
    samples = case.N * card.model(case.model).batch
    found = {
        "F_us": round(1e6 * worker.forward_s),
        "B_us": round(1e6 * worker.backward_s),
        "samples_per_s": round(samples / seconds, 1),
        "batch_ms": round(1e3 * seconds, 3),
        "flush_ms": round(1e3 * worker.batch_s(), 3),
        "busy_if_serial": round(case.N * case.M * (worker.forward_s + worker.backward_s) / seconds, 3),
        "host_share": round(issued / seconds, 3),
    }
    if card.on_cuda:
        found["peak_mib"] = round(torch.cuda.max_memory_allocated() / 2**20)
        found["reserved_mib"] = round(torch.cuda.max_memory_reserved() / 2**20)
    return found


def timed(card: Card, batch: Batch, begin_lanes: Callable[[], None] = lambda: None) -> tuple[float, float]:
    """Seconds of a batch, and of issuing it: medians of some rounds, each with what lanes begin later."""
    batch()
    card.wait()
    begin = time.perf_counter()
    batch()
    card.wait()
    count = max(2, round(_ROUND_S / (time.perf_counter() - begin)))
    taken, issuing = [], []
    for _ in range(_ROUNDS):
        begin = time.perf_counter()
        begin_lanes()
        for _ in range(count):
            batch()
        issuing.append((time.perf_counter() - begin) / count)
        card.wait()
        taken.append((time.perf_counter() - begin) / count)
    return statistics.median(taken), statistics.median(issuing)


def main() -> None:
    os.environ.setdefault(
        "CUDA_DEVICE_MAX_CONNECTIONS", "32"
    )  # before CUDA starts: lanes must not share queues
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--device", choices=["cuda", "cpu"], default="cuda")
    parser.add_argument("--small", action="store_true", help="tiny models: to see that it runs")
    parser.add_argument("--dtype", choices=DTYPES, default="bf16")
    parser.add_argument("--models", nargs="+", help="default: all")
    parser.add_argument("--budget", type=float, default=260, help="seconds after which no row begins")
    parser.add_argument("--rows", type=int, help="how many rows to measure; by default all")
    parser.add_argument("--out", type=Path, help="a file for the record, written after every row")
    options = parser.parse_args()
    if options.device == "cuda" and not torch.cuda.is_available():
        parser.error(f"torch {torch.__version__} sees no CUDA device: use --device cpu --small")
    run(options)


def run(options: argparse.Namespace) -> None:
    torch.manual_seed(0)
    torch.backends.cuda.matmul.allow_tf32 = options.dtype != "fp32"
    device = torch.device("cuda", 0) if options.device == "cuda" else torch.device("cpu")
    head = {
        "question": "what do lanes gain on one worker with emulated neighbours?",
        "date": time.strftime("%Y-%m-%d"),
        "device": torch.cuda.get_device_name() if device.type == "cuda" else "cpu",
        "versions": {"torch": torch.__version__, "cuda": torch.version.cuda},
        "stages": STAGES,
    }
    record = RowsRecord(head, options.budget, options.out)
    models = [m for m in stage_models(options.small) if m.name in (options.models or [m.name])]
    card = Card(device, models)
    ways = list(WAYS) if card.on_cuda else ["eager"]
    planned: list[tuple[dict[str, Any], Any]] = [
        (asdict(case), partial(measure, card, case))
        for case in cases([m.name for m in models], ways, options.dtype)
    ]
    first = next((n for n, (row, _) in enumerate(planned) if row["M"] != 4), len(planned))
    planned[first:first] = more_rows(card, options.dtype)  # short ones, after what answers the question
    for number, (row, work) in enumerate(planned):
        if record.is_late or number == options.rows:
            for left, _ in planned[number:]:
                record.leave_out(left)
            break
        record.measure(row, work)


def more_rows(card: Card, dtype: str) -> list[tuple[dict[str, Any], Any]]:
    """Rows that need avgpipe's kernels, or a profiler."""
    from benchmarks.one_card import fill_measured, updates

    return [*updates.rows(card, dtype), *(fill_measured.rows(card, dtype) if card.on_cuda else [])]


if __name__ == "__main__":
    main()
