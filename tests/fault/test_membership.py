"""The end of a process towards the launcher, where what it is asked to do fails."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from avgpipe.errors import PipelineError
from avgpipe.fault.membership import Membership, environment
from tests.fault.test_coordinator import _TOKEN, served
from tests.patience import Deadline


def test_a_process_without_room_for_a_thread_is_lost_at_once(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def adopt(known: Any) -> Sequence[int]:
        raise RuntimeError("can't start new thread")

    found: list[PipelineError] = []
    with served(tmp_path, wanted=1) as one:
        one.coordinator.started(0)
        for name, value in environment(one.coordinator.address, _TOKEN.decode(), 0, 0).items():
            monkeypatch.setenv(name, value)
        membership = Membership(0, 1, "rank 0", 1, timeout_s=600)
        membership.serve(
            SimpleNamespace(position=lambda: [0, 0, 0], adopt=adopt, failed=found.append)  # type: ignore[arg-type]
        )
        with suppress(PipelineError):  # it may be known only in the first step
            membership.enter(["plan", "weights"], {})
        deadline = Deadline(20)
        while not (one.lost and found):
            assert not deadline.has_passed
        assert str(found[0]) == "this process can no longer take part in the run: can't start new thread"
        assert membership.failure is found[0]
        membership.close()


@pytest.mark.parametrize("length", [2**24 - 30, 2**24])
def test_a_result_that_no_message_can_hold_is_refused_by_its_name(
    length: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with served(tmp_path, wanted=1) as one:
        one.coordinator.started(0)
        for name, value in environment(one.coordinator.address, _TOKEN.decode(), 0, 0).items():
            monkeypatch.setenv(name, value)
        membership = Membership(0, 1, "rank 0", 1, timeout_s=600)
        monkeypatch.setattr(membership, "_request", lambda *_, **__: {})
        with pytest.raises(
            ValueError, match=rf"^once\('x'\): the result has {length + 2} bytes as JSON, and may"
        ):
            membership.once("x", 0, lambda: "a" * length)
        membership.close()
