"""Pipelines on several hosts: what tables say, and a short measurement on two emulated hosts."""

from __future__ import annotations

from typing import Any

import pytest

from avgpipe_lab.bench.namespaces import network
from benchmarks.hosts.training import bytes_each, train
from benchmarks.tables.hosts import hosts_speeds, hosts_steps
from tests.lab.bench.test_namespaces import needs_root

MIB = 2**20


def record() -> dict[str, Any]:
    row = {"hosts": 3, "avgpipe_s": 0.42, "gloo_s": 0.14, "avgpipe_over_gloo": 3.0}
    row |= {"light_s": 0.15, "light_over_gloo": 1.07, "warmup_s": 0.5, "warmup_over_gloo": 3.57}
    row |= {"avgpipe_sent_bytes": [48 * MIB, 12 * MIB, 12 * MIB], "avgpipe_received_bytes": [24 * MIB] * 3}
    row |= {"gloo_sent_bytes": [16 * MIB] * 3}
    return {"mib": 12, "rows": [row]}


def test_a_step_is_beside_an_all_reduce_and_the_busiest_host_beside_the_gradient() -> None:
    line = hosts_steps(record()).splitlines()[-1]
    ours = "| 3 | 140 | 420 | **3.00** | 150 | 1.07 | 500 | 3.57 | 48.0/12.0/12.0 | 24.0/24.0/24.0 | **4.00** | 2.00 |"
    assert line == f"{ours} 1.33 |"


def test_speeds_are_beside_their_sum() -> None:
    alone = [{"speed": 1, "samples_per_s": [49.0, 50.0, 50.5]}, {"speed": 0.5, "samples_per_s": [25.0]}]
    found = {"speeds": [1, 1, 0.5], "samples_per_s": [74.0, 75.0, 76.0], "alone": alone}
    assert hosts_speeds(found).splitlines()[-1] == "| 1 + 1 + 0.5 | 50.0, 25.0 | 125.0 | 75.0 | **0.60** |"


def test_bytes_are_those_of_a_step() -> None:
    found = bytes_each([(0, 10), (5, 0)], [(100, 20), (25, 40)], 10)
    assert found == {"sent_bytes": [10, 2], "received_bytes": [1, 4]}


@pytest.mark.ranks
@pytest.mark.root
@needs_root
def test_two_hosts_train_and_exchange_at_least_a_gradient_in_each_step() -> None:
    with network(2, 1e9, own_boot_ids=True) as net:
        timed = train(net, ["--pipelines", "2", "--mib", "1"], 10)
    assert len(timed.seconds) >= 9
    assert {*timed.samples} == {12}
    for way in ("sent_bytes", "received_bytes"):
        assert all(0.8 * MIB < count < 3 * MIB for count in timed.bytes_each[way])
