from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn

from avgpipe import ElasticAveraging, Pipeline, Plan, Reference
from avgpipe.elastic.flat import Arena
from avgpipe.elastic.versions import Versions, refuse_hidden_weights
from avgpipe.schedule.row import Version


def make() -> tuple[nn.Linear, Arena, Versions]:
    layer = nn.Linear(2, 1, bias=False)
    arena = Arena(layer.parameters())
    with torch.no_grad():
        layer.weight.zero_()
    return layer, arena, Versions(arena)


def update(layer: nn.Linear, versions: Versions, needed_from: int) -> None:
    with versions.updating([Version(needed_from)]), torch.no_grad():
        layer.weight.add_(1)


def test_a_version_stays_what_it_was() -> None:
    layer, arena, versions = make()
    for v in range(4):
        update(layer, versions, needed_from=0)
        assert versions.newest == v + 1
        assert float(arena.weights[0][0]) == v + 1
    for v in (2, 0, 4, 1, 3):
        versions.show(Version(v))
        assert layer.weight.tolist() == [[v, v]]
    assert versions.bytes == 4 * arena.weights[0].nbytes


def test_what_is_no_longer_needed_is_used_again_and_the_newest_alone_takes_no_copy() -> None:
    layer, arena, versions = make()
    for _ in range(3):
        update(layer, versions, needed_from=versions.newest + 1)
    assert versions.bytes == 0
    for _ in range(10):
        update(layer, versions, needed_from=versions.newest)
    assert versions.bytes == arena.weights[0].nbytes
    with pytest.raises(KeyError):
        versions.show(Version(0))


def test_the_newest_is_shown_after_an_update() -> None:
    layer, _, versions = make()
    update(layer, versions, needed_from=0)
    versions.show(Version(0))
    update(layer, versions, needed_from=0)
    assert layer.weight.tolist() == [[2, 2]]


@pytest.mark.parametrize("kind", [nn.Linear, nn.LSTM, nn.Conv1d, nn.LayerNorm, nn.Embedding])
def test_a_backward_uses_the_weights_of_its_forward(kind: type[nn.Module]) -> None:
    torch.manual_seed(0)
    layer = {
        nn.Linear: lambda: nn.Linear(4, 4),
        nn.LSTM: lambda: nn.LSTM(4, 4),
        nn.Conv1d: lambda: nn.Conv1d(4, 4, 1),
        nn.LayerNorm: lambda: nn.LayerNorm(4),
        nn.Embedding: lambda: nn.Embedding(4, 4),
    }[kind]().double()
    x = torch.arange(4) if kind is nn.Embedding else torch.randn(4, 4, dtype=torch.float64)

    def loss() -> torch.Tensor:
        output = layer(x)
        output = output[0] if isinstance(output, tuple) else output
        return (output.tanh() * output.new_tensor([1.0, 2, 3, 4])).sum()

    arena = Arena(layer.parameters())
    versions = Versions(arena)
    expected = torch.autograd.grad(loss(), arena.parameters)
    optimizer = torch.optim.AdamW(arena.parameters, lr=0.1)
    first = loss()
    for g, p in zip(expected, arena.parameters):
        p.grad = g.clone()
    with versions.updating([Version(0)]):
        optimizer.step()
    versions.show(Version(0))
    assert all(torch.equal(a, b) for a, b in zip(torch.autograd.grad(first, arena.parameters), expected))


def test_a_run_goes_on_from_saved_versions() -> None:
    layer, arena, versions = make()
    for _ in range(3):
        update(layer, versions, needed_from=versions.newest)
    older = {behind: [flat.clone() for flat in flats] for behind, flats in versions.older().items()}
    assert list(older) == [1]
    other, other_arena, other_versions = make()
    other_arena.weights[0].copy_(arena.weights[0])
    other_versions.restore(older)
    assert other_versions.newest == 1
    other_versions.show(Version(0))
    assert other.weight.tolist() == [[2, 2]]
    update(other, other_versions, needed_from=1)
    assert other.weight.tolist() == [[4, 4]]


# ---- optimizers that hold weights by their memory ------------------------------------------------------------------


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


def test_a_replicas_weights_stay_where_such_an_optimizer_holds_them() -> None:
    layer = nn.Linear(2, 1)
    optimizer, start = Flat(layer.parameters()), nn.Linear(2, 1)
    ElasticAveraging(optimizer, Reference(start.parameters(), 2))
    assert optimizer.kept["flat"][0].data_ptr() == layer.weight.data_ptr()
