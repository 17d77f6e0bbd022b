"""What can be asked for, where it fits, and how often it happens."""

from __future__ import annotations

import json
from typing import Any

import pytest

from avgpipe.faults.fault import ACTIONS, KINDS, PHASES, Armed, Fault, armed_by, to_json
from avgpipe.ranks import environment as probe
from avgpipe.runtime.route import StepKind
from avgpipe.testing import environment, fail_at

STEP = {"rank": 1, "restart": 0, "pipeline": 0, "stage": 1, "batch": 3, "micro_batch": 2, "action": "forward"}


def kill(**place: Any) -> Fault:
    return Fault("kill", **place)


@pytest.mark.parametrize("name", ["rank", "pipeline", "stage", "batch", "micro_batch", "restart"])
def test_a_place_must_be_what_is_given_and_may_be_anything_else(name: str) -> None:
    assert kill().fits("training", STEP)
    assert kill(**{name: STEP[name]}).fits("training", STEP)
    assert not kill(**{name: int(STEP[name]) + 1}).fits("training", STEP)
    assert not kill(**{name: STEP[name]}).fits("training", {**STEP, name: None})


def test_a_process_that_is_several_stages_is_each_of_them() -> None:
    place = {"rank": 0, "stage": {0, 2}, "pipeline": range(3), "action": "write"}
    assert kill(stage=2, pipeline=1).fits("save", place)
    assert not kill(stage=1).fits("save", place)
    assert not kill(pipeline=3).fits("save", place)


@pytest.mark.parametrize(
    ("wanted", "found", "fits"),
    [
        ("backward", "backward", True),
        ("backward", "backward input", True),
        ("backward weight", "backward", False),
        ("backward", "forward", False),
    ],
)
def test_a_part_of_a_backward_is_a_backward(wanted: str, found: str, fits: bool) -> None:
    assert kill(action=wanted).fits("training", {**STEP, "action": found}) == fits


def test_an_update_is_a_part_of_training() -> None:
    place = {**STEP, "micro_batch": None, "action": "update"}
    for fault in (
        kill(phase="training"),
        kill(phase="training", action="update"),
        kill(phase="update"),
        kill(),
    ):
        assert fault.fits("update", place)
    assert not kill(phase="update").fits("training", STEP)
    assert not kill(phase="training").fits("evaluation", STEP)


def test_actions_are_the_steps_of_the_runtime() -> None:
    assert set(ACTIONS["training"]) == {kind.name.lower().replace("_", " ") for kind in StepKind}


def test_what_a_save_does_by_itself_needs_no_action() -> None:
    full = Fault("full disk")
    assert [action for action in ACTIONS["save"] if full.fits("save", {"action": action})] == ["write"]
    flipped = Fault("flipped bit", where="checkpoint")
    assert [action for action in ACTIONS["save"] if flipped.fits("save", {"action": action})] == ["written"]


def happened(fault: Fault, places: int) -> list[int]:
    armed = Armed(fault)
    return [n for n in range(places) if armed.is_due("training", STEP)]


