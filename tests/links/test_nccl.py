"""The link for a GPU each, over gloo and without GPUs: formats by one link, tensors by another."""

from __future__ import annotations

from functools import partial
from typing import Any

import pytest
import torch

from avgpipe.links.cuda import NcclLink, edge_groups
from avgpipe.links.group import GroupLink
from avgpipe.links.link import Endpoint, Mailbox
from avgpipe.links.message import Key, Message
from avgpipe.ranks.world import World
from tests.links.ends import BACK, CHANNELS, CPU
from tests.runner import run

pytestmark = pytest.mark.ranks

SENT = 20


def value(n: int) -> Any:
    size = 1 + n % 3
    return [torch.full((size, 2), float(n), requires_grad=n % 2 == 0), None, f"text {n % 4}", torch.tensor(n)]


def exchange() -> list[Any]:
    """Both ranks send in all their channels, in an order of their own, before they take anything."""
    world = World(60)
    me, peer = world.rank, 1 - world.rank
    mailbox = Mailbox()
    into = [BACK, CHANNELS][me]
    groups = edge_groups([(0, 1), (1, 0)], CPU, 60, backend="gloo")

    control = partial(GroupLink, world.group, peer, partial(world.lost, peer))
    end = Endpoint(mailbox, CPU, into, [CHANNELS, BACK][me])
    link = NcclLink(control, groups, peer, end)
    kinds = [channel.kind for channel in [BACK, CHANNELS][peer]]
    for n in range(SENT):
        link.send(Key(Message(kinds[n % len(kinds)]), 0, me, peer, n, 0), value(n))
    kinds = [channel.kind for channel in into]
    keys = [Key(Message(kinds[n % len(kinds)]), 0, peer, me, n, 0) for n in range(SENT)]
    assert mailbox.wait_until(lambda: all(key in mailbox for key in keys), 60)
    got = [mailbox.take(key) for key in reversed(keys)]  # taken in another order than sent
    world.barrier()
    link.close(10)
    return [[x.detach().clone(), x.requires_grad, *rest, int(number)] for x, *rest, number in reversed(got)]


def test_messages_of_all_channels_arrive_in_any_order_of_taking() -> None:
    for rank in run(2, exchange):
        assert len(rank) == SENT
        for n, (first, wants, nothing, text, number) in enumerate(rank):
            expected = value(n)
            assert torch.equal(first, expected[0].detach())
            assert wants == expected[0].requires_grad
            assert (nothing, text, number) == (None, f"text {n % 4}", n)
