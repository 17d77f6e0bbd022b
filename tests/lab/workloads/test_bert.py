import json
import math
import pickle
import random
import sys
from dataclasses import replace
from functools import partial
from itertools import pairwise

import pytest
import torch
from torch import nn

from avgpipe import Source

pytest.importorskip("transformers", reason="the workload bert needs transformers")
pytest.importorskip("tokenizers", reason="the workload bert needs tokenizers")

from avgpipe import Pipeline, Plan
from avgpipe.errors import LibraryNotFound
from avgpipe.model.layers import layers_of
from avgpipe.model.model import stage_bounds
from avgpipe.tasks import DataNotFound, build_workload, check_workload
from avgpipe_lab.workloads import bert
from avgpipe_lab.workloads.batches import SampleBatches, TensorRows, generator
from avgpipe_lab.workloads.bert import (
    MASKED_MODEL,
    PAIRS_MODEL,
    PRESETS,
    BertTask,
    PairRows,
    confusion,
    joined,
    mask_pieces,
    pair_metrics,
    pretrained_model,
    segments,
)
from avgpipe_lab.workloads.data import MRPC_FILES, Paraphrase
from avgpipe_lab.workloads.huggingface import Vocabulary, check_pretrained, new_model
from avgpipe_lab.workloads.recipe import Recipe
from avgpipe_lab.workloads.tokens import IGNORED, TokenLoss, token_metrics

from .equality import assert_equal_to_one_device

WORDS = ["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]", *(f"w{n}" for n in range(40))]
VOCABULARY = Vocabulary(size=60, pad=0, begin=1, end=2, mask=3)
MANY = Vocabulary(size=1000, pad=0, begin=1, end=2, mask=3)


def small_task(**changes):
    training = Recipe(batch_size=8, epochs=1, optimizer="adamw", lr=2e-3)
    sizes = {
        "hidden_size": 16,
        "num_hidden_layers": 3,
        "num_attention_heads": 2,
        "max_position_embeddings": 32,
    }
    return replace(BertTask(sizes, training, pieces=300, length=16), **changes)


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

    (folder / MRPC_FILES[0]).write_text(rows(0, 60))
    (folder / MRPC_FILES[1]).write_text("".join(f"{n}\t{n}\n" for n in range(40, 60)))
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
    return build_workload("bert", **options)


# ---- the task follows from the data --------------------------------------------------------------------------------


def test_sentence_pairs_are_classified(small, pairs_folder):
    workload = rebuild(data=pairs_folder)
    assert type(workload.layers).__name__ == PAIRS_MODEL
    assert workload.title == "paraphrases among 40 sentence pairs of pairs"
    assert (workload.metric_name, workload.lower_is_better) == ("accuracy", False)
    assert workload.trivial == ("always a paraphrase", pytest.approx(100 * 14 / 20))
    inputs, labels = next(iter(workload.train_batches(0)))
    assert set(inputs) == {"input_ids", "attention_mask", "token_type_ids"}
    assert inputs["input_ids"].shape[0] == labels.shape[0] == 8
    assert len(workload.valid_batches()) == 3


def test_a_text_is_learnt_from_with_masks(small, text_folder):
    workload = rebuild(data=text_folder)
    assert type(workload.layers).__name__ == MASKED_MODEL
    assert workload.title == f"masked pieces of the text of {text_folder.name}"
    assert (workload.metric_name, workload.lower_is_better) == ("perplexity", True)
    inputs, targets = next(iter(workload.train_batches(0)))
    assert inputs.shape == targets.shape == (8, 16)
    assert workload.loss_weight(targets) == 8 * 2  # 15 % of 14


