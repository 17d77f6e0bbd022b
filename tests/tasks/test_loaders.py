"""Batches of a user's loader: the same on every rank and in a resumed run, whatever is drawn meanwhile."""

from __future__ import annotations

import random
from collections.abc import Iterator
from itertools import chain
from typing import Any

import numpy as np
import pytest
import torch
from torch.utils.data import DataLoader, IterableDataset, TensorDataset

from avgpipe.tasks.loaders import LoaderBatches, first_batch, training_batches

Shuffled = DataLoader(TensorDataset(torch.arange(40), torch.arange(40)), batch_size=8, shuffle=True)


class Stream(IterableDataset[Any]):
    def __iter__(self) -> Iterator[Any]:
        yield from zip(torch.arange(40), torch.arange(40))


def drawn(epoch: int = 0, start: int = 0, seed: int = 0, loader: Any = Shuffled) -> list[list[int]]:
    return [inputs.tolist() for inputs, _ in training_batches(loader, seed, None, epoch, start)]


def test_an_order_follows_from_seed_and_epoch():
    first = drawn()
    assert sorted(chain(*first)) == list(range(40))
    assert first == drawn()
    assert first != drawn(epoch=1)
    assert first != drawn(seed=1)


def test_what_is_drawn_meanwhile_changes_no_batch():
    wanted, found = drawn(), []
    for inputs, _ in training_batches(Shuffled, 0, None, 0):
        found.append(inputs.tolist())
        torch.rand(3), random.random(), np.random.rand()
    assert found == wanted


def test_an_epoch_can_begin_in_its_middle():
    assert drawn(start=3) == drawn()[3:]
    assert len(training_batches(Shuffled, 0, None, 0, 3)) == 2


def test_every_library_draws_by_the_seed_and_outside_nothing_changes():
    def noise(epoch: int) -> Iterator[Any]:
        for _ in range(3):
            yield torch.tensor([random.random(), np.random.rand(), float(torch.rand(()))]), torch.zeros(3)

    torch.manual_seed(5)
    random.seed(5)
    np.random.seed(5)
    untouched = float(torch.rand(())), random.random(), np.random.rand()
    torch.manual_seed(5)
    random.seed(5)
    np.random.seed(5)
    once, again = drawn(loader=noise), drawn(loader=noise)
    assert (float(torch.rand(())), random.random(), np.random.rand()) == untouched
    assert once == again != drawn(loader=noise, epoch=1)
    assert len({tuple(row) for row in once}) == 3


def test_a_function_makes_the_batches_of_an_epoch_and_may_draw_its_order():
    def loader(epoch: int) -> list[Any]:
        return [(torch.tensor([epoch, n]), None) for n in random.sample(range(5), 5)]

    orders = [drawn(epoch, loader=loader) for epoch in (0, 1, 1)]
    assert {pair[0] for pair in orders[1]} == {1}
    assert orders[1] == orders[2]
    assert [n for _, n in orders[0]] != [n for _, n in orders[1]]


def test_the_first_batch_begins_nothing():
    torch.manual_seed(5)
    before = torch.get_rng_state()
    inputs, targets = first_batch(Shuffled, 0)
    assert inputs.tolist() == targets.tolist() == drawn()[0]
    assert torch.equal(torch.get_rng_state(), before)
    with pytest.raises(ValueError, match="the loader has no batches"):
        first_batch([], 0)
    with pytest.raises(TypeError, match=r"must yield pairs \(inputs, targets\), .*, not Tensor"):
        first_batch([torch.zeros(3)], 0)


def test_validations_all_see_the_same_batches():
    twice = [[x.tolist() for x, _ in LoaderBatches(Shuffled, 5)] for _ in range(2)]
    assert twice[0] == twice[1]


def test_a_loader_without_a_length_has_as_many_batches_as_are_given():
    stream = DataLoader(Stream(), batch_size=8)
    told = training_batches(stream, 0, 7, 0, 2)
    assert (len(told), told.are_counted) == (5, False)
    assert [x.tolist() for x, _ in told] == [list(range(n, n + 8)) for n in (16, 24, 32)]
    with pytest.raises(TypeError, match=r"the loader has no length: .* \(max_batches\)"):
        len(training_batches(stream, 0, None, 0))
    assert len(training_batches(Shuffled, 0, 7, 0)) == 5
