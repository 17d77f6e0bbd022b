"""Pipelines on a CUDA device: lanes on streams of their own, graphs, links between processes that share the device."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn

from avgpipe import Pipeline, Plan
from avgpipe.errors import StageError
from avgpipe.runtime.streams import CopyStream, LaneStream
from avgpipe.timeline import Event
from tests.options import grouped
from tests.runner import run
from tests.runtime.cases import (
    adamw,
    assert_same_state,
    language_model,
    token_batches,
    train_on_one_device,
    unequal,
)

pytestmark = pytest.mark.gpu

LOSS = nn.CrossEntropyLoss()
BOUND = 1e-9  # float64; the two devices add in different orders


def train(plan: Plan, batches: list[Any], device: str, model: nn.Module | None = None, **options: Any) -> Any:
    """Losses, final weights on the CPU, evaluation loss, and the timeline."""
    with Pipeline(
        model or language_model(), plan, **grouped(loss_fn=LOSS, optimizer=adamw, device=device, **options)
    ) as p:
        losses = [r.loss for r in p.train(batches)]
        state = {name: value.cpu() for name, value in p.state_dict().items()}
        return losses, state, p.evaluate(batches).loss, p.timeline()


def check(ours: Any, theirs: Any) -> None:
    assert unequal(ours[0], theirs[0]) < BOUND
    assert_same_state(ours[1], theirs[1], BOUND)
    assert abs(ours[2] - theirs[2]) < BOUND


@pytest.fixture
def late(monkeypatch: pytest.MonkeyPatch) -> None:
    """Every step is held up on the device, on one lane longer than on the next: a missing wait reads old memory."""
    step = LaneStream.step
    count = 0

    def slow(self: LaneStream, *arguments: Any) -> Any:
        nonlocal count
        count += 1
        with self._stream:
            torch.cuda._sleep(200_000 * (1 + count % 7))
        return step(self, *arguments)

    monkeypatch.setattr(LaneStream, "step", slow)


@pytest.mark.parametrize("clip", [None, 0.5])
def test_one_pipeline_trains_as_one_device_does(clip: float | None) -> None:
    batches = token_batches(6, 8, last=5)
    ours = train(Plan(stages=3, micro_batches=3), batches, "cuda", clip_grad_norm=clip)
    losses, state = train_on_one_device(language_model(), batches, LOSS, adamw, clip=clip)
    assert unequal(ours[0], losses) < BOUND
    assert_same_state(ours[1], state, BOUND)


@pytest.mark.parametrize("N", [2, 3])
@pytest.mark.parametrize("staleness", [0, 1])
@pytest.mark.parametrize("clip", [None, 0.5])
@pytest.mark.usefixtures("late")
def test_pipelines_on_streams_train_as_on_the_cpu(N: int, staleness: int, clip: float | None) -> None:
    plan = Plan(stages=3, pipelines=N, micro_batches=3, staleness=staleness)
    batches = token_batches(4 * N, 8, last=5)
    check(*(train(plan, batches, device, clip_grad_norm=clip) for device in ("cuda", "cpu")))


@pytest.mark.usefixtures("late")
def test_recomputation_and_autocast_run_on_streams() -> None:
    batches = token_batches(6, 8)
    plans = [Plan(stages=2, pipelines=2, micro_batches=2, recompute=how) for how in ("never", "always")]
    kept, recomputed = (train(plan, batches, "cuda", language_model(dropout=0.3)) for plan in plans)
    assert unequal(kept[0], recomputed[0]) < BOUND
    losses = train(plans[0], batches, "cuda", autocast=torch.bfloat16)[0]
    assert losses[-1] < losses[0]


def test_a_run_repeats_bit_for_bit() -> None:
    plan = Plan(stages=3, pipelines=2, micro_batches=2)
    batches = token_batches(8, 8)
    one, two = (train(plan, batches, "cuda", language_model(dropout=0.3)) for _ in range(2))
    assert one[0] == two[0]
    assert all(torch.equal(value, two[1][name]) for name, value in one[1].items())


def test_memory_is_given_back_between_batches() -> None:
    plan = Plan(stages=2, pipelines=2, micro_batches=2)
    with Pipeline(language_model(), plan, loss_fn=LOSS, optimizer=adamw, device="cuda") as p:
        list(p.train(token_batches(6, 64)))
        before = torch.cuda.memory_allocated()
        list(p.train(token_batches(40, 64)))
        assert torch.cuda.memory_allocated() <= 1.1 * before + (1 << 20)


def test_the_timeline_tells_when_the_device_worked() -> None:
    model = nn.Sequential(*(nn.Linear(2048, 2048) for _ in range(4)))
    batches = [(torch.randn(256, 2048), torch.randint(2048, (256,))) for _ in range(4)]
    plan = Plan(stages=2, pipelines=2, micro_batches=2)
    timeline = train(plan, batches, "cuda", model)[3]
    forwards = [e for e in timeline.events if e.kind == "F"]
    assert len(forwards) == 4 * 2 * 2

    def place(event: Event) -> tuple[int, int, int | None]:
        return event.pipeline, event.batch, event.micro_batch

    for first in (e for e in forwards if e.stage == 0):
        (second,) = (e for e in forwards if (e.stage, *place(e)) == (1, *place(first)))
        assert second.start_s >= first.end_s - 1e-4


def test_waiting_for_no_loss_means_waiting_for_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    """Issuing a batch does not wait for the device."""
    batches = token_batches(8, 8)
    plan = Plan(stages=2, pipelines=2, micro_batches=2)
    with Pipeline(
        language_model(), plan, loss_fn=LOSS, optimizer=adamw, device="cuda", clip_grad_norm=1.0
    ) as p:
        list(p.train(batches))  # lazy initialisation and lasting memory
        step = LaneStream.step

        def strict(self: LaneStream, *arguments: Any) -> Any:
            torch.cuda.set_sync_debug_mode("error")
            return step(self, *arguments)

        monkeypatch.setattr(LaneStream, "step", strict)
        end = LaneStream.end

        def lenient(self: LaneStream, *issued: Any) -> None:
            torch.cuda.set_sync_debug_mode("default")
            end(self, *issued)

        monkeypatch.setattr(LaneStream, "end", lenient)
        try:
            p.step(*token_batches(1, 16)[0])
        finally:
            torch.cuda.set_sync_debug_mode("default")


# ---- graphs ----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("staleness", [0, 1])
@pytest.mark.parametrize("dropout", [0.0, 0.3])
@pytest.mark.parametrize("N", [1, 2, 4])
@pytest.mark.usefixtures("late")
def test_graphs_train_as_without(N: int, dropout: float, staleness: int) -> None:
    plan = Plan(stages=3, pipelines=N, micro_batches=3, staleness=staleness)
    batches = token_batches(6 * N, 9, last=7)
    runs = [
        train(plan, batches, "cuda", language_model(dropout=dropout), cuda_graphs=graphs)
        for graphs in (True, False)
    ]
    assert runs[0][0] == runs[1][0]  # in every bit
    check(*runs)


def test_a_draw_that_no_batch_has_made_before_is_refused() -> None:
    class Late(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.calls = [0]

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            self.calls[0] += 1
            return nn.functional.dropout(x, 0.5) if self.calls[0] > 2 else x

    layers = list(language_model())
    model = nn.Sequential(*layers[:3], Late(), *layers[5:])
    with pytest.raises(StageError, match="cannot be captured as a CUDA graph"):
        train(Plan(stages=2, micro_batches=1), token_batches(4, 8), "cuda", model, cuda_graphs=True)


# ---- links between processes ---------------------------------------------------------------------------------


def join() -> None:
    """The tests' own barrier goes over the default group: NCCL's takes one GPU for each process."""
    dist.init_process_group("gloo")


SHARED = "cuda:0"  # "cuda" alone would be a device of each rank's own, where there are several


def over(link: str, N: int, device: str = SHARED, batches: int = 8, K: int = 3) -> Any:
    join()
    plan = Plan(stages=K, pipelines=N, micro_batches=3)
    losses, state, evaluated, _ = train(plan, token_batches(batches, 8, last=5), device, link=link)
    return losses, state, evaluated


@pytest.mark.ranks
@pytest.mark.parametrize("N", [1, 2])
@pytest.mark.parametrize("link", ["auto", "cuda-ipc", "shm", "gloo"])
def test_processes_that_share_a_device_train_as_one(link: str, N: int) -> None:
    alone = train(Plan(stages=3, pipelines=N, micro_batches=3), token_batches(8, 8, last=5), "cpu")
    for rank in run(3, over, link=link, N=N):
        check(rank, alone)


def named() -> list[str]:
    join()
    with Pipeline(language_model(), Plan(stages=2), loss_fn=LOSS, optimizer=adamw, device=SHARED) as p:
        return sorted({link.name for link in p._session.worker.links.values()})


@pytest.mark.ranks
def test_processes_that_share_a_device_use_its_memory() -> None:
    assert all("cuda-ipc" in names for names in run(2, named))


def held_up(device: str = SHARED, K: int = 3) -> Any:
    """The receiver's lane starts late, and the sender's copies too."""
    step = LaneStream.step

    def slow(self: LaneStream, *arguments: Any) -> Any:
        with self._stream:
            torch.cuda._sleep(2_000_000)
        return step(self, *arguments)

    LaneStream.step = slow  # type: ignore[method-assign,assignment]
    return over("cuda-ipc", 2, device, K=K)


@pytest.mark.ranks
def test_slots_are_neither_read_too_early_nor_written() -> None:
    alone = train(Plan(stages=3, pipelines=2, micro_batches=3), token_batches(8, 8, last=5), "cpu")
    for rank in run(3, held_up):
        check(rank, alone)


REPLICATED = {"stages": 2, "replication": [2, 1], "micro_batches": 3}
SPREAD = [
    {"stages": 1, "pipelines": 2, "spread": True, "staleness": staleness, "micro_batches": 2}
    for staleness in (0, 1)
]


def held_up_with(options: dict[str, Any], device: str, wire: str | None = None) -> Any:
    """Lanes start late, and what NCCL or gloo adds up, or another pipeline tells, is early or late beside them."""
    step = LaneStream.step

    def slow(self: LaneStream, *arguments: Any) -> Any:
        with self._stream:
            torch.cuda._sleep(2_000_000)
        return step(self, *arguments)

    if device != "cpu":
        LaneStream.step = slow  # type: ignore[method-assign,assignment]
    join()
    narrow: Any = {} if wire is None else {"wire_dtype": torch.bfloat16, "link": wire}
    losses, state, evaluated, _ = train(Plan(**options), token_batches(6, 8), device, **narrow)
    return losses, state, evaluated


@pytest.mark.ranks
@pytest.mark.parametrize("options", [REPLICATED, *SPREAD], ids=str)
def test_replicas_and_spread_pipelines_may_share_a_device(options: dict[str, Any]) -> None:
    plan = Plan(**options)
    alone = train(plan, token_batches(6, 8), "cpu")
    for rank in run(plan.workers, held_up_with, options=options, device=SHARED):
        check(rank, alone)


TWO = pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs a GPU for each of two workers")


@pytest.mark.ranks
@TWO
@pytest.mark.parametrize("options", [{**REPLICATED, "stages": 1, "replication": [2]}, *SPREAD], ids=str)
def test_replicas_and_spread_pipelines_may_have_a_device_each(options: dict[str, Any]) -> None:
    alone = train(Plan(**options), token_batches(6, 8), "cpu")
    for rank in run(2, held_up_with, options=options, device="cuda"):
        check(rank, alone)


@pytest.mark.ranks
@pytest.mark.parametrize("link", ["shm", "gloo"])
def test_a_narrower_wire_goes_through_the_host(link: str) -> None:
    """As on the CPU, but for what rounds to another side after a difference in the last bits."""
    options = {"stages": 2, "micro_batches": 2}
    ours, theirs = (
        run(2, held_up_with, options=options, device=device, wire=link)[0] for device in (SHARED, "cpu")
    )
    assert unequal(ours[0], theirs[0]) < 1e-3
    assert abs(ours[2] - theirs[2]) < 1e-3


REACHING = pytest.mark.skipif(
    torch.cuda.device_count() < 2 or not torch.cuda.can_device_access_peer(0, 1),
    reason="needs two GPUs that reach each other's memory",
)


def on_a_gpu_each(N: int, K: int = 3, link: str = "nccl") -> Any:
    return over(link, N, "cuda", K=K)


@pytest.mark.ranks
@TWO
@pytest.mark.parametrize("N", [1, 2])
@pytest.mark.parametrize("link", ["nccl", "auto", "shm", "gloo", pytest.param("cuda-ipc", marks=REACHING)])
def test_two_processes_with_a_gpu_each_train_as_one(link: str, N: int) -> None:
    alone = train(Plan(stages=2, pipelines=N, micro_batches=3), token_batches(8, 8, last=5), "cpu")
    for rank in run(2, on_a_gpu_each, N=N, K=2, link=link):
        check(rank, alone)


@pytest.mark.ranks
@REACHING
def test_slots_of_another_gpu_are_neither_read_too_early_nor_written() -> None:
    alone = train(Plan(stages=2, pipelines=2, micro_batches=3), token_batches(8, 8, last=5), "cpu")
    for rank in run(2, held_up, device="cuda", K=2):
        check(rank, alone)


def several(link: str, device: str = SHARED) -> list[int]:
    """Memory of the device that is taken after each of some Pipelines, which are closed one before the next."""
    taken = []
    join()
    for _ in range(5):
        plan = Plan(stages=2, pipelines=2, micro_batches=3)
        train(plan, token_batches(4, 8), device, link=link)
        torch.cuda.empty_cache()
        dist.barrier()
        free, total = torch.cuda.mem_get_info()
        taken.append(total - free)
        dist.barrier()
    return taken


@pytest.mark.ranks
@pytest.mark.parametrize(
    ("link", "device"),
    [
        ("cuda-ipc", SHARED),
        pytest.param("cuda-ipc", "cuda", marks=REACHING),
        pytest.param("nccl", "cuda", marks=TWO),
    ],
)
def test_pipelines_one_after_another_take_no_more_memory(link: str, device: str) -> None:
    """Slots serve the next one, and communicators end."""
    for taken in run(2, several, link=link, device=device):
        assert max(taken[2:]) - taken[1] < 16 << 20


def two_of_three_share(N: int) -> Any:
    join()
    plan, device = Plan(stages=3, pipelines=N, micro_batches=3), f"cuda:{min(dist.get_rank(), 1)}"
    losses, state, evaluated, _ = train(plan, token_batches(8, 8, last=5), device)
    return losses, state, evaluated


@pytest.mark.ranks
@pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two GPUs")
@pytest.mark.parametrize("N", [1, 2])
def test_of_three_processes_two_may_share_a_gpu(N: int) -> None:
    """Those by its memory, and the first one is joined by NCCL, or by CUDA IPC too where the two GPUs allow it."""
    alone = train(Plan(stages=3, pipelines=N, micro_batches=3), token_batches(8, 8, last=5), "cpu")
    for rank in run(3, two_of_three_share, N=N):
        check(rank, alone)


@pytest.mark.ranks
@pytest.mark.skipif(torch.cuda.device_count() < 3, reason="needs a GPU for each of three workers")
@pytest.mark.parametrize("N", [1, 2])
def test_processes_with_a_gpu_each_train_as_one(N: int) -> None:
    alone = train(Plan(stages=3, pipelines=N, micro_batches=3), token_batches(8, 8, last=5), "cpu")
    for rank in run(3, on_a_gpu_each, N=N):
        check(rank, alone)


# ---- copies of batches -----------------------------------------------------------------------------------------


def test_batches_are_copied_ahead_on_a_stream_of_their_own() -> None:
    copies = CopyStream(torch.device("cuda"))
    busy = torch.cuda.Stream()
    with torch.cuda.stream(busy):
        torch.cuda._sleep(500_000_000)
    x = torch.randn(1000, 100)
    with torch.cuda.stream(busy):
        copied = copies.start({"x": x, "n": 3})
    copies._stream.synchronize()
    assert not busy.query()
    assert torch.equal(copied.received()["x"].cpu(), x)
