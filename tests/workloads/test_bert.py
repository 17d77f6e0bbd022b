import json
import random
import sys
from dataclasses import replace
from itertools import pairwise

import pytest
import torch
from torch import nn

pytest.importorskip("transformers", reason="the workload bert needs transformers")
pytest.importorskip("tokenizers", reason="the workload bert needs tokenizers")

from avgpipe import Pipeline, Plan
from avgpipe.runtime.model import layers_of, stage_bounds
from avgpipe.workloads import bert
from avgpipe.workloads.bert import (
    MASKED_MODEL,
    PAIRS_MODEL,
    PRESETS,
    BertTask,
    build,
    check,
    pretrained_model,
)
from avgpipe.workloads.libraries import LibraryNotFound
from avgpipe.workloads.masked import HiddenAnew, MaskedLoss, Vocabulary, hidden_pieces, segments
from avgpipe.workloads.options import BuildOptions
from avgpipe.workloads.pretrained import BERT, check_pretrained, new_model
from avgpipe.workloads.samples import generator
from avgpipe.workloads.sentence_pairs import DEV_FILE, TEST_FILE, TRAIN_FILE, PairRows, SentencePair
from avgpipe.workloads.text import DataNotFound
from avgpipe.workloads.training import Training

from .equality import assert_equal_to_one_device

WORDS = ["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]", *(f"w{n}" for n in range(40))]
VOCABULARY = Vocabulary(size=60, pad=0, begin=1, end=2, mask=3)


def small_task(**changes):
    training = Training(batch_size=8, epochs=1, optimizer="adamw", lr=2e-3)
    return replace(
        BertTask(hidden=16, layers=3, heads=2, pieces=300, length=16, positions=32, training=training),
        **changes,
    )


@pytest.fixture
def small(monkeypatch):
    """Both tasks with a small model, as preset tiny."""
    preset = bert.BertPreset(pairs=small_task(), masked=small_task(frequency_bias=True))
    monkeypatch.setitem(PRESETS["bert"], "tiny", preset)


@pytest.fixture
def pairs_folder(tmp_path):
    """Paraphrases have the same words, other pairs have none in common."""
    draw = random.Random(0)
    folder = tmp_path / "pairs"
    folder.mkdir()

    def rows(first, count):
        lines = ["Quality\t#1 ID\t#2 ID\t#1 String\t#2 String"]
        for n in range(first, first + count):
            words = [f"w{draw.randrange(40)}" for _ in range(draw.randrange(3, 7))]
            other = words[::-1] if n % 3 else [f"w{draw.randrange(40)}" for _ in words]
            lines.append(f"{int(n % 3 > 0)}\t{n}\t{n}\t{' '.join(words)}\t{' '.join(other)}")
        return "\n".join(lines) + "\n"

    (folder / TRAIN_FILE).write_text(rows(0, 60))
    (folder / TEST_FILE).write_text(rows(100, 20))
    (folder / DEV_FILE).write_text("".join(f"{n}\t{n}\n" for n in range(40, 60)))
    return folder


@pytest.fixture
def pretrained(tmp_path):
    """A BERT for masked text, as save_pretrained writes it, with a vocabulary of whole words."""
    model = new_model(MASKED_MODEL, small_task().config(len(WORDS)), seed=5)
    folder = tmp_path / "weights"
    model.save_pretrained(folder)
    (folder / "vocab.txt").write_text("\n".join(WORDS) + "\n")
    return folder


def rebuild(**options):
    return build("bert", BuildOptions(**options))


# ---- the task follows from the data --------------------------------------------------------------------------------


def test_sentence_pairs_are_classified(small, pairs_folder):
    workload = rebuild(data=pairs_folder)
    assert type(workload.layers).__name__ == PAIRS_MODEL
    assert workload.title == "paraphrases told among 40 sentence pairs of pairs"
    assert (workload.metric_name, workload.lower_is_better) == ("accuracy", False)
    assert workload.trivial == ("always a paraphrase", pytest.approx(100 * 14 / 20))
    inputs, labels = next(iter(workload.train_batches(0)))
    assert set(inputs) == {"input_ids", "attention_mask", "token_type_ids"}
    assert inputs["input_ids"].shape[0] == labels.shape[0] == 8
    assert [len(b()) for b in (workload.valid_batches, workload.test_batches)] == [3, 3]


def test_a_text_is_learnt_from_with_masks(small, text_folder):
    workload = rebuild(data=text_folder)
    assert type(workload.layers).__name__ == MASKED_MODEL
    assert workload.title == f"masked pieces told in the text of {text_folder.name}"
    assert (workload.metric_name, workload.lower_is_better) == ("perplexity", True)
    inputs, targets = next(iter(workload.train_batches(0)))
    assert inputs.shape == targets.shape == (8, 16)
    assert workload.loss_weight(targets) == 8 * 2  # 15 % of 14


def test_without_data_python_is_learnt_from(small, monkeypatch):
    monkeypatch.setitem(
        PRESETS["bert"], "tiny", replace(PRESETS["bert"]["tiny"], masked=small_task(max_bytes=30_000))
    )
    workload = rebuild()
    assert workload.title == "masked pieces told in the text of Python's standard library"
    assert len(workload.train_batches(0)) > 1


