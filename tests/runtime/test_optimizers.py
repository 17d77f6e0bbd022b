"""Several optimizers, each of some parameters, and those that keep other weights for evaluation than for training."""

from __future__ import annotations

import copy
import warnings
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.optim import SGD, AdamW, Muon
from torch.optim.lr_scheduler import LambdaLR

from avgpipe import Pipeline, Plan
from avgpipe.errors import CheckpointError
from avgpipe.runtime.optimizers import maker_of
from avgpipe.runtime.several import Optimizers
from tests.options import grouped
from tests.runner import run
from tests.runtime.cases import (
    Trained,
    adamw,
    assert_goes_on,
    assert_same_state,
    assert_same_training,
    assert_trains_as_one_device,
    language_model,
    momentum,
    token_batches,
    train_on_one_device,
    train_pipeline,
)

LOSS = nn.CrossEntropyLoss()


def two_kinds(params: Any) -> list[torch.optim.Optimizer]:
    """One for matrices, one for vectors; a stage may lack either."""
    params = list(params)
    matrices, vectors = ([p for p in params if (p.dim() > 1) == big] for big in (True, False))
    return [
        SGD([{"params": matrices}], lr=0.1, momentum=0.9),
        AdamW([{"params": vectors}], lr=0.01),
    ]


def halving(optimizer: torch.optim.Optimizer) -> LambdaLR:
    """Another schedule for each kind of optimizer."""
    rate = 0.9 if isinstance(optimizer, SGD) else 0.5
    return LambdaLR(optimizer, lambda step: rate**step)


def trained(plan: dict[str, Any], batches: list[Any]) -> Trained:
    model = language_model()
    return train_pipeline(model, Plan(**plan), batches, LOSS, two_kinds, lr_scheduler=halving)


@pytest.mark.parametrize(
    "plan",
    [
        {"stages": 1, "micro_batches": 3},
        {"stages": 3, "micro_batches": 4},
        {"stages": 2, "micro_batches": 4, "schedule": "1f1b", "replication": [1, 2]},
        {"stages": 2, "micro_batches": 4, "pipelines": 2, "staleness": 0},
    ],
    ids=str,
)
def test_several_optimizers_train_as_on_one_device(plan: dict[str, Any]) -> None:
    batches = token_batches(6, 9)
    with warnings.catch_warnings():
        warnings.simplefilter("error")  # as torch's of schedules that go before their optimizers
        assert_trains_as_one_device(
            language_model(), Plan(**plan), batches, LOSS, two_kinds, lr_scheduler=halving
        )


@pytest.mark.parametrize(
    "rule", [{"rule": "avgpipe"}, {"rule": "easgd", "staleness": 0}, {"rule": "mean-gradient"}], ids=str
)
def test_several_optimizers_are_averaged_whatever_the_number_of_stages(rule: dict[str, Any]) -> None:
    batches = token_batches(6, 8)
    one, two = (
        trained({"stages": K, "pipelines": 2, "micro_batches": 4, "staleness": 1, **rule}, batches)
        for K in (1, 3)
    )
    assert_same_training(two, one)


@pytest.mark.parametrize("schedule", ["pipedream-2bw", "pipedream"])
def test_several_optimizers_step_versions_of_weights(schedule: str) -> None:
    losses, _ = trained({"stages": 2, "micro_batches": 2, "schedule": schedule}, token_batches(2, 8) * 15)
    assert losses[-1] < losses[0] - 0.5


def muon_and_adamw(named_params: Any) -> list[torch.optim.Optimizer]:
    hidden = {"1.weight", "3.lin.weight", "4.lin.weight"}
    matrices, rest = ([p for name, p in named_params if (name in hidden) == is_in] for is_in in (True, False))
    return [Muon([{"params": matrices}], lr=0.02, weight_decay=0.1), AdamW([{"params": rest}], lr=0.02)]


