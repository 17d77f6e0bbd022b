"""ScheduleAdvanceForward against torch's own schedules on the same stages, and against the unsplit model."""

import importlib.util
import inspect
from contextlib import contextmanager

import pytest
import torch
import torch.distributed as dist
from torch.distributed.pipelining import PipelineStage, Schedule1F1B, ScheduleGPipe, schedules
from torch.distributed.pipelining.schedules import _Action
from torch.testing._internal.distributed.fake_pg import FakeStore

from avgpipe.interop import torch_pipelining
from avgpipe.interop.torch_pipelining import (
    ScheduleAdvanceForward,
    compute_order,
    forwards_alone,
    receives_early,
)
from tests.interop.torch_stages import RANKS, Plain, on_four_ranks, without_stages
from tests.runner import run


def case(stages, micro_batches, **more):
    return {"stages": stages, "micro_batches": micro_batches, **more}


SHARED = {  # trained, evaluated and trained again, by torch's schedules too
    "one stage": case(1, 3),
    "two stages": case(2, 4),
    "fewer micro-batches than stages": case(3, 2),
    "four stages": case(4, 8),
    "keyword arguments": case(2, 4, model="scaled"),
    "two tensors": case(3, 4, model="pair"),
    "sums": case(2, 4, scale_grads=False),
}
OWN = {
    "evaluated first": case(2, 4, program="ett"),
    "one micro-batch": case(2, 1),
    "as 1f1b": case(4, 6, advance=0),
    "as gpipe": case(3, 4, advance=3),
    "uneven advance": case(4, 8, advance=[5, 1, 1, 0]),
}


def cases():
    every = {("advance-forward", name): {"program": "tet", **c} for name, c in {**SHARED, **OWN}.items()}
    every |= {("gpipe", name): {"program": "tet", **c} for name, c in SHARED.items()}
    enough = {name: c for name, c in SHARED.items() if c["micro_batches"] >= c["stages"]}
    every |= {("1f1b", name): {"program": "tet", **c} for name, c in enough.items()}
    return {f"{schedule}: {name}": {"schedule": schedule, **c} for (schedule, name), c in every.items()}


@pytest.fixture(scope="module")
def on_ranks():
    return run(4, on_four_ranks, cases=cases())


def merged(on_ranks, name):
    """Per step the losses and output of the last stage, and the gradients of all stages."""
    parts = [on_ranks[rank][name] for rank in RANKS[cases()[name]["stages"]]]
    return [
        {**steps[-1], "gradients": [g for stage in steps for g in stage["gradients"]]}
        for steps in zip(*parts)
    ]


def close(actual, expected):
    torch.testing.assert_close(actual, expected, rtol=1e-12, atol=1e-13)


@pytest.mark.promise
@pytest.mark.parametrize("name", [*SHARED, *OWN])
def test_equals_the_unsplit_model(on_ranks, name):
    c = cases()[f"advance-forward: {name}"]
    steps = merged(on_ranks, f"advance-forward: {name}")
    for actual, expected in zip(steps, without_stages(**c), strict=True):
        losses = torch.tensor(actual["losses"], dtype=torch.float64)
        assert len(set(losses.tolist())) == c["micro_batches"]
        total = losses.sum() if c.get("scale_grads") is False else losses.mean()
        close(total, torch.tensor(expected["loss"], dtype=torch.float64))
        close(actual["output"], expected["output"])
        close(actual["gradients"], expected["gradients"])


@pytest.mark.promise
@pytest.mark.parametrize("torchs", [name for name in cases() if not name.startswith("advance-forward")])
def test_equals_torchs_own_schedules_exactly(on_ranks, torchs):
    """Of which 1F1B refuses fewer micro-batches than stages."""
    name = torchs.split(": ")[1]
    for own, other in zip(merged(on_ranks, f"advance-forward: {name}"), merged(on_ranks, torchs)):
        assert own["losses"] == other["losses"]
        torch.testing.assert_close(own["output"], other["output"], rtol=0, atol=0)
        torch.testing.assert_close(own["gradients"], other["gradients"], rtol=0, atol=0)


@pytest.mark.promise
def test_an_evaluation_leaves_gradients_alone(on_ranks):
    for rank in RANKS[2]:
        result = on_ranks[rank]["options"]
        assert len(result["before"]) == 2
        assert all(map(torch.equal, result["before"], result["after"]))


