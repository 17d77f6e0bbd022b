"""In the first batch stages are compared with the model: what a cut would change is refused before it trains."""

from __future__ import annotations

import copy
import logging
import os
import random
from collections.abc import Callable, Sequence
from types import SimpleNamespace
from typing import Any, cast

import pytest
import torch
from torch import nn
from torch.utils import _pytree as pytree

from avgpipe import PeerLost, Pipeline, Plan
from avgpipe.model.layers import layers_of
from avgpipe.runtime import audit
from avgpipe.runtime.audit import StageAudit
from avgpipe.runtime.options import TrainingOptions
from avgpipe.runtime.spec import Spec
from tests.options import grouped
from tests.runner import run
from tests.runtime.cases import assert_same_training, momentum, train_on_one_device, train_pipeline

LOSS = nn.MSELoss()


class F(nn.Module):
    """A function as a layer."""

    def __init__(self, function: Callable[[Any], Any]) -> None:
        super().__init__()
        self.function = function

    def forward(self, value: Any) -> Any:
        return self.function(value)


def chain(*between: nn.Module) -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(4, 8), *between, nn.Linear(8, 2))


def batches(count: int = 3, samples: int = 8) -> list[tuple[torch.Tensor, torch.Tensor]]:
    draw = torch.Generator().manual_seed(1)
    return [
        (torch.randn(samples, 4, generator=draw), torch.randn(samples, 2, generator=draw))
        for _ in range(count)
    ]


def train(model: nn.Module | Sequence[nn.Module], plan: Plan | None = None, **options: Any) -> Pipeline:
    plan = plan or Plan(stages=2, micro_batches=2, partition=[2])
    with Pipeline(model, plan, **grouped(loss_fn=LOSS, optimizer=momentum, **options)) as p:
        list(p.train(batches()))
    return p


