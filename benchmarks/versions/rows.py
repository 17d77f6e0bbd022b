"""Rows of run.py, measured in the checkout that PYTHONPATH names: python rows.py ROW; prints one JSON object.

Only names that both checkouts have may stand here: public ones, and programs of the checkout's own benchmarks.
"""

from __future__ import annotations

import json
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from itertools import islice, repeat
from pathlib import Path
from typing import Any

ELEMENTS, TENSORS = 25_000_000, 60
Found = dict[str, float]


def medians_ms(acts: dict[str, Callable[[], object]], samples: int) -> Found:
    """Median time in ms of each act, called in turn."""
    taken: dict[str, list[float]] = {name: [] for name in acts}
    for sample in range(samples + 2):
        for name, act in acts.items():
            begin = time.perf_counter()
            act()
            if sample > 1:  # the first ones make memory and state
                taken[name].append(1e3 * (time.perf_counter() - begin))
    return {name: statistics.median(values) for name, values in taken.items()}


def host() -> Found:
    """CPU time of an action of a Pipeline of two stages in one process."""
    import torch
    from torch import nn

    import avgpipe

    torch.set_num_threads(1)
    batch = torch.ones(16, 16), torch.zeros(16, 16)
    found = {}
    for pipelines in (1, 2):
        model = nn.Sequential(nn.Linear(16, 16), nn.Linear(16, 16))
        plan = avgpipe.Plan(stages=2, pipelines=pipelines, micro_batches=8)
        with avgpipe.Pipeline(
            model, plan, loss_fn=nn.MSELoss(), optimizer=lambda p: torch.optim.SGD(p, lr=1e-3)
        ) as pipeline:
            results = pipeline.train(repeat(batch))
            for _ in islice(results, 60 * pipelines):
                pass
            samples = []
            for _ in range(9):
                begin = time.process_time()
                for _ in islice(results, 40 * pipelines):
                    pass
                samples.append(1e6 * (time.process_time() - begin) / (40 * pipelines * 2 * 8 * 2))
        found[f"host, N = {pipelines}, µs of CPU time per action"] = statistics.median(samples)
    return found


def record_of(module: str, *arguments: str) -> Any:
    """What a benchmark of the checkout records."""
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "record.json"
        command = [sys.executable, "-m", module, *arguments, "--out", str(path)]
        subprocess.run(command, check=True, stdout=subprocess.DEVNULL, timeout=1200)
        return json.loads(path.read_text())


def ranks() -> Found:
    record = record_of("benchmarks.overlap.overhead", "--links", "shm", "--rounds", "5")
    return {f"two processes, µs per action: {row['name']}": row["us_per_action"] for row in record["rows"]}


def real(model: str) -> Found:
    arguments = "--model", model, "--only", "avgpipe", "--links", "shm", "--cuts", "1", "--rounds", "3"
    rows = record_of("benchmarks.overlap.real", *arguments)["rows"]
    found = {}
    for row in rows:
        name = row["name"].partition(" (")[0]  # without the micro-batches that were best
        found[f"{model}, ms per batch: {name}"] = 1e3 * row["median_s"]
    return found


def emulated() -> Found:
    arguments = "--cases", "1MiB,loopback-shm", "--rows", "1f1b,advance-forward", "--rounds", "1"
    found = {}
    for case in record_of("benchmarks.overlap.emulated", *arguments)["cases"]:
        line = "1 Gbit/s" if case["settings"]["rate_bits_per_s"] else "loopback"
        for row in case["rows"]:
            found[f"emulated cluster, {line}, ms per batch: {row['name']}"] = 1e3 * row["median_s"]
    return found


def operators() -> Found:
    import torch

    from avgpipe_ext import operators as ops

    torch.set_num_threads(1)
    x, grad, first, second, z, update = ([torch.rand(ELEMENTS) * 1e-3] for _ in range(6))
    acts = {
        "elastic_adamw_, 25 million elements, ms": lambda: ops.elastic_adamw_(
            x, grad, first, second, z, update, 0.5, 1, step=10.0, lr=1e-3
        ),
        "elastic_sgd_, 25 million elements, ms": lambda: ops.elastic_sgd_(
            x, grad, first, z, update, 0.5, 1, lr=1e-3, mu=0.9
        ),
    }
    return medians_ms(acts, 15)


