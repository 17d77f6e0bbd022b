from __future__ import annotations

import itertools
import math
import re
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from avgpipe.planning.cluster import Cluster, Device, Level
from avgpipe.planning.profile import LinkProfile
from tests.planning import chains

FILE = """
name = "two machines"

[[devices]]
count = 3
memory = "80GiB"

[[devices]]
count = 5
memory = "24GB"
speed = 0.5

[[levels]]
units = 4
bandwidth = "1.6Tbit"

[[levels]]
units = 2
bandwidth = "100Gbit"
latency = "20us"
"""


def test_a_file_says_devices_and_levels() -> None:
    assert Cluster.from_toml(FILE) == Cluster(
        (*[Device(80 * 2.0**30, 1.0)] * 3, *[Device(24e9, 0.5)] * 5),
        (Level(4, 200e9, 0.0), Level(2, 12.5e9, 20 * 1e-6)),
        "two machines",
    )


def test_memory_speed_latency_and_name_may_be_left_out() -> None:
    text = '[[devices]]\ncount = 2\n[[levels]]\nunits = 2\nbandwidth = "1Gbit"\n'
    assert Cluster.from_toml(text) == Cluster((Device(None, 1.0),) * 2, (Level(2, 125e6, 0.0),), "")
    assert not Cluster.from_toml(text).is_here


def test_a_file_is_read_from_its_path(tmp_path: Path) -> None:
    path = tmp_path / "cluster.toml"
    path.write_text(FILE)
    assert Cluster.load(path) == Cluster.load(str(path)) == Cluster.from_toml(FILE)


LEVELS = '[[levels]]\nunits = 2\nbandwidth = "1Gbit"\n'
DEVICES = "[[devices]]\ncount = 2\n"


@pytest.mark.parametrize(
    ("text", "message"),
    [
        (
            "[[device]]\ncount = 2\n" + LEVELS,
            "the file: unknown key 'device': did you mean 'devices'? valid names: name, devices, levels",
        ),
        (
            DEVICES + "[[devices]]\ncount = 1\nmem = 1\n" + LEVELS,
            "devices[1]: unknown key 'mem': did you mean 'memory'? valid names: count, memory, speed",
        ),
        (
            DEVICES + '[[levels]]\nunits = 2\nbandwith = "1Gbit"\n',
            "levels[0]: unknown key 'bandwith': did you mean 'bandwidth'? valid names: units, bandwidth, latency",
        ),
        (DEVICES, "the file: levels is missing"),
        (LEVELS, "the file: devices is missing"),
        ('[[devices]]\nmemory = "1GiB"\n' + LEVELS, "devices[0]: count is missing"),
        (DEVICES + LEVELS + '[[levels]]\nbandwidth = "1Gbit"\n', "levels[1]: units is missing"),
        (DEVICES + "[[levels]]\nunits = 2\n", "levels[0]: bandwidth is missing"),
        ("devices = 2\n" + LEVELS, "devices must be tables: begin each with [[devices]]"),
        ("devices = []\n" + LEVELS, "devices must be tables: begin each with [[devices]]"),
        (
            DEVICES + '[levels]\nunits = 2\nbandwidth = "1Gbit"\n',
            "levels must be tables: begin each with [[levels]]",
        ),
        (
            DEVICES + LEVELS + 3000 * LEVELS.replace("2", "1"),
            "the number of levels=3001: must be at most 16",
        ),
        ("name = 3\n" + DEVICES + LEVELS, "name=3: must be a text"),
        ("[[devices]\n", "a cluster file must be TOML: "),
        (
            DEVICES + "[[devices]]\ncount = 3\n" + LEVELS,
            "the levels join 2 = 2 devices, but there are 5: change units or count",
        ),
        (
            DEVICES + LEVELS + LEVELS.replace("2", "3"),
            "the levels join 2 x 3 = 6 devices, but there are 2: change units or count",
        ),
    ],
)
def test_refusals_name_the_place_and_the_file(text: str, message: str, tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=f"^{re.escape(message)}"):
        Cluster.from_toml(text)
    path = tmp_path / "mine.toml"
    path.write_text(text)
    with pytest.raises(ValueError, match="^" + re.escape(f"{path}: {message}")):
        Cluster.load(path)


@pytest.mark.parametrize("count", ["0", "-1", "1.0", "true", '"2"'])
def test_counts_are_whole_numbers(count: str) -> None:
    with pytest.raises(ValueError, match=r"devices\[0\]: count=.*: must be an int of at least 1$"):
        Cluster.from_toml(DEVICES.replace("2", count) + LEVELS)
    with pytest.raises(ValueError, match=r"levels\[0\]: units=.*: must be an int of at least 1$"):
        Cluster.from_toml(DEVICES + LEVELS.replace("2", count))


@pytest.mark.parametrize("memory", ["80", '"80"', '"80gib"', '"80 Gbit"', '"-1GiB"', "true", '"all"'])
def test_memory_is_a_size_with_its_unit(memory: str) -> None:
    with pytest.raises(ValueError, match=r"^devices\[0\]: memory .*: write a size as 80GiB, 512MiB or 24GB$"):
        Cluster.from_toml(f"{DEVICES}memory = {memory}\n{LEVELS}")


