"""Small forms of the vision models whose layers work in place: torchvision's own where it is installed."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import nn


def _torchvision() -> Any:
    """torchvision beside a CPU build of torch: its compiled operators are missing, and so must be declared."""
    global _operators
    try:
        import torchvision
    except ImportError:
        return None
    except RuntimeError:
        _operators = torch.library.Library("torchvision", "DEF")
        _operators.define("nms(Tensor dets, Tensor scores, float iou_threshold) -> Tensor")
        _operators.define("qnms(Tensor dets, Tensor scores, float iou_threshold) -> Tensor")
        import torchvision
    return torchvision.models


_operators: Any = None  # kept: the declarations end with it


def _small(model: Any, features: int) -> nn.Module:
    """VGG or AlexNet with a classifier of a few thousand weights instead of a hundred million."""
    model.avgpool = nn.AdaptiveAvgPool2d(1)
    model.classifier = nn.Sequential(
        *(nn.Linear(features, 16), nn.ReLU(inplace=True), nn.Dropout(), nn.Linear(16, 10))
    )
    return _without_chance(model)


def _without_chance(model: nn.Module) -> nn.Module:
    for module in model.modules():
        if isinstance(module, nn.Dropout):
            module.p = 0.0
    return model


models = _torchvision()
VISION_MODELS: dict[str, Callable[[], nn.Module]] = {}  # empty without torchvision
if models is not None:
    VISION_MODELS = {
        "vgg11": lambda: _small(models.vgg11(num_classes=10), 512),
        "vgg16": lambda: _small(models.vgg16(num_classes=10), 512),
        "alexnet": lambda: _small(models.alexnet(num_classes=10), 256),
        "squeezenet1_0": lambda: _without_chance(models.squeezenet1_0(num_classes=10)),
        "efficientnet_b0": lambda: _without_chance(
            models.efficientnet_b0(num_classes=10, stochastic_depth_prob=0.0)
        ),
        "mobilenet_v3_small": lambda: _without_chance(models.mobilenet_v3_small(num_classes=10)),
    }
