"""Thirty classification networks of torchvision and timm, with random weights for ten classes."""

from __future__ import annotations

import sys
from collections.abc import Callable
from functools import cache, partial
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import nn

FOLDER = Path(__file__).parents[2] / ".venv" / "vision"  # make puts them there, out of everybody else's sight


class Libraries(NamedTuple):
    torchvision: Any
    timm: Any


@cache
def libraries() -> Libraries:
    """Import both beside any build of torch: torchvision's compiled operators, which none of these needs, are declared.

    For a process that does nothing else: where torchvision is loaded, other libraries expect all of it.
    """
    sys.path.append(str(FOLDER))
    operators = torch.library.Library("torchvision", "DEF")
    _KEPT.append(operators)
    operators.define("nms(Tensor dets, Tensor scores, float iou_threshold) -> Tensor")
    operators.define("qnms(Tensor dets, Tensor scores, float iou_threshold) -> Tensor")
    import timm
    import torchvision

    return Libraries(torchvision, timm)


_KEPT: list[Any] = []  # the declarations end with their library


class Network(NamedTuple):
    """A network, and the pixels of the images that it is tried on."""

    make: Callable[[], nn.Module]
    pixels: int = 64


def _torchvision(name: str, **options: Any) -> nn.Module:
    model: nn.Module = getattr(libraries().torchvision.models, name)(num_classes=10, **options)
    return model


def _timm(name: str, **options: Any) -> nn.Module:
    model: nn.Module = libraries().timm.create_model(name, num_classes=10, **options)
    return model


def small_head(name: str, features: int) -> nn.Module:
    """With a classifier of two small layers: theirs have a hundred million weights."""
    model: Any = _torchvision(name)
    model.avgpool = nn.AdaptiveAvgPool2d(1)
    model.classifier = nn.Sequential(
        *(nn.Linear(features, 16), nn.ReLU(inplace=True), nn.Dropout(), nn.Linear(16, 10))
    )
    return model  # type: ignore[no-any-return]


_PLAIN = {"aux_logits": False, "init_weights": False}

TORCHVISION: dict[str, Network] = {
    "alexnet": Network(partial(small_head, "alexnet", 256)),
    "vgg11": Network(partial(small_head, "vgg11", 512)),
    "vgg11_bn": Network(partial(small_head, "vgg11_bn", 512)),
    **{
        name: Network(partial(_torchvision, name))
        for name in (
            *("squeezenet1_0", "resnet18", "resnet50", "resnext50_32x4d", "densenet121", "mobilenet_v2"),
            *("mobilenet_v3_small", "regnet_y_400mf", "shufflenet_v2_x1_0", "mnasnet0_5"),
        )
    },
    "googlenet": Network(partial(_torchvision, "googlenet", **_PLAIN)),
    "inception_v3": Network(partial(_torchvision, "inception_v3", **_PLAIN), 96),
    "efficientnet_b0": Network(partial(_torchvision, "efficientnet_b0")),
    "convnext_tiny": Network(partial(_torchvision, "convnext_tiny")),
    "swin_t": Network(partial(_torchvision, "swin_t")),
    "vit_b_16": Network(partial(_torchvision, "vit_b_16", image_size=64)),
}
TIMM: dict[str, Network] = {
    **{
        name: Network(partial(_timm, name))
        for name in (
            *("resnet10t", "convnext_atto", "mobilenetv3_small_050", "regnetx_002"),
            *("efficientnet_lite0", "poolformer_s12", "edgenext_xx_small", "mobilevit_xxs"),
        )
    },
    "ghostnet_050": Network(partial(_timm, "ghostnet_050", drop_rate=0.0)),  # 0.2 by default
    "vit_tiny_patch16_224": Network(partial(_timm, "vit_tiny_patch16_224", img_size=64)),
    "mixer_s32_224": Network(partial(_timm, "mixer_s32_224", img_size=64)),
}
NETWORKS = {
    **{f"torchvision {n}": of for n, of in TORCHVISION.items()},
    **{f"timm {n}": of for n, of in TIMM.items()},
}


def network(name: str) -> nn.Module:
    """Build one of ``NETWORKS`` in float64, without anything that is left out at random."""
    return built(NETWORKS[name])


def built(chosen: Network) -> nn.Module:
    """Build any network so."""
    torch.manual_seed(3)
    model = chosen.make().double()
    for module in model.modules():
        if isinstance(module, nn.modules.dropout._DropoutNd) or type(module).__name__ == "StochasticDepth":
            module.p = 0.0  # type: ignore[assignment]
    return model


def batches(name: str, count: int, samples: int = 4) -> list[Any]:
    """Images and classes, alike for all networks of a size."""
    draw = torch.Generator().manual_seed(0)
    pixels = NETWORKS[name].pixels
    return [
        (
            torch.randn(samples, 3, pixels, pixels, generator=draw, dtype=torch.float64),
            torch.randint(10, (samples,), generator=draw),
        )
        for _ in range(count)
    ]
