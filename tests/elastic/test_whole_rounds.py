"""Rounds in one pass: steps that wait for those of the others end in the same bits as steps in turn."""

from __future__ import annotations

import copy

import pytest
import torch

from avgpipe import ElasticAveraging
from tests.elastic.fused_cases import MAKE, Run, assert_same_state


class Together(Run):
    """As Run, but every step may wait for the round's others."""

    done = ()

    def step(self, without=(), order=None):
        self.done = []
        for i in order or range(len(self.opts)):
            self.step_one(i, without if i == 0 else ())
        self.t += 1

    def step_one(self, i, without=()):
        self.backward(i, without)
        self.opts[i].step_in_round(lambda: self.done.append(i))


def assert_equal(mine, theirs):
    for ps, qs in zip(mine.values(), theirs.values(), strict=True):
        assert all(torch.equal(p, q) for p, q in zip(ps, qs, strict=True))
    for a, b in zip(mine.opts, theirs.opts):
        assert_same_state(a.state_dict()["state"], b.state_dict()["state"])
    assert mine.reference.round == theirs.reference.round


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64], ids=str)
@pytest.mark.parametrize("arena", [False, True], ids=["separate", "arena"])
@pytest.mark.parametrize("make", MAKE.values(), ids=MAKE)
def test_a_round_in_one_pass_has_the_bits_of_steps_in_turn(make, arena, dtype):
    for n in (2, 3):
        mine, theirs = (kind(make, True, n, arena, dtype, alpha=0.3) for kind in (Together, Run))
        for t in range(4):
            mine.step(order=range(n) if t % 2 else reversed(range(n)))
            theirs.step()
            assert sorted(mine.done) == list(range(n))
            assert_equal(mine, theirs)


@pytest.mark.parametrize("arena", [False, True], ids=["separate", "arena"])
def test_a_round_is_one_call(calls, arena):
    run = Together(MAKE["adamw"], True, 3, arena)
    for _ in range(3):
        run.step()
    assert calls == ["elastic_round_"] * 3
    assert all(r.before is None for r in run.reference._replicas.values())


def test_until_the_round_is_complete_nothing_changes_and_nothing_settles(calls):
    run = Together(MAKE["momentum"], True, 2)
    before = [p.detach().clone() for p in run.models[0].parameters()]
    run.done = []
    run.step_one(0)
    assert (calls, run.done) == ([], [])
    assert all(torch.equal(p, q) for p, q in zip(run.models[0].parameters(), before))
    assert not run.opts[0].ready
    assert not run.opts[0].settled
    run.step_one(1)
    assert (calls, run.done) == (["elastic_round_"], [0, 1])
    assert run.opts[0].settled


READERS = {
    "complete": lambda run: run.opts[0].complete(),
    "state": lambda run: run.opts[0].state,
    "state_dict": lambda run: run.opts[0].state_dict(),
    "load_state_dict": lambda run: run.opts[0].load_state_dict(run.opts[0].state_dict()),
    "zero_grad": lambda run: run.opts[0].zero_grad(set_to_none=False),
    "reference": lambda run: run.reference.state_dict(),
    "reference loaded": lambda run: run.reference.load_state_dict(copy.deepcopy(run.reference.state_dict())),
}


@pytest.mark.parametrize("look", READERS.values(), ids=READERS)
def test_a_look_finds_the_step_done(calls, look):
    mine, theirs = (kind(MAKE["adamw"], True, 2, arena=True) for kind in (Together, Run))
    for _ in range(2):
        mine.step()
        theirs.step()
        mine.done = []
        calls.clear()
        mine.step_one(0)
        look(mine)
        assert (calls, mine.done) == (["elastic_adamw_"], [0])
        theirs.backward(0)
        theirs.opts[0].step()
        for p, q in zip(mine.tensors(0), theirs.tensors(0)):
            assert torch.equal(p, q)
        mine.step_one(1)
        theirs.backward(1)
        theirs.opts[1].step()
        assert mine.done == [0, 1]
        assert_equal(mine, theirs)


def test_settings_are_those_of_the_step():
    mine, theirs = (kind(MAKE["adam"], True, 2) for kind in (Together, Run))
    for run in (mine, theirs):
        run.done = []
        for i, opt in enumerate(run.opts):
            run.backward(i)
            opt.step_in_round(lambda: None) if run is mine else opt.step()
            for group in opt.param_groups:
                group["lr"] = 7.0
    assert_equal(mine, theirs)


ADAMW = lambda p: torch.optim.AdamW(p, lr=0.01)  # noqa: E731
UNLIKE = {
    "learning rate": lambda p: torch.optim.AdamW(p, lr=0.02),
    "class": lambda p: torch.optim.SGD(p, lr=0.01),
    "decay": lambda p: torch.optim.Adam(p, lr=0.01, weight_decay=1e-2),
    "groups": lambda p: torch.optim.AdamW([{"params": p[:1]}, {"params": p[1:]}], lr=0.01),
    "not fused": lambda p: torch.optim.RMSprop(p, lr=0.01),
    "hooks": lambda p: hooked(p),
}


