from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from torch import nn

from avgpipe.workloads.alexnet import AlexNetConfig, alexnet_layers
from tests.workloads.equality import assert_equal_to_one_device
from tests.workloads.test_resnet import assert_stages_step, batches, double

IMAGE = (2, 17, 17)
SMALL = AlexNetConfig(IMAGE, 5, (4, 6, 6, 4, 4), stem=(5, 1, 2), hidden=(7,), dropout=0.0)


def test_a_layer_is_a_convolution_or_fully_connected():
    layers = alexnet_layers(AlexNetConfig((3, 224, 224), 10, hidden=(9, 8)))
    value, shapes = torch.zeros(1, 3, 224, 224), []
    for layer in layers:
        value = layer(value)
        shapes.append(tuple(value.shape[1:]))
    assert shapes[:5] == [(96, 27, 27), (256, 13, 13), (384, 13, 13), (384, 13, 13), (256, 6, 6)]
    assert shapes[5:] == [(9,), (8,), (10,)]


def test_responses_are_normalised_by_the_papers_formula():
    first = alexnet_layers(SMALL, seed=1)[0].double()
    norm = next(m for m in first.modules() if isinstance(m, nn.LocalResponseNorm))
    x = 30 * torch.rand(1, 7, 2, 1, dtype=torch.float64)
    expected = torch.empty_like(x)
    for i in range(7):  # section 3.3: k = 2, n = 5, alpha = 1e-4, beta = 0.75
        squares = sum(x[:, j] ** 2 for j in range(max(0, i - 2), min(6, i + 2) + 1))
        expected[:, i] = x[:, i] / (2 + 1e-4 * squares) ** 0.75
    torch.testing.assert_close(norm(x), expected)


def test_parts_can_be_left_out():
    def kinds(config):
        return [type(m) for layer in alexnet_layers(config) for m in layer.modules()]

    assert kinds(SMALL).count(nn.LocalResponseNorm) == 2
    assert nn.LocalResponseNorm not in kinds(replace(SMALL, response_norm=False))
    dropped = alexnet_layers(replace(SMALL, dropout=0.5))
    assert [m.p for layer in dropped for m in layer.modules() if isinstance(m, nn.Dropout)] == [0.5]


@pytest.mark.parametrize("image", [(1, 28, 28), (3, 32, 32)])
def test_small_images_fit_a_small_stem_or_are_scaled(image):
    config = replace(SMALL, image=image)
    assert nn.Sequential(*alexnet_layers(config))(torch.zeros(2, *image)).shape == (2, 5)
    scaled = replace(config, stem=(11, 4, 2), side=100)
    assert nn.Sequential(*alexnet_layers(scaled))(torch.zeros(2, *image)).shape == (2, 5)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"image": (3, 8, 8)}, r"images of 8 x 8 are too small for stem \(5, 1, 2\): give side"),
        ({"widths": (4, 6, 6, 4, 3)}, "widths must be even"),
        ({"hidden": (0,)}, "hidden must be at least 1 each"),
        ({"classes": 0}, "classes must be at least 1, got 0"),
        ({"dropout": -0.1}, r"dropout must be in \[0, 1\), got -0.1"),
    ],
)
def test_bad_sizes_are_refused(change, message):
    with pytest.raises(ValueError, match=message):
        replace(SMALL, **change)


def test_initial_weights_depend_on_the_seed_alone():
    one, same, other = (alexnet_layers(SMALL, seed=seed)[0][0].weight for seed in (1, 1, 2))
    assert torch.equal(one, same)
    assert not torch.equal(one, other)


def test_stages_train_as_one_device_does():
    layers = double(alexnet_layers(SMALL, seed=1))
    assert_equal_to_one_device(layers, batches(IMAGE), nn.CrossEntropyLoss())


@pytest.mark.parametrize("image", [(3, 224, 224), (3, 32, 32)])
def test_published_size(image):
    with torch.device("meta"):
        layers = alexnet_layers(AlexNetConfig(image, 1000, side=224))
        x = torch.empty(2, *image)
    assert len(layers) == 8
    count = sum(p.numel() for layer in layers for p in layer.parameters())
    assert count == 60_965_224  # "60 million", with the biases
    assert_stages_step(layers, x, 1000)