@pytest.mark.parametrize("K", [1, 2, 4])
def test_muon_for_matrices_and_adamw_for_the_rest(K: int) -> None:
    """Micro-batches of one: gradients are then the same bits, which Muon's steps in bfloat16 would not forgive."""
    batches, model = token_batches(5, 6), language_model()
    assert_trains_as_one_device(model, Plan(stages=K), batches, LOSS, muon_and_adamw)


@pytest.mark.parametrize("N", [1, 2])
@pytest.mark.parametrize("K", [1, 2, 4])
def test_a_checkpoint_of_several_optimizers_goes_on_under_other_stages(
    K: int, N: int, tmp_path: Path
) -> None:
    batches = token_batches(8, 8)

    def pipeline(stages: int) -> Pipeline:
        plan = Plan(stages=stages, pipelines=N, micro_batches=4)
        return Pipeline(language_model(), plan, loss_fn=LOSS, optimizer=two_kinds, lr_scheduler=halving)

    assert_goes_on(pipeline, K, batches, tmp_path / "c")


def by_layer(named_params: Any) -> torch.optim.Optimizer:
    """A group and a rate for each parameter."""
    rate = {"0": 0.02, "1": 0.03, "3": 0.05, "4": 0.07, "6": 0.1}
    return SGD([{"params": [p], "lr": rate[name[0]]} for name, p in named_params], lr=0.0, momentum=0.9)


def in_turn(optimizer: torch.optim.Optimizer) -> Any:
    first, then = halving(optimizer), LambdaLR(optimizer, lambda step: 0.8**step)
    return torch.optim.lr_scheduler.SequentialLR(optimizer, [first, then], [6])


@pytest.mark.parametrize("schedule", [halving, in_turn])
@pytest.mark.parametrize("K", [1, 2, 3, 4])
def test_rates_by_layer_and_their_schedules_go_on_under_other_stages(
    K: int, schedule: Any, tmp_path: Path
) -> None:
    batches = token_batches(8, 8)

    def pipeline(stages: int) -> Pipeline:
        plan = Plan(stages=stages, micro_batches=4)
        return Pipeline(language_model(), plan, loss_fn=LOSS, optimizer=by_layer, lr_scheduler=schedule)

    assert_goes_on(pipeline, K, batches, tmp_path / "c")


def test_a_schedule_may_be_made_beside_its_optimizer() -> None:
    made = []

    def optimizer(params: Any) -> Any:
        found = torch.optim.SGD(params, lr=1.0)
        made.append(torch.optim.lr_scheduler.ExponentialLR(found, 0.5))
        return found

    batches = [(torch.ones(2, 3), torch.zeros(2, dtype=torch.long))] * 2
    options: dict[str, Any] = {"loss_fn": nn.CrossEntropyLoss(), "optimizer": optimizer}
    with Pipeline(nn.Linear(3, 2), Plan(), **grouped(**options, lr_scheduler=lambda _: made[-1])) as p:
        assert [result.lr for result in p.train(batches)] == [1.0, 0.5]


def test_every_parameter_is_in_one_of_the_optimizers() -> None:
    def refused(optimizer: Any, match: str, kind: type[Exception] = ValueError) -> None:
        with pytest.raises(kind, match=match):
            Pipeline(language_model(), Plan(stages=2), loss_fn=LOSS, optimizer=optimizer)

    refused(
        lambda named_params: [SGD([p for name, p in named_params if name != "1.bias"], lr=0.1)],
        r"of the 1 optimizers, none has '1.bias': put every trainable parameter into exactly one",
    )
    refused(
        lambda params: [momentum(params), adamw(params)], r"of the 2 optimizers, several have '0.weight', "
    )
    refused(lambda params: [momentum(params), None], "not NoneType", TypeError)
    refused(lambda params: [], "at least", TypeError)
    refused(lambda params: [torch.optim.LBFGS(params)], "LBFGS evaluates the loss again", TypeError)
    refused(
        lambda params: [SGD([p for p in params if p.dim() > 5], lr=0.1), SGD(params, lr=0.1)],
        r"no parameters on a stage that has '0.weight', .*Give each optimizer a group",
    )


