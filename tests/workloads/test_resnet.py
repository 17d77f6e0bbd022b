from __future__ import annotations

import copy
from dataclasses import replace
from itertools import pairwise

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from avgpipe import Pipeline, Plan
from avgpipe.runtime.model import stage_bounds
from avgpipe.workloads.resnet import PaddedShortcut, ResidualBlock, ResNetConfig, resnet_layers
from tests.workloads.equality import assert_equal_to_one_device, one_device, sgd

SMALL = ResNetConfig((2, 8, 8), 5, (1, 1), (4, 8))


def batches(image=(2, 8, 8), classes=5, count=3, samples=6, dtype=torch.float64):
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


def double(layers):
    return [layer.double() for layer in layers]


@pytest.mark.parametrize("depth", [8, 20, 110])
def test_a_network_for_small_images_has_a_layer_for_each_block(depth):
    layers = resnet_layers(ResNetConfig.of_depth(depth, (3, 32, 32), 10))
    assert len(layers) == (depth - 2) // 2 + 2
    convolutions = [m for layer in layers for m in layer.modules() if isinstance(m, nn.Conv2d | nn.Linear)]
    assert len(convolutions) == depth


@pytest.mark.parametrize("depth", [2, 7, 18, 34])
def test_depths_between_are_refused(depth):
    with pytest.raises(ValueError, match=rf"depth must be 6 n \+ 2 .*, got {depth}"):
        ResNetConfig.of_depth(depth, (3, 32, 32), 10)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"blocks": (1,)}, "must name the same resolutions"),
        ({"blocks": (1, 0)}, r"blocks must be at least 1 each, got \(1, 0\)"),
        ({"image": (0, 8, 8)}, "image must be at least 1 each"),
        ({"classes": 0}, "classes must be at least 1, got 0"),
    ],
)
def test_bad_sizes_are_refused(change, message):
    with pytest.raises(ValueError, match=message):
        replace(SMALL, **change)


def test_each_resolution_halves_the_image_and_the_last_layer_gives_logits():
    layers = resnet_layers(ResNetConfig.of_depth(14, (1, 28, 28), 10))
    value, sides = torch.zeros(2, 1, 28, 28), []
    for layer in layers:
        value = layer(value)
        sides.append(tuple(value.shape[1:]))
    assert sides == [*[(16, 28, 28)] * 3, *[(32, 14, 14)] * 2, *[(64, 7, 7)] * 2, (10,)]


@pytest.mark.parametrize("bottleneck", [False, True])
@pytest.mark.parametrize("shortcut", ["pad", "project"])
def test_a_block_adds_its_input(bottleneck, shortcut):
    config = replace(SMALL, bottleneck=bottleneck, shortcut=shortcut, batch_norm=False)
    torch.manual_seed(1)
    block = ResidualBlock(config, 4, 6, 12, 2).double()
    x = torch.randn(3, 4, 7, 7, dtype=torch.float64)
    expected, strides = x, [2, 1, 1]
    convolutions = [m for m in block.body.modules() if isinstance(m, nn.Conv2d)]
    for n, (conv, stride) in enumerate(zip(convolutions, strides)):
        expected = F.conv2d(expected, conv.weight, conv.bias, stride, conv.kernel_size[0] // 2)
        if n < len(convolutions) - 1:
            expected = expected.clamp_min(0)
    assert len(convolutions) == (3 if bottleneck else 2)
    if shortcut == "pad":
        expected[:, :4] += x[:, :, ::2, ::2]
    else:
        conv = block.shortcut[0]
        expected = expected + F.conv2d(x, conv.weight, conv.bias, 2)
    torch.testing.assert_close(block(x), expected.clamp_min(0))


def test_a_padded_shortcut_cannot_drop_channels():
    with pytest.raises(ValueError, match="a padded shortcut cannot drop 3 channels: use shortcut='project'"):
        PaddedShortcut(-3, 1)


def test_initial_weights_depend_on_the_seed_alone():
    def weights(caller, seed):
        torch.manual_seed(caller)
        layers = resnet_layers(SMALL, seed=seed)
        assert torch.initial_seed() == caller
        return torch.cat([p.detach().flatten() for p in nn.Sequential(*layers).parameters()])

    assert torch.equal(weights(1, seed=2), weights(5, seed=2))
    assert not torch.equal(weights(1, seed=2), weights(1, seed=3))


def test_stages_train_as_one_device_does():
    layers = double(resnet_layers(replace(SMALL, batch_norm=False), seed=1))
    assert_equal_to_one_device(layers, batches(), nn.CrossEntropyLoss())


def test_stages_train_as_one_device_does_with_norms_when_a_batch_is_one_micro_batch():
    layers = double(resnet_layers(SMALL, seed=1))
    assert_equal_to_one_device(layers, batches(), nn.CrossEntropyLoss(), micro_batches=(1,))


@pytest.mark.parametrize(
    ("config", "parameters"),
    [
        (ResNetConfig.of_depth(20, (3, 32, 32), 10), 0.27e6),  # He et al., table 6
        (ResNetConfig.of_depth(56, (3, 32, 32), 10), 0.85e6),
        (ResNetConfig.of_depth(110, (3, 32, 32), 10), 1.7e6),
        (ResNetConfig.resnet50(), 25.557032e6),
    ],
)
def test_published_sizes(config, parameters):
    with torch.device("meta"):
        layers = resnet_layers(config)
        x = torch.empty(2, *config.image)
    count = sum(p.numel() for layer in layers for p in layer.parameters())
    assert count == pytest.approx(parameters, rel=1e-9 if config.bottleneck else 0.02)
    assert_stages_step(layers, x, config.classes)


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
