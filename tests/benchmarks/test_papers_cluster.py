"""The papers' cluster: what a device makes of a model, which links share a line, and that partitioners take both."""

import pytest

from avgpipe.planning import partition
from benchmarks.papers.cluster import (
    BETWEEN_BYTES_PER_S,
    V100,
    WITHIN_BYTES_PER_S,
    cluster,
    profile_of,
    shared_lines,
)
from benchmarks.papers.models import MODELS, awd_lstm, bert, gnmt, vgg16

PEAK = 0.7 * 15.7e12


@pytest.mark.parametrize("name", MODELS)
def test_without_reading_all_is_proportional_to_the_samples(name):
    profile = profile_of(MODELS[name])
    for one, four in zip(profile.at(1), profile.at(4)):
        assert [4 * cost for cost in one] == pytest.approx(list(four))


def test_a_layer_takes_what_its_operations_need():
    model = gnmt()
    for layer, costs in zip(model.layers, profile_of(model).at(3)):
        assert costs.forward_s == pytest.approx(3 * layer.forward_flops / PEAK)
        assert costs.backward_s == pytest.approx(2 * costs.forward_s)
        assert costs.output_bytes == 3 * layer.cut_bytes


def test_the_first_layer_makes_no_gradient_of_its_input():
    first, second, *_ = profile_of(vgg16()).at(1)
    assert first.input_backward_s == 0
    assert second.input_backward_s == second.forward_s


def test_an_lstm_reads_its_weights_at_each_step_however_few_samples_there_are():
    model, lstm = awd_lstm(), 2
    profile = profile_of(model, reading=True)
    weights = 4 * 1150 * 1150  # of the inputs, and as many of the state
    inputs_s = 70 * 2 * weights / PEAK  # more than reading them once
    assert profile.at(1)[lstm].forward_s == pytest.approx(inputs_s + 70 * 4 * weights / 900e9)
    assert profile.at(40)[lstm].forward_s == pytest.approx(40 * 70 * 4 * weights / PEAK)


def test_a_stage_holds_its_input_and_what_its_layers_keep_once():
    model = bert()
    layer, costs = model.layers[1], profile_of(model).at(2)[1]
    assert costs.held_bytes == 2 * layer.stored_bytes
    assert costs.handed_bytes == 2 * layer.cut_bytes


def test_an_update_moves_weights_gradient_and_state():
    layer = profile_of(bert()).layers[1]
    weights = layer.parameter_bytes
    assert layer.optimizer_bytes == 2 * weights  # Adam
    assert layer.update_s == pytest.approx(7 * weights / 900e9)


def test_what_a_host_sends_to_either_side_shares_its_line():
    assert shared_lines([[0], [1], [2], [3], [4], [5]]) == [[(1, 2)], [(2, 1), (3, 4)], [(4, 3)]]
    assert shared_lines([[0, 1], [2, 3], [4, 5]]) == [[(0, 1)], [(1, 0), (1, 2)], [(2, 1)]]
    assert shared_lines([[0], [1]]) == []
    assert shared_lines([[0], [1], [2], [3], [3], [2], [1], [0]]) == [[(1, 2), (6, 5)], [(2, 1), (5, 6)]]


def test_hosts_have_two_devices_and_a_line_of_a_gigabit():
    net = cluster()
    assert (net.workers, net.height(0, 1), net.height(1, 2)) == (6, 0, 1)
    assert net.link([1], [2]).bytes_per_s == BETWEEN_BYTES_PER_S
    assert 0.95 < BETWEEN_BYTES_PER_S / 125e6 < 1
    assert net.link([0, 1], [2, 3]).bytes_per_s == BETWEEN_BYTES_PER_S / 2
    assert net.link([0], [1]).bytes_per_s == WITHIN_BYTES_PER_S
    assert {device.memory_bytes for device in net.devices} == {V100.memory_bytes}


def test_partitioners_take_the_profiles():
    levels = cluster().levels
    found = partition(profile_of(vgg16()), method="pipedream", levels=levels)
    assert found.value > 0
    assert partition(profile_of(bert()), 6, method="balance").stages == 6
    assert partition(profile_of(gnmt()), 3, method="dapple", levels=levels, micro_batches=8).stages == 3
