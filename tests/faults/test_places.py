"""The places of the library, as a fault that changes nothing counts them; all stages are in this process."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from torch import nn

from avgpipe import CheckpointError, Pipeline, Plan
from avgpipe.checkpoint import verify_checkpoint
from avgpipe.ranks import environment as probe
from avgpipe.testing import Armed, InjectedFault, fail_at
from tests.runtime.cases import language_model, momentum, token_batches

LOSS = nn.CrossEntropyLoss()
TURNS = Plan(stages=2, pipelines=2, micro_batches=2, batch="per-pipeline")


def make(plan: Plan) -> Pipeline:
    return Pipeline(language_model(), plan, loss_fn=LOSS, optimizer=momentum)


def counting(**place: Any) -> Armed:
    return fail_at(kind="slow", for_s=0, times=None, **place)


def losses(p: Pipeline, count: int = 4) -> list[float]:
    return [r.loss for r in p.train(token_batches(count, 6))]


@pytest.mark.parametrize(
    ("place", "count"),
    [
        ({}, 2 * 4 * (2 * 2 + 3)),  # stages, batches, steps of micro-batches and of the update
        ({"action": "forward"}, 2 * 2 * 4),
        ({"action": "backward", "stage": 1}, 2 * 4),
        ({"action": "forward", "pipeline": 1, "batch": 1, "micro_batch": 0}, 2),
        ({"batch": 3, "micro_batch": 1, "stage": 0}, 2),
        ({"batch": 3, "pipeline": 0}, 0),  # they take turns
        ({"action": "update"}, 2 * 4),
        ({"action": "send tied"}, 2 * 4),
    ],
)
def test_steps_of_training(place: dict[str, Any], count: int) -> None:
    with make(TURNS) as p, counting(phase="training", **place) as armed:
        losses(p)
    assert armed.fired == count


def test_a_zero_bubble_schedule_has_backwards_in_parts() -> None:
    plan = Plan(stages=2, micro_batches=2, schedule="zero-bubble-h1")
    with (
        make(plan) as p,
        counting(action="backward") as all_parts,
        counting(action="backward weight") as one_part,
    ):
        losses(p, 1)
    assert (all_parts.fired, one_part.fired) == (8, 4)


def test_updates_rounds_and_what_is_no_training(tmp_path: Path) -> None:
    wanted = ["start", "update", "averaging", "evaluation", "save", "load", "shutdown"]
    counts = {phase: counting(phase=phase) for phase in wanted}
    counts |= {
        f"save {a}": counting(phase="save", action=a) for a in ("begin", "write", "written", "manifest")
    }
    counts |= {"save stage 1": counting(phase="save", action="write", stage=1, batch=4)}
    counts |= {f"load {a}": counting(phase="load", action=a, pipeline=1) for a in ("begin", "restore")}
    try:
        with make(TURNS) as p:
            losses(p)
            p.evaluate(token_batches(3, 6))
            p.save(tmp_path)
            p.load(tmp_path)
    finally:
        probe.armed.clear()
    found = {phase: armed.fired for phase, armed in counts.items()}
    once = ["start", "shutdown", "save begin", "save manifest", "save stage 1", "load begin", "load restore"]
    assert found == {
        **dict.fromkeys(once, 1),
        **dict.fromkeys(["update", "averaging"], 2 * 4),
        **dict.fromkeys(["save write", "save written", "load"], 2),
        "evaluation": 3 * 2 * 2,
        "save": 6,
    }


def test_a_lone_pipeline_averages_nothing() -> None:
    with make(Plan(stages=2)) as p, counting(phase="averaging") as armed:
        losses(p)
    assert armed.fired == 0


def test_what_happens_to_the_process_changes_no_number() -> None:
    with make(Plan(stages=2, pipelines=2)) as p:
        undisturbed = losses(p)
    with make(Plan(stages=2, pipelines=2)) as p, counting() as armed:
        assert losses(p) == undisturbed
    assert armed.fired > 20


def test_while_nothing_is_armed_a_place_does_nothing(monkeypatch: Any) -> None:
    def asked(phase: str, **place: Any) -> Any:
        assert not place.keys() & {"micro_batch", "batch"}, "a step asked"
        return []

    monkeypatch.setattr(probe, "at", asked)
    with make(Plan(stages=2, pipelines=2)) as p:
        losses(p)
        p.evaluate(token_batches(1, 6))


# ---- what a place does, or has done to it -------------------------------------------------------------------------


@pytest.mark.parametrize(("kind", "error"), [("exception", InjectedFault), ("out of memory", MemoryError)])
def test_an_error_ends_the_pipeline_and_says_where_it_was(kind: str, error: type[Exception]) -> None:
    fault = fail_at(kind=kind, stage=1, batch=2, micro_batch=1, action="backward")
    where = "pipeline 0, stage 1, batch 2, micro_batch 1, action backward"
    with fault, make(Plan(stages=2, micro_batches=2)) as p:
        trained = p.train(token_batches(4, 6))
        assert [next(trained).batch for _ in range(2)] == [0, 1]
        with pytest.raises(error, match=where):
            next(trained)


def test_a_disk_that_fills_up_in_a_file_costs_the_save_alone(tmp_path: Path) -> None:
    folder = tmp_path / "c"
    with make(Plan(stages=2)) as undisturbed:
        expected = losses(undisturbed) + losses(undisturbed)
    with make(Plan(stages=2)) as p:
        found = losses(p)
        p.save(folder)
        before = sorted(folder.iterdir())
        with (
            fail_at(kind="full disk", stage=1, room_bytes=1000),
            pytest.raises(CheckpointError, match=r"No space left on device: .*/stage-1-0-0-\w+\.pt$"),
        ):
            p.save(folder)
        assert sorted(folder.iterdir()) == before
        found += losses(p)
        p.save(folder)
    assert found == expected
    assert verify_checkpoint(folder).batches == 8


@pytest.mark.parametrize("bit", [0, 62, 8 * 10_000_000 + 3])
def test_a_bit_that_flips_on_the_disk_is_found_when_the_file_is_read(bit: int, tmp_path: Path) -> None:
    with make(Plan(stages=2)) as p:
        with fail_at(kind="flipped bit", where="checkpoint", stage=1, bit=bit):
            p.save(tmp_path)
        with pytest.raises(CheckpointError, match=r"the content of .*/stage-1-0-0-\w+\.pt has changed"):
            p.load(tmp_path)


def test_a_bit_that_flips_in_memory_is_one_of_the_weights() -> None:
    with make(Plan(stages=2)) as p:
        with fail_at(kind="flipped bit", where="weights", stage=1, action="forward", bit=64 + 52) as armed:
            first = losses(p, 1)
        assert armed.fired == 1
    with make(Plan(stages=2)) as p:
        weights = p._session.worker.trained[1, 0].arena.weights[0]
        weights[1] *= 0.5 if weights[1].abs().log2().floor() % 2 == 0 else 2  # the exponent's lowest bit
        assert losses(p, 1) == first


def test_a_bit_that_flips_between_stages_of_a_process_leaves_the_sender_as_it_was() -> None:
    with make(Plan(stages=2)) as p:
        undisturbed = losses(p)
    with (
        make(Plan(stages=2)) as p,
        fail_at(kind="flipped bit", where="wire", stage=0, batch=1, action="forward"),
    ):
        found = losses(p)
    assert found[0] == undisturbed[0]
    assert found[1] != undisturbed[1]


def test_a_process_that_is_all_stages_has_no_line_to_cut() -> None:
    with make(Plan(stages=2)) as p:
        undisturbed = losses(p)
    with make(Plan(stages=2)) as p, fail_at(kind="cut line", phase="training") as armed:
        assert losses(p) == undisturbed
    assert armed.fired == 1
