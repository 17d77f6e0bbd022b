"""What processes publish in shared memory, and sums that count or do not."""

from __future__ import annotations

import pytest
import torch

from avgpipe.errors import PipelineError
from avgpipe.fault.slots import Like, ProcessMemory

_LIKE = {
    0: Like([torch.zeros(5), torch.zeros(3, dtype=torch.float64)], [torch.zeros(2, 2), torch.zeros(())]),
    2: Like([torch.zeros(7)], []),
}


def test_what_one_process_writes_another_reads() -> None:
    own = ProcessMemory.create(_LIKE, has_sums=True)
    other = ProcessMemory.open(own.facts, _LIKE)
    updates = [torch.arange(5.0), torch.arange(3.0, dtype=torch.float64)]
    buffers = [torch.ones(2, 2), torch.tensor(4.0)]
    own.slot(0, 3).write({"loss": 1.5}, updates, buffers)
    slot = other.slot(0, 5)  # the slot of every other step
    assert slot.read() == {"loss": 1.5}
    for found, given in zip([*slot.updates, *slot.buffers], [*updates, *buffers]):
        assert torch.equal(found, given)
    assert other.published() == 0
    for place in (0, 2):
        own.counts[place].ring()
    assert other.published() == 1


def test_regions_cover_tensors_of_one_dtype_that_lie_together() -> None:
    slot = ProcessMemory.create(_LIKE, has_sums=False).slot(0, 0)
    assert [region.dtype for region in slot.update_regions] == [torch.float32, torch.float64]
    (buffers,) = slot.buffer_regions
    buffers.fill_(2.0)
    assert all(bool((buffer == 2).all()) for buffer in slot.buffers)


def test_a_process_of_another_rank_reads_the_counts_alone() -> None:
    own = ProcessMemory.create(_LIKE, has_sums=False)
    other = ProcessMemory.open(own.facts, {1: Like([torch.zeros(9)], [])})
    own.counts[0].ring()
    own.counts[2].ring()
    assert other.published() == 1


def test_sums_are_whole_for_their_step_and_epoch() -> None:
    own = ProcessMemory.create(_LIKE, has_sums=True)
    other = ProcessMemory.open(own.facts, _LIKE)
    assert [other.whole(turn) for turn in range(3)] == [-1, -1, -1]
    own.mark_whole(0, 0)
    own.mark_whole(1, 4)
    assert [other.whole(turn) for turn in range(3)] == [0, 4, -1]
    own.mark_whole(2, 4)
    assert [other.whole(turn) for turn in range(3)] == [-1, 4, 4]


def test_a_result_that_is_too_long_is_refused() -> None:
    slot = ProcessMemory.create(_LIKE, has_sums=False).slot(0, 0)
    with pytest.raises(
        PipelineError, match=r"the result of a batch is too long, .* fewer metrics from loss_fn"
    ):
        slot.write("x" * 9000)
