"""Random chains of layers, and every way to cut them: what partitioners are compared with."""

from __future__ import annotations

import itertools
import math
import random
import re
from collections.abc import Iterator

import pytest

from avgpipe import partition
from avgpipe.planning.profile import LayerProfile, LinkProfile, Profile, Skip, Tie


def layer(
    forward_s: float = 1.0,
    backward_s: float = 2.0,
    parameters: float = 0.0,
    held: float = 0.0,
    output: float = 0.0,
    optimizer: float = 0.0,
    update_s: float = 0.0,
) -> LayerProfile:
    """Of a profile with the one micro-batch size 1."""
    return LayerProfile(
        "layer",
        (forward_s,),
        (backward_s,),
        (backward_s / 2,),
        (held,),
        (output,),
        parameters,
        optimizer,
        update_s,
    )


def profile(*layers: LayerProfile, link: LinkProfile | None = None, **more: object) -> Profile:
    return Profile("chain", "none", (1,), layers, link=link, **more)  # type: ignore[arg-type]


def random_profile(seed: int, most_layers: int = 10) -> Profile:
    """Up to so many layers, among them free ones and very dear ones, embeddings and heads; sometimes skips and ties."""
    draw = random.Random(seed)
    count = draw.randint(1, most_layers)

    def some(scale: float) -> float:
        return scale * draw.choice([0, 1, draw.random(), draw.random(), draw.random(), 10 * draw.random()])

    layers = [
        layer(some(1.0), some(2.0), some(10.0), some(5.0), some(8.0), some(20.0), some(0.5))
        for _ in range(count)
    ]
    more: dict[str, object] = {}
    if count > 2 and draw.random() < 0.3:
        ends = sorted(draw.sample(range(count), 2))
        more["skips"] = (Skip(ends[0], ends[1], (some(4.0),)),)
    if count > 1 and draw.random() < 0.3:
        ends = sorted(draw.sample(range(count), 2))
        shared = min(layers[n].parameter_bytes for n in ends)
        more["ties"] = (Tie(tuple(ends), shared),)
    link = LinkProfile(draw.choice([0.0, 0.1]), draw.choice([0.5, 2.0, 10.0, 1e6]))
    return profile(*layers, link=link, **more)


def cuts(layers: int, stages: int) -> Iterator[list[tuple[int, int]]]:
    """First layer and the one after the last, of each stage."""
    for inner in itertools.combinations(range(1, layers), stages - 1):
        yield list(itertools.pairwise([0, *inner, layers]))


def counts(stages: int, workers: int) -> Iterator[tuple[int, ...]]:
    """Workers of each stage, at most so many in all."""
    for found in itertools.product(range(1, workers + 1), repeat=stages):
        if sum(found) <= workers:
            yield found


def plans(layers: int, workers: int) -> Iterator[tuple[list[tuple[int, int]], tuple[int, ...]]]:
    for stages in range(1, min(layers, workers) + 1):
        for blocks in cuts(layers, stages):
            for replicas in counts(stages, workers):
                yield blocks, replicas


# ---- costs of a stage, from the profile's rows alone --------------------------------------------------------------


def compute_s(p: Profile, first: int, last: int) -> float:
    return sum(row.forward_s[0] + row.backward_s[0] for row in p.layers[first:last])


def weights(p: Profile, first: int, last: int) -> float:
    total = sum(row.parameter_bytes for row in p.layers[first:last])
    for tie in p.ties:
        total -= max(0, sum(first <= n < last for n in tie.layers) - 1) * tie.parameter_bytes
    return total


def optimizer(p: Profile, first: int, last: int) -> float:
    total = sum(row.optimizer_bytes for row in p.layers[first:last])
    for tie in p.ties:
        row = p.layers[tie.layers[0]]
        share = row.optimizer_bytes / row.parameter_bytes if row.parameter_bytes else 0.0
        total -= max(0, sum(first <= n < last for n in tie.layers) - 1) * tie.parameter_bytes * share
    return total


def crossing(p: Profile, place: int) -> float:
    """Bytes from layer ``place`` - 1 to ``place``; 0 at both ends."""
    if not 0 < place < len(p.layers):
        return 0.0
    skips = sum(s.size_bytes[0] for s in p.skips if s.source < place <= s.target)
    return p.layers[place - 1].output_bytes[0] + skips


def held(p: Profile, first: int, last: int) -> float:
    return sum(row.held_bytes[0] for row in p.layers[first:last]) + crossing(p, first)


def behind(replicas: tuple[int, ...], k: int) -> int:
    return sum(replicas[k + 1 :])


# ---- what is said where nothing fits ------------------------------------------------------------------------------


def least_said(message: str, limit: float, least: float) -> float:
    """What the message says would do: ``least`` rounded up to whole bytes, where the limit is rounded down."""
    said = re.search(
        r"^memory_limit_bytes=(\d+): nothing fits; the smallest plan needs (\d+) bytes on one worker, "
        r"(\d+) more ",
        message,
    )
    assert said is not None, message
    asked, needed, more = map(int, said.groups())
    assert asked == math.floor(limit)
    assert more == needed - asked
    slack = 1e-6 * least  # to which it is found; more than the rounding of sums
    assert math.ceil(least - slack) <= needed <= math.ceil(least + slack)
    return float(needed)


def assert_refused(profile, options, limit, least):
    """Nothing fits into the memory, and with what the refusal says is enough, something does."""
    with pytest.raises(ValueError, match="nothing fits") as raised:
        partition(profile, **options)
    enough = least_said(str(raised.value), limit, least)
    allowed = partition(profile, **{**options, "memory_limit_bytes": enough})
    assert max(allowed.memory_bytes) <= enough
