"""States of optimizers that no run has written: each is refused when it is loaded, or can be stepped from."""

from __future__ import annotations

import copy
import dataclasses
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import nn

from avgpipe import Pipeline, Plan
from avgpipe.checkpoint.fitting import check_scale, check_schedule, loading, with_own_kernels
from avgpipe.checkpoint.manifest import Manifest, checksum_of
from avgpipe.errors import CheckpointError

Optimizer = torch.optim.Optimizer

NAMES = [
    "ASGD",
    "Adadelta",
    "Adafactor",
    "Adagrad",
    "Adam",
    "AdamW",
    "Adamax",
    "NAdam",
    "RAdam",
    "RMSprop",
    "Rprop",
]
OPTIMIZERS: dict[str, Any] = {name: getattr(torch.optim, name) for name in NAMES}
OPTIMIZERS |= {
    "plain": torch.optim.SGD,
    "momentum": lambda ps: torch.optim.SGD(ps, 0.1, momentum=0.9),
    "fused": lambda ps: torch.optim.AdamW(ps, fused=True),
    "foreach": lambda ps: torch.optim.Adam(ps, foreach=True),
    "amsgrad": lambda ps: torch.optim.Adam(ps, amsgrad=True),
    "rate in a tensor": lambda ps: torch.optim.Adam(ps, lr=torch.tensor(0.1)),
    "centered": lambda ps: torch.optim.RMSprop(ps, momentum=0.9, centered=True),
    "muon": lambda ps: torch.optim.Muon([p for p in ps if p.dim() == 2]),
    "groups": lambda ps: torch.optim.Adam([{"params": [p], "lr": 0.1} for p in ps], betas=[0.9, 0.99]),
}


def parameters() -> list[nn.Parameter]:
    draw = torch.Generator().manual_seed(0)
    return [nn.Parameter(torch.randn(shape, generator=draw)) for shape in ((4, 3), (5,), ())]


def stepped(make: Any, steps: int) -> Optimizer:
    made: Optimizer = make(parameters())
    for _ in range(steps):
        step(made)
    return made


def step(optimizer: Optimizer) -> None:
    for group in optimizer.param_groups:
        for p in group["params"]:
            p.grad = torch.ones_like(p)
    optimizer.step()


def load(optimizer: Optimizer, state: Any) -> None:
    state["param_groups"] = with_own_kernels(optimizer, state["param_groups"])
    with loading(optimizer):
        optimizer.load_state_dict(state)


@pytest.mark.parametrize("steps", [0, 1, 3])
@pytest.mark.parametrize("name", OPTIMIZERS)
def test_what_an_optimizer_has_made_is_loaded(name: str, steps: int) -> None:
    source, target = stepped(OPTIMIZERS[name], steps), stepped(OPTIMIZERS[name], 0)
    before = [p.clone() for group in target.param_groups for p in group["params"]]
    load(target, copy.deepcopy(source.state_dict()))
    assert all(map(torch.equal, before, (p for group in target.param_groups for p in group["params"])))
    assert str(target.state_dict()) == str(source.state_dict())
    step(target)


@pytest.mark.parametrize(
    ("theirs", "ours"), [("Adam", "fused"), ("fused", "foreach"), ("Adam", "rate in a tensor")]
)
def test_kernels_and_rates_of_another_kind_are_loaded(theirs: str, ours: str) -> None:
    target = stepped(OPTIMIZERS[ours], 0)
    load(target, stepped(OPTIMIZERS[theirs], 2).state_dict())
    step(target)


def entry(name: str, change: Any) -> Any:
    def apply(state: Any) -> None:
        state["state"][0][name] = change(state["state"][0][name])

    return apply


def setting(**changes: Any) -> Any:
    return lambda state: state["param_groups"][0].update(changes)


