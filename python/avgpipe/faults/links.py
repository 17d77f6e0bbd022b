"""Links with an injected fault; ``avgpipe.testing`` arms it."""

from __future__ import annotations

from typing import Any

from avgpipe.faults.fault import Fault
from avgpipe.links.link import Link, LocalLink
from avgpipe.links.message import Key, tensors_of


def disturb(links: dict[int, Link], fault: Fault) -> None:
    """Inject a fault into the links of a worker, by replacing them in ``links``."""
    remote = {replica: link for replica, link in links.items() if not isinstance(link, LocalLink)}
    if fault.kind == "cut line":
        links.update({replica: _CutLine(link) for replica, link in remote.items()})
    elif fault.where == "wire":
        sound = remote or dict(links)
        links.update({replica: _Flipping(link, links, sound, fault.bit) for replica, link in sound.items()})


class _CutLine(Link):
    """A link that loses what is sent."""

    def __init__(self, link: Link) -> None:
        self.name = link.name

    def send(self, key: Key, value: Any) -> None:
        pass


class _Flipping(Link):
    """A link that flips a bit of the next message with tensors, then restores the ``sound`` links."""

    def __init__(self, link: Link, links: dict[int, Link], sound: dict[int, Link], bit: int) -> None:
        self.name, self._link, self._bit = link.name, link, bit
        self._links, self._sound = links, sound

    def send(self, key: Key, value: Any) -> None:
        if any(t.nbytes for t in tensors_of(value)):
            self._links.update(self._sound)
            self._link.send_flipped(key, value, self._bit)
        else:
            self._link.send(key, value)