def test_it_happens_once_unless_said_otherwise() -> None:
    assert happened(kill(), 5) == [0]
    assert happened(kill(after=3), 5) == [3]
    assert happened(Fault("slow", for_s=0, times=2, after=1), 5) == [1, 2]
    assert happened(Fault("slow", for_s=0, times=None), 5) == [0, 1, 2, 3, 4]


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"kind": "kil"}, "kind='kil': did you mean 'kill'? valid names: kill, stop"),
        ({"kind": "kill", "phase": "train"}, "phase='train': did you mean 'training'? valid names: start"),
        ({"kind": "kill", "phase": "training", "action": "backwards"}, "action='backwards': did you mean 'backward'"),
        ({"kind": "kill", "phase": "load", "action": "write"}, "valid names: begin, restore"),
        ({"kind": "kill", "phase": "start", "action": "begin"}, "'start' has no actions: leave out action='begin'"),
        ({"kind": "kill", "rank": -1}, "rank=-1: must be an int of at least 0"),
        ({"kind": "kill", "stage": "1"}, "stage='1': must be an int of at least 0"),
        ({"kind": "kill", "times": 0}, "times=0: must be an int of at least 1"),
        ({"kind": "kill", "for_s": 1}, "for_s is for kind 'stop' or 'slow', not 'kill': leave it out"),
        ({"kind": "stop", "for_s": float("nan")}, "for_s=nan: must be a number of seconds"),
        ({"kind": "slow"}, "kind 'slow' needs for_s=, the seconds of each delay"),
        ({"kind": "stop", "where": "wire"}, "where is for kind 'flipped bit', not 'stop': leave it out"),
        ({"kind": "kill", "store": True}, "store is for kind 'cut line' or 'reset', not 'kill': leave it out"),
        ({"kind": "flipped bit"}, "where=None: valid names: wire, weights, checkpoint"),
        ({"kind": "flipped bit", "where": "weight"}, "where='weight': did you mean 'weights'?"),
        ({"kind": "full disk", "phase": "training"}, "phase 'training' has no full disk: only save"),
        (
            {"kind": "flipped bit", "where": "wire", "phase": "save"},
            "phase 'save' has no flipped bit of wire: only training, evaluation, update, averaging",
        ),
        ({"kind": "full disk", "action": "begin"}, "action='begin': valid names: write"),
        (
            {"kind": "kill", "phase": "save", "micro_batch": 1},
            "no place at save is named by micro_batch: leave out all but rank, restart, pipeline, stage, batch, action",
        ),
        ({"kind": "kill", "phase": "start", "stage": 0}, "no place at start is named by stage"),
        ({"kind": "full disk", "micro_batch": 1}, "no place at save is named by micro_batch"),
    ],
)  # fmt: skip
def test_what_can_never_happen_is_refused_with_the_way_out(arguments: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=r".") as caught:
        fail_at(**arguments)
    assert message in str(caught.value)
    with pytest.raises(ValueError, match=r".") as caught:
        environment([arguments])
    assert message in str(caught.value)
    assert probe.armed == []


def test_every_kind_and_every_phase_can_be_asked_for() -> None:
    options: dict[str, dict[str, Any]] = {"slow": {"for_s": 0}, "flipped bit": {"where": "wire"}}
    for kind, row in KINDS.items():
        for phase in row.phases if kind != "flipped bit" else ["training"]:
            assert Fault(kind, phase=phase, **options.get(kind, {})).phase == phase
    assert {phase for row in KINDS.values() for phase in row.phases} == set(PHASES)


def test_the_environment_brings_what_was_asked_for() -> None:
    asked = [
        {"kind": "kill", "rank": 1, "batch": 3},
        {"kind": "slow", "for_s": 0.5, "times": None, "phase": "save"},
    ]
    ((name, text),) = environment(asked).items()
    assert name == "AVGPIPE_FAULTS"
    assert [armed.fault for armed in armed_by(text)] == [Fault(**one) for one in asked]  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("text", "message"),
    [
        (to_json([kill()]).replace("batch", "bach"), "AVGPIPE_FAULTS: unknown key 'bach': did you mean 'batch'?"),
        (json.dumps([3]), "AVGPIPE_FAULTS must be a JSON object, not int"),
        (json.dumps([{"rank": 3}]), "AVGPIPE_FAULTS: kind is missing"),
    ],
)  # fmt: skip
def test_an_environment_by_hand_is_checked(text: str, message: str) -> None:
    with pytest.raises(ValueError, match=r".") as caught:
        armed_by(text)
    assert message in str(caught.value)


def test_a_block_arms_and_disarms() -> None:
    with fail_at(kind="slow", for_s=0, phase="join", times=None) as armed:
        probe.at("join", pipeline=1)
        probe.at("shutdown")
        assert armed.fired == 1
    probe.at("join", pipeline=1)
    assert (armed.fired, probe.armed) == (1, [])
    armed.disarm()  # once more does no harm


def test_a_place_has_the_rank_and_the_restart_of_the_environment(monkeypatch: Any) -> None:
    with fail_at(kind="slow", for_s=0, rank=2, restart=0, times=None) as armed:
        probe.at("start")
        monkeypatch.setenv("RANK", "2")
        probe.at("start")
        probe.at("start", rank=0)
        monkeypatch.setenv("TORCHELASTIC_RESTART_COUNT", "1")
        probe.at("start")
    assert armed.fired == 1