WRONG = {
    "a missing entry": (
        lambda state: state["state"][0].pop("exp_avg_sq"),
        "instead of step, exp_avg, exp_avg_sq",
    ),
    "an entry more": (
        lambda state: state["state"][0].update(sum=torch.zeros(4, 3)),
        "has step, exp_avg, .*, sum inst",
    ),
    "another shape": (
        entry("exp_avg", lambda _: torch.zeros(3, 4)),
        r"'exp_avg' of .* \[3, 4\] instead of .*\[4, 3\]",
    ),
    "a shape that fits by itself": (
        entry("exp_avg", lambda _: torch.zeros(3)),
        r"'exp_avg' of .*\[3\] instead",
    ),
    "no tensor": (entry("exp_avg", lambda _: 0.5), "'exp_avg' of float instead of torch.float32"),
    "memory in common": (
        entry("exp_avg", lambda t: t[:1, :1].expand(4, 3)),
        "'exp_avg' whose elements share memory",
    ),
    "steps": (entry("step", lambda _: torch.ones(4, 3)), "'step' of torch.float32"),
    "endless steps": (entry("step", lambda _: torch.tensor(float("inf"))), "'step' of"),
    "a text for a rate": (setting(lr="fast"), "lr = 'fast' instead of a value like 0.001"),
    "an endless rate": (setting(lr=float("nan")), "lr = nan instead"),
    "a rate that torch cannot take": (setting(lr=2**70), "lr = 1180591620717411303424 instead"),
    "a decay of a flag": (setting(weight_decay=torch.tensor(True)), r"weight_decay = tensor\(True\) instead"),
    "a rate of many": (setting(lr=torch.ones(3)), r"lr = tensor\(\[1., 1., 1.\]\) instead"),
    "one beta": (setting(betas=(0.9,)), r"betas = \(0.9,\) instead of a value like \(0.9, 0.999\)"),
    "a beta of a text": (setting(betas=(0.9, "x")), r"betas = \(0.9, 'x'\) instead"),
    "a beta that divides by zero": (
        setting(betas=(1.0, 0.9)),
        "cannot step with these .*: ZeroDivisionError",
    ),
    "a number for a flag": (setting(maximize=3.0), "maximize = 3.0 instead of a value like False"),
    "a flag that nothing was made for": (
        setting(amsgrad=True),
        "instead of step, exp_avg, exp_avg_sq, max_exp_avg_sq",
    ),
    "a missing setting": (
        lambda state: state["param_groups"][0].pop("eps"),
        "lacks eps, which is like 1e-08",
    ),
}


@pytest.mark.parametrize("name", WRONG)
def test_what_no_run_has_written_is_refused(name: str) -> None:
    damage, message = WRONG[name]
    state = copy.deepcopy(stepped(torch.optim.Adam, 2).state_dict())
    damage(state)
    with pytest.raises(ValueError, match=message) as raised:
        load(stepped(torch.optim.Adam, 0), state)
    assert len(str(raised.value)) < 400


def test_settings_are_tried_where_no_parameter_has_a_state() -> None:
    state = copy.deepcopy(stepped(OPTIMIZERS["muon"], 0).state_dict())
    assert not state["state"]
    state["param_groups"][0]["ns_steps"] = 0.5
    with pytest.raises(ValueError, match="Muon cannot step with these settings of a group: TypeError"):
        load(stepped(OPTIMIZERS["muon"], 0), state)


def test_a_rate_in_a_tensor_is_refused_where_steps_take_numbers() -> None:
    state = copy.deepcopy(stepped(OPTIMIZERS["foreach"], 1).state_dict())
    state["param_groups"][0]["lr"] = torch.tensor(0.1)
    with pytest.raises(ValueError, match=r"lr = tensor\(0.1000\) instead of a value like 0.001"):
        load(stepped(OPTIMIZERS["foreach"], 0), state)
    load(stepped(OPTIMIZERS["Adam"], 0), state)


WHOLE = torch.ones(4, 3)
TENSORS = [torch.zeros(()), torch.zeros(3), torch.zeros(0), WHOLE, WHOLE[:1, :1].expand(4, 3), WHOLE.long()]
TENSORS += [
    WHOLE.to_sparse(),
    WHOLE.cfloat(),
    torch.tensor(2**40),
    torch.tensor(True),
    torch.tensor(float("inf")),
]
VALUES = st.sampled_from([None, True, 0, -1, 2**70, 0.5, float("nan"), "x", [], {}, (1, 2), *TENSORS])


