"""The simulated sum of a gradient over hosts: its bytes, its time beside the closed form, and lines that are shared."""

from __future__ import annotations

import pytest

from avgpipe.planning.cluster import Cluster, Device, Level, ring_s
from benchmarks.simulation.exchange import WAYS, simulate
from benchmarks.tables.exchange import exchange_bytes, exchange_seconds

RATE, LATENCY_S, MESSAGE_S, GRADIENT = 125e6, 1e-4, 5e-5, 1e7
SECOND = 1e7 / RATE  # for a gradient


def on(way: str, hosts: int, groups_of: int = 0, group: int = 4) -> dict[str, float]:
    levels = [Level(groups_of or hosts, RATE, LATENCY_S)]
    levels += [Level(hosts // groups_of, 2 * RATE, LATENCY_S)] if groups_of else []
    cluster = Cluster((Device(),) * hosts, tuple(levels))
    return simulate(way, cluster, GRADIENT, group, MESSAGE_S)


@pytest.mark.parametrize("hosts", [2, 3, 16])
def test_a_ring_takes_the_time_of_its_bytes_and_of_each_message(hosts: int) -> None:
    waits_s = 2 * (hosts - 1) * (LATENCY_S + MESSAGE_S)
    assert on("ring", hosts)["seconds"] == pytest.approx(ring_s(GRADIENT, hosts, RATE) + waits_s)


@pytest.mark.parametrize("hosts", [2, 3, 16])
def test_chunks_wait_for_each_message_of_their_own_and_twice_for_the_line(hosts: int) -> None:
    waits_s = 2 * LATENCY_S + 2 * (hosts - 1) * MESSAGE_S
    assert on("chunks", hosts)["seconds"] == pytest.approx(ring_s(GRADIENT, hosts, RATE) + waits_s)


@pytest.mark.parametrize(
    ("way", "gradients", "messages"),
    [
        ("ring", 2 * 15 / 16, 30),
        ("chunks", 2 * 15 / 16, 30),
        ("two levels of chunks", 2 * 15 / 16, 12),
        ("star that sums", 15, 15),
        ("all to all, whole", 15, 15),
        ("star that passes on", 15 * 15, 30),
    ],
)
def test_the_busiest_of_16_hosts_sends(way: str, gradients: float, messages: int) -> None:
    found = on(way, 16)
    assert found["sent_bytes"] == pytest.approx(gradients * GRADIENT)
    assert found["messages"] == messages


def test_a_star_takes_as_long_as_its_hosts_send_one_after_the_other() -> None:
    assert on("star that sums", 5)["seconds"] == pytest.approx(8 * SECOND, rel=0.02)
    assert on("star that passes on", 4)["seconds"] == pytest.approx(9 * SECOND, rel=0.02)


def test_a_line_that_a_group_shares_slows_chunks_and_not_two_levels_of_them() -> None:
    chunks, two = on("chunks", 16, groups_of=4), on("two levels of chunks", 16, groups_of=4)
    # Each of 4 hosts sends 2 chunks to each of 12 others: 2 * 4 * 12 / 16 gradients; and 2 * 3 / 4 in two levels.
    assert chunks["shared_bytes"] == pytest.approx(6 * GRADIENT)
    assert two["shared_bytes"] == pytest.approx(1.5 * GRADIENT)
    assert chunks["seconds"] >= 3 * SECOND  # at twice the rate of a host
    assert two["seconds"] == pytest.approx(2.25 * SECOND, rel=0.02)  # 1.5 inside, 1.5 at twice the rate
    assert on("chunks", 16)["seconds"] < 2 * SECOND


def test_tables_have_a_column_for_each_number_of_hosts_and_the_bytes_of_the_largest() -> None:
    rows = [
        {"network": "groups", "way": way, "hosts": hosts, **on(way, hosts)}
        for way in WAYS
        for hosts in (4, 16)
    ]
    record = {"hosts": [4, 16], "mib": GRADIENT / 2**20, "rows": rows}
    assert exchange_seconds(record).splitlines()[2] == "| groups | ring | 121 ms | 154 ms |"
    assert exchange_bytes(record).splitlines()[2] == "| ring | 1.50 | 1.88 | 30 | 0.0 |"
