"""One pass for the optimizer's step and the averaging does what the step and then the averaging do.

That the rules themselves are right is tested against an emulation in test_rules, which runs fused, too.
"""

from __future__ import annotations

import warnings

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn

from avgpipe import ElasticAveraging, Reference
from tests.elastic.fused_cases import MAKE, Run, assert_close, assert_same_state
from tests.elastic.models import batch


@pytest.mark.grid(24)
@pytest.mark.parametrize("arena", [False, True], ids=["separate", "arena"])
@pytest.mark.parametrize("rule", [("avgpipe", 0), ("avgpipe", 1), ("avgpipe", "asynchronous"), ("easgd", 0)])
@pytest.mark.parametrize("make", MAKE.values(), ids=MAKE)
def test_fused_steps_do_what_plain_ones_do(make, rule, arena):
    options = {"rule": rule[0], "staleness": rule[1]}
    for n in (1, 3):
        alpha = 0.4 / n
        mine, theirs = (Run(make, fused, n, arena, alpha=alpha, **options) for fused in (True, False))
        for t in range(5):
            for run in (mine, theirs):
                run.step(without=(1, 2) if t in (0, 3) else ())
            assert_close(mine.values(), theirs.values())
        for a, b in zip(mine.opts, theirs.opts):
            assert_same_state(a.state_dict()["state"], b.state_dict()["state"])


def test_16_bit_weights():
    """Plain steps round between the optimizer and the averaging, and Adam's float16 squares underflow."""
    for dtype, name, bound in (
        (torch.bfloat16, "momentum", 0.03),
        (torch.bfloat16, "adam", 0.03),
        (torch.float16, "momentum", 0.004),
    ):
        mine, theirs = (
            Run(MAKE[name], fused, arena=True, dtype=dtype, staleness=1) for fused in (True, False)
        )
        for _ in range(3):
            for run in (mine, theirs):
                run.step()
        assert_close(mine.values(), theirs.values(), bound)


def test_memory_between_parameters_is_averaged_in_a_pass_of_its_own(calls):
    """Views of a tensor that do not cover it; what lies between must not be stepped, but is averaged."""
    flat, z = torch.ones(8, 10), torch.zeros(8, 10)
    views = [flat[0], flat[4:6]]
    for p in views:
        p.grad = torch.ones_like(p)
    reference = Reference([z], 2, rule="easgd", alpha=0.5)
    ElasticAveraging(torch.optim.SGD(views, lr=1.0), reference, parameters=[flat]).step()
    assert flat[0].eq(0).all()
    assert flat[1].eq(0.5).all()
    assert calls == ["easgd_step_"]


@settings(max_examples=40)
@given(st.data())
def test_any_options_of_any_groups(data):
    adam = data.draw(st.booleans())
    number = st.sampled_from([0.0, 0.1])

    def group():
        options = {"lr": data.draw(st.sampled_from([0.0, 0.01, 0.1])), "weight_decay": data.draw(number)}
        if adam:
            return options | {"betas": data.draw(st.sampled_from([(0.9, 0.99), (0.0, 0.5)]))}
        momentum = data.draw(st.sampled_from([0.0, 0.5]))
        nesterov = momentum > 0 and data.draw(st.booleans())
        return options | {
            "momentum": momentum,
            "nesterov": nesterov,
            "dampening": 0.0 if nesterov else data.draw(number),
        }

    groups = [group() for _ in range(data.draw(st.integers(1, 3)))]
    where = [data.draw(st.integers(0, len(groups) - 1)) for _ in range(4)]
    cls = data.draw(st.sampled_from([torch.optim.Adam, torch.optim.AdamW])) if adam else torch.optim.SGD
    common = {"maximize": data.draw(st.booleans())}

    def make(params):
        members = [[p for p, g in zip(params, where) if g == n] for n in range(len(groups))]
        return cls([{"params": ps, **g} for ps, g in zip(members, groups) if ps], **common)

    options = {"n": data.draw(st.integers(2, 3)), "arena": data.draw(st.booleans())}
    options |= {
        "rule": data.draw(st.sampled_from(["avgpipe", "easgd"])),
        "staleness": data.draw(st.sampled_from([0, 1])),
    }
    mine, theirs = Run(make, True, **options), Run(make, False, **options)
    for _ in range(3):
        without = data.draw(st.sets(st.integers(0, 3)))
        for run in (mine, theirs):
            run.step(without)
    assert_close(mine.values(), theirs.values(), 1e-9)


# ---- how many calls --------------------------------------------------------------------------------------


@pytest.mark.parametrize("arena", [False, True])
def test_a_step_is_one_call_and_a_round_another(calls, arena):
    run = Run(MAKE["adamw"], True, arena=arena)
    for _ in range(3):
        run.step()
        assert calls == ["elastic_adamw_"] * 2 + ["reference_apply_"] + ["elastic_pull_"] * 2
        calls.clear()
    assert all(r.before is None for r in run.reference._replicas.values())


