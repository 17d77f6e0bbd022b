"""When a step may be published and summed: the memory of an earlier one is free, and the sums before it are whole."""

from __future__ import annotations

import json
import threading
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from avgpipe.fault.exchange import TurnExchange
from avgpipe.fault.membership import Known
from avgpipe.fault.roster import Roster, Term
from avgpipe.fault.slots import Like, ProcessMemory
from avgpipe.fault.speaker import Speaker
from avgpipe.links.link import Mailbox
from avgpipe_ext.ring import Bell, Memory

_LIKE = {0: Like([torch.zeros(4)], [])}


class _Mate:
    """Another pipeline's process on this host."""

    def __init__(self) -> None:
        self.memory = ProcessMemory.create(_LIKE, has_sums=True)
        self._bell = Memory.create(Bell.BYTES)
        self.facts = {"memory": self.memory.facts, "bell": [self._bell.path, Bell.BYTES, 0]}

    def publish(self, turn: int) -> None:
        self.memory.slot(0, turn).write({"has_update": True}, [torch.full((4,), float(turn))])
        self.memory.counts[0].ring()


@pytest.fixture
def exchange(request: pytest.FixtureRequest) -> TurnExchange:
    """The exchange of pipeline 0, with pipeline 1 on its host, and where the test asks for it pipeline 2 on another."""
    member: Any = SimpleNamespace(
        rank=0, group=0, pipeline=0, host="here", begun=0, spans_hosts=True, known=Known(Roster(), {})
    )
    member.serve = lambda exchange: None
    member.enter = lambda digests, facts: 0
    own_bell = Memory.create(Bell.BYTES)
    made = TurnExchange(member, Mailbox(), _LIKE, [own_bell.path, Bell.BYTES, 0])
    made.mate = mate = _Mate()  # type: ignore[attr-defined]
    made.kept = own_bell  # type: ignore[attr-defined]
    terms = [Term(0, 0, 0, host="here"), Term(1, 1, 0, host="here")]
    facts: dict[int, Any] = {0: {0: made._facts}, 1: {0: mate.facts}}
    if getattr(request, "param", False):
        terms.append(Term(2, 2, 0, host="there"))
        facts[2] = {}
    known = Known(Roster(terms), facts)
    made._speaker = object()  # no thread of its own
    made.enter([])
    assert made.adopt(known) == []
    return made


def _publish(exchange: TurnExchange, turn: int) -> None:
    exchange.membership.begun = turn + 1
    exchange.publish(0, turn, {"has_update": True}, [torch.full((4,), float(turn))], [])


def test_a_step_is_published_once_all_have_applied_the_one_whose_memory_it_gets(
    exchange: TurnExchange,
) -> None:
    mate: _Mate = exchange.mate  # type: ignore[attr-defined]
    for turn in range(2):
        assert exchange.may_publish(turn)
        _publish(exchange, turn)
        mate.publish(turn)
    assert not exchange.may_publish(2)
    exchange.note_applied(0, 1)
    assert not exchange.may_publish(2), "the other one still reads step 0"
    mate.memory.applied_counts[0].ring()
    assert exchange.may_publish(2)
    assert not exchange.may_publish(3)


def test_a_lost_pipeline_is_not_waited_for(exchange: TurnExchange) -> None:
    for turn in range(2):
        _publish(exchange, turn)
    exchange.note_applied(0, 1)
    assert not exchange.may_publish(2)
    terms = [Term(0, 0, 0, host="here"), Term(1, 1, 0, published=0, end=2, host="here", was_lost=True)]
    exchange.adopt(Known(Roster(terms), exchange.known.facts))
    assert exchange.may_publish(2)


def test_steps_that_a_load_has_replaced_count_as_applied(exchange: TurnExchange) -> None:
    exchange.note_applied(0, 5)
    exchange.note_applied(0, 5)
    assert exchange.own.applied() == 5


@pytest.mark.parametrize("exchange", [True], indirect=True)
def test_sums_begin_once_those_before_are_whole_here(exchange: TurnExchange) -> None:
    mate: _Mate = exchange.mate  # type: ignore[attr-defined]
    assert not exchange.may_sum(0)
    for turn in range(2):
        _publish(exchange, turn)
        mate.publish(turn)
    assert exchange.may_sum(0)
    assert not exchange.may_sum(1), "the sums of step 0 are not whole"
    exchange.own.mark_whole(0, exchange.known.epoch)
    assert exchange.may_sum(1)


