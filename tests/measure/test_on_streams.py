"""Profiles where the device has streams: two replicas beside each other, and a clock of the device's own."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from avgpipe.measure.profiler import profile
from tests.happens_before.on_cpu import on_streams
from tests.happens_before.operators import DEVICE, DeviceAccount

pytestmark = pytest.mark.host  # they have an account of their own


@pytest.mark.promise
def test_a_profile_is_in_the_order_of_streams() -> None:
    layers = [nn.Linear(8, 8), nn.Tanh(), nn.Linear(8, 3)]
    with on_streams(DeviceAccount()) as account:
        found = profile(
            layers,
            torch.randn(8, 8),
            loss_fn=nn.CrossEntropyLoss(),
            target=torch.randint(3, (8,)),
            device=DEVICE,
            budget_s=1.0,
        )
    assert not account.memory.found
    assert account.operators > 100
    assert len(found.second_lane) == len(found.micro_batch_sizes)
