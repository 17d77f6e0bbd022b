"""Links with a fault that a test asks for: one bit of one message, or no message any more."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from avgpipe.faults.fault import Fault
from avgpipe.faults.kinds import disturb
from avgpipe.links.link import Link, LocalLink
from avgpipe.links.transport import flip_bit, with_flipped_bit
from tests.links.ends import CPU, LINKS, Ends, ends


def flipped_bits(sent: torch.Tensor, received: torch.Tensor) -> list[int]:
    found = []
    for byte, (a, b) in enumerate(zip(*(t.reshape(-1).view(torch.uint8).tolist() for t in (sent, received)))):
        found += [8 * byte + bit for bit in range(8) if (a ^ b) >> bit & 1]
    return found


@pytest.mark.parametrize("bit", [0, 62, 64 * 3 + 5, 64 * 1000 + 9])
def test_bits_are_counted_through_all_tensors(bit: int) -> None:
    tensors = [torch.rand(3), torch.rand(0), torch.rand(2, 5, dtype=torch.float64), torch.rand(())]
    before = torch.cat([t.clone().reshape(-1).view(torch.uint8) for t in tensors])
    flip_bit(tensors, bit)
    after = torch.cat([t.reshape(-1).view(torch.uint8) for t in tensors])
    assert flipped_bits(before, after) == [bit % (8 * len(before))]


def test_a_flipped_copy_leaves_the_value_as_it_is() -> None:
    value = {
        "none": None,
        "empty": torch.rand(0),
        "x": torch.rand(4, 3).T.requires_grad_(),
        "y": torch.rand(2),
    }
    before = value["x"].clone()
    copy = with_flipped_bit(value, 33)
    assert torch.equal(value["x"], before)
    assert copy["x"].requires_grad
    assert flipped_bits(value["x"].detach().contiguous(), copy["x"].detach()) == [33]
    assert copy["y"] is value["y"]


def disturbed(made: Ends, **fault: Any) -> None:
    """Give the end of stage 0 a fault."""
    links: dict[int, Link] = {0: LocalLink(made.mailboxes[0], CPU), 1: made.links[0]}
    disturb(links, Fault(**fault))
    assert type(links[0]) is LocalLink
    made.links[0] = links[1]


@pytest.mark.parametrize("kind", LINKS)
@pytest.mark.parametrize("size", [8, 30_000])  # a part of gloo's envelope, and a payload of its own
def test_a_bit_flips_in_the_next_message_alone(kind: str, size: int) -> None:
    value = torch.rand(size, dtype=torch.float64)
    with ends(kind) as made:
        link = made.links[0]
        made.pass_on(value)  # and its format
        links: dict[int, Link] = {1: link}
        disturb(links, Fault("flipped bit", where="wire", bit=64 + 51))
        made.links[0] = links[1]
        assert made.pass_on([None, 3]) == [None, 3]  # which has no tensor
        before = value.clone()
        received = made.pass_on(value)
        assert flipped_bits(before, received) == [64 + 51]
        assert torch.equal(value, before)
        assert links[1] is link
        made.links[0] = link
        assert torch.equal(made.pass_on(value), before)


def test_memory_that_has_gone_with_its_process_is_no_error_of_the_receiver() -> None:
    """A message that was announced, but not taken, before its sender died."""

    class OfTheDead:
        def take(self) -> Any:
            raise FileNotFoundError(2, "slot 1 of 4096 bytes cannot be mapped: No such file or directory")

    with ends("shm") as made:
        receiving = made.links[1]
        (channel, _, decoder), *others = receiving._incoming
        receiving._incoming = [(channel, OfTheDead(), decoder), *others]
        made.send(torch.rand(3))
        assert made.pass_on([3], "E") == [3]


@pytest.mark.parametrize("kind", LINKS)
def test_what_is_sent_through_a_cut_link_does_not_arrive(kind: str) -> None:
    with ends(kind) as made:
        link = made.links[0]
        made.pass_on(torch.rand(3))
        disturbed(made, kind="cut line")
        key = made.send(torch.rand(3))
        assert torch.equal(made.pass_on(torch.ones(2), "B"), torch.ones(2))  # what comes comes
        made.links[0] = link
        made.pass_on(torch.rand(3))
        assert key not in made.mailboxes[1]
