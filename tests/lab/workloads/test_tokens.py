import itertools
import math

import pytest
import torch

from avgpipe_lab.workloads.tokens import Hypothesis, beam_search, penalty

BEGIN, END = 1, 2


class Toy:
    """Logits that any change of the sentence or the prefix changes."""

    def __init__(self, vocabulary=4, peaked=2.0):
        self.vocabulary, self.peaked = vocabulary, peaked
        self.calls = []

    def __call__(self, inputs):
        assert inputs["at"] == inputs["target"].shape[1] - 1
        self.calls.append(inputs["target"].shape)
        rows = [self.row([n, *row]) for n, row in zip(inputs["n"].tolist(), inputs["target"].tolist())]
        return torch.stack(rows).float()

    def row(self, words):
        seed = 0
        for word in words:
            seed = (seed * 31 + word + 7) % 2**40
        return self.peaked * torch.randn(
            self.vocabulary, generator=torch.Generator().manual_seed(seed), dtype=torch.float64
        )


def sentences(count):
    return {"n": torch.arange(count)}


def search(predict, count=5, **changes):
    options = {"begin": BEGIN, "end": END, "beam": 4, "max_length": 4, **changes}
    return beam_search(predict, sentences(count), **options)


def exhaustive(toy, n, max_length):
    """The best of all sequences, in float64, by the definition."""

    def score(pieces):
        prefix, total = [BEGIN], 0.0
        for piece in [*pieces, END]:
            row = [float(x) for x in toy.row([n, *prefix]).float()]
            total += row[piece] - math.log(sum(math.exp(x) for x in row))
            prefix.append(piece)
        return total / ((5 + len(pieces) + 1) / 6) ** 0.6

    pieces = [p for p in range(toy.vocabulary) if p != END]
    every = (list(s) for length in range(max_length + 1) for s in itertools.product(pieces, repeat=length))
    return max((Hypothesis(s, score(s)) for s in every), key=lambda h: h.score)


def test_a_beam_that_holds_everything_finds_the_best_of_all():
    toy = Toy()
    for n, found in enumerate(search(toy, beam=200)):
        best = exhaustive(toy, n, 4)
        assert found.pieces == best.pieces
        assert found.score == pytest.approx(best.score, abs=1e-9)


def test_beam_1_is_greedy():
    toy = Toy(vocabulary=9)
    for n, found in enumerate(search(toy, 8, beam=1, max_length=10)):
        prefix = [BEGIN]
        while len(prefix) <= 10 and (piece := int(toy.row([n, *prefix]).argmax())) != END:
            prefix.append(piece)
        assert found.pieces == prefix[1:]


def test_batched_sentences_are_found_as_if_alone():
    toy = Toy(vocabulary=12)
    together = search(toy, 6, beam=3, max_length=8)
    for n in range(6):
        alone = beam_search(toy, {"n": torch.tensor([n])}, begin=BEGIN, end=END, beam=3, max_length=8)
        assert alone == [together[n]]


def test_scores_are_those_of_the_sequences_found():
    toy = Toy(vocabulary=6)
    for n, found in enumerate(search(toy, beam=2, max_length=6)):
        prefix, total = [BEGIN], 0.0
        for piece in [*found.pieces, END]:
            total += float(toy.row([n, *prefix]).float().double().log_softmax(0)[piece])
            prefix.append(piece)
        assert found.score == pytest.approx(total / penalty(len(found.pieces) + 1), abs=1e-9)


def test_predict_is_called_once_a_step_for_the_live_hypotheses_alone():
    toy = Toy(vocabulary=6, peaked=4.0)
    found = search(toy, 5, beam=3, max_length=7)
    assert [width for _, width in toy.calls] == list(range(1, len(toy.calls) + 1))
    assert len(toy.calls) <= 8
    rows = [rows for rows, _ in toy.calls]
    assert rows[0] == 5
    assert rows[-1] < max(rows) <= 15
    assert all(len(h.pieces) < len(toy.calls) for h in found)


def test_no_sequence_is_longer_than_asked():
    class Endless(Toy):
        def row(self, words):
            return super().row(words).index_fill(0, torch.tensor([END]), -50.0)

    for beam in (1, 3):
        assert [len(h.pieces) for h in search(Endless(), beam=beam, max_length=3)] == [3] * 5
    assert [h.pieces for h in search(Endless(), max_length=0)] == [[]] * 5


def test_a_model_that_diverged_still_gives_a_sequence():
    found = search(lambda inputs: torch.full((len(inputs["n"]), 4), torch.nan))
    assert len(found) == 5
    assert all(math.isnan(h.score) for h in found)


def test_the_length_penalty_is_the_published_one():
    assert penalty(1) == 1.0
    assert penalty(7) == pytest.approx(2.0**0.6)
