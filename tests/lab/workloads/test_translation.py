import os
import random
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from torch import nn

pytest.importorskip("tokenizers")
pytest.importorskip("sacrebleu")

from avgpipe.errors import LibraryNotFound
from avgpipe.tasks import DataNotFound, build_workload, check_workload
from avgpipe_lab.workloads import gnmt
from avgpipe_lab.workloads.gnmt import PRESETS, GNMTConfig, PairBatch, ended, translate
from avgpipe_lab.workloads.huggingface import Subwords

WORDS = {"one": "eins", "two": "zwei", "three": "drei", "six": "sechs", "dog": "Hund", "cat": "Katze"}


@pytest.fixture
def folder(tmp_path):
    """Sentences that are translated word by word."""
    draw = random.Random(1)
    for stem, count in (("train", 150), ("val", 20)):
        rows = [draw.choices(list(WORDS), k=draw.randint(2, 5)) for _ in range(count)]
        (tmp_path / f"{stem}.en").write_text("".join(" ".join(row) + "\n" for row in rows), encoding="utf-8")
        rows = [[WORDS[word] for word in row] for row in rows]
        (tmp_path / f"{stem}.de").write_text("".join(" ".join(row) + "\n" for row in rows), encoding="utf-8")
    return tmp_path


@pytest.fixture
def preset(monkeypatch):
    """Changes the tiny preset, to an even smaller one."""

    def change(**changes):
        chosen = PRESETS["gnmt"]["tiny"]
        training = replace(chosen.training, batch_size=16, warmup=0.0, decay="none", lr=0.01)
        model = GNMTConfig(0, 32, 1, 2, dropout=0.0, tied_output=True, embedding_bound=0.5)
        options = {
            "model": model,
            "training": training,
            "vocabulary": 300,
            "decoded": 6,
            **changes,
        }
        monkeypatch.setitem(PRESETS["gnmt"], "tiny", replace(chosen, **options))

    change()
    return change


def built(folder, **options):
    return build_workload("gnmt", data=folder, **options)


def test_a_built_workload_learns_to_translate(folder, preset):
    workload = built(folder, batch_size=8)
    model, loss_fn = nn.Sequential(*workload.layers), workload.loss_fn
    optimizer = workload.optimizer(model.parameters())
    before = evaluate(model, workload), workload.decode(model.eval())
    for epoch in range(10):
        model.train(), loss_fn.train()
        for inputs, targets in workload.train_batches(epoch):
            loss_fn(model(inputs), targets).backward()
            nn.utils.clip_grad_norm_(model.parameters(), workload.clip_grad_norm)
            optimizer.step()
            optimizer.zero_grad()
    after = evaluate(model, workload), workload.decode(model.eval())
    assert workload.metric_name == "bleu"
    assert not workload.lower_is_better
    assert workload.metrics(before[0], {})["perplexity"] > 6  # six words and the end
    assert workload.metrics(after[0], {})["perplexity"] < 5
    assert before[1]["bleu"] < after[1]["bleu"] <= 100


def evaluate(model, workload):
    model.eval(), workload.loss_fn.eval()
    total = count = 0.0
    with torch.no_grad():
        for inputs, targets in workload.valid_batches():
            weight = workload.loss_weight(targets)
            total += float(workload.loss_fn(model(inputs), targets)) * weight
            count += weight
    return total / count


def test_batches_are_padded_pairs_with_begin_and_end():
    make = PairBatch(ended([[10, 11], [12], [13, 14, 15]]), ended([[20], [21, 22, 23], [24]]))
    inputs, targets = make(torch.tensor([2, 1]), torch.Generator())
    assert inputs["source"].tolist() == [[13, 14, 15, 2], [12, 2, 0, 0]]
    assert inputs["lengths"].tolist() == [4, 2]
    assert inputs["target"].tolist() == [[1, 24, 0, 0], [1, 21, 22, 23]]
    assert targets.tolist() == [[24, 2, 0, 0], [21, 22, 23, 2]]
    assert make.lengths.tolist() == [5, 6, 6]  # with the ends


@pytest.mark.promise
def test_batches_are_the_same_for_any_pipelines_and_workers(folder, preset):
    one = built(folder, seed=4)
    for other in (built(folder, seed=4, pipelines=2), built(folder, seed=4, loader_workers=1)):
        expected, got = list(one.train_batches(1, start=3)), list(other.train_batches(1, start=3))
        assert len(got) == len(expected) == 150 // 16 + 1 - 3
        for (a, x), (b, y) in zip(expected, got):
            assert torch.equal(x, y)
            assert all(torch.equal(a[name], b[name]) for name in a)


def test_a_batch_has_little_padding(folder, preset):
    batches = [y for _, y in built(folder).train_batches(0)]
    padding = sum(int((y == Subwords.pad).sum()) for y in batches) / sum(y.numel() for y in batches)
    assert padding < 0.2  # 0.3 without sorting


