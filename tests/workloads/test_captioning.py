import dataclasses
import math
import pickle
from functools import partial
from pathlib import Path

import pytest
import torch
from torch import nn

from avgpipe import Pipeline, Plan
from avgpipe.workloads.captioning import (
    PRESETS,
    blind_accuracy,
    build,
    caption_batch,
    caption_loss,
    caption_metrics,
    caption_words,
    check,
    exact_matches,
    greedy_captions,
    right_words,
)
from avgpipe.workloads.clips import BOS, EOS, PAD, make_clips
from avgpipe.workloads.options import BuildOptions
from avgpipe.workloads.s2vt import S2VTConfig, s2vt_layers

NAME = "captioning"


@pytest.fixture
def quick(monkeypatch):
    """The preset "tiny" with less of everything."""
    tiny = PRESETS[NAME]["tiny"]
    preset = dataclasses.replace(
        tiny,
        model=partial(S2VTConfig, features=24, embedding=48, hidden=48),
        clips=partial(make_clips, 400, 60, 60, features=24, events=(1, 1), frames=(2, 3), noise=0.1),
        decoded=20,
        training=dataclasses.replace(tiny.training, lr=0.01, epochs=12, batch_size=8),
    )
    monkeypatch.setitem(PRESETS[NAME], "tiny", preset)
    return preset


def run(workload):
    model = nn.Sequential(*workload.layers)
    optimizer = workload.optimizer(model.parameters())
    scheduler = workload.lr_scheduler(optimizer)
    for epoch in range(workload.epochs):
        for inputs, said in workload.train_batches(epoch):
            workload.loss_fn(model(inputs), said).backward()
            nn.utils.clip_grad_norm_(model.parameters(), workload.clip_grad_norm)
            optimizer.step()
            optimizer.zero_grad()
            scheduler.step()
    return model.eval()


@torch.no_grad()
def evaluate(workload, model, batches):
    loss = words = samples = 0.0
    sums = {}
    for inputs, said in batches:
        output, n = model(inputs), len(said)
        loss += float(workload.loss_fn(output, said)) * workload.loss_weight(said)
        words += workload.loss_weight(said)
        for name, value in workload.metric_fn(output, said).items():
            sums[name] = sums.get(name, 0.0) + float(value) * n
        samples += n
    return workload.metrics(loss / words, {name: value / samples for name, value in sums.items()})


def unigram_perplexity(train, valid):
    counts = torch.bincount(train.captions[train.captions != PAD], minlength=100).double() + 1
    loss = -(counts / counts.sum()).log()[valid.captions[valid.captions != PAD]].mean().item()
    return math.exp(loss)


def test_a_built_workload_learns_far_more_than_frequencies(quick):
    workload = build(NAME, BuildOptions(seed=3))
    model = run(workload)
    clips = quick.clips()
    answer, accuracy = workload.trivial
    assert answer == "the most frequent word of each position"
    assert accuracy == blind_accuracy(clips.train, clips.valid)
    metrics = evaluate(workload, model, workload.valid_batches())
    assert (workload.metric_name, workload.lower_is_better) == ("accuracy", False)
    assert metrics["accuracy"] > accuracy + 15
    assert metrics["perplexity"] < unigram_perplexity(clips.train, clips.valid) / 5
    batches = list(workload.valid_batches())
    for inputs, _ in batches:  # the frames of other clips
        inputs["frames"], inputs["lengths"] = inputs["frames"].flip(0), inputs["lengths"].flip(0)
    assert evaluate(workload, model, batches)["accuracy"] < metrics["accuracy"] - 10
    with torch.no_grad():
        assert 0 <= workload.decode(model)["exact_match"] <= 100
    assert math.isfinite(evaluate(workload, model, workload.test_batches())["perplexity"])
    assert "synthetic" in workload.title


def test_loss_is_the_mean_over_words_that_are_no_padding():
    logits = torch.randn(3, 4, 9, dtype=torch.float64)
    said = torch.tensor([[3, 4, 5, EOS], [6, EOS, PAD, PAD], [EOS, PAD, PAD, PAD]])
    of_words = [
        -logits[row, at].log_softmax(0)[word]
        for row, words in enumerate(said.tolist())
        for at, word in enumerate(words)
        if word != PAD
    ]
    assert caption_words(said) == len(of_words) == 7
    assert caption_loss(logits, said).item() == pytest.approx(float(sum(of_words)) / 7, abs=1e-12)


