"""Every way carries the other process's bytes, once for each message."""

import pytest

from avgpipe.ranks.launch import run_on_ranks
from avgpipe_lab.bench.transfers import check
from avgpipe_lab.commands import TransfersConfig


@pytest.fixture(scope="module")
def found():
    return run_on_ranks("tests.lab.bench.targets:every_way", 2, {}, timeout_s=100)


@pytest.mark.ranks
@pytest.mark.slow
@pytest.mark.parametrize("way", ["shm", "gloo", "plain gloo"])
def test_both_ranks_get_each_message_of_the_other_one(found, way):
    for rank in found:
        assert rank[way]["messages"] == 3
        assert rank[way]["right"]


@pytest.mark.ranks
def test_ways_within_a_process_are_the_first_ranks(found):
    assert [rank["local"]["messages"] for rank in found] == [3, 0]
    assert [rank["memcpy"]["messages"] for rank in found] == [3, 0]


@pytest.mark.ranks
def test_all_take_time(found):
    assert all(way["seconds"] > 0 for way in found[0].values())


@pytest.mark.parametrize(
    ("values", "named"),
    [
        ({"links": ()}, "--links"),
        ({"links": ("shm", "tcp")}, "--links tcp"),
        ({"sizes": (12,)}, "--sizes 12"),
        ({"sizes": (0,)}, "--sizes 0"),
    ],
)
def test_what_cannot_be_is_refused(values, named):
    with pytest.raises(ValueError, match=named):
        check(TransfersConfig(**values))
