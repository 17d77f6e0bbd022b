"""Bounds against the figures of the case that they were made for: K = 6, M = 12, 10 + 20 ms, 1 MiB, 1 Gbit/s."""

import pytest

from avgpipe.bench.schedules.bounds import bounds, flush_s, link_s, no_bubble_s

TRANSFER_S = 2**20 * 8 / 1e9


def test_no_bubble():
    assert no_bubble_s(12, 0.01, 0.02) == pytest.approx(0.36)


def test_flush():
    assert flush_s(6, 12, 0.01, 0.02) == pytest.approx(0.51)
    assert flush_s(6, 12, 0.01, 0.02, TRANSFER_S) == pytest.approx(0.5939, abs=1e-4)
    assert flush_s(1, 12, 0.01, 0.02, TRANSFER_S) == pytest.approx(0.36)


@pytest.mark.parametrize(("stages", "tensors"), [(1, 0), (2, 1), (3, 2), (6, 2)])
def test_an_inner_worker_sends_activations_and_gradients(stages, tensors):
    assert link_s(stages, 12, 4 * TRANSFER_S) == pytest.approx(12 * tensors * 4 * TRANSFER_S)


def test_the_link_of_4_mib_is_the_limit():
    assert link_s(6, 12, 4 * TRANSFER_S) == pytest.approx(0.8053, abs=1e-4)


def test_a_line_without_a_limit_has_no_bounds_of_its_own():
    assert len(bounds(6, 12, 0.01, 0.02, 2**20, None, None)) == 2
    assert len(bounds(6, 12, 0.01, 0.02, 2**20, 1.25e8, 1.2e8)) == 5
