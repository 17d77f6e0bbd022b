"""torch.amp.GradScaler around an ElasticAveraging, on the CPU."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from avgpipe import ElasticAveraging, Reference
from tests.elastic.models import crew, loss_of, weights_of


def scaled_step(m, opt, scaler, i, t, bad=False, clip=False):
    opt.zero_grad()
    scaler.scale(loss_of(m, i, t)).backward()
    if clip:
        scaler.unscale_(opt)
        nn.utils.clip_grad_norm_(m.parameters(), 1e-3)
    if bad:
        next(m.parameters()).grad[0, 0] = torch.inf
    scaler.step(opt)
    scaler.update()


@pytest.mark.parametrize("clip", [False, True])
@pytest.mark.parametrize("fused", [False, True])
def test_grad_scaler_gives_what_unscaled_training_gives(fused, clip):
    def make(p):
        return torch.optim.AdamW(p, lr=0.01, fused=fused)

    def run(scaled):
        replicas, reference, opts = crew(make=make)
        scalers = [torch.amp.GradScaler("cpu", init_scale=2.0**10, enabled=scaled) for _ in replicas]
        for t in range(4):
            for i in range(2):
                scaled_step(replicas[i], opts[i], scalers[i], i, t, clip=clip)
        assert not hasattr(opts[0].inner, "found_inf")
        return weights_of(replicas, reference)

    for mine, theirs in zip(run(True), run(False)):  # a power of two: scaling rounds nothing
        for p, q in zip(mine, theirs):
            torch.testing.assert_close(p, q, rtol=1e-6, atol=1e-7)


@pytest.mark.parametrize("staleness", [0, 1])
@pytest.mark.parametrize("fused", [False, True])
def test_a_step_that_the_scaler_skips_takes_part_with_nothing_to_add(fused, staleness):
    replicas, reference, opts = crew(
        make=lambda p: torch.optim.SGD(p, lr=0.1, fused=fused), staleness=staleness
    )
    scalers = [torch.amp.GradScaler("cpu", init_scale=4.0) for _ in replicas]
    for i in range(2):
        scaled_step(replicas[i], opts[i], scalers[i], i, 0)
    z, *xs = weights_of(replicas, reference)
    for i in range(2):
        scaled_step(replicas[i], opts[i], scalers[i], i, 1, bad=i == 1)
    assert [s.get_scale() for s in scalers] == [4.0, 2.0]
    assert reference.round == 2
    assert reference.dropped_updates == 0
    z1, *xs1 = weights_of(replicas, reference)
    for k in range(len(z)):
        pull = (z1[k] - xs[1][k] if staleness == 0 else z[k] - xs[1][k]) / 2
        torch.testing.assert_close(xs1[1][k], xs[1][k] + pull)
    assert any(not torch.equal(a, b) for a, b in zip(z, z1))


def test_sparse_gradients_under_a_scaler():
    m = nn.Embedding(4, 2, sparse=True)
    opt = ElasticAveraging(torch.optim.SparseAdam(m.parameters(), lr=0.1), Reference(m.parameters(), 1))
    scaler = torch.amp.GradScaler("cpu", init_scale=8.0)
    before = m.weight.detach().clone()
    scaler.scale(m(torch.tensor([1, 1])).sum()).backward()
    scaler.step(opt)
    assert torch.equal(m.weight[0], before[0])
    torch.testing.assert_close(m.weight[1].detach(), before[1] - 0.1)


def test_float16_gradients_are_not_unscaled():
    m = nn.Linear(2, 2).half()
    opt = ElasticAveraging(torch.optim.SGD(m.parameters(), lr=0.1), Reference(m.parameters(), 1))
    scaler = torch.amp.GradScaler("cpu", init_scale=8.0)
    scaler.scale(m(torch.ones(1, 2).half()).sum()).backward()
    with pytest.raises(ValueError, match="float16 gradients cannot be unscaled"):
        scaler.step(opt)