@pytest.mark.parametrize("exchange", [True], indirect=True)
def test_sums_wait_for_readers_of_the_memory_that_they_overwrite(exchange: TurnExchange) -> None:
    mate: _Mate = exchange.mate  # type: ignore[attr-defined]
    for turn in range(3):
        _publish(exchange, turn)
        mate.publish(turn)
        exchange.own.mark_whole(turn, exchange.known.epoch)
    exchange.note_applied(0, 1)
    assert not exchange.may_sum(2), "the other one still reads the sums of step 0"
    mate.memory.applied_counts[0].ring()
    assert exchange.may_sum(2)


def test_the_close_of_a_speaker_waits_for_its_threads(monkeypatch: pytest.MonkeyPatch) -> None:
    halted = threading.Event()
    monkeypatch.setattr(Speaker, "_run", lambda self: halted.wait())
    own = SimpleNamespace(speaker_bell=SimpleNamespace(ring=halted.set))
    exchange: Any = SimpleNamespace(membership=None, own=own)
    before = set(threading.enumerate())
    speaker = Speaker(exchange, Known(Roster(), {}))
    (thread,) = set(threading.enumerate()) - before
    assert thread.is_alive()
    speaker.halt()
    speaker.join()
    assert not thread.is_alive()


@pytest.mark.parametrize("exchange", [True], indirect=True)
def test_a_host_that_is_lost_counts_in_steps_that_were_summed_with_it(exchange: TurnExchange) -> None:
    mate: _Mate = exchange.mate  # type: ignore[attr-defined]
    _publish(exchange, 0)
    mate.publish(0)
    exchange.own.sums(0, 0).write([[0, 1, 2], [{"has_update": True}] * 3], [torch.full((4,), 3.0)])
    exchange.own.mark_whole(0, exchange.known.epoch)
    terms = [Term(0, 0, 0, host="here"), Term(1, 1, 0, host="here")]
    terms.append(Term(2, 2, 0, published=1, end=1, host="there", was_lost=True))
    exchange.adopt(Known(Roster(terms), exchange.known.facts, epoch=1, resume=1))
    exchange._collect()
    assert [*exchange.turns[0]] == [0, 1, 2]


class _Group:
    """Sums with another host, whose pipeline 2 has published an update of tens; notes the order of what happens."""

    awaited = None

    def __init__(self) -> None:
        self.order: list[Any] = []

    def texts(self, text: bytes, sizes: list[int]) -> Any:
        def found() -> list[bytes]:
            self.order.append("texts")
            return [text, json.dumps({"0": [[2, {"has_update": True}]]}).encode()]

        return found

    def sum(self, own: torch.Tensor, out: torch.Tensor, wire: Any = None) -> None:
        self.order.append(own.tolist()[:4])
        out.copy_(own + 10)


@pytest.mark.parametrize("exchange", [True], indirect=True)
@pytest.mark.parametrize("has_update", [True, False])
def test_a_host_with_an_update_begins_the_sum_before_the_texts_of_others_are_there(
    exchange: TurnExchange, has_update: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(Speaker, "_run", lambda self: None)
    mate: _Mate = exchange.mate  # type: ignore[attr-defined]
    if has_update:
        _publish(exchange, 1)
        mate.publish(1)
    else:  # as where a batch has too few micro-batches for this host
        exchange.membership.begun = 2
        exchange.publish(0, 1, {"has_update": False}, [], [])
        mate.memory.slot(0, 1).write({"has_update": False})
        mate.memory.counts[0].ring()
    speaker, group = Speaker(exchange, exchange.known), _Group()
    monkeypatch.setattr(speaker, "_group", lambda speakers: group)
    speaker._sum(1)
    assert group.order == ([[2.0] * 4, "texts"] if has_update else ["texts", [0.0] * 4])
    sums = exchange.own.sums(0, 1)
    assert sums.updates[0].tolist() == [12.0 if has_update else 10.0] * 4
    assert sums.read() == [[0, 1, 2], [{"has_update": has_update}] * 2 + [{"has_update": True}]]
    assert exchange.own.whole(1) == exchange.known.epoch
