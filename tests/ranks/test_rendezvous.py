"""Ranks find each other, or say within the limit who is missing; no wait for a store is without an end."""

from __future__ import annotations

import os
import re
import signal
import socket
import stat
import subprocess
import sys
import threading
import time
from contextlib import suppress
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn

from avgpipe import PeerLost, Pipeline, Plan
from avgpipe.fault.generation import prospect
from avgpipe.ranks import rendezvous
from avgpipe.ranks.environment import GENERATION
from avgpipe.ranks.launch import private_meeting
from avgpipe.ranks.limits import LIMITS
from avgpipe.ranks.rendezvous import Board, _number_of_start, join, open_store, private_store
from tests.options import grouped
from tests.patience import limit, wait_until
from tests.runner import ROOT, Ranks, run, touch
from tests.runtime.cases import language_model, momentum, token_batches

LIMIT_S = 4.0


class Store:
    """Of one process, with the methods that a board asks."""

    def __init__(self) -> None:
        self.texts: dict[str, bytes] = {}

    def set(self, name: str, text: str) -> None:
        self.texts[name] = text.encode()

    def check(self, names: list[str]) -> bool:
        return all(name in self.texts for name in names)

    def get(self, name: str) -> bytes:
        return self.texts[name]

    def compare_set(self, name: str, expected: str, text: str) -> bytes:
        return self.texts.setdefault(name, text.encode())


class Silent(Store):
    """As one whose host stands still, until ``answers``."""

    def __init__(self) -> None:
        super().__init__()
        self.answers, self.asked = threading.Event(), 0

    def check(self, names: list[str]) -> bool:
        self.asked += 1
        self.answers.wait(60)
        return super().check(names)


# ---- the board ---------------------------------------------------------------------------------------------------


@pytest.mark.slow
def test_a_store_that_does_not_answer_keeps_nobody() -> None:
    store = Silent()
    board = Board(store)
    begin = time.monotonic()
    with pytest.raises(RuntimeError, match="the store does not answer"):
        board.get("failure")
    assert 1 < time.monotonic() - begin < limit(10)
    begin = time.monotonic()
    for _ in range(100):
        with pytest.raises(RuntimeError, match="the store does not answer"):
            board.put("doing", "nothing")
    assert time.monotonic() - begin < limit(1)  # it is not asked again as long as it owes an answer
    assert store.asked == 1
    store.answers.set()

    def can_put() -> bool:
        with suppress(RuntimeError):
            board.put("doing", "something")
        return store.texts.get("doing") == b"something"

    wait_until(can_put)
    assert board.get("doing") == "something"


def test_a_process_that_can_start_no_thread_can_still_report(monkeypatch: pytest.MonkeyPatch) -> None:
    def start(_: threading.Thread) -> None:
        raise MemoryError

    board = Board(Store())
    monkeypatch.setattr(threading.Thread, "start", start)
    board.put("failure", "no memory")
    assert board.get("failure") == "no memory"


def test_a_board_that_nobody_has_leaves_no_thread() -> None:
    def threads() -> set[threading.Thread]:
        return {thread for thread in threading.enumerate() if thread.name == "avgpipe-board"}

    before = threads()
    board = Board(Store())
    board.put("a", "b")
    own = threads() - before  # those of other tests may end meanwhile
    assert own
    del board
    wait_until(lambda: not threads() & own)


