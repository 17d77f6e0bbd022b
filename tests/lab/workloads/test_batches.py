from __future__ import annotations

from functools import partial

import pytest
import torch

from avgpipe_lab.workloads.batches import (
    SampleBatches,
    TensorRows,
    by_length,
    continued_batches,
    generator,
    segment_lengths,
    shuffled,
)


def numbers(data, indices, draws):
    return data[indices] + torch.rand(len(indices), generator=draws, dtype=torch.float64), indices


def batches(order, size=4, **options):
    return SampleBatches(order, size, partial(numbers, torch.arange(100.0, dtype=torch.float64)), **options)


def equal(some, others):
    return len(some) == len(others) and all(
        torch.equal(a, c) and torch.equal(b, d) for (a, b), (c, d) in zip(some, others)
    )


def test_an_epoch_has_every_sample_once_and_a_short_last_batch():
    made = list(batches(shuffled(10, 4, seed=1, epoch=0)))
    assert [len(y) for _, y in made] == [4, 4, 2]
    assert sorted(torch.cat([y for _, y in made]).tolist()) == list(range(10))


def test_a_batch_depends_on_seed_epoch_and_number_alone():
    order = shuffled(10, 4, seed=1, epoch=2)
    whole = list(batches(order, seed=1, epoch=2))
    torch.manual_seed(99)  # the caller's draws play no part
    assert equal(whole, list(batches(order, seed=1, epoch=2)))
    late = batches(order, seed=1, epoch=2, start=1)
    assert len(late) == 2
    assert equal(whole[1:], list(late))
    assert not equal(whole, list(batches(order, seed=2, epoch=2)))
    assert not equal(whole, list(batches(order, seed=1, epoch=3)))


@pytest.mark.promise
def test_workers_make_the_same_batches_in_the_same_order():
    order = shuffled(30, 4, seed=1, epoch=0)
    assert equal(list(batches(order, start=2)), list(batches(order, start=2, workers=2)))


def test_orders_differ_from_epoch_to_epoch():
    assert not torch.equal(shuffled(50, 4, 1, 0), shuffled(50, 4, 1, 1))
    assert not torch.equal(shuffled(50, 4, 1, 0), shuffled(50, 4, 2, 0))


def test_by_length_puts_like_with_like():
    lengths = torch.randint(1, 60, (403,), generator=generator(5))
    order = by_length(lengths, 8, seed=1, epoch=0)
    assert sorted(order.tolist()) == list(range(403))
    spread = [int(lengths[b].max() - lengths[b].min()) for b in order.split(8)]
    assert sum(spread) / len(spread) < 6
    means = [float(lengths[b].double().mean()) for b in order.split(8)]
    assert means != sorted(means)
    assert not torch.equal(order, by_length(lengths, 8, seed=1, epoch=1))


def test_no_samples_are_refused():
    with pytest.raises(ValueError, match="no samples"):
        batches(torch.arange(0))


def test_rows_of_nested_tensors_make_a_batch():
    rows = TensorRows((torch.arange(5), (torch.arange(5.0), torch.eye(5))))
    inputs, (targets, more) = rows(torch.tensor([3, 1]), generator(0))
    assert (inputs.tolist(), targets.tolist()) == ([3, 1], [3.0, 1.0])
    assert torch.equal(more, torch.eye(5)[[3, 1]])


# ---- rows of a text that continue ----------------------------------------------------------------------------------


def continued(tokens=1000, batch_size=3, length=7, jitter=False, **options):
    lengths = partial(segment_lengths, base=length, jitter=jitter)
    return continued_batches(torch.arange(tokens), batch_size, lengths, **options)


@pytest.mark.parametrize("pipelines", [1, 2, 3])
@pytest.mark.parametrize("jitter", [False, True])
def test_rows_continue_from_segment_to_segment_of_their_pipeline(pipelines, jitter):
    read = continued(pipelines=pipelines, length=20 if jitter else 7, jitter=jitter)
    lengths = segment_lengths(1000 // (3 * pipelines) - 1, 20 if jitter else 7, jitter)
    previous = {}
    for j, (inputs, targets) in enumerate(read):
        assert inputs.shape == targets.shape == (3, lengths[j // pipelines])
        assert torch.equal(inputs[:, 1:], targets[:, :-1])
        if j >= pipelines:
            assert torch.equal(inputs[:, 0], previous[j % pipelines])
        previous[j % pipelines] = targets[:, -1]
    assert j == len(read) - 1


def test_pipelines_own_contiguous_rows_and_take_turns():
    read = continued(tokens=4 * 11, batch_size=2, length=5, pipelines=2)
    assert [x[:, 0].tolist() for x, _ in read] == [[0, 11], [22, 33], [5, 16], [27, 38]]


@pytest.mark.parametrize("pipelines", [1, 2])
def test_every_token_is_read_once(pipelines):
    read = continued(tokens=600, batch_size=3, pipelines=pipelines)
    row = 600 // (3 * pipelines)
    seen = torch.cat([x.flatten() for x, _ in read]).sort().values
    assert torch.equal(seen, torch.tensor([t for t in range(600) if t % row != row - 1]))


@pytest.mark.parametrize(
    ("total", "base"), [(1, 35), (34, 35), (35, 35), (36, 35), (1000, 35), (13602, 35), (5, 1)]
)
def test_even_lengths_differ_by_at_most_one(total, base):
    lengths = segment_lengths(total, base)
    assert sum(lengths) == total
    assert max(lengths) <= base
    assert max(lengths) - min(lengths) <= 1
    assert len(lengths) == -(-total // base)


def test_jittered_lengths_follow_the_published_distribution():
    lengths = segment_lengths(700_000, 70, jitter=True, seed=1)
    assert sum(lengths) == 700_000
    body = torch.tensor(lengths[:-1], dtype=torch.float64)
    assert body.min() >= 5
    assert body.max() <= 80
    long = body[
        body > 52
    ]  # 3.4 deviations above the middle of the short ones and below that of the long ones
    assert abs(len(long) / len(body) - 0.95) < 0.01
    assert abs(long.mean() - 70) < 1  # rounding down takes a half
    assert abs(long.std() - 5) < 0.5


def test_jittered_lengths_depend_on_seed_and_epoch_alone():
    assert segment_lengths(5000, 70, jitter=True, seed=1, epoch=2) == segment_lengths(
        5000, 70, jitter=True, seed=1, epoch=2
    )
    others = [
        segment_lengths(5000, 70, jitter=True, seed=s, epoch=e)
        for s, e in ((1, 2), (2, 2), (1, 3), (2, 1), (12, 0))
    ]
    assert len({tuple(x) for x in others}) == len(others)


@pytest.mark.parametrize("base", [1, 2, 6])
def test_short_jittered_lengths_stay_positive(base):
    lengths = segment_lengths(300, base, jitter=True)
    assert sum(lengths) == 300
    assert min(lengths) >= 1


def test_too_little_text_is_refused_with_the_way_out():
    message = r"valid has 23 tokens, but 2 pipeline\(s\) x 6 rows need at least 24; use a smaller batch size"
    with pytest.raises(ValueError, match=message):
        continued(tokens=23, batch_size=6, pipelines=2, name="valid")
    assert [x.shape for x, _ in continued(tokens=24, batch_size=6, pipelines=2)] == [(6, 1)] * 2
