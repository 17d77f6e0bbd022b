from __future__ import annotations

import pytest

from tests.examples.scripts import EXAMPLES, printed


@pytest.mark.ranks
@pytest.mark.slow
@pytest.mark.timeout(300)
def test_the_tests_of_the_example_pass():
    assert "3 passed" in printed(EXAMPLES / "kill_a_rank.py", "python")
