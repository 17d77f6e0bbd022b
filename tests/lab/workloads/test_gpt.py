import copy
import dataclasses
import math
import os
from functools import partial
from itertools import pairwise
from pathlib import Path

import pytest
import torch

from avgpipe import Pipeline, Plan, Source
from avgpipe.model.layers import layers_of
from avgpipe.model.model import stage_bounds
from avgpipe.tasks import DataNotFound, build_workload, check_workload
from avgpipe_lab.workloads.data import load_text, read_text
from avgpipe_lab.workloads.gpt import (
    MODEL,
    PRESETS,
    Pieces,
    baseline_perplexity,
    pieces_and_words,
    pieces_of,
    segments,
    word_perplexity,
)
from avgpipe_lab.workloads.huggingface import Subwords, load_pretrained
from avgpipe_lab.workloads.huggingface import new_model as new_model_of
from avgpipe_lab.workloads.tokens import IGNORED, TokenLoss
from tests.lab.workloads.equality import assert_equal_to_one_device

transformers = pytest.importorskip("transformers")
pytest.importorskip("tokenizers")

new_model = partial(new_model_of, MODEL)
TINY = PRESETS["gpt"]["tiny"]
SIZES = {"n_embd": 16, "n_layer": 2, "n_head": 2, "vocab_size": 300, "n_positions": 12}
REDUCED = dataclasses.replace(TINY, model={**TINY.model, **SIZES})


@pytest.fixture
def reduced(monkeypatch):
    """The preset tiny with a very small model."""
    monkeypatch.setitem(PRESETS["gpt"], "tiny", REDUCED)


def pretrained_folder(folder, pieces=None, **config):
    """A GPT-2 of 300 pieces and its byte-level tokenizer, as their ``save_pretrained`` write them."""
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers

    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    trainer = trainers.BpeTrainer(vocab_size=300, initial_alphabet=alphabet, show_progress=False)
    tokenizer.train_from_iterator(["w1 w2 w3 w10 w20 w30 <unk>\n"], trainer)
    transformers.PreTrainedTokenizerFast(tokenizer_object=tokenizer).save_pretrained(folder)
    config = {
        "vocab_size": pieces or 300,
        "n_positions": 10,
        "n_embd": 16,
        "n_layer": 3,
        "n_head": 2,
        **config,
    }
    model = transformers.GPT2LMHeadModel(transformers.GPT2Config(**config))
    model.save_pretrained(folder)
    return model


def test_a_built_workload_reads_every_word_and_learns(text_folder, reduced):
    options = {"data": text_folder, "batch_size": 25, "epochs": 2, "pipelines": 2}
    workload = build_workload("gpt", **options)
    facts = check_workload("gpt", **options)
    assert (facts.layers, facts.batch_size, facts.epochs) == (len(layers_of(workload.layers)), 25, 2)
    model = workload.layers.eval()
    words = pieces = 0.0
    nats = 0.0
    for inputs, target in workload.valid_batches():
        with torch.no_grad():
            loss = float(workload.loss_fn(model(inputs).logits, target))
        means = workload.metric_fn(None, target)
        nats += loss * workload.loss_weight(target)
        words += float(means["words"]) * len(inputs)
        pieces += float(means["pieces"]) * len(inputs)
    # all words but the share of the first piece, which nothing predicts
    assert len(load_text(text_folder).valid) - 1 < words < len(load_text(text_folder).valid)
    metrics = workload.metrics(nats / pieces, {"pieces": pieces, "words": words})
    assert metrics["perplexity"] == pytest.approx(math.exp(nats / words))
    assert workload.metric_name in metrics
    with Pipeline(
        copy.deepcopy(workload.layers),
        Plan(stages=2, micro_batches=3),
        loss_fn=workload.loss_fn,
        optimizer=workload.optimizer,
        extensions=[Source(loss_weight=workload.loss_weight)],
    ) as pipeline:
        result = pipeline.evaluate(workload.valid_batches(), workload.metric_fn)
    assert workload.metrics(result.loss, result.metric) == pytest.approx(metrics, rel=1e-4)
    optimizer = workload.optimizer(model.parameters())
    scheduler = workload.lr_scheduler(optimizer)
    losses = []
    for epoch in range(2):
        for inputs, target in workload.train_batches(epoch):
            loss = workload.loss_fn(model(inputs).logits, target)
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            scheduler.step()
            losses.append(float(loss.detach()))
    assert sum(losses[-5:]) < 0.9 * sum(losses[:5])


