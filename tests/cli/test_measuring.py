"""Profiles of workloads, made in processes of their own."""

from __future__ import annotations

from pathlib import Path

import pytest

from avgpipe.cli.config import ProfilingOptions
from avgpipe.cli.measuring import profile_of
from avgpipe.errors import PipelineError
from tests.cli.conftest import write_text


@pytest.fixture
def text(tmp_path: Path) -> Path:
    found: Path = write_text(tmp_path / "text")
    return found


@pytest.mark.ranks
@pytest.mark.slow
@pytest.mark.parametrize("at_once", [1, 3])
def test_two_processes_measure_what_is_around_the_layers(text: Path, at_once: int) -> None:
    """Of three that profile at once, too: the third one waits for them."""
    asked = ProfilingOptions(workload="awd-lstm", data=str(text), batch_size=4, budget_s=0.1)
    found = profile_of(asked, [4], at_once)
    assert found.model == "awd-lstm tiny"
    assert found.micro_batch_sizes == (4,)
    assert all(layer.forward_s[0] > 0 and layer.update_s >= 0 for layer in found.layers)
    assert min(found.action_s, found.process_bytes) > 0
    for link in (found.link, found.reduction):
        assert link is not None
        assert min(link.latency_s, link.bytes_per_s) > 0


@pytest.mark.ranks
@pytest.mark.slow
def test_data_that_cannot_be_read_say_so(text: Path) -> None:
    (text / "valid.txt").write_text("\n")
    asked = ProfilingOptions(workload="awd-lstm", data=str(text), budget_s=0.1)
    with pytest.raises(PipelineError, match=r"^worker 0 of 2 failed .*valid has 1 tokens"):
        profile_of(asked, [1])
