from __future__ import annotations

import pytest
import torch
from torch import nn

from avgpipe.workloads.convolution import Upscale, classifier, convolution, initialise, multiply_adds, seeded


@pytest.mark.parametrize("kernel", [1, 3, 5, 7])
def test_a_convolution_keeps_the_size_but_for_its_stride(kernel):
    x = torch.zeros(2, 4, 12, 9)
    assert convolution(4, 6, kernel, norm=True)(x).shape == (2, 6, 12, 9)
    assert convolution(4, 6, kernel, stride=2, norm=False)(x).shape == (2, 6, 6, 5)


def test_a_convolution_has_a_norm_or_a_bias():
    assert [name for name, _ in convolution(1, 2, norm=True).named_parameters()] == [
        "0.weight",
        "1.weight",
        "1.bias",
    ]
    assert [name for name, _ in convolution(1, 2, norm=False).named_parameters()] == ["0.weight", "0.bias"]
    assert convolution(1, 2, norm=False)(torch.randn(3, 1, 5, 5)).min() >= 0
    assert convolution(1, 2, norm=False, relu=False)(torch.randn(3, 1, 5, 5)).min() < 0


def test_a_classifier_ends_in_logits():
    layers = classifier(12, (7, 5), 3, 0.5)
    assert len(layers) == 3
    assert nn.Sequential(*layers)(torch.randn(4, 3, 2, 2)).shape == (4, 3)
    assert [m.p for layer in layers for m in layer if isinstance(m, nn.Dropout)] == [0.5, 0.5]


def test_upscaling_keeps_what_is_linear():
    ramp = torch.arange(4.0).expand(1, 1, 4, 4)
    large = Upscale(8)(ramp)
    assert large.shape == (1, 1, 8, 8)
    torch.testing.assert_close(large[0, 0, 3, 1:-1], torch.arange(6) / 2 + 0.25)


def test_initial_weights_have_the_variance_of_their_fan_in_and_the_last_are_small():
    with seeded(1):
        layers = [convolution(32, 64, norm=False), nn.Linear(500, 300), nn.Linear(300, 200)]
        initialise(layers)
    for weight, variance in (
        (layers[0][0].weight, 2 / (32 * 9)),
        (layers[1].weight, 2 / 500),
        (layers[2].weight, 1e-4),
    ):
        assert weight.var().item() == pytest.approx(variance, rel=0.05)
    assert not layers[0][0].bias.any()
    assert not layers[1].bias.any()


def test_seeded_leaves_the_callers_random_state():
    torch.manual_seed(3)
    expected = torch.rand(2)
    torch.manual_seed(3)
    with seeded(8):
        first = torch.rand(2)
    assert torch.equal(torch.rand(2), expected)
    with seeded(8):
        assert torch.equal(torch.rand(2), first)


def test_multiply_adds_are_counted_by_hand():
    layers = [
        convolution(3, 8, norm=True),
        nn.Sequential(nn.Conv2d(8, 4, 3, stride=2, padding=1, groups=2), nn.ReLU()),
        nn.MaxPool2d(2),
        nn.Sequential(nn.Flatten(), nn.Linear(4 * 2 * 2, 10)),
    ]
    assert multiply_adds(layers, (3, 8, 8)) == [64 * 27 * 8, 16 * 9 * 4 * 4, 1, 160]
    assert all(layer.training for layer in layers)
    assert layers[0][1].num_batches_tracked == 0
