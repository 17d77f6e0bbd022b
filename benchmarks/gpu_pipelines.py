"""Question: on one GPU, what do N pipelines of four stages on streams of their own cost or gain against plain PyTorch?

    python benchmarks/gpu_pipelines.py --out benchmarks/results/gpu_pipelines.json --trace build/gpu_pipelines.json.gz

Each row trains the same global batch: plain PyTorch in one piece, avgpipe as N = 1, 2 or 4 pipelines with N-th parts of
it, each in M micro-batches, with and without CUDA graphs where the model allows them. Rows run one after another, each
closed before the next begins: torch has 32 streams for a device, and more lanes would share them. Plain PyTorch comes
first and last, so that a machine whose pace changes shows. Medians of samples per second; the time of a round ends when
the device has done it. Prints one JSON object, which --out has after every row. The trace is torch.profiler's of two
pipelines: what the host takes for an action and the device for its kernels, and whether a copy ran while a kernel did.
"""

from __future__ import annotations

import argparse
import gzip
import json
import os
import statistics
import tempfile
import time
from bisect import bisect_right
from collections import defaultdict
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from itertools import pairwise
from pathlib import Path
from typing import Any
from unittest import mock

import torch
from torch import nn

import avgpipe
from avgpipe.runtime.streams import LaneStream
from avgpipe_lab.workloads.awd_lstm import AWDLSTMConfig, AWDLSTMLoss, awd_lstm_layers
from benchmarks.overlap import models

STAGES, MICRO_BATCHES = 4, 4
COPY, KERNEL = "gpu_memcpy", "kernel"  # categories in a trace
ACTION = "action "  # begins the names of what a lane does
PLAIN = "plain PyTorch"
TOP = 12  # kernels of a trace, by their time


@dataclass(frozen=True)
class Case:
    name: str
    layers: Callable[[], list[nn.Module]]
    loss: Callable[[], Any]
    vocabulary: int
    samples: int  # in the global batch
    length: int
    graphs: bool  # the same kernels every time


def cases(small: bool, width: int) -> list[Case]:
    """small: to see that it runs. width: of the transformer; narrow ones measure the host."""
    blocks, samples, length = (4, 16, 16) if small else (8, 64, 128)
    config = AWDLSTMConfig(101, 8, 16, 3) if small else AWDLSTMConfig(8192, 400, 1150, 3)

    return [
        Case(
            "awd-lstm",
            lambda: awd_lstm_layers(config),
            lambda: AWDLSTMLoss(config.alpha, config.beta),
            *(config.vocabulary, samples, 10 if small else 70, False),
        ),
        Case(
            "transformer",
            lambda: models.transformer(width, blocks, length=length),
            lambda: models.loss,
            *(models.VOCABULARY, samples, length, True),
        ),
    ]


class Plain:
    """One step of plain PyTorch per global batch."""

    def __init__(self, case: Case, device: str) -> None:
        self._model = nn.Sequential(*case.layers()).to(device).train()
        self._loss, self._device = case.loss(), device
        if isinstance(self._loss, nn.Module):
            self._loss.train()
        self._optimizer = torch.optim.AdamW(self._model.parameters(), lr=1e-4)

    def run(self, batches: list[Any]) -> float:
        losses = []
        for x, y in batches:
            x, y = (t.to(self._device, non_blocking=True) for t in (x, y))
            self._optimizer.zero_grad()
            loss = self._loss(self._model(x), y)
            loss.backward()
            self._optimizer.step()
            losses.append(loss.detach())
        return float(losses[-1])

    def close(self) -> None:
        pass


class Pipelines:
    """N pipelines that stream and share each batch."""

    def __init__(self, case: Case, device: str, pipelines: int, graphs: bool) -> None:
        parts = pipelines * MICRO_BATCHES
        plan = avgpipe.Plan(stages=STAGES, pipelines=pipelines, micro_batches=parts, warmup_rounds=0)
        self._pipeline = avgpipe.Pipeline(
            case.layers(),
            plan,
            loss_fn=case.loss(),
            optimizer=lambda parameters: torch.optim.AdamW(parameters, lr=1e-4),
            device=device,
            extensions=[avgpipe.CudaGraphs()] if graphs else [],
        )

    def run(self, batches: list[Any]) -> float:
        return [result.loss for result in self._pipeline.train(batches)][-1]

    def close(self) -> None:
        self._pipeline.close()


