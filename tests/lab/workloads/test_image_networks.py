from __future__ import annotations

import copy
from dataclasses import replace
from itertools import pairwise
from pathlib import Path

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from avgpipe import Pipeline, Plan
from avgpipe.model.model import stage_bounds
from avgpipe.tasks import build_workload, check_workload
from avgpipe_lab.workloads.images import (
    PRESETS,
    VGG,
    AlexNet,
    ResidualBlock,
    ResNet,
    accuracy,
    network_layers,
    upscale,
)
from tests.lab.workloads.equality import assert_equal_to_one_device, one_device, sgd
from tests.lab.workloads.pictures import idx_folder, jpeg_folder

IMAGE, CLASSES = (2, 17, 17), 5
RESNET = ResNet(8)
VERY_SMALL_VGG = VGG((1, 2), (4, 6), hidden=(7,), dropout=0.0)
ALEXNET = AlexNet((4, 6, 6, 4, 4), stem=(5, 1, 2), hidden=(7,), dropout=0.0)
NETWORKS = [RESNET, VERY_SMALL_VGG, ALEXNET]

NAMES = ("resnet", "vgg", "alexnet")


def batches(image=IMAGE, classes=CLASSES, count=3, samples=6, dtype=torch.float64):
    draw = torch.Generator().manual_seed(1)
    return [
        (
            torch.randn(samples, *image, generator=draw, dtype=dtype),
            torch.randint(classes, (samples,), generator=draw),
        )
        for _ in range(count)
    ]


def assert_stages_step(layers, x, classes):
    """Cut layers on the meta device into 2 and 4 stages, and step once."""
    value = x
    for stages in (2, 4):
        bounds = stage_bounds(layers, stages, None)
        assert len(bounds) == stages + 1
    for first, end in pairwise(bounds):
        value = nn.Sequential(*layers[first:end])(value)
    assert value.shape == (len(x), classes)
    value.sum().backward()
    assert all(p.grad.shape == p.shape for layer in layers for p in layer.parameters())


def modules(layers, kind):
    return [m for layer in layers for m in layer.modules() if isinstance(m, kind)]


# ---- the networks --------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("network", NETWORKS)
def test_initial_weights_depend_on_the_seed_alone(network):
    def weights(caller, seed):
        torch.manual_seed(caller)
        layers = network_layers(network, IMAGE, CLASSES, seed=seed)
        assert torch.initial_seed() == caller
        return torch.cat([p.detach().flatten() for p in nn.Sequential(*layers).parameters()])

    assert torch.equal(weights(1, seed=2), weights(5, seed=2))
    assert not torch.equal(weights(1, seed=2), weights(1, seed=3))


def test_initial_weights_have_the_variance_of_their_fan_in_and_the_last_are_small():
    layers = network_layers(VGG((1, 1), (64, 128), hidden=(300,)), (3, 4, 4), 200, seed=1)
    weights = [m.weight for m in modules(layers, nn.Conv2d | nn.Linear)]
    for weight, variance in zip(weights[1:], (2 / (64 * 9), 2 / 128, 1e-4), strict=True):
        assert weight.var().item() == pytest.approx(variance, rel=0.05)
    assert not any(m.bias.any() for m in modules(layers, nn.Linear))


@pytest.mark.parametrize("network", NETWORKS)
def test_stages_train_as_one_device_does(network):
    layers = [layer.double() for layer in network_layers(network, IMAGE, CLASSES, seed=1)]
    # A norm's statistics are those of a micro-batch, so with norms a batch must be one.
    micro_batches = (1,) if modules(layers, nn.BatchNorm2d) else (1, 3)
    assert_equal_to_one_device(layers, batches(), nn.CrossEntropyLoss(), micro_batches=micro_batches)


@pytest.mark.parametrize(
    ("network", "image", "classes", "count", "parameters"),
    [
        (ResNet(20), (3, 32, 32), 10, 11, 0.27e6),  # He et al., table 6
        (ResNet(56), (3, 32, 32), 10, 29, 0.85e6),
        (ResNet(110), (3, 32, 32), 10, 56, 1.7e6),
        # table 2: 138 million; a norm has a scale and a shift where there was a bias
        (VGG(side=224), (3, 224, 224), 1000, 16, 138_357_544 + 4224),
        (VGG(side=224), (3, 32, 32), 1000, 16, 138_357_544 + 4224),
        (AlexNet(side=224), (3, 224, 224), 1000, 8, 60_965_224),  # "60 million", with the biases
        (AlexNet(side=224), (3, 32, 32), 1000, 8, 60_965_224),
    ],
)
def test_published_sizes(network, image, classes, count, parameters):
    with torch.device("meta"):
        layers = network.layers(image, classes)
        x = torch.empty(2, *image)
    assert len(layers) == count
    exact = isinstance(parameters, int)
    found = sum(p.numel() for layer in layers for p in layer.parameters())
    assert found == pytest.approx(parameters, rel=0 if exact else 0.02)
    assert_stages_step(layers, x, classes)