def test_their_groups_and_state_are_those_of_all() -> None:
    params = [nn.Parameter(torch.ones(2, 2)), nn.Parameter(torch.ones(2))]
    both = maker_of(two_kinds, ["a", "b"])(params)
    assert isinstance(both, Optimizers)
    assert [group["lr"] for group in both.param_groups] == [0.1, 0.01]
    for p in params:
        p.grad = torch.ones_like(p)
    both.step()
    assert set(both.state) == set(params)
    assert all(member.state is both.state for member in both.members)
    state = copy.deepcopy(both.state_dict())
    assert [group["params"] for group in state["param_groups"]] == [[0], [1]]
    other = maker_of(two_kinds, ["a", "b"])([p.detach().clone().requires_grad_() for p in params])
    other.load_state_dict(state)
    assert str(other.state_dict()) == str(state)
    with pytest.raises(ValueError, match="the state has 1 parameter groups and these 2 optimizers 2"):
        other.load_state_dict({"state": {}, "param_groups": state["param_groups"][:1]})
    with pytest.raises(TypeError, match=r"add it to one of \.members"):
        both.add_param_group({"params": []})


# ---- other weights for evaluation ----------------------------------------------------------------------------------


class ScheduleFree(torch.optim.Optimizer):
    """Steps z, evaluates their mean x, and takes gradients at y between the two; the parameters are y or x."""

    def __init__(self, params: Any, lr: float = 0.1, beta: float = 0.9) -> None:
        super().__init__(params, {"lr": lr, "beta": beta, "k": 0, "train_mode": False})

    def _switch(self, trains: bool) -> None:
        for group in self.param_groups:
            if group["train_mode"] != trains:
                weight = 1 - group["beta"] if trains else 1 - 1 / group["beta"]
                for p in (p for p in group["params"] if p in self.state):
                    p.data.lerp_(self.state[p]["z"], weight)
            group["train_mode"] = trains

    def train(self) -> None:
        self._switch(True)

    def eval(self) -> None:
        self._switch(False)

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        for group in self.param_groups:
            assert group["train_mode"], "step() in the mode for evaluation"
            beta, share = group["beta"], 1 / (group["k"] + 1)
            for p in (p for p in group["params"] if p.grad is not None):
                z = self.state[p].setdefault("z", p.clone())
                x = p.lerp(z, 1 - 1 / beta)
                z.sub_(p.grad, alpha=group["lr"])
                p.copy_(x.lerp_(z, share).lerp_(z, 1 - beta))
            group["k"] += 1


def check_modes(plan: dict[str, Any], optimizer: Any = ScheduleFree) -> None:
    batches = token_batches(8, 9)
    with Pipeline(language_model(), Plan(**plan), loss_fn=LOSS, optimizer=optimizer) as p:
        losses = [r.loss for r in p.train(batches[:4])]
        before = [flat.clone() for t in p._session.worker.trained.values() for flat in t.arena.weights]
        p.state_dict(), p.predict(batches[0][0])
        evaluated = p.evaluate(batches[:2]).loss
        after = [flat for t in p._session.worker.trained.values() for flat in t.arena.weights]
        assert all(torch.equal(a, b) for a, b in zip(before, after))  # in every bit
        _, expected = train_on_one_device(language_model(), batches[:4], LOSS, optimizer)
        assert_same_state(p.state_dict(), expected)
        model = language_model()
        model.load_state_dict(expected)
        model.eval()
        with torch.no_grad():
            x, y = (torch.cat(values) for values in zip(*batches[:2]))
            assert abs(evaluated - float(LOSS(model(x), y))) < 1e-10
            torch.testing.assert_close(p.predict(x), model(x), rtol=1e-10, atol=1e-10)
        losses += [r.loss for r in p.train(batches[4:])]
        state = p.state_dict()
    assert_same_training((losses, state), train_on_one_device(language_model(), batches, LOSS, optimizer))


PLANS = [
    {"stages": 1, "micro_batches": 3},
    {"stages": 3, "micro_batches": 4},
    {"stages": 2, "micro_batches": 4, "schedule": "1f1b", "replication": [2, 1]},
]