@pytest.mark.promise
def test_return_outputs_false_returns_none(on_ranks):
    assert [on_ranks[rank]["options"]["output"] for rank in RANKS[2]] == [None, None]


@pytest.mark.promise
def test_stages_and_batches_that_do_not_fit_are_refused(on_ranks):
    for stage, rank in enumerate(RANKS[2]):
        group, index, uneven, other = on_ranks[rank]["refused"]
        assert "3 stages on a group of 2 ranks: " in group
        assert f"stage {1 - stage} is on rank {stage} of its group: build stage {stage} there" in index
        sizes = ("2x5", "1x5") if stage == 0 else ("2", "1")
        assert f"micro-batches of {sizes[0]} and of {sizes[1]}: make the batch size a multiple of" in uneven
        assert f"micro-batches of {sizes[1]} after those of {sizes[0]}, for which" in other


# ---- orders --------------------------------------------------------------------------------------------------------


def actions(text):
    return [_Action.from_str(word) for word in text.split()]


def text(column):
    return " ".join(map(str, column))


def test_receives_are_posted_early():
    """Three stages, three micro-batches, as torch lays them out."""
    torchs = [
        "0F0 0SEND_F0 0F1 0SEND_F1 0F2 0SEND_F2 0RECV_B0 0B0 0RECV_B1 0B1 0RECV_B2 0B2 0REDUCE_GRAD",
        "1RECV_F0 1F0 1SEND_F0 1RECV_F1 1F1 1SEND_F1 1RECV_B0 1RECV_F2 1F2 1SEND_F2 1B0 1SEND_B0 "
        "1RECV_B1 1B1 1SEND_B1 1RECV_B2 1B2 1SEND_B2 1REDUCE_GRAD",
        "2RECV_F0 2F0 2RECV_F1 2B0 2SEND_B0 2RECV_F2 2F1 2B1 2SEND_B1 2F2 2B2 2SEND_B2 2REDUCE_GRAD",
    ]
    assert [text(receives_early(actions(t))) for t in torchs] == [
        "0F0 0SEND_F0 0RECV_B0 0F1 0SEND_F1 0RECV_B1 0F2 0SEND_F2 0RECV_B2 0B0 0B1 0B2 0REDUCE_GRAD",
        "1RECV_F0 1RECV_F1 1RECV_F2 1F0 1SEND_F0 1RECV_B0 1F1 1SEND_F1 1RECV_B1 1F2 1SEND_F2 1RECV_B2 "
        "1B0 1SEND_B0 1B1 1SEND_B1 1B2 1SEND_B2 1REDUCE_GRAD",
        "2RECV_F0 2RECV_F1 2RECV_F2 2F0 2B0 2SEND_B0 2F1 2B1 2SEND_B1 2F2 2B2 2SEND_B2 2REDUCE_GRAD",
    ]


def test_an_evaluation_runs_forwards_alone():
    training = (
        "1RECV_F0 1RECV_F1 1F0 1SEND_F0 1RECV_B0 1B0 1SEND_B0 1F1 1SEND_F1 1RECV_B1 1B1 1SEND_B1 1REDUCE_GRAD"
    )
    assert text(forwards_alone(actions(training))) == "1RECV_F0 1RECV_F1 1F0 1SEND_F0 1F1 1SEND_F1"


def test_the_order_is_that_of_build_schedule():
    order = compute_order(4, 8, None)
    assert {stage: text(column) for stage, column in order.items()} == {
        0: "0F0 0F1 0F2 0F3 0F4 0F5 0F6 0B0 0F7 0B1 0B2 0B3 0B4 0B5 0B6 0B7",
        1: "1F0 1F1 1F2 1F3 1F4 1B0 1F5 1B1 1F6 1B2 1F7 1B3 1B4 1B5 1B6 1B7",
        2: "2F0 2F1 2F2 2B0 2F3 2B1 2F4 2B2 2F5 2B3 2F6 2B4 2F7 2B5 2B6 2B7",
        3: "3F0 3B0 3F1 3B1 3F2 3B2 3F3 3B3 3F4 3B4 3F5 3B5 3F6 3B6 3F7 3B7",
    }
    assert text(compute_order(2, 2, 0)[0]) == "0F0 0F1 0B0 0B1"