def test_without_data_python_is_learnt_from(small, monkeypatch):
    monkeypatch.setitem(
        PRESETS["bert"], "tiny", replace(PRESETS["bert"]["tiny"], masked=small_task(max_bytes=30_000))
    )
    workload = rebuild()
    assert workload.title == "masked pieces of the text of Python's standard library"
    assert len(workload.train_batches(0)) > 1


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["pairs", "masked"])
def test_it_learns_through_two_stages(small, kind, pairs_folder, text_folder, monkeypatch):
    preset = PRESETS["bert"]["tiny"]
    training = Recipe(batch_size=16, epochs=1, optimizer="adamw", lr=1e-2)
    task = getattr(preset, kind)
    one_layer = {**task.model, "num_hidden_layers": 1}
    monkeypatch.setitem(
        PRESETS["bert"],
        "tiny",
        replace(preset, **{kind: replace(task, model=one_layer, dropout=0.0, training=training)}),
    )
    workload = rebuild(data=pairs_folder if kind == "pairs" else text_folder)
    with Pipeline(
        workload.layers,
        Plan(stages=2, micro_batches=2),
        loss_fn=workload.loss_fn,
        optimizer=workload.optimizer,
        extensions=[Source(loss_weight=workload.loss_weight)],
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


@pytest.mark.ranks
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
    pairs = [Paraphrase(str(n), str(n + 1), draw.randrange(2)) for n in range(14)]
    rows = PairRows.of(pairs, lambda lines: [sentences[int(n)] for n in lines], VOCABULARY, 14)
    batches = [rows(torch.arange(a, a + 7), generator(0)) for a in (0, 7)]
    assert_equal_to_one_device(float64_model(PAIRS_MODEL), batches, nn.CrossEntropyLoss())


def test_masked_text_trains_as_on_one_device():
    draw = random.Random(3)
    text = [draw.randrange(4, 60) for _ in range(14 * 10)]
    make = partial(mask_pieces, segments([text], 12, VOCABULARY), VOCABULARY)
    batches = [make(torch.arange(a, a + 7), generator(a)) for a in (0, 7)]
    batches[0][1][:2] = -100  # micro-batches with fewer hidden pieces weigh less
    batches[0][1][0, 1] = 5
    assert_equal_to_one_device(
        float64_model(MASKED_MODEL), batches, TokenLoss(), loss_weight=TokenLoss().weight
    )


# ---- the published size --------------------------------------------------------------------------------------------


@pytest.mark.slow
@pytest.mark.parametrize(("kind", "parameters"), [(PAIRS_MODEL, 109_483_778), (MASKED_MODEL, 109_514_298)])
def test_paper_is_bert_base(kind, parameters):
    preset = PRESETS["bert"]["paper"]
    task = preset.pairs if kind == PAIRS_MODEL else preset.masked
    with torch.device("meta"):
        model = new_model(kind, task.config(30_522))
        tokens = torch.ones(2, task.length, dtype=torch.int64)
        inputs = {"input_ids": tokens, "token_type_ids": tokens}
        assert sum(p.numel() for p in model.parameters()) == parameters
        layers = layers_of(model)
        for stages in (2, 4):
            value = inputs if kind == PAIRS_MODEL else tokens
            bounds = stage_bounds(layers, stages, None)
            for begin, end in pairwise(bounds):
                for layer in layers[begin:end]:
                    value = layer(value)
            loss = nn.CrossEntropyLoss() if kind == PAIRS_MODEL else TokenLoss()
            loss(value, tokens[:, 0] if kind == PAIRS_MODEL else tokens).backward()
    facts = check_workload("bert", preset="paper")
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
    assert check_workload("bert", data=pairs_folder, pretrained=pretrained).layers == 3 + 2


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
        (lambda f: (f / "config.json").unlink(), r"lacks config\.json; give one that save_pretrained"),
        (lambda f: (f / "model.safetensors").unlink(), r"lacks model\.safetensors; give"),
        (lambda f: (f / "vocab.txt").unlink(), r"lacks tokenizer\.json; give"),
        (lambda f: rewrite(f, model_type="gpt2"), "holds a model of type 'gpt2', not 'bert'"),
        (lambda f: (f / "config.json").write_text("{"), "config.json cannot be read"),
        (
            lambda f: (f / "vocab.txt").write_text("\n".join([*WORDS, "more"])),
            "has 46 pieces and its model only 45",
        ),
        (
            lambda f: rewrite(f, num_hidden_layers=4),
            "lack 16 of a bert's tensors, such as bert.encoder.layer.3",
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
        check_pretrained("bert-base-uncased", "bert")


# ---- bad data ------------------------------------------------------------------------------------------------------


def test_a_folder_with_neither_kind_of_data_is_refused(tmp_path):
    with pytest.raises(DataNotFound, match=rf"lacks train.txt.*or with sentence pairs: {MRPC_FILES[0]}"):
        check_workload("bert", data=tmp_path)


def test_missing_pair_files_are_named(pairs_folder):
    (pairs_folder / MRPC_FILES[1]).unlink()
    with pytest.raises(DataNotFound, match=r"lacks dev_ids\.tsv"):
        check_workload("bert", data=pairs_folder)


def test_a_text_shorter_than_a_segment_is_refused(small, text_folder):
    (text_folder / "valid.txt").write_text("w1\n")
    with pytest.raises(ValueError, match="fills no segment of 14"):
        rebuild(data=text_folder)


def test_without_transformers_the_way_out_is_named(monkeypatch):
    monkeypatch.setitem(sys.modules, "transformers", None)
    with pytest.raises(LibraryNotFound, match=r"bert needs transformers.*pip install"):
        check_workload("bert")


# ---- masked text ---------------------------------------------------------------------------------------------------


def text(pieces, seed=0):
    return torch.randint(4, 1000, (pieces,), generator=torch.Generator().manual_seed(seed)).tolist()


def draw(seed=0):
    return torch.Generator().manual_seed(seed)


def test_segments_follow_the_text_over_its_lines():
    rows = segments([[10, 11, 12], [], [13, 14], [15, 16]], 5, MANY)
    assert rows.tolist() == [[1, 10, 11, 12, 2], [1, 13, 14, 15, 2]]  # 16 fills no row


@pytest.mark.parametrize(
    ("lines", "length", "message"),
    [
        ([[4, 5]], 5, "a text of 2 pieces fills no segment of 3"),
        ([], 5, "a text of 0 pieces fills no segment"),
    ],
)
def test_segments_refuse_what_fills_none(lines, length, message):
    with pytest.raises(ValueError, match=message):
        segments(lines, length, MANY)


def test_shares_of_hidden_pieces_are_the_papers():
    rows = segments([text(62 * 2000)], 64, MANY)
    read, targets = mask_pieces(rows, MANY, torch.arange(len(rows)), draw())
    hidden = targets != IGNORED
    assert (hidden.sum(1) == 9).all()  # 15 % of 62, rounded
    assert torch.equal(targets[hidden], rows[hidden])
    assert torch.equal(read[~hidden], rows[~hidden])
    n = int(hidden.sum())
    masked = int((read[hidden] == MANY.mask).sum())
    same = int((read[hidden] == rows[hidden]).sum())
    for count, share in ((masked, 0.8), (same, 0.1), (n - masked - same, 0.1)):
        assert abs(count / n - share) < 4.5 * math.sqrt(share * (1 - share) / n) + 0.001


def test_every_place_is_hidden_alike_and_special_pieces_never():
    rows = segments([text(18 * 4000)], 20, MANY)
    rows[:, 15:17] = torch.tensor([MANY.end, MANY.begin])
    _, targets = mask_pieces(rows, MANY, torch.arange(len(rows)), draw())
    often = (targets != IGNORED).double().mean(0)
    special = torch.tensor([0, 15, 16, 19])
    assert (often[special] == 0).all()
    others = often[torch.tensor([i for i in range(20) if i not in special])]
    assert (others - 2 / 16).abs().max() < 4.5 * math.sqrt(0.125 * 0.875 / 4000)


def test_any_piece_replaces_some():
    rows = segments([text(98 * 1000)], 100, MANY)
    read, targets = mask_pieces(rows, MANY, torch.arange(len(rows)), draw())
    other = (targets != IGNORED) & (read != MANY.mask) & (read != rows)
    replaced = read[other].double()
    assert replaced.min() >= 0
    assert replaced.max() < MANY.size
    assert abs(replaced.mean() - 500) < 4.5 * 289 / math.sqrt(replaced.numel())


def test_each_row_hides_at_least_one_piece():
    rows = torch.tensor([[1, 7, 2, 0, 0]] * 50)
    _, targets = mask_pieces(rows, MANY, torch.arange(len(rows)), draw())
    assert (targets == torch.tensor([IGNORED, 7, IGNORED, IGNORED, IGNORED])).all()


def test_what_is_hidden_follows_from_seed_epoch_and_batch_alone():
    rows = segments([text(14 * 40)], 16, MANY)

    def batches(**which):
        return SampleBatches(torch.arange(40), 8, partial(mask_pieces, rows, MANY), **which)

    first = list(batches(seed=1, epoch=2))
    again = list(batches(seed=1, epoch=2, start=3))
    for a, b in zip(first[3:], again):
        assert torch.equal(a[0], b[0])
        assert torch.equal(a[1], b[1])
    for other in ({"seed": 1, "epoch": 3}, {"seed": 2, "epoch": 2}):
        assert not torch.equal(first[0][1], batches(**other)[0][1])
    assert not torch.equal(first[0][1] == IGNORED, first[1][1] == IGNORED)


def test_evaluation_hides_the_same_whatever_the_batch_size():
    rows = segments([text(14 * 20)], 16, MANY)
    read = {}
    for size in (3, 20):
        make = pickle.loads(
            pickle.dumps(TensorRows(mask_pieces(rows, MANY, torch.arange(len(rows)), draw())))
        )
        batches = SampleBatches(torch.arange(20), size, make, seed=size)
        read[size] = [torch.cat(parts) for parts in zip(*batches)]
    assert torch.equal(read[3][0], read[20][0])
    assert torch.equal(read[3][1], read[20][1])


def test_loss_and_metrics_are_those_of_a_plain_count():
    rows = segments([text(14 * 6)], 16, MANY)
    _, targets = mask_pieces(rows, MANY, torch.arange(len(rows)), draw())
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
    loss_fn = TokenLoss()
    assert loss_fn.weight(targets) == len(losses)
    loss = float(loss_fn(logits, targets))
    assert loss == pytest.approx(sum(losses) / len(losses))
    means = {name: float(value) for name, value in loss_fn.correct(logits, targets).items()}
    metrics = token_metrics(loss, means)
    assert metrics["perplexity"] == pytest.approx(math.exp(loss))
    assert metrics["accuracy"] == pytest.approx(100 * told / len(losses))


# ---- sentence pairs ------------------------------------------------------------------------------------------------


def test_a_pair_is_joined_with_special_pieces():
    pieces, types = joined([10, 11], [20], VOCABULARY, 16)
    assert pieces == [1, 10, 11, 2, 20, 2]
    assert types == [0, 0, 0, 0, 1, 1]


def test_the_longer_sentence_loses_pieces_first():
    draw = random.Random(0)
    for _ in range(200):
        first = list(range(10, 10 + draw.randrange(1, 12)))
        second = list(range(50, 50 + draw.randrange(1, 12)))
        length = draw.randrange(5, 24)
        a, b = first[:], second[:]
        while len(a) + len(b) > length - 3:  # one at a time, of equals the second
            (a if len(a) > len(b) else b).pop()
        pieces, types = joined(first, second, VOCABULARY, length)
        assert pieces == [1, *a, 2, *b, 2]
        assert types == [0] * (len(a) + 2) + [1] * (len(b) + 1)


def test_batches_are_padded_to_their_longest_pair():
    def encode(lines):
        return [[10 + len(word) for word in line.split()] for line in lines]

    pairs = [
        Paraphrase("a", "bb", 1),
        Paraphrase("a bb ccc", "a", 0),
        Paraphrase("a b c d e", "f g", 1),
    ]
    rows = pickle.loads(pickle.dumps(PairRows.of(pairs, encode, VOCABULARY, 32)))
    assert rows.pieces.lengths.tolist() == [5, 7, 10]
    inputs, labels = rows(torch.tensor([1, 0]), torch.Generator())
    assert inputs["input_ids"].tolist() == [[1, 11, 12, 13, 2, 11, 2], [1, 11, 2, 12, 2, 0, 0]]
    assert inputs["attention_mask"].tolist() == [[1] * 7, [1] * 5 + [0] * 2]
    assert inputs["token_type_ids"].tolist() == [[0, 0, 0, 0, 0, 1, 1], [0, 0, 0, 1, 1, 0, 0]]
    assert labels.tolist() == [0, 1]


def test_f1_is_that_of_a_plain_count():
    torch.manual_seed(0)
    logits, labels = torch.randn(23, 2), torch.randint(2, (23,))
    guesses = [int(b > a) for a, b in logits.tolist()]
    right = sum(g == t for g, t in zip(guesses, labels.tolist()))
    both = sum(g == t == 1 for g, t in zip(guesses, labels.tolist()))
    precision, recall = both / sum(guesses), both / int(labels.sum())
    means = {}
    for part in (slice(0, 10), slice(10, 23)):  # as an evaluation in two batches weighs them
        share = len(labels[part]) / 23
        for name, value in confusion(logits[part], labels[part]).items():
            means[name] = means.get(name, 0) + float(value) * share
    metrics = pair_metrics(0.7, means)
    assert metrics["accuracy"] == pytest.approx(100 * right / 23)
    assert metrics["f1"] == pytest.approx(100 * 2 * precision * recall / (precision + recall))


def test_f1_is_zero_without_paraphrases():
    means = confusion(torch.tensor([[1.0, 0.0]]), torch.tensor([0]))
    assert pair_metrics(0.0, {k: float(v) for k, v in means.items()}) == {"accuracy": 100.0, "f1": 0.0}