def shapes() -> list[tuple[int, ...]]:
    """A transformer's tensors: matrices, and vectors between them."""
    return [(512, 512) if n % 3 else (512,) for n in range(TENSORS)]


def updates(optimizer: str) -> Found:
    """Step and averaging of two replicas, by a Pipeline's stages and by the drop-in optimizer."""
    import torch
    from torch import nn

    import avgpipe
    from avgpipe.measure import updates as theirs

    torch.set_num_threads(1)
    maker = {
        "AdamW": lambda p: torch.optim.AdamW(p, lr=1e-3),
        "SGD": lambda p: torch.optim.SGD(p, lr=1e-3, momentum=0.9),
    }[optimizer]
    acts: dict[str, Callable[[], object]] = {}
    for staleness in (0, 1):
        layers = [nn.ParameterList([nn.Parameter(torch.rand(s)) for s in shapes()]) for _ in range(2)]
        stages = [theirs.Stage([layer], 0, 0, 0, torch.device("cpu")) for layer in layers]
        arenas = [theirs.Arena(stage.parameters()) for stage in stages]
        reference = theirs.Reference(arenas[0].weights, 2, staleness=staleness)
        make = theirs.maker_of(maker, [str(n) for n in range(TENSORS)])
        trained = [
            theirs.TrainedStage(stage, i, make, None, reference, arena)
            for i, (stage, arena) in enumerate(zip(stages, arenas))
        ]
        grads = [torch.rand(s) * 1e-6 for s in shapes()]

        def step(trained: Any = trained, grads: Any = grads) -> None:
            for replica in trained:
                replica.put_grads(list(grads))
            for replica in trained:
                replica.step(0, ())

        acts[f"{optimizer} and averaging, staleness {staleness}, stages of a Pipeline, ms"] = step
        models = [nn.ParameterList([nn.Parameter(torch.rand(s)) for s in shapes()]) for _ in range(2)]
        ours = avgpipe.Reference(models[0].parameters(), 2, staleness=staleness)
        drop_ins = [avgpipe.ElasticAveraging(maker(m.parameters()), ours, i) for i, m in enumerate(models)]

        def drop_in(models: Any = models, drop_ins: Any = drop_ins, grads: Any = grads) -> None:
            for model in models:
                for parameter, grad in zip(model.parameters(), grads):
                    parameter.grad = grad
            for each in drop_ins:
                each.step()

        acts[f"{optimizer} and averaging, staleness {staleness}, drop-in optimizer, ms"] = drop_in
    return medians_ms(acts, 15)


def link() -> Found:
    command = "bench", "transfers", "--links", "shm", "--sizes", "1048576", "--rounds", "5", "--json"
    result = subprocess.run([sys.executable, "-m", "avgpipe", *command], check=True, capture_output=True)
    found = {}
    for section in json.loads(result.stdout)["sections"]:
        for row in section["rows"]:
            if row["role"] == "ours":
                found[f"link, {section['question']}, {section['case']}: {row['name']}, µs"] = (
                    1e3 * row["median_ms"]
                )
    return found


def predict() -> Found:
    import avgpipe

    schedule = avgpipe.build_schedule("1f1b", 1024, 4096)
    costs = avgpipe.Costs(forward_s=1.0, backward_s=2.0)
    return medians_ms(
        {"predict, 1,024 stages, 4,096 micro-batches, ms": lambda: avgpipe.predict(schedule, costs)}, 5
    )


