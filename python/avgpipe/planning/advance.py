"""``advance="auto"``: the least memory with which a batch takes little longer than the optimum."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import cache

from avgpipe.errors import check_count
from avgpipe.planning.chain import limit_of
from avgpipe.planning.costs import Costs
from avgpipe.planning.simulation import check_costs, measured_batches, predict, steady_batch_s
from avgpipe.schedule import Schedule, build_schedule, warm_ups

TOLERANCE = 0.01
EXHAUSTIVE_UP_TO = 250  # vectors
MOST_EVALUATED = 200
_MOST_ACTIONS, _LEAST_EVALUATED = 40_000_000, 50  # some seconds; enough for a good result

_SLOPES = (0.0, 0.25, 0.5, 0.75, 1.0, 1.5, 2.0, 3.0)  # increase of the advance per later stage
_LEVELS = (1, 2, 3, 4, 6, 8, 12)  # advances that are the same on all stages

_NEGLIGIBLE = 1.0001  # a gain that does not justify more search

WarmUps = tuple[int, ...]


@dataclass(frozen=True)
class AdvanceChoice:
    """The result of :func:`choose_advance`; seconds are simulated, per batch, in steady state.

    Attributes:
        advance: The chosen a_k.
        seconds: Seconds with them.
        best_seconds: The least seconds found under the memory limit.
        default_seconds: Seconds with a_k = K-1-k.
        one_f_one_b_seconds: Seconds with a_k = 0.
        peak_in_flight: Per stage, the most micro-batches of one pipeline held at once.
        memory_limit_bytes: The given limit.
    """

    advance: list[int]
    seconds: float
    best_seconds: float
    default_seconds: float
    one_f_one_b_seconds: float
    peak_in_flight: list[int]
    memory_limit_bytes: float | None = None

    def __str__(self) -> str:
        """Explain the choice in two lines: the advance, and the reason."""
        limit = "" if self.memory_limit_bytes is None else " under the memory limit"
        return (
            f"advance {_text(self.advance)}: {1000 * self.seconds:.1f} ms per batch predicted, "
            f"{_text(self.peak_in_flight)} micro-batches held per stage and pipeline\n"
            f"the least memory within {100 * TOLERANCE:g} % of the best{limit}, {1000 * self.best_seconds:.1f} ms; "
            f"the default K-1-k takes {1000 * self.default_seconds:.1f} ms, "
            f"1F1B {1000 * self.one_f_one_b_seconds:.1f} ms"
        )


def choose_advance(
    stages: int,
    micro_batches: int,
    costs: Costs,
    *,
    pipelines: int = 1,
    memory_limit_bytes: float | None = None,
    batches: int | None = None,
) -> AdvanceChoice:
    """Choose the a_k of "advance-forward": of those within 1 % of the least time, the ones that hold the least.

    They hold activations in flight, in bytes, summed over the stages; in numbers if
    ``costs.activation_bytes`` is None. Times are simulated seconds per batch.

    Up to 250 vectors, as for 4 stages and 7 micro-batches, are all tried. Of more vectors at most 200 are
    tried, fewer if a simulation is long (about 50 at least): slopes c (K-1-k), equal advances and the limit,
    then neighbours of the fastest while that gains, then the cheapest, lowered stage by stage while it stays
    within 1 %. The choice is the cheapest one tried, not certainly of all; and with several pipelines a time
    some per cent below the best one found may exist.

    Args:
        stages: Number of stages K.
        micro_batches: Micro-batches M of a batch.
        costs: Costs of a micro-batch on each stage.
        pipelines: Pipelines that share the workers.
        memory_limit_bytes: Memory of a device, for the weights of all pipelines and all the activations that
            their warm-ups may hold at once; vectors that need more are excluded.
        batches: Batches to simulate for a time, see ``steady_batch_s``.

    Raises:
        ValueError: For wrong counts and costs, and if not even 1F1B fits into ``memory_limit_bytes``.
    """
    check_count("stages", stages)
    check_count("micro_batches", micro_batches)
    check_costs(costs)
    count = measured_batches(pipelines, batches)
    limit = limit_of(memory_limit_bytes)
    least = tuple(warm_ups(stages, micro_batches, [0] * stages))
    default = tuple(warm_ups(stages, micro_batches, range(stages - 1, -1, -1)))

    @cache
    def seconds(warm: WarmUps) -> float:
        return steady_batch_s(_schedule(warm, micro_batches), costs, pipelines=pipelines, batches=count)

    unlimited = (micro_batches,) * stages
    most = unlimited if limit == math.inf else _most(least, micro_batches, costs, pipelines, limit)
    affordable = max(_LEAST_EVALUATED, _MOST_ACTIONS // (count * stages * (2 * micro_batches + 1)))
    held = costs.of_stages(stages, micro_batches).activation_bytes.tolist()
    search = _AdvanceSearch(seconds, held=held, least=least, most=most, affordable=affordable)
    if not search.try_all():
        steady = predict(_schedule(least, micro_batches), replace(costs, jitter=0.0, stragglers=None))
        search.climb(max(steady.busy_s) / max(costs.concurrency_gain))
        search.descend()
    chosen = search.cheapest()
    own_s, least_s, default_s, one_f_one_b_s = map(seconds, (chosen, search.quickest(), default, least))
    return AdvanceChoice(
        _advance(chosen), own_s, least_s, default_s, one_f_one_b_s, list(chosen), memory_limit_bytes
    )


def _schedule(warm: WarmUps, micro_batches: int) -> Schedule:
    return build_schedule("advance-forward", len(warm), micro_batches, _advance(warm))


def _advance(warm: WarmUps) -> list[int]:
    return [max(0, w - (len(warm) - k)) for k, w in enumerate(warm)]


def _most(least: WarmUps, micro_batches: int, costs: Costs, pipelines: int, limit: float) -> WarmUps:
    """Return the most warm-up forwards that fit on each stage, no more than on the stage before (deadlock)."""
    if not costs.has_memory:
        raise ValueError(
            f"memory_limit_bytes={limit!r} needs the bytes that a micro-batch holds: give Costs(activation_bytes=...)"
        )
    each = costs.of_stages(len(least), micro_batches)
    most: list[int] = []
    for k, (activation, weight) in enumerate(zip(each.activation_bytes.tolist(), each.weight_bytes.tolist())):
        needed = pipelines * (least[k] * activation + weight)
        if needed > limit:
            raise ValueError(
                f"memory_limit_bytes={limit!r}: stage {k} needs {needed:.0f} even with 1F1B ({pipelines} pipelines, "
                f"{least[k]} micro-batches in flight in each); use fewer pipelines, smaller "
                "micro-batches or more stages"
            )
        room = (limit / pipelines - weight) / activation if activation else micro_batches
        # At least the number that was just found to fit, whatever the rounding of the division.
        most.append(max(least[k], int(min(micro_batches, room, *most[-1:]))))
    return tuple(most)


class _AdvanceSearch:
    """Searches the warm-ups w_k = min(M, K-k+a_k), which decrease from stage to stage, from ``least`` to ``most``.

    ``seconds`` simulates a vector; at most ``affordable`` vectors are simulated.
    """

    def __init__(
        self,
        seconds: Callable[[WarmUps], float],
        held: Sequence[float],
        least: WarmUps,
        most: WarmUps,
        affordable: int,
    ) -> None:
        self._seconds, self._least, self._most, self._affordable = seconds, least, most, affordable
        self._held = held if any(held) else [1.0] * len(least)
        self._budget = min(MOST_EVALUATED, affordable)
        self._known = {least: seconds(least)}  # seconds of vectors that fit

    def _try(self, warm: WarmUps) -> float:
        """Return the seconds of a vector; math.inf if it does not fit."""
        if any(w > most for w, most in zip(warm, self._most)):
            return math.inf
        self._known[warm] = self._seconds(warm)
        return self._known[warm]

    def _is_enough(self, warm: WarmUps) -> bool:
        return self._try(warm) <= (1 + TOLERANCE) * min(self._known.values())

    def _bytes(self, warm: WarmUps) -> float:
        return sum(w * held for w, held in zip(warm, self._held))

    def quickest(self) -> WarmUps:
        return min(self._known, key=lambda warm: (self._known[warm], self._bytes(warm), warm))

    def cheapest(self) -> WarmUps:
        """Return the cheapest vector found within the tolerance."""
        enough = [warm for warm in self._known if self._is_enough(warm)]
        return min(enough, key=lambda warm: (self._bytes(warm), self._known[warm], warm))

    def try_all(self) -> bool:
        """Try all vectors; if they are too many, try none and return False."""
        found: list[WarmUps] = [()]
        for least, most in zip(self._least, self._most):
            found = [(*head, w) for head in found for w in range(least, min([most, *head[-1:]]) + 1)]
            if len(found) > min(EXHAUSTIVE_UP_TO, self._affordable):
                return False
        for warm in found:
            self._try(warm)
        return True

    def climb(self, bound_s: float) -> None:
        """Try simple shapes, reduced to what fits, then neighbours of the fastest as long as that gains.

        Neighbours differ by one on a stage. No vector takes less than ``bound_s``.
        """
        stages = len(self._least)
        shapes = [[round(c * (stages - 1 - k)) for k in range(stages)] for c in _SLOPES]
        for advance in [*shapes, *([level] * stages for level in _LEVELS), self._most]:
            self._try(tuple(min(most, stages - k + advance[k]) for k, most in enumerate(self._most)))
        gains = True
        while gains and len(self._known) < self._budget // 2:
            best = self.quickest()
            seconds = self._known[best]
            if seconds <= _NEGLIGIBLE * bound_s:
                return
            for k in range(stages):
                # One more on stage k, and on earlier stages that would otherwise have fewer.
                self._try(tuple(max(w, best[k] + 1) if j <= k else w for j, w in enumerate(best)))
                if best[k] > self._least[k]:
                    self._try(_lowered(best, k, best[k] - 1))
            gains = min(self._known.values()) * _NEGLIGIBLE <= seconds and self.quickest() != best

    def descend(self) -> None:
        """Lower the cheapest vectors within the tolerance until no single stage can be lowered, from either end."""
        stages = range(len(self._least))
        for order in (stages, stages[::-1]):
            warm, before = self.cheapest(), None
            while warm != before and len(self._known) < self._budget:
                before = warm
                for k in sorted(order, key=lambda j: -self._held[j]):
                    warm = self._lowest(warm, k)

    def _lowest(self, warm: WarmUps, k: int) -> WarmUps:
        """Lower stage k as far as the tolerance allows, by bisection, as less warm-up is rarely faster."""
        floor = self._least[k]
        while floor < warm[k] and len(self._known) < self._budget:
            tried = _lowered(warm, k, (floor + warm[k]) // 2)
            if self._is_enough(tried):
                warm = tried
            else:
                floor = tried[k] + 1
        return warm


def _lowered(warm: WarmUps, k: int, value: int) -> WarmUps:
    """Return ``warm`` with ``value`` on stage k, and at most that on later stages."""
    return tuple(min(w, value) if j >= k else w for j, w in enumerate(warm))


def _text(numbers: Sequence[int]) -> str:
    return ",".join(map(str, numbers))
