from fractions import Fraction

import numpy as np
import pytest

from avgpipe.planning import Costs, predict
from avgpipe.schedule import build_schedule


def test_one_number_holds_for_all_stages_and_boundaries():
    costs = Costs(1, 2, 3, activation_bytes=4, weight_bytes=5, update_s=6).of_stages(3)
    assert costs.forward_s.tolist() == [[1], [1], [1]]
    assert costs.backward_s.tolist() == [[2], [2], [2]]
    assert costs.transfer_s.tolist() == [[3], [3]]
    assert costs.activation_bytes.tolist() == [4, 4, 4]
    assert costs.weight_bytes.tolist() == [5, 5, 5]
    assert costs.update_s.tolist() == [6, 6, 6]


def test_lists_tuples_and_arrays_hold_one_number_per_stage():
    costs = Costs([1, 2], (3, Fraction(1, 2)), np.array([0.25]), update_s=np.float32(2))
    assert costs.forward_s == (1.0, 2.0)
    assert costs.of_stages(2).backward_s.tolist() == [[3], [0.5]]
    assert costs.of_stages(2).transfer_s.tolist() == [[0.25]]
    assert costs.of_stages(2).update_s.tolist() == [2, 2]


def test_one_stage_has_no_boundary():
    assert Costs(1, 2, []).of_stages(1).transfer_s.tolist() == []
    assert Costs(1, 2, 3).of_stages(1).transfer_s.tolist() == []


def test_the_parts_of_a_split_backward_make_the_whole():
    halves = Costs(1, [2, 4]).of_stages(2)
    assert [halves.seconds(kind)[1].tolist() for kind in "FBIWU"] == [[1], [4], [2], [2], [0]]
    given = Costs(1, [2, 4], input_backward_s=[2, 1]).of_stages(2)
    assert given.seconds("I").tolist() == [[2], [1]]
    assert given.seconds("W").tolist() == [[0], [3]]


def test_memory_is_asked_for_with_either_of_its_parts():
    def peaks(costs, pipelines=1, name="1f1b", stages=2):
        schedule = build_schedule(name, stages, 2)
        return predict(schedule, costs, pipelines=pipelines, batches=pipelines).peak_memory_bytes

    assert peaks(Costs(1, 2)) is None
    assert peaks(Costs(1, 2, weight_bytes=3), 2) == (6, 6)
    assert peaks(Costs(1, 2, activation_bytes=2.5)) == (5, 3)
    together = Costs(1, 2, weight_bytes=[1, 10, 100, 1000])
    assert peaks(together, 2, "interleaved-1f1b", 4) == (202, 2020)


def test_costs_are_values():
    assert Costs([1], 2) == Costs((1.0,), 2.0)
    assert hash(Costs([1], 2)) == hash(Costs([1], 2))
    with pytest.raises(AttributeError):
        Costs(1, 2).forward_s = 3


@pytest.mark.parametrize("value", [-1, float("nan"), float("inf"), [1, -2], [float("nan")]])
@pytest.mark.parametrize("name", ["forward_s", "transfer_s", "activation_bytes", "update_s"])
def test_negative_and_infinite_numbers_are_refused(name, value):
    with pytest.raises(ValueError, match=rf"{name}.*must be a finite number of at least 0"):
        Costs(**{"forward_s": 1, "backward_s": 1, name: value})


@pytest.mark.parametrize("value", [None, "1", True, ["1"], [None], {"a": 1}, 1j])
def test_what_is_no_number_is_refused(value):
    with pytest.raises(TypeError, match=r"backward_s.*must be a number"):
        Costs(1, value)


def test_wrong_lengths_are_refused_with_the_right_one():
    with pytest.raises(ValueError, match="transfer_s has 3 entries for 2 boundaries: give 2, or one number"):
        Costs(1, 1, [1, 1, 1]).of_stages(3)
    with pytest.raises(ValueError, match="weight_bytes has 1 entries for 3 stages"):
        Costs(1, 1, weight_bytes=[1]).of_stages(3)
    with pytest.raises(ValueError, match="forward_s is empty"):
        Costs([], 1)


def test_a_part_of_the_backward_is_not_above_the_whole():
    with pytest.raises(ValueError, match=r"input_backward_s=3 on stage 1 is above backward_s=2"):
        Costs(1, [5, 2], input_backward_s=3).of_stages(2)


def test_link_serial_is_a_yes_or_no():
    with pytest.raises(TypeError, match="link_serial=1: must be True or False"):
        Costs(1, 1, link_serial=1)


def test_an_entry_may_have_a_number_per_micro_batch():
    costs = Costs([[1, 2], 3], [4, np.array([5, 6])], [[7, 8]], input_backward_s=[1, (2, 3)])
    assert costs.forward_s == ((1, 2), 3)
    each = costs.of_stages(2, 2)
    assert each.forward_s.tolist() == [[1, 2], [3, 3]]
    assert each.seconds("W").tolist() == [[3, 3], [3, 3]]
    assert each.transfer_s.tolist() == each.gradient_transfer_s.tolist() == [[7, 8]]
    assert Costs(1, [[2, 4]]).of_stages(1, 2).input_backward_s.tolist() == [[1, 2]]


