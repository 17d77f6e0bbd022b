from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from avgpipe.planning import partition
from avgpipe.planning.profile import Profile
from tests.planning import chains

BATCH = 12


def rate(p: Profile, blocks: list[tuple[int, int]], width: int, samples: int, again: bool) -> float:
    """algorithms.md, section 3: w b / t."""
    many = BATCH // (width * samples)
    done = []
    for first, last in blocks:
        compute_s = samples * chains.compute_s(p, first, last) * (4 / 3 if again else 1)
        incoming_s = sum(
            p.link.seconds(samples * chains.crossing(p, place))
            for place in (first, last)
            if 0 < place < len(p.layers)
        )
        reduce_s = 2 * (width - 1) * chains.weights(p, first, last) / (width * p.link.bytes_per_s)
        done.append(max(compute_s + incoming_s, reduce_s / many))
    return width * samples / max(done) if max(done) else float("inf")


def largest(p: Profile, blocks: list[tuple[int, int]], samples: int, again: bool) -> float:
    found = []
    for k, (first, last) in enumerate(blocks):
        flight = len(blocks) - k
        held = samples * chains.held(p, first, last)
        whole = samples * chains.crossing(
            p, first
        )  # of the one that is computed again, among those in flight
        kept = flight * whole + (held - whole) if again else flight * held
        found.append(3 * chains.weights(p, first, last) + chains.optimizer(p, first, last) + kept)
    return max(found)


def every(p: Profile, workers: int) -> list[tuple[float, float, int]]:
    """Samples per second, bytes and depth of all plans."""
    found = []
    for width in range(1, workers + 1):
        for samples in (1, 2, 3):
            if BATCH % (width * samples):
                continue
            for depth in range(1, min(workers // width, BATCH // (width * samples), len(p.layers)) + 1):
                for blocks in chains.cuts(len(p.layers), depth):
                    for again in (False, True):
                        plan = rate(p, blocks, width, samples, again), largest(p, blocks, samples, again)
                        found.append((*plan, depth))
    return found


@settings(max_examples=80)
@given(st.integers(0, 10**9), st.integers(1, 4))
def test_no_plan_is_faster(seed: int, workers: int) -> None:
    p = chains.random_profile(seed)
    options = {"method": "2bw", "workers": workers, "batch_size": BATCH, "micro_batch_sizes": (1, 2, 3)}
    plans = every(p, workers)
    assert partition(p, **options).value == pytest.approx(max(r for r, _, _ in plans), rel=1e-9)
    depth = plans[seed % len(plans)][2]
    found = partition(p, depth, **options)
    assert found.stages == depth
    assert found.value == pytest.approx(max(r for r, _, d in plans if d == depth), rel=1e-9)


@settings(max_examples=80)
@given(st.integers(0, 10**9), st.integers(1, 4), st.floats(0.3, 3))
def test_none_that_fits_is_faster(seed: int, workers: int, share: float) -> None:
    p = chains.random_profile(seed)
    plans = every(p, workers)
    least = min(size for _, size, _ in plans)
    limit = share * least + 1e-6
    if abs(limit - least) < 1e-6 * least:
        return
    options = {
        "method": "2bw",
        "workers": workers,
        "batch_size": BATCH,
        "micro_batch_sizes": (1, 2, 3),
        "memory_limit_bytes": limit,
    }
    fitting = [r for r, size, _ in plans if size <= limit]
    if not fitting:
        chains.assert_refused(p, options, limit, least)
        return
    found = partition(p, **options)
    assert found.value == pytest.approx(max(fitting), rel=1e-9)
    assert max(found.memory_bytes) <= limit * (1 + 1e-9)


def test_recomputation_is_chosen_where_only_it_fits() -> None:
    layers = [chains.layer(parameters=1.0, held=100.0, output=1.0) for _ in range(4)]
    p = chains.profile(*layers)
    options = {"method": "2bw", "workers": 4, "batch_size": 8}
    free = partition(p, 4, **options)
    assert not free.recompute
    tight = partition(p, 4, **options, memory_limit_bytes=200.0)
    assert tight.recompute
    assert tight.value == pytest.approx(free.value * 3 / 4)
    assert "recomputing" in str(tight)
    with pytest.raises(ValueError, match="nothing fits"):
        partition(p, 4, **options, memory_limit_bytes=200.0, recompute=False)


def test_what_recomputation_needs() -> None:
    """Of all micro-batches in flight the input, of one at a time the rest: its input is there already."""
    layers = [chains.layer(held=10.0, output=1.0) for _ in range(4)]
    found = partition(
        chains.profile(*layers),
        4,
        method="2bw",
        workers=4,
        batch_size=4,
        micro_batch_sizes=[1],
        recompute=True,
    )
    assert found.memory_bytes == (10.0, 3 * 1.0 + 10.0, 2 * 1.0 + 10.0, 1.0 + 10.0)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"batch_size": 3, "micro_batch_sizes": [2]}, r"batch_size=3: makes no whole number of at least 1"),
        (
            {"batch_size": 2, "micro_batch_sizes": [1], "stages": 3},
            r"batch_size=2: makes no whole number of at least 3",
        ),
        ({"batch_size": 0}, r"batch_size=0: must be an int of at least 1"),
        ({"micro_batch_sizes": [0]}, r"micro_batch_sizes=0"),
        ({"recompute": "always"}, r"recompute='always'"),
        ({"stages": 3, "workers": 2}, r"workers=2: 3 stages need"),
    ],
)
def test_wrong_options_are_refused(options: dict[str, object], message: str) -> None:
    p = chains.profile(chains.layer(), chains.layer(), chains.layer())
    with pytest.raises(ValueError, match=message):
        partition(p, method="2bw", **options)
