"""A round of N replicas in one pass, against the fused passes one after another."""

from __future__ import annotations

from collections.abc import Callable

from torch import Tensor

import avgpipe_ext
from avgpipe.bench.kernels.baselines import ALPHA, STEP
from avgpipe.bench.kernels.limits import limit
from avgpipe.bench.kernels.optimizers import adamw_options
from avgpipe.bench.kernels.settings import KernelSettings
from avgpipe.bench.kernels.workspace import Workspace, make_section, one_tensor
from avgpipe.bench.section import Section, Variant

_STATE_VALUES = 7  # of each replica: x, exp_avg and exp_avg_sq read and written; grad read


def sections(settings: KernelSettings, elements: int) -> list[Section]:
    made = []
    for replicas in (2, 4, 8):
        asks = "AdamW steps of N replicas, their mean into the reference, pulls (staleness 0): in one pass, or apart?"
        # x, grad, exp_avg, exp_avg_sq and update of each; z.
        arrays = 5 * replicas + 1
        names = ("round", f"N = {replicas}", asks)
        made.append(make_section(settings, one_tensor(elements), names, arrays, round_of(replicas)))
    return made if settings.asks("round") else []


def round_of(replicas: int) -> Callable[[Workspace], list[Variant]]:
    def make(space: Workspace) -> list[Variant]:
        moved = space.bytes_of(_STATE_VALUES * replicas + 2)
        passes = _Passes(space, replicas)
        one, several = f"{replicas} adamw, 1 apply", f"{replicas} adamw, {replicas} apply"
        pulls = f"{replicas} pull"

        def baseline(name: str, *runs: Callable[[], None]) -> Variant:
            return Variant(name, "baseline", moved, lambda: [run() for run in runs])

        return [
            limit(space),
            Variant("elastic_round_", "ours", moved, passes.whole),
            baseline(f"{one} (no pulls)", passes.steps, passes.apply_together),
            baseline(f"{one}, {pulls}", passes.steps, passes.apply_together, passes.pulls),
            baseline(f"{several} (no pulls)", passes.steps, passes.apply_in_turn),
            baseline(f"{several}, {pulls}", passes.steps, passes.apply_in_turn, passes.pulls),
        ]

    return make


class _Passes:
    """A round whole, and its parts. The parts overwrite their updates and leave them as they are, which is the least
    that they can move.
    """

    def __init__(self, space: Workspace, replicas: int) -> None:
        def arrays(name: str) -> list[Tensor]:
            return [space.flat(f"{name} {i}") for i in range(replicas)]

        self._z, self._replicas = space.flat("z"), replicas
        self._xs, self._grads, self._updates = arrays("x"), arrays("grad"), arrays("update")
        self._firsts, self._seconds = arrays("first"), arrays("second")
        self._options = adamw_options()

    def whole(self) -> None:
        avgpipe_ext.elastic_round_(
            *(self._xs, self._grads, [*self._firsts, *self._seconds], self._z, ALPHA),
            optimizer="adamw",
            step=STEP,
            **self._options,
        )

    def steps(self) -> None:
        for x, grad, first, second, update in zip(
            self._xs, self._grads, self._firsts, self._seconds, self._updates
        ):
            # alpha 0: the pull comes later, to the reference after the round.
            avgpipe_ext.elastic_adamw_(
                *(x, grad, first, second, self._z, update, 0.0, 0),
                step=STEP,
                accumulate=False,
                **self._options,
            )

    def apply_together(self) -> None:
        avgpipe_ext.reference_apply_(self._z, self._updates, 1 / self._replicas, zero=False)

    def apply_in_turn(self) -> None:
        for update in self._updates:
            avgpipe_ext.reference_apply_(self._z, update, 1 / self._replicas, zero=False)

    def pulls(self) -> None:
        for x in self._xs:
            avgpipe_ext.elastic_pull_(x, self._z, ALPHA)
