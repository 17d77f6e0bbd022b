from __future__ import annotations

import sys
from dataclasses import replace
from functools import partial
from pathlib import Path

import pytest
import torch
from torch import nn

from avgpipe import Pipeline, Plan
from avgpipe.workloads import build_workload
from avgpipe.workloads.classification import PRESETS, accuracy, check
from avgpipe.workloads.libraries import LibraryNotFound
from avgpipe.workloads.options import BuildOptions
from avgpipe.workloads.text import DataNotFound
from avgpipe.workloads.vgg import VGGConfig
from tests.workloads.pictures import idx_folder, jpeg_folder

NAMES = ("resnet", "vgg", "alexnet")


@pytest.fixture(scope="module")
def digits(tmp_path_factory) -> Path:
    return idx_folder(tmp_path_factory.mktemp("digits"), 160, 40)


@pytest.fixture(scope="module")
def photos(tmp_path_factory) -> Path:
    return jpeg_folder(tmp_path_factory.mktemp("photos"))


def evaluate(workload, model, batches):
    model.eval()
    samples, loss, right = 0, 0.0, 0.0
    with torch.no_grad():
        for x, y in batches:
            output = model(x)
            loss += float(workload.loss_fn(output, y)) * len(y)
            right += float(workload.metric_fn(output, y)["accuracy"]) * len(y)
            samples += len(y)
    model.train()
    return workload.metrics(loss / samples, {"accuracy": right / samples})


small_vgg = partial(VGGConfig, convolutions=(1, 1, 1), widths=(6, 8, 8), hidden=(), dropout=0.0)


def test_a_built_workload_learns(digits, monkeypatch):
    preset = PRESETS["vgg"]["tiny"]
    training = replace(preset.training, batch_size=16, epochs=4)
    monkeypatch.setitem(
        PRESETS["vgg"], "tiny", replace(preset, model=small_vgg, training=training, padding=1)
    )
    workload = build_workload("vgg", data=digits)
    plan = Plan(stages=2, micro_batches=2)
    with Pipeline(
        workload.layers, plan, loss_fn=workload.loss_fn, optimizer=workload.optimizer, seed=1
    ) as pipeline:
        for epoch in range(workload.epochs):
            losses = [result.loss for result in pipeline.train(workload.train_batches(epoch))]
        model = nn.Sequential(*workload.layers)
        model.load_state_dict(pipeline.state_dict(), strict=True)
    assert losses[-1] < 0.9
    assert workload.metric_name == "accuracy"
    assert not workload.lower_is_better
    assert evaluate(workload, model, workload.test_batches())["accuracy"] > 60  # 25 by chance


def test_accuracy_is_the_share_of_right_answers_in_percent(digits):
    logits = torch.tensor([[0.1, 0.9], [0.8, 0.2], [0.3, 0.7], [0.6, 0.4]])
    share = accuracy(logits, torch.tensor([1, 1, 1, 0]))["accuracy"]
    assert float(share) == 0.75
    assert build_workload("vgg", data=digits).metrics(1.0, {"accuracy": 0.75}) == {"accuracy": 75.0}


def test_the_trivial_answer_is_the_most_frequent_class(photos):
    workload = build_workload("vgg", data=photos)
    held_out = [y for _, labels in workload.valid_batches() for y in labels.tolist()]
    guess = min(range(4), key=held_out.count)  # of equally many images, and train has the others
    assert workload.trivial[1] == pytest.approx(100 * held_out.count(guess) / len(held_out))


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("folder", ["digits", "photos"])
def test_models_have_the_size_and_classes_of_the_data(name, folder, request):
    workload = build_workload(name, data=request.getfixturevalue(folder), batch_size=4)
    inputs, targets = next(iter(workload.train_batches(0)))
    assert inputs.shape == ((4, 1, 28, 28) if folder == "digits" else (4, 3, 32, 32))
    assert nn.Sequential(*workload.layers)(inputs).shape == (4, 4)
    assert targets.shape == (4,)
    assert len(workload.layer_costs) == len(workload.layers)
    facts = check(name, BuildOptions(data=request.getfixturevalue(folder), batch_size=4))
    assert (facts.layers, facts.batch_size, facts.epochs) == (len(workload.layers), 4, workload.epochs)
    assert "4 classes of" in workload.title


