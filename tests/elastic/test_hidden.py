from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn

from avgpipe import Pipeline, Plan
from avgpipe.elastic import Arena
from avgpipe.elastic.hidden import refuse_hidden_weights


class Flat(torch.optim.SGD):
    """Steps the memory that it saw when it was made."""

    def __init__(self, params: Any) -> None:
        params = list(params)
        super().__init__(params, lr=0.1)
        self.kept = {"flat": [p.data.view(-1) for p in params]}


class Wrapping(torch.optim.SGD):
    def __init__(self, params: Any) -> None:
        params = list(params)
        super().__init__(params, lr=0.1)
        self.base = Flat(params)


class Slow(torch.optim.SGD):
    """Keeps copies, its parameters, and a state outside of ``state``."""

    def __init__(self, params: Any) -> None:
        params = list(params)
        super().__init__(params, lr=0.1)
        self.slow, self.params, self.steps = [p.detach().clone() for p in params], params, [0]
        self.itself = self


@pytest.mark.parametrize(("kind", "name"), [(Flat, "kept.flat.0"), (Wrapping, "base.kept.flat.0")])
def test_memory_of_the_weights_is_refused(kind: Any, name: str) -> None:
    arena = Arena(nn.Linear(3, 2).parameters())
    with pytest.raises(ValueError, match=f"{kind.__name__} keeps weights by their memory.*{name}"):
        refuse_hidden_weights(kind(arena.parameters), arena)


def test_copies_and_parameters_are_no_concern() -> None:
    arena = Arena(nn.Linear(3, 2).parameters())
    refuse_hidden_weights(Slow(arena.parameters), arena)
    refuse_hidden_weights(torch.optim.AdamW(arena.parameters), arena)


def test_a_pipeline_with_versions_refuses_it_and_one_that_flushes_does_not() -> None:
    def make(schedule: str) -> None:
        Pipeline(
            nn.Sequential(nn.Linear(3, 3), nn.Linear(3, 3)),
            Plan(stages=2, schedule=schedule, micro_batches=2),
            loss_fn=nn.MSELoss(),
            optimizer=Flat,
        ).close()

    make("1f1b")
    with pytest.raises(ValueError, match="or a schedule that flushes"):
        make("pipedream")