@pytest.mark.parametrize("kind", ["pairs", "masked"])
def test_it_learns_through_two_stages(small, kind, pairs_folder, text_folder, monkeypatch):
    preset = PRESETS["bert"]["tiny"]
    training = Training(batch_size=16, epochs=1, optimizer="adamw", lr=1e-2)
    monkeypatch.setitem(
        PRESETS["bert"],
        "tiny",
        replace(preset, **{kind: replace(getattr(preset, kind), layers=1, dropout=0.0, training=training)}),
    )
    workload = rebuild(data=pairs_folder if kind == "pairs" else text_folder)
    with Pipeline(
        workload.layers,
        Plan(stages=2, micro_batches=2),
        loss_fn=workload.loss_fn,
        optimizer=workload.optimizer,
        loss_weight=workload.loss_weight,
    ) as pipeline:
        before = pipeline.evaluate(workload.valid_batches(), workload.metric_fn)
        for epoch in range(2):
            list(pipeline.train(workload.train_batches(epoch)))
        after = pipeline.evaluate(workload.valid_batches(), workload.metric_fn)
    assert after.loss < before.loss
    metrics = workload.metrics(after.loss, after.metric)
    assert list(metrics) == (["accuracy", "f1"] if kind == "pairs" else ["perplexity", "accuracy"])
    if kind == "masked":
        assert workload.trivial is not None
        assert metrics["perplexity"] < workload.trivial[1]
    assert 0 <= metrics["accuracy"] <= 100


# ---- determinism ---------------------------------------------------------------------------------------------------


def test_weights_and_batches_follow_from_the_seed_alone(small, pairs_folder, text_folder):
    for data in (pairs_folder, text_folder):
        torch.manual_seed(1)
        first = rebuild(data=data, seed=3)
        untouched = torch.rand(2)
        torch.manual_seed(1)
        assert torch.equal(untouched, torch.rand(2))
        again, other = rebuild(data=data, seed=3), rebuild(data=data, seed=4)
        weights = [torch.cat([p.flatten() for p in w.layers.parameters()]) for w in (first, again, other)]
        assert torch.equal(weights[0], weights[1])
        assert not torch.equal(weights[0], weights[2])
        for a, b in zip(list(first.train_batches(1))[2:], again.train_batches(1, start=2)):
            assert torch.equal(a[1], b[1])


def test_loader_workers_make_the_same_batches(small, text_folder):
    here, there = (rebuild(data=text_folder, loader_workers=n, batch_size=64) for n in (0, 1))
    for a, b in zip(here.train_batches(0), there.train_batches(0)):
        assert torch.equal(a[0], b[0])


def test_a_short_run_begins_with_the_pieces_frequencies(small, text_folder):
    workload = rebuild(data=text_folder)
    bias = workload.layers.cls.predictions.bias.detach()
    assert bias.exp().sum() == pytest.approx(1, abs=1e-3)
    assert bias.argmax() > VOCABULARY.mask


# ---- equality with one device --------------------------------------------------------------------------------------


def float64_model(kind):
    return new_model(kind, small_task(dropout=0.0).config(60), seed=1).double()


def test_pairs_train_as_on_one_device():
    draw = random.Random(2)
    sentences = [[draw.randrange(4, 60) for _ in range(draw.randrange(2, 9))] for _ in range(28)]
    pairs = [SentencePair(str(n), str(n + 1), draw.randrange(2)) for n in range(14)]
    rows = PairRows.of(pairs, lambda lines: [sentences[int(n)] for n in lines], VOCABULARY, 14)
    batches = [rows(torch.arange(a, a + 7), generator(0)) for a in (0, 7)]
    assert_equal_to_one_device(float64_model(PAIRS_MODEL), batches, nn.CrossEntropyLoss())


def test_masked_text_trains_as_on_one_device():
    draw = random.Random(3)
    text = [draw.randrange(4, 60) for _ in range(14 * 10)]
    make = HiddenAnew(segments([text], 12, VOCABULARY), VOCABULARY)
    batches = [make(torch.arange(a, a + 7), generator(a)) for a in (0, 7)]
    batches[0][1][:2] = -100  # micro-batches with fewer hidden pieces weigh less
    batches[0][1][0, 1] = 5
    assert_equal_to_one_device(float64_model(MASKED_MODEL), batches, MaskedLoss(), loss_weight=hidden_pieces)


