"""Options that the caller's loop sets in this rank's optimizers, which are set again where batches are repeated.

A copy of the state has the options of its moment. What the loop set later, before the update of batch u, is set again
before u is repeated::

    batches         0 ..... b ........ u ..... x      x: a process is lost
    the loop sets                   lr
    then            all at b again; b .... lr u ..... x; on
"""

from __future__ import annotations

import base64
import io
import logging
from copy import deepcopy
from typing import Any, cast

import torch

from avgpipe.checkpoint.load import OF_STAGE
from avgpipe.ranks.world import World
from avgpipe.runtime.feed import BatchFeed
from avgpipe.runtime.worker import Worker

_log = logging.getLogger("avgpipe")
_SCALARS = bool, int, float, str, type(None)
_KINDS = (*_SCALARS, tuple, list, torch.Tensor)
Place = tuple[int, str]  # the number of a group, among those of all optimizers; the option's name
Change = tuple[Any, Any]  # the values before and after it; None where there is no such option


class LoopOptions:
    """What the caller has set in the groups of this rank's optimizers, by the batch whose update came next."""

    def __init__(self) -> None:
        # All that the caller may have got, for each worker so far; they become one with those of the newest.
        self._optimizers: list[list[torch.optim.Optimizer]] = []
        # When training last changed them; None while it does, or a recovery.
        self._before: dict[Place, Any] | None = None
        self._changes: dict[int, dict[Place, Change]] = {}
        self._left: list[int] = []  # batches before which changes must be made again, ascending

    def attach(self, worker: Worker) -> None:
        """Follow the optimizers of a worker from now on, as which those of workers before count, too."""
        made = [t.optimizer for t in worker.trained.values() if t.optimizer is not None]
        made = made if worker.world.size > 1 else []  # a process that is alone repeats nothing
        for earlier in self._optimizers:
            for old, new in zip(earlier, made):
                old.__dict__ = new.__dict__
        self._optimizers.append(made)
        if len(self._optimizers) == 1:
            self.look()

    def release(self) -> None:
        """Free what the optimizers hold, though the caller may keep them."""
        self._before = None
        for group in self._groups:
            group["params"] = []
        for made in self._optimizers:
            for one in made:
                one.__dict__.clear()

    @property
    def _groups(self) -> list[dict[str, Any]]:
        made = self._optimizers[-1] if self._optimizers else []
        return [group for one in made if vars(one) for group in one.param_groups]

    def _options(self) -> dict[Place, Any]:
        return {
            (n, name): value
            for n, group in enumerate(self._groups)
            for name, value in group.items()
            if name not in OF_STAGE and isinstance(value, _KINDS)
        }

    # ---- noting ------------------------------------------------------------------------------------------------------

    def look(self) -> None:
        """Take later changes for the caller's."""
        self._before = {place: _kept(value) for place, value in self._options().items()}

    def note(self, batch: int) -> None:
        """Note what the caller has changed, before the update of a batch."""
        if self._before is None:
            return
        for place, value in self._options().items():
            before = self._before.get(place)
            if not _same(value, before):
                changes = self._changes.setdefault(batch, {})
                first, _ = changes.get(place, (before, None))
                self._before[place] = _kept(value)
                changes[place] = first, self._before[place]

    def pause(self) -> None:
        """Take no change for the caller's until the next :meth:`look`."""
        self._before = None

    def loaded(self, forgets: bool) -> None:
        """Continue after a load, which has replaced some options. ``forgets``: no rank goes back to before it."""
        if self._before is None:
            return  # the load is repeated
        now = self._options()
        kept = {
            batch: {place: change for place, change in changes.items() if _same(now.get(place), change[1])}
            for batch, changes in self._changes.items()
        }
        self._changes = {} if forgets else kept
        self.look()

    def forget(self, earliest: int) -> None:
        """Forget what was changed before the update of a batch."""
        self._changes = {batch: changes for batch, changes in self._changes.items() if batch >= earliest}

    # ---- going back --------------------------------------------------------------------------------------------------

    def share(self, world: World, earliest: int, batches: int, is_new: bool) -> None:
        """Give a new process what the loop has set from batch ``earliest`` on, and a copy may lack. Collective.

        The copy is of the state after ``batches``. The new process sets by itself what follows later results.
        """
        window = {batch: of for batch, of in self._changes.items() if earliest <= batch <= batches}
        rows = world.gather(None if is_new else [len(self._groups), _packed(window)])
        if not is_new:
            return
        given = [(rank, row[0], _unpacked(row[1])) for rank, row in enumerate(rows) if row is not None]
        fitting = [(rank, changes) for rank, count, changes in given if count == len(self._groups)]
        if fitting:
            rank, self._changes = fitting[0]
            others = [other for other, changes in fitting if _set_by(changes) != _set_by(self._changes)]
            if others:
                _log.warning(
                    "the loop has set other options in optimizers of rank %d than in those of rank %d: this process, "
                    "which replaces another one, takes those of rank %d where its copy was taken before",
                    *(others[0], rank, rank),
                )
        elif any(changes for _, _, changes in given):
            _log.warning(
                "the copy from which this process continues may lack options that the loop has set just before, as no "
                "other rank has as many groups of parameters"
            )

    def begin_again(self, earliest: int, batches: int) -> None:
        """Go on from a copy of the state after ``batches``, which may lack what was set from ``earliest`` on."""
        for batch in sorted(self._changes):
            if earliest <= batch <= batches:
                self._set(batch, lacking=True)
        self._left = sorted(batch for batch in self._changes if batch > batches)
        self.look()

    def repeat(self, batch: float) -> None:
        """Change again what was changed before the update of a batch, or of one before."""
        while self._left and self._left[0] <= batch:
            self._set(self._left.pop(0))
        self.look()

    @torch.no_grad()
    def _set(self, batch: int, lacking: bool = False) -> None:
        """Set options as the caller has. ``lacking``: only those that are as before."""
        groups = self._groups
        for (n, name), (before, after) in self._changes[batch].items():
            now = groups[n].get(name)
            if lacking and not _same(now, before):
                continue
            if isinstance(now, torch.Tensor) and isinstance(after, torch.Tensor):
                now.copy_(after)  # a captured graph reads its memory
            else:
                groups[n][name] = _kept(after)


