"""State in the optimizer's own format, whoever steps; what GradScaler skips is not counted."""

from __future__ import annotations

import copy
import io

import pytest
import torch

from tests.elastic.fused_cases import MAKE, Run, assert_close
from tests.elastic.models import loss_of, model

# ---- state -----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("arena", [False, True], ids=["separate", "arena"])
@pytest.mark.parametrize("make", MAKE.values(), ids=MAKE)
def test_switching_in_mid_run_changes_nothing(make, arena):
    always = Run(make, False, arena=arena, staleness=1)
    run, fused = Run(make, True, arena=arena, staleness=1), True
    for t in range(6):
        if t in (2, 4):
            fused = not fused
            file = io.BytesIO()
            torch.save([run.reference.state_dict(), *(o.state_dict() for o in run.opts)], file)
            file.seek(0)
            state, *states = torch.load(file, weights_only=True)
            values, run = run.values(), Run(make, fused, arena=arena, staleness=1)
            run.reference.load_state_dict(state)
            for i, (opt, saved) in enumerate(zip(run.opts, states)):
                opt.load_state_dict(saved)
                for mine, value in zip(run.tensors(i), values[1 + i]):
                    mine.data.copy_(value)
            run.t = t
        run.step()
        always.step()
        assert_close(run.values(), always.values())


def test_loaded_state_is_used_by_the_same_optimizer():
    """Also when nothing but the state tensors has changed."""
    for arena in (False, True):
        runs = [Run(MAKE["adamw"], fused, arena=arena, staleness=1) for fused in (True, False)]
        for run in runs:
            for _ in range(2):
                run.step()
            old = copy.deepcopy(run.opts[0].state_dict())
            run.step()
            old["state"] = {i: {**s, "step": s["step"] + 1} for i, s in old["state"].items()}
            run.opts[0].load_state_dict(old)
            run.step()
        assert_close(runs[0].values(), runs[1].values())


@pytest.mark.parametrize("name", ["momentum", "adamw"])
def test_the_state_goes_to_a_plain_optimizer_and_back(name):
    run = Run(MAKE[name], True, arena=True)
    run.step()
    plain = MAKE[name](list(model().double().parameters()))
    plain.load_state_dict(copy.deepcopy(run.opts[0].inner.state_dict()))
    run.opts[1].load_state_dict(plain.state_dict())
    run.step()
    for i, saved in plain.state_dict()["state"].items():
        for key, value in saved.items():
            assert not torch.equal(value, run.opts[1].state_dict()["state"][i][key])  # it has its own memory


def test_counters_on_an_accelerator_are_read_once(monkeypatch):
    """Taken here with counters on the CPU, as if reading them meant to wait."""
    ends, read, own = [], [], torch.Tensor.__float__
    for fused in (True, False):
        run = Run(MAKE["adam-fused"], fused, staleness=1)
        if fused:
            monkeypatch.setattr(torch.Tensor, "__float__", lambda t: read.append(own(t)) or read[-1])
        for t in range(6):
            run.step(without=(1, 2) if t in (1, 3) else ())
        assert read == []
        run.opts[0].load_state_dict(copy.deepcopy(run.opts[0].state_dict()))
        for _ in range(3):
            run.step()
        assert sorted(read) == ([4, 4, 6, 6] if fused else [])
        read.clear()
        monkeypatch.undo()
        ends.append(run.values())
    assert_close(*ends)


@pytest.mark.parametrize("staleness", [0, 1])
@pytest.mark.parametrize("arena", [False, True])
@pytest.mark.parametrize("name", ["momentum", "adamw", "adam-fused"])
def test_grad_scaler(name, arena, staleness):
    ends = []
    for fused in (True, False):
        run = Run(MAKE[name], fused, arena=arena, staleness=staleness, dtype=torch.float32)
        scaler = torch.amp.GradScaler("cpu", init_scale=4.0)
        for t in range(4):
            for i, opt in enumerate(run.opts):
                run.zero_grad(i)
                scaler.scale(loss_of(run.models[i], i, t)).backward()
                if t == 0 or (t == 2 and i == 0):
                    next(run.models[i].parameters()).grad[0, 0] = torch.inf
                scaler.step(opt)
                scaler.update()
        assert run.reference.round == 4
        assert run.reference.dropped_updates == 0
        ends.append((run.values(), [o.state_dict()["state"] for o in run.opts]))
    assert_close(ends[0][0], ends[1][0], 1e-6)
    for mine, theirs in zip(ends[0][1], ends[1][1]):
        for i in mine:
            assert mine[i].get("step") == theirs[i].get("step")
