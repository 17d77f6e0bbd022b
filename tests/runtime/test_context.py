"""Keyed random numbers, and what layers carry."""

from __future__ import annotations

from typing import Any

import torch

from avgpipe.model.context import CallerGenerators, Carry, Position, mix, seed_generators, set_position


def test_keys_of_neighbouring_places_differ() -> None:
    keys = {
        mix(0, i, j, m, layer) for i in range(3) for j in range(20) for m in range(8) for layer in range(6)
    }
    assert len(keys) == 3 * 20 * 8 * 6
    assert mix(1, 2) != mix(2, 1)
    assert all(0 <= key < 2**64 for key in keys)


def test_the_callers_generator_comes_back() -> None:
    device = torch.device("cpu")
    torch.manual_seed(3)
    expected = torch.rand(2)
    torch.manual_seed(3)
    with CallerGenerators(device):
        seed_generators(device, mix(1, 2, 3))
        torch.rand(5)
    assert torch.equal(torch.rand(2), expected)


def test_a_carry_gives_the_previous_batch_even_when_a_forward_runs_twice() -> None:
    carry = Carry()

    def forward(batch: int, micro_batch: int = 0) -> Any:
        before = set_position(Position(0, batch, micro_batch))
        got = carry.get()
        carry.set(batch)
        set_position(before)
        return got

    assert [forward(0), forward(0), forward(2), forward(2), forward(4)] == [None, None, 0, 0, 2]
    assert forward(4, micro_batch=1) is None
    assert forward(6) == 4
    carry.reset()
    assert forward(8) is None


def test_outside_of_a_pipeline_every_call_is_a_new_batch() -> None:
    carry = Carry()
    for n in range(3):
        assert carry.get() == (n - 1 if n else None)
        carry.set(n)