def first() -> Found:
    """From `import torch` to the first result of a Pipeline, and all names of the package."""
    program = """
import sys, time
import torch
from torch import nn
torch.set_num_threads(1)
begin = time.perf_counter()
import avgpipe
if sys.argv[1] == "names":
    for name in ("Action", "Carry", "Checked", "CheckpointError", "Checkpoints", "Costs", "ElasticAveraging",
            "Partition", "PeerLost", "Pipeline", "PipelineError", "PipelineTimeout", "Plan", "Profile", "Reference",
            "Schedule", "ScheduleError", "StageError", "Task", "Timeline", "build_schedule", "check", "partition",
            "predict", "schedule_names", "simulate"):
        getattr(avgpipe, name)
else:
    plan = avgpipe.Plan(stages=2, pipelines=2, micro_batches=4)
    model = nn.Sequential(nn.Linear(16, 16), nn.Linear(16, 16))
    batch = torch.ones(16, 16), torch.zeros(16, 16)
    with avgpipe.Pipeline(model, plan, loss_fn=nn.MSELoss(), optimizer=torch.optim.AdamW) as pipeline:
        if sys.argv[1] == "step":
            for _ in pipeline.train([batch] * 2):
                pass
print(time.perf_counter() - begin)
"""
    labels = {
        "names": "import avgpipe, all names but profile and tune, s",
        "made": "import avgpipe and the first Pipeline, s",
        "step": "the same and its first batches, s",
    }
    found = {}
    for mode, label in labels.items():
        samples = [
            float(
                subprocess.run([sys.executable, "-c", program, mode], check=True, capture_output=True).stdout
            )
            for _ in range(5)
        ]
        found[label] = statistics.median(samples)
    return found


def isolated() -> Found:
    """A step of two isolated pipelines on this host, each of one process, with 25 million parameters."""
    program = """
import os, sys, time
import torch
from torch import nn
import avgpipe
class Layer(nn.Module):
    def __init__(self, numel):
        super().__init__()
        self.w = nn.Parameter(torch.zeros(numel))
    def forward(self, x):
        return x + self.w.mean()
torch.set_num_threads(1)
plan = avgpipe.Plan(stages=1, pipelines=2, micro_batches=2, isolate=True, warmup_rounds=0)
batch = torch.zeros(2, 1), torch.ones(2, 1)
with avgpipe.Pipeline(nn.Sequential(Layer(int(sys.argv[1]))), plan, loss_fn=nn.MSELoss(),
        optimizer=lambda p: torch.optim.SGD(p, lr=1e-4), timeout_s=120) as pipeline:
    ends = [time.monotonic() for _ in pipeline.train([batch] * 60)]
if os.environ["AVGPIPE_PIPELINE"] == "0":
    taken = sorted(end - begin for begin, end in zip(ends[10:], ends[11:]))
    with open(sys.argv[2], "w") as file:
        file.write(str(1e3 * taken[len(taken) // 2]))
"""
    with tempfile.TemporaryDirectory() as folder:
        script, out = Path(folder) / "job.py", Path(folder) / "ms"
        script.write_text(program)
        words = "run", "--isolate", "--stages", "1", "--pipelines", "2", str(script), str(ELEMENTS), str(out)
        command = [sys.executable, "-m", "avgpipe", *words]
        subprocess.run(command, check=True, capture_output=True, timeout=300)
        return {
            "two isolated pipelines, staleness 1, 25 million elements, ms per step": float(out.read_text())
        }


def train() -> Found:
    """The whole of a short `avgpipe train`."""
    with tempfile.TemporaryDirectory() as folder:
        out = str(Path(folder) / "run")
        command = "train", "awd-lstm", "--preset", "tiny", "--stages", "2", "--max-batches", "2", "--out", out
        begin = time.perf_counter()
        subprocess.run(
            [sys.executable, "-m", "avgpipe", *command], check=True, capture_output=True, timeout=300
        )
        return {"avgpipe train of two batches, s": time.perf_counter() - begin}


ROWS: dict[str, Callable[[], Any]] = {
    "host": host,
    "ranks": ranks,
    "emulated": emulated,
    "transformer": lambda: real("transformer"),
    "lstm": lambda: real("lstm"),
    "operators": operators,
    "adamw": lambda: updates("AdamW"),
    "sgd": lambda: updates("SGD"),
    "link": link,
    "predict": predict,
    "first": first,
    "train": train,
    "isolated": isolated,
}

if __name__ == "__main__":
    print(json.dumps(ROWS[sys.argv[1]]()))