@pytest.mark.filterwarnings("ignore")
@given(st.sampled_from(sorted(OPTIMIZERS)), st.data())
def test_a_damaged_state_is_refused_or_steps(name: str, data: st.DataObject) -> None:
    state = copy.deepcopy(stepped(OPTIMIZERS[name], 1).state_dict())
    groups, states = state["param_groups"], state["state"]
    for _ in range(data.draw(st.integers(1, 2))):
        whole = data.draw(st.sampled_from([*groups, *states.values()]))
        if not whole:
            continue
        key = data.draw(st.sampled_from([key for key in whole if key != "params"] or ["more"]))
        if data.draw(st.booleans()):
            whole[key] = data.draw(VALUES)
        else:
            whole.pop(key, None)
    target = stepped(OPTIMIZERS[name], 0)
    try:
        load(target, state)
    except (ValueError, TypeError, LookupError, AttributeError, RuntimeError, ArithmeticError):
        return  # of any kind: a checkpoint's reader makes one of it
    step(target)


class Late(Optimizer):
    """Keeps a buffer of its own shape, and from the second step on another one."""

    def __init__(self, params: Any, lr: float = 0.1) -> None:
        super().__init__(params, {"lr": lr})

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:
        for group in self.param_groups:
            for p in group["params"]:
                state = self.state[p]
                if not state:
                    state.update(n=0, row=torch.zeros(2 * p.numel()), mean=torch.zeros_like(p))
                state["n"] += 1
                if state["n"] == 2:
                    state["late"] = torch.zeros_like(p)
                state["mean"].add_(p.grad)
                p.sub_(group["lr"] * (state["mean"] + state.get("late", 0.0) + state["row"][0]))


@pytest.mark.parametrize("steps", [0, 1, 2, 3])
def test_an_optimizer_of_the_callers_may_make_entries_later(steps: int) -> None:
    target = stepped(Late, 0)
    load(target, copy.deepcopy(stepped(Late, steps).state_dict()))
    step(target)


@pytest.mark.parametrize(
    ("damage", "message"),
    [
        (entry("mean", lambda _: torch.zeros(3, 4)), "'mean' of"),
        (entry("n", lambda _: None), "'n' of None instead of int"),
        (lambda state: state["state"][0].pop("row"), "cannot be stepped from: KeyError"),
        (lambda state: state["state"][0].update(late=torch.zeros(7)), "cannot be stepped from: RuntimeError"),
    ],
)
def test_a_state_of_the_callers_optimizer_must_be_one_to_step_from(damage: Any, message: str) -> None:
    state = copy.deepcopy(stepped(Late, 3).state_dict())
    damage(state)
    with pytest.raises(ValueError, match=message):
        load(stepped(Late, 0), state)


class Outer(Optimizer):
    """Steps by another optimizer, which must not step for a check."""

    def __init__(self, params: Any) -> None:
        self.inner_one = torch.optim.SGD(params, 0.1)
        super().__init__(self.inner_one.param_groups, {"lr": 0.1})

    def step(self, closure: Any = None) -> None:
        self.inner_one.step()
        for p in self.param_groups[0]["params"]:
            self.state[p] = {"n": 1}


def test_an_optimizer_that_keeps_more_than_values_is_not_tried() -> None:
    target = stepped(Outer, 0)
    for p in target.param_groups[0]["params"]:
        p.grad = torch.ones_like(p)
    before = [p.clone() for p in target.param_groups[0]["params"]]
    load(target, stepped(Outer, 1).state_dict())
    assert all(map(torch.equal, before, target.param_groups[0]["params"]))


def test_hooks_are_not_called_for_a_check() -> None:
    target, called = stepped(torch.optim.Adam, 0), []
    target.register_step_pre_hook(lambda *_: called.append(1))
    load(target, stepped(torch.optim.Adam, 1).state_dict())
    assert not called