def test_blind_accuracy_says_the_most_frequent_word_of_each_position():
    train, valid = make_clips(300, 1, 1, features=1).train, make_clips(1, 40, 1, features=1).valid
    right = words = 0
    for at in range(valid.captions.shape[1]):
        column = [int(w) for w in train.captions[:, at] if w != PAD]
        best = max(sorted(set(column)), key=column.count)
        said = [int(w) for w in valid.captions[:, at] if w != PAD]
        right, words = right + said.count(best), words + len(said)
    assert blind_accuracy(train, valid) == pytest.approx(100 * right / words)
    # captions that go on longer than all of training's cannot be guessed there
    short = dataclasses.replace(train, captions=train.captions[:, :2])
    assert 0 < blind_accuracy(short, valid) < blind_accuracy(train, valid)


def test_metrics_count_words_and_not_clips():
    said = torch.tensor([[3, 4, 5, EOS], [EOS, PAD, PAD, PAD]])
    logits = torch.nn.functional.one_hot(torch.tensor([[3, 9, 9, 9], [EOS, PAD, PAD, PAD]]), 10).float()
    means = {name: float(value) for name, value in right_words(logits, said).items()}
    assert means == {"right": 1.0, "words": 2.5}
    metrics = caption_metrics(math.log(5), means)
    assert metrics == {"accuracy": pytest.approx(40.0), "perplexity": pytest.approx(5.0)}
    assert caption_metrics(1000.0, means)["perplexity"] == math.inf
    assert math.isnan(caption_metrics(math.nan, means)["perplexity"])


def test_greedy_captions_follow_the_likeliest_word_until_the_end():
    follows = {BOS: 5, 5: 6, 6: EOS, 7: 7}

    def predict(inputs):
        assert inputs["words"].shape[1] == inputs["at"] + 1
        assert inputs["words"][:, 0].tolist() == [BOS, BOS]
        words = [follows.get(int(word), 7) for word in inputs["words"][:, inputs["at"]]]
        if inputs["at"] == 0:
            words[1] = 6  # the second clip's sentence is shorter by one
        return torch.nn.functional.one_hot(torch.tensor(words), 9).float()

    frames, lengths = torch.zeros(2, 3, 4), torch.tensor([3, 2])
    assert greedy_captions(predict, frames, lengths, 8).tolist() == [[5, 6, EOS], [6, EOS, PAD]]
    assert greedy_captions(predict, frames, lengths, 2).tolist() == [[5, 6], [6, EOS]]
    with pytest.raises(ValueError, match="max_words must be at least 1, got 0"):
        greedy_captions(predict, frames, lengths, 0)


def test_exact_matches_are_whole_captions():
    clips = make_clips(9, 9, 9, features=3).train

    def predict(
        inputs,
    ):  # knows the captions of the batches of 4 by their frames; the fifth clip's last word is wrong
        rows = [
            next(i for i in range(9) if torch.equal(frames[:n], clips.frames(torch.tensor([i]))[0]))
            for frames, n in zip(inputs["frames"], inputs["lengths"].tolist())
        ]
        words = clips.captions[rows, inputs["at"]].clone()
        for n, row in enumerate(rows):
            if row == 4 and words[n] == EOS:
                words[n] = 7
        return torch.nn.functional.one_hot(words, 60).float()

    assert exact_matches(clips, 9, 4, predict) == {"exact_match": pytest.approx(100 * 8 / 9)}
    assert exact_matches(clips, 4, 4, predict) == {"exact_match": 100.0}
    assert exact_matches(clips, 100, 4, predict) == {"exact_match": pytest.approx(100 * 8 / 9)}


