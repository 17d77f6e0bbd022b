from __future__ import annotations

import threading

import pytest

from avgpipe.errors import PeerLost
from avgpipe.links.link import Key, Mailbox
from tests.patience import limit

KEY = Key("F", 0, 0, 1, 5, 2)


def test_a_message_is_there_once() -> None:
    box = Mailbox()
    assert KEY not in box
    box.deliver(KEY, "value")
    assert KEY in box
    assert box.wait_until(lambda: KEY in box, 0.0)
    assert box.take(KEY) == "value"
    assert KEY not in box
    assert not box.wait_until(lambda: KEY in box, 0.01)


def test_a_wait_ends_when_another_thread_delivers() -> None:
    box = Mailbox()
    keys = [KEY._replace(micro_batch=m) for m in range(50)]
    thread = threading.Thread(target=lambda: [box.deliver(k, k.micro_batch) for k in keys])
    thread.start()
    assert box.wait_until(lambda: all(k in box for k in keys), limit(20))
    thread.join()


def test_a_failure_ends_every_wait_for_what_has_not_come_and_the_first_one_stays() -> None:
    box = Mailbox()
    threading.Timer(0.01, lambda: box.fail(PeerLost("first"))).start()
    with pytest.raises(PeerLost, match="first"):
        box.wait_until(lambda: False, limit(20))
    box.fail(PeerLost("second"))
    with pytest.raises(PeerLost, match="first"):
        box.wait_until(lambda: False, limit(20))
    assert box.wait_until(lambda: True, limit(20)), "a peer that has sent everything may end"


def test_a_key_reads_as_a_sentence() -> None:
    assert str(KEY) == "the activation of micro-batch 2 of batch 5"
    assert str(KEY._replace(kind="N", micro_batch=-1)) == "the gradient norm of batch 5"
