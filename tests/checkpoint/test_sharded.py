"""The state for torch.distributed.checkpoint, in one process; sharded stages are in tests/runtime/test_mesh.py."""

from __future__ import annotations

from functools import partial
from typing import Any

import pytest
import torch
import torch.distributed.checkpoint as dcp
from torch import nn

from avgpipe import Pipeline, Plan
from avgpipe.checkpoint.sharded import _decoded, _encoded
from avgpipe.errors import CheckpointError
from tests.options import grouped
from tests.runtime.cases import adamw, assert_same_state, language_model, momentum, token_batches

pytestmark = pytest.mark.filterwarnings("ignore:torch.distributed is disabled")

LOSS = nn.CrossEntropyLoss()
SLOWER = partial(torch.optim.lr_scheduler.MultiStepLR, milestones=[1, 3], gamma=0.5)


def pipeline(optimizer: Any = adamw, **options: Any) -> Pipeline:
    plan = Plan(**{"stages": 2, "micro_batches": 2, **options.pop("plan", {})})
    return Pipeline(
        language_model(frozen=True), plan, **grouped(loss_fn=LOSS, optimizer=optimizer, **options)
    )


@pytest.mark.parametrize("optimizer", [adamw, momentum])
@pytest.mark.parametrize(
    "plan", [{"stages": 3}, {"schedule": "pipedream-2bw", "weights": "double-buffer"}], ids=str
)
def test_a_run_goes_on_from_it(optimizer: Any, plan: dict[str, Any], tmp_path: Any) -> None:
    batches = token_batches(4, 6)
    with pipeline(optimizer, lr_scheduler=SLOWER, loss_scale="dynamic") as p:
        for _ in p.train(batches[:2]):
            pass
        dcp.save(p.sharded_state_dict(), checkpoint_id=tmp_path, no_dist=True)
        expected = p.state_dict()
        losses = [r.loss for r in p.train(batches[2:])]
    with pipeline(optimizer, lr_scheduler=SLOWER, loss_scale="dynamic", plan=plan) as p:
        for _ in p.train(batches[:1]):  # what it has learnt, and remembers, is replaced
            pass
        state = p.sharded_state_dict()
        dcp.load(state, checkpoint_id=tmp_path, no_dist=True)
        p.load_sharded_state_dict(state)
        assert p.batches == 2
        assert {group["lr"] for o in p.optimizers for group in o.param_groups} == {
            0.5 * o.defaults["lr"] for o in p.optimizers
        }
        assert_same_state(p.state_dict(), expected, 0.0)
        resumed = [r.loss for r in p.train(batches[2:])]
    if "schedule" not in plan:  # else the last batch runs on older weights
        assert resumed == pytest.approx(losses, abs=1e-12)
    assert resumed[0] == pytest.approx(losses[0], abs=1e-12)


@pytest.mark.parametrize("optimizer", [adamw, momentum])
def test_places_to_load_into_are_made_without_a_trace(optimizer: Any) -> None:
    batches = token_batches(2, 6)
    with pipeline(optimizer) as p:
        expected = [r.loss for r in p.train(batches)]
    with pipeline(optimizer) as p:
        state = p.sharded_state_dict()
        assert all(not bool(t.any()) for of in state["optimizer"].values() for t in of.values())
        assert state["optimizer"].keys() == {"0.weight", "3.lin.weight", "3.lin.bias"} | {
            name for name in state["model"] if name.startswith(("4.", "6.bias"))
        }
        assert not any(o.state for o in p.optimizers)
        assert [r.loss for r in p.train(batches)] == expected


def test_plain_values_come_back_as_they_were() -> None:
    for value in (None, True, 3, 0.1, "x", [1, (2, 3)], {1: {"a": (None,)}, "b": []}, (), {}, float("inf")):
        assert _decoded(_encoded(value)) == value
    assert _encoded(torch.tensor(0.5)) == 0.5
    with pytest.raises(CheckpointError, match="have object, which is no plain value: save it yourself"):
        _encoded({"f": object()})


def test_several_pipelines_are_saved_otherwise() -> None:
    with pipeline(plan={"pipelines": 2}) as p:
        for call in (p.sharded_state_dict, lambda: p.load_sharded_state_dict({})):
            with pytest.raises(
                ValueError, match=r"is for one pipeline, and the plan has 2.*use save\(folder\)"
            ):
                call()


@pytest.mark.parametrize("damage", ["nothing", "a text", "no weight", "other groups"])
def test_what_is_no_such_state_is_refused(damage: str) -> None:
    with pipeline() as p:
        state = p.sharded_state_dict()
        if damage == "nothing":
            state = {}
        elif damage == "a text":
            state["training"] = "{"
        elif damage == "no weight":
            del state["model"]["0.weight"]
        else:
            state["training"] = '{"batches": 1, "groups": 7, "lr_scheduler": null, "loss_scale": null}'
        with pytest.raises(
            CheckpointError, match=r"this is no state for this pipeline: .*sharded_state_dict\(\)"
        ):
            p.load_sharded_state_dict(state)