class NotingFeed(BatchFeed):
    """A feed that notes what the caller sets between two updates."""

    def __init__(self, options: LoopOptions, *arguments: Any) -> None:
        super().__init__(*arguments)
        self._noted = options

    @property
    def following(self) -> int:
        """The batch whose update is the next one."""
        return self._in_flight[0].batch if self._in_flight else self.next_batch

    def earliest(self, batches: int) -> int:
        """The first batch whose options a copy after ``batches`` may lack: those behind it were in flight."""
        return batches - self._most_in_flight + 1

    def note(self) -> None:
        self._noted.note(self.following)

    def finish_oldest(self, prefetch: bool = False) -> None:
        self.note()
        self._noted.pause()  # schedules change options within an update
        super().finish_oldest(prefetch)
        self._noted.look()


def _kept(value: Any) -> Any:
    return value if isinstance(value, _SCALARS) else deepcopy(value)


def _same(one: Any, other: Any) -> bool:
    if isinstance(one, torch.Tensor) and isinstance(other, torch.Tensor):
        return one.dtype == other.dtype and torch.equal(one.cpu(), other.cpu())
    return type(one) is type(other) and bool(one == other)


def _set_by(changes: dict[int, dict[Place, Change]]) -> str:
    return repr([{place: after for place, (_, after) in changes[batch].items()} for batch in sorted(changes)])


def _packed(changes: dict[int, dict[Place, Change]]) -> str:
    text = io.BytesIO()
    torch.save(changes, text)
    return base64.b64encode(text.getvalue()).decode()


def _unpacked(text: str) -> dict[int, dict[Place, Change]]:
    found = torch.load(io.BytesIO(base64.b64decode(text)), map_location="cpu", weights_only=True)
    return cast(dict[int, dict[Place, Change]], found)