def test_memory_is_above_0() -> None:
    with pytest.raises(ValueError, match=r"^devices\[0\]: memory 0GiB: must be more than 0$"):
        Cluster.from_toml(f'{DEVICES}memory = "0GiB"\n{LEVELS}')


@pytest.mark.parametrize("speed", ["0", "-1.0", "inf", "nan", "true", '"fast"'])
def test_speed_is_a_number_above_0(speed: str) -> None:
    with pytest.raises(ValueError, match=r"^devices\[0\]: speed .*: must be a number above 0, 1.0 for the"):
        Cluster.from_toml(f"{DEVICES}speed = {speed}\n{LEVELS}")


def test_wrong_units_in_levels_name_their_place() -> None:
    with pytest.raises(ValueError, match=r"^levels\[1\]: bandwidth .*1GB.*: write a rate"):
        Cluster.from_toml(DEVICES + LEVELS + '[[levels]]\nunits = 1\nbandwidth = "1GB"\n')
    with pytest.raises(ValueError, match=r"^levels\[0\]: latency .*: write a time"):
        Cluster.from_toml(DEVICES + LEVELS + "latency = 5\n")


# ---- where workers are -----------------------------------------------------------------------------------------------


UNITS = st.lists(st.integers(1, 4), min_size=1, max_size=4)


def made(units: list[int]) -> Cluster:
    levels = tuple(Level(n, 1000.0 / (h + 1), 0.5 * h) for h, n in enumerate(units))
    return Cluster((Device(),) * math.prod(units), levels)


def seats(units: list[int]) -> list[tuple[int, ...]]:
    """Of each worker, which unit it is in on each level, lowest first, counted within the unit above."""
    return [seat[::-1] for seat in itertools.product(*map(range, reversed(units)))]


def lowest_common(a: tuple[int, ...], b: tuple[int, ...]) -> int:
    return max(h for h in range(len(a)) if a[h] != b[h])


@given(UNITS)
def test_heights_and_units(units: list[int]) -> None:
    cluster, seat = made(units), seats(units)
    assert cluster.workers == len(seat)
    for a, b in itertools.combinations(range(len(seat)), 2):
        assert cluster.height(a, b) == cluster.height(b, a) == lowest_common(seat[a], seat[b])
    for height in range(len(units)):
        groups = list(dict.fromkeys(s[height:] for s in seat))
        assert [cluster.unit(n, height) for n in range(len(seat))] == [groups.index(s[height:]) for s in seat]


def test_a_worker_that_is_not_there() -> None:
    for a, b in ((0, 8), (8, 0), (-1, 3), (3, -1)):
        with pytest.raises(ValueError, match=rf"^workers {a} and {b}: there are 8$"):
            made([4, 2]).height(a, b)


@given(UNITS, st.data())
def test_senders_of_one_unit_share_its_link(units: list[int], data: st.DataObject) -> None:
    cluster, seat = made(units), seats(units)
    if len(seat) < 2:
        return
    pair = st.permutations(range(len(seat))).map(lambda order: (order[0], order[1]))
    pairs = data.draw(st.lists(pair, min_size=1, max_size=8))
    ways = [(lowest_common(seat[a], seat[b]), seat[a]) for a, b in pairs]
    rates, latencies = [], []
    for height, here in ways:
        beside = sum(h == height and there[h:] == here[h:] for h, there in ways)
        rates.append(1000.0 / (height + 1) / beside)
        latencies.append(0.5 * height)
    found = cluster.link([a for a, _ in pairs], [b for _, b in pairs])
    assert found == LinkProfile(max(latencies), min(rates))


def test_links_of_two_machines() -> None:
    cluster = Cluster((Device(),) * 4, (Level(2, 100.0, 1.0), Level(2, 10.0, 5.0)))
    assert cluster.link([0], [1]) == LinkProfile(1.0, 100.0)
    assert cluster.link([0], [2]) == LinkProfile(5.0, 10.0)
    assert cluster.link([0, 1], [2, 3]) == LinkProfile(5.0, 5.0)  # both leave machine 0
    assert cluster.link([0, 2], [3, 1]) == LinkProfile(5.0, 10.0)  # one leaves each
    assert cluster.link([0, 2], [1, 3]) == LinkProfile(1.0, 100.0)
    assert cluster.link([0, 1, 2, 3], [1, 2, 3, 0]) == LinkProfile(5.0, 10.0)  # a ring


# ---- the workers that were profiled ----------------------------------------------------------------------------------


def test_workers_like_those_profiled() -> None:
    p = chains.profile(chains.layer(), link=LinkProfile(0.5, 20.0))
    assert Cluster.like(p, 3, 100.0) == Cluster(
        (Device(100.0, 1.0),) * 3, (Level(3, 20.0, 0.5),), is_here=True
    )
    assert Cluster.like(chains.profile(chains.layer()), 2).link([0], [1]) == LinkProfile(0.0, math.inf)


def test_refusals_of_workers_like_those_profiled() -> None:
    p = chains.profile(chains.layer())
    with pytest.raises(ValueError, match="workers=0: must be an int of at least 1"):
        Cluster.like(p, 0)
    with pytest.raises(ValueError, match="memory_limit_bytes=-1: must be a number of bytes above 0"):
        Cluster.like(p, 1, -1)
