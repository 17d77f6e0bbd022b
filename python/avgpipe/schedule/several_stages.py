"""Schedules with several stages on each worker, in loops over the workers or in a V, and those with split backwards.

They are built for any number of micro-batches. If the published order needs more of them than there are, or
whole groups, it is built for those, and the actions of micro-batches that do not exist are left out: an
action waits only for actions of its own micro-batch, so none waits for one that is left out.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable
from itertools import zip_longest

from avgpipe.schedule.one_stage import Asked
from avgpipe.schedule.row import Action, Kind, Row
from avgpipe.schedule.schedule import Schedule

_F, _B, _I, _W, _U = Kind


# ---- loops: worker w of W has the stages w, w+W, w+2W, ... -----------------------------------------------------------


def interleaved_1f1b(asked: Asked) -> Schedule:
    """Build Megatron-LM's schedule (Narayanan et al. 2021, section 2.2).

    Worker w begins with 2 (W-1-w) + (V-1) W + 1 forwards, V stages per worker, then alternates one backward, one
    forward.
    """
    return _depth_first(asked, asked.stages_per_worker, per_hop=2)


def interleaved_zero_bubble(asked: Asked) -> Schedule:
    """Build the schedule of :func:`zero_bubble_h1` for several stages on each worker."""
    return _depth_first(asked, asked.stages_per_worker, per_hop=1, splits=True)


def zero_bubble_h1(asked: Asked) -> Schedule:
    """Build 1F1B in the memory of its first stage: K micro-batches in flight on every stage (Qi et al. 2024, 2.2.1).

    Stage k needs only K-k of them for 1F1B; the other k are micro-batches whose W is delayed until k more I
    have run.
    """
    return _depth_first(asked, 1, per_hop=1, splits=True)


def _depth_first(asked: Asked, per_worker: int, per_hop: int, splits: bool = False) -> Schedule:
    """Build rows in which groups of W micro-batches go through a worker's first stage, then its second, and so on.

    Backwards go from its last stage to its first. Worker w begins with (V-1) W + 1 forwards, and ``per_hop``
    more for each later worker; then it alternates one backward, one forward. If it ``splits`` backwards, W
    follow w I later.
    """
    _check_multiple(asked, per_worker)
    workers = asked.stages // per_worker
    order = [
        (turn, m)
        for first in range(0, asked.micro_batches, workers)
        for turn in range(per_worker)
        for m in range(first, first + workers)
    ]
    rows = []
    for w in range(workers):
        own = range(w, asked.stages, workers)
        forwards = [Action(_F, m, own[turn]) for turn, m in order]
        backwards = [Action(_I if splits else _B, m, own[-1 - turn]) for turn, m in order]
        late = [None] * w + [action._replace(kind=_W) for action in backwards] if splits else []
        warm_up = (per_worker - 1) * workers + 1 + per_hop * (workers - 1 - w)
        turns = zip_longest(backwards, late, forwards[warm_up:])
        row = [*forwards[:warm_up], *(action for turn in turns for action in turn if action is not None)]
        rows.append(_existing(row, asked.micro_batches, own))
    return Schedule(asked.name, asked.micro_batches, tuple(rows))


def looped_bfs(asked: Asked) -> Schedule:
    """Build the breadth-first schedule (Lamy-Poirier 2022, arXiv 2211.05953).

    All micro-batches go through a worker's first stage, then all through its second, and so on; their
    backwards return the same way, the last micro-batch first, as in ``ScheduleLoopedBFS`` of torch.
    """
    _check_multiple(asked, asked.stages_per_worker)
    workers, micro_batches = asked.stages // asked.stages_per_worker, range(asked.micro_batches)
    rows = []
    for w in range(workers):
        own = range(w, asked.stages, workers)
        forwards = [Action(_F, m, k) for k in own for m in micro_batches]
        backwards = [action._replace(kind=_B) for action in reversed(forwards)]
        rows.append(_existing([*forwards, *backwards], asked.micro_batches, own))
    return Schedule(asked.name, asked.micro_batches, tuple(rows))


# ---- a V: worker w of W has the stages w and 2W-1-w ------------------------------------------------------------------

_Phase = tuple[int, list[tuple[int, Kind]]]  # repetitions, and the stage and kind of each action


def zero_bubble_v(asked: Asked) -> Schedule:
    """Build ZB-V (Qi et al., NeurIPS 2024, "Pipeline Parallelism with Controllable Memory").

    A worker holds at most 2W activations, of stages half as large as with one stage per worker: as much as
    the first stage of 1F1B.
    """
    _check_multiple(asked, 2)
    workers = asked.stages // 2
    steady = max(0, asked.micro_batches - workers)
    rows = []
    for down in range(workers):
        up, behind = asked.stages - 1 - down, workers - 1 - down
        phases: list[_Phase] = [
            (2 * behind + 1, [(down, _F)]),
            (down, [(up, _F), (down, _F)]),
            (behind + 1, [(up, _F), (up, _I), (up, _W)]),
            (steady, [(down, _F), (down, _I), (down, _W), (up, _F), (up, _I), (up, _W)]),
            (down, [(down, _I), (up, _I)]),
            (behind + 1, [(down, _I), (down, _W)]),
            (down, [(up, _W)]),
            (down, [(down, _W)]),
        ]
        rows.append(_existing(_numbered(phases), asked.micro_batches, (down, up)))
    return Schedule(asked.name, asked.micro_batches, tuple(rows))


def dualpipe_v(asked: Asked) -> Schedule:
    """Build DualPipeV (DeepSeek): DualPipe of the DeepSeek-V3 report, section 3.2.1, cut in half.

    DualPipe feeds a pipeline from both ends and holds all weights twice; in the V each worker has one stage
    of each half. In the steady state a forward of one stage and a backward of the other alternate, the
    forward first: DualPipeV runs such a pair at the same time, to hide the communication inside its layers.
    Backwards are split while the pipeline fills and empties. A worker holds at most 2W+1 activations, one
    more than in ZB-V. The published order is for at least 2W micro-batches.
    """
    _check_multiple(asked, 2)
    workers = asked.stages // 2
    steady = max(0, asked.micro_batches - asked.stages)
    rows = []
    for down in range(workers):
        up, behind = asked.stages - 1 - down, workers - 1 - down
        last = [up, down] * (down + 1)  # the stages of the actions after the last forward
        whole, split = last[: down + 1], last[down + 1 :]
        late = split + [down] * behind  # the stages of the delayed W
        phases: list[_Phase] = [
            (2 * behind, [(down, _F)]),
            (down + 1, [(down, _F), (up, _F)]),
            (behind, [(up, _I), (up, _W), (up, _F)]),
            (steady + down + 1, [(down, _F), (up, _B), (up, _F), (down, _B)]),
            (behind, [(up, _B), (up, _F), (down, _B)]),
            (1, [(k, _B) for k in whole]),
            (1, [(k, _I) for k in split]),
            (1, [action for k in late[:behind] for action in ((k, _W), (down, _I))]),
            (1, [(k, _W) for k in late[behind:]]),
        ]
        rows.append(_existing(_numbered(phases), asked.micro_batches, (down, up)))
    return Schedule(asked.name, asked.micro_batches, tuple(rows))


def _numbered(phases: Iterable[_Phase]) -> list[Action]:
    """Return the actions of the phases: the n-th forward, backward or W of a stage is of micro-batch n."""
    counts: Counter[tuple[int, Kind]] = Counter()
    row = []
    for repeats, actions in phases:
        for stage, kind in actions * repeats:
            parts = (_I, _W) if kind is _B else (kind,)
            row.append(Action(kind, counts[stage, parts[0]], stage))
            counts.update((stage, part) for part in parts)
    return row


# ---- for both --------------------------------------------------------------------------------------------------------


def _existing(actions: Iterable[Action], micro_batches: int, stages: Iterable[int]) -> Row:
    """Make a row of the actions whose micro-batch exists, and of the stages' updates."""
    row = [action for action in actions if (action.micro_batch or 0) < micro_batches]
    return Row([*row, *(Action(_U, None, k) for k in stages)])


def _check_multiple(asked: Asked, per_worker: int) -> None:
    if asked.stages % per_worker:
        raise ValueError(
            f"stages={asked.stages}: {asked.name} has {per_worker} stages on each worker, give a multiple of "
            f"{per_worker}, {max(1, asked.stages // per_worker) * per_worker} for example"
        )