def contenders(case: Case, device: str) -> dict[str, Callable[[], Any]]:
    """What makes each row."""
    rows: dict[str, Callable[[], Any]] = {PLAIN: partial(Plain, case, device)}
    for n in (1, 2, 4):
        rows[f"avgpipe, N = {n}"] = partial(Pipelines, case, device, n, False)
        if case.graphs and device == "cuda":
            rows[f"avgpipe, N = {n}, graphs"] = partial(Pipelines, case, device, n, True)
    return {**rows, f"{PLAIN}, again": rows[PLAIN]}


def batches_of(case: Case, count: int) -> list[Any]:
    generator = torch.Generator().manual_seed(0)
    shape = case.samples, case.length + 1
    made = [torch.randint(case.vocabulary, shape, generator=generator) for _ in range(count)]
    return [(t[:, :-1].contiguous(), t[:, 1:].contiguous()) for t in made]


def wait(device: str) -> None:
    if device == "cuda":
        torch.cuda.synchronize()


def measure(case: Case, device: str, rounds: int, count: int) -> Iterator[dict[str, Any]]:
    batches, base = batches_of(case, count), 0.0
    for name, make in contenders(case, device).items():
        try:
            rates = measure_row(make(), batches, case, device, rounds)
        except RuntimeError as error:  # too little memory, say: the other rows may run
            yield {"name": name, "failed": " ".join(str(error).split())[:200]}
            continue
        rate = statistics.median(rates)
        base = base or rate  # the first one's
        figures = {"samples_per_s": rate, "least": min(rates), "most": max(rates)}
        yield {
            "name": name,
            **{k: round(v, 2) for k, v in figures.items()},
            "against_plain": round(rate / base, 3),
        }


def measure_row(row: Any, batches: list[Any], case: Case, device: str, rounds: int) -> list[float]:
    """Samples per second of each round, after one that warms up."""
    rates = []
    try:
        for _ in range(rounds + 1):
            wait(device)
            start = time.perf_counter()
            row.run(batches)
            wait(device)
            rates.append(len(batches) * case.samples / (time.perf_counter() - start))
    finally:
        row.close()
    return rates[1:]


def trace(case: Case, device: str, path: Path | None) -> dict[str, Any]:
    """Profile two pipelines: their actions, their kernels, and which of them ran at once."""
    row, batches = Pipelines(case, device, 2, False), batches_of(case, 4)
    row.run(batches)
    wait(device)
    with labelled(), torch.profiler.profile() as profiler:
        row.run(batches)
        wait(device)
    row.close()
    with tempfile.TemporaryDirectory() as folder:
        file = Path(folder) / "trace.json"
        profiler.export_chrome_trace(str(file))
        text = file.read_text()
    if path is not None:
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(gzip.compress(text.encode()))
    events = json.loads(text)["traceEvents"]
    return {**overlap(events), "actions": actions(events), "kernels_by_time": kernels_by_time(events)}


@contextmanager
def labelled() -> Iterator[None]:
    """Name each action of a lane in the profiler's trace."""
    step = LaneStream.step

    @contextmanager
    def named(lane: LaneStream, place: Any, *rest: Any, **more: Any) -> Iterator[None]:
        kind = "of no training" if place is None else place[4]
        with torch.profiler.record_function(f"{ACTION}{kind}"), step(lane, place, *rest, **more):
            yield

    with mock.patch.object(LaneStream, "step", named):
        yield


