"""Question: on K quarters of one GPU, each a small GPU with a process of its own, do N pipelines train faster than one?

    python -m benchmarks.one_card.quarters --out build/quarters.json          within --budget seconds, on a GPU
    python -m benchmarks.one_card.quarters --device cpu --small               anywhere: to see that it runs

The Multi-Process Service (MPS) lets each of K processes use 100 / K per cent of the multiprocessors: of an H100's 132
about 33, in plain float32 16.7 Tflop/s, a V100's. Activations travel by CUDA IPC, or are held up on their way as long
as a line would take. The same processes serve all rows: our schedules with N pipelines, each with batches of its own as
in the paper or sharing each batch; torch.distributed.pipelining over a process group of CUDA IPC; data parallelism. The
first row is the partitions' own: one alone, and all at once. The most important rows are first, each is in --out when
it is done, and rows for which no time is left are named there.
"""

from __future__ import annotations

import argparse
import gc
import os
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import AbstractContextManager, nullcontext
from dataclasses import asdict
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from benchmarks.gpu_suite import mps
from benchmarks.one_card.arrivals import cycles_per_s
from benchmarks.one_card.meeting import Meeting
from benchmarks.one_card.partitions import partitions
from benchmarks.one_card.record import RowsRecord
from benchmarks.one_card.systems import ADVANCES, Quarter, Row, training

TEN_GIGABIT = 8 / 10e9  # seconds for a byte
# With 32, one of four processes under MPS got "out of memory" from its first call of CUDA.
CONNECTIONS = "16"
_BEGAN, _STORE = "ONE_CARD_BEGAN", "ONE_CARD_STORE"  # variables of ranks
_ENDING_S = 30.0
_WARM_UPS = 3  # batches of each pipeline: graphs are captured in the third
Choice = tuple[str, str, int, int, dict[str, bool]]  # system, schedule, N, M and more of a row


def rows() -> Iterator[Row]:
    """Yield what to measure, by its worth."""
    first: list[Choice] = [
        ("avgpipe", "1f1b", 1, 4, {}),
        ("avgpipe", ADVANCES, 2, 4, {}),
        ("avgpipe", ADVANCES, 4, 4, {}),
        ("data parallel", "", 1, 4, {}),
    ]
    # Two answers to streams that share a device.
    orders: list[Choice] = [
        ("avgpipe", ADVANCES, n, 4, {way: True}) for n in (2, 4) for way in ("in_turn", "ranked")
    ]
    others: list[Choice] = [
        ("avgpipe", "zero-bubble-h1", 1, 4, {}),
        ("torch", "1f1b", 1, 4, {}),
        ("avgpipe", "1f1b", 1, 8, {}),
    ]
    graphs = [
        ("avgpipe", "1f1b", 1, 4, {"graphs": True}),
        ("avgpipe", ADVANCES, 2, 4, {"graphs": True}),
        ("avgpipe", ADVANCES, 4, 4, {"graphs": True}),
    ]
    rest = [
        ("avgpipe", "all-forward-all-backward", 1, 4, {}),
        ("avgpipe", ADVANCES, 2, 2, {"shared": True}),
        ("torch", "gpipe", 1, 4, {}),
        ("torch", "1f1b", 1, 8, {}),
    ]
    for model, precision, wire, chosen in (
        ("bert", "fp32", 0.0, first + orders + others),
        ("bert", "fp32", TEN_GIGABIT, first),
        ("bert", "bf16", 0.0, first + graphs),
        ("lstm", "fp32", 0.0, first + orders + others),
        ("bert", "fp32", 0.0, rest + graphs),
        ("lstm", "fp32", TEN_GIGABIT, first),
        ("lstm", "bf16", 0.0, first + graphs),
        ("lstm", "fp32", 0.0, rest),
    ):
        for system, schedule, n, m, more in chosen:
            if not (wire and system == "torch"):  # its transport has no line
                yield Row(model, precision, wire, system, schedule, n, m, **more)


# ---- the parent ------------------------------------------------------------------------------------------------


