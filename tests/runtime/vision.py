"""Small forms of torchvision's models whose layers work in place, for a process that needs nothing else of its."""

from __future__ import annotations

from torch import nn

from benchmarks.models import networks

FOLDER = networks.FOLDER
NAMES = ["vgg11", "vgg16", "alexnet", "squeezenet1_0", "efficientnet_b0", "mobilenet_v3_small"]


def vision_model(name: str) -> nn.Module:
    """In float64, with random weights for ten classes, and without anything that is left out at random."""
    if name == "vgg16":
        return networks.built(networks.Network(lambda: networks.small_head("vgg16", 512)))
    return networks.network(f"torchvision {name}")