def audit_of(model: Any, layers: Sequence[nn.Module] | None = None, **options: Any) -> StageAudit:
    layers = layers_of(model) if layers is None else layers
    spec = SimpleNamespace(
        given=model,
        layers=layers,
        model=SimpleNamespace(bounds=[0, len(layers) // 2, len(layers)]),
        plan=Plan(stages=2),
        options=TrainingOptions(LOSS, momentum, **options),
        device=torch.device("cpu"),
    )
    return StageAudit(cast(Spec, spec))


# ---- what differs is refused -----------------------------------------------------------------------------------------


class Net(nn.Module):
    """All that a comparison looks at: weights, what is drawn, and buffers that move."""

    mean: torch.Tensor

    def __init__(self) -> None:
        super().__init__()
        self.a, self.drop, self.norm, self.b = (
            nn.Linear(4, 8),
            nn.Dropout(0.3),
            nn.BatchNorm1d(8),
            nn.Linear(8, 2),
        )
        self.register_buffer("mean", torch.zeros(8))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        h = self.drop(self.norm(self.a(x)).relu())
        self.mean.mul_(0.9).add_(0.1 * h.detach().mean(0))
        return self.b(h - self.mean)


@pytest.mark.parametrize("recomputes", [False, True])
def test_stages_that_compute_what_the_model_does_pass_and_leave_no_trace(recomputes: bool) -> None:
    model = Net()
    made = audit_of(model, recompute="always" if recomputes else "never")
    before = {name: t.clone() for name, t in model.state_dict().items()}
    drawn = torch.get_rng_state(), random.getstate()
    made.look(0, torch.randn(8, 4, generator=torch.Generator().manual_seed(0)))
    assert made._looked == 1
    assert made._left_out is None
    assert all(torch.equal(t, before[name]) for name, t in model.state_dict().items())
    assert all(p.grad is None for p in model.parameters())
    assert torch.equal(torch.get_rng_state(), drawn[0])
    assert random.getstate() == drawn[1]


OTHER: dict[str, tuple[Callable[[Any], Any], str]] = {
    "output": (
        lambda y: 1.0001 * y + 0.01,
        "the stages do not compute what the model does, on samples of batch 0: output 0",
    ),
    "gradient": (lambda y: y.detach() + 0 * y, "gradient of"),
    "half a gradient": (lambda y: (y + y.detach()) / 2, "gradient of"),
    "shape": (
        lambda y: y[:, :1],
        r"output 0 is \[2, 2\] float32 in the model and \[2, 1\] float32 in the stages",
    ),
    "dtype": (lambda y: y.double(), r"output 0 is .* in the model and \[2, 2\] float64"),
    "count": (lambda y: (y, y), "the model returns 1 tensors and the stages 2"),
    "an error": (lambda y: y @ torch.ones(3, 3), "mat1 and mat2 shapes cannot be multiplied"),
}


@pytest.mark.parametrize("what", OTHER)
def test_what_stages_would_compute_otherwise_is_named(what: str) -> None:
    model, (change, message) = Net(), OTHER[what]
    made = audit_of(model, [*layers_of(model), F(change)])
    with pytest.raises(ValueError, match=message):
        made.look(0, torch.randn(8, 4))


def test_a_buffer_that_only_the_model_moves_is_named() -> None:
    model = chain(nn.BatchNorm1d(8))
    still = nn.BatchNorm1d(8)
    still.weight, still.bias = model[1].weight, model[1].bias
    still.running_mean, still.running_var = model[1].running_mean, model[1].running_var
    made = audit_of(model, [model[0], still, model[2]])
    with pytest.raises(ValueError, match=r"buffer 1\.num_batches_tracked differs by 1, "):
        made.look(0, torch.randn(8, 4))


def test_an_evaluation_that_differs_is_named() -> None:
    model = chain()
    made = audit_of(model, [*model, OnlyEvaluated()])
    with pytest.raises(ValueError, match="in evaluation, the stages do not compute what the model does"):
        made.look(0, torch.randn(8, 4))


class OnlyEvaluated(nn.Module):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x if self.training else 2 * x


def one_memory() -> list[nn.Module]:
    """Return layers of which one writes to a value; neither is a view of the other, both are of what is not sent."""
    return [
        F(lambda x: (x.t(), x[:, :4])),
        F(lambda v: (v[0].mul_(2), v[1])),
        F(lambda v: torch.cat((v[0].t()[:, :4], v[1]), 1)),
    ]


def test_values_in_one_memory_that_a_cut_parts_are_refused_where_one_is_written_to() -> None:
    parts = one_memory()
    train(chain(*parts), Plan(stages=2, micro_batches=2, partition=[3]))
    with pytest.raises(ValueError, match=r"batch 0: output 0 differs by .* cut it elsewhere"):
        train(chain(*parts))
    train(chain(*parts), check="off")


class Counts(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.calls = 0

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.calls += 1
        return x * (1 + self.calls % 2)


class Draws(nn.Module):
    """Has a generator of its own."""

    def __init__(self) -> None:
        super().__init__()
        self.draw = random.Random(0)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x * self.draw.random()


@pytest.mark.parametrize("layer", [Counts, Draws])
@pytest.mark.parametrize("recompute", ["always", "except-last"])
def test_a_layer_that_does_something_else_the_second_time_is_refused_under_recomputation(
    layer: type[nn.Module], recompute: str
) -> None:
    train(chain(nn.Tanh(), layer()))
    plan = Plan(stages=2, micro_batches=2, recompute=recompute)
    with pytest.raises(
        ValueError, match=r"recomputation changes what the model learns, on samples of batch 0"
    ):
        train(chain(nn.Tanh(), layer()), plan)


# ---- when, and on what -----------------------------------------------------------------------------------------------


def test_it_looks_at_the_first_batch_now_and_then_or_at_all_of_them() -> None:
    for check, expected in (("first-batch", [7]), ("every", [7, 100, 200]), ("full", [7, 8, 100, 150, 200])):
        model, looked = Net(), []
        made = audit_of(model, check=check)
        made._compare = lambda batch, inputs, to=looked: to.append((batch, len(inputs)))  # type: ignore[method-assign]
        for batch in (7, 8, 100, 150, 200):
            made.look(batch, torch.randn(16, 4))
        assert [batch for batch, _ in looked] == expected
        assert {samples for _, samples in looked} == {16 if check == "full" else 4}


@pytest.mark.parametrize(
    ("samples", "few"), [(1, 1), (2, 2), (3, 3), (5, 3), (8, 2), (12, 3), (64, 4), (65, 4)]
)
def test_some_samples_are_a_quarter_of_the_batch_at_most_where_it_has_eight(samples: int, few: int) -> None:
    names = [str(n) for n in range(samples)]
    x, found = audit._few((torch.arange(samples), names), 0)
    assert x.tolist() == list(range(len(x)))
    assert found == names[: len(x)]
    assert len(x) <= few


def test_a_batch_whose_samples_lie_elsewhere_is_looked_at_as_a_whole() -> None:
    inputs = (torch.zeros(3, 4), torch.zeros(5))
    assert audit._few(inputs, 0) is inputs


def test_a_loader_of_several_epochs_is_looked_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    looked = []
    monkeypatch.setattr(StageAudit, "_compare", lambda self, batch, inputs: looked.append(batch))
    with Pipeline(chain(), Plan(stages=2), loss_fn=LOSS, optimizer=momentum) as p:
        for _ in range(2):
            list(p.train(batches()))
        p.step(*batches()[0])
    assert looked == [0]


# ---- what cannot be compared -----------------------------------------------------------------------------------------

_calls = 0


def _other_each_time(x: torch.Tensor) -> torch.Tensor:
    global _calls
    _calls += 1
    return x * _calls


LEFT_OUT: dict[str, tuple[Callable[[], Any], str]] = {
    "no values": (lambda: [nn.Linear(4, 4, device="meta"), nn.Linear(4, 2)], "the model has no values yet"),
    "compiled": (lambda: [nn.Linear(4, 4), _compiled(nn.Linear(4, 2))], "it is compiled"),
    "never the same": (lambda: [nn.Linear(4, 4), F(_other_each_time)], "it does not do the same twice"),
    "fails alone": (
        lambda: [nn.Linear(4, 4), F(lambda x: x.view(100, -1))],
        "it does not run on some of the samples of a batch",
    ),
}


def _compiled(layer: nn.Module) -> nn.Module:
    layer.compile(backend="eager")
    return layer


@pytest.mark.parametrize("what", LEFT_OUT)
def test_what_cannot_be_compared_is_left_out_and_said(what: str, caplog: pytest.LogCaptureFixture) -> None:
    make, reason = LEFT_OUT[what]
    model = make()
    made = audit_of(model, model)
    with caplog.at_level(logging.INFO, "avgpipe"):
        made.look(0, torch.randn(8, 4))
    *others, text = [record.getMessage() for record in caplog.records]
    assert [other[:47] for other in others] == ["a forward changes the variable '_calls' outside"] * len(
        others
    )
    assert len(others) == (what == "never the same")
    assert text.startswith(f"stages are not compared with the model: {reason}")


def test_what_memory_does_not_hold_is_left_out(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(audit, "free_bytes", lambda device: 1000.0)
    assert audit_of(nn.ModuleList([nn.Linear(4, 4), nn.Linear(4, 2)]))._left_out is None
    reason = audit_of(nn.ModuleList([nn.Linear(20, 20), nn.Linear(4, 2)]))._left_out
    assert reason is not None
    assert "of which 0 MiB may be used" in reason


def test_of_large_gradients_some_elements_are_compared(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("avgpipe.model.proof._MOST", 8)
    model = chain()
    made = audit_of(model)
    with made._putting_back():
        outcome = made._run_model(torch.randn(3, 4))
    assert {name: t.numel() for name, t in outcome.gradients.items()} == {
        "0.weight": 8,
        "0.bias": 8,
        "1.weight": 8,
        "1.bias": 2,
    }
    made.look(0, torch.randn(8, 4))


# ---- on ranks --------------------------------------------------------------------------------------------------------


def refused_on_ranks() -> str:
    parts = one_memory()
    try:
        train(chain(*parts), timeout_s=60)
    except (ValueError, PeerLost) as error:
        return str(error)
    return f"rank {os.environ['RANK']} trained"


@pytest.mark.ranks
def test_what_the_first_rank_finds_is_reported_on_the_others() -> None:
    for said in run(2, refused_on_ranks):
        assert "the stages do not compute what the model does" in said


@pytest.mark.parametrize("make", [Net, lambda: chain(nn.Dropout(0.3))])
def test_what_the_caller_does_with_the_model_meanwhile_is_no_difference(
    make: Callable[[], nn.Module],
) -> None:
    for touch in (
        nn.Module.eval,
        nn.Module.requires_grad_,
        lambda model: model.requires_grad_(False),
        nn.Module.double,
    ):
        model = make()
        with Pipeline(model, Plan(stages=2), loss_fn=LOSS, optimizer=momentum) as p:
            touch(model)
            list(p.train(batches()))


# ---- models that are more than their children ------------------------------------------------------------------------


class AndItself(nn.Sequential):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return super().forward(x) + x


class Backwards(nn.ModuleList):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for layer in reversed(list(self)):
            x = layer(x)
        return x


class Twice(nn.Sequential):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for layer in [*self, *self]:
            x = layer(x)
        return x


@pytest.mark.parametrize("kind", [AndItself, Backwards, Twice])
def test_a_container_with_a_forward_of_its_own_trains_as_on_one_device(kind: Any) -> None:
    torch.manual_seed(0)
    layers = [nn.Linear(4, 4), nn.Tanh(), nn.Linear(4, 4), nn.Sigmoid()]
    model = kind(layers) if kind is Backwards else kind(*layers)
    given = [(x, x.flip(0)) for x, _ in batches(4)]
    plan = Plan(stages=2, pipelines=2, micro_batches=4, staleness=0)
    assert_same_training(
        train_pipeline(model, plan, given, LOSS, momentum),
        train_on_one_device(model, given, LOSS, momentum),
        1e-6,
    )


@pytest.mark.parametrize(
    "register",
    [
        lambda model: model.register_forward_hook(lambda module, args, output: 3 * output),
        lambda model: model.register_forward_pre_hook(lambda module, args: (3 * args[0],)),
        lambda model: model.register_full_backward_hook(lambda module, grads, outputs: None),
    ],
)
@pytest.mark.parametrize("make", [Net, chain])
def test_a_hook_of_the_model_as_a_whole_is_refused(make: Any, register: Any) -> None:
    model = make()
    register(model)
    with pytest.raises(
        ValueError, match="has a hook of its own, which no stage would call: register it on a module"
    ):
        train(model)


def test_nothing_is_left_of_a_model_without_other_references() -> None:
    made = audit_of(chain())
    made.look(0, torch.randn(8, 4))
    assert not made._stages
    assert not list(made._model.parameters())
    assert not pytree.tree_leaves(made._parameters)


@pytest.mark.parametrize("cut", [[1], [2], [3], [1, 2]], ids=str)
@pytest.mark.parametrize("recompute", ["never", "always"])
def test_a_layer_that_detaches_equals_one_device_wherever_the_cut_is(cut: list[int], recompute: str) -> None:
    model = chain(F(lambda x: x.detach()), nn.Linear(8, 8)).double()
    plan = Plan(stages=1 + len(cut), micro_batches=2, partition=cut, recompute=recompute)
    given = [(x.double(), y.double()) for x, y in batches()]
    expected = train_on_one_device(model, given, LOSS, momentum)
    assert_same_training(train_pipeline(model, plan, given, LOSS, momentum), expected)


# ---- micro-batches beside the whole batch ----------------------------------------------------------------------------


class Keeps(nn.Module):
    """Moves a buffer in each forward, as a running mean of one's own, and may use it."""

    seen: torch.Tensor

    def __init__(self, used: bool) -> None:
        super().__init__()
        self.register_buffer("seen", torch.zeros(8))
        self.used = used

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.seen = 0.9 * self.seen + 0.1 * x.detach().mean(0)
        return x - self.seen if self.used else x


class CountsInABuffer(nn.Module):
    calls: torch.Tensor

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("calls", torch.zeros((), dtype=torch.int64))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.calls += 1
        return x


def limited(x: torch.Tensor) -> torch.Tensor:
    y = x * 1
    if y.requires_grad:
        y.register_hook(lambda grad: grad / grad.norm())
    return y


MIXED: dict[str, Callable[[], nn.Module]] = {
    "centred by the batch": lambda: F(lambda x: x - x.mean(0)),
    "asks for the batch size": lambda: F(lambda x: x / len(x)),
    "attends over samples": lambda: F(lambda x: torch.softmax(x @ x.T, 1) @ x),
    "batch_norm of functional": lambda: F(lambda x: nn.functional.batch_norm(x, None, None, training=True)),
    "a branch by the mean": lambda: F(lambda x: x * 2 if x.mean() != x[:2].mean() else x + 1),
    "a buffer that is used": lambda: Keeps(used=True),
    "a buffer alone": lambda: Keeps(used=False),
    "a counter": CountsInABuffer,
    "the norm of a gradient": lambda: F(limited),
    "spectral norm": lambda: nn.utils.parametrizations.spectral_norm(nn.Linear(8, 8)),
}


@pytest.mark.parametrize("layer", MIXED.values(), ids=MIXED)
def test_what_micro_batches_change_is_warned_of(
    layer: Callable[[], nn.Module], caplog: pytest.LogCaptureFixture
) -> None:
    train(chain(layer()))
    said = [record for record in caplog.records if "micro-batches than of all" in record.message]
    assert len(said) == 1
    assert said[0].levelno == logging.WARNING
    caplog.clear()
    train(chain(layer()), Plan(stages=2, partition=[2]))
    assert not [record for record in caplog.records if "micro-batches" in record.message]


SAMPLEWISE: dict[str, Callable[[], nn.Module]] = {
    "dropout": lambda: nn.Dropout(0.5),
    "batch norm": lambda: nn.BatchNorm1d(8),
    "dropout in a layer that is not asked": lambda: F(lambda x: nn.functional.dropout(x, 0.5)),
    "batch norm and dropout": lambda: nn.Sequential(nn.BatchNorm1d(8), nn.Dropout(0.5)),
    "layer norm": lambda: nn.LayerNorm(8),
    "a frozen layer": lambda: nn.Linear(8, 8).requires_grad_(False),
    "attention": lambda: F(
        lambda x: x + nn.functional.scaled_dot_product_attention(*[x[:, None, None]] * 3)[:, 0, 0]
    ),
    "in place": lambda: F(lambda x: (x + 1).mul_(2)),
    "an index": lambda: F(lambda x: x[:, torch.arange(8).flip(0)]),
}


@pytest.mark.parametrize("layer", SAMPLEWISE.values(), ids=SAMPLEWISE)
def test_layers_that_take_each_sample_by_itself_are_not(
    layer: Callable[[], nn.Module], caplog: pytest.LogCaptureFixture
) -> None:
    train(chain(layer()))
    assert not [record for record in caplog.records if record.levelno >= logging.WARNING]


class InFloat32(nn.Module):
    """Scales by a norm and a weight as many transformers do, in float32 whatever the model's dtype is."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(8))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        wide = x.float()
        normed = wide * torch.rsqrt(wide.pow(2).mean(-1, keepdim=True) + 1e-6)
        return (self.weight.float() * normed).to(x.dtype)


def test_a_part_of_a_model_in_float64_may_round_as_float32_does(caplog: pytest.LogCaptureFixture) -> None:
    plan = Plan(stages=2, micro_batches=2, partition=[2])
    with Pipeline(chain(InFloat32()).double(), plan, loss_fn=LOSS, optimizer=momentum) as p:
        list(p.train([(x.double(), y.double()) for x, y in batches()]))
    assert not [record for record in caplog.records if record.levelno >= logging.WARNING]


def test_a_mixture_of_samples_that_is_far_below_float32s_rounding_is_seen(
    caplog: pytest.LogCaptureFixture,
) -> None:
    plan = Plan(stages=2, micro_batches=2, partition=[2])
    model = chain(F(lambda x: x + 1e-7 * x.mean(0))).double()
    with Pipeline(model, plan, loss_fn=LOSS, optimizer=momentum) as p:
        list(p.train([(x.double(), y.double()) for x, y in batches()]))
    (said,) = [record for record in caplog.records if record.levelno >= logging.WARNING]
    assert "the model computes something else of" in said.message


def test_the_rounding_of_an_autocast_around_training_is_none_of_it(caplog: pytest.LogCaptureFixture) -> None:
    model = nn.Sequential(nn.Linear(4, 64), nn.ReLU(), nn.Linear(64, 64), nn.ReLU(), nn.Linear(64, 2))
    with torch.autocast("cpu", torch.bfloat16):
        train(model, Plan(stages=2, micro_batches=4))
    assert not [record for record in caplog.records if record.levelno >= logging.WARNING]


def test_numbers_of_other_generators_than_torchs_are_warned_of(caplog: pytest.LogCaptureFixture) -> None:
    train(chain(F(lambda x: x * (random.random() < 0.5))))
    (said,) = [record for record in caplog.records if record.levelno >= logging.WARNING]
    assert said.message.startswith("a layer draws from the generator of random, so it draws other numbers")


class Teaches(nn.Module):
    """Has a part whose gradient is not wanted."""

    def __init__(self) -> None:
        super().__init__()
        self.a, self.b, self.c = nn.Linear(4, 8), nn.Linear(8, 8), nn.Linear(8, 2)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        h = self.a(x)
        with torch.no_grad():
            target = self.b(h)
        return self.c(h - target)


def test_a_recorded_forward_says_what_recording_leaves_out() -> None:
    with pytest.raises(
        ValueError, match=r"recorded from its forward, which leaves out hooks, torch.no_grad\(\)"
    ):
        train(Teaches(), Plan(stages=2, micro_batches=2))


# ---- what a forward writes to ----------------------------------------------------------------------------------------


def limited_embedding() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(nn.Embedding(11, 4, max_norm=0.5), nn.Linear(4, 8), nn.Tanh(), nn.Linear(8, 2))


def tokens(count: int = 3) -> list[Any]:
    draw = torch.Generator().manual_seed(1)
    return [
        (torch.randint(11, (8,), generator=draw), torch.randn(8, 2, generator=draw)) for _ in range(count)
    ]


@pytest.mark.parametrize(
    "plan",
    [
        {"pipelines": 2, "micro_batches": 2},
        {"pipelines": 2, "micro_batches": 2, "batch": "per-pipeline"},
        {"schedule": "pipedream"},
        {"schedule": "pipedream-2bw", "micro_batches": 2},
        {"schedule": "1f1b", "replication": [1, 2], "micro_batches": 2},
    ],
    ids=str,
)
def test_a_forward_that_writes_to_a_parameter_is_refused_where_it_has_copies(plan: dict[str, Any]) -> None:
    given = Plan(stages=2, **plan)
    with pytest.raises(
        ValueError, match=r"the forward writes to the parameter '0.weight', as an embedding with max"
    ):
        train_pipeline(limited_embedding(), given, tokens(), LOSS, momentum)
    train_pipeline(limited_embedding(), given, tokens(), LOSS, momentum, check="off")


@pytest.mark.parametrize("K", [1, 2])
def test_with_one_pipeline_it_trains_as_on_one_device(K: int, caplog: pytest.LogCaptureFixture) -> None:
    """Micro-batch by micro-batch, rows are limited as they are looked up."""
    plan, model = Plan(stages=K, micro_batches=1), limited_embedding()
    assert_same_training(
        train_pipeline(model, plan, tokens(), LOSS, momentum),
        train_on_one_device(model, tokens(), LOSS, momentum),
        1e-6,
    )
    assert not [record for record in caplog.records if record.levelno >= logging.WARNING]


class Follows(nn.Module):
    """Moves a frozen copy of a layer after the layer in each forward; both are equal before the first one."""

    def __init__(self) -> None:
        super().__init__()
        self.own = nn.Linear(8, 8)
        self.slow = copy.deepcopy(self.own).requires_grad_(False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        with torch.no_grad():
            for slow, own in zip(self.slow.parameters(), self.own.parameters()):
                slow.lerp_(own, 0.5)
        return self.own(x) + 0.1 * self.slow(x)


def test_a_parameter_that_follows_another_one_is_seen_while_both_are_equal() -> None:
    with pytest.raises(ValueError, match=r"the forward writes to the parameter '1.slow.bias', once for each"):
        train(chain(Follows()))


class FollowsWithin(Follows):
    """Can do with the weights that it has alone."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if not torch.equal(self.slow.weight, self.own.weight):
            raise ArithmeticError("not with these weights")
        self.slow.weight.mul_(1)
        return self.own(x)


def test_a_forward_that_cannot_run_with_other_weights_is_compared_nevertheless(
    caplog: pytest.LogCaptureFixture,
) -> None:
    audit_of(chain(FollowsWithin())).look(0, torch.randn(8, 4))
    assert not [record for record in caplog.records if "not compared" in record.message]


class Rescales(nn.Module):
    """Has smaller weights in evaluation, as RWKV has; by ``factor``."""

    def __init__(self, factor: float) -> None:
        super().__init__()
        self.linear, self.factor, self.is_small = nn.Linear(8, 8), factor, False

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if self.is_small == self.training:
            with torch.no_grad():
                self.linear.weight.mul_(self.factor if self.training else 1 / self.factor)
            self.is_small = not self.training
        return self.linear(x)


@pytest.mark.parametrize("factor", [1.0, 2.0])
def test_a_parameter_that_is_written_to_in_evaluation_trains_as_on_one_device(factor: float) -> None:
    plan, model = Plan(stages=2, micro_batches=2, partition=[2]), chain(Rescales(factor))
    assert_same_training(
        train_pipeline(model, plan, batches(), LOSS, momentum),
        train_on_one_device(model, batches(), LOSS, momentum),
        1e-6,
    )


def test_writing_that_changes_no_value_is_none() -> None:
    model = chain(Rescales(1.0))
    with Pipeline(
        model, Plan(stages=2, micro_batches=2, partition=[2]), loss_fn=LOSS, optimizer=momentum
    ) as p:
        p.predict(batches()[0][0])  # which the first forward in training undoes
        list(p.train(batches()))


def test_a_weight_that_is_nan_is_not_taken_for_one_that_a_forward_writes_to() -> None:
    model = chain()
    with torch.no_grad():
        model[0].weight[0, 0] = float("nan")
    train(model, Plan(stages=2, micro_batches=2))


class WantsGradients(nn.Module):
    """Makes its input want a gradient, as what calls torch's checkpoint may."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = x[:, None]
        if self.training:
            x.requires_grad = True
        return x[:, 0] * 1.5


def test_a_leaf_that_a_forward_makes_is_no_foreign_parameter() -> None:
    plan, model = Plan(stages=2, micro_batches=2, partition=[2]), nn.Sequential(WantsGradients(), *chain())
    assert_same_training(
        train_pipeline(model, plan, batches(), LOSS, momentum),
        train_on_one_device(model, batches(), LOSS, momentum),
        1e-6,
    )


class AddsNoise(nn.Module):
    """Writes to what it receives; in training alone if it is told so."""

    def __init__(self, always: bool) -> None:
        super().__init__()
        self.always = always

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x.mul_(1.01) if self.training or self.always else x


@pytest.mark.parametrize("micro_batches", [1, 2])
@pytest.mark.parametrize("always", [True, False])
def test_a_forward_that_writes_to_its_inputs_is_warned_of_once(
    always: bool, micro_batches: int, caplog: pytest.LogCaptureFixture
) -> None:
    model = nn.Sequential(AddsNoise(always), *chain())
    train(model, Plan(stages=2, micro_batches=micro_batches), check="full")
    said = [r.getMessage() for r in caplog.records if "writes to its inputs" in r.getMessage()]
    assert len(said) == 1
    assert "x = x.clone()" in said[0]


def test_a_forward_that_writes_to_what_it_has_made_is_not(caplog: pytest.LogCaptureFixture) -> None:
    for model in (chain(AddsNoise(True)), nn.Sequential(F(torch.clone), AddsNoise(True), *chain())):
        train(model, Plan(stages=2, micro_batches=2))
    assert not [record for record in caplog.records if record.levelno >= logging.WARNING]


@pytest.mark.parametrize("cut", [1, 2, 3])
def test_a_stage_may_begin_with_a_layer_that_writes_to_what_it_receives(cut: int) -> None:
    """Torch refuses to write to a leaf that wants a gradient, which the stage sees to by a copy."""
    drawn = nn.Sequential(nn.Dropout(0.3), nn.ReLU(inplace=True))
    model = chain(nn.ReLU(inplace=True), drawn)
    train(model, Plan(stages=2, micro_batches=2, partition=[cut]), check="full")


# ---- inputs ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("plan", [{}, {"micro_batches": 1}, {"pipelines": 2}, {"stages": 1}], ids=str)
def test_inputs_with_a_graph_are_refused(plan: dict[str, Any]) -> None:
    first = nn.Linear(4, 4)
    given = Plan(**{"stages": 2, "micro_batches": 2, **plan})
    with pytest.raises(ValueError, match=r"have a grad_fn, .*first layer of the model, or detach\(\) them"):
        train_pipeline(chain(), given, [(first(x), y) for x, y in batches()], LOSS, momentum)
    train_pipeline(chain(), given, [(first(x).detach(), y) for x, y in batches()], LOSS, momentum)
    with torch.no_grad():
        train_pipeline(chain(), given, [(first(x), y) for x, y in batches()], LOSS, momentum)