def start(options: argparse.Namespace) -> int:
    """Start a process for each quarter, under MPS on a GPU, and end all at the limit."""
    parts, on_gpu = options.parts, options.device == "cuda"
    shared: AbstractContextManager[dict[str, str]] = (
        mps() if on_gpu and not options.no_mps else nullcontext({})
    )
    with shared as variables, tempfile.TemporaryDirectory() as folder:
        environment = os.environ | variables | {"WORLD_SIZE": str(parts), _STORE: f"{folder}/store"}
        environment |= {
            "OMP_NUM_THREADS": "1",
            "CUDA_DEVICE_MAX_CONNECTIONS": CONNECTIONS,
            _BEGAN: str(time.time()),
        }
        if variables:
            environment |= {"CUDA_MPS_ACTIVE_THREAD_PERCENTAGE": str(100 // parts)}
        command = [sys.executable, "-m", "benchmarks.one_card.quarters", *sys.argv[1:]]
        ranks = [
            subprocess.Popen([*command, "--rank", str(rank)], env=environment | {"RANK": str(rank)})
            for rank in range(parts)
        ]
        try:
            _wait(ranks, options.budget + _ENDING_S)
        finally:
            for rank in ranks:
                if rank.poll() is None:
                    rank.kill()
                    rank.wait()
    return max(abs(rank.returncode) for rank in ranks)


def _wait(ranks: list[subprocess.Popen[bytes]], seconds: float) -> None:
    """Return when all have ended, one has failed, or at the limit."""
    until = time.monotonic() + seconds
    while any(rank.poll() is None for rank in ranks) and not any(rank.poll() for rank in ranks):
        if time.monotonic() > until:
            print("stopped at the limit", flush=True)
            return
        time.sleep(0.2)


# ---- a quarter -------------------------------------------------------------------------------------------------


def serve(options: argparse.Namespace) -> None:
    """Measure all rows, as one of the quarters. Every meeting of ranks has a name of its own."""
    torch.set_num_threads(1)
    torch.backends.cuda.matmul.allow_tf32 = False  # rows in float32 are those of a V100
    device = torch.device("cuda", 0) if options.device == "cuda" else torch.device("cpu")
    stores: Any = dist  # whose types torch does not export
    store = stores.FileStore(os.environ[_STORE], options.parts)
    ranks = {"rank": options.rank, "world_size": options.parts}
    dist.init_process_group(
        "gloo", timeout=timedelta(seconds=90), store=stores.PrefixStore("group", store), **ranks
    )
    meeting = Meeting(options.rank, options.parts, stores.PrefixStore("meeting", store))
    cycles = cycles_per_s() if device.type == "cuda" else 0.0
    quarter = Quarter(options.rank, options.parts, device, options.small, cycles)
    head = {
        "question": "on quarters of one GPU, do several pipelines train faster than one?",
        "date": time.strftime("%Y-%m-%d"),
        "device": torch.cuda.get_device_name() if device.type == "cuda" else "cpu",
        "versions": {"torch": torch.__version__, "cuda": torch.version.cuda},
        "parts": options.parts,
    }
    record = RowsRecord(head, options.budget, options.out, float(os.environ[_BEGAN]), quiet=options.rank > 0)
    record.measure({"row": "partitions"}, lambda: partitions(meeting, device, options.small))
    for number, row in enumerate(rows()):
        full = {"row": row.name, **{k: v for k, v in asdict(row).items() if v != "" and v is not False}}
        if meeting.decided(f"late {number}", record.is_late or number == options.rows):
            for left in list(rows())[number:]:
                record.leave_out(
                    {"model": left.model, "precision": left.precision, "wire": left.wire, "row": left.name}
                )
            break
        record.measure(full, lambda row=row, number=number: measured(quarter, row, meeting, number))  # type: ignore[misc]
    dist.destroy_process_group()


def measured(quarter: Quarter, row: Row, meeting: Meeting, number: int) -> dict[str, Any]:
    """Return samples per second, and the peak of memory on each quarter."""
    on_cuda = quarter.device.type == "cuda"
    count, rounds = (12, 1) if quarter.small else (16, 2)
    batches = quarter.batches(count)

    def wait() -> None:
        if on_cuda:
            torch.cuda.synchronize()

    gc.collect()
    if on_cuda:
        torch.cuda.empty_cache()
        torch.cuda.reset_peak_memory_stats()
    with training(quarter, row) as (train, found):
        train(batches[: _WARM_UPS * row.N])  # finds buffers, chooses kernels, captures
        rates = []
        for n in range(rounds):
            wait()
            meeting.wait(f"row {number}, round {n}")
            begin = time.perf_counter()
            train(batches)
            wait()
            meeting.wait(f"row {number}, round {n}, end")
            rates.append(count * quarter.samples / (time.perf_counter() - begin))
        more = found()
    peak = round(torch.cuda.max_memory_allocated() / 2**20) if on_cuda else 0
    figures = {"samples_per_s": statistics.median(rates), "least": min(rates), "most": max(rates)}
    return {
        **{name: round(value, 2) for name, value in figures.items()},
        **more,
        **({"peak_mib": meeting.gathered(f"peak {number}", peak)} if on_cuda else {}),
    }


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--device", choices=["cuda", "cpu"], default="cuda")
    parser.add_argument("--small", action="store_true", help="tiny models: to see that it runs")
    parser.add_argument("--parts", type=int, default=4, help="K")
    parser.add_argument("--budget", type=float, default=330, help="seconds after which no row begins")
    parser.add_argument("--rows", type=int, help="how many rows to measure; by default all")
    parser.add_argument("--no-mps", action="store_true", help="processes take turns on the whole device")
    parser.add_argument("--rank", type=int, help=argparse.SUPPRESS)
    parser.add_argument("--out", type=Path, help="a file for the record, written after every row")
    options = parser.parse_args()
    if options.rank is not None:
        serve(options)
        return
    if options.device == "cuda" and not torch.cuda.is_available():
        parser.error(f"torch {torch.__version__} sees no CUDA device: use --device cpu --small")
    sys.exit(start(options))


if __name__ == "__main__":
    main()
