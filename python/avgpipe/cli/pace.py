"""When the ranks agree on whether a checkpoint is due: seldom, since each time their pipelines run empty."""

from __future__ import annotations


class Pace:
    """Lengths of the segments between agreements: doubling at first, later as long as the checkpoint interval lasts.

    Made of numbers that are alike on all ranks, so that all make the same decisions.
    """

    def __init__(self, interval_s: float, pipelines: int) -> None:
        self._interval_s, self._pipelines = interval_s, pipelines
        self._rounds = 4  # a round is a batch of every pipeline
        self._since_save = 0

    def batches(self) -> int:
        """Batches of the next segment."""
        return self._rounds * self._pipelines

    def due(self, batches: int, elapsed_s: float) -> bool:
        """Whether to save now, after a segment of ``batches``, ``elapsed_s`` after the last checkpoint was saved."""
        self._since_save += batches
        per_round_s = elapsed_s * self._pipelines / self._since_save
        save = elapsed_s >= self._interval_s
        left_s = self._interval_s if save else self._interval_s - elapsed_s
        longest = left_s / per_round_s if per_round_s > 0 else 2.0 * self._rounds
        self._rounds = max(1, min(2 * self._rounds, int(longest) + 1))
        if save:
            self._since_save = 0
        return save