def test_two_threads_may_ask_at_once() -> None:
    class Slow(Store):
        def check(self, names: list[str]) -> bool:
            time.sleep(0.3)
            return super().check(names)

    board, found = Board(Slow()), []
    board.put("a", "b")
    threads = [threading.Thread(target=lambda: found.append(board.get("a"))) for _ in range(3)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert found == ["b"] * 3


def test_a_store_that_takes_no_second_connection_is_not_waited_for() -> None:
    class Stopped(Store):
        def clone(self) -> None:
            threading.Event().wait(20)

    class Gone(Store):
        def clone(self) -> None:
            raise RuntimeError("connection refused")

    for store, why in ((Stopped(), r"not done after 0\.2 s"), (Gone(), "connection refused")):
        with pytest.raises(
            PeerLost, match=f"the store's holder, rank 0 or the launcher, does not answer: {why}"
        ):
            Board.beside(store, 0, 2, 0.2)


@pytest.mark.parametrize("text", ["\udc80 half a pair", "a\x00b", "", "x" * 1_000_000, "Übung 日本 \n"])
def test_any_text_can_be_put(text: str) -> None:
    board = Board(Store())
    board.put("a", text)
    assert board.put_first("b", text) == board.put_first("b", "later")
    for name in "ab":
        found = board.get(name)
        assert found is not None
        assert len(found) < 5000
        assert found[:3] == text.encode(errors="backslashreplace").decode()[:3]


# ---- meeting -----------------------------------------------------------------------------------------------------


def test_who_does_not_come_is_named() -> None:
    board = Board(Store(), 0, 4)
    board.put("start/2", "here")
    with pytest.raises(
        PeerLost, match=r"rank 0 has waited 0 s at its start for rank 1, rank 3, which died"
    ) as found:
        board.meet("start", time.monotonic() + 0.1)
    assert found.value.has_waited


def become_rank_0_of_2(folder: Path, monkeypatch: pytest.MonkeyPatch, generation: str) -> None:
    environment = {"AVGPIPE_STORE": str(folder / "store"), "RANK": "0", "WORLD_SIZE": "2"}
    for name, value in {**environment, GENERATION: generation, "TORCHELASTIC_RUN_ID": ""}.items():
        monkeypatch.setenv(name, value)


def test_nobody_waits_for_a_rank_that_is_to_be_replaced(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    become_rank_0_of_2(tmp_path, monkeypatch, "0")
    private_store().set(prospect(1), "[1]")
    begin = time.monotonic()
    with pytest.raises(PeerLost, match="at its start for rank 1") as found:
        join(60)
    assert not found.value.has_waited
    private_store().set("avgpipe/start/1", "here")  # and is killed then
    never = threading.Event()
    monkeypatch.setattr(dist, "init_process_group", lambda *_, **__: never.wait(60))
    with pytest.raises(PeerLost, match="rank 1, which died or is stopped: a rank is to be replaced"):
        join(60)
    never.set()
    assert time.monotonic() - begin < limit(20)


@pytest.mark.parametrize("generation", ["0", "1"])
def test_ranks_wait_longer_for_others_that_may_take_as_long_to_start(
    generation: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    become_rank_0_of_2(tmp_path, monkeypatch, generation)
    monkeypatch.setattr(rendezvous, "_start_s", lambda: 60.0)
    monkeypatch.setattr(dist, "init_process_group", lambda *_, **__: None)
    store = open_store(5)
    # No rank starts together with others that meet again.
    late = threading.Timer(1.0 if generation == "0" else limit(30), lambda: store.set("start/1", "here"))
    late.start()
    if generation == "0":
        join(0.1)
    else:
        with pytest.raises(PeerLost, match="rank 0 has waited 0 s at its start for rank 1"):
            join(0.1)
    late.cancel()


@pytest.mark.ranks
def test_a_process_knows_how_long_its_start_took() -> None:
    code = "import time; time.sleep(1); from avgpipe.ranks.rendezvous import _start_s as s; print(s(), s())"
    begin = time.monotonic()
    said = subprocess.run(
        [sys.executable, "-c", code],
        env={**os.environ, "PYTHONPATH": "python"},
        cwd=ROOT,
        capture_output=True,
        check=True,
        text=True,
    ).stdout
    first, second = map(float, said.split())
    assert 1 < first == second < time.monotonic() - begin + 0.1


def test_a_group_that_could_not_be_made_leaves_no_number_behind(monkeypatch: pytest.MonkeyPatch) -> None:
    """A new rank begins to count groups from 0, and torch has their ranks meet by number."""
    numbers = []

    def fail(*_: Any, **__: Any) -> None:
        numbers.append(dist.distributed_c10d._process_group_name([], use_hashed_name=False))
        raise RuntimeError("connection refused")

    monkeypatch.setattr(dist, "init_process_group", fail)
    monkeypatch.setattr(rendezvous, "open_store", lambda _: dist.PrefixStore("a", dist.HashStore()))  # type: ignore[attr-defined]
    monkeypatch.setattr(rendezvous, "LIMITS", replace(LIMITS, roll_call_s=0.1))
    monkeypatch.setenv("RANK", "0")
    monkeypatch.setenv("WORLD_SIZE", "1")
    monkeypatch.delenv("TORCHELASTIC_RUN_ID", raising=False)
    for _ in range(2):
        with pytest.raises(PeerLost, match="connection refused"):
            join(5)
    assert numbers == ["0", "0"]


@pytest.mark.slow
def test_a_meeting_with_a_silent_store_ends() -> None:
    with pytest.raises(
        PeerLost, match="rank 0 cannot meet the others at its start: the store does not answer"
    ):
        Board(Silent(), 0, 2).meet("start", time.monotonic() + 0.1)


@pytest.mark.slow
def test_a_store_that_answers_late_is_asked_again() -> None:
    store = Silent()
    board = Board(store, 0, 2)
    board.put("start/1", "here")
    late = threading.Timer(3.0, store.answers.set)
    late.start()
    board.meet("start", time.monotonic() + 60)
    assert store.texts["start/0"] == b"here"
    late.join()


def numbers(store: Any, ranks: list[int], limit_s: float = 20.0) -> list[str]:
    """What ranks that start in this order find; they meet, which is when the first one answers."""
    found: dict[int, str] = {}

    def start(rank: int) -> None:
        deadline = time.monotonic() + limit(limit_s)
        with suppress(PeerLost):
            number, meanwhile = _number_of_start(Board(store, rank), rank, 3, deadline)
            Board(dist.PrefixStore(f"start-{number}", store), rank, 3).meet("start", deadline, meanwhile)  # type: ignore[attr-defined]
            found[rank] = number

    threads = [threading.Thread(target=start, args=(rank,)) for rank in ranks]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    return [found[rank] for rank in sorted(found)]


def test_each_start_of_the_ranks_has_a_number_of_its_own() -> None:
    store = dist.HashStore()  # type: ignore[attr-defined]
    assert numbers(store, [0, 1, 2]) == ["1"] * 3
    assert numbers(store, [2, 1, 0]) == ["2"] * 3
    assert numbers(store, [1, 0], limit_s=0.3) == []  # the third is ended before it asks
    assert numbers(store, [1, 2], limit_s=0.3) == []  # and so is the first
    assert numbers(store, [2, 0, 1]) == ["4"] * 3


def test_who_waits_for_the_number_names_the_first_rank() -> None:
    with pytest.raises(PeerLost, match=r"rank 1 has waited 0 s at its start for rank 0, which died before"):
        _number_of_start(Board(Store(), 1), 1, 2, time.monotonic() + 0.1)


def test_a_run_of_torchrun_within_one_of_ours_has_its_own_store(tmp_path: Path, monkeypatch: Any) -> None:
    for name, value in private_meeting(str(tmp_path)).items():
        monkeypatch.setenv(name, value)
    assert private_store() is not None
    monkeypatch.setenv("TORCHELASTIC_RUN_ID", "7")
    assert private_store() is None


def test_nobody_else_reads_the_private_store(tmp_path: Path, monkeypatch: Any) -> None:
    folder = tmp_path / "closed"
    folder.mkdir(mode=0o700)
    chosen = private_meeting(str(folder))
    monkeypatch.setenv("AVGPIPE_STORE", chosen["AVGPIPE_STORE"])
    Board(open_store(5)).put("a", "b")
    assert Path(chosen["AVGPIPE_STORE"]).parent == folder
    assert stat.S_IMODE(folder.stat().st_mode) == 0o700


def test_a_missing_address_is_asked_for(monkeypatch: Any) -> None:
    for name in ("MASTER_ADDR", "MASTER_PORT", "AVGPIPE_STORE"):
        monkeypatch.delenv(name, raising=False)
    with pytest.raises(ValueError, match="but not MASTER_ADDR: start the ranks with torchrun or avgpipe run"):
        open_store(1)


@pytest.mark.slow
def test_a_missing_store_is_an_error(monkeypatch: Any) -> None:
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    for name, value in {
        "RANK": "1",
        "WORLD_SIZE": "2",
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": str(port),
    }.items():
        monkeypatch.setenv(name, value)
    monkeypatch.delenv("AVGPIPE_STORE", raising=False)
    begin = time.monotonic()
    with pytest.raises(PeerLost, match=f"rank 1 found no store at 127.0.0.1:{port} within 2 s"):
        open_store(2)
    assert time.monotonic() - begin < 2 + limit(5)


# ---- connecting --------------------------------------------------------------------------------------------------


def connecting(make: Any, store: Store, rank: int = 0, limit_s: float = 60.0) -> Any:
    return Board(store, rank, 4).connect(make, "here", limit_s)


def test_what_connects_is_returned() -> None:
    store = Store()
    assert connecting(lambda: "the group", store) == "the group"
    assert store.texts == {"here/done/0": b"here"}


@pytest.mark.slow
def test_who_neither_has_connected_nor_notices_is_named() -> None:
    store, ends = Store(), threading.Event()
    store.texts = {"here/done/1": b"", "here/done/3": b""}
    with pytest.raises(
        PeerLost, match=r"rank 0 cannot connect to rank 2, which died or is stopped: not done after 1 s"
    ) as found:
        connecting(lambda: ends.wait(60), store, limit_s=1.0)
    assert found.value.has_waited  # so the launcher looks for ranks that are stopped
    ends.set()


@pytest.mark.slow
def test_a_failure_of_one_ends_the_others_waiting() -> None:
    store, ends = Store(), threading.Event()

    def refused() -> None:
        raise RuntimeError("connection refused")

    found: list[str] = []

    def one(rank: int, make: Any) -> None:
        try:
            connecting(make, store, rank)
        except PeerLost as loss:
            found.append(str(loss))

    threads = [
        threading.Thread(target=one, args=(rank, refused if rank == 1 else lambda: ends.wait(60)))
        for rank in (0, 1, 3)
    ]
    begin = time.monotonic()
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert time.monotonic() - begin < limit(20)
    ends.set()
    assert sorted(found) == [
        f"rank {rank} cannot connect to rank 2, which died or is stopped: connection refused"
        for rank in (0, 1, 3)
    ]


@pytest.mark.promise
def test_connecting_without_an_answer_of_the_store_ends() -> None:
    with pytest.raises(
        PeerLost, match="rank 0 cannot connect to rank 1, rank 2, rank 3, which died or is stopped: no"
    ):
        connecting(lambda: threading.Event().wait(20), Silent(), limit_s=0.5)


# ---- ranks that die, or stand still ------------------------------------------------------------------------------


def make(K: int = 2, **options: Any) -> Pipeline:
    chosen: dict[str, Any] = {"loss_fn": nn.CrossEntropyLoss(), "optimizer": momentum, "timeout_s": LIMIT_S}
    return Pipeline(
        language_model(), Plan(stages=K, pipelines=2, micro_batches=2), **grouped(**{**chosen, **options})
    )


def _dies_before(victim: int) -> None:
    if int(os.environ["RANK"]) == victim:
        os.kill(os.getpid(), signal.SIGKILL)
    rendezvous._start_s = lambda: 0.0  # type: ignore[assignment]
    begin = time.monotonic()
    try:
        make(3)
    finally:
        print(f"took {time.monotonic() - begin:.2f} s", flush=True)


def _dies_while_a_pipeline_is_made(victim: int) -> None:
    """After the group of processes has been made."""
    dist.init_process_group("gloo")
    dist.barrier()
    _dies_before(victim)


def _dies_before_the_second(victim: int) -> None:
    with make(3, timeout_s=20) as p:
        list(p.train(token_batches(1, 4)))
    _dies_before(victim)


@pytest.mark.ranks
@pytest.mark.slow
@pytest.mark.parametrize("victim", [0, 2])
@pytest.mark.parametrize(
    ("function", "place"),
    [
        (_dies_before, "start"),
        (_dies_while_a_pipeline_is_made, "Pipeline"),
        (_dies_before_the_second, "Pipeline number 2"),
    ],
    ids=["before the start", "before the Pipeline", "before the second Pipeline"],
)
def test_a_rank_that_died_before_the_others_met_it_is_named(function: Any, place: str, victim: int) -> None:
    workers = Ranks(3, function, victim=victim)
    for rank, (code, output) in enumerate(workers.join(40)):
        if rank != victim:
            assert code == 1, output
            assert re.search(
                rf"PeerLost: rank {rank} has waited [34] s at its {place} for rank {victim}, which", output
            ), output
            took = re.search(r"took ([\d.]+) s", output)
            assert took
            assert float(took[1]) < LIMIT_S + limit(5)


def _dies_while_it_connects(victim: int) -> None:
    if int(os.environ["RANK"]) == victim:
        dist.new_group = lambda **_: os.kill(os.getpid(), signal.SIGKILL)
    _dies_before(-1)


@pytest.mark.ranks
@pytest.mark.slow
@pytest.mark.parametrize("victim", [0, 1, 2])
def test_a_rank_that_died_while_the_others_connected_is_named(victim: int) -> None:
    workers = Ranks(3, _dies_while_it_connects, victim=victim)
    for rank, (code, output) in enumerate(workers.join(40)):
        if rank != victim:
            assert code == 1, output
            assert (
                f"PeerLost: rank {rank} cannot connect to rank {victim}, which died or is stopped" in output
            ), output
            took = re.search(r"took ([\d.]+) s", output)
            assert took
            assert float(took[1]) < LIMIT_S + limit(5)


def _trains_until_it_ends() -> None:
    with make() as p:
        while True:
            for _ in p.train(token_batches(2, 8)):
                touch("trains")


HOLDER = """
import sys, torch.distributed as d
store = d.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
print(store.port, flush=True)
sys.stdin.read()
"""


@pytest.fixture
def holder() -> Any:
    """A process that holds the store, and its port."""
    process = subprocess.Popen(
        [sys.executable, "-c", HOLDER], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, cwd=ROOT
    )
    assert process.stdout
    yield process, int(process.stdout.readline())
    process.kill()
    process.communicate()


@pytest.mark.ranks
@pytest.mark.slow
def test_a_stopped_store_hides_no_rank_that_died(holder: Any) -> None:
    """The survivor asks the store why, which does not answer: it says so, within its limit."""
    process, port = holder
    workers = Ranks(2, _trains_until_it_ends, port=port)
    workers.wait_for(2, "trains")
    process.send_signal(signal.SIGSTOP)
    workers.kill(1)
    begin = time.monotonic()
    workers.processes[0].join(LIMIT_S + limit(15))
    took = time.monotonic() - begin
    output = workers.join(5)[0][1]
    assert took < LIMIT_S + limit(5), output
    assert re.search(r"PeerLost: rank 1 \(stage 1\) died or closed its connection", output), output


@pytest.mark.ranks
@pytest.mark.slow
def test_a_stopped_store_hides_no_rank_that_stands_still(holder: Any) -> None:
    process, port = holder
    workers = Ranks(2, _trains_until_it_ends, port=port)
    workers.wait_for(2, "trains")
    process.send_signal(signal.SIGSTOP)
    os.kill(workers.processes[1].pid or 0, signal.SIGSTOP)
    begin = time.monotonic()
    workers.processes[0].join(LIMIT_S + limit(15))
    took = time.monotonic() - begin
    workers.kill(1)
    output = workers.join(5)[0][1]
    assert took < LIMIT_S + limit(5), output
    assert re.search(r"PipelineTimeout: rank 0 waited 4 s for the .* from stage 1", output), output
    assert "rank 1 cannot be asked: the store does not answer" in output


@pytest.mark.ranks
@pytest.mark.slow
def test_a_stopped_store_disturbs_no_training(holder: Any) -> None:
    process, port = holder
    workers = Ranks(2, _trains_until_it_ends, port=port)
    workers.wait_for(2, "trains")
    process.send_signal(signal.SIGSTOP)
    time.sleep(LIMIT_S + 2)  # it must stand still for longer than the limit
    assert all(process.is_alive() for process in workers.processes), workers.outputs()
    workers.kill(0, 1)
    workers.join(5)


def _alone() -> tuple[int, int, list[float]]:
    """Every rank by itself, though a launcher has started several."""
    join(20, "gloo", size=1)
    with Pipeline(language_model(), Plan(stages=2), loss_fn=nn.CrossEntropyLoss(), optimizer=momentum) as p:
        return p.world.rank, p.world.size, [r.loss for r in p.train(token_batches(2, 8))]


@pytest.mark.ranks
def test_a_rank_can_be_alone() -> None:
    first, second = run(2, _alone)
    assert first[:2] == (0, 1)
    assert first == second


def _first_two() -> float:
    if os.environ["RANK"] == "2":
        return 0.0
    join(20, "gloo", size=2)
    total = torch.ones(1)
    dist.all_reduce(total)
    return float(total)


@pytest.mark.ranks
def test_some_ranks_can_be_a_group() -> None:
    assert run(3, _first_two) == [2.0, 2.0, 0.0]


def _own_group() -> list[float]:
    """A script that makes torch's group itself: ours does not make another one."""
    dist.init_process_group("gloo")
    group = dist.group.WORLD
    with make(timeout_s=20) as p:
        losses = [r.loss for r in p.train(token_batches(2, 8))]
    assert dist.group.WORLD is group
    total = torch.ones(1)
    dist.all_reduce(total)
    assert total.item() == 2
    return losses


@pytest.mark.ranks
def test_the_callers_own_group_stays() -> None:
    first, second = run(2, _own_group)
    assert first == second
