"""Each process has a CUDA device of its own and works on no other, told by what it would ask CUDA for."""

from __future__ import annotations

import threading
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import nn

from avgpipe import Pipeline, Plan
from avgpipe import device as streams
from avgpipe.cli import measuring
from avgpipe.cli.config import ProfilingOptions
from avgpipe.device import own_device
from avgpipe.errors import PeerLost
from avgpipe.links.group import GroupLink
from avgpipe.links.link import Mailbox
from avgpipe.links.transport import Endpoint
from avgpipe.measure import profiler, sweep
from avgpipe.ranks.environment import peak_memory_bytes
from avgpipe.runtime import session
from tests.happens_before.clocks import Account
from tests.links.ends import BACK, CHANNELS, CPU, groups
from tests.patience import wait_until
from tests.runtime.cases import adamw, language_model

CUDA = torch.device("cuda", 3)


class Host:
    """With four CUDA devices, of which the second is the current one. ``selected``: by threads, by their names."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.selected: list[tuple[str, torch.device]] = []
        monkeypatch.delenv("LOCAL_RANK", raising=False)
        here = torch.accelerator
        monkeypatch.setattr(here, "current_accelerator", lambda check_available=False: torch.device("cuda"))
        monkeypatch.setattr(here, "device_count", lambda: 4)
        monkeypatch.setattr(here, "current_device_index", lambda: 1)
        monkeypatch.setattr(here, "set_device_index", self._select)

    def _select(self, device: torch.device) -> None:
        self.selected.append((threading.current_thread().name, device))


@pytest.fixture
def host(monkeypatch: pytest.MonkeyPatch) -> Host:
    return Host(monkeypatch)


@pytest.mark.usefixtures("host")
def test_a_process_of_a_launcher_takes_the_device_of_its_place(monkeypatch: pytest.MonkeyPatch) -> None:
    assert str(own_device("cuda")) == "cuda:1"
    for place, index in [(0, 0), (3, 3), (4, 0), (6, 2)]:
        monkeypatch.setenv("LOCAL_RANK", str(place))
        assert str(own_device("cuda")) == f"cuda:{index}"
    assert str(own_device("cuda:1")) == "cuda:1"  # asked for is asked for
    assert own_device("cpu") == CPU


def test_a_host_without_devices_says_so(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.accelerator, "current_accelerator", lambda check_available=False: None)
    with pytest.raises(ValueError, match=r"device 'cuda': torch .* sees no such device here; use 'cpu'"):
        own_device("cuda")


class Stop(Exception):
    pass


def stop(*_: Any, **__: Any) -> None:
    raise Stop


@pytest.mark.parametrize(("asked", "index"), [("cuda", 2), ("cuda:0", 0)])
def test_a_pipeline_selects_its_device_before_anything_is_on_it(
    host: Host, monkeypatch: pytest.MonkeyPatch, asked: str, index: int
) -> None:
    """Before groups are made too: NCCL takes the current device where it is told none. That no other device gets a
    context is for a host with several of them to show.
    """
    monkeypatch.setenv("LOCAL_RANK", "2")
    monkeypatch.setattr(session, "meet", stop)
    with pytest.raises(Stop):
        Pipeline(language_model(), Plan(), loss_fn=nn.functional.cross_entropy, optimizer=adamw, device=asked)
    assert host.selected == [("MainThread", torch.device("cuda", index))]


def test_threads_that_receive_select_it_too(host: Host, monkeypatch: pytest.MonkeyPatch) -> None:
    """They copy what arrives to the device, each in a thread that begins on device 0."""
    monkeypatch.setattr(streams, "backend", Account())
    links = [
        GroupLink(group, 1 - k, PeerLost, Endpoint(Mailbox(), CUDA, (BACK, CHANNELS)[k], (CHANNELS, BACK)[k]))
        for k, group in enumerate(groups(2))
    ]
    try:
        receivers = {thread.name for thread in threading.enumerate() if "avgpipe-receive" in thread.name}
        assert len(receivers) == 2  # one for each end
        wait_until(lambda: len(host.selected) == 2)
        assert {name for name, _ in host.selected} == receivers
        assert {device for _, device in host.selected} == {CUDA}
    finally:
        for link in links:
            link.leave()
        for link in links:
            link.close(10)


def test_memory_is_that_of_the_device_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(
        torch.accelerator, "max_memory_allocated", lambda device=None: {CUDA: 7}.get(device, 0)
    )
    assert peak_memory_bytes(CUDA) == 7
    assert peak_memory_bytes(CPU) > 2**20


def test_a_trial_s_worker_reports_the_memory_of_its_own_device(monkeypatch: pytest.MonkeyPatch) -> None:
    class Made:
        device = CUDA

        def __init__(self, *_: object) -> None:
            pass

        def __enter__(self) -> Made:
            return self

        def __exit__(self, *_: object) -> None:
            pass

    monkeypatch.setattr(measuring, "build", lambda asked: (SimpleNamespace(layers=[]), None))
    monkeypatch.setattr(measuring, "pipeline_options", lambda asked, workload: {})
    monkeypatch.setattr(measuring, "Pipeline", Made)
    monkeypatch.setattr(measuring, "rounds_of", lambda pipeline, batch, batches: [1.0])
    monkeypatch.setattr(measuring, "peak_memory_bytes", lambda device: {CUDA: 7}[device])
    config = ProfilingOptions(workload="awd-lstm", device="cuda").to_json()
    assert measuring.tried(config, Plan().to_json(), 1)["memory_bytes"] == 7


def test_processes_that_profile_take_a_device_each(host: Host, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("LOCAL_RANK", "2")
    monkeypatch.setenv("RANK", "2")
    monkeypatch.setattr(measuring, "loaded", stop)
    config = ProfilingOptions(workload="awd-lstm", device="cuda").to_json()
    with pytest.raises(Stop):
        measuring.profiled(config, [1], False, 3, 60.0)
    assert host.selected == [("MainThread", torch.device("cuda", 2))]
    assert profiler.own_device("cuda") == torch.device("cuda", 2)


def test_a_profile_s_clock_marks_the_stream_of_its_device(monkeypatch: pytest.MonkeyPatch) -> None:
    marked: list[Any] = []

    class Event:
        def __init__(self, device: torch.device, enable_timing: bool) -> None:
            pass

        def record(self, stream: Any = "of the current device") -> None:
            marked.append(stream)

    monkeypatch.setattr(streams.backend, "Event", Event, raising=False)
    monkeypatch.setattr(streams.backend, "current_stream", lambda device: f"of {device}", raising=False)
    sweep.ProfilingClock(CUDA).mark()
    assert marked == ["of cuda:3"]
