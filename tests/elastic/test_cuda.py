"""Replicas on a CUDA device, with the reference beside them or on the CPU."""

from __future__ import annotations

import math

import pytest
import torch

from avgpipe import ElasticAveraging, Reference
from tests.elastic.cases import set_gradients, weights
from tests.elastic.emulation import AdamW, Emulation

pytestmark = pytest.mark.gpu


def on(device, params):
    return [torch.nn.Parameter(p.detach().to(device)) for p in params]


@pytest.mark.parametrize("home", ["cuda", "cpu"])  # of the reference
@pytest.mark.parametrize("rule", ["avgpipe", "easgd"])
@pytest.mark.parametrize("staleness", [0, 1])
def test_replicas_on_the_device_follow_the_rule(rule, staleness, home):
    n = 3
    xs = [on("cuda", weights()) for _ in range(n)]
    reference = Reference(on(home, weights()), n, rule=rule, staleness=staleness)
    opts = [ElasticAveraging(AdamW.torch(x), reference, i) for i, x in enumerate(xs)]
    emulated = Emulation(n, rule, staleness, inner=AdamW)
    for t in range(5):
        for i in range(n):
            here = on("cpu", xs[i])
            set_gradients(here, i, t)
            for p, q in zip(xs[i], here):
                p.grad = q.grad.to("cuda")
            opts[i].step()
        emulated.step()
        for mine, theirs in [(reference.parameters, emulated.z), *zip(xs, emulated.x)]:
            for p, v in zip(mine, theirs):
                torch.testing.assert_close(
                    p.detach().cpu(), torch.as_tensor(v).double(), rtol=1e-11, atol=1e-11
                )


def test_bad_elements_are_left_out_without_waiting():
    xs = [on("cuda", weights()) for _ in range(2)]
    reference = Reference(on("cuda", weights()), 2, staleness=1)
    opts = [ElasticAveraging(torch.optim.SGD(x, lr=0.1), reference, i) for i, x in enumerate(xs)]
    for x in xs:
        for p in x:
            p.grad = torch.ones_like(p)
    xs[1][0].grad[0, 0] = math.nan
    before = torch.cuda.get_sync_debug_mode()
    torch.cuda.set_sync_debug_mode("error")
    try:
        for opt in opts:
            opt.step()
    finally:
        torch.cuda.set_sync_debug_mode(before)
    assert reference.dropped_updates == 1
    assert all(bool(z.isfinite().all()) for z in reference.parameters)