def test_the_same_batches_and_weights_in_every_process(text_folder, reduced):
    first, second = (build_workload("gpt", data=text_folder, seed=3, pipelines=n) for n in (1, 2))
    other = build_workload("gpt", data=text_folder, seed=4)
    for (x, y), (u, v) in zip(first.train_batches(1), second.train_batches(1), strict=True):
        assert torch.equal(x, u)
        assert torch.equal(y, v)
    rest = list(first.train_batches(1, start=2))
    assert all(torch.equal(a[0], b[0]) for a, b in zip(list(first.train_batches(1))[2:], rest, strict=True))
    weights = [w.layers.state_dict()["transformer.wte.weight"] for w in (first, second, other)]
    assert torch.equal(weights[0], weights[1])
    assert not torch.equal(weights[0], weights[2])


def test_initial_weights_leave_the_callers_random_state():
    before = torch.get_rng_state()
    new_model(REDUCED.config(), seed=7)
    assert torch.equal(torch.get_rng_state(), before)


@pytest.mark.slow
def test_the_standard_library_is_read_without_a_folder(monkeypatch):
    monkeypatch.setitem(PRESETS["gpt"], "tiny", dataclasses.replace(REDUCED, max_bytes=60_000))
    workload = build_workload("gpt")
    inputs, (target, words) = next(iter(workload.valid_batches()))
    assert inputs.shape == target.shape == (TINY.training.batch_size, 12)
    assert 0 < float(words.sum()) < target.numel()
    assert "Python" in workload.title


# ---- loss and metric -----------------------------------------------------------------------------------------------


def test_the_loss_is_the_mean_over_what_is_predicted():
    logits = torch.randn(2, 4, 7, dtype=torch.float64)
    target = torch.tensor([[1, 2, 3, 4], [5, IGNORED, IGNORED, IGNORED]])
    expected = [logits[b, t].exp().sum().log() - logits[b, t, v] for b, t, v in
                [(0, 0, 1), (0, 1, 2), (0, 2, 3), (0, 3, 4), (1, 0, 5)]]  # fmt: skip
    loss = TokenLoss()
    assert float(loss(logits, target)) == pytest.approx(float(sum(expected)) / 5, rel=1e-12)
    assert torch.equal(loss(logits, (target, torch.ones(2))), loss(logits, target))
    assert loss(logits.bfloat16(), target).dtype == torch.float32
    assert loss.weight(target) == loss.weight((target, torch.ones(2))) == 5


def test_perplexity_is_per_word():
    target = torch.tensor([[1, 2, 3, 4], [5, IGNORED, IGNORED, IGNORED]])
    means = {k: float(v) for k, v in pieces_and_words(None, (target, torch.tensor([1.5, 0.5]))).items()}
    assert means == {"pieces": 2.5, "words": 1.0}
    found = word_perplexity(2.0, means)
    assert found == {
        "perplexity": pytest.approx(math.exp(2.0 * 5 / 2)),
        "piece_perplexity": pytest.approx(math.exp(2)),
    }
    assert word_perplexity(1e4, means)["perplexity"] == math.inf


# ---- the model -----------------------------------------------------------------------------------------------------


def test_stages_train_as_one_device():
    model = new_model(REDUCED.config()).double()
    draw = torch.Generator().manual_seed(1)
    batches = []
    for rows in (6, 5, 4):
        numbers = torch.randint(4, 300, (rows, 12 + 1), generator=draw)
        targets = numbers[:, 1:].clone()
        targets[-1, 3:] = IGNORED
        batches.append((numbers[:, :-1], targets))
    assert_equal_to_one_device(model, batches, TokenLoss(), loss_weight=TokenLoss().weight)