def actions(events: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Of a Chrome trace: what an action of each kind takes the host, and the device for the kernels that it launched.

    One thread issues all actions and waits for autograd's, which launches backwards' kernels meanwhile: a launch
    belongs to the action during which it happened.
    """
    spans = [e for e in events if e.get("cat") == "user_annotation" and e.get("name", "").startswith(ACTION)]
    spans.sort(key=lambda e: e["ts"])
    begins = [e["ts"] for e in spans]
    by_launch = {e["args"]["correlation"]: e["dur"] for e in events if e.get("cat") == KERNEL}
    kernels: dict[int, list[float]] = defaultdict(list)  # by action
    for e in events:
        n = bisect_right(begins, e.get("ts", 0)) - 1
        if e.get("cat") in ("cuda_runtime", "cuda_driver") and n >= 0:
            took = by_launch.get(e.get("args", {}).get("correlation"))
            if took is not None and e["ts"] <= spans[n]["ts"] + spans[n]["dur"]:
                kernels[n].append(took)
    found = []
    for kind in sorted({e["name"] for e in spans}):
        of_kind = [n for n, e in enumerate(spans) if e["name"] == kind]
        device = [sum(kernels[n]) for n in of_kind]
        found.append(
            {
                "action": kind.removeprefix(ACTION),
                "count": len(of_kind),
                "host_us": round(statistics.median(spans[n]["dur"] for n in of_kind), 1),
                "kernels": round(statistics.mean(len(kernels[n]) for n in of_kind), 1),
                "device_us": round(statistics.median(device), 1),
            }
        )
    between = [b["ts"] - a["ts"] - a["dur"] for a, b in pairwise(spans)]
    if between:
        found.append(
            {"action": "between", "count": len(between), "host_us": round(statistics.median(between), 1)}
        )
    return found


def kernels_by_time(events: list[dict[str, Any]]) -> list[dict[str, Any]]:
    times: dict[str, list[float]] = defaultdict(list)
    for e in events:
        if e.get("cat") == KERNEL:
            times[e["name"][:80]].append(e["dur"])
    longest = sorted(times.items(), key=lambda item: -sum(item[1]))[:TOP]
    return [
        {
            "kernel": name,
            "count": len(t),
            "total_us": round(sum(t), 1),
            "mean_us": round(statistics.mean(t), 1),
        }
        for name, t in longest
    ]


def overlap(events: list[dict[str, Any]]) -> dict[str, Any]:
    """Of a Chrome trace: copies to the device, those during which a kernel ran, and streams with kernels."""

    def spans(category: str) -> list[tuple[float, float, Any]]:
        found = [e for e in events if e.get("ph") == "X" and e.get("cat") == category]
        return [(e["ts"], e["ts"] + e["dur"], e["args"].get("stream")) for e in found if _counts(e)]

    def _counts(event: dict[str, Any]) -> bool:
        return event["cat"] == KERNEL or "HtoD" in event["name"]

    copies, kernels = spans(COPY), spans(KERNEL)
    during = sum(any(a < end and start < b for a, b, _ in kernels) for start, end, _ in copies)
    at_once = sum(one[1] > other[0] and one[2] != other[2] for one, other in pairwise(sorted(kernels)))
    return {
        "copies_to_the_device": len(copies),
        "copies_during_a_kernel": during,
        "kernels": len(kernels),
        "kernels_that_begin_during_one_of_another_stream": at_once,
        "streams_with_kernels": len({stream for *_, stream in kernels}),
    }


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--device", choices=["cuda", "cpu"], default="cuda")
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--batches", type=int, default=16, help="global batches in a round")
    parser.add_argument("--small", action="store_true", help="tiny models: to see that it runs")
    parser.add_argument("--width", type=int, help="of the transformer; default 1024, with --small 32")
    parser.add_argument("--trace", type=Path, help="where torch.profiler's Chrome trace goes, compressed")
    parser.add_argument("--out", type=Path, help="a file for the record, which is printed in any case")
    options = parser.parse_args()
    if options.device == "cuda" and not torch.cuda.is_available():
        parser.error(f"torch {torch.__version__} sees no CUDA device: use --device cpu --small")
    width = options.width or (32 if options.small else 1024)
    record: dict[str, Any] = {
        "question": "pipelines on streams of one GPU",
        "date": time.strftime("%Y-%m-%d"),
        "device": torch.cuda.get_device_name() if options.device == "cuda" else "cpu",
        "versions": {"torch": torch.__version__, "cuda": torch.version.cuda},
        "stages": STAGES,
        "micro_batches": MICRO_BATCHES,
        "width": width,
        "processors": os.cpu_count(),
        "verdict": "nothing was measured",
        "rows": {},
    }

    def write() -> str:
        record["verdict"] = verdict(record["rows"])
        text = json.dumps(record, indent=1)
        if options.out:
            options.out.write_text(text + "\n")
        return text

    found = cases(options.small, width)
    for case in reversed(found):  # what a machine that is lent for minutes should see first
        rows = record["rows"][case.name] = []
        for row in measure(case, options.device, options.rounds, options.batches):
            rows.append(row)
            write()
        if case is found[-1]:
            record["trace"] = trace(case, options.device, options.trace)
    print(write())


def verdict(rows: dict[str, list[dict[str, Any]]]) -> str:
    """The best of ours beside plain PyTorch, by model."""
    parts = []
    for name, made in rows.items():
        ours = [row for row in made if "against_plain" in row and not row["name"].startswith(PLAIN)]
        if ours:
            best = max(ours, key=lambda row: row["against_plain"])
            parts.append(
                f"{name}: {best['name'].removeprefix('avgpipe, ')} {best['against_plain']:.2f} times plain"
            )
        parts += [f"{name}, {row['name']} failed" for row in made if "failed" in row]
    return "; ".join(parts) or "nothing was measured"


if __name__ == "__main__":
    main()
