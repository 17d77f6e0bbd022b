"""Sums over hosts: groups that processes make through the coordinator, here in threads."""

from __future__ import annotations

import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest
import torch

from avgpipe.errors import PeerLost
from avgpipe.fault import hosts
from avgpipe.fault.hosts import HostGroup


class Shared:
    """Passes on what is posted, as the coordinator does."""

    timeout_s = 20.0

    def __init__(self) -> None:
        self._texts: dict[tuple[str, str], str] = {}
        self._lock = threading.Condition()

    def post(self, name: str, key: str, value: str) -> None:
        with self._lock:
            self._texts[name, key] = value
            self._lock.notify_all()

    def posted(self, name: str, key: str, goes_on: Callable[[], bool], limit_s: float) -> str:
        with self._lock:
            assert self._lock.wait_for(lambda: (name, key) in self._texts or not goes_on(), limit_s)
            if (name, key) not in self._texts:
                raise PeerLost("given up")
            return self._texts[name, key]


def on_all(size: int, act: Callable[[HostGroup], Any]) -> list[Any]:
    shared: Any = Shared()

    def run(index: int) -> Any:
        return act(HostGroup(shared, "sums", index, size, lambda: True, "127.0.0.1"))

    with ThreadPoolExecutor(size) as pool:
        return list(pool.map(run, range(size)))


@pytest.mark.parametrize("size", [2, 3, 4])
@pytest.mark.parametrize("count", [1, 2, 7, 1000])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16])
def test_sums_are_those_in_the_order_of_hosts_to_the_bit(
    size: int, count: int, dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(hosts, "_SEGMENT", 256)
    values = [torch.randn(count, generator=torch.Generator().manual_seed(n)).to(dtype) for n in range(size)]
    expected = values[0].clone()
    for value in values[1:]:
        expected += value

    def act(group: HostGroup) -> torch.Tensor:
        own, out = values[group.index].clone(), torch.empty(count, dtype=dtype)
        group.sum(own, out)
        assert torch.equal(own, values[group.index])
        return out

    for found in on_all(size, act):
        assert torch.equal(found, expected)


def test_narrow_messages_are_summed_in_full_width_and_alike_everywhere(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(hosts, "_SEGMENT", 256)
    values = [torch.randn(1001, generator=torch.Generator().manual_seed(n)) for n in range(3)]

    def act(group: HostGroup) -> torch.Tensor:
        out = torch.empty(1001)
        group.sum(values[group.index], out, torch.bfloat16)
        return out

    first, *others = on_all(3, act)
    assert all(torch.equal(first, other) for other in others)
    exact = sum(values, torch.zeros(1001))
    narrow = sum((value.bfloat16().float() for value in values), torch.zeros(1001))
    assert (first - exact).abs().max() <= (narrow.bfloat16().float() - exact).abs().max() * 1.5


def test_texts_of_all_are_there_in_order() -> None:
    def act(group: HostGroup) -> list[bytes]:
        return group.texts(b"of %d" % group.index * (group.index + 1), [100, 200, 300])()

    assert on_all(3, act) == [[b"of 0", b"of 1of 1", b"of 2of 2of 2"]] * 3


def test_an_aborted_group_ends_all_waits_at_once() -> None:
    begun = threading.Barrier(3)

    def act(group: HostGroup) -> str:
        if group.index == 2:  # it never sends
            begun.wait()
            return "silent"
        waiting = group.receive(torch.zeros(10), 2)
        if group.index == 1:
            begun.wait()
            group.abort()
        else:
            begun.wait()
        try:
            waiting.wait()
        except RuntimeError:
            return "aborted"
        return "received"

    assert on_all(3, act) == ["aborted", "aborted", "silent"]


def test_a_meeting_is_given_up_when_it_no_longer_matters() -> None:
    shared: Any = Shared()
    with pytest.raises(RuntimeError, match="given up"):
        HostGroup(shared, "sums", 0, 2, lambda: False, "127.0.0.1")
