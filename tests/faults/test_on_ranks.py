"""Each kind of fault on real ranks: what the others say, whom they name, and that nothing is left."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest
from torch import nn

from avgpipe import CheckpointError, PeerLost, Pipeline, Plan
from avgpipe.checkpoint import verify_checkpoint
from avgpipe.testing import environment, fail_at
from tests.cli.command import alive, avgpipe
from tests.links.ends import LINKS
from tests.patience import SharedMemory, limit
from tests.runner import Ranks, run
from tests.runtime.cases import language_model, momentum, token_batches

pytestmark = pytest.mark.ranks

LOSS = nn.CrossEntropyLoss()
TIMEOUT_S = 30  # for those who do not have to wait for it
LIMIT_S, SPARE_S = 8, 5  # for those who do, and what they may take beyond that
START_S = 40  # of processes on a busy machine
HERE = {"rank": 1, "phase": "training", "batch": 2, "action": "forward"}


def pipeline(K: int, link: str = "auto", timeout_s: float = TIMEOUT_S, **plan: Any) -> Pipeline:
    chosen = Plan(stages=K, micro_batches=2, **plan)
    return Pipeline(
        language_model(), chosen, loss_fn=LOSS, optimizer=momentum, link=link, timeout_s=timeout_s
    )


def train(faults: list[dict[str, Any]], folder: str = "", K: int = 3, **options: Any) -> Any:
    """Train, evaluate, save, load and train, with faults armed on every rank alike."""
    armed = [fail_at(**fault) for fault in faults]
    with pipeline(K, **options) as p:
        losses = [r.loss for r in p.train(token_batches(4, 6))]
        losses.append(p.evaluate(token_batches(2, 6)).loss)
        if folder:
            p.save(folder)
            p.load(folder)
        losses += [r.loss for r in p.train(token_batches(2, 6, seed=1))]
    return losses, [one.fired for one in armed]


def ends_of(faults: list[dict[str, Any]], **options: Any) -> Any:
    """Exit codes and last lines of three ranks, which must all have ended in time and left nothing."""
    memory, ranks = SharedMemory(), Ranks(3, train, faults=faults, **options)
    ends = ranks.join(START_S + options.get("timeout_s", 0) + SPARE_S)
    assert not any(alive(process.pid) for process in ranks.processes)
    memory.assert_nothing_is_left()
    for code, output in ends:
        assert code in (0, 1, -9), output  # none was ended for being late, none aborted
    return [code for code, _ in ends], [(output.strip().splitlines() or [""])[-1] for _, output in ends]


@pytest.mark.ranks
def test_an_exception_is_reported_on_all() -> None:
    codes, last = ends_of([{"kind": "exception", **HERE, "micro_batch": 1}])
    assert codes == [1, 1, 1]
    what = "injected by avgpipe.testing at training: rank 1, restart 0, pipeline 0, stage 1, batch 2, micro_batch 1"
    for rank in (0, 2):
        assert f"PeerLost: rank {rank} stops because of rank 1: InjectedFault: {what}" in last[rank]
    assert f"InjectedFault: {what}, action forward" in last[1]


@pytest.mark.slow
def test_memory_that_is_used_up_is_reported_on_all() -> None:
    codes, last = ends_of([{"kind": "out of memory", **HERE}])
    assert codes == [1, 1, 1]
    for rank in (0, 2):
        assert (
            f"PeerLost: rank {rank} stops because of rank 1: MemoryError: out of memory, injected"
            in last[rank]
        )


@pytest.mark.slow
@pytest.mark.parametrize("link", LINKS)
def test_others_name_a_rank_that_died_in_the_middle_of_a_message(link: str) -> None:
    codes, last = ends_of([{"kind": "half-written message", **HERE}], link=link)
    assert codes == [1, -9, 1]
    for rank in (0, 2):
        assert "PeerLost" in last[rank]
        assert "rank 1 (stage 1) died or closed its connection" in last[rank]


@pytest.mark.slow
def test_others_name_a_rank_that_never_starts() -> None:
    codes, last = ends_of([{"kind": "kill", "rank": 1, "phase": "start"}], timeout_s=LIMIT_S)
    assert codes == [1, -9, 1]
    for rank in (0, 2):
        assert re.search("PeerLost: .* rank 1, which died before, or does not arrive", last[rank])


PLACES = [
    *({"phase": "evaluation", "batch": 1}, {"phase": "update", "batch": 3}),
    *({"phase": "save", "action": action} for action in ("begin", "written")),
    *({"phase": "load", "action": action} for action in ("begin", "restore")),
]


@pytest.mark.slow
@pytest.mark.parametrize("place", PLACES, ids=lambda place: " ".join(map(str, place.values())))
def test_others_name_a_rank_that_was_killed_elsewhere(place: dict[str, Any], tmp_path: Path) -> None:
    codes, last = ends_of([{"kind": "kill", "rank": 1, **place}], folder=str(tmp_path / "c"))
    assert codes == [1, -9, 1]
    for rank in (0, 2):
        assert re.search(r"PeerLost: .*rank 1 \(stage 1\) died or closed its connection", last[rank])
    if place["phase"] == "load":
        assert verify_checkpoint(tmp_path / "c").batches == 4


@pytest.mark.slow
def test_a_rank_that_is_killed_at_the_end_has_done_its_work() -> None:
    codes, last = ends_of([{"kind": "kill", "rank": 1, "phase": "shutdown"}])
    assert codes == [0, -9, 0], last


@pytest.mark.slow
def test_a_pipeline_of_its_own_is_killed_between_update_and_round() -> None:
    ranks = Ranks(
        4,
        train,
        faults=[{"kind": "kill", "pipeline": 1, "stage": 0, "phase": "averaging", "batch": 1}],
        K=2,
        pipelines=2,
        spread=True,
    )
    ends = ranks.join(START_S + SPARE_S)
    assert [code for code, _ in ends] == [1, 1, -9, 1]
    assert "rank 2 (" in ends[0][1].strip().splitlines()[-1]


@pytest.mark.slow
def test_a_rank_that_stands_still_for_a_while_costs_time_alone() -> None:
    undisturbed, *_ = run(3, train, faults=[])
    found = run(
        3,
        train,
        faults=[
            {"kind": "stop", "for_s": 0.5, **HERE},
            {"kind": "slow", "for_s": 0.01, "rank": 2, "times": 5},
        ],
    )
    assert [losses for losses, _ in found] == [undisturbed[0]] * 3
    assert [fired for _, fired in found] == [[0, 0], [1, 0], [0, 5]]


@pytest.mark.slow
def test_a_rank_that_stands_still_for_ever_is_named() -> None:
    ranks = Ranks(3, train, faults=[{"kind": "stop", **HERE}], timeout_s=LIMIT_S)
    for rank in (0, 2):
        ranks.processes[rank].join(limit(START_S + LIMIT_S + SPARE_S))
    assert Path(f"/proc/{ranks.processes[1].pid}/stat").read_text().rpartition(")")[2].split()[0] == "T"
    ranks.kill(1)
    (code, first), _, (other, third) = ranks.join()
    assert code == other == 1
    for text in (first, third):
        assert "PipelineTimeout" in text
        assert "from stage 1 (pipeline 0" in text.strip().splitlines()[-1]
        assert "; rank 1 " in text  # was last seen so many seconds ago


@pytest.mark.promise(1)
@pytest.mark.slow
@pytest.mark.parametrize("link", LINKS)
def test_a_line_that_is_cut_ends_all_ranks_by_their_limit(link: str) -> None:
    codes, last = ends_of([{"kind": "cut line", **HERE}], link=link, timeout_s=LIMIT_S)
    assert codes == [1, 1, 1]
    for rank in (0, 2):
        assert f"PipelineTimeout: rank {rank} waited {LIMIT_S} s for the " in last[rank]
        assert "from stage 1 (pipeline 0" in last[rank]
        assert "rank 1 was last seen" in last[rank]


@pytest.mark.slow
@pytest.mark.parametrize("store", [False, True])
def test_a_line_that_is_cut_at_a_save_ends_all_ranks(store: bool, tmp_path: Path) -> None:
    fault = {"kind": "cut line", "rank": 1, "phase": "save", "action": "begin", "store": store}
    codes, last = ends_of([fault], folder=str(tmp_path / "c"), link="gloo", timeout_s=LIMIT_S)
    assert codes == [1, 1, 1]
    assert not (tmp_path / "c" / "manifest.json").exists()
    if not store:  # all can still say that they are there, and nobody can know which end is at fault
        assert all("no working connection to rank " in text and "rank 1" in text for text in last)
    else:
        assert all("rank 1 (stage 1), which does not answer" in last[rank] for rank in (0, 2))
        assert "rank 1 is cut off from the others" in last[1]


@pytest.mark.slow
def test_connections_that_are_reset_end_all_ranks() -> None:
    codes, last = ends_of([{"kind": "reset", **HERE}], link="gloo")
    assert codes == [1, 1, 1]
    for text in last:  # which end of a connection is to blame nobody can know
        assert re.search(r"PeerLost: .*\bstage \d\) died or closed its connection", text)
        assert "rank 1" in text


def reset_at_a_save(folder: str) -> str:
    fail_at(kind="reset", rank=1, phase="training", batch=2)
    with pipeline(2, "shm", LIMIT_S) as p:
        assert len(list(p.train(token_batches(4, 6)))) == 4  # shared memory knows nothing of it
        with pytest.raises(PeerLost) as caught:
            p.save(folder)
    return str(caught.value)


@pytest.mark.slow
def test_ranks_on_shared_memory_notice_a_reset_when_they_save(tmp_path: Path) -> None:
    for text in run(2, reset_at_a_save, folder=str(tmp_path / "c")):
        assert "died or closed its connection" in text


def full_disk(folder: str) -> list[float]:
    with pipeline(2) as p:
        p.save(folder)
        with (
            fail_at(kind="full disk", rank=1, room_bytes=500),
            pytest.raises(CheckpointError, match=r"\(rank 1\): No space left on device"),
        ):
            p.save(folder)
        losses = [r.loss for r in p.train(token_batches(2, 6))]
        p.save(folder)
    return losses


@pytest.mark.promise
def test_a_full_disk_of_one_rank_costs_the_save_alone(tmp_path: Path) -> None:
    first, second = run(2, full_disk, folder=str(tmp_path / "c"))
    assert first == second
    assert verify_checkpoint(tmp_path / "c").batches == 2


@pytest.mark.slow
@pytest.mark.parametrize("link", LINKS)
@pytest.mark.parametrize("where", ["wire", "weights"])
def test_a_bit_that_flips_changes_what_comes_after_it(link: str, where: str) -> None:
    undisturbed = run(2, train, faults=[], link=link, K=2)[0][0]
    fault = {"kind": "flipped bit", "where": where, "batch": 1, "phase": "training", "bit": 63}
    fault["rank"] = 0 if where == "wire" else 1
    for losses, _ in run(2, train, faults=[fault], link=link, K=2):
        assert losses[0] == undisturbed[0]
        assert losses[1] != undisturbed[1]


SCRIPT = """
import torch
from torch import nn
from avgpipe import Pipeline, Plan

model = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4))
data = [(torch.zeros(4, 4), torch.zeros(4, 4))] * 6
with Pipeline(model, Plan(stages=2), loss_fn=nn.MSELoss(), optimizer=torch.optim.SGD) as p:
    for _ in p.train(data):
        pass
"""


@pytest.mark.slow
def test_the_environment_arms_the_workers_of_a_command(tmp_path: Path) -> None:
    (tmp_path / "script.py").write_text(SCRIPT)
    variables = environment([{"kind": "kill", "rank": 1, "batch": 3}])
    command = avgpipe("run", "--stages", "2", str(tmp_path / "script.py"), **variables)
    _, stderr = command.communicate(timeout=limit(60))
    assert command.returncode == 1
    assert "avgpipe.testing: kill at training: rank 1, restart 0, pipeline 0, stage 1, batch 3" in stderr
    assert "rank 1 was killed by SIGKILL" in stderr.splitlines()[-1]


ISOLATED = """
import torch
from torch import nn
from avgpipe import Pipeline, Plan

torch.manual_seed(0)
data = [(torch.zeros(4, 4), torch.zeros(4, 4))] * 40
plan = Plan(stages=1, pipelines=2, isolate=True)
with Pipeline(nn.Linear(4, 4), plan, loss_fn=nn.MSELoss(), optimizer=torch.optim.SGD) as p:
    membership = p.launcher
    for result in p.train(data[p.batches :]):
        if result.batch == 20:  # until the one that died is back
            with membership._lock:
                back = lambda: any(term.donor is not None for term in membership.known.roster.terms)
                assert membership._lock.wait_for(back, 60)
"""


@pytest.mark.slow
def test_a_pipeline_of_its_own_is_killed_once_and_its_entry_is_a_place(tmp_path: Path) -> None:
    (tmp_path / "script.py").write_text(ISOLATED)
    kill = {"kind": "kill", "pipeline": 1, "phase": "averaging", "after": 5, "restart": 0}
    entry = {"kind": "slow", "for_s": 0, "phase": "join"}
    words = ["run", "--stages", "1", "--isolate", "--pipelines", "2", str(tmp_path / "script.py")]
    command = avgpipe(*words, **environment([kill, entry]))
    _, stderr = command.communicate(timeout=limit(100))
    assert command.returncode == 0, stderr
    assert stderr.count("avgpipe.testing: kill at averaging: rank 0, restart 0, pipeline 1, stage 0") == 1
    assert "avgpipe.testing: slow at join: rank 0, restart 1, stage {0}, pipeline {1}" in stderr
