"""Question: on one GPU, what do N pipelines of four stages on streams of their own cost or gain against plain PyTorch?

    python benchmarks/gpu_pipelines.py --out benchmarks/results/gpu_pipelines.json --trace build/gpu_pipelines.json.gz

Each row trains the same global batch: plain PyTorch in one piece, avgpipe as N = 1, 2 or 4 pipelines with N-th parts of
it, each in M micro-batches, with and without CUDA graphs where the model allows them. Rounds are interleaved, medians
of samples per second; the time of a round ends when the device has done it. Prints one JSON object. The trace is
torch.profiler's of two pipelines; the record says whether a copy of a batch ran while a kernel did.
"""

from __future__ import annotations

import argparse
import gzip
import json
import os
import statistics
import tempfile
import time
from collections.abc import Callable
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from typing import Any

import torch
from torch import nn

import avgpipe
from avgpipe.workloads.awd_lstm import AWDLSTMConfig, AWDLSTMLoss, awd_lstm_layers
from benchmarks.overlap import models

STAGES, MICRO_BATCHES = 4, 4
COPY, KERNEL = "gpu_memcpy", "kernel"  # categories in a trace


@dataclass(frozen=True)
class Case:
    name: str
    layers: Callable[[], list[nn.Module]]
    loss: Callable[[], Any]
    vocabulary: int
    samples: int  # in the global batch
    length: int
    graphs: bool  # the same kernels every time


def cases(small: bool) -> list[Case]:
    """small: to see that it runs."""
    width, blocks, samples, length = (32, 4, 16, 16) if small else (512, 8, 64, 128)
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
        plan = avgpipe.Plan(stages=STAGES, pipelines=pipelines, micro_batches=pipelines * MICRO_BATCHES)
        self._pipeline = avgpipe.Pipeline(
            case.layers(),
            plan,
            loss_fn=case.loss(),
            optimizer=lambda parameters: torch.optim.AdamW(parameters, lr=1e-4),
            device=device,
            **({"cuda_graphs": True} if graphs else {}),
        )

    def run(self, batches: list[Any]) -> float:
        return [result.loss for result in self._pipeline.train(batches)][-1]

    def close(self) -> None:
        self._pipeline.close()


def contenders(case: Case, device: str) -> dict[str, Any]:
    rows: dict[str, Any] = {"plain PyTorch": Plain(case, device)}
    for n in (1, 2, 4):
        rows[f"avgpipe, N = {n}"] = Pipelines(case, device, n, False)
        if case.graphs and device == "cuda":
            rows[f"avgpipe, N = {n}, graphs"] = Pipelines(case, device, n, True)
    return rows


def batches_of(case: Case, count: int) -> list[Any]:
    generator = torch.Generator().manual_seed(0)
    shape = case.samples, case.length + 1
    made = [torch.randint(case.vocabulary, shape, generator=generator) for _ in range(count)]
    return [(t[:, :-1].contiguous(), t[:, 1:].contiguous()) for t in made]


def wait(device: str) -> None:
    if device == "cuda":
        torch.cuda.synchronize()


def measure(case: Case, device: str, rounds: int, count: int) -> list[dict[str, Any]]:
    batches, rows = batches_of(case, count), contenders(case, device)
    rates: dict[str, list[float]] = {name: [] for name in rows}
    try:
        for n in range(rounds + 1):
            for name, row in rows.items():
                wait(device)
                start = time.perf_counter()
                row.run(batches)
                wait(device)
                if n > 0:  # the first one warms up
                    rates[name].append(count * case.samples / (time.perf_counter() - start))
    finally:
        for row in rows.values():
            row.close()
    base = statistics.median(rates["plain PyTorch"])
    return [
        {
            "name": name,
            "samples_per_s": round(statistics.median(r), 2),
            "against_plain": round(statistics.median(r) / base, 3),
            "least": round(min(r), 2),
            "most": round(max(r), 2),
        }
        for name, r in rates.items()
    ]


def trace(case: Case, path: Path | None) -> dict[str, Any]:
    """Profile two pipelines; which share of the copies ran while a kernel did."""
    row, batches = Pipelines(case, "cuda", 2, False), batches_of(case, 4)
    row.run(batches)
    torch.cuda.synchronize()
    activities = [torch.profiler.ProfilerActivity.CPU, torch.profiler.ProfilerActivity.CUDA]
    with torch.profiler.profile(activities=activities) as profiler:
        row.run(batches)
        torch.cuda.synchronize()
    row.close()
    with tempfile.TemporaryDirectory() as folder:
        file = Path(folder) / "trace.json"
        profiler.export_chrome_trace(str(file))
        text = file.read_text()
    if path is not None:
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(gzip.compress(text.encode()))
    return overlap(json.loads(text)["traceEvents"])


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
    parser.add_argument("--trace", type=Path, help="where torch.profiler's Chrome trace goes, compressed")
    parser.add_argument("--out", type=Path, help="a file for the record, which is printed in any case")
    options = parser.parse_args()
    if options.device == "cuda" and not torch.cuda.is_available():
        parser.error(f"torch {torch.__version__} sees no CUDA device: use --device cpu --small")
    record: dict[str, Any] = {
        "question": "pipelines on streams of one GPU",
        "date": time.strftime("%Y-%m-%d"),
        "device": torch.cuda.get_device_name() if options.device == "cuda" else "cpu",
        "versions": {"torch": torch.__version__, "cuda": torch.version.cuda},
        "stages": STAGES,
        "micro_batches": MICRO_BATCHES,
        "processors": os.cpu_count(),
        "rows": {},
    }
    found = cases(options.small)
    for case in found:
        record["rows"][case.name] = measure(case, options.device, options.rounds, options.batches)
    record["trace"] = trace(found[-1], options.trace) if options.device == "cuda" else "skipped: no GPU"
    text = json.dumps(record, indent=1)
    if options.out:
        options.out.write_text(text + "\n")
    print(text)


if __name__ == "__main__":
    main()