def test_parameters_that_count_differently_are_separate_calls(calls):
    run = Run(MAKE["adamw"], True, staleness=1)
    run.step(without=(0,))
    calls.clear()
    run.step()
    assert calls.count("elastic_adamw_") == 3
    counts = [int(s["step"]) for s in run.opts[0].state.values()]
    assert sorted(counts) == [1, 2, 2, 2]


# ---- a torch.optim.Optimizer -----------------------------------------------------------------------------


def test_hooks_closures_and_schedulers(calls):
    run, seen = Run(MAKE["adamw"], True), []
    opt = run.opts[0]
    opt.inner.register_step_pre_hook(lambda o, args, kwargs: seen.append((o is opt.inner, len(calls))))
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        schedulers = [torch.optim.lr_scheduler.ExponentialLR(o, 0.5) for o in (opt, opt.inner)]
        run.backward(0)
        assert opt.step(lambda: torch.tensor(3.0)) == 3.0
        for scheduler in schedulers:
            scheduler.step()
    assert seen == [(True, 0)]
    assert calls == ["elastic_adamw_"]


def test_a_post_step_hook_sees_the_step_without_averaging():
    values = []
    for fused in (None, False):
        run = Run(MAKE["adamw"], fused, staleness=1)
        for opt in run.opts:
            opt.inner.register_step_post_hook(clamp)
        for _ in range(3):
            run.step()
        values.append(run.values())
    assert_close(*values, 0.0)


@torch.no_grad()
def clamp(opt, args, kwargs):
    for group in opt.param_groups:
        for p in group["params"]:
            p.clamp_(-0.3, 0.3)


def test_a_patched_step_is_called(calls):
    run = Run(MAKE["sgd"], True)
    run.opts[0].inner.step = lambda: None
    run.step()
    assert calls.count("elastic_step_") == 1
    assert calls.count("elastic_sgd_") == 1


@pytest.mark.parametrize("without_graph", [False, True])
def test_a_backward_pass_that_needs_old_weights_fails(without_graph):
    run = Run(MAKE["sgd"], True, arena=without_graph)
    run.backward(0)
    loss = run.models[0](batch(0, 0).double()).sum()
    run.opts[0].step()
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        loss.backward()


def test_an_update_that_is_not_finite_stays_out():
    for arena in (False, True):
        run = Run(MAKE["sgd"], True, arena=arena, staleness=1)
        z = [p.clone() for p in run.reference.parameters]
        for i, opt in enumerate(run.opts):
            run.backward(i)
            for p in run.models[i].parameters():
                p.grad.fill_(torch.nan if i == 0 else 0.0)
            opt.step()
        assert run.reference.dropped_updates == 1
        assert_close([z], [run.reference.parameters], 0.0)


# ---- what cannot be fused --------------------------------------------------------------------------------

AMSGRAD = lambda p: torch.optim.Adam(p, amsgrad=True)  # noqa: E731


@pytest.mark.parametrize(
    ("make", "options"),
    [
        (torch.optim.RMSprop, {}),
        (AMSGRAD, {}),
        (lambda p: torch.optim.SGD(p, differentiable=True), {}),
        (torch.optim.SGD, {"period": 2}),
        (torch.optim.SGD, {"n": 1}),
        (type("Own", (torch.optim.SGD,), {}), {}),
    ],
)
def test_some_steps_are_never_fused(make, options):
    run = Run(make, True, **options)
    assert not run.opts[0]._fused.is_possible
    if not run.opts[0].defaults.get("differentiable"):
        run.step()


def test_overlapping_parameters_are_not_fused():
    flat = torch.ones(16)
    params = [flat[:4], flat[3:]]
    reference = Reference([flat], 2)
    opt = ElasticAveraging(torch.optim.SGD(params), reference, parameters=[flat])
    assert not opt._fused.is_possible


def test_gradients_of_another_kind_take_the_plain_step(calls):
    embeddings = [nn.Embedding(5, 3, sparse=True) for _ in range(2)]
    reference = Reference(embeddings[0].parameters(), 2)
    opts = [
        ElasticAveraging(torch.optim.SGD(e.parameters(), lr=0.1), reference, i)
        for i, e in enumerate(embeddings)
    ]
    before = embeddings[0].weight.detach().clone()
    embeddings[0](torch.tensor([1])).sum().backward()
    opts[0].step()
    assert calls == ["elastic_step_"]
    torch.testing.assert_close(embeddings[0].weight.detach()[1], before[1] - 0.1)
    p = opts[1].param_groups[0]["params"][0]
    p.grad = torch.ones(3, 5).t()
    opts[1].step()
    assert calls[1:] == ["elastic_step_", "reference_apply_", "elastic_pull_", "elastic_pull_"]


def test_moved_weights_are_found_again():
    ends = []
    for fused in (True, False):
        run = Run(MAKE["adamw"], fused)
        run.step()
        for p in run.models[0].parameters():
            p.data = p.data.clone()
        run.step()
        ends.append(run.values())
    assert_close(*ends)
