import math
import pickle
from dataclasses import replace

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from avgpipe import Pipeline, Plan, Source
from avgpipe.model.model import Model
from avgpipe.tasks import build_workload, check_workload
from avgpipe_lab.workloads import captioning
from avgpipe_lab.workloads.batches import generator
from avgpipe_lab.workloads.captioning import (
    BOS,
    EOS,
    PAD,
    PRESETS,
    VOCABULARY,
    CaptioningPreset,
    S2VTConfig,
    baseline_accuracy,
    exact_matches,
    make_clips,
    s2vt_layers,
)
from avgpipe_lab.workloads.recipe import Recipe
from avgpipe_lab.workloads.tokens import TokenLoss
from tests.lab.workloads.equality import assert_equal_to_one_device
from tests.lab.workloads.lowprec import needs_bfloat16_lstm

LOSS = TokenLoss(PAD)
SMALL = S2VTConfig(vocabulary=13, features=6, embedding=5, hidden=7)
DEEP = replace(SMALL, video_lstms=2)


def preset(train=30, valid=10, features=16, **options):
    training = Recipe(8, 12, "adamw", lr=0.01, clip_grad_norm=1.0, warmup=0.05)
    model = S2VTConfig(len(VOCABULARY), features=features, embedding=48, hidden=48)
    return CaptioningPreset(model, training, train, valid, **{"decoded": 20, **options})


@pytest.fixture
def quick(monkeypatch):
    """The preset "tiny" with less of everything."""
    chosen = preset(400, 60, 24, noise=0.1, events=(1, 1), frames=(2, 3))
    monkeypatch.setitem(PRESETS["captioning"], "tiny", chosen)
    return chosen


# ---- the clips -----------------------------------------------------------------------------------------------------


def frames(clips, index):
    return clips(torch.tensor([index]), generator(0))[0]["frames"][0]


def captions(clips):
    return clips.captions.padded(torch.arange(len(clips.captions.lengths)))


def told(clips):
    return [" ".join(VOCABULARY[n] for n in row if n not in (PAD, EOS)) for row in captions(clips).tolist()]


def test_clips_are_the_same_whatever_the_caller_draws():
    torch.manual_seed(1)
    a = make_clips(preset())
    torch.manual_seed(2)
    b = make_clips(preset())
    assert torch.initial_seed() == 2
    for one, other in zip(a, b):
        assert torch.equal(captions(one), captions(other))
        assert torch.equal(frames(one, 7), frames(other, 7))


def test_a_clip_is_the_same_in_every_company_and_padded_with_zeros():
    clips, _ = make_clips(preset())
    together = clips(torch.tensor([3, 7, 1]), generator(0))[0]["frames"]
    for row, index in enumerate((3, 7, 1)):
        alone = frames(clips, index)
        assert torch.equal(together[row, : len(alone)], alone)
        assert len(alone) == clips.shown.lengths[index]
        assert not together[row, len(alone) :].any()


def test_no_script_is_in_two_clips():
    scripts = [
        s.replace(" slowly", "") for c in make_clips(preset(2000, 300, 2, events=(1, 2))) for s in told(c)
    ]
    assert len(set(scripts)) == len(scripts) == 2300


def test_captions_tell_what_the_frames_show():
    clips, _ = make_clips(preset(noise=0.0))
    for index, sentence in enumerate(told(clips)):
        # without noise a frame is a sum of few rows of the projection: those of its event's words
        seen, counts = torch.unique_consecutive(frames(clips, index), dim=0, return_counts=True)
        parts = sentence.split(" then ")
        assert len(seen) == len(parts)
        who = ""
        for features, count, part in zip(seen, counts, parts):
            who = who if part.startswith("it ") else " ".join(part.split()[1:3])
            words = [w for w in f"{who} {part}".split() if w not in ("a", "the", "it", "slowly")]
            rows = sorted({VOCABULARY.index(w) for w in words})
            assert torch.allclose(clips.projection[rows].sum(0), features, atol=1e-5)
            assert (count in (6, 8, 10)) if part.endswith("slowly") else (count in (3, 4, 5))


def test_a_subject_that_goes_on_is_called_it():
    again = 0
    for sentence in told(make_clips(preset(300, 1, 2, events=(2, 2)))[0]):
        first, second = sentence.split(" then ")
        again += second.startswith("it ")
        assert second.startswith("it ") or second.split()[1:3] != first.split()[1:3]
    assert 60 < again < 180