def hooked(params):
    opt = ADAMW(params)
    opt.register_step_post_hook(lambda *_: None)
    return opt


@pytest.mark.parametrize("arena", [False, True], ids=["separate", "arena"])
@pytest.mark.parametrize("first", UNLIKE.values(), ids=UNLIKE)
def test_replicas_that_step_unlike_each_other_step_in_turn(calls, first, arena):
    runs = []
    for kind in (Together, Run):
        makes = iter([first, ADAMW])
        runs.append(kind(lambda p, makes=makes: next(makes)(p), True, 2, arena))
        for _ in range(3):
            runs[-1].step()
    assert sorted(runs[0].done) == [0, 1]
    assert "elastic_round_" not in calls
    assert_equal(*runs)


def test_another_gradient_coverage_or_step_count_steps_in_turn(calls):
    mine, theirs = (kind(MAKE["adamw"], True, 2, arena=True) for kind in (Together, Run))
    for without in ((), (1,), (), (0, 1, 2, 3)):  # of replica 0
        for run in (mine, theirs):
            run.step(without)
        assert_equal(mine, theirs)
    assert calls.count("elastic_round_") == 1  # the third round counts steps otherwise


def test_parameters_that_no_replica_steps_are_pulled(calls):
    mine, theirs = (kind(MAKE["adamw"], True, 2, arena=True) for kind in (Together, Run))
    for run in (mine, theirs):
        run.done = []
        run.step()
        calls.clear()
        for i, opt in enumerate(run.opts):
            run.backward(i, without=(2, 3))
            opt.step_in_round(lambda: None) if run is mine else opt.step()
        if run is mine:
            assert calls == ["elastic_round_", "elastic_pull_", "elastic_pull_"]
    assert_equal(mine, theirs)


@pytest.mark.parametrize(
    "options",
    [
        {"staleness": 1},
        {"staleness": "asynchronous"},
        {"rule": "easgd"},
        {"period": 2},
        {"alpha": 0.0},
        {"outer": lambda p: torch.optim.SGD(p, lr=0.7)},
        {"dtype": torch.bfloat16},
        {"fused": False},
    ],
    ids=",".join,  # the same names in every process: a function has its address in its text
)
def test_other_rules_do_not_wait(calls, options):
    options = {"fused": None, **options}
    mine, theirs = (kind(MAKE["adamw"], n=2, **options) for kind in (Together, Run))
    for run in (mine, theirs):
        for _ in range(2):
            run.step()
    assert sorted(mine.done) == [0, 1]
    assert "elastic_round_" not in calls
    assert_equal(mine, theirs)


def test_a_hook_on_the_averaging_optimizer_sees_the_step():
    run, seen = Together(MAKE["sgd"], True), []
    before = [p.detach().clone() for p in run.models[0].parameters()]
    run.opts[0].register_step_post_hook(
        lambda *_: seen.extend(
            torch.equal(p, q) for p, q in zip(run.models[0].parameters(), before, strict=True)
        )
    )
    run.done = []
    run.step_one(0)
    assert seen
    assert not any(seen)
    assert run.done == [0]


def test_a_grad_scaler_is_not_waited_for(calls):
    run = Together(MAKE["sgd"], True)
    run.done = []
    run.backward(0)
    run.opts[0].grad_scale, run.opts[0].found_inf = torch.tensor(2.0), torch.tensor(0.0)
    run.opts[0].step_in_round(lambda: None)
    assert calls == ["elastic_sgd_"]


@pytest.mark.parametrize("bad", [(0,), (0, 2)])
def test_what_is_not_finite_stays_out_of_z_and_is_counted(bad):
    run = Together(MAKE["sgd"], True, 3, arena=True)
    run.done = []
    z = [p.clone() for p in run.reference.parameters]
    for i, opt in enumerate(run.opts):
        run.backward(i)
        for p in run.models[i].parameters():
            p.grad.fill_(0.0)
        if i in bad:
            next(run.models[i].parameters()).grad.fill_(torch.nan)
        opt.step_in_round(lambda: None)
    assert run.reference.dropped_updates == len(bad)
    assert all(torch.equal(p, q) for p, q in zip(run.reference.parameters, z))
    for i, ts in enumerate(map(run.tensors, range(3))):
        assert all(bool(t.isfinite().all()) for t in ts) is (i not in bad)


def test_weights_put_in_place_between_rounds_are_found():
    mine, theirs = (kind(MAKE["adamw"], True, 2) for kind in (Together, Run))
    for run in (mine, theirs):
        run.step()
        for p in run.models[1].parameters():
            p.data = p.data.clone()
        run.step()
        run.reference.release(1)
        run.opts[1] = ElasticAveraging(ADAMW(run.models[1].parameters()), run.reference, 1)
        run.step()
    assert_equal(mine, theirs)
