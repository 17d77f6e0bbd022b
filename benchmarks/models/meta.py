"""Question: how much memory does a rank need to build its part of a model that is larger than it?

    OMP_NUM_THREADS=1 python -m benchmarks.models.meta

A Llama of 2 GiB of float32 weights, saved as safetensors of some 200 MB, is built on four ranks in three ways: through
the meta device from the files; through the meta device by a function that fills the modules; and, as without the meta
device, whole on each rank. Of each rank: the peak of its resident memory until the Pipeline stands, above what it had
when everything was imported, as a share of the model; and the peak itself. A batch is trained afterwards, to see that
all of it is there.
"""

from __future__ import annotations

import argparse
import json
import tempfile
from pathlib import Path
from typing import Any

import torch
from torch import nn

STAGES = 4
LAYERS, WIDTH, WORDS = 18, 1536, 12_288  # 2.0 GiB
BAR = 0.35
WAYS = ("meta device, from files", "meta device, by a function", "whole on each rank")


def _config() -> Any:
    from transformers import LlamaConfig

    sizes = {
        "hidden_size": WIDTH,
        "intermediate_size": 4096,
        "num_attention_heads": 12,
        "num_hidden_layers": LAYERS,
    }
    return LlamaConfig(vocab_size=WORDS, tie_word_embeddings=False, pad_token_id=0, **sizes)


def _model() -> Any:
    from transformers import LlamaForCausalLM

    return LlamaForCausalLM(_config())


def save(folder: Path) -> int:
    """Write the weights in several files, with no more of them in memory than one file has; return their bytes."""
    from safetensors.torch import save_file

    with torch.device("meta"):
        shapes = {name: t.shape for name, t in _model().state_dict().items()}
    parts: dict[str, dict[str, torch.Size]] = {}
    for name, shape in shapes.items():
        number = name.split(".")[2] if ".layers." in name else "rest"
        key = f"part-{int(number) // 2:02}" if number.isdigit() else "part-rest"
        parts.setdefault(key, {})[name] = shape
    for key, of in parts.items():
        tensors = {name: torch.randn(shape) * 0.02 for name, shape in of.items()}
        save_file(tensors, folder / f"{key}.safetensors")
    index = {name: f"{key}.safetensors" for key, of in parts.items() for name in of}
    (folder / "model.safetensors.index.json").write_text(json.dumps({"weight_map": index}))
    return sum(4 * shape.numel() for shape in shapes.values())


def worker(way: str, folder: str) -> dict[str, Any]:
    """A rank."""
    import avgpipe
    from avgpipe.ranks.rendezvous import join

    torch.set_num_threads(1)
    join(60, "gloo")
    with torch.device("meta"):
        _model()  # whatever it imports is there now
    before = _status_bytes("VmRSS")
    Path("/proc/self/clear_refs").write_text("5")  # the peak starts anew
    source: Any = None
    if way == WAYS[2]:
        torch.manual_seed(0)
        model = _model()
    else:
        with torch.device("meta"):
            model = _model()
        source = folder if way == WAYS[0] else _fill
    plan = avgpipe.Plan(stages=STAGES, micro_batches=1)
    pipeline = avgpipe.Pipeline(
        model,
        plan,
        loss_fn=_loss,
        optimizer=lambda p: torch.optim.SGD(p, lr=1e-3),
        extensions=[avgpipe.WeightsFrom(source)],
    )
    peak = _status_bytes("VmHWM")
    held = sum(t.arena.weights[0].nbytes for t in pipeline._session.worker.trained.values())
    words = torch.randint(WORDS, (1, 8), generator=torch.Generator().manual_seed(0))
    loss = pipeline.step(words, words)
    pipeline.close()
    return {"before_bytes": before, "peak_bytes": peak, "stage_bytes": held, "loss": loss}


def _fill(modules: nn.Module) -> None:
    for name, tensor in modules.named_parameters():
        tensor.fill_(1.0) if "norm" in name else tensor.normal_(std=0.02)
    for module in modules.modules():
        if hasattr(module, "inv_freq"):
            rates = torch.arange(0, WIDTH // 12, 2) / (WIDTH // 12)
            module.inv_freq.copy_(10_000.0**-rates)
            module.original_inv_freq.copy_(module.inv_freq)


def _loss(output: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
    return nn.functional.cross_entropy(output.flatten(0, 1), target.flatten())


def _status_bytes(name: str) -> int:
    for line in Path("/proc/self/status").read_text().splitlines():
        if line.startswith(f"{name}:"):
            return int(line.split()[1]) * 1024
    raise OSError(f"/proc/self/status has no {name}")


def main() -> None:
    from avgpipe.ranks.launch import run_on_ranks
    from benchmarks.common.record import write_record

    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--out", help="file of the record; default: in benchmarks/results")
    arguments = parser.parse_args()
    rows = []
    with tempfile.TemporaryDirectory() as folder:
        model_bytes = save(Path(folder))
        print(
            f"{model_bytes / 2**30:.2f} GiB of weights\n\n| | rank | its stage | growth | peak |\n|---|---|---|---|---|"
        )
        for way in WAYS:
            found = run_on_ranks(
                "benchmarks.models.meta:worker", STAGES, {"way": way, "folder": folder}, timeout_s=600
            )
            for rank, row in enumerate(found):
                growth = row["peak_bytes"] - row["before_bytes"]
                shares = [n / model_bytes for n in (row["stage_bytes"], growth, row["peak_bytes"])]
                rows.append({"way": way, "rank": rank, **row, "growth_bytes": growth})
                print(f"| {way} | {rank} | {' | '.join(f'{share:.3f}' for share in shares)} |", flush=True)
    found = {"model_bytes": model_bytes, "bar": BAR, "rows": rows}
    write_record("models-meta", "memory of a rank that builds its part of a model", found, arguments.out)


if __name__ == "__main__":
    main()