def test_training_begins_with_the_frequencies_of_the_pieces(folder, preset):
    workload = built(folder)
    frequent = Subwords.learn(list(WORDS), 300).end  # of few pieces the end is the most frequent
    assert workload.layers[-1].bias.argmax() == frequent
    start = evaluate(nn.Sequential(*workload.layers), workload)
    preset(unigram_bias=False)
    without = evaluate(nn.Sequential(*built(folder).layers), built(folder))
    assert start < 2.5 < without


def test_weights_depend_on_the_seed_alone(folder, preset):
    def weights(caller, **options):
        torch.manual_seed(caller)
        layers = built(folder, **options).layers
        assert torch.initial_seed() == caller
        return torch.cat([p.detach().flatten() for p in nn.Sequential(*layers).parameters()])

    assert torch.equal(weights(1, seed=2), weights(5, seed=2, pipelines=3))
    assert not torch.equal(weights(1, seed=2), weights(1, seed=3))


def test_long_pairs_are_left_out_of_training_and_counted(folder, preset):
    everything = built(folder)
    assert everything.title == "translation from English to German, 150 sentence pairs"
    preset(max_length=4)
    workload = built(folder)
    trained = sum(len(y) for _, y in workload.train_batches(0))
    assert 0 < trained < 150
    assert workload.title.endswith(f"{trained} sentence pairs, {150 - trained} longer than 4 pieces left out")
    assert max(y.shape[1] for _, y in workload.train_batches(0)) <= 5
    assert sum(len(y) for _, y in workload.valid_batches()) == 20
    preset(max_length=1)
    with pytest.raises(ValueError, match="every training pair is longer than 1 pieces"):
        built(folder)


def test_a_preset_can_take_the_first_pairs_only(folder, preset):
    preset(pairs=33)
    workload = built(folder, epochs=2)
    assert sum(len(y) for _, y in workload.train_batches(0)) == 33
    assert workload.epochs == 2


class Copies:
    """Predicts the source's pieces one by one, then the end."""

    def __init__(self):
        self.rows = []

    def __call__(self, inputs):
        at = inputs["at"]
        self.rows.append(len(inputs["source"]))
        following = torch.nn.functional.pad(inputs["source"], (0, at + 1), value=Subwords.end)[:, at]
        return 9.0 * torch.nn.functional.one_hot(following, 400).float()


@pytest.mark.parametrize("beam", [1, 3])
def test_translations_come_in_the_order_of_the_sentences(beam):
    subwords = Subwords.learn(["some words that are here", "other words"] * 9, 300)
    sentences = ["other words", "", "some words that are here and much longer", "x", "words"]
    copies = Copies()
    assert translate(copies, sentences, subwords, beam=beam, batch_size=2) == sentences
    assert max(copies.rows) <= 2 * beam
    assert translate(copies, [], subwords) == []


def test_bleu_is_that_of_the_first_sentences_of_validation(folder, preset, monkeypatch):
    seen = []

    def perfect(predict, sentences, subwords, **options):
        seen.append((len(sentences), options["beam"]))
        return [" ".join(WORDS[word] for word in sentence.split()) for sentence in sentences]

    monkeypatch.setattr(gnmt, "translate", perfect)
    assert built(folder).decode(None)["bleu"] == pytest.approx(100)
    preset(decoded=None, beam=4)
    assert built(folder).decode(None)["bleu"] == pytest.approx(100)
    assert seen == [(6, 1), (20, 4)]


def test_a_sentence_longer_than_all_in_training_is_translated_too(folder, preset):
    workload = built(folder)
    model = nn.Sequential(*workload.layers).eval()
    subwords = Subwords.learn(list(WORDS), 300)
    assert len(translate(model, ["dog cat " * 15], subwords, beam=1)) == 1


@pytest.mark.skipif("AVGPIPE_DATA" not in os.environ, reason="AVGPIPE_DATA does not name the data folder")
def test_multi30k_makes_a_workload():
    workload = built(Path(os.environ["AVGPIPE_DATA"]) / "multi30k-en-de")
    inputs, targets = next(iter(workload.train_batches(0)))
    assert inputs["target"].shape == targets.shape
    assert sum(len(y) for _, y in workload.valid_batches()) == 1_014


def test_facts_are_those_of_what_is_built(folder, preset):
    workload = built(folder, batch_size=7)
    facts = check_workload("gnmt", data=folder, batch_size=7)
    assert facts.layers == len(workload.layers)
    assert (facts.batch_size, facts.epochs) == (7, workload.epochs)
    assert check_workload("gnmt", preset="paper", data=folder).layers == 10


def test_missing_files_are_named(folder):
    (folder / "val.de").unlink()
    with pytest.raises(DataNotFound, match=r"lacks val\.de"):
        check_workload("gnmt", data=folder)


@pytest.mark.parametrize("missing", ["tokenizers", "sacrebleu"])
def test_a_missing_library_is_named_before_anything_is_read(folder, monkeypatch, missing):
    monkeypatch.setitem(__import__("sys").modules, missing, None)
    with pytest.raises(LibraryNotFound, match=rf"gnmt needs {missing}, .*avgpipe\[workloads\]"):
        check_workload("gnmt", data=folder)