def test_stages_and_the_exported_plain_model_say_the_same(quick):
    workload = build(NAME, BuildOptions(max_batches=12))
    clips = quick.clips().valid
    indices = torch.arange(7)
    inputs = (clips.frames(indices), clips.lengths[indices], 9)
    said = []
    for stages in (1, 2, 3):
        plan = Plan(stages=stages, micro_batches=2)
        with Pipeline(
            workload.layers,
            plan,
            loss_fn=workload.loss_fn,
            loss_weight=workload.loss_weight,
            optimizer=workload.optimizer,
        ) as pipeline:
            batches = iter(workload.train_batches(0))
            for _ in pipeline.train([next(batches) for _ in range(12)]):
                pass
            said.append(greedy_captions(pipeline.predict, *inputs))
            state = pipeline.state_dict()
        plain = nn.Sequential(*s2vt_layers(quick.config(50), seed=9))
        plain.load_state_dict(state, strict=True)
        with torch.no_grad():
            said.append(greedy_captions(plain.eval(), *inputs))
    assert all(torch.equal(said[0], other) for other in said[1:])
    assert len(said[0].unique()) > 2


def test_two_builds_are_the_same_and_another_seed_is_not(quick):
    def first(**options):
        torch.manual_seed(7)
        workload = build(NAME, BuildOptions(**options))
        assert torch.initial_seed() == 7
        inputs, said = next(iter(workload.train_batches(1)))
        weights = torch.cat([p.detach().flatten() for p in nn.Sequential(*workload.layers).parameters()])
        return [inputs["frames"], inputs["words"], said, weights]

    one, again, other = first(seed=1), first(seed=1, pipelines=3), first(seed=2)
    assert all(torch.equal(a, b) for a, b in zip(one, again))
    assert not torch.equal(one[3], other[3])
    assert one[2].shape != other[2].shape or not torch.equal(one[2], other[2])


def test_an_epoch_can_go_on_in_its_middle_and_workers_change_nothing(quick):
    workload = build(NAME, BuildOptions(loader_workers=1))
    whole = list(build(NAME, BuildOptions()).train_batches(2))
    rest = list(workload.train_batches(2, start=len(whole) - 2))
    assert len(rest) == 2
    for (inputs, said), (expected, true) in zip(rest, whole[-2:]):
        assert torch.equal(said, true)
        assert torch.equal(inputs["frames"], expected["frames"])


def test_a_batch_is_no_longer_than_its_clips_and_can_be_made_elsewhere():
    clips = make_clips(20, 1, 1, features=3).train
    make = pickle.loads(pickle.dumps(partial(caption_batch, clips)))
    indices = clips.lengths.argsort()[:4]
    inputs, said = make(indices, torch.Generator())
    assert inputs["frames"].shape == (4, clips.lengths[indices].max(), 3)
    assert said.shape == inputs["words"].shape == (4, clips.caption_lengths[indices].max())


def test_facts_are_known_without_making_clips(monkeypatch):
    def refuse():
        raise AssertionError("clips were made")

    small = dataclasses.replace(PRESETS[NAME]["small"], clips=refuse)
    monkeypatch.setitem(PRESETS[NAME], "small", small)
    facts = check(NAME, BuildOptions(preset="small", batch_size=5, epochs=2))
    assert (facts.name, facts.preset, facts.layers, facts.batch_size, facts.epochs) == (
        NAME,
        "small",
        5,
        5,
        2,
    )


@pytest.mark.parametrize("act", [check, build])
def test_data_and_weights_are_refused(act):
    with pytest.raises(
        ValueError, match="captioning makes its clips itself and reads no data: leave out videos"
    ):
        act(NAME, BuildOptions(data=Path("videos")))
    with pytest.raises(ValueError, match="captioning has no weights to begin with: leave out weights"):
        act(NAME, BuildOptions(pretrained=Path("weights")))


@pytest.mark.parametrize("preset", ["tiny", "small", "paper"])
def test_presets_fit_their_clips(preset):
    chosen = PRESETS[NAME][preset]
    clips = chosen.clips.func(5, 2, 2, **chosen.clips.keywords)
    config = chosen.config(len(clips.vocabulary))
    assert clips.train.frames(torch.tensor([0])).shape[2] == config.features
    assert config.vocabulary == (12_594 if preset == "paper" else len(clips.vocabulary))


def test_paper_clips_stay_within_80_steps():
    chosen = PRESETS[NAME]["paper"]
    clips = chosen.clips.func(1000, 1, 1, **chosen.clips.keywords).train
    assert (clips.lengths + clips.caption_lengths).max() <= 80