SCHEDULES = torch.optim.lr_scheduler


@pytest.mark.parametrize(
    "make",
    [
        lambda o: SCHEDULES.LambdaLR(o, lambda n: 0.9**n),
        lambda o: SCHEDULES.CosineAnnealingLR(o, 10),
        lambda o: SCHEDULES.MultiStepLR(o, [1, 3]),
        lambda o: SCHEDULES.ReduceLROnPlateau(o),
        lambda o: SCHEDULES.SequentialLR(o, [SCHEDULES.ConstantLR(o), SCHEDULES.ExponentialLR(o, 0.9)], [2]),
    ],
)
def test_states_of_schedules(make: Any) -> None:
    theirs, ours = (make(stepped(torch.optim.SGD, 0)) for _ in range(2))
    step(theirs.optimizer)
    theirs.step(*([1.0] if isinstance(theirs, SCHEDULES.ReduceLROnPlateau) else []))
    state = theirs.state_dict()
    check_schedule(ours.state_dict(), state, ours)
    for wrong in ({"last_epoch": "x"}, {"step": 3}, {"_last_lr": 3}):
        with pytest.raises(ValueError, match=f"the state of {type(ours).__name__} has"):
            check_schedule(ours.state_dict(), {**state, **wrong}, ours)
    with pytest.raises(ValueError, match="is a list instead of values by name"):
        check_schedule(ours.state_dict(), [], ours)


@pytest.mark.parametrize("scale", [0.0, -1.0, float("nan"), float("inf")])
def test_a_loss_scale_is_a_positive_number(scale: float) -> None:
    check_scale({"scale": 1.0, "growth_tracker": 0})
    with pytest.raises(ValueError, match="finite number above 0"):
        check_scale({"scale": scale, "growth_tracker": 0})


# ---- a whole checkpoint whose checksums are right --------------------------------------------------------------------


def made(pipelines: int) -> Pipeline:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4))
    plan = Plan(stages=2, pipelines=pipelines, rule="avgpipe" if pipelines > 1 else None)
    return Pipeline(model, plan, loss_fn=nn.MSELoss(), optimizer=torch.optim.Adam)


def rewrite(folder: Path, number: int, damage: Any) -> None:
    """Change the content of a file, and the manifest accordingly."""
    manifest = Manifest.read(folder)
    name, _, _ = manifest.files[number]
    content = torch.load(folder / name, weights_only=True)
    damage(content)
    torch.save(content, folder / name)
    with (folder / name).open("rb") as file:
        files = [*manifest.files]
        files[number] = [name, (folder / name).stat().st_size, checksum_of(file)]
    dataclasses.replace(manifest, files=files).write(folder)


def of_first(damage: Any) -> Any:
    return lambda content: damage(content["replicas"][0])


CRAFTED = {
    "optimizer": of_first(lambda r: r["optimizer"]["state"]["state"][0].pop("exp_avg")),
    "weights of one element": of_first(
        lambda r: r["weights"].update({k: torch.ones(1) for k in r["weights"]})
    ),
    "weights of integers": of_first(
        lambda r: r["weights"].update({k: v.long() for k, v in r["weights"].items()})
    ),
}


@pytest.mark.parametrize("pipelines", [1, 2])
@pytest.mark.parametrize("case", CRAFTED)
def test_a_crafted_checkpoint_is_refused_when_it_is_loaded(tmp_path: Path, case: str, pipelines: int) -> None:
    data = [(torch.ones(4, 4), torch.ones(4, 4))] * 4
    with made(pipelines) as pipeline:
        list(pipeline.train(data))
        pipeline.save(tmp_path / "c")
    rewrite(tmp_path / "c", 0, lambda content: None)
    with made(pipelines) as pipeline:
        pipeline.load(tmp_path / "c")
        list(pipeline.train(data))
    rewrite(tmp_path / "c", 0, CRAFTED[case])
    with made(pipelines) as pipeline, pytest.raises(CheckpointError, match="does not fit"):
        pipeline.load(tmp_path / "c")
