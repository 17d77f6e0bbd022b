"""Question: on one GPU, what do N pipelines of four stages on streams of their own cost or gain against plain PyTorch?

    python benchmarks/gpu_pipelines.py --out benchmarks/results/gpu_pipelines.json --trace build/gpu_pipelines.json.gz

Rows are in groups that train alike. In bf16 (autocast) and in TF32 each pipeline has batches of its own, of the samples
that plain PyTorch has in one; ours run kernel by kernel, with CUDA graphs, and compiled.
"sharing a batch on one full GPU" is the worst case: float32, and N pipelines train N-th parts of the same batch in
smaller micro-batches, on a GPU that plain PyTorch fills. "one stage of four" is what pipelines are for: one real
stage, among stages that only take their time. Rows run one after another, each closed before the next begins: torch has
32 streams for a device, and more lanes would share them. Plain PyTorch is first and last of its group, so that a
machine whose pace changes shows. Medians of samples per second; the time of a round ends when the device has done it.
Prints one JSON object, which --out has after every row; rows for which no time is left are named in it. The trace is
torch.profiler's of two pipelines: what the host takes for an action and the device for its kernels, and whether a copy
ran while a kernel did.
"""

from __future__ import annotations

import argparse
import gzip
import json
import os
import statistics
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any
from unittest import mock

import torch
from torch import nn

import avgpipe
from avgpipe.runtime.streams import LaneStream
from avgpipe_lab.workloads.awd_lstm import AWDLSTMConfig, AWDLSTMLoss, awd_lstm_layers
from benchmarks.common.gpu_trace import ACTION, actions, kernels_by_time, overlap
from benchmarks.one_card.networks import stage_models
from benchmarks.one_card.stage_of_pipeline import Taken, mean_square, stage_among_delays
from benchmarks.overlap import models

STAGES, MICRO_BATCHES = 4, 4
PLAIN = "plain PyTorch"
SHARING = "sharing a batch on one full GPU, fp32"


@dataclass(frozen=True)
class Case:
    """A model and its batches.

    Attributes:
        layers: Returns new layers at each call.
        loss: Likewise.
        batch: Makes a batch of all samples.
        samples: Of a batch.
        partition: The first layers of stages; None: balanced.
    """

    name: str
    layers: Callable[[], list[nn.Module]]
    loss: Callable[[], Any]
    batch: Callable[[torch.Generator], tuple[torch.Tensor, torch.Tensor]]
    samples: int
    partition: list[int] | None = None


@dataclass(frozen=True)
class Group:
    """Rows that are compared: one case in one precision.

    Attributes:
        name: What it is called in the record.
        precision: "bf16" by autocast, "tf32" or "fp32".
        own: Whether each pipeline has batches of its own.
        plain: Whether plain PyTorch trains the same.
        compiled: Whether there are rows by ``torch.compile``.
    """

    name: str
    case: Case
    precision: str
    own: bool = True
    plain: bool = True
    compiled: bool = True
    counts: tuple[int, ...] = field(default=(1, 2, 4))


def cases(small: bool, width: int) -> dict[str, Case]:
    """small: to see that it runs. width: of the transformer; narrow ones measure the host."""
    blocks, samples, length = (4, 16, 16) if small else (8, 64, 128)
    config = AWDLSTMConfig(101, 8, 16, 3) if small else AWDLSTMConfig(8192, 400, 1150, 3)
    made = [
        Case(
            "transformer",
            lambda: models.transformer(width, blocks, length=length),
            lambda: models.loss,
            partial(_tokens, models.VOCABULARY, samples, length),
            samples,
        ),
        Case(
            "awd-lstm",
            lambda: awd_lstm_layers(config),
            lambda: AWDLSTMLoss(config.alpha, config.beta),
            partial(_tokens, config.vocabulary, samples, 10 if small else 70),
            samples,
        ),
    ]
    return {case.name: case for case in made}


def _tokens(vocabulary: int, samples: int, length: int, generator: torch.Generator) -> tuple[Any, Any]:
    made = torch.randint(vocabulary, (samples, length + 1), generator=generator)
    return made[:, :-1].contiguous(), made[:, 1:].contiguous()


def stage_cases(small: bool, stage: int, device: str) -> dict[str, Case]:
    """Cases of one stage of four, with the times of the others as measured on this device."""
    from benchmarks.one_card import one_worker

    at = torch.device("cuda", 0) if device == "cuda" else torch.device("cpu")
    found = stage_models(small)
    card = one_worker.Card(at, found)
    made = {}
    for model in found[:2]:
        worker = card.worker(one_worker.Case(model.name, "bf16", MICRO_BATCHES, 1, "row", stage))
        taken = Taken(worker.forward_s, worker.backward_s, card.cycles_per_s)
        cuts = stage_among_delays(model, stage, STAGES, taken)[1]
        layers = partial(_stage_layers, model, stage, taken)
        batch = partial(_activations, (model.batch, *model.sample), at)
        made[model.name] = Case(
            f"stage {stage} of {model.name}", layers, lambda: mean_square, batch, model.batch, cuts
        )
    card.clear()
    return made


