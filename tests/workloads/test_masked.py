import math
import pickle

import pytest
import torch

from avgpipe.workloads.masked import (
    IGNORED,
    HiddenAnew,
    HiddenOnce,
    MaskedLoss,
    Vocabulary,
    blind_perplexity,
    hidden_pieces,
    hide,
    masked_metrics,
    segments,
    told_pieces,
)
from avgpipe.workloads.samples import SampleBatches, in_order

VOCABULARY = Vocabulary(size=1000, pad=0, begin=1, end=2, mask=3)


def text(pieces, seed=0):
    return torch.randint(4, 1000, (pieces,), generator=torch.Generator().manual_seed(seed)).tolist()


def draw(seed=0):
    return torch.Generator().manual_seed(seed)


# ---- segments ------------------------------------------------------------------------------------------------------


def test_segments_follow_the_text_over_its_lines():
    rows = segments([[10, 11, 12], [], [13, 14], [15, 16]], 5, VOCABULARY)
    assert rows.tolist() == [[1, 10, 11, 12, 2], [1, 13, 14, 15, 2]]  # 16 fills no row


@pytest.mark.parametrize(
    ("lines", "length", "message"),
    [
        ([[4, 5]], 2, r"at least 3 places.*got 2"),
        ([[4, 5]], 5, "a text of 2 pieces fills no segment of 3"),
        ([], 5, "a text of 0 pieces fills no segment"),
    ],
)
def test_segments_refuse_what_fills_none(lines, length, message):
    with pytest.raises(ValueError, match=message):
        segments(lines, length, VOCABULARY)


# ---- hiding --------------------------------------------------------------------------------------------------------


def test_shares_of_hidden_pieces_are_the_papers():
    rows = segments([text(62 * 2000)], 64, VOCABULARY)
    read, targets = hide(rows, VOCABULARY, draw())
    hidden = targets != IGNORED
    assert (hidden.sum(1) == 9).all()  # 15 % of 62, rounded
    assert torch.equal(targets[hidden], rows[hidden])
    assert torch.equal(read[~hidden], rows[~hidden])
    n = int(hidden.sum())
    masked = int((read[hidden] == VOCABULARY.mask).sum())
    same = int((read[hidden] == rows[hidden]).sum())
    for count, share in ((masked, 0.8), (same, 0.1), (n - masked - same, 0.1)):
        assert abs(count / n - share) < 4.5 * math.sqrt(share * (1 - share) / n) + 0.001


def test_every_place_is_hidden_alike_and_special_pieces_never():
    rows = segments([text(18 * 4000)], 20, VOCABULARY)
    rows[:, 15:17] = torch.tensor([VOCABULARY.end, VOCABULARY.begin])
    _, targets = hide(rows, VOCABULARY, draw())
    often = (targets != IGNORED).double().mean(0)
    special = torch.tensor([0, 15, 16, 19])
    assert (often[special] == 0).all()
    others = often[torch.tensor([i for i in range(20) if i not in special])]
    assert (others - 2 / 16).abs().max() < 4.5 * math.sqrt(0.125 * 0.875 / 4000)


def test_any_piece_replaces_some():
    rows = segments([text(98 * 1000)], 100, VOCABULARY)
    read, targets = hide(rows, VOCABULARY, draw())
    other = (targets != IGNORED) & (read != VOCABULARY.mask) & (read != rows)
    replaced = read[other].double()
    assert replaced.min() >= 0
    assert replaced.max() < VOCABULARY.size
    assert abs(replaced.mean() - 500) < 4.5 * 289 / math.sqrt(replaced.numel())


def test_each_row_hides_at_least_one_piece():
    rows = torch.tensor([[1, 7, 2, 0, 0]] * 50)
    _, targets = hide(rows, VOCABULARY, draw())
    assert (targets == torch.tensor([IGNORED, 7, IGNORED, IGNORED, IGNORED])).all()


def test_what_is_hidden_follows_from_seed_epoch_and_batch_alone():
    rows = segments([text(14 * 40)], 16, VOCABULARY)

    def batches(**which):
        return SampleBatches(in_order(40), 8, HiddenAnew(rows, VOCABULARY), **which)

    first = list(batches(seed=1, epoch=2))
    again = list(batches(seed=1, epoch=2, start=3))
    for a, b in zip(first[3:], again):
        assert torch.equal(a[0], b[0])
        assert torch.equal(a[1], b[1])
    for other in ({"seed": 1, "epoch": 3}, {"seed": 2, "epoch": 2}):
        assert not torch.equal(first[0][1], batches(**other)[0][1])
    assert not torch.equal(first[0][1] == IGNORED, first[1][1] == IGNORED)


def test_evaluation_hides_the_same_whatever_the_batch_size():
    rows = segments([text(14 * 20)], 16, VOCABULARY)
    read = {}
    for size in (3, 20):
        make = pickle.loads(pickle.dumps(HiddenOnce.of(rows, VOCABULARY)))
        batches = SampleBatches(in_order(20), size, make, seed=size)
        read[size] = [torch.cat(parts) for parts in zip(*batches)]
    assert torch.equal(read[3][0], read[20][0])
    assert torch.equal(read[3][1], read[20][1])


# ---- loss and metrics ----------------------------------------------------------------------------------------------


def test_loss_and_metrics_are_those_of_a_plain_count():
    rows = segments([text(14 * 6)], 16, VOCABULARY)
    _, targets = hide(rows, VOCABULARY, draw())
    logits = torch.randn(6, 16, 1000, dtype=torch.float64, generator=draw(1))
    logits[:3].scatter_add_(
        2, rows[:3].unsqueeze(-1), torch.full((3, 16, 1), 9.0, dtype=torch.float64)
    )  # some are told
    losses, told = [], 0
    for n in range(6):
        for t in range(16):
            if targets[n, t] != IGNORED:
                p = logits[n, t].exp() / logits[n, t].exp().sum()
                losses.append(-math.log(p[targets[n, t]]))
                told += int(logits[n, t].argmax() == rows[n, t])
    assert 0 < told < len(losses)
    assert hidden_pieces(targets) == len(losses)
    loss = float(MaskedLoss()(logits, targets))
    assert loss == pytest.approx(sum(losses) / len(losses))
    means = {name: float(value) for name, value in told_pieces(logits, targets).items()}
    metrics = masked_metrics(loss, means)
    assert metrics["perplexity"] == pytest.approx(math.exp(loss))
    assert metrics["accuracy"] == pytest.approx(100 * told / len(losses))


def test_the_trivial_answer_knows_frequencies_alone():
    targets = torch.tensor([[IGNORED, 2, IGNORED], [1, 2, IGNORED]])
    shares = torch.tensor([0.25, 0.25, 0.5]).log()
    assert blind_perplexity(shares, targets) == pytest.approx((2 * 4 * 2) ** (1 / 3))