def test_a_batch_is_no_longer_than_its_clips_and_can_be_made_elsewhere():
    clips = pickle.loads(pickle.dumps(make_clips(preset())[0]))
    indices = clips.shown.lengths.argsort()[:4]
    inputs, said = clips(indices, generator(0))
    assert inputs["frames"].shape == (4, clips.shown.lengths[indices].max(), 16)
    assert said.shape == inputs["target"].shape == (4, clips.captions.lengths[indices].max())
    for row, read in zip(said, inputs["target"]):  # what a decoder reads is what was said before
        words = row[row != PAD].tolist()
        assert words[-1] == EOS
        assert read[: len(words)].tolist() == [BOS, *words[:-1]]
        assert not read[len(words) :].any()


def test_noise_is_what_was_asked_for_and_differs_between_sets():
    clean, noisy = (make_clips(preset(features=400, noise=noise)) for noise in (0.0, 2.0))
    noise = [frames(b, 0) - frames(a, 0) for a, b in zip(clean, noisy)]
    assert noise[0].std() == pytest.approx(2.0, rel=0.1)
    assert not torch.allclose(noise[0][0], noise[1][0])


# ---- the model -----------------------------------------------------------------------------------------------------


def model(config, seed=1):
    return nn.Sequential(*s2vt_layers(config, seed=seed)).double()


def batch(b=5, frames=6, words=4, seed=0):
    draw = torch.Generator().manual_seed(seed)
    lengths = torch.randint(1, frames + 1, (b,), generator=draw)
    lengths[0] = frames
    inputs = {
        "frames": torch.randn(b, frames, 6, generator=draw, dtype=torch.float64),
        "lengths": lengths,
        "target": torch.randint(1, 13, (b, words), generator=draw),
    }
    said = torch.randint(1, 13, (b, words), generator=draw)
    for row in range(1, b):
        said[row, words - row % words :] = PAD
    return inputs, said


def lstm_by_hand(layer, xs):
    h = c = torch.zeros(layer.weight_hh.shape[1], dtype=torch.float64)
    out = []
    for x in xs:
        i, f, g, o = (layer.weight_ih @ x + layer.weight_hh @ h + layer.bias).chunk(4)
        c = f.sigmoid() * c + i.sigmoid() * g.tanh()
        h = o.sigmoid() * c.tanh()
        out.append(h)
    return out


def s2vt_by_hand(layers, frames, words):
    """Section 3.2 word for word, for one clip without padding."""
    embedding, first, second, output = layers
    zeros = torch.zeros(5, dtype=torch.float64)
    video = [embedding.weight @ frame + embedding.bias for frame in frames] + [zeros] * len(words)
    text = [zeros] * len(frames) + [second.embedding[word] for word in words]
    h1 = lstm_by_hand(first.lstm, video)
    h2 = lstm_by_hand(second.lstm, [torch.cat(pair) for pair in zip(h1, text)])
    return torch.stack([output.weight @ h + output.bias for h in h2[len(frames) :]])


def test_layers_compute_the_papers_model_for_each_clip():
    layers = model(SMALL)
    inputs, _ = batch()
    logits = layers(inputs)
    assert logits.shape == (5, 4, 13)
    for row, length in enumerate(inputs["lengths"].tolist()):
        expected = s2vt_by_hand(layers, inputs["frames"][row, :length], inputs["target"][row])
        assert torch.allclose(logits[row], expected, rtol=0, atol=1e-12)


@pytest.mark.parametrize("config", [SMALL, DEEP])
def test_padding_of_frames_and_words_changes_nothing(config):
    layers = model(config)
    inputs, _ = batch()
    logits = layers(inputs)
    padded = {
        "frames": F.pad(inputs["frames"], (0, 0, 0, 3)),
        "lengths": inputs["lengths"],
        "target": F.pad(inputs["target"], (0, 2)),
    }
    for row, length in enumerate(inputs["lengths"].tolist()):
        padded["frames"][row, length:] = 1e6 * (row + 1)  # whatever may be there
    assert torch.allclose(layers(padded)[:, :4], logits, rtol=0, atol=1e-12)


def test_a_word_depends_on_all_frames_and_on_no_later_word():
    layers = model(SMALL)
    inputs, _ = batch(b=2)
    seen = inputs["frames"].requires_grad_()
    logits = layers(inputs)
    (gradient,) = torch.autograd.grad(logits[0, 0].sum(), seen)
    assert gradient[0].abs().sum(1).min() > 0
    assert not gradient[1].any()
    changed = {**inputs, "target": inputs["target"].clone()}
    changed["target"][:, 2] = inputs["target"][:, 2] % 12 + 1
    same = (layers(changed) == logits).all(2)
    assert same[:, :2].all()
    assert not same[:, 2:].any()


@pytest.mark.parametrize("config", [SMALL, DEEP])
def test_at_gives_the_logits_of_that_word_alone(config):
    layers = model(config)
    inputs, _ = batch()
    logits = layers(inputs)
    for at in range(4):
        alone = layers({**inputs, "at": at})
        assert alone.shape == (5, 13)
        assert torch.allclose(alone, logits[:, at], rtol=0, atol=1e-12)