@pytest.mark.parametrize("name", NAMES)
def test_paper_presets_are_checked_without_reading(name, photos):
    facts = check(name, BuildOptions(preset="paper", data=photos))
    assert facts.layers == {"resnet": 56, "vgg": 16, "alexnet": 8}[name]
    assert facts.epochs == {"resnet": 182, "vgg": 74, "alexnet": 90}[name]


@pytest.mark.parametrize("name", NAMES)
def test_every_preset_has_the_limits_of_its_size(name):
    tiny, small, paper = PRESETS[name].values()
    assert tiny.limit is not None
    assert small.limit is None
    assert paper.limit is None
    assert paper.training.weight_decay > 0
    assert paper.training.momentum == 0.9


def test_training_images_are_shifted_and_others_are_not(photos):
    workload = build_workload("resnet", data=photos, batch_size=54)
    (one, labels), (two, others) = (next(iter(workload.train_batches(epoch))) for epoch in (0, 1))
    assert labels.bincount().tolist() == others.bincount().tolist()
    same = set(map(bytes, one.numpy())) & set(map(bytes, two.numpy()))
    assert len(same) < 10  # an image meets one of 162 shifts and mirrorings again
    first, again = (next(iter(workload.valid_batches()))[0] for _ in range(2))
    assert torch.equal(first, again)


def test_digits_are_never_mirrored(digits, photos):
    made = [build_workload("resnet", data=f).train_batches(0)._make for f in (digits, photos)]
    assert [make.mirrored for make in made] == [False, True]
    assert [make.padding for make in made] == [4, 4]


def test_batches_are_the_same_for_every_number_of_pipelines_and_start(photos):
    def batches(start=0, **options):
        workload = build_workload("vgg", data=photos, batch_size=8, seed=3, **options)
        return list(workload.train_batches(1, start=start))

    whole = batches()
    assert len(whole) == 6  # 54 images: what fills no batch is left to other epochs
    for other in (batches(4, pipelines=2), batches(4, loader_workers=1)):
        for (a, b), (c, d) in zip(whole[4:], other, strict=True):
            assert torch.equal(a, c)
            assert torch.equal(b, d)
    different = build_workload("vgg", data=photos, batch_size=8, seed=4)
    assert not torch.equal(next(iter(different.train_batches(1)))[0], whole[0][0])


def test_a_batch_larger_than_the_data_is_all_of_it(photos):
    workload = build_workload("vgg", data=photos, batch_size=100)
    assert [len(y) for _, y in workload.train_batches(0)] == [54]
    assert sum(len(y) for _, y in workload.test_batches()) == 20


def test_weights_depend_on_the_seed_and_not_on_the_caller(photos):
    def weights(caller, seed):
        torch.manual_seed(caller)
        layers = build_workload("vgg", data=photos, seed=seed).layers
        assert torch.initial_seed() == caller
        return torch.cat([p.detach().flatten() for p in nn.Sequential(*layers).parameters()])

    assert torch.equal(weights(1, 2), weights(5, 2))
    assert not torch.equal(weights(1, 2), weights(1, 3))


def test_the_learning_rate_follows_the_pipelines_and_ends_with_the_batches(photos):
    workload = build_workload("resnet", data=photos, batch_size=8, pipelines=2, max_batches=8)
    optimizer = workload.optimizer([nn.Parameter(torch.zeros(2, 2))])
    scheduler = workload.lr_scheduler(optimizer)
    rates = []
    for _ in range(4):
        rates.append(optimizer.param_groups[0]["lr"])
        optimizer.step()
        scheduler.step()
    training = PRESETS["resnet"]["tiny"].training
    highest = training.lr * {"none": 1, "sqrt": 2**0.5, "linear": 2}[training.lr_scaling]
    assert max(rates) == pytest.approx(highest)
    assert optimizer.param_groups[0]["lr"] == pytest.approx(0, abs=1e-9)


def test_without_a_folder_the_message_says_which_work():
    with pytest.raises(DataNotFound, match=r"alexnet needs images, .* CIFAR-10's train.tar.gz .* MNIST's"):
        build_workload("alexnet")


def test_pretrained_weights_are_refused(photos):
    with pytest.raises(ValueError, match="vgg begins with random weights: it cannot read"):
        build_workload("vgg", data=photos, pretrained=photos)


def test_archives_without_pillow_are_refused_when_checked(photos, digits, monkeypatch):
    monkeypatch.setitem(sys.modules, "PIL.Image", None)
    with pytest.raises(LibraryNotFound, match="reading JPEG images needs PIL"):
        check("resnet", BuildOptions(data=photos))
    check("resnet", BuildOptions(data=digits))