@pytest.mark.parametrize("depth", [2, 7, 18, 34])
def test_depths_between_are_refused(depth):
    with pytest.raises(ValueError, match=rf"depth must be 6 n \+ 2 .*, got {depth}"):
        ResNet(depth).layers((3, 32, 32), 10)


def shapes_of(layers, image):
    value, shapes = torch.zeros(2, *image), []
    for layer in layers:
        value = layer(value)
        shapes.append(tuple(value.shape[1:]))
    return shapes


def test_each_resolution_of_a_resnet_halves_the_image():
    shapes = shapes_of(ResNet(14).layers((1, 28, 28), 10), (1, 28, 28))
    assert shapes == [*[(16, 28, 28)] * 3, *[(32, 14, 14)] * 2, *[(64, 7, 7)] * 2, (10,)]


@pytest.mark.parametrize("outputs", [4, 12])
def test_a_residual_block_adds_its_input(outputs):
    torch.manual_seed(1)
    block = ResidualBlock(4, outputs).double().eval()
    x = torch.randn(3, 4, 7, 7, dtype=torch.float64)
    stride = 1 if outputs == 4 else 2
    first, second = modules([block], nn.Conv2d)
    inside = F.conv2d(x, first.weight, None, stride, 1) / (1 + 1e-5) ** 0.5
    expected = F.conv2d(inside.clamp_min(0), second.weight, None, 1, 1) / (1 + 1e-5) ** 0.5
    expected[:, :4] += x[:, :, ::stride, ::stride]
    torch.testing.assert_close(block(x), expected.clamp_min(0))


def test_a_layer_of_vgg_is_a_convolution_or_fully_connected():
    shapes = shapes_of(VERY_SMALL_VGG.layers((2, 8, 8), 5), (2, 8, 8))
    assert shapes == [(4, 4, 4), (6, 4, 4), (6, 2, 2), (7,), (5,)]


@pytest.mark.parametrize("image", [(1, 28, 28), (3, 32, 32), (1, 3, 40)])
def test_five_poolings_of_vgg_leave_a_pixel_of_small_images(image):
    layers = VGG(widths=(2, 2, 2, 2, 2), hidden=()).layers(image, 10)
    assert len(layers) == 14
    assert nn.Sequential(*layers)(torch.zeros(2, *image)).shape == (2, 10)


@pytest.mark.parametrize("network", [VERY_SMALL_VGG, ALEXNET])
def test_dropout_follows_the_hidden_layers(network):
    layers = replace(network, dropout=0.5, hidden=(3, 3)).layers(IMAGE, CLASSES)
    assert [m.p for m in modules(layers, nn.Dropout)] == [0.5, 0.5]


def test_images_are_scaled_in_the_first_layer():
    first, *others = replace(VERY_SMALL_VGG, side=32).layers((2, 8, 8), 5)
    assert first(torch.zeros(1, 2, 8, 8)).shape == (1, 4, 16, 16)
    assert sum(p.numel() for layer in others for p in layer.parameters()) > 6 * 8 * 8 * 7
    (scaled,) = upscale(8)
    ramp = scaled(torch.arange(4.0).expand(1, 1, 4, 4))
    torch.testing.assert_close(ramp[0, 0, 3, 1:-1], torch.arange(6) / 2 + 0.25)


def test_alexnet_has_the_papers_resolutions():
    shapes = shapes_of(AlexNet(hidden=(9, 8)).layers((3, 224, 224), 10), (3, 224, 224))
    assert shapes[:5] == [(96, 27, 27), (256, 13, 13), (384, 13, 13), (384, 13, 13), (256, 6, 6)]
    assert shapes[5:] == [(9,), (8,), (10,)]


def test_alexnets_responses_are_normalised_by_the_papers_formula():
    norm, second = modules(ALEXNET.layers(IMAGE, CLASSES), nn.LocalResponseNorm)
    assert repr(norm) == repr(second)
    assert not modules(replace(ALEXNET, response_norm=False).layers(IMAGE, CLASSES), nn.LocalResponseNorm)
    x = 30 * torch.rand(1, 7, 2, 1, dtype=torch.float64)
    expected = torch.empty_like(x)
    for i in range(7):  # section 3.3: k = 2, n = 5, alpha = 1e-4, beta = 0.75
        squares = sum(x[:, j] ** 2 for j in range(max(0, i - 2), min(6, i + 2) + 1))
        expected[:, i] = x[:, i] / (2 + 1e-4 * squares) ** 0.75
    torch.testing.assert_close(norm(x), expected)