def test_paper_size_is_gpt_2_small():
    with torch.device("meta"):
        model = transformers.GPT2LMHeadModel(PRESETS["gpt"]["paper"].config())
    assert sum(p.numel() for p in model.parameters()) == 124_439_808  # the published 124 M
    assert model.lm_head.weight is model.transformer.wte.weight
    layers = layers_of(model)
    for stages in (2, 4):
        bounds = stage_bounds(layers, stages, None)
        assert len(bounds) == stages + 1
        looked_up = {
            id(p) for m in model.modules() if isinstance(m, torch.nn.Embedding) for p in m.parameters()
        }
        weights = [
            {id(p): p.numel() for layer in layers[a:b] for p in layer.parameters()}
            for a, b in pairwise(bounds)
        ]
        costs = [sum(of.values()) for of in weights]  # the head multiplies with the table, and is in the last
        costs[0] -= sum(n for tensor, n in weights[0].items() if tensor in looked_up)
        assert max(costs) < 1.5 * sum(costs) / stages
    assert {id(p) for layer in layers for p in layer.parameters()} == {id(p) for p in model.parameters()}


def test_presets_name_what_their_facts_say():
    for preset, chosen in PRESETS["gpt"].items():
        facts = check_workload("gpt", preset=preset)
        assert (facts.name, facts.preset) == ("gpt", preset)
        assert facts.layers == chosen.model["n_layer"] + 2


# ---- pretrained ----------------------------------------------------------------------------------------------------


def test_a_pretrained_folder_brings_its_weights_and_its_pieces(text_folder, tmp_path):
    original = pretrained_folder(tmp_path / "gpt")
    options = {"data": text_folder, "pretrained": tmp_path / "gpt"}
    workload = build_workload("gpt", **options)
    assert check_workload("gpt", **options).layers == len(layers_of(workload.layers)) == 3 + 2
    state = original.state_dict()
    assert all(torch.equal(v, state[k]) for k, v in workload.layers.state_dict().items())
    inputs, _ = next(iter(workload.valid_batches()))
    assert inputs.shape[1] == 10  # the model's positions are fewer than the preset's
    tokenizer = transformers.AutoTokenizer.from_pretrained(tmp_path / "gpt", local_files_only=True)
    read = tokenizer.decode(inputs.flatten().tolist())
    assert (text_folder / "valid.txt").read_text().startswith(read)


def test_bad_pretrained_folders_are_refused_in_one_line(tmp_path):
    def refused(folder, message, error=ValueError):
        with pytest.raises(error, match=message) as caught:
            load_pretrained(MODEL, folder, "gpt2")
        assert "\n" not in str(caught.value)

    refused(tmp_path / "nowhere", "nowhere does not exist; give one that save_pretrained", DataNotFound)
    refused(tmp_path, r"lacks config\.json, model\.safetensors, tokenizer\.json", DataNotFound)
    pretrained_folder(tmp_path / "other")
    config = tmp_path / "other" / "config.json"
    config.write_text(config.read_text().replace('"gpt2"', '"bert"'))
    refused(tmp_path / "other", "holds a model of type 'bert', not 'gpt2'")
    config.write_text("{")
    refused(tmp_path / "other", r"config\.json cannot be read")
    pretrained_folder(tmp_path / "small", pieces=200)
    refused(tmp_path / "small", r"has 2\d\d pieces and its model only 200")
    pretrained_folder(tmp_path / "deeper")
    config = tmp_path / "deeper" / "config.json"
    config.write_text(config.read_text().replace('"n_layer": 3', '"n_layer": 4'))
    refused(tmp_path / "deeper", r"lack \d+ of a gpt2's tensors, such as transformer\.h\.3")
    weights = tmp_path / "deeper" / "model.safetensors"
    weights.write_bytes(weights.read_bytes()[:1000])
    refused(tmp_path / "deeper", "cannot be loaded as GPT2LMHeadModel: ")


