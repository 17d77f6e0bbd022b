from __future__ import annotations

import pytest

from avgpipe.rules import Elasticity


def make(replicas=4, alpha=None, rule="avgpipe", staleness=0, period=1):
    return Elasticity.checked(replicas, alpha, rule, staleness, period)


def test_defaults_of_alpha():
    assert make(4).alpha == 0.25
    assert make(1).alpha == 0
    assert make(3, rule="easgd").alpha == pytest.approx(0.3)
    assert make(1, rule="easgd").alpha == 0.9


@pytest.mark.parametrize(
    ("wrong", "error", "message"),
    [
        ({"rule": "avgpip"}, ValueError, "unknown rule 'avgpip': did you mean 'avgpipe'"),
        ({"rule": None}, ValueError, "unknown rule None"),
        ({"staleness": "async"}, ValueError, "staleness must be 0, 1 or 'asynchronous', not 'async'"),
        ({"staleness": 2}, ValueError, "staleness must be 0, 1 or 'asynchronous', not 2"),
        ({"staleness": True}, ValueError, "not True"),
        ({"replicas": 0}, ValueError, "replicas=0: must be an int of at least 1"),
        ({"replicas": 2.0}, ValueError, "replicas=2.0: must be an int"),
        ({"period": 0}, ValueError, "period=0: must be"),
        ({"period": True}, ValueError, "period=True: must be an int"),
        ({"alpha": 1.5}, ValueError, "alpha must be from 0 .* not 1.5"),
        ({"alpha": float("nan")}, ValueError, "not nan"),
        ({"alpha": "0.5"}, TypeError, "alpha must be a number from 0 to 1 or None, not '0.5'"),
    ],
)
def test_wrong_options_are_named(wrong, error, message):
    with pytest.raises(error, match=message):
        make(**wrong)


def test_easgd_beyond_its_stable_range_warns():
    with pytest.warns(UserWarning, match="overshoots where alpha is above 0.25; the default is 0.225"):
        make(4, alpha=0.5, rule="easgd").warn_of_overshooting()