@pytest.mark.parametrize("image", [(1, 28, 28), (3, 32, 32)])
def test_small_images_fit_a_small_stem_of_alexnet_or_are_scaled(image):
    for network in (ALEXNET, replace(ALEXNET, stem=(11, 4, 2), side=100)):
        assert nn.Sequential(*network.layers(image, CLASSES))(torch.zeros(2, *image)).shape == (2, 5)
    with pytest.raises(ValueError, match=r"images of 8 x 8 are too small for stem \(5, 1, 2\): give side"):
        ALEXNET.layers((3, 8, 8), 5)


def test_multiply_adds_are_counted_by_hand():
    state = torch.get_rng_state()
    network = VGG((1, 1), (4, 6), hidden=(7,), side=8)
    # 3 x 3 convolutions at 8 x 8 and 4 x 4, then 6 x 2 x 2 features
    layers = network_layers(network, (2, 5, 5), 5)
    assert [layer.compute_cost for layer in layers] == [64 * 18 * 4, 16 * 36 * 6, 24 * 7, 7 * 5]
    assert torch.equal(torch.get_rng_state(), state)


# ---- the workloads -------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def digits(tmp_path_factory) -> Path:
    return idx_folder(tmp_path_factory.mktemp("digits"), 160)


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


SMALL_VGG = VGG((1, 1, 1), (6, 8, 8), hidden=(), dropout=0.0)


def test_a_built_workload_learns(digits, monkeypatch):
    preset = PRESETS["vgg"]["tiny"]
    training = replace(preset.training, batch_size=16, epochs=4)
    monkeypatch.setitem(
        PRESETS["vgg"], "tiny", replace(preset, model=SMALL_VGG, training=training, padding=1)
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
    assert evaluate(workload, model, workload.valid_batches())["accuracy"] > 60  # 25 by chance


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
    assert all(layer.compute_cost >= 1 for layer in workload.layers)
    facts = check_workload(name, data=request.getfixturevalue(folder), batch_size=4)
    assert (facts.layers, facts.batch_size, facts.epochs) == (len(workload.layers), 4, workload.epochs)
    assert "4 classes of" in workload.title


@pytest.mark.parametrize("name", NAMES)
def test_paper_presets_are_checked_without_reading(name, photos):
    facts = check_workload(name, preset="paper", data=photos)
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
    made = [build_workload("resnet", data=f).train_batches(0).make for f in (digits, photos)]
    assert [make.mirrored for make in made] == [False, True]
    assert [make.padding for make in made] == [4, 4]


@pytest.mark.ranks
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
    assert sum(len(y) for _, y in workload.valid_batches()) == 6


def test_the_learning_rate_follows_the_pipelines_and_ends_with_the_batches(photos):
    turns = {"pipelines": 2, "batch": "per-pipeline"}
    workload = build_workload("resnet", data=photos, batch_size=8, max_batches=8, **turns)
    optimizer = workload.optimizer([nn.Parameter(torch.zeros(2, 2))])
    scheduler = workload.lr_scheduler(optimizer)
    rates = []
    for _ in range(4):
        rates.append(optimizer.param_groups[0]["lr"])
        optimizer.step()
        scheduler.step()
    assert max(rates) == pytest.approx(2**0.5 * PRESETS["resnet"]["tiny"].training.lr)
    assert optimizer.param_groups[0]["lr"] == pytest.approx(0, abs=1e-9)


# ---- models of other libraries, split by the tracer ----------------------------------------------------------------


def torchvision_resnet18():
    models = pytest.importorskip("torchvision.models", reason="torchvision is not installed")
    return models.resnet18(num_classes=5)


def timm_resnet():
    timm = pytest.importorskip("timm", reason="timm is not installed")
    return timm.create_model("resnet18", num_classes=5, in_chans=3)


@pytest.mark.parametrize("make", [torchvision_resnet18, timm_resnet])
def test_a_model_of_another_library_is_split_as_it_is(make):
    torch.manual_seed(1)
    model = make().double()
    data = batches((3, 32, 32), count=2, samples=4)
    losses, expected = one_device(model, data, nn.CrossEntropyLoss())
    plan = Plan(stages=3, micro_batches=1)
    with Pipeline(copy.deepcopy(model), plan, loss_fn=nn.CrossEntropyLoss(), optimizer=sgd) as pipeline:
        assert [r.loss for r in pipeline.train(data)] == pytest.approx(losses, abs=1e-9)
        state = pipeline.state_dict()
    assert state.keys() == expected.keys()
    for name, value in expected.items():
        torch.testing.assert_close(state[name], value, rtol=0, atol=1e-8)
    make().double().load_state_dict(state, strict=True)