def test_bad_data_is_refused_in_one_line(text_folder, tmp_path):
    with pytest.raises(DataNotFound, match="does not exist"):
        check_workload("gpt", data=tmp_path / "nowhere")
    (text_folder / "valid.txt").write_text("")
    with pytest.raises(ValueError, match=r"valid\.txt has no words") as caught:
        build_workload("gpt", data=text_folder)
    assert "\n" not in str(caught.value)
    (text_folder / "valid.txt").unlink()
    with pytest.raises(DataNotFound, match=r"lacks valid\.txt"):
        check_workload("gpt", data=text_folder)


def test_the_trivial_answer_knows_the_frequencies_alone():
    train = Pieces(torch.tensor([0, 0, 1]), torch.zeros(3))
    held_out = Pieces(torch.tensor([0, 2]), torch.tensor([0.5, 0.5]))  # one word
    # counts plus one: 3, 2, 1 of 6
    assert baseline_perplexity(train, held_out) == pytest.approx(6 / 3 * 6 / 1, rel=1e-5)


# ---- the text ------------------------------------------------------------------------------------------------------


def pieces(count):
    return Pieces(torch.arange(100, 100 + count), torch.full((count,), 0.5))


def letters(lines):
    return [[ord(sign) for sign in line + "\n"] for line in lines]


@pytest.mark.parametrize(("count", "length"), [(13, 4), (13, 1), (13, 12), (13, 40), (14, 4), (2, 3)])
def test_every_piece_but_the_first_is_predicted_once_from_the_one_before(count, length):
    inputs, targets, words = segments(pieces(count), length)
    assert inputs.shape == targets.shape == (-(-(count - 1) // length), length)
    there = targets != IGNORED
    assert torch.equal(targets[there], torch.arange(101, 100 + count))
    assert torch.equal(inputs[there] + 1, targets[there])
    assert inputs.min() >= 100  # what fills the last segment up is a piece too
    assert bool(there[:-1].all())
    assert float(words.sum()) == (count - 1) / 2


def test_words_go_with_the_pieces_that_are_predicted():
    _, targets, words = segments(Pieces(torch.arange(6), torch.tensor([9.0, 1, 2, 3, 4, 5])), 3)
    assert targets.tolist() == [[1, 2, 3], [4, 5, IGNORED]]
    assert words.tolist() == [6.0, 9.0]


def test_a_text_with_nothing_to_predict_is_refused():
    with pytest.raises(ValueError, match="at least 2 pieces to predict one, and this has 1"):
        segments(pieces(1), 4)


def test_words_are_spread_over_the_pieces_of_their_line():
    text = pieces_of("ab c\n\nd\n", letters)
    assert text.numbers.tolist() == [ord(sign) for sign in "ab c\n\nd\n"]
    assert text.words.tolist() == pytest.approx([3 / 5] * 5 + [1.0] + [1.0, 1.0])


def test_words_of_a_program_are_those_of_its_corpus():
    text = pieces_of("def f(x):\n\n    return x\n", letters, source=True)
    # def f ( x ) : <eos>, nothing, indentation return x <eos>
    assert float(text.words.sum()) == pytest.approx(7 + 0 + 4)
    assert text.words[10] == 0


def test_batches_spell_the_text(text_folder, reduced):
    workload = build_workload("gpt", data=text_folder)
    text = (text_folder / "train.txt").read_text()
    subwords = Subwords.learn(text.split("\n"), 300)
    rows, row = [], []
    for inputs, (targets, _) in workload.valid_batches():
        for number in (inputs[:1, 0].tolist() if not rows else []) + targets.flatten().tolist():
            if number == Subwords.end:
                rows, row = [*rows, row], []
            elif number != IGNORED:
                row.append(number)
    assert not row
    assert "\n".join(subwords.decode(rows)) + "\n" == (text_folder / "valid.txt").read_text()


def test_wikitext_2_has_its_published_words():
    data = os.environ.get("AVGPIPE_DATA")
    if not data:
        pytest.skip("set AVGPIPE_DATA to the folder with wikitext-2")
    words = pieces_of(read_text(Path(data) / "wikitext-2")["valid"], letters).words.double().sum()
    assert float(words) == pytest.approx(217_646, abs=0.5)