@contextmanager
def process_group(backend, stages):
    store = FakeStore() if backend == "fake" else dist.HashStore()
    dist.init_process_group(backend, rank=0, world_size=stages, store=store)
    try:
        yield PipelineStage(Plain(0), 0, stages, torch.device("cpu"))
    finally:
        dist.destroy_process_group()


@pytest.mark.parametrize("stages", [2, 3, 5])
def test_receives_match_sends(stages):
    """Whatever torch's lists are: each kind in the senders' order, before its use, all else unmoved."""
    with process_group("fake", stages) as stage:
        for micro_batches in (1, 2, 4, 7):
            for advance in (None, 0, 1, micro_batches):
                schedule = ScheduleAdvanceForward(stage, micro_batches, advance=advance)
                torchs = schedule.pipeline_order_with_comms
                check({r: receives_early(column) for r, column in torchs.items()}, torchs)


def check(moved, torchs):
    for rank, actions in moved.items():
        for receive, send, sender, use in (
            ("RECV_F", "SEND_F", rank - 1, "F"),
            ("RECV_B", "SEND_B", rank + 1, "B"),
        ):
            received = numbers(actions, receive)
            assert received == numbers(moved.get(sender, []), send)
            words = list(map(str, actions))
            assert all(words.index(f"{rank}{receive}{m}") < words.index(f"{rank}{use}{m}") for m in received)
        assert sorted(map(str, actions)) == sorted(map(str, torchs[rank]))
        assert unmoved(actions) == unmoved(torchs[rank])


def numbers(actions, kind):
    return [a.microbatch_index for a in actions if a.computation_type.value == kind]


def unmoved(actions):
    return [str(a) for a in actions if not a.computation_type.value.startswith("RECV")]


@pytest.mark.promise
def test_only_gloo_gets_its_receives_early(on_ranks):
    """Where a posted receive holds up what is posted later, torch's order is the one that cannot deadlock."""
    with process_group("fake", 2) as stage:
        schedule = ScheduleAdvanceForward(stage, 2)
    torchs = [text(column) for column in schedule.pipeline_order_with_comms.values()]
    assert torchs == [
        "0UNSHARD 0F0 0SEND_F0 0F1 0SEND_F1 0RECV_B0 0B0 0RECV_B1 0B1 0REDUCE_GRAD 0RESHARD",
        "1UNSHARD 1RECV_F0 1F0 1RECV_F1 1B0 1SEND_B0 1F1 1B1 1SEND_B1 1REDUCE_GRAD 1RESHARD",
    ]
    early = [text(receives_early(actions(order))) for order in torchs]
    assert [on_ranks[rank]["options"]["order"] for rank in RANKS[2]] == [early, early]


# ---- arguments -----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("torchs", [Schedule1F1B, ScheduleGPipe])
def test_takes_the_arguments_of_torchs_schedules_in_their_order(torchs):
    theirs = list(inspect.signature(torchs).parameters)
    own = inspect.signature(ScheduleAdvanceForward).parameters
    assert [*theirs, "advance"] == list(own)
    assert own["advance"].kind is inspect.Parameter.KEYWORD_ONLY


def test_wrong_arguments_are_refused():
    with process_group("gloo", 1) as stage:
        with pytest.raises(TypeError, match=r"stage is a list: pass the one PipelineStage of this rank"):
            ScheduleAdvanceForward([stage], 4)
        with pytest.raises(ValueError, match=r"advance=\[1, 2\] has 2 entries for 1 stages"):
            ScheduleAdvanceForward(stage, 4, advance=[1, 2])
        with pytest.raises(ValueError, match="micro_batches=0: must be an int of at least 1"):
            ScheduleAdvanceForward(stage, 0)


@pytest.mark.parametrize("name", ["_PipelineScheduleRuntime", "_Action"])
def test_another_torch_is_refused_in_one_line(monkeypatch, name):
    monkeypatch.delattr(schedules, name)
    spec = importlib.util.spec_from_file_location("another", torch_pipelining.__file__)
    with pytest.raises(
        ImportError, match=r"works with torch 2\.11 to 2\.13; .*: install one of those"
    ) as raised:
        spec.loader.exec_module(importlib.util.module_from_spec(spec))
    assert "\n" not in str(raised.value)
