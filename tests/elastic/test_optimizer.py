from __future__ import annotations

import copy
import inspect
import io
import warnings

import pytest
import torch
from torch import nn

from avgpipe import ElasticAveraging, Reference
from tests.elastic.cases import assert_bitwise
from tests.elastic.models import batch, crew, loss_of, model, train, weights_of

# ---- every optimizer of torch ----------------------------------------------------------------------------

CLASSES = [
    c
    for c in vars(torch.optim).values()
    if inspect.isclass(c) and issubclass(c, torch.optim.Optimizer) and c is not torch.optim.Optimizer
]


def parts(cls):
    """Model, batches, and options that suit the optimizer."""
    torch.manual_seed(0)
    if cls.__name__ == "SparseAdam":
        return nn.Embedding(5, 3, sparse=True).double(), lambda i, t: torch.tensor([i, t % 5]), {"lr": 0.1}
    if cls.__name__ == "Muon":  # matrices only
        return nn.Linear(3, 2, bias=False).double(), lambda i, t: batch(i, t).double(), {"lr": 0.02}
    return model().double(), lambda i, t: batch(i, t).double(), {"lr": 0.01}


@pytest.mark.parametrize("staleness", [0, 1])
@pytest.mark.parametrize("cls", CLASSES, ids=lambda c: c.__name__)
def test_every_torch_optimizer_can_be_the_inner_one(cls, staleness):
    """Against each optimizer alone, with the rule applied by hand."""
    start, data, options = parts(cls)
    n = 3
    replicas, plain = ([copy.deepcopy(start) for _ in range(n)] for _ in range(2))
    reference = Reference(start.parameters(), n, staleness=staleness)
    opts = [ElasticAveraging(cls(r.parameters(), **options), reference, i) for i, r in enumerate(replicas)]
    alone = [cls(r.parameters(), **options) for r in plain]
    z = [p.detach().clone() for p in start.parameters()]
    bound = (
        1e-2 if cls.__name__ == "Muon" else 1e-9
    )  # Muon computes in bfloat16: last bits of weights can show
    for t in range(4):
        before = [[p.detach().clone() for p in r.parameters()] for r in plain]
        for i in range(n):
            assert float(step_with_closure(replicas[i], opts[i], data(i, t)).detach()) > 0
            step_with_closure(plain[i], alone[i], data(i, t))
        apply_by_hand(z, before, plain, staleness, 1 / n)
        pairs = [
            (reference.parameters, z),
            *((m.parameters(), p.parameters()) for m, p in zip(replicas, plain)),
        ]
        for mine, theirs in pairs:
            for p, q in zip(mine, theirs, strict=True):
                torch.testing.assert_close(p, q, rtol=bound, atol=bound)


def step_with_closure(m, opt, x):
    def closure():
        opt.zero_grad()
        loss = m(x).square().mean()
        loss.backward()
        return loss

    return opt.step(closure)


@torch.no_grad()
def apply_by_hand(z, before, replicas, staleness, a):
    old = [v.clone() for v in z]
    xs = [list(r.parameters()) for r in replicas]
    for k in range(len(z)):
        z[k] += sum(x[k] - b[k] for x, b in zip(xs, before)) * a
        for x, b in zip(xs, before):
            x[k] += a * (z[k] - x[k]) if staleness == 0 else a * (old[k] - b[k])


# ---- a torch.optim.Optimizer -----------------------------------------------------------------------------


def test_groups_state_and_defaults_are_the_inner_ones_also_after_loading():
    _, _, (opt, _) = crew()
    assert isinstance(opt, torch.optim.Optimizer)
    for _ in range(2):
        assert opt.param_groups is opt.inner.param_groups
        assert opt.state is opt.inner.state
        assert opt.defaults is opt.inner.defaults
        opt.load_state_dict(opt.state_dict())
    opt.param_groups[0]["lr"] = 7.0
    assert opt.inner.param_groups[0]["lr"] == 7.0
    opt.param_groups = copy.copy(opt.param_groups)
    opt.state = copy.copy(opt.state)
    assert opt.inner.param_groups is opt.param_groups


