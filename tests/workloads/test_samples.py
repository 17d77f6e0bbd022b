from __future__ import annotations

from functools import partial

import pytest
import torch

from avgpipe.workloads.samples import SampleBatches, by_length, generator, in_order, shuffled


def numbers(data, indices, draws):
    return data[indices] + torch.rand(len(indices), generator=draws, dtype=torch.float64), indices


def batches(order, size=4, **options):
    return SampleBatches(order, size, partial(numbers, torch.arange(100.0, dtype=torch.float64)), **options)


def equal(some, others):
    return len(some) == len(others) and all(
        torch.equal(a, c) and torch.equal(b, d) for (a, b), (c, d) in zip(some, others)
    )


def test_an_epoch_has_every_sample_once_and_a_short_last_batch():
    made = list(batches(shuffled(10, seed=1, epoch=0)))
    assert [len(y) for _, y in made] == [4, 4, 2]
    assert sorted(torch.cat([y for _, y in made]).tolist()) == list(range(10))


def test_a_batch_depends_on_seed_epoch_and_number_alone():
    order = shuffled(10, seed=1, epoch=2)
    whole = list(batches(order, seed=1, epoch=2))
    torch.manual_seed(99)  # the caller's draws play no part
    assert equal(whole, list(batches(order, seed=1, epoch=2)))
    late = batches(order, seed=1, epoch=2, start=1)
    assert len(late) == 2
    assert equal(whole[1:], list(late))
    assert not equal(whole, list(batches(order, seed=2, epoch=2)))
    assert not equal(whole, list(batches(order, seed=1, epoch=3)))


def test_workers_make_the_same_batches_in_the_same_order():
    order = shuffled(30, seed=1, epoch=0)
    assert equal(list(batches(order, start=2)), list(batches(order, start=2, workers=2)))


def test_orders_differ_from_epoch_to_epoch():
    assert not torch.equal(shuffled(50, 1, 0), shuffled(50, 1, 1))
    assert not torch.equal(shuffled(50, 1, 0), shuffled(50, 2, 0))
    assert torch.equal(in_order(5), torch.arange(5))


def test_by_length_puts_like_with_like():
    lengths = torch.randint(1, 60, (403,), generator=generator(5))
    order = by_length(lengths, 8, seed=1, epoch=0)
    assert sorted(order.tolist()) == list(range(403))
    spread = [int(lengths[b].max() - lengths[b].min()) for b in order.split(8)]
    assert sum(spread) / len(spread) < 6
    means = [float(lengths[b].double().mean()) for b in order.split(8)]
    assert means != sorted(means)
    assert not torch.equal(order, by_length(lengths, 8, seed=1, epoch=1))


def test_what_cannot_be_is_refused():
    with pytest.raises(ValueError, match="no samples"):
        batches(in_order(0))
    with pytest.raises(ValueError, match="start must be a batch of the epoch, 0 to 3, got 4"):
        batches(in_order(10), start=4)
    with pytest.raises(ValueError, match="batch_size must be at least 1, got 0"):
        batches(in_order(10), size=0)
    with pytest.raises(IndexError, match="batch 3 of 3"):
        batches(in_order(10))[3]
