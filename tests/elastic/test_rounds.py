from __future__ import annotations

import threading

import pytest
import torch

from avgpipe import ElasticAveraging
from tests.elastic.cases import Crew, assert_bitwise, weights


def test_staleness_0_settles_when_the_last_replica_has_stepped():
    crew = Crew(3)
    crew.step_one(2)
    crew.step_one(0)
    assert [(o.ready, o.settled) for o in crew.opts] == [(False, False), (True, True), (False, False)]
    assert crew.reference.round == 0
    before = [p.detach().clone() for p in crew.x[0]]
    crew.step_one(1)
    assert all(o.ready and o.settled for o in crew.opts)
    assert crew.reference.round == 1
    assert not torch.equal(before[0], crew.x[0][0])  # the last step pulled the others


@pytest.mark.parametrize("rule", ["avgpipe", "easgd"])
def test_staleness_1_is_always_settled(rule):
    crew = Crew(2, staleness=1, rule=rule)
    crew.step_one(0)
    assert crew.opts[0].settled
    assert not crew.opts[0].ready
    crew.step_one(1)
    assert crew.opts[0].ready
    assert crew.reference.round == 1


@pytest.mark.parametrize("staleness", [0, 1])
def test_a_step_that_comes_too_early_is_refused_and_changes_nothing(staleness):
    crew = Crew(4, staleness=staleness)
    crew.step()
    crew.step_one(2)
    crew.step_one(0)
    before = crew.state()
    message = (
        "replica 2 would finish round 2 before round 1 is complete: it still needs a step of replica 1, 3"
    )
    with pytest.raises(RuntimeError, match=message):
        crew.step_one(2)
    assert_bitwise(before, crew.state())
    crew.step_one(1)
    crew.step_one(3)
    assert crew.reference.round == 2


def test_staleness_0_refuses_the_next_period_before_its_pull():
    crew = Crew(2, period=2)
    crew.step_one(0)
    crew.step_one(0)
    with pytest.raises(RuntimeError, match="replica 0 would start round 1 before round 0 is complete"):
        crew.step_one(0)


def test_asynchronous_replicas_never_wait():
    crew = Crew(2, staleness="asynchronous")
    for _ in range(5):
        crew.step_one(0)
    assert crew.opts[0].ready
    assert crew.opts[0].settled
    assert crew.reference.round == 2


def test_asynchronous_replicas_in_threads_lose_no_update():
    """With alpha 0 updates are constant, so z must have moved by the mean of all of them."""
    crew = Crew(4, staleness="asynchronous", alpha=0.0, inner=type("I", (), {"torch": staticmethod(Ones)}))

    def run(i):
        for _ in range(50):
            crew.opts[i].step()

    threads = [threading.Thread(target=run, args=(i,)) for i in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    for z, x0 in zip(crew.reference.parameters, weights()):
        torch.testing.assert_close(z, x0.detach() + 50.0)


class Ones(torch.optim.Optimizer):
    """Adds one to every weight."""

    def __init__(self, params):
        super().__init__(params, {})

    @torch.no_grad()
    def step(self, closure=None):
        for group in self.param_groups:
            for p in group["params"]:
                p += 1


def test_release_makes_room_for_another_optimizer():
    crew = Crew(2)
    crew.step()
    crew.step_one(0)
    with pytest.raises(RuntimeError, match="replica 0 is in the middle of round 1"):
        crew.reference.release(0)
    crew.step_one(1)
    crew.reference.release(0)
    with pytest.raises(RuntimeError, match="released"):
        crew.opts[0].step()
    crew.opts[0] = ElasticAveraging(torch.optim.Adam(crew.x[0]), crew.reference, 0)
    crew.step()
    assert crew.reference.round == 3
    crew.reference.release(1)
    with pytest.raises(ValueError, match="replica 1 has no optimizer"):
        crew.reference.release(1)