def test_the_inner_optimizer_keeps_its_own_defaults():
    m = nn.Linear(2, 2)
    inner = torch.optim.LBFGS(m.parameters())
    before = dict(inner.defaults)
    ElasticAveraging(inner, Reference(m.parameters(), 1))
    assert inner.defaults == before


def test_hooks_run_around_the_whole_step():
    replicas, reference, opts = crew()
    seen = []

    def hook(opt, args, kwargs):
        seen.append((opts.index(opt), reference.round))

    opts[0].register_step_pre_hook(hook)
    handle = opts[1].register_step_post_hook(hook)
    train(replicas, opts, 2)
    assert seen == [(0, 0), (1, 1), (0, 1), (1, 2)]
    handle.remove()
    train(replicas, opts, 1)
    assert len(seen) == 5


def test_the_profiler_sees_the_step():
    replicas, _, opts = crew()
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU]) as profile:
        train(replicas, opts, 1)
    names = {event.key for event in profile.key_averages()}
    assert {"Optimizer.step#ElasticAveraging.step", "Optimizer.step#SGD.step"} <= names


def test_state_dict_hooks():
    _, _, (opt, _) = crew()
    order = []
    opt.register_state_dict_pre_hook(lambda o: order.append("saving"))
    opt.register_state_dict_post_hook(lambda o, sd: {**sd, "note": 1})
    opt.register_load_state_dict_pre_hook(lambda o, sd: {k: v for k, v in sd.items() if k != "note"})
    opt.register_load_state_dict_post_hook(lambda o: order.append("loaded"))
    state = opt.state_dict()
    assert state["note"] == 1
    opt.load_state_dict(state)
    assert order == ["saving", "loaded"]


@pytest.mark.parametrize("on", ["elastic", "inner"])
def test_learning_rate_schedulers(on):
    replicas, _, opts = crew()
    targets = opts if on == "elastic" else [opt.inner for opt in opts]
    with warnings.catch_warnings():
        warnings.simplefilter("error")  # a scheduler that does not see the steps warns
        schedulers = [torch.optim.lr_scheduler.StepLR(target, 1, gamma=0.5) for target in targets]
        plateau = torch.optim.lr_scheduler.ReduceLROnPlateau(opts[1], patience=0)
        for t in range(3):
            train(replicas, opts, 1, t)
            for scheduler in schedulers:
                scheduler.step()
        plateau.step(1.0)
        plateau.step(2.0)
    assert opts[0].param_groups[0]["lr"] == pytest.approx(0.1 / 8)
    assert opts[1].param_groups[0]["lr"] == pytest.approx(0.1 / 80)


def test_one_cycle_moves_the_momentum_too():
    replicas, _, opts = crew(make=lambda p: torch.optim.AdamW(p, lr=0.01))
    scheduler = torch.optim.lr_scheduler.OneCycleLR(opts[0], max_lr=0.1, total_steps=5)
    train(replicas, opts, 1)
    scheduler.step()
    assert opts[0].inner.param_groups[0]["betas"][0] < 0.95


def test_closures_may_be_evaluated_several_times():
    replicas, reference, opts = crew(make=lambda p: torch.optim.LBFGS(p, max_iter=4))
    calls = 0

    def closure():
        nonlocal calls
        calls += 1
        opts[0].zero_grad()
        loss = loss_of(replicas[0], 0, 0)
        loss.backward()
        return loss

    first = opts[0].step(closure)
    assert calls > 1
    assert first.requires_grad
    with pytest.raises(ZeroDivisionError):
        opts[1].step(lambda: 1 / 0)
    assert reference.round == 0
    assert opts[1].ready


def test_new_groups_only_of_averaged_tensors():
    m = model()
    reference = Reference(m.parameters(), 1)
    opt = ElasticAveraging(torch.optim.SGD(m[0].parameters(), lr=0.1), reference, parameters=m.parameters())
    opt.add_param_group({"params": m[2].parameters(), "lr": 0.2})
    assert [len(g["params"]) for g in opt.param_groups] == [2, 2]
    loss_of(m, 0, 0).backward()
    opt.step()
    assert_bitwise([reference.parameters], [list(m.parameters())])
    with pytest.raises(
        ValueError, match=r"shape \(7,\) is not among the 4 tensors that are averaged for replica 0"
    ):
        opt.add_param_group({"params": nn.Parameter(torch.ones(7))})
    with pytest.raises(TypeError):
        opt.add_param_group({"params": ["weight"]})