def _stage_layers(model: Any, stage: int, taken: Taken) -> list[nn.Module]:
    return stage_among_delays(model, stage, STAGES, taken)[0]


def _activations(shape: tuple[int, ...], device: torch.device, generator: torch.Generator) -> tuple[Any, Any]:
    """On the device already: between stages they do not come from the host."""
    return torch.randn(shape, generator=generator).to(device), torch.zeros(shape[0], 1, device=device)


def groups(small: bool, width: int, stage: int, device: str) -> list[Group]:
    """Return the groups by their worth."""
    whole, one = cases(small, width), stage_cases(small, stage, device)
    return [
        *(Group("one stage of four, bf16", case, "bf16", plain=False) for case in one.values()),
        Group("own batches, bf16", whole["transformer"], "bf16"),
        Group("own batches, tf32", whole["transformer"], "tf32", compiled=False),
        Group(SHARING, whole["transformer"], "fp32", own=False, compiled=False),
        Group("own batches, bf16", whole["awd-lstm"], "bf16", compiled=False, counts=(1, 2)),
        Group(SHARING, whole["awd-lstm"], "fp32", own=False, compiled=False, counts=(1, 2)),
    ]


class Plain:
    """One step of plain PyTorch per batch."""

    def __init__(self, group: Group, device: str, compiled: bool = False) -> None:
        self._model: Any = nn.Sequential(*group.case.layers()).to(device).train()
        if compiled:
            self._model.compile()
        self._loss, self._device, self._bf16 = group.case.loss(), device, group.precision == "bf16"
        if isinstance(self._loss, nn.Module):
            self._loss.train()
        self._optimizer = torch.optim.AdamW(self._model.parameters(), lr=1e-4)

    def run(self, batches: list[Any]) -> float:
        losses = []
        for x, y in batches:
            x, y = (t.to(self._device, non_blocking=True) for t in (x, y))
            self._optimizer.zero_grad()
            with torch.autocast(self._device, torch.bfloat16, enabled=self._bf16):
                loss = self._loss(self._model(x), y)
            loss.backward()
            self._optimizer.step()
            losses.append(loss.detach())
        return float(losses[-1])

    def close(self) -> None:
        pass


class Pipelines:
    """N pipelines that stream, and share each batch or have batches of their own."""

    def __init__(
        self, group: Group, device: str, pipelines: int, extensions: tuple[avgpipe.Extension, ...] = ()
    ) -> None:
        case = group.case
        self._pipeline = avgpipe.Pipeline(
            case.layers(),
            plan_of(group, pipelines),
            loss_fn=case.loss(),
            optimizer=lambda parameters: torch.optim.AdamW(parameters, lr=1e-4),
            device=device,
            extensions=[
                *([avgpipe.Precision(autocast=torch.bfloat16)] if group.precision == "bf16" else []),
                *extensions,
            ],
        )

    def run(self, batches: list[Any]) -> float:
        return [result.loss for result in self._pipeline.train(batches)][-1]

    def close(self) -> None:
        self._pipeline.close()


def plan_of(group: Group, pipelines: int) -> avgpipe.Plan:
    """warmup_rounds=0: rounds that wait for the average leave nothing to fill bubbles with."""
    return avgpipe.Plan(
        stages=STAGES,
        pipelines=pipelines,
        micro_batches=MICRO_BATCHES if group.own else pipelines * MICRO_BATCHES,
        partition=group.case.partition,
        warmup_rounds=0,
        batch="per-pipeline" if group.own else "global",
    )


def contenders(group: Group, device: str) -> dict[str, Callable[[], Any]]:
    """What makes each row."""
    rows: dict[str, Callable[[], Any]] = {}
    if group.plain:
        rows[PLAIN] = partial(Plain, group, device)
        if group.compiled and device == "cuda":
            rows[f"{PLAIN}, compiled"] = partial(Plain, group, device, True)
    ways: dict[str, tuple[avgpipe.Extension, ...]] = {"": ()}
    if device == "cuda":
        ways[", graphs"] = (avgpipe.CudaGraphs(),)
        ways |= {", compiled": (avgpipe.Compile(),)} if group.compiled else {}
    for way, extensions in ways.items():  # those that take the compiler's time at the end
        for n in group.counts:
            rows[f"avgpipe, N = {n}{way}"] = partial(Pipelines, group, device, n, extensions)
    if group.plain:
        rows[f"{PLAIN}, again"] = rows[PLAIN]
    return rows


