import pytest
import torch

from avgpipe.workloads.batches import LanguageBatches, jittered_lengths, segment_lengths


def batches(tokens=1000, batch_size=3, length=7, **options):
    return LanguageBatches(torch.arange(tokens), batch_size, length, **options)


@pytest.mark.parametrize("pipelines", [1, 2, 3])
@pytest.mark.parametrize("jitter", [False, True])
def test_rows_continue_from_segment_to_segment_of_their_pipeline(pipelines, jitter):
    read = batches(pipelines=pipelines, length=20 if jitter else 7, jitter=jitter)
    previous = {}
    for j, (inputs, targets) in enumerate(read):
        assert inputs.shape == targets.shape == (3, read.lengths[j // pipelines])
        assert torch.equal(inputs[:, 1:], targets[:, :-1])
        if j >= pipelines:
            assert torch.equal(inputs[:, 0], previous[j % pipelines])
        previous[j % pipelines] = targets[:, -1]
    assert j == len(read) - 1


def test_pipelines_own_contiguous_rows_and_take_turns():
    read = list(batches(tokens=4 * 11, batch_size=2, length=5, pipelines=2))
    assert [x[:, 0].tolist() for x, _ in read] == [[0, 11], [22, 33], [5, 16], [27, 38]]


@pytest.mark.parametrize("pipelines", [1, 2])
def test_every_token_is_read_once(pipelines):
    read = batches(tokens=600, batch_size=3, pipelines=pipelines)
    row = 600 // (3 * pipelines)
    seen = torch.cat([x.flatten() for x, _ in read]).sort().values
    assert torch.equal(seen, torch.tensor([t for t in range(600) if t % row != row - 1]))


@pytest.mark.parametrize("start", [0, 1, 4, 7])
def test_resuming_gives_what_was_left(start):
    options = {"pipelines": 2, "length": 20, "jitter": True, "seed": 3, "epoch": 5}
    whole, rest = list(batches(**options)), batches(start=start, **options)
    assert len(rest) == len(whole) - start
    for (x, y), (x_rest, y_rest) in zip(whole[start:], rest, strict=True):
        assert torch.equal(x, x_rest)
        assert torch.equal(y, y_rest)


def test_resuming_at_the_end_gives_nothing():
    assert list(batches(start=len(batches()))) == []


def test_batches_can_be_read_twice():
    read = batches()
    assert all(torch.equal(a[0], b[0]) for a, b in zip(read, read, strict=True))


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
    lengths = jittered_lengths(700_000, 70, seed=1)
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
    assert jittered_lengths(5000, 70, seed=1, epoch=2) == jittered_lengths(5000, 70, seed=1, epoch=2)
    others = [
        jittered_lengths(5000, 70, seed=s, epoch=e) for s, e in ((1, 2), (2, 2), (1, 3), (2, 1), (12, 0))
    ]
    assert len({tuple(x) for x in others}) == len(others)


@pytest.mark.parametrize("base", [1, 2, 6])
def test_short_jittered_lengths_stay_positive(base):
    lengths = jittered_lengths(300, base)
    assert sum(lengths) == 300
    assert min(lengths) >= 1


def test_too_little_text_is_refused_with_the_way_out():
    message = r"valid has 23 tokens, but 2 pipeline\(s\) x 6 rows need at least 24; use a smaller batch size"
    with pytest.raises(ValueError, match=message):
        batches(tokens=23, batch_size=6, pipelines=2, name="valid")
    assert [x.shape for x, _ in batches(tokens=24, batch_size=6, pipelines=2)] == [(6, 1)] * 2


def test_an_empty_text_is_refused():
    with pytest.raises(ValueError, match="text has 0 tokens"):
        batches(tokens=0)


@pytest.mark.parametrize("what", ["batch_size", "length", "pipelines"])
def test_counts_must_be_positive(what):
    with pytest.raises(ValueError, match=f"{what} must be at least 1, got 0"):
        batches(**{what: 0})


@pytest.mark.parametrize("start", [-1, 1000])
def test_start_must_lie_in_the_epoch(start):
    with pytest.raises(ValueError, match=rf"start must be a batch of the epoch, 0 to \d+, got {start}"):
        batches(start=start)