def test_it_is_not_copied():
    _, _, (opt, _) = crew()
    with pytest.raises(TypeError, match="save its state_dict"):
        copy.deepcopy(opt)


def test_wrong_arguments():
    m = model()
    reference = Reference(m.parameters(), 2)
    sgd = torch.optim.SGD(m.parameters(), lr=0.1)
    with pytest.raises(TypeError, match=r"must be a plain torch.optim.Optimizer, not type"):
        ElasticAveraging(torch.optim.SGD, reference)
    with pytest.raises(TypeError, match="not ElasticAveraging"):
        ElasticAveraging(ElasticAveraging(sgd, reference), reference, 1)
    with pytest.raises(TypeError, match=r"must be an avgpipe.Reference, not list"):
        ElasticAveraging(sgd, list(m.parameters()))


# ---- state -----------------------------------------------------------------------------------------------


def test_the_state_is_the_inner_one_and_one_key():
    replicas, _, opts = crew(period=2)
    train(replicas, opts, 3)
    state, inner = opts[0].state_dict(), opts[0].inner.state_dict()
    extra = state.pop("elastic")
    assert state.keys() == inner.keys()
    assert (extra["local_steps"], extra["position"]) == (3, 1)
    assert [t.shape for t in extra["start"]] == [p.shape for p in replicas[0].parameters()]


@pytest.mark.parametrize("make", [lambda p: torch.optim.SGD(p, lr=0.1, momentum=0.9), torch.optim.AdamW])
@pytest.mark.parametrize("rule", ["avgpipe", "easgd"])
def test_a_run_continues_bitwise_from_the_middle_of_a_period(rule, make):
    options = {"make": make, "rule": rule, "staleness": 1, "period": 3}
    replicas, reference, opts = crew(**options)
    train(replicas, opts, 5)
    file = io.BytesIO()
    torch.save(
        {
            "models": [r.state_dict() for r in replicas],
            "opts": [o.state_dict() for o in opts],
            "reference": reference.state_dict(),
        },
        file,
    )
    file.seek(0)
    state = torch.load(file, weights_only=True)
    train(replicas, opts, 6, 5)
    replicas2, reference2, opts2 = crew(**options)
    reference2.load_state_dict(state["reference"])
    for r, o, model_state, opt_state in zip(replicas2, opts2, state["models"], state["opts"]):
        r.load_state_dict(model_state)
        o.load_state_dict(opt_state)
    train(replicas2, opts2, 6, 5)
    assert_bitwise(weights_of(replicas, reference), weights_of(replicas2, reference2))


def test_a_plain_state_begins_a_new_period():
    replicas, _, opts = crew(period=2)
    train(replicas, opts, 1)
    opts[0].load_state_dict(opts[0].inner.state_dict())
    assert opts[0].state_dict()["elastic"] == {"local_steps": 0, "position": 0, "start": None}


@pytest.mark.parametrize(
    ("change", "lacking"),
    [
        (lambda state: {}, "state, param_groups"),
        (lambda state: {"state": state["state"]}, "param_groups"),
        (
            lambda state: {**state, "elastic": {"position": 0}},
            r"elastic\['local_steps'\], elastic\['start'\]",
        ),
    ],
)
def test_what_is_no_state_is_refused(change, lacking):
    _, _, opts = crew()
    with pytest.raises(ValueError, match=f"the state lacks {lacking}: pass what state_dict"):
        opts[0].load_state_dict(change(opts[0].state_dict()))


def test_states_of_other_rules_are_refused():
    replicas, _, opts = crew(period=4)
    train(replicas, opts, 3)
    state = opts[0].state_dict()
    with pytest.raises(ValueError, match="after step 3 of a period, but the period is 2"):
        crew(period=2)[2][0].load_state_dict(state)
    with pytest.raises(ValueError, match="saved under another rule"):
        crew(period=4, rule="easgd")[2][0].load_state_dict(state)
