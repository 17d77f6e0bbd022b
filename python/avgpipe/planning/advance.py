"""``advance="auto"``: the least memory with which a batch takes hardly longer than the best."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from avgpipe.errors import check_count
from avgpipe.planning.chain import check_limit
from avgpipe.planning.costs import Costs, StageCosts
from avgpipe.planning.simulation import check_costs, makespan_bounds, measure, measured_batches
from avgpipe.schedule import Schedule, build_schedule, warm_ups

TOLERANCE = 0.01
EXHAUSTIVE_UP_TO = 250  # vectors
MOST_EVALUATED = 200
_MOST_ACTIONS, _LEAST_EVALUATED = 40_000_000, 50  # a couple of seconds, and what a sensible answer takes

_SLOPES = (0.0, 0.25, 0.5, 0.75, 1.0, 1.5, 2.0, 3.0)  # of the advance, per stage that lies behind
_LEVELS = (1, 2, 3, 4, 6, 8, 12)  # of an advance that is the same on all stages

_NEGLIGIBLE = 1.0001  # a gain that is not worth more search

WarmUps = tuple[int, ...]


@dataclass(frozen=True)
class AdvanceChoice:
    """What :func:`choose_advance` chose; seconds are simulated, per batch, in steady state.

    advance: the a_k. seconds: with them. best_seconds: the least found under the memory limit. default_seconds: with
    a_k = K-1-k. one_f_one_b_seconds: with a_k = 0. peak_in_flight: per stage, the micro-batches of one pipeline held
    at once.
    """

    advance: list[int]
    seconds: float
    best_seconds: float
    default_seconds: float
    one_f_one_b_seconds: float
    peak_in_flight: list[int]
    memory_limit_bytes: float | None = None

    def explain(self) -> str:
        """Two lines: what was chosen, and why."""
        limit = "" if self.memory_limit_bytes is None else " under the memory limit"
        return (
            f"advance {_text(self.advance)}: {1000 * self.seconds:.1f} ms per batch predicted, "
            f"{_text(self.peak_in_flight)} micro-batches held per stage and pipeline\n"
            f"the least memory within {100 * TOLERANCE:g} % of the best{limit}, {1000 * self.best_seconds:.1f} ms; "
            f"the default K-1-k takes {1000 * self.default_seconds:.1f} ms, "
            f"1F1B {1000 * self.one_f_one_b_seconds:.1f} ms"
        )

    def __str__(self) -> str:
        return self.explain()


def choose_advance(
    stages: int,
    micro_batches: int,
    costs: Costs,
    *,
    pipelines: int = 1,
    memory_limit_bytes: float | None = None,
    batches: int | None = None,
) -> AdvanceChoice:
    """The a_k of "advance-forward" with the least activations in flight (bytes, summed over the stages.

    Counted where ``costs.activation_bytes`` is None) whose simulated seconds per batch are within 1 % of the best.

    memory_limit_bytes: of a device, for the weights of all pipelines and all the activations that their warm-ups may
    hold at once; what needs more is not considered. batches: how many to simulate for a time, see
    ``steady_batch_s``.

    Up to 250 vectors are all tried, as for 4 stages and 7 micro-batches. Of more, at most 200 are, fewer where a
    simulation is long (about 50 at least): slopes c (K-1-k), equal advances and the limit, then neighbours of the
    quickest while that gains, then the cheapest lowered stage by stage while it stays within 1 %. The choice is the
    cheapest of those tried, not certainly of all; and with several pipelines there may be a time some per cent below
    the best that was found.

    Raises ValueError for wrong counts and costs, and where not even 1F1B fits into ``memory_limit_bytes``.
    """
    check_count("stages", stages)
    check_count("micro_batches", micro_batches)
    check_costs(costs)
    count = measured_batches(pipelines, batches)
    least = tuple(warm_ups(stages, micro_batches, [0] * stages))
    most = _most(least, micro_batches, costs.of_stages(stages, micro_batches), pipelines, memory_limit_bytes)
    search = _AdvanceSearch(micro_batches, costs, pipelines, count, least, most)
    default = tuple(warm_ups(stages, micro_batches, [stages - 1 - k for k in range(stages)]))
    default_s, one_f_one_b_s = search.seconds(default), search.seconds(least)
    chosen = search.best_choice()
    return AdvanceChoice(
        search.advance(chosen),
        search.seconds(chosen),
        search.best_seconds,
        default_s,
        one_f_one_b_s,
        list(chosen),
        memory_limit_bytes,
    )


def _most(
    least: WarmUps, micro_batches: int, costs: StageCosts, pipelines: int, limit: float | None
) -> WarmUps:
    """Per stage the most warm-up forwards that fit; never more than on the stage before, that would deadlock."""
    check_limit(limit)
    if limit is None:
        return (micro_batches,) * len(least)
    if not costs.has_memory:
        raise ValueError(
            f"memory_limit_bytes={limit!r} needs to know what a micro-batch holds: give Costs(activation_bytes=...)"
        )
    most: list[int] = []
    for k, (activation, weight) in enumerate(
        zip(costs.activation_bytes.tolist(), costs.weight_bytes.tolist())
    ):
        needed = pipelines * (least[k] * activation + weight)
        if needed > limit:
            raise ValueError(
                f"memory_limit_bytes={limit!r}: stage {k} needs {needed:.0f} even with 1F1B ({pipelines} pipelines, "
                f"{least[k]} micro-batches in flight in each); use fewer pipelines, smaller "
                "micro-batches or more stages"
            )
        room = (limit / pipelines - weight) / activation if activation else micro_batches
        # At least what was just found to fit, whatever the rounding of the division.
        most.append(max(least[k], int(min(micro_batches, room, *most[-1:]))))
    return tuple(most)


class _AdvanceSearch:
    """Over the warm-ups w_k = min(M, K-k+a_k), which fall from stage to stage, from ``least`` to ``most``."""

    def __init__(
        self, micro_batches: int, costs: Costs, pipelines: int, batches: int, least: WarmUps, most: WarmUps
    ) -> None:
        self._micro_batches, self._costs, self._pipelines = micro_batches, costs, pipelines
        self._batches, self._least, self._most = batches, least, most
        self._stages = len(least)
        held: list[float] = costs.of_stages(self._stages, micro_batches).activation_bytes.tolist()
        self._held = held if any(held) else [1.0] * self._stages
        self._known: dict[WarmUps, float] = {}
        affordable = _MOST_ACTIONS // (batches * self._stages * (2 * micro_batches + 1))
        self._affordable = max(_LEAST_EVALUATED, affordable)
        self._budget = min(MOST_EVALUATED, self._affordable)

    def seconds(self, warm: WarmUps) -> float:
        if warm not in self._known:
            self._known[warm] = measure(self._schedule(warm), self._costs, self._pipelines, self._batches)
        return self._known[warm]

    def _schedule(self, warm: WarmUps) -> Schedule:
        return build_schedule("advance-forward", self._stages, self._micro_batches, self.advance(warm))

    def advance(self, warm: WarmUps) -> list[int]:
        return [max(0, w - (self._stages - k)) for k, w in enumerate(warm)]

    @property
    def best_seconds(self) -> float:
        """The least known time of what fits."""
        return self._known[self._quickest()]

    def best_choice(self) -> WarmUps:
        """The cheapest vector found within the tolerance."""
        every = self._vectors(min(EXHAUSTIVE_UP_TO, self._affordable))
        for warm in every or self._family():
            self.seconds(warm)
        if not every:
            self._climb()
            self._descend()
        return self._cheapest()

    def _cheapest(self) -> WarmUps:
        enough = (warm for warm in self._fitting() if self._is_enough(warm))
        return min(enough, key=lambda warm: (self._bytes(warm), self._known[warm], warm))

    def _quickest(self) -> WarmUps:
        return min(self._fitting(), key=lambda warm: (self._known[warm], self._bytes(warm), warm))

    def _fitting(self) -> list[WarmUps]:
        """What was simulated and fits."""
        return [warm for warm in self._known if self._fits(warm)]

    def _fits(self, warm: WarmUps) -> bool:
        return all(w <= most for w, most in zip(warm, self._most))

    def _is_enough(self, warm: WarmUps) -> bool:
        return self.seconds(warm) <= (1 + TOLERANCE) * self.best_seconds

    def _bytes(self, warm: WarmUps) -> float:
        return sum(w * held for w, held in zip(warm, self._held))

    def _vectors(self, limit: int) -> list[WarmUps] | None:
        """All vectors; None if there are more than ``limit``."""
        found: list[WarmUps] = [()]
        for least, most in zip(self._least, self._most):
            found = [(*head, w) for head in found for w in range(least, min([most, *head[-1:]]) + 1)]
            if len(found) > limit:
                return None
        return found

    def _family(self) -> Iterator[WarmUps]:
        """Vectors of simple shapes, cut to what fits."""
        after = [self._stages - 1 - k for k in range(self._stages)]
        shapes = [[round(c * distance) for distance in after] for c in _SLOPES]
        shapes += [[level] * self._stages for level in _LEVELS if level < self._micro_batches]
        for shape in shapes:
            yield tuple(map(min, warm_ups(self._stages, self._micro_batches, shape), self._most))
        yield self._most

    def _climb(self) -> None:
        """Go from the quickest to its quickest neighbour, one more or less on a stage, as long as that gains."""
        bound_s = makespan_bounds(self._schedule(self._least), self._costs).busiest_device_s
        while self.best_seconds > _NEGLIGIBLE * bound_s and len(self._known) < self._budget // 2:
            best, seconds = self._quickest(), self.best_seconds
            for k in range(self._stages):
                # One more on stage k, and on those before that would fall behind.
                raised = tuple(max(w, best[k] + 1) if j <= k else w for j, w in enumerate(best))
                if self._fits(raised):
                    self.seconds(raised)
                if best[k] > self._least[k]:
                    self.seconds(self._lowered(best, k, best[k] - 1))
            if self._quickest() == best or self.best_seconds * _NEGLIGIBLE > seconds:
                return

    def _descend(self) -> None:
        """Lower the cheapest sufficient vectors until no single stage can be lowered, from either end."""
        for order in (range(self._stages), range(self._stages - 1, -1, -1)):
            warm = self._cheapest()
            lowered = True
            while lowered and len(self._known) < self._budget:
                before = warm
                for k in sorted(order, key=lambda j: -self._held[j]):
                    warm = self._lowest(warm, k)
                lowered = warm != before

    def _lowest(self, warm: WarmUps, k: int) -> WarmUps:
        """Stage k lowered as far as it stays sufficient: halving the way, as less warm-up rarely is quicker."""
        floor, reached = self._least[k], warm
        while floor < reached[k] and len(self._known) < self._budget:
            tried = self._lowered(warm, k, (floor + reached[k]) // 2)
            if self._is_enough(tried):
                reached = tried
            else:
                floor = tried[k] + 1
        return reached

    def _lowered(self, warm: WarmUps, k: int, value: int) -> WarmUps:
        """``value`` on stage k, and no more than that behind it."""
        return tuple(min(w, value) if j >= k else w for j, w in enumerate(warm))


def _text(numbers: Sequence[int]) -> str:
    return ",".join(map(str, numbers))