def batches_of(case: Case, count: int) -> list[Any]:
    generator = torch.Generator().manual_seed(0)
    return [case.batch(generator) for _ in range(count)]


def wait(device: str) -> None:
    if device == "cuda":
        torch.cuda.synchronize()


def measure(
    group: Group, device: str, rounds: int, count: int, late: Callable[[], bool]
) -> Iterator[dict[str, Any]]:
    batches, base = batches_of(group.case, count), 0.0
    torch.backends.cuda.matmul.allow_tf32 = group.precision != "fp32"
    for name, make in contenders(group, device).items():
        head = {"name": name, "group": group.name}
        if late():
            yield {**head, "left_out": "no time"}
            continue
        try:
            rates, peak_mib = measure_row(make(), batches, group.case, device, rounds)
        except Exception as error:  # too little memory, say, or a model that cannot be captured
            yield {**head, "failed": " ".join(str(error).split())[:200]}
            continue
        rate = statistics.median(rates)
        base = base or rate  # the first one's
        figures = {"samples_per_s": rate, "least": min(rates), "most": max(rates)}
        yield {
            **head,
            **{k: round(v, 2) for k, v in figures.items()},
            "against_plain": round(rate / base, 3),
            **({"peak_mib": peak_mib} if peak_mib else {}),
        }


def measure_row(
    row: Any, batches: list[Any], case: Case, device: str, rounds: int
) -> tuple[list[float], int]:
    """Samples per second of each round, after one that warms up, and the peak of memory in MiB."""
    rates = []
    try:
        for number in range(rounds + 1):
            wait(device)
            if number == 1 and device == "cuda":
                torch.cuda.reset_peak_memory_stats()  # of training, without what is checked and captured before
            start = time.perf_counter()
            row.run(batches)
            wait(device)
            rates.append(len(batches) * case.samples / (time.perf_counter() - start))
        peak = torch.cuda.max_memory_allocated() if device == "cuda" else 0
    finally:
        row.close()
    return rates[1:], round(peak / 2**20)


def trace(group: Group, device: str, path: Path | None) -> dict[str, Any]:
    """Profile two pipelines: their actions, their kernels, and which of them ran at once."""
    row, batches = Pipelines(group, device, 2), batches_of(group.case, 4)
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


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--device", choices=["cuda", "cpu"], default="cuda")
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--batches", type=int, default=16, help="batches of the loader in a round")
    parser.add_argument("--small", action="store_true", help="tiny models: to see that it runs")
    parser.add_argument("--width", type=int, help="of the transformer; default 1024, with --small 32")
    parser.add_argument("--stage", type=int, choices=range(STAGES), default=0, help="the real one of four")
    parser.add_argument("--budget", type=float, default=600, help="seconds after which no row begins")
    parser.add_argument("--trace", type=Path, help="where torch.profiler's Chrome trace goes, compressed")
    parser.add_argument("--out", type=Path, help="a file for the record, which is printed in any case")
    options = parser.parse_args()
    if options.device == "cuda" and not torch.cuda.is_available():
        parser.error(f"torch {torch.__version__} sees no CUDA device: use --device cpu --small")
    began, width = time.perf_counter(), options.width or (32 if options.small else 1024)
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

    def late() -> bool:
        return time.perf_counter() - began > options.budget

    found = groups(options.small, width, options.stage, options.device)
    for group in found:  # what a machine that is lent for minutes should see first
        rows = record["rows"].setdefault(group.case.name, [])
        for row in measure(group, options.device, options.rounds, options.batches, late):
            rows.append(row)
            write()
    if not late():
        shared = next(group for group in found if group.name == SHARING)
        record["trace"] = trace(shared, options.device, options.trace)
    print(write())


def verdict(rows: dict[str, list[dict[str, Any]]]) -> str:
    """The best of ours beside plain PyTorch, or the first row, by model and group."""
    parts = []
    for name, made in rows.items():
        for group in dict.fromkeys(row["group"] for row in made):
            own = [row for row in made if row["group"] == group]
            ours = [row for row in own if "against_plain" in row and not row["name"].startswith(PLAIN)]
            if ours:
                best = max(ours, key=lambda row: row["against_plain"])
                base = "plain" if own[0]["name"] == PLAIN else "N = 1"
                what = best["name"].removeprefix("avgpipe, ")
                parts.append(f"{name}, {group}: {what} {best['against_plain']:.2f} times {base}")
        parts += [f"{name}, {row['name']} failed" for row in made if "failed" in row]
    left = sum("left_out" in row for made in rows.values() for row in made)
    return "; ".join([*parts, *([f"{left} rows left out"] if left else [])]) or "nothing was measured"


if __name__ == "__main__":
    main()