def test_the_layer_before_the_output_passes_nothing_but_the_words_steps():
    layers = model(SMALL)
    inputs, _ = batch()
    assert layers[:3](inputs).shape == (5, 4, 7)
    assert layers[:3]({**inputs, "at": 2}).shape == (5, 7)
    assert set(layers[:1](inputs)) == {"x", "lengths", "target"}


@pytest.mark.parametrize("config", [SMALL, DEEP])
def test_pipelines_equal_one_device(config):
    layers = [layer.double() for layer in s2vt_layers(config, seed=2)]
    batches = [batch(b, frames, words, seed=b) for b, frames, words in ((5, 6, 4), (6, 4, 3), (3, 5, 4))]
    assert_equal_to_one_device(layers, batches, LOSS, loss_weight=LOSS.weight)


def test_dropout_is_for_training_alone():
    layers, (inputs, _) = model(replace(SMALL, dropout=0.5)), batch()
    assert not torch.equal(layers(inputs), layers(inputs))
    assert torch.equal(layers.eval()(inputs), model(SMALL)(inputs))


@needs_bfloat16_lstm
def test_mixed_precision_stays_close():
    layers = model(SMALL).float()
    inputs, said = batch()
    inputs["frames"] = inputs["frames"].float()
    expected = layers(inputs)
    with torch.autocast("cpu", torch.bfloat16):
        logits = layers(inputs)
        LOSS(logits, said).backward()
    assert torch.allclose(logits.float(), expected, atol=0.02)


@pytest.mark.parametrize("stages", [2, 4])
def test_paper_size_is_cut_and_goes_forward_and_back_on_the_meta_device(stages):
    config = S2VTConfig(vocabulary=12_594)
    with torch.device("meta"):
        layers = s2vt_layers(config)
        value = {
            "frames": torch.empty(4, 6, 4096),
            "lengths": torch.empty(4, dtype=torch.int64),
            "target": torch.empty(4, 5, dtype=torch.int64),
        }
    # The paper gives no total; by its sizes: frames and words to 500 features, one bias per gate, output
    counted = sum(p.numel() for layer in layers for p in layer.parameters())
    embeddings = 4096 * 500 + 500 + 12_594 * 500
    lstms = 4 * 1000 * (500 + 1000 + 1) + 4 * 1000 * (1000 + 500 + 1000 + 1)
    assert counted == embeddings + lstms + 12_594 * 1001 == 36_960_094
    cut = Model.cut(layers, layers, stages, None)
    for k in range(stages):
        value = nn.Sequential(*layers[cut.bounds[k] : cut.bounds[k + 1]])(value)
    assert value.shape == (4, 5, 12_594)
    value.sum().backward()
    assert all(p.grad is not None for layer in layers for p in layer.parameters())


def test_lstms_run_over_frames_and_words():
    assert [layer.compute_cost for layer in s2vt_layers(SMALL)[1:3]] == [2 * 28 * 12, 2 * 28 * 19]


# ---- the workload --------------------------------------------------------------------------------------------------


def run(workload):
    layers = nn.Sequential(*workload.layers)
    optimizer = workload.optimizer(layers.parameters())
    scheduler = workload.lr_scheduler(optimizer)
    for epoch in range(workload.epochs):
        for inputs, said in workload.train_batches(epoch):
            workload.loss_fn(layers(inputs), said).backward()
            nn.utils.clip_grad_norm_(layers.parameters(), workload.clip_grad_norm)
            optimizer.step()
            optimizer.zero_grad()
            scheduler.step()
    return layers.eval()


@torch.no_grad()
def evaluate(workload, layers, batches):
    loss = words = samples = 0.0
    sums = {}
    for inputs, said in batches:
        output, n = layers(inputs), len(said)
        loss += float(workload.loss_fn(output, said)) * workload.loss_weight(said)
        words += workload.loss_weight(said)
        for name, value in workload.metric_fn(output, said).items():
            sums[name] = sums.get(name, 0.0) + float(value) * n
        samples += n
    return workload.metrics(loss / words, {name: value / samples for name, value in sums.items()})


def unigram_perplexity(train, valid):
    counts = torch.bincount(train.captions.values, minlength=100).double() + 1
    loss = -(counts / counts.sum()).log()[valid.captions.values].mean().item()
    return math.exp(loss)


