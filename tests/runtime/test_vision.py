"""A few of the networks that ``benchmarks/models/vision.py`` tries, each in a process of its own."""

from __future__ import annotations

import pytest

from benchmarks.models.networks import FOLDER
from benchmarks.models.vision import tried
from tests.runner import run

pytestmark = [
    pytest.mark.ranks,
    pytest.mark.skipif(
        not (FOLDER / "timm").exists(),
        reason="make puts torchvision and timm there; test_exported has such models",
    ),
]


def test_a_network_with_statistics_in_modules_of_its_own_is_equal() -> None:
    (row,) = run(1, tried, name="timm mobilenetv3_small_050", timeout_s=110)
    assert row["equal"], row
    assert row["by"] == "torch.fx"


@pytest.mark.slow
@pytest.mark.parametrize("name", ["torchvision swin_t", "timm vit_tiny_patch16_224", "timm ghostnet_050"])
def test_networks_are_equal(name: str) -> None:
    (row,) = run(1, tried, name=name, timeout_s=110)
    assert row["equal"], row


# It is exported for images of any size, which its code forbids, and then of this one.
@pytest.mark.slow
@pytest.mark.timeout(600)
def test_a_network_that_only_torch_export_can_trace_is_equal() -> None:
    (row,) = run(1, tried, name="timm mobilevit_xxs", timeout_s=580)
    assert row["equal"], row
    assert row["by"] == "torch.export"