@pytest.mark.parametrize("plan", PLANS, ids=str)
def test_evaluation_has_the_weights_that_the_optimizer_has_for_it(plan: dict[str, Any]) -> None:
    check_modes(plan)


@pytest.mark.ranks
@pytest.mark.parametrize("plan", [{"stages": 2, "micro_batches": 3}], ids=str)
def test_evaluation_has_its_weights_on_ranks(plan: dict[str, Any]) -> None:
    run(2, check_modes, plan=plan)


def test_one_of_several_optimizers_may_have_modes() -> None:
    def mixed(params: Any) -> Any:
        params = list(params)
        free, rest = ([p for p in params if (p.dim() > 1) == big] for big in (True, False))
        return [ScheduleFree([{"params": free}]), SGD([{"params": rest}], lr=0.1)]

    plan = Plan(stages=2, micro_batches=3)
    assert_trains_as_one_device(language_model(), plan, token_batches(5, 9), LOSS, mixed)


def test_the_real_ones_where_they_are_installed() -> None:
    schedulefree = pytest.importorskip("schedulefree", reason="an optimizer of its own package")
    check_modes(
        {"stages": 2, "micro_batches": 3}, lambda params: schedulefree.AdamWScheduleFree(params, lr=0.02)
    )


class Plain(torch.optim.Optimizer):
    """Steps from any state, and keeps the weights for training only."""

    def __init__(self, params: Any) -> None:
        super().__init__(params, {"lr": 0.1})

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:
        for group in self.param_groups:
            for p in group["params"]:
                p.sub_(p.grad, alpha=group["lr"])


@pytest.mark.parametrize("K", [1, 2])
def test_a_checkpoint_keeps_the_weights_for_training_and_those_for_evaluation(K: int, tmp_path: Path) -> None:
    batches = token_batches(8, 8)

    def pipeline(stages: int, optimizer: Any = ScheduleFree) -> Pipeline:
        return Pipeline(
            language_model(), Plan(stages=stages, micro_batches=2), loss_fn=LOSS, optimizer=optimizer
        )

    assert_goes_on(pipeline, K, batches, tmp_path / "c")
    with pipeline(2) as p, pipeline(K, Plain) as other, pipeline(K, momentum) as third:
        p.load(tmp_path / "c")
        other.load(tmp_path / "c")
        assert_same_state(other.state_dict(), p.state_dict())
        # it could not step from that state
        with pytest.raises(CheckpointError, match=r"(a group|the state) of SGD"):
            third.load(tmp_path / "c")


@pytest.mark.parametrize(
    ("plan", "options", "match"),
    [
        ({"pipelines": 2}, {}, "averaging would mix .*: use pipelines=1"),
        ({"pipelines": 2, "rule": "avgpipe"}, {}, "use pipelines=1"),
        ({"schedule": "pipedream-2bw", "micro_batches": 2, "correction": "nesterov"}, {}, "correction out"),
        ({}, {"ema_decay": 0.9}, "it averages the weights itself: leave MovingAverage out"),
    ],
)
def test_what_modes_do_not_go_with_is_refused(plan: dict[str, Any], options: Any, match: str) -> None:
    with pytest.raises(ValueError, match=rf"ScheduleFree keeps other weights for evaluation .*{match}"):
        Pipeline(
            language_model(),
            Plan(stages=2, **plan),
            **grouped(loss_fn=LOSS, optimizer=ScheduleFree, **options),
        )


def test_weights_from_outside_are_refused_once_the_state_has_some() -> None:
    model = language_model()
    with Pipeline(model, Plan(stages=2), loss_fn=LOSS, optimizer=ScheduleFree) as p:
        p.load_state_dict(model.state_dict())
        list(p.train(token_batches(1, 4)))
        with pytest.raises(ValueError, match="the optimizer keeps weights in its state"):
            p.load_state_dict(model.state_dict())
        list(p.train(token_batches(1, 4)))
