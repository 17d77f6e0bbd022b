"""The reference model of elastic averaging, which replicas follow and move."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

from avgpipe.elastic.flat import FlatBuffers, Layout
from avgpipe.elastic.replica import Replica
from avgpipe.elastic.rounds import GroupRounds, Rounds
from avgpipe.ranks.world import gather
from avgpipe.rules import Elasticity

Outer = Callable[[list[torch.Tensor]], torch.optim.Optimizer]
DTYPES = (torch.float32, torch.float64, torch.bfloat16, torch.float16)  # what the operators know


class Reference:
    """Weights z that N replicas agree on: they move it by their updates, it pulls them together.

    parameters: the initial z, copied; their order is the order in which replicas give theirs. Parameters
        that are frozen now are held but take no part (what shall be unfrozen later must be trainable here).
        Plain floating tensors take part, so z can be that of flat buffers. A replica may have another dtype
        than z, such as bfloat16 replicas of a float32 reference.
    replicas: N, all in this process, or one on each rank of ``group``.
    alpha: elasticity a from 0 to 1; by default 1/N with rule avgpipe (0 for N = 1, where z simply follows x),
        0.9/N with rule easgd (also for N = 1, where z is then a moving average of x).
    rule: with d_i what replica i's optimizer did in a round, and z' the reference after it,
        "avgpipe" (Chen et al., PPoPP 2023): z' = z + (1/N) sum_i d_i, and a force pulls each x_i + d_i;
        "easgd" (Zhang, Choromanska, LeCun 2015): e_i = a (x_i + d_i - z) leaves x_i, and z' = z + sum_i e_i.
    staleness: of rule avgpipe,
        0: the force is a (z' - (x_i + d_i)), and the step that completes a round pulls all replicas;
        1: the force is a (z - x_i), both from the beginning of the round, so no replica waits;
        "asynchronous": as 1 with whatever z is there, and an update is applied on arrival (not reproducible).
        Rule easgd uses z from before the round with 0 and 1 alike.
    period: local steps tau in a round.
    outer: a function from parameters to an optimizer that steps z, with -(1/N) sum_i d_i (easgd: -sum_i e_i)
        as its gradient (Douillard et al. 2023); ``reference.outer`` is what it returned.
    remote: replicas of other processes that tell their updates in a way of the caller's: :meth:`accept` takes
        one in, when :meth:`ready` says that it may come.
    group: process group of the replicas: replica = rank in the group, N = its size. z is its first rank's.
        With staleness 1 the all-reduce runs during the next round's local steps. Time limits are the group's.

    z moves by the *mean* of N updates, so N replicas want a learning rate like that of an N-fold batch.

    With staleness 0 and 1 results do not depend on the order in which replicas step: updates are added in
    replica order. An update with infinities or NaN does not reach z; ``dropped_updates`` counts such updates
    (in a group: this rank's). On an accelerator, where the check would wait for the device, and in a pipeline's
    round that is one pass over memory (staleness 0), only the bad elements of such an update are left out;
    such a round on an accelerator counts once. Buffers of the model (such as running means) are not averaged.
    """

    def __init__(
        self,
        parameters: Iterable[torch.Tensor],
        replicas: int,
        *,
        alpha: float | None = None,
        rule: str = "avgpipe",
        staleness: int | str = 0,
        period: int = 1,
        outer: Outer | None = None,
        group: dist.ProcessGroup | None = None,
        remote: Collection[int] = (),
    ) -> None:
        given = _tensors("parameters", parameters)
        self.elasticity = Elasticity.checked(replicas, alpha, rule, staleness, period)
        self.group = group
        self.averaged = _averaged(given)  # which of ``parameters`` take part in the averaging
        moving = [given[i] for i in self.averaged]
        layout = Layout(moving)
        if group is not None:
            _check_group(group, self.elasticity, layout, outer is not None)
        with torch.no_grad():
            self.rounds = (
                Rounds(layout, moving, self.elasticity, outer, remote)
                if group is None or replicas == 1
                else GroupRounds(layout, moving, self.elasticity, outer, group)
            )
            zs = dict(zip(self.averaged, self.rounds.tensors))
            self.parameters = [zs[i] if i in zs else p.detach().clone() for i, p in enumerate(given)]
        self._applied: set[int] = set()  # ids of the parameters that are z now, see applied_to

    @property
    def replicas(self) -> int:
        return self.elasticity.replicas

    @property
    def round(self) -> int:
        """Completed rounds. Asynchronous: contributions // N."""
        return self.rounds.round

    @property
    def dropped_updates(self) -> int:
        """Updates that were left out because they were not finite; on an accelerator, in part."""
        return self.rounds.dropped

    @property
    def outer(self) -> torch.optim.Optimizer | None:
        return self.rounds.outer

    @property
    def z(self) -> FlatBuffers:
        """The weights that take part in the averaging, in flat buffers."""
        return self.rounds.z

    def ready(self, replica: int) -> bool:
        """Whether :meth:`accept` may take in an update of this remote replica: its round has begun."""
        return self.rounds.ready(replica, True)

    def accept(self, replica: int, update: Sequence[torch.Tensor]) -> None:
        """Take in what a remote replica told, one flat tensor per buffer, as ``ElasticAveraging.update`` gave it."""
        self.rounds.accept(replica, update)

    def attach(
        self, replica: int, tensors: list[torch.Tensor], optimizer: torch.optim.Optimizer, flat: bool
    ) -> Replica:
        """Make ``tensors`` (one for each of ``averaged``) replica ``replica``; done by ElasticAveraging.

        Args:
            replica: From 0 to N - 1.
            tensors: Its weights.
            optimizer: Its optimizer.
            flat: Move the weights into flat buffers if that can be.
        """
        n = self.replicas
        if isinstance(replica, bool) or not isinstance(replica, int) or not 0 <= replica < n:
            raise ValueError(
                f"replica must be from 0 to {n - 1} (the reference has {n} replicas), not {replica!r}"
            )
        if isinstance(self.rounds, GroupRounds) and replica != self.rounds.rank:
            raise ValueError(
                f"replica must be this process's rank in the group, {self.rounds.rank}, not {replica}"
            )
        if replica in self.rounds.replicas:
            free = ", ".join(str(i) for i in range(n) if i not in self.rounds.replicas)
            raise ValueError(
                f"replica {replica} has an optimizer already; "
                f"{f'pass replica= one of {free}' if free else 'all have'}, or free it with "
                f"reference.release({replica})"
            )
        taken = {
            t.data_ptr(): i for i, r in self.rounds.replicas.items() for t in r.tensors if _has_memory(t)
        }
        taken |= {t.data_ptr(): -1 for t in self.parameters if _has_memory(t)}
        for t in tensors:
            if _has_memory(t) and t.data_ptr() in taken:
                other = taken[t.data_ptr()]
                whose = "the reference" if other < 0 else f"replica {other}"
                raise ValueError(
                    f"replica {replica} shares a tensor of shape {tuple(t.shape)} with {whose}: "
                    f"give each replica its own copy, such as copy.deepcopy(model)"
                )
        update = None if self.rounds.follows else self.rounds.update_of(replica)
        mine = Replica(self.z.layout, tensors, self.elasticity, update, optimizer, flat, self._applied)
        self.rounds.replicas[replica] = mine
        return mine

    def release(self, replica: int) -> None:
        """Forget a replica's weights, so that another optimizer can be made for it between two rounds."""
        if replica in self.rounds.contributed:
            raise RuntimeError(
                f"replica {replica} is in the middle of round {self.round}: complete the round first"
            )
        if replica not in self.rounds.replicas:
            raise ValueError(
                f"replica {replica!r} has no optimizer; these have: {sorted(self.rounds.replicas)}"
            )
        self.rounds.detach(replica)

    @torch.no_grad()
    def align(self, replica: int, layout: Layout, regions: Sequence[int]) -> None:
        """Give parts of a replica z's values, now and at the beginning of its round; no update holds any of them.

        Args:
            replica: The replica.
            layout: Of parameters in the tensors that the reference was built over, one for each of its buffers.
            regions: Which of these parameters.
        """
        z, mine = layout.tensors(self.z.flats), self.rounds.replicas[replica]
        for buffers in (mine.x, mine.before):
            values = layout.tensors(buffers.flats) if buffers is not None else []
            for n in regions if values else ():
                values[n].copy_(z[n])
        for update in self.rounds.updates.values():  # what is told already in an unfinished round
            values = layout.tensors(update.flats)
            for n in regions:
                values[n].zero_()

    @contextmanager
    def applied_to(self, model: nn.Module | Iterable[torch.Tensor]) -> Iterator[None]:
        """Inside the block, the parameters of ``model`` (or the tensors given) are z.

        Afterwards the old ones again.

        No copies are made unless dtype or device differ. Training inside the block is refused. ValueError if
        number or shapes differ from the reference's.
        """
        self.rounds.finish()
        tensors = self._counterparts(model)
        own = [t.data for t in tensors]
        inside = {id(t) for t in tensors} - self._applied
        try:
            self._applied |= inside
            for t, z in zip(tensors, self.parameters):
                z = z.to(device=t.device, dtype=t.dtype)
                t.data = z.to_sparse() if t.is_sparse and not z.is_sparse else z
            yield
        finally:
            for t, data in zip(tensors, own):
                t.data = data
            self._applied -= inside

    @torch.no_grad()
    def copy_to(self, model: nn.Module | Iterable[torch.Tensor]) -> None:
        """Set the parameters of ``model`` (or the tensors given) to the values of z."""
        self.rounds.finish()
        for t, z in zip(self._counterparts(model), self.parameters):
            t.copy_(z.to_sparse() if t.is_sparse and not z.is_sparse else z)

    def is_applied_to(self, tensors: Iterable[torch.Tensor]) -> bool:
        return bool(self._applied) and any(id(t) in self._applied for t in tensors)

    def _counterparts(self, model: nn.Module | Iterable[torch.Tensor]) -> list[torch.Tensor]:
        tensors = _tensors("model", model.parameters() if isinstance(model, nn.Module) else model)
        if len(tensors) != len(self.parameters):
            raise ValueError(f"the model has {len(tensors)} parameters, the reference {len(self.parameters)}")
        for i, (t, z) in enumerate(zip(tensors, self.parameters)):
            if t.shape != z.shape:
                raise ValueError(
                    f"parameter {i} of the model has shape {tuple(t.shape)}, the reference's {tuple(z.shape)}"
                )
        return tensors

    def state_dict(self) -> dict[str, Any]:
        """z, the round, the updates that wait for the others of their round, and the outer optimizer's state.

        The tensors are the live ones, as in torch's state dicts: save or copy them before the next step.
        """
        self.rounds.finish()
        r = self.rounds
        return {
            "parameters": list(self.parameters),
            "round": r.round,
            "arrivals_in_round": r.contributions % r.contributions_per_round,
            "pending": {i: r.updates[i].tensors() for i in sorted(r.contributed)},
            "dropped_updates": r.dropped,
            "outer": None if self.outer is None else self.outer.state_dict(),
        }

    @torch.no_grad()
    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Take over what :meth:`state_dict` gave, here or in another process.

        ``torch.load`` reads it with weights_only=True. ValueError if number or shapes of the parameters, the presence
        of an outer optimizer, or, in the middle of a round, the number of replicas differ; then nothing has changed.
        """
        self.rounds.finish()
        lacking = sorted({"parameters", "pending", "round", "arrivals_in_round", "outer"} - set(state))
        if lacking:
            raise ValueError(
                f"the state lacks {', '.join(lacking)}: pass what Reference.state_dict() returned"
            )
        values, pending = state["parameters"], state["pending"]
        if not isinstance(pending, dict):
            raise TypeError(
                f"the state's pending is of type {type(pending).__name__}: pass what Reference.state_dict() returned"
            )
        _same_shapes("parameters", values, self.parameters)
        for i, update in pending.items():
            if not 0 <= i < self.replicas:
                raise ValueError(
                    f"the state holds an update of replica {i}, but there are {self.replicas} replicas"
                )
            _same_shapes(f"pending[{i}]", update, self.rounds.tensors)
        if (state["outer"] is None) != (self.outer is None):
            has, lacks = ("reference", "state") if self.outer is not None else ("state", "reference")
            raise ValueError(f"the {has} has an outer optimizer and the {lacks} has none: build both alike")
        if self.outer is not None:
            self.outer.load_state_dict(state["outer"])
        for mine, value in zip(self.parameters, values):
            mine.copy_(value)
        contributions = state["round"] * self.rounds.contributions_per_round + state["arrivals_in_round"]
        self.rounds.restore(contributions, pending, state.get("dropped_updates", 0))

    def __repr__(self) -> str:
        e = self.elasticity
        return (
            f"Reference({len(self.parameters)} tensors, replicas={e.replicas}, alpha={e.alpha:.4g}, "
            f"rule={e.rule!r}, staleness={e.staleness!r}, period={e.period}, round={self.round})"
        )


def _tensors(name: str, values: Iterable[torch.Tensor]) -> list[torch.Tensor]:
    if isinstance(values, torch.Tensor):
        raise TypeError(
            f"{name} must be a list of tensors, such as model.parameters(), not one tensor; pass [tensor]"
        )
    tensors = list(values)
    for i, t in enumerate(tensors):
        if not isinstance(t, torch.Tensor):
            raise TypeError(f"{name}[{i}] must be a tensor, not {type(t).__name__}; pass model.parameters()")
    if not tensors:
        raise ValueError(f"{name} is empty; pass model.parameters() (a generator gives its values only once)")
    if len({id(t) for t in tensors}) < len(tensors):
        twice = next(i for i, t in enumerate(tensors) if any(t is u for u in tensors[:i]))
        raise ValueError(f"{name}[{twice}] is there twice; model.parameters() gives tied weights once")
    return tensors


def _averaged(parameters: list[torch.Tensor]) -> list[int]:
    """Which take part: all but frozen ``nn.Parameter``s and integers.

    A plain tensor does: it is a flat buffer whose views are the parameters, or a weight of functional code.
    """
    averaged = []
    for i, p in enumerate(parameters):
        frozen = isinstance(p, nn.Parameter) and not p.requires_grad
        if frozen or not (p.is_floating_point() or p.is_complex()):
            continue
        if p.layout not in (torch.strided, torch.sparse_coo):
            raise ValueError(f"parameters[{i}] has layout {p.layout}; use torch.strided or torch.sparse_coo")
        if p.dtype.to_real() not in DTYPES:
            raise TypeError(
                f"parameters[{i}] has dtype {p.dtype}; cast it to float32, float64, bfloat16 or float16"
            )
        averaged.append(i)
    return averaged


def _same_shapes(name: str, values: list[torch.Tensor], mine: list[torch.Tensor]) -> None:
    if len(values) != len(mine):
        raise ValueError(f"the state's {name} are {len(values)} tensors, the reference has {len(mine)}")
    for i, (value, z) in enumerate(zip(values, mine)):
        if value.shape != z.shape:
            raise ValueError(
                f"the state's {name}[{i}] has shape {tuple(value.shape)}, the reference's {tuple(z.shape)}: "
                f"it is the state of another model"
            )


def _has_memory(t: torch.Tensor) -> bool:
    return t.layout == torch.strided and t.numel() > 0 and t.data_ptr() != 0


def _check_group(group: dist.ProcessGroup, elasticity: Elasticity, layout: Layout, outer: bool) -> None:
    """The same options and shapes on all ranks, else the first all-reduce would hang or mix up weights."""
    if elasticity.asynchronous:
        raise ValueError(
            "staleness 'asynchronous' applies each update when it arrives, but an all-reduce needs all ranks "
            "of the group; use staleness=1, which waits a whole round later"
        )
    rank, size = dist.get_rank(group), dist.get_world_size(group)
    if rank < 0:
        raise ValueError("this process is not in the group; make the Reference only on ranks that are")
    if elasticity.replicas != size:
        raise ValueError(
            f"replicas must be the size of the group, {size} (one per rank), not {elasticity.replicas}"
        )
    mine = f"{elasticity}, outer={outer}, {[str(dtype) for dtype, _ in layout.keys]}, {layout.sizes}"
    everyone = gather(mine, group)
    for other, theirs in enumerate(everyone):
        if theirs != everyone[0]:
            raise ValueError(
                f"rank {other} of the group built its Reference with {theirs}, rank 0 with {everyone[0]}"
            )
