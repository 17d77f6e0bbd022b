"""Bits that are flipped on the way are found where they arrive, over each link, and named."""

from __future__ import annotations

import ctypes
import itertools
import os
import random
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

from avgpipe import Plan
from avgpipe.errors import PipelineError
from avgpipe.links import refuse_unverified
from avgpipe.links.codec import checksum
from avgpipe.links.group import GroupLink
from avgpipe_ext import ring
from tests.links.ends import LINKS, ends
from tests.runner import Ranks, run
from tests.runtime.cases import language_model, momentum, token_batches, train_pipeline

LOSS = nn.CrossEntropyLoss()
SMALL, LARGE = 100, 300_001  # elements: with the record, and by themselves


@pytest.mark.parametrize("size", [1, 7, 512, 1024, 1025, 4096, 70_000])
def test_every_flipped_bit_changes_the_checksum(size: int) -> None:
    dice = random.Random(size)
    data = np.frombuffer(dice.randbytes(size), np.uint8).copy()
    right = checksum(data)
    for bit in {0, 8 * size - 1, *(dice.randrange(8 * size) for _ in range(200))}:
        data[bit // 8] ^= 1 << bit % 8
        assert checksum(data) != right
        data[bit // 8] ^= 1 << bit % 8
    assert checksum(data) == right
    assert checksum(data, 1) != right


def test_a_checksum_of_nothing_follows_from_its_start() -> None:
    assert checksum(b"", 5) == 5


def on_the_way(patch: Callable[[Any, str, Any], None], where: str, number: int = 0) -> None:
    """Flip a bit of the first message that this process sends, or a later one: in its "record", or in its "data"."""
    counted, addresses = itertools.count(), dict[Any, int]()
    reserve, publish, post_send = ring.Sender.reserve, ring.Sender.publish, GroupLink.post_send

    def reserved(sender: Any, size: int) -> int:
        addresses[sender] = reserve(sender, size)
        return addresses[sender]

    def published(sender: Any, size: int, *words: int) -> None:
        if next(counted) == number:
            if where == "record":
                words = (words[0] ^ 4, *words[1:])
            else:
                flip(addresses[sender] + size - 64)
        publish(sender, size, *words)

    def posted(link: Any, buffer: torch.Tensor, tag: int) -> Any:
        is_envelope, size = tag == 0, buffer.numel()
        has_data = size > (
            64 if is_envelope else 1
        )  # the record; a byte that ends a receive which is too small
        if (is_envelope if where == "record" else has_data) and next(counted) == number:
            flip(buffer.data_ptr() + (8 if where == "record" else size - 64))
        return post_send(link, buffer, tag)

    patch(ring.Sender, "reserve", reserved)
    patch(ring.Sender, "publish", published)
    patch(GroupLink, "post_send", posted)


def flip(address: int) -> None:
    ctypes.c_ubyte.from_address(address).value ^= 16


@pytest.mark.parametrize("link", LINKS)
@pytest.mark.parametrize("size", [0, SMALL, LARGE])
def test_messages_that_are_verified_arrive_as_they_were(link: str, size: int) -> None:
    with ends(link, verifies=True) as pair:
        for n in range(10):
            for kind in "FB":
                got = pair.pass_on([torch.full((size + n,), n), None, n], kind)
                assert got[1:] == [None, n]
                assert torch.equal(got[0], torch.full((size + n,), n))
        assert pair.pass_on([None]) == [None]


@pytest.mark.parametrize("link", LINKS)
def test_narrower_wires_are_verified_too(link: str) -> None:
    with ends(link, torch.bfloat16, verifies=True) as pair:
        assert torch.equal(pair.pass_on(torch.ones(LARGE)), torch.ones(LARGE))


@pytest.mark.parametrize("link", LINKS)
@pytest.mark.parametrize(("where", "size"), [("record", SMALL), ("data", SMALL), ("data", LARGE)])
def test_a_flipped_bit_is_found_and_named(
    link: str, where: str, size: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    on_the_way(monkeypatch.setattr, where)
    with ends(link, verifies=True) as pair:
        with pytest.raises(PipelineError, match="a bit was flipped in transit") as caught:
            pair.pass_on(torch.zeros(size))
        text = str(caught.value)
        assert text.startswith("end 1 received")
        assert "from end 0" in text
        if where == "data":
            assert "the activation of micro-batch 0 of batch 0 (pipeline 0)" in text


@pytest.mark.parametrize("link", LINKS)
@pytest.mark.parametrize("size", [SMALL, LARGE])
def test_a_bit_that_a_test_has_flipped_is_found_too(link: str, size: int) -> None:
    with ends(link, verifies=True) as pair:
        key = pair.key("F")
        pair.links[key.source].send_flipped(key, torch.zeros(size), 62)
        with pytest.raises(PipelineError, match="a bit was flipped in transit"):
            pair.receive(key)


@pytest.mark.parametrize("link", LINKS)
def test_without_verification_it_is_not_found(link: str, monkeypatch: pytest.MonkeyPatch) -> None:
    on_the_way(monkeypatch.setattr, "data")
    with ends(link) as pair:
        assert not torch.equal(pair.pass_on(torch.zeros(LARGE)), torch.zeros(LARGE))


def trained(link: str, verify_wire: bool) -> Any:
    return train_pipeline(
        language_model(),
        Plan(stages=2, pipelines=2, micro_batches=2),
        token_batches(5, 8, 3),
        LOSS,
        momentum,
        link=link,
        verify_wire=verify_wire,
        timeout_s=30,
    )


@pytest.mark.ranks
@pytest.mark.parametrize("link", LINKS)
def test_training_is_the_same(link: str) -> None:
    (losses, state), *_ = run(2, trained, link=link, verify_wire=True)
    expected_losses, expected = run(2, trained, link=link, verify_wire=False)[0]
    assert losses == expected_losses
    assert all(torch.equal(state[name], expected[name]) for name in expected)


def damaged(link: str) -> None:
    if os.environ["RANK"] == "0":
        on_the_way(setattr, "data")
    trained(link, True)


@pytest.mark.promise(1)
@pytest.mark.parametrize("link", LINKS)
def test_a_run_ends_on_every_rank_and_the_receiver_names_the_message(link: str) -> None:
    ends = Ranks(2, damaged, link=link).join(30)
    assert [code for code, _ in ends] == [1, 1]
    sender, receiver = (output.strip().split("\n")[-1] for _, output in ends)
    what = "the activation of micro-batch 0 of batch 0 (pipeline 0)"
    assert f"PipelineError: rank 1 (stage 1) received {what}" in receiver
    assert "from rank 0 (stage 0), and not as it was sent: a bit was flipped" in receiver
    assert "rank 0 stops because of rank 1: PipelineError: rank 1 (stage 1) received" in sender


def test_links_that_keep_messages_on_a_device_are_refused() -> None:
    for link in ("auto", "nccl", "cuda-ipc"):
        with pytest.raises(
            ValueError, match="memory and lines have their own checksums: use link 'shm' or 'gloo'"
        ):
            refuse_unverified(link, "cuda")
    for link, device in (("shm", "cuda"), ("gloo", "cuda"), ("auto", "cpu")):
        refuse_unverified(link, device)


def disagreeing() -> str:
    with pytest.raises(ValueError, match="differs between ranks") as caught:
        trained("shm", os.environ["RANK"] == "0")
    return str(caught.value)


@pytest.mark.ranks
def test_ranks_that_disagree_are_refused() -> None:
    assert all("verify_wire" in text for text in run(2, disagreeing))
