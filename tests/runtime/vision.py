"""Small forms of torchvision's models whose layers work in place, for a process that needs nothing else of its."""

from __future__ import annotations

import sys
from typing import Any

import torch
from torch import nn

from tests.runner import ROOT

FOLDER = ROOT / ".venv" / "vision"
NAMES = ["vgg11", "vgg16", "alexnet", "squeezenet1_0", "efficientnet_b0", "mobilenet_v3_small"]


def vision_model(name: str) -> nn.Module:
    """With random weights for ten classes, and without dropout."""
    options: dict[str, Any] = {"stochastic_depth_prob": 0.0} if name == "efficientnet_b0" else {}
    model: Any = getattr(_models(), name)(num_classes=10, **options)
    if name in ("vgg11", "vgg16", "alexnet"):  # their classifiers have a hundred million weights
        features = 256 if name == "alexnet" else 512
        model.avgpool = nn.AdaptiveAvgPool2d(1)
        model.classifier = nn.Sequential(
            *(nn.Linear(features, 16), nn.ReLU(inplace=True), nn.Dropout(), nn.Linear(16, 10))
        )
    for module in model.modules():
        if isinstance(module, nn.Dropout):
            module.p = 0.0
    return model  # type: ignore[no-any-return]


def _models() -> Any:
    """torchvision.models beside any build of torch: its compiled operators, which none of these needs, are declared."""
    global _operators
    if _operators is None:
        sys.path.append(str(FOLDER))
        _operators = torch.library.Library("torchvision", "DEF")
        _operators.define("nms(Tensor dets, Tensor scores, float iou_threshold) -> Tensor")
        _operators.define("qnms(Tensor dets, Tensor scores, float iou_threshold) -> Tensor")
    import torchvision

    return torchvision.models


_operators: Any = None  # kept: the declarations end with it