# ---- the published size --------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("kind", "parameters"), [(PAIRS_MODEL, 109_483_778), (MASKED_MODEL, 109_514_298)])
def test_paper_is_bert_base(kind, parameters):
    preset = PRESETS["bert"]["paper"]
    task = preset.pairs if kind == PAIRS_MODEL else preset.masked
    with torch.device("meta"):
        model = new_model(kind, task.config(30_522))
        tokens = torch.ones(2, task.length, dtype=torch.int64)
        inputs = {"input_ids": tokens, "attention_mask": tokens, "token_type_ids": tokens}
        assert sum(p.numel() for p in model.parameters()) == parameters
        layers = layers_of(model)
        for stages in (2, 4):
            value = inputs if kind == PAIRS_MODEL else tokens
            bounds = stage_bounds(layers, stages, None)
            for begin, end in pairwise(bounds):
                for layer in layers[begin:end]:
                    value = layer(value)
            loss = nn.CrossEntropyLoss() if kind == PAIRS_MODEL else MaskedLoss()
            loss(value, tokens[:, 0] if kind == PAIRS_MODEL else tokens).backward()
    facts = check("bert", BuildOptions(preset="paper"))
    assert facts.layers == len(layers)


# ---- pretrained weights --------------------------------------------------------------------------------------------


@pytest.mark.parametrize("kind", [PAIRS_MODEL, MASKED_MODEL])
def test_pretrained_weights_and_their_own_pieces_are_used(kind, pretrained):
    model, encode, vocabulary = pretrained_model(kind, pretrained, seed=1)
    saved = new_model(MASKED_MODEL, small_task().config(len(WORDS)), seed=5).state_dict()
    for name, tensor in model.bert.state_dict().items():
        if "pooler" not in name:
            assert torch.equal(tensor, saved[f"bert.{name}"])
    assert encode(["W3 w1 other", ""]) == [[8, 6, 1], []]
    assert vocabulary == Vocabulary(size=45, pad=0, begin=2, end=3, mask=4)


def test_a_head_that_is_not_there_is_drawn_from_the_seed(small, pretrained, pairs_folder):
    built = [rebuild(data=pairs_folder, pretrained=pretrained, seed=seed).layers for seed in (1, 1, 2)]
    heads = [model.classifier.weight for model in built]
    assert torch.equal(heads[0], heads[1])
    assert not torch.equal(heads[0], heads[2])
    assert check("bert", BuildOptions(data=pairs_folder, pretrained=pretrained)).layers == 3 + 2


def test_pretrained_weights_begin_masked_training(small, pretrained, text_folder):
    workload = rebuild(data=text_folder, pretrained=pretrained)
    assert (workload.layers.cls.predictions.bias == 0).all()  # the weights' own, not the frequencies
    assert workload.train_batches(0)[0][0][:, 0].eq(2).all()


def rewrite(folder, **changes):
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps({**config, **changes}))


def break_weights(folder):
    (folder / "model.safetensors").write_bytes(b"not weights")


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda f: (f / "config.json").unlink(), "lacks the configuration: config.json"),
        (lambda f: (f / "model.safetensors").unlink(), "lacks the weights: model.safetensors or"),
        (lambda f: (f / "vocab.txt").unlink(), "lacks the tokenizer: tokenizer.json or vocab.txt"),
        (lambda f: rewrite(f, model_type="gpt2"), "holds a model of type 'gpt2', not a BERT"),
        (lambda f: (f / "config.json").write_text("{"), "config.json cannot be read"),
        (
            lambda f: (f / "vocab.txt").write_text("\n".join([*WORDS, "more"])),
            "has 46 pieces and its model only 45",
        ),
        (
            lambda f: rewrite(f, num_hidden_layers=4),
            "lack 16 of a BERT's tensors, such as bert.encoder.layer.3",
        ),
        (lambda f: rewrite(f, hidden_size=32), "cannot be loaded as BertForMaskedLM"),
        (break_weights, "cannot be loaded as BertForMaskedLM"),
    ],
)
def test_broken_pretrained_folders_give_one_clear_line(pretrained, change, message):
    change(pretrained)
    with pytest.raises(ValueError, match=message) as error:
        pretrained_model(MASKED_MODEL, pretrained)
    assert "\n" not in str(error.value)


def test_a_name_is_not_looked_up_elsewhere(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    with pytest.raises(DataNotFound, match="bert-base-uncased does not exist"):
        check_pretrained(BERT, "bert-base-uncased")


# ---- bad data ------------------------------------------------------------------------------------------------------


def test_a_folder_with_neither_kind_of_data_is_refused(tmp_path):
    with pytest.raises(DataNotFound, match=rf"lacks train.txt.*or give sentence pairs: {TRAIN_FILE}"):
        check("bert", BuildOptions(data=tmp_path))


def test_missing_pair_files_are_named(pairs_folder):
    (pairs_folder / DEV_FILE).unlink()
    with pytest.raises(DataNotFound, match=r"lacks dev_ids\.tsv"):
        check("bert", BuildOptions(data=pairs_folder))


def test_a_text_shorter_than_a_segment_is_refused(small, text_folder):
    (text_folder / "valid.txt").write_text("w1\n")
    with pytest.raises(ValueError, match="fills no segment of 14"):
        rebuild(data=text_folder)


def test_without_transformers_the_way_out_is_named(monkeypatch):
    monkeypatch.setitem(sys.modules, "transformers", None)
    with pytest.raises(LibraryNotFound, match=r"bert needs transformers.*pip install"):
        check("bert", BuildOptions())
