"""``pytest --happens-before``: tests run as on a device with streams, and fail where something is out of order.

Ranks that tests start do so too, and report to the test that started them.
"""

from __future__ import annotations

import json
import os
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

from tests.happens_before.on_cpu import on_streams
from tests.happens_before.operators import DeviceAccount

OPTION = "--happens-before"
VARIABLE = "TEST_HAPPENS_BEFORE"  # a folder where ranks leave what they found

_MOST = 12  # findings that a failure shows


def checking() -> bool:
    return VARIABLE in os.environ


def totals(account: DeviceAccount) -> dict[str, Any]:
    memory = account.memory
    return {
        "operators": account.operators,
        "accesses": memory.accesses,
        "orderings": memory.orderings,
        "reuses": memory.reuses,
        "event waits": account.waits,
        "found": dict(memory.found),
        "waited": dict(account.waited),
    }


@contextmanager
def reporting() -> Iterator[None]:
    """In a rank: leave what was found where the test looks for it."""
    if not checking():
        yield
        return
    account = DeviceAccount()
    try:
        with on_streams(account):
            yield
    finally:
        new = Path(os.environ[VARIABLE], f"{os.getpid()}.new")
        new.write_text(json.dumps(totals(account)))
        new.rename(new.with_suffix(".json"))  # whole, also where the process is killed meanwhile


def add(sums: dict[str, Any], more: dict[str, Any]) -> None:
    for name, value in more.items():
        if isinstance(value, dict):
            sums[name] = dict(Counter(sums.get(name, {})) + Counter(value))
        else:
            sums[name] = sums.get(name, 0) + value


@pytest.fixture(autouse=True)
def _in_order(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch, tmp_path_factory: Any) -> Any:
    if not request.config.getoption(OPTION) or request.node.get_closest_marker("host"):
        yield
        return
    folder = tmp_path_factory.mktemp("order")
    monkeypatch.setenv(VARIABLE, str(folder))
    account = DeviceAccount()
    with on_streams(account):
        yield
    sums = totals(account)
    for file in folder.glob("*.json"):
        add(sums, json.loads(file.read_text()))
    request.node.user_properties.append(("happens-before", sums))
    found = Counter(sums["found"])
    assert not found, "out of order:\n" + "\n".join(
        f"{n} times {what}" for what, n in found.most_common(_MOST)
    )


def summarize(reports: list[Any], write: Any) -> None:
    """Print what was checked in all tests."""
    sums: dict[str, Any] = {}
    tests = 0
    for report in reports:
        for name, value in getattr(report, "user_properties", ()):  # a file that cannot be collected has none
            if name == "happens-before" and report.when == "teardown":
                add(sums, value)
                tests += 1
    if not tests:
        return
    waited = Counter(sums.pop("waited"))
    found = sums.pop("found")
    write(f"happens-before: {tests} tests, " + ", ".join(f"{n:,} {what}" for what, n in sums.items()))
    write(f"  {sum(found.values())} out of order; the host waits for the device at {len(waited)} places:")
    for what, n in waited.most_common():
        write(f"  {n:>8,} {what}")