@pytest.mark.slow
def test_a_built_workload_learns_far_more_than_frequencies(quick):
    workload = build_workload("captioning", seed=3)
    layers = run(workload)
    train, valid = make_clips(quick)
    answer, accuracy = workload.trivial
    assert answer == "the most frequent word of each position"
    assert accuracy == baseline_accuracy(captions(train), captions(valid))
    metrics = evaluate(workload, layers, workload.valid_batches())
    assert (workload.metric_name, workload.lower_is_better) == ("accuracy", False)
    assert metrics["accuracy"] > accuracy + 15
    assert metrics["perplexity"] < unigram_perplexity(train, valid) / 5
    batches = list(workload.valid_batches())
    for inputs, _ in batches:  # the frames of other clips
        inputs["frames"], inputs["lengths"] = inputs["frames"].flip(0), inputs["lengths"].flip(0)
    assert evaluate(workload, layers, batches)["accuracy"] < metrics["accuracy"] - 10
    with torch.no_grad():
        assert 0 <= workload.decode(layers)["exact_match"] <= 100
    assert "synthetic" in workload.title


def test_blind_accuracy_says_the_most_frequent_word_of_each_position():
    train, valid = map(captions, make_clips(preset(300, 40, 1)))
    right = words = 0
    for at in range(valid.shape[1]):
        column = [int(w) for w in train[:, at] if w != PAD] if at < train.shape[1] else []
        best = max(sorted(set(column)), key=column.count, default=None)
        said = [int(w) for w in valid[:, at] if w != PAD]
        right, words = right + said.count(best), words + len(said)
    assert baseline_accuracy(train, valid) == pytest.approx(100 * right / words)
    # captions that go on longer than all of training's cannot be guessed there
    assert 0 < baseline_accuracy(train[:, :2], valid) < baseline_accuracy(train, valid)


def test_exact_matches_are_whole_captions():
    clips, _ = make_clips(preset(9, 1, 3))

    def predict(inputs):  # knows the captions by their frames; the fifth clip's last word is wrong
        rows = [
            next(i for i in range(9) if torch.equal(seen[:n], frames(clips, i)))
            for seen, n in zip(inputs["frames"], inputs["lengths"].tolist())
        ]
        said = captions(clips)
        words = said[rows, min(inputs["at"], said.shape[1] - 1)]
        for n, row in enumerate(rows):
            if row == 4 and words[n] == EOS:
                words[n] = 7
        return F.one_hot(words, 60).float()

    assert exact_matches(clips, 9, 4, predict) == {"exact_match": pytest.approx(100 * 8 / 9)}
    assert exact_matches(clips, 4, 4, predict) == {"exact_match": 100.0}


def test_stages_and_the_exported_plain_model_say_the_same(quick):
    workload = build_workload("captioning", max_batches=12)
    said = []
    for stages in (1, 2, 3):
        with Pipeline(
            workload.layers,
            Plan(stages=stages, micro_batches=2),
            loss_fn=workload.loss_fn,
            extensions=[Source(loss_weight=workload.loss_weight)],
            optimizer=workload.optimizer,
        ) as pipeline:
            batches = iter(workload.train_batches(0))
            for _ in pipeline.train([next(batches) for _ in range(12)]):
                pass
            said.append(pipeline.evaluate(workload.valid_batches()).loss)
            state = pipeline.state_dict()
        plain = nn.Sequential(*s2vt_layers(quick.model, seed=9))
        plain.load_state_dict(state, strict=True)
        said.append(math.log(evaluate(workload, plain.eval(), workload.valid_batches())["perplexity"]))
    assert said[1:] == pytest.approx(said[:1] * 5, abs=1e-5)


@pytest.mark.ranks
def test_two_builds_are_the_same_and_another_seed_is_not(quick):
    def first(**options):
        torch.manual_seed(7)
        workload = build_workload("captioning", **options)
        assert torch.initial_seed() == 7
        inputs, said = list(workload.train_batches(1))[3]
        weights = torch.cat([p.detach().flatten() for p in nn.Sequential(*workload.layers).parameters()])
        return [inputs["frames"], inputs["target"], said, weights]

    one, again, other = first(seed=1), first(seed=1, pipelines=3, loader_workers=1), first(seed=2)
    assert all(torch.equal(a, b) for a, b in zip(one, again))
    assert not torch.equal(one[3], other[3])
    assert one[2].shape != other[2].shape or not torch.equal(one[2], other[2])


def test_facts_are_known_without_making_clips(monkeypatch):
    monkeypatch.setattr(captioning, "make_clips", None)
    facts = check_workload("captioning", preset="small", batch_size=5, epochs=2)
    assert (facts.layers, facts.batch_size, facts.epochs) == (5, 5, 2)


@pytest.mark.parametrize("name", ["tiny", "small", "paper"])
def test_presets_fit_their_clips(name):
    chosen = replace(PRESETS["captioning"][name], train=1000, valid=2)
    clips, _ = make_clips(chosen)
    assert frames(clips, 0).shape[1] == chosen.model.features
    assert chosen.model.vocabulary == (12_594 if name == "paper" else len(VOCABULARY))
    assert (clips.shown.lengths + clips.captions.lengths).max() <= 80  # the paper's steps
