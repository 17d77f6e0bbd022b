"""Our schedules against those of torch.distributed.pipelining: what torch dumps is read, what we write runs there."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed import pipelining
from torch.distributed.pipelining import PipelineStage
from torch.distributed.pipelining.schedules import _PipelineScheduleRuntime
from torch.testing._internal.distributed.fake_pg import FakeStore

from avgpipe.schedule import Schedule, build_schedule
from tests.interop.torch_stages import Plain, batch, gradients_of, loss_of, without_stages
from tests.runner import run

LOOPED = {  # torch's class, our name
    "LoopedBFS": "looped-bfs",
    "Interleaved1F1B": "interleaved-1f1b",
    "InterleavedZeroBubble": "interleaved-zero-bubble",
}
IN_A_V = {"ZBVZeroBubble": "zero-bubble-v", "DualPipeV": "dualpipe-v"}


def stages_of(rank: int, ranks: int, per_rank: int, name: str) -> list[int]:
    if name in IN_A_V:
        return [rank, 2 * ranks - 1 - rank]
    return list(range(rank, ranks * per_rank, ranks))


def torchs(name: str, ranks: int, micro_batches: int, per_rank: int = 2) -> Any:
    """Make torch's schedule as its first rank does; there is no other one."""
    dist.init_process_group("fake", rank=0, world_size=ranks, store=FakeStore())
    try:
        cpu, count = torch.device("cpu"), ranks * per_rank
        stages = [PipelineStage(nn.Identity(), k, count, cpu) for k in stages_of(0, ranks, per_rank, name)]
        return getattr(pipelining, f"Schedule{name}")(stages, micro_batches)
    finally:
        dist.destroy_process_group()


def dumped(schedule: Any, path: Path, form: str) -> Schedule:
    schedule._dump_csv(path, format=form)
    read = Schedule.from_torch_csv(path.read_text(), schedule.__class__.__name__)
    read.validate()
    return read


def ours(name: str, ranks: int, micro_batches: int, per_rank: int = 2) -> Schedule:
    several = {} if name in IN_A_V.values() else {"stages_per_worker": per_rank}
    return build_schedule(name, ranks * per_rank, micro_batches, **several)


# ---- what torch dumps ------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("form", ["compute_only", "compute_comms"])
@pytest.mark.parametrize("ranks", [1, 2, 4])
@pytest.mark.parametrize("name", [*LOOPED, *IN_A_V])
def test_a_file_of_torchs_is_read_as_our_schedule(name: str, ranks: int, form: str, tmp_path: Path) -> None:
    for micro_batches in (2 * ranks, 3 * ranks, 4 * ranks):
        read = dumped(torchs(name, ranks, micro_batches), tmp_path / "dumped.csv", form)
        assert read == ours({**LOOPED, **IN_A_V}[name], ranks, micro_batches)


@pytest.mark.parametrize("name", LOOPED)
def test_with_3_stages_on_a_rank_too(name: str, tmp_path: Path) -> None:
    read = dumped(torchs(name, 2, 4, per_rank=3), tmp_path / "dumped.csv", "compute_only")
    assert read == ours(LOOPED[name], 2, 4, per_rank=3)


@pytest.mark.parametrize("name", ["LoopedBFS", "DualPipeV"])
@pytest.mark.parametrize("micro_batches", [9, 11])
def test_these_orders_are_the_same_for_any_number_of_micro_batches(
    name: str, micro_batches: int, tmp_path: Path
) -> None:
    read = dumped(torchs(name, 4, micro_batches), tmp_path / "dumped.csv", "compute_only")
    assert read == ours({**LOOPED, **IN_A_V}[name], 4, micro_batches)


@pytest.mark.parametrize("name", ["Interleaved1F1B", "InterleavedZeroBubble"])
def test_these_have_larger_groups_for_uneven_numbers_where_ours_have_a_smaller_last_one(
    name: str, tmp_path: Path
) -> None:
    read = dumped(torchs(name, 4, 6), tmp_path / "dumped.csv", "compute_only")
    other = ours(LOOPED[name], 4, 6)
    assert read != other
    assert [sorted(row) for row in read.rows] == [sorted(row) for row in other.rows]


def test_h1_is_interleaved_zero_bubble_with_a_stage_on_each_rank(tmp_path: Path) -> None:
    for ranks, micro_batches in ((2, 4), (3, 6), (4, 8)):
        schedule = torchs("InterleavedZeroBubble", ranks, micro_batches, per_rank=1)
        read = dumped(schedule, tmp_path / "dumped.csv", "compute_only")
        assert read == build_schedule("zero-bubble-h1", ranks, micro_batches)


# ---- what we write ---------------------------------------------------------------------------------------------------

WRITTEN = {  # name of the schedule, micro-batches
    "looped-bfs": 3,
    "interleaved-1f1b": 4,
    "interleaved-zero-bubble": 3,
    "zero-bubble-h1": 4,
    "advance-forward": 4,
}
if torch.__version__ >= (
    2,
    13,
):  # 2.11 has a rank with neighbouring stages send to itself, which gloo refuses
    WRITTEN |= {"zero-bubble-v": 3, "dualpipe-v": 5}


def train(names: dict[str, int]) -> dict[str, list[list[torch.Tensor]]]:
    """On two ranks, by schedule: the gradients of this rank's stages after a batch, as torch's runtime makes them."""
    dist.init_process_group("gloo")
    rank, found = dist.get_rank(), {}
    for name, micro_batches in names.items():
        schedule = written(name, micro_batches)
        own = schedule.placement[rank]
        modules = [Plain(k) for k in own]
        stages = [
            PipelineStage(module, k, schedule.stages, torch.device("cpu")) for k, module in zip(own, modules)
        ]
        runs = _PipelineScheduleRuntime(stages, micro_batches, loss_of)
        path = Path(os.environ["TEST_FOLDER"], f"{name}-{rank}.csv")
        path.write_text(schedule.to_torch_csv())
        runs._load_csv(str(path), format="compute_only")
        x, y, _ = batch(0, 2 * micro_batches)
        runs.step(*([x] if 0 in own else []), **({"target": y} if schedule.stages - 1 in own else {}))
        found[name] = [gradients_of(module) for module in modules]
    return found


def written(name: str, micro_batches: int) -> Schedule:
    return build_schedule(name, 2 if name in ("zero-bubble-h1", "advance-forward") else 4, micro_batches)


@pytest.mark.ranks
def test_what_we_write_runs_on_torchs_runtime_to_the_gradients_of_one_device() -> None:
    found = run(2, train, names=WRITTEN)
    for name, micro_batches in WRITTEN.items():
        schedule = written(name, micro_batches)
        by_stage = {
            k: gradients
            for own, ranks in zip(schedule.placement, found)
            for k, gradients in zip(own, ranks[name])
        }
        (expected,) = without_stages(schedule.stages, micro_batches, program="t")
        whole = [gradient for k in range(schedule.stages) for gradient in by_stage[k]]
        torch.testing.assert_close(whole, expected["gradients"], rtol=1e-12, atol=1e-13)
