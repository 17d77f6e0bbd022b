from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from torch import nn

from avgpipe.workloads.vgg import VGGConfig, vgg_layers
from tests.workloads.equality import assert_equal_to_one_device
from tests.workloads.test_resnet import assert_stages_step, batches, double

SMALL = VGGConfig((2, 8, 8), 5, (1, 2), (4, 6), hidden=(7,), dropout=0.0)


def test_a_layer_is_a_convolution_or_fully_connected():
    layers = vgg_layers(SMALL)
    assert len(layers) == 5
    value, shapes = torch.zeros(3, 2, 8, 8), []
    for layer in layers:
        value = layer(value)
        shapes.append(tuple(value.shape[1:]))
    assert shapes == [(4, 4, 4), (6, 4, 4), (6, 2, 2), (7,), (5,)]


@pytest.mark.parametrize("image", [(1, 28, 28), (3, 32, 32), (1, 3, 40)])
def test_five_poolings_leave_a_pixel_of_small_images(image):
    config = VGGConfig(image, 10, widths=(2, 2, 2, 2, 2), hidden=())
    layers = vgg_layers(config)
    assert len(layers) == 14
    assert nn.Sequential(*layers)(torch.zeros(2, *image)).shape == (2, 10)


def test_images_are_scaled_in_the_first_layer():
    config = replace(SMALL, side=32, batch_norm=False)
    first, *others = vgg_layers(config)
    assert first(torch.zeros(1, 2, 8, 8)).shape == (1, 4, 16, 16)
    assert sum(p.numel() for layer in others for p in layer.parameters()) > 6 * 8 * 8 * 7


def test_dropout_follows_the_hidden_layers_as_configured():
    def dropouts(config):
        return [m.p for layer in vgg_layers(config) for m in layer.modules() if isinstance(m, nn.Dropout)]

    assert dropouts(replace(SMALL, dropout=0.5, hidden=(3, 3))) == [0.5, 0.5]
    assert dropouts(SMALL) == [0.0]


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"widths": (4,)}, "must name the same resolutions"),
        ({"widths": (4, 0)}, r"widths must be at least 1 each, got \(4, 0\)"),
        ({"classes": 0}, "classes must be at least 1, got 0"),
        ({"side": 0}, "side must be at least 1, got 0"),
        ({"dropout": 1.0}, r"dropout must be in \[0, 1\), got 1.0"),
    ],
)
def test_bad_sizes_are_refused(change, message):
    with pytest.raises(ValueError, match=message):
        replace(SMALL, **change)


def test_initial_weights_depend_on_the_seed_alone():
    one, same, other = (vgg_layers(SMALL, seed=seed)[0][0].weight for seed in (1, 1, 2))
    assert torch.equal(one, same)
    assert not torch.equal(one, other)


def test_stages_train_as_one_device_does():
    layers = double(vgg_layers(replace(SMALL, batch_norm=False), seed=1))
    assert_equal_to_one_device(layers, batches(), nn.CrossEntropyLoss())


def test_stages_train_as_one_device_does_with_norms_when_a_batch_is_one_micro_batch():
    layers = double(vgg_layers(SMALL, seed=1))
    assert_equal_to_one_device(layers, batches(), nn.CrossEntropyLoss(), micro_batches=(1,))


@pytest.mark.parametrize("image", [(3, 224, 224), (3, 32, 32)])
@pytest.mark.parametrize("batch_norm", [False, True])
def test_published_size(image, batch_norm):
    config = VGGConfig(image, 1000, side=224, batch_norm=batch_norm)
    with torch.device("meta"):
        layers = vgg_layers(config)
        x = torch.empty(2, *image)
    assert len(layers) == 16
    count = sum(p.numel() for layer in layers for p in layer.parameters())
    # table 2: 138 million; a norm has a scale and a shift where there was a bias
    assert count == 138_357_544 + (4224 if batch_norm else 0)
    assert_stages_step(layers, x, 1000)
