"""Replicas on the ranks of a gloo group against the same replicas in one process."""

from __future__ import annotations

import itertools

import pytest
import torch
import torch.distributed as dist
from torch import nn

from avgpipe import ElasticAveraging, Reference
from tests.elastic.cases import Crew, set_gradients, weights
from tests.elastic.emulation import AdamW, Momentum, Nesterov
from tests.runner import run

pytestmark = pytest.mark.ranks

STEPS = 7
CASES = [
    {"rule": rule, "staleness": staleness, "period": period, "outer": outer}
    for rule, staleness, period, outer in itertools.product(
        ("avgpipe", "easgd"), (0, 1), (1, 3), (None, Nesterov.torch)
    )
]


def join():
    if not dist.is_initialized():
        dist.init_process_group("gloo")
    return dist.group.WORLD, dist.get_rank(), dist.get_world_size()


def run_case(case):
    """z and x of this rank after every step."""
    group, rank, size = join()
    x = weights()
    reference = Reference(weights(), size, group=group, **case)
    inner = AdamW if case["period"] == 3 else Momentum
    opt = ElasticAveraging(inner.torch(x), reference)
    history = []
    for t in range(STEPS):
        set_gradients(x, rank, t)
        opt.step()
        if t == 3:  # a look at z in the middle waits for what is under way, and changes nothing
            reference.state_dict()
        history.append([p.detach().clone() for p in x])
    with reference.applied_to(x):
        z = [p.detach().clone() for p in x]
    return {"x": history, "z": z, "round": reference.round, "settled": opt.settled and opt.ready}


def run_cases():
    return [run_case(case) for case in CASES]


@pytest.mark.slow
@pytest.mark.parametrize("n", [2, 3])
def test_equals_replicas_in_one_process(n):
    by_rank = run(n, run_cases)
    for number, case in enumerate(CASES):
        crew = Crew(n, AdamW if case["period"] == 3 else Momentum, **case)
        results = [rank[number] for rank in by_rank]
        for t in range(STEPS):
            crew.step()
            for i in range(n):
                close(results[i]["x"][t], crew.x[i])
        for result in results:
            close(result["z"], crew.reference.parameters)
            assert all(torch.equal(z, z0) for z, z0 in zip(result["z"], results[0]["z"]))
            assert result["round"] == crew.reference.round
            assert result["settled"]


def close(mine, theirs):
    for p, q in zip(mine, theirs, strict=True):
        torch.testing.assert_close(p, q.detach(), rtol=1e-11, atol=1e-11)  # sums in another order


def run_other_things():
    """What needs no comparison step by step; one launch for all."""
    group, rank, size = join()
    out = {}
    x = [nn.Parameter(torch.full((3,), float(rank), dtype=torch.bfloat16))]
    out["first rank's"] = float(Reference(x, size, group=group).parameters[0][0])
    for name, make in {
        "async": lambda: Reference(x, size, group=group, staleness="asynchronous"),
        "size": lambda: Reference(x, size + 1, group=group),
        "differs": lambda: Reference(x, size, group=group, period=rank + 1),
        "replica": lambda: ElasticAveraging(sgd(x), Reference(x, size, group=group), 1 - rank),
    }.items():
        with pytest.raises(ValueError, match="group") as error:
            make()
        out[name] = str(error.value)
    out["nan"] = train_with_nan(group, rank, size)
    out["resumed"] = resume(group, rank, size)
    return out


def sgd(x):
    return torch.optim.SGD(x, lr=1.0)


def train_with_nan(group, rank, size):
    """Rank 1's gradient is not finite: its update counts as none."""
    x = [nn.Parameter(torch.zeros(3))]
    reference = Reference(x, size, group=group)
    opt = ElasticAveraging(sgd(x), reference)
    x[0].grad = torch.full((3,), torch.nan if rank == 1 else -1.0)
    opt.step()
    return reference.parameters[0].tolist(), reference.dropped_updates


def resume(group, rank, size):
    """Staleness 1, saved while an all-reduce is under way and in the middle of a period."""

    def make():
        x = weights()
        reference = Reference(weights(), size, group=group, staleness=1, period=2)
        return x, reference, ElasticAveraging(Momentum.torch(x), reference)

    def train(x, opt, steps):
        for t in steps:
            set_gradients(x, rank, t)
            opt.step()

    x, reference, opt = make()
    train(x, opt, range(5))
    state = torch.utils._pytree.tree_map(
        lambda v: v.detach().clone() if isinstance(v, torch.Tensor) else v,
        (x, reference.state_dict(), opt.state_dict()),
    )
    train(x, opt, range(5, 9))
    x2, reference2, opt2 = make()
    for p, v in zip(x2, state[0]):
        p.data.copy_(v)
    reference2.load_state_dict(state[1])
    opt2.load_state_dict(state[2])
    train(x2, opt2, range(5, 9))
    first, second = reference.state_dict(), reference2.state_dict()
    return first["round"] == second["round"] == 4 and all(
        torch.equal(p, q) for p, q in zip([*x, *first["parameters"]], [*x2, *second["parameters"]])
    )


@pytest.mark.ranks
def test_what_else_a_group_promises():
    for rank, out in enumerate(run(2, run_other_things)):
        assert out["first rank's"] == 0.0
        assert "use staleness=1" in out["async"]
        assert "replicas must be the size of the group, 2 (one per rank), not 3" in out["size"]
        assert "rank 1 of the group built its Reference with" in out["differs"]
        assert f"replica must be this process's rank in the group, {rank}, not {1 - rank}" in out["replica"]
        assert out["nan"] == ([0.5, 0.5, 0.5], int(rank == 1))
        assert out["resumed"] is True
