"""Question: what does sending activations and gradients in 16 bits do to the loss?

    OMP_NUM_THREADS=1 python -m benchmarks.wire_dtype.run [--batches 300] [--seeds 3]

A language model over the bytes of Python's own library, cut in the middle between two processes. Rows: N = 1 and 2
pipelines, which share so many batches, with the wire in float32, bfloat16 and float16, from the same weights and on the
same batches. Losses are in nats per byte. "zeros": the share of the gradient that reaches the first stage as 0.
"""

from __future__ import annotations

import argparse
import statistics
import sysconfig
import time
from pathlib import Path
from typing import Any

import torch
from torch import nn

WIRES: dict[str, torch.dtype | None] = {"float32": None, "bfloat16": torch.bfloat16, "float16": torch.float16}
PIPELINES = (1, 2)
WIDTH, HEADS, LENGTH, BATCH, BLOCKS = 64, 4, 32, 8, 4
LAST = 50  # batches whose training loss is reported
HELD_OUT_BATCHES = 40


class Embed(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.bytes, self.places = nn.Embedding(256, WIDTH), nn.Embedding(LENGTH, WIDTH)

    def forward(self, text: torch.Tensor) -> torch.Tensor:
        return self.bytes(text) + self.places.weight[: text.shape[1]]


class Block(nn.Module):
    """A block of a decoder: attention to what came before, then two linear layers."""

    def __init__(self) -> None:
        super().__init__()
        self.norms = nn.ModuleList(nn.LayerNorm(WIDTH) for _ in range(2))
        self.mix, self.out = nn.Linear(WIDTH, 3 * WIDTH), nn.Linear(WIDTH, WIDTH)
        self.think = nn.Sequential(nn.Linear(WIDTH, 4 * WIDTH), nn.GELU(), nn.Linear(4 * WIDTH, WIDTH))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        heads = self.mix(self.norms[0](x)).unflatten(-1, (3, HEADS, -1)).permute(2, 0, 3, 1, 4)
        mixed = nn.functional.scaled_dot_product_attention(*heads, is_causal=True)
        x = x + self.out(mixed.transpose(1, 2).flatten(2))
        return x + self.think(self.norms[1](x))


class Watch(nn.Module):
    """Passes its input on and counts the gradient's zeros."""

    def __init__(self, counts: list[int]) -> None:
        super().__init__()
        self.counts = counts

    def __deepcopy__(self, memo: Any) -> Watch:
        return Watch(self.counts)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        def count(gradient: torch.Tensor) -> None:
            self.counts[0] += int((gradient == 0).sum())
            self.counts[1] += gradient.numel()

        if x.requires_grad:
            x.register_hook(count)
        return x.view_as(x)


class NextByte(nn.Module):
    def forward(self, scores: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
        return nn.functional.cross_entropy(scores.flatten(0, 1), target.flatten())


def texts() -> tuple[torch.Tensor, torch.Tensor]:
    """Bytes to train on, and those of every tenth file."""
    library = Path(sysconfig.get_paths()["stdlib"])
    sources = [f.read_bytes() for f in sorted(library.glob("*.py"))]
    files = [torch.frombuffer(bytearray(source), dtype=torch.uint8) for source in sources if source]
    return torch.cat([f for n, f in enumerate(files) if n % 10]), torch.cat(files[::10])


def batches(text: torch.Tensor, count: int, seed: int) -> list[tuple[torch.Tensor, torch.Tensor]]:
    draw = torch.Generator().manual_seed(seed)
    made = []
    for _ in range(count):
        begins = torch.randint(len(text) - LENGTH, (BATCH, 1), generator=draw)
        piece = text[begins + torch.arange(LENGTH + 1)].long()
        made.append((piece[:, :-1], piece[:, 1:]))
    return made


def fit(wire: torch.dtype | None, pipelines: int, count: int, seed: int, text: Any) -> dict[str, float]:
    import avgpipe

    torch.manual_seed(seed)
    counts = [0, 0]
    half = [Block() for _ in range(BLOCKS // 2)]
    layers = [
        Embed(),
        *half,
        Watch(counts),
        *[Block() for _ in half],
        nn.LayerNorm(WIDTH),
        nn.Linear(WIDTH, 256),
    ]
    cut = 2 + len(half)
    plan = avgpipe.Plan(stages=2, pipelines=pipelines, micro_batches=2, partition=[cut], warmup_rounds=0)
    with avgpipe.Pipeline(
        layers,
        plan,
        loss_fn=NextByte(),
        optimizer=lambda parameters: torch.optim.AdamW(parameters, lr=1e-3),
        seed=seed,
        extensions=[avgpipe.Precision(wire_dtype=wire)],
    ) as pipeline:
        train, held_out = text
        losses = [r.loss for r in pipeline.train(batches(train, count, seed))]
        result = pipeline.evaluate(batches(held_out, HELD_OUT_BATCHES, 12345))
    return {
        "train": statistics.mean(losses[-LAST:]),
        "held_out": result.loss,
        "zeros": counts[0] / max(1, counts[1]),
    }


def worker(count: int, seeds: int) -> dict[str, Any]:
    """A rank of two: all runs in turn."""
    from avgpipe.ranks.process import progress

    torch.set_num_threads(1)
    text = texts()
    found: dict[str, Any] = {}
    for seed in range(seeds):  # outermost: an interrupted machine still compares like with like
        for pipelines in PIPELINES:
            for name, wire in WIRES.items():
                progress(f"seed {seed}, N = {pipelines}, {name}")
                row = found.setdefault(f"N = {pipelines}, {name}", [])
                row.append(fit(wire, pipelines, count, seed, text))
    return found


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--batches", type=int, default=300, help="of each pipeline")
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--out", help="of the record; default: benchmarks/results")
    asked = parser.parse_args()

    from avgpipe.ranks.launch import run_on_ranks
    from benchmarks.common.record import say, write_record

    arguments = {"count": asked.batches, "seeds": asked.seeds}
    begin = time.perf_counter()
    ranks = run_on_ranks(
        "benchmarks.wire_dtype.run:worker",
        2,
        arguments,
        timeout_s=3600,
        say=say,
    )
    rows = summarise(*ranks)
    print("\n".join(table(rows)))
    record = {
        "seconds": time.perf_counter() - begin,
        "batches_per_pipeline": asked.batches,
        "rows": rows,
    }
    question = "16-bit activations and gradients between stages: loss in nats per byte"
    write_record("wire_dtype", question, record, asked.out)


def summarise(first: dict[str, Any], last: dict[str, Any]) -> dict[str, Any]:
    """By row: losses by seed, those minus the float32 row's of the same seed, and what the first stage counted."""
    rows = {}
    for name, runs in last.items():
        plain = last[name.partition(",")[0] + ", float32"]
        rows[name] = {
            **{what: [run[what] for run in runs] for what in ("train", "held_out")},
            **{
                f"{what}_more": [run[what] - other[what] for run, other in zip(runs, plain)]
                for what in ("train", "held_out")
            },
            "zeros": [run["zeros"] for run in first[name]],
        }
    return rows


def table(rows: dict[str, Any]) -> list[str]:
    lines = [
        "| | training | more than float32 | held out | more than float32 | zeros |",
        "|---|---|---|---|---|---|",
    ]
    for name, row in rows.items():
        cells = [f"{statistics.mean(row['train']):.4f}", spread(row["train_more"])]
        cells += [f"{statistics.mean(row['held_out']):.4f}", spread(row["held_out_more"])]
        lines.append(f"| {name} | " + " | ".join(cells) + f" | {statistics.mean(row['zeros']):.2%} |")
    return lines


def spread(differences: list[float]) -> str:
    """The mean, and the least and the most over the seeds."""
    return f"{statistics.mean(differences):+.1e} ({min(differences):+.1e} to {max(differences):+.1e})"


if __name__ == "__main__":
    main()
