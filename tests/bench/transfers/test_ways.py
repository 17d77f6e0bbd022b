"""Every way carries the other process's bytes, once for each message."""

import pytest

from avgpipe.ranks.launch import run_on_ranks


@pytest.fixture(scope="module")
def found():
    return run_on_ranks("tests.bench.transfers.targets:every_way", 2, {}, timeout_s=100)


@pytest.mark.parametrize("way", ["shm", "gloo", "plain gloo"])
def test_both_ranks_get_each_message_of_the_other_one(found, way):
    for rank in found:
        assert rank[way]["messages"] == 3
        assert rank[way]["right"]


def test_ways_within_a_process_are_the_first_ranks(found):
    assert [rank["local"]["messages"] for rank in found] == [3, 0]
    # Two pairs of buffers, as many as the ways between processes touch.
    assert [rank["memcpy"]["messages"] for rank in found] == [6, 0]


def test_all_take_time(found):
    assert all(way["seconds"] > 0 for way in found[0].values())
