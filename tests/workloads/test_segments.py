import os
import pickle
from pathlib import Path

import pytest
import torch

from avgpipe.workloads.samples import SampleBatches, in_order, shuffled
from avgpipe.workloads.segments import IGNORED, Pieces, Segments, load_pieces, pieces_of
from avgpipe.workloads.subwords import Subwords
from avgpipe.workloads.text import SPLITS, DataNotFound, load_text, read_text


def pieces(count):
    return Pieces(torch.arange(100, 100 + count), torch.full((count,), 0.5))


def letters(lines):
    return [[ord(sign) for sign in line + "\n"] for line in lines]


@pytest.mark.parametrize(("count", "length"), [(13, 4), (13, 1), (13, 12), (13, 40), (14, 4), (2, 3)])
def test_every_piece_but_the_first_is_predicted_once_from_the_one_before(count, length):
    segments = Segments(pieces(count), length)
    assert len(segments) == -(-(count - 1) // length)
    inputs, targets = segments(in_order(len(segments)))
    assert inputs.shape == targets.shape == (len(segments), length)
    there = targets != IGNORED
    assert torch.equal(targets[there], segments.pieces.numbers[1:])
    assert torch.equal(inputs[there] + 1, targets[there])
    assert inputs.min() >= 100  # what fills the last segment up is a piece too
    assert bool(there[:-1].all())


def test_words_go_with_the_pieces_that_are_predicted():
    segments = Segments(Pieces(torch.arange(6), torch.tensor([9.0, 1, 2, 3, 4, 5])), 3, count_words=True)
    _, (targets, words) = segments(torch.tensor([1, 0]))
    assert targets.tolist() == [[4, 5, IGNORED], [1, 2, 3]]
    assert words.tolist() == [9.0, 6.0]


def test_batches_of_an_epoch_are_all_segments_whatever_is_skipped_or_made_by_workers():
    segments = Segments(pieces(42), 4)
    order = shuffled(len(segments), seed=3, epoch=1)
    batches = list(SampleBatches(order, 3, segments))
    seen = torch.cat([targets.flatten() for _, targets in batches])
    assert sorted(seen[seen != IGNORED].tolist()) == list(range(101, 142))
    for made in (
        list(SampleBatches(order, 3, segments, start=2)),
        list(SampleBatches(order, 3, pickle.loads(pickle.dumps(segments)), start=2, workers=1)),
    ):
        for (inputs, targets), (x, y) in zip(batches[2:], made, strict=True):
            assert torch.equal(inputs, x)
            assert torch.equal(targets, y)


def test_segments_refuse_what_has_nothing_to_predict():
    with pytest.raises(ValueError, match="at least 2 pieces to predict one, and this has 1"):
        Segments(pieces(1), 4)
    with pytest.raises(ValueError, match="length must be at least 1, got 0"):
        Segments(pieces(10), 0)


def test_words_are_spread_over_the_pieces_of_their_line():
    text = pieces_of("ab c\n\nd\n", letters)
    assert text.numbers.tolist() == [ord(sign) for sign in "ab c\n\nd\n"]
    assert text.words.tolist() == pytest.approx([3 / 5] * 5 + [1.0] + [1.0, 1.0])


def test_words_of_a_program_are_those_of_its_corpus():
    text = pieces_of("def f(x):\n\n    return x\n", letters, source=True)
    # def f ( x ) : <eos>, nothing, indentation return x <eos>
    assert float(text.words.sum()) == pytest.approx(7 + 0 + 4)
    assert text.words[10] == 0


def test_a_text_is_read_in_the_pieces_of_its_training_part(text_folder):
    subwords, splits = load_pieces(text_folder, 300)
    again, same = load_pieces(text_folder, 300)
    assert len(subwords) == len(again) <= 300
    corpus = load_text(text_folder)
    for split in SPLITS:
        assert torch.equal(splits[split].numbers, same[split].numbers)
        assert float(splits[split].words.double().sum()) == pytest.approx(
            len(getattr(corpus, split)), rel=1e-6
        )
        rows, row = [], []
        for number in splits[split].numbers.tolist():
            if number == Subwords.end:
                rows, row = [*rows, row], []
            else:
                row.append(number)
        assert not row
        assert "\n".join(subwords.decode(rows)) + "\n" == (text_folder / f"{split}.txt").read_text()


def test_the_standard_library_is_a_text_too():
    subwords, splits = load_pieces(None, 500, max_bytes=100_000)
    assert len(subwords) == 500
    for text in splits.values():
        assert 0 < float(text.words.sum()) < len(text)


def test_bad_texts_are_refused_in_one_line(text_folder, tmp_path):
    (text_folder / "valid.txt").write_bytes(b"fine \xff\n")
    with pytest.raises(ValueError, match=r"valid\.txt is not UTF-8 text: byte 5 is 0xff") as caught:
        load_pieces(text_folder, 300)
    assert "\n" not in str(caught.value)
    (text_folder / "valid.txt").write_text("\n")
    with pytest.raises(ValueError, match=r"valid\.txt has no words"):
        load_pieces(text_folder, 300)
    (text_folder / "valid.txt").unlink()
    with pytest.raises(DataNotFound, match=r"lacks valid\.txt"):
        load_pieces(text_folder, 300)
    with pytest.raises(DataNotFound, match="does not exist"):
        load_pieces(tmp_path / "nowhere", 300)


def test_wikitext_2_has_its_published_words():
    data = os.environ.get("AVGPIPE_DATA")
    if not data:
        pytest.skip("set AVGPIPE_DATA to the folder with wikitext-2")
    text = read_text(Path(data) / "wikitext-2")["valid"]
    words = pieces_of(text, letters).words.double().sum()
    assert float(words) == pytest.approx(217_646, abs=0.5)