def test_devices_may_be_quicker():
    costs = Costs([[1, 2], 3], [4, 6], input_backward_s=[2, 3], update_s=[1, 1]).on_devices([2, 3])
    assert costs.forward_s == ((0.5, 1), 1)
    assert (costs.backward_s, costs.input_backward_s, costs.update_s) == ((2, 2), (1, 1), (0.5, 1 / 3))


def test_entries_make_costs_that_can_be_hashed():
    costs = Costs([[1, 2], 3], [4, np.array([5, 6])], [[7, 8]], input_backward_s=[1, (2, 3)])
    assert hash(costs) == hash(Costs(((1, 2), 3), (4, (5, 6)), ((7, 8),), input_backward_s=(1, (2, 3))))


def test_as_many_numbers_as_micro_batches_are_wanted():
    with pytest.raises(
        ValueError, match=r"forward_s\[1\] has 2 entries for 3 micro-batches: give one for each"
    ):
        Costs([1, [2, 3]], 1).of_stages(2, 3)
    with pytest.raises(
        ValueError, match=r"backward_s\[0\] has 1 entries for an unknown number of micro-batches"
    ):
        Costs(1, [[2]]).of_stages(1)
    with pytest.raises(
        ValueError, match=r"forward_s\[0\] is empty: give a number, or a list of one number per"
    ):
        Costs([[]], 1)
    with pytest.raises(ValueError, match=r"forward_s\[0\]\[1\]=-1: must be a finite number of at least 0"):
        Costs([[1, -1]], 1)
    with pytest.raises(ValueError, match=r"input_backward_s=\[1, 3\] on stage 0 is above backward_s=2"):
        Costs(1, 2, input_backward_s=[[1, 3]]).of_stages(1, 2)


def test_links_have_a_channel_each_unless_they_share_one():
    assert Costs(1, 1).of_stages(3).channels == [0, 1, 2, 3]
    assert Costs(1, 1, link_serial=False).of_stages(3).channels == [-1] * 4
    shared = Costs(1, 1, shared_links=[[(0, 1), (2, 1)], [(1, 2)]])
    assert shared.of_stages(3).channels == [0, 1, 2, 0]
    assert shared.shared_links == (((0, 1), (2, 1)), ((1, 2),))


@pytest.mark.parametrize(
    ("groups", "error", "message"),
    [
        (3, TypeError, r"shared_links=3: give lists of \(from, to\)"),
        ([(0, 1)], TypeError, "shared_links="),
        ([[(0, 2)]], ValueError, r"shared_links has \(0, 2\): give lists"),
        ([[(-1, 0)]], ValueError, r"shared_links has \(-1, 0\)"),
        ([[(0, 1.0)]], ValueError, r"shared_links has \(0, 1.0\)"),
        ([[(0, 1)], [(0, 1)]], ValueError, r"\(0, 1\) twice: a link is in one group, once"),
    ],
)
def test_groups_of_links_are_checked(groups, error, message):
    with pytest.raises(error, match=message):
        Costs(1, 1, shared_links=groups)


def test_links_without_contention_share_nothing():
    with pytest.raises(ValueError, match="shared_links with link_serial=False"):
        Costs(1, 1, link_serial=False, shared_links=[[(0, 1)]])


@pytest.mark.parametrize(
    ("gain", "error", "message"),
    [
        ((), ValueError, "must begin with 1"),
        ((2.0,), ValueError, "must begin with 1"),
        ((1, 2.5), ValueError, r"concurrency_gain\[1\]=2.5: 2 actions reach between 0.001 and 2 times"),
        ((1, 0), ValueError, r"concurrency_gain\[1\]=0: 2 actions"),
        (1.5, TypeError, "concurrency_gain=1.5: give a list of numbers"),
        ("11", TypeError, "concurrency_gain='11': give a list"),
    ],
)
def test_gains_are_checked(gain, error, message):
    with pytest.raises(error, match=message):
        Costs(1, 1, concurrency_gain=gain)


@pytest.mark.parametrize(
    ("options", "error", "message"),
    [
        ({"jitter": 0.3}, ValueError, "jitter=0.3: must be at most 0.25, use stragglers"),
        ({"jitter": "0.1"}, TypeError, "jitter='0.1': must be a number"),
        ({"stragglers": 0.1}, TypeError, r"stragglers=0.1: give \(probability, factor\), or None"),
        ({"stragglers": (1.5, 2)}, ValueError, r"stragglers\[0\]=1.5: a probability is at most 1"),
        ({"stragglers": (0.5, 0.5)}, ValueError, r"stragglers\[1\]=0.5: must be between 1 and 1000"),
        ({"seed": -1}, ValueError, "seed=-1: must be an int from 0 to"),
        ({"seed": 1.0}, ValueError, "seed=1.0: must be an int"),
    ],
)
def test_draws_are_checked(options, error, message):
    with pytest.raises(error, match=message):
        Costs(1, 1, **options)
