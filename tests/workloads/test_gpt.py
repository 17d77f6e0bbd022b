import copy
import dataclasses
import math
from functools import partial
from itertools import pairwise

import pytest
import torch

from avgpipe import Pipeline, Plan
from avgpipe.runtime.model import layers_of, stage_bounds
from avgpipe.workloads.gpt import (
    MODEL,
    PRESETS,
    PieceLoss,
    blind_perplexity,
    build,
    check,
    pieces_and_words,
    predicted_pieces,
    word_perplexity,
)
from avgpipe.workloads.options import BuildOptions
from avgpipe.workloads.pretrained import GPT2, load_pretrained
from avgpipe.workloads.pretrained import new_model as new_model_of
from avgpipe.workloads.segments import IGNORED, Pieces
from avgpipe.workloads.text import DataNotFound, load_text
from tests.workloads.equality import assert_equal_to_one_device

transformers = pytest.importorskip("transformers")
pytest.importorskip("tokenizers")

new_model = partial(new_model_of, MODEL)
TINY = PRESETS["gpt"]["tiny"]
REDUCED = dataclasses.replace(TINY, hidden=16, layers=2, heads=2, vocabulary=300, length=12)


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
    options = BuildOptions(data=text_folder, batch_size=25, epochs=2, pipelines=2)
    workload = build("gpt", options)
    facts = check("gpt", options)
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
        loss_weight=workload.loss_weight,
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
    first, second = (build("gpt", BuildOptions(data=text_folder, seed=3, pipelines=n)) for n in (1, 2))
    other = build("gpt", BuildOptions(data=text_folder, seed=4))
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


def test_the_standard_library_is_read_without_a_folder(monkeypatch):
    monkeypatch.setitem(PRESETS["gpt"], "tiny", dataclasses.replace(REDUCED, max_bytes=60_000))
    workload = build("gpt", BuildOptions())
    inputs, (target, words) = next(iter(workload.test_batches()))
    assert inputs.shape == target.shape == (TINY.training.batch_size, REDUCED.length)
    assert 0 < float(words.sum()) < target.numel()
    assert "Python" in workload.title


# ---- loss and metric -----------------------------------------------------------------------------------------------


def test_the_loss_is_the_mean_over_what_is_predicted():
    logits = torch.randn(2, 4, 7, dtype=torch.float64)
    target = torch.tensor([[1, 2, 3, 4], [5, IGNORED, IGNORED, IGNORED]])
    expected = [logits[b, t].exp().sum().log() - logits[b, t, v] for b, t, v in
                [(0, 0, 1), (0, 1, 2), (0, 2, 3), (0, 3, 4), (1, 0, 5)]]  # fmt: skip
    loss = PieceLoss()
    assert float(loss(logits, target)) == pytest.approx(float(sum(expected)) / 5, rel=1e-12)
    assert torch.equal(loss(logits, (target, torch.ones(2))), loss(logits, target))
    assert loss(logits.bfloat16(), target).dtype == torch.float32
    assert predicted_pieces(target) == predicted_pieces((target, torch.ones(2))) == 5


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
        numbers = torch.randint(4, REDUCED.vocabulary, (rows, REDUCED.length + 1), generator=draw)
        targets = numbers[:, 1:].clone()
        targets[-1, 3:] = IGNORED
        batches.append((numbers[:, :-1], targets))
    assert_equal_to_one_device(model, batches, PieceLoss(), loss_weight=predicted_pieces)


def test_paper_size_is_gpt_2_small():
    with torch.device("meta"):
        model = transformers.GPT2LMHeadModel(PRESETS["gpt"]["paper"].config())
    assert sum(p.numel() for p in model.parameters()) == 124_439_808  # the published 124 M
    assert model.lm_head.weight is model.transformer.wte.weight
    layers = layers_of(model)
    for stages in (2, 4):
        bounds = stage_bounds(layers, stages, None)
        assert len(bounds) == stages + 1
        costs = [sum(layer.compute_cost for layer in layers[a:b]) for a, b in pairwise(bounds)]
        assert max(costs) < 1.5 * sum(costs) / stages
    value = torch.zeros(2, 1024, dtype=torch.int64, device="meta")
    target = value
    for layer in layers:
        value = layer(value)
    assert value.shape == (2, 1024, 50_257)
    PieceLoss()(value, target).backward()
    assert all(p.grad is not None and p.grad.shape == p.shape for p in model.parameters())


def test_presets_name_what_their_facts_say():
    for preset, chosen in PRESETS["gpt"].items():
        facts = check("gpt", BuildOptions(preset=preset))
        assert (facts.name, facts.preset) == ("gpt", preset)
        assert facts.layers == chosen.layers + 2
        assert chosen.autocast["cuda"] == torch.bfloat16


# ---- pretrained ----------------------------------------------------------------------------------------------------


def test_a_pretrained_folder_brings_its_weights_and_its_pieces(text_folder, tmp_path):
    original = pretrained_folder(tmp_path / "gpt")
    options = BuildOptions(data=text_folder, pretrained=tmp_path / "gpt")
    workload = build("gpt", options)
    assert check("gpt", options).layers == len(layers_of(workload.layers)) == 3 + 2
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
            load_pretrained(GPT2, MODEL, folder)
        assert "\n" not in str(caught.value)

    refused(tmp_path / "nowhere", "nowhere does not exist; give one that save_pretrained", DataNotFound)
    refused(tmp_path, r"lacks the configuration: config\.json", DataNotFound)
    pretrained_folder(tmp_path / "other")
    config = tmp_path / "other" / "config.json"
    config.write_text(config.read_text().replace('"gpt2"', '"bert"'))
    refused(tmp_path / "other", "holds a model of type 'bert', not a GPT-2")
    config.write_text("{")
    refused(tmp_path / "other", r"config\.json cannot be read")
    pretrained_folder(tmp_path / "small", pieces=200)
    refused(tmp_path / "small", r"has 2\d\d pieces and its model only 200")
    pretrained_folder(tmp_path / "deeper")
    config = tmp_path / "deeper" / "config.json"
    config.write_text(config.read_text().replace('"n_layer": 3', '"n_layer": 4'))
    refused(tmp_path / "deeper", r"lack \d+ of a GPT-2's tensors, such as transformer\.h\.3")
    weights = tmp_path / "deeper" / "model.safetensors"
    weights.write_bytes(weights.read_bytes()[:1000])
    refused(tmp_path / "deeper", "cannot be loaded as GPT2LMHeadModel: ")


def test_bad_data_is_refused_in_one_line(text_folder, tmp_path):
    with pytest.raises(DataNotFound, match="does not exist"):
        check("gpt", BuildOptions(data=tmp_path / "nowhere"))
    (text_folder / "test.txt").write_text("")
    with pytest.raises(ValueError, match=r"test\.txt has no words") as caught:
        build("gpt", BuildOptions(data=text_folder))
    assert "\n" not in str(caught.value)
    (text_folder / "test.txt").unlink()
    with pytest.raises(DataNotFound, match=r"lacks test\.txt"):
        check("gpt", BuildOptions(data=text_folder))


def test_the_trivial_answer_knows_the_frequencies_alone():
    train = Pieces(torch.tensor([0, 0, 1]), torch.zeros(3))
    held_out = Pieces(torch.tensor([0, 2]), torch.tensor([0.5, 0.5]))  # one word
    # counts plus one: 3, 2, 1 of 6
    assert blind_perplexity(train, held_out) == pytest.approx(6 / 3 * 6 / 1, rel=1e-5)
