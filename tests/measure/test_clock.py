from __future__ import annotations

import pytest

from avgpipe.measure.sweep import typical


@pytest.mark.parametrize(
    ("samples", "expected"),
    [
        ([3.0], 3.0),
        ([1.0, 2.0, 6.0], 3.0),
        ([9.0, *[2.0] * 8, 0.0], 2.0),  # one at either end of ten
        ([100.0, 0.0, *[1.0, 3.0] * 8, 50.0, -7.0], 2.0),  # two of twenty
    ],
)
def test_a_mean_without_a_tenth_at_either_end(samples: list[float], expected: float) -> None:
    assert typical(samples) == pytest.approx(expected)
    assert typical(samples[::-1]) == pytest.approx(expected)
