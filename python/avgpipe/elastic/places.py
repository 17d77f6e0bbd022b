"""Where an optimizer's parameters lie in the memory of a replica's tensors.

A parameter is one of the tensors, or a view of part of one, as in an arena:

    tensor of the replica   | weight        |0| bias |0000| weight             |000|
    spans                   | parameter 0   | | par. 1 |  | parameter 2        |

z and the update have the same places. Zeros that alignment leaves stay zero and belong to no span; whatever else no
parameter covers is a span of its own.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from itertools import pairwise

import torch

from avgpipe.elastic import Buffers
from avgpipe.elastic.replica import Replica

_GAP_BYTES = 64  # what alignment may leave, see avgpipe.elastic.layout


class Unfusable(Exception):
    """Why a step cannot be done in one pass with the averaging."""


@dataclass(frozen=True)
class Span:
    """Elements ``start`` to ``stop``, counted in memory, of tensor ``owner``: those of parameter ``param``, if any."""

    owner: int
    start: int
    stop: int
    param: int | None = None

    @property
    def numel(self) -> int:
        return self.stop - self.start


class Places:
    """``spans`` in the order of memory; ``homes``: each parameter's span, None for those that are not averaged.

    Unfusable if parameters overlap or are not dense.
    """

    def __init__(self, params: Sequence[torch.Tensor], replica: Replica, z: Buffers) -> None:
        assert replica.update is not None, "z follows this replica"
        self.params = list(params)
        self.owners = [t.detach() for t in replica.x.tensors]
        self._entries = replica.x.layout.entries
        self._z, self._update = z, replica.update
        self.homes = _homes(self.params, self.owners)
        self.spans = list(self._all_spans())
        known = set(map(id, self.params))
        self._watched = [*self.params, *(t for t in replica.x.tensors if id(t) not in known)]
        self._pointers = self._current_pointers()

    def are_current(self) -> bool:
        """No tensor has moved, as by an assignment to its ``data``."""
        return self._current_pointers() == self._pointers

    def _current_pointers(self) -> list[int]:
        return list(map(torch.Tensor.data_ptr, self._watched))  # at every step, so without a loop in Python

    def buffer(self, span: Span) -> int:
        return self._entries[span.owner].buffer

    def is_whole(self, span: Span) -> bool:
        """The parameter is its owner, not a part of it."""
        return span.numel == self.owners[span.owner].numel()

    def x(self, span: Span) -> torch.Tensor:
        return memory(self.owners[span.owner], span.start, span.numel)

    def z(self, span: Span) -> torch.Tensor:
        """In the parameter's shape, if there is one."""
        return self._like(span, self._z.flats)

    def update(self, span: Span) -> torch.Tensor:
        return self._like(span, self._update.flats)

    def _like(self, span: Span, flats: Sequence[torch.Tensor]) -> torch.Tensor:
        e = self._entries[span.owner]
        if span.param is None:
            return memory(flats[e.buffer], e.offset + span.start, span.numel)
        p = self.params[span.param]
        return flats[e.buffer].as_strided(p.shape, p.stride(), e.offset + span.start)

    def _all_spans(self) -> Iterator[Span]:
        inside: list[list[Span]] = [[] for _ in self.owners]
        for home in self.homes:
            if home is not None:
                inside[home.owner].append(home)
        for owner, t in enumerate(self.owners):
            placed = sorted(inside[owner], key=_start)
            for a, b in pairwise(placed):
                if b.start < a.stop:
                    raise Unfusable(
                        f"parameters {a.param} and {b.param} of the optimizer share {a.stop - b.start} elements"
                    )
            edges = [0, *(edge for s in placed for edge in (s.start, s.stop)), t.numel()]
            gaps = [Span(owner, *pair) for pair in zip(edges[::2], edges[1::2]) if pair[0] < pair[1]]
            rest = gaps if not self._are_slack(gaps, t.element_size()) else []
            yield from sorted([*placed, *rest], key=_start)

    def _are_slack(self, gaps: Sequence[Span], itemsize: int) -> bool:
        if any(gap.numel * itemsize >= _GAP_BYTES for gap in gaps):
            return False
        values = [view(gap) for gap in gaps for view in (self.x, self.z)]
        return not values or not any(bool(v.any()) for v in values)


def _start(span: Span) -> int:
    return span.start


def merged(spans: Iterable[Span], joined: Callable[[Span, Span], bool]) -> list[list[Span]]:
    """Runs of neighbours in one owner of which each is ``joined`` to the one before it."""
    runs: list[list[Span]] = []
    for span in spans:
        if runs and runs[-1][-1].owner == span.owner and joined(runs[-1][-1], span):
            runs[-1].append(span)
        else:
            runs.append([span])
    return runs


def around(run: Sequence[Span]) -> Span:
    """One span, flat memory, from the first of a run to its last."""
    return Span(run[0].owner, run[0].start, run[-1].stop)


def is_mirrored(g: torch.Tensor, h: torch.Tensor, distance: int) -> bool:
    """h lies ``distance`` elements after g in one memory."""
    return (
        g.dtype == h.dtype
        and g.untyped_storage().data_ptr() == h.untyped_storage().data_ptr()
        and h.storage_offset() - g.storage_offset() == distance
    )


def memory(t: torch.Tensor, start: int, numel: int) -> torch.Tensor:
    """``numel`` elements in the order of memory, from the ``start``-th of the dense tensor t."""
    return t.as_strided((numel,), (1,), t.storage_offset() + start)


def _homes(params: Sequence[torch.Tensor], owners: Sequence[torch.Tensor]) -> list[Span | None]:
    order = sorted((i for i, t in enumerate(owners) if t.numel()), key=lambda i: owners[i].data_ptr())
    starts = [owners[i].data_ptr() for i in order]
    homes: list[Span | None] = []
    for n, p in enumerate(params):
        at = bisect_right(starts, p.data_ptr()) - 1 if p.layout == torch.strided and p.numel() else -1
        homes.append(_home(n, p, order[at], owners[order[at]]) if at >= 0 else None)
    return homes


def _home(n: int, p: torch.Tensor, owner: int, t: torch.Tensor) -> Span | None:
    start, odd = divmod(p.data_ptr() - t.data_ptr(), t.element_size())
    if p.device != t.device or start + p.numel() > t.numel():
        return None
    if odd or p.dtype != t.dtype or not is_dense(p):
        raise Unfusable(
            f"parameter {n} of shape {tuple(p.shape)} and strides {p.stride()} is not a dense part of its tensor"
        )
    return Span(owner, start, start + p.numel(), n)


def is_dense(p: torch.Tensor) -> bool:
    return p.stride() == torch.empty_like(p, device="meta").stride()
