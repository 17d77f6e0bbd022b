"""The step of torch.optim.SGD, Adam or AdamW and the averaging rule in one pass over memory.

Weights, momenta, reference and update of a replica lie in flat buffers of one layout, so a parameter's place in one of
them is its place in all. Gradients stay where autograd made them: an operator is called with lists, of the parameters'
gradients and of the views at their places. What has no gradient now makes no step and only takes part in the averaging.
"""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from itertools import accumulate, pairwise
from operator import is_
from typing import Any, TypeAlias

import torch

import avgpipe_ext
from avgpipe.elastic.flat import ALIGN_BYTES, FlatBuffers, Region, dense_strides
from avgpipe.elastic.replica import Replica

Group: TypeAlias = dict[str, Any]
Row: TypeAlias = tuple[torch.Tensor, ...]  # weights, reference, update; in a call also state

STATE = {  # what the optimizers remember of each parameter, beside Adam's step counter
    torch.optim.SGD: ("momentum_buffer",),
    torch.optim.Adam: ("exp_avg", "exp_avg_sq"),
    torch.optim.AdamW: ("exp_avg", "exp_avg_sq"),
}


class Unfusable(Exception):
    """Why a step cannot be done in one pass with the averaging."""


@dataclass
class Call:
    """One call of an operator, for parameters of one group and device that have made equally many steps.

    Attributes:
        group: The number of their group.
        made: Their steps, as the host knows them; SGD counts no further than to its first one.
        params: The parameters' numbers.
        regions: Where they lie.
        rows: The tensors of each.
        entries: Their state in the optimizer.
        columns: The rows' tensors by kind.
        counters: Adam's.
    """

    group: int
    made: float
    params: list[int] = field(default_factory=list)
    regions: list[Region] = field(default_factory=list)
    rows: list[Row] = field(default_factory=list)
    entries: list[dict[str, Any]] = field(default_factory=list)

    def __post_init__(self) -> None:
        self.columns: list[list[torch.Tensor]] = []
        self.counters: list[torch.Tensor] = []

    def close(self) -> None:
        """Take no more parameters."""
        self.columns = _columns(self.rows)
        self.counters = [entry["step"] for entry in self.entries if "step" in entry]
        group = self.counters[0]._base if self.counters else None  # the counters of a group are one tensor
        self._added = [group] if group is not None and len(group) == len(self.counters) else self.counters

    def count(self, by: float | torch.Tensor) -> None:
        """Count a step, or ``by`` -1 on the device one that was skipped after all."""
        if self.counters:
            torch._foreach_add_(self._added, by)
        elif self.made == 0:
            for entry, row in zip(self.entries, self.rows):
                entry["momentum_buffer"] = row[-1]
        self.made += 0.0 if isinstance(by, torch.Tensor) else by


class FusedStep:
    """Prepares the fused steps of one replica."""

    def __init__(self, inner: torch.optim.Optimizer, replica: Replica, z: FlatBuffers) -> None:
        self._inner, self._replica, self._z = inner, replica, z
        self._never = _obstacle(inner, replica)
        self._params: list[torch.Tensor] = []
        self._pointers: list[int] = []
        self._members: list[range] = []  # of each group, as numbers of parameters
        self._state: dict[str, FlatBuffers] = {}
        self._calls: list[Call] = []
        self._known: list[Any] | None = None  # what the calls were planned for
        if self._never is None:  # now, as looking at gaps may wait for a device
            with suppress(Unfusable):
                self._locate()

    def check(self) -> None:
        """Raise Unfusable if the next step cannot be fused, whatever its gradients."""
        if self._never:
            raise Unfusable(self._never)
        if self._inner._optimizer_step_post_hooks:
            raise Unfusable(
                "the inner optimizer's post-step hooks see the weights between step and averaging"
            )
        step = vars(self._inner).get("step")  # a learning-rate scheduler's wrapper only notes the call
        wraps_own = getattr(step, "__wrapped__", None) is type(self._inner).step
        if step is not None and not (wraps_own and hasattr(step, "_wrapped_by_lr_sched")):
            raise Unfusable("the inner optimizer's step method is not its class's")
        for group in self._inner.param_groups:
            _check_group(group)
        self._locate()

    def skips(self, found_inf: torch.Tensor | None) -> bool | None:
        """Whether a GradScaler skips the step; None if only the device knows, and nothing here needs to."""
        if found_inf is None:
            return False
        groups = self._inner.param_groups
        if type(self._inner) is torch.optim.SGD:  # a first step is as any on momentum 0, unless dampened
            must_know = any(group["momentum"] and group["dampening"] for group in groups)
        else:  # counters on the device move alike if all parameters step
            on_device = all(group["fused"] or group["capturable"] for group in groups)
            must_know = not on_device or any(p.grad is None for p in self._params)
        on_host = found_inf.device.type == "cpu" or any(flat.device.type == "cpu" for flat in self._z.flats)
        return bool(found_inf) if must_know or on_host else None

    @torch.no_grad()
    def prepare(
        self, scale: torch.Tensor | None, found_inf: torch.Tensor | None, skips: bool | None
    ) -> FusedUpdate:
        """Make ready a step with the gradients of now. Raises Unfusable, with nothing stepped, if it cannot be fused.

        Args:
            scale: A GradScaler's.
            found_inf: A GradScaler's.
            skips: What :meth:`skips` returned.
        """
        self._replica.load()
        self._locate()  # after hooks and closure
        groups = self._inner.param_groups
        grads = [None if skips else p.grad for p in self._params]
        for i, (g, p, strides) in enumerate(zip(grads, self._params, self._strides)):
            if g is None or (g.layout is torch.strided and g.dtype is p.dtype and g.stride() == strides):
                continue
            if g.layout != torch.strided or g.dtype != p.dtype or not _same_strides(g, p):
                raise Unfusable(f"the gradient of parameter {i} has another layout, dtype or strides")
        if self._known is None or not _same_objects(self._known, self._look(grads)):
            self._plan(grads)
            self._known = self._look(grads)
        steps = []
        for call in self._calls:
            options = _options(type(self._inner), groups[call.group], call.made)
            steps.append((call, options, [g for i in call.params if (g := grads[i]) is not None]))
        scaling = {"grad_scale": scale, "found_inf": found_inf if skips is None else None}
        return FusedUpdate(self._replica, steps, self._still, scaling)

    def _look(self, grads: Sequence[torch.Tensor | None]) -> list[Any]:
        """All that the choice of calls depends on, beside the parameters' places."""
        groups, state = self._inner.param_groups, self._inner.state
        flags = [bool(group.get(name)) for group in groups for name in ("momentum", "fused", "capturable")]
        names = ("step", *STATE[type(self._inner)])
        held = [entry.get(name) for entry in state.values() for name in names]
        return [*(g is None for g in grads), *flags, *state.values(), *held]

    def _plan(self, grads: Sequence[torch.Tensor | None]) -> None:
        """Decide which call of an operator steps which parameters."""
        for call in self._calls:
            self._made |= dict(zip(call.params, zip(call.counters, [call.made] * len(call.params))))
        calls: dict[Any, Call] = {}
        still: dict[torch.device, list[Row]] = {}
        for row in self._gaps:
            still.setdefault(row[0].device, []).append(row)
        for g, (group, members) in enumerate(zip(self._inner.param_groups, self._members)):
            for i in members:
                p, region, row = self._params[i], self._regions[i], self._rows[i]
                if grads[i] is None:
                    still.setdefault(p.device, []).extend([row] if row else [])
                elif region is not None:
                    states, made, entry = self._adopt(group, members, i)
                    call = calls.setdefault((g, p.device, made), Call(g, made))
                    call.params.append(i)
                    call.regions.append(region)
                    call.rows.append((*row, *states))
                    call.entries.append(entry)
                elif p.numel():
                    raise Unfusable(f"parameter {i} of the optimizer is not among those that are averaged")
        self._calls, self._still = list(calls.values()), [rows for rows in still.values() if rows]
        for call in self._calls:
            call.close()

    def _locate(self) -> None:
        """Find the parameters' places, unless they are known."""
        groups = self._inner.param_groups
        params = [p for group in groups for p in group["params"]]
        sizes = [len(group["params"]) for group in groups]
        if (
            len(self._params) == len(params)
            and all(map(is_, self._params, params))
            and list(map(torch.Tensor.data_ptr, params)) == self._pointers
            and sizes == list(map(len, self._members))
        ):
            return
        update = self._replica.update
        assert update is not None, "z follows this replica"
        self._params, self._calls, self._known = [], [], None
        z, x = self._z.flats, self._replica.x.flats
        self._regions = [_region(p, x) for p in params]
        self._rows: list[Row] = [
            () if r is None else (p, r.view(z), r.view(update.flats)) for p, r in zip(params, self._regions)
        ]
        try:
            gaps = self._find_gaps()
        except Unfusable as reason:
            self._never = str(reason)  # not looked for again at every step
            raise
        self._gaps: list[Row] = [(gap.view(x), gap.view(z), gap.view(update.flats)) for gap in gaps]
        ends = list(accumulate(sizes))
        self._members = [range(end - size, end) for size, end in zip(sizes, ends)]
        self._views: dict[tuple[int, str], torch.Tensor] = {}  # of the state
        # Adam's counters: one tensor for each group, and each parameter's with what the host knows of it
        self._counters: dict[Any, torch.Tensor] = {}
        self._made: dict[int, tuple[torch.Tensor, float]] = {}
        self._strides = [p.stride() if p.layout == torch.strided else () for p in params]
        self._params, self._pointers = params, list(map(torch.Tensor.data_ptr, params))

    def _find_gaps(self) -> list[Region]:
        """The parts of x that are no parameter's, except zeros that alignment left."""
        gaps = []
        for b, flat in enumerate(self._replica.x.flats):
            places = [(r.offset, r.stop, n) for n, r in enumerate(self._regions) if r and r.buffer == b]
            places.sort()
            for (_, stop, m), (start, _, n) in pairwise(places):
                if start < stop:
                    raise Unfusable(f"parameters {m} and {n} of the optimizer share {stop - start} elements")
            edges = [0, *(edge for place in places for edge in place[:2]), flat.numel()]
            for start, stop in zip(edges[::2], edges[1::2]):
                gap = Region(b, start, (stop - start,), (1,))
                is_short = (stop - start) * flat.element_size() < ALIGN_BYTES
                if not is_short or flat[start:stop].any() or gap.view(self._z.flats).any():
                    gaps.append(gap)
        return gaps

    def _adopt(
        self, group: Group, members: range, i: int
    ) -> tuple[list[torch.Tensor], float, dict[str, Any]]:
        """Parameter i's state, brought to its place in flat memory, how many steps it has made, and its entry.

        SGD counts 0 or 1: in a first step, momentum becomes the gradient.
        """
        p, is_sgd = self._params[i], type(self._inner) is torch.optim.SGD
        if is_sgd and not group["momentum"]:
            return [], 1.0, {}
        entry, states, made = self._inner.state[p], [], 1.0
        for name in STATE[type(self._inner)]:
            mine, value = self._state_of(name, i), entry.get(name)
            if value is None:
                mine.zero_()
                made = 0.0
            elif value is not mine:
                if not isinstance(value, torch.Tensor) or (value.shape, value.dtype) != (p.shape, p.dtype):
                    raise Unfusable(f"{name} of parameter {i} has not the parameter's shape and dtype")
                mine.copy_(value)
            if value is not None or not is_sgd:
                entry[name] = mine
            states.append(mine)
        return states, made if is_sgd else self._steps_made(group, members, i, entry), entry

    def _state_of(self, name: str, i: int) -> torch.Tensor:
        """Parameter i's place in the state called ``name``."""
        if (i, name) not in self._views:
            x, region = self._replica.x, self._regions[i]
            assert region is not None
            if name not in self._state:
                self._state[name] = x.layout.zeros([flat.dtype for flat in x.flats])
            self._views[i, name] = region.view(self._state[name].flats)
        return self._views[i, name]

    def _steps_made(self, group: Group, members: range, i: int, entry: dict[str, Any]) -> float:
        """Adam's counter, made or moved to where torch would have it, as a number."""
        on_device = group["fused"] or group["capturable"]
        device = self._params[i].device if on_device else torch.device("cpu")
        mine, made = self._made.get(i, (torch.empty(0), 0.0))
        if mine is not entry.get("step") or mine.device != device:
            wide = torch.get_default_dtype() == torch.float64 and not group["fused"]
            dtype = torch.float64 if wide else torch.float32
            key = members.start, dtype, device
            if key not in self._counters:
                self._counters[key] = torch.zeros(len(members), dtype=dtype, device=device)
            made = float(entry.get("step", 0.0))  # may wait for the device, once
            mine = entry["step"] = self._counters[key][i - members.start].fill_(made)
            self._made[i] = mine, made
        return made


@dataclass
class FusedUpdate:
    """One replica's step and averaging with the gradients and learning rates of when it was prepared.

    Attributes:
        steps: The calls, with their options and gradients.
        still: What makes no step, by device.
        scaling: A GradScaler's tensors.
    """

    replica: Replica
    steps: list[tuple[Call, dict[str, Any], list[torch.Tensor]]]
    still: list[list[Row]]
    scaling: dict[str, torch.Tensor | None]

    def __call__(self, z: FlatBuffers) -> list[torch.Tensor]:
        """Step and average; returns the operators' counts of what is not finite."""
        (alpha, staleness), shares = self.replica.elasticity.force, self.replica.elasticity.shares
        found_inf, counts = self.scaling["found_inf"], []
        for call, settings, grads in self.steps:
            call.count(1.0)
            x, z_, update, *states = call.columns
            moved = {
                k: None if v is None else v.to(x[0].device, non_blocking=True)
                for k, v in self.scaling.items()
            }
            options = settings | shares | moved | {"accumulate": False, "check_finite": True}
            operator: Any = avgpipe_ext.elastic_sgd_
            if call.counters:
                operator, options["step"] = avgpipe_ext.elastic_adamw_, call.counters[0]
            momenta: list[Any] = states or [None]
            counts.append(operator(x, grads, *momenta, z_, update, alpha, staleness, **options))
            if found_inf is not None and call.counters:
                call.count(-found_inf.to(call.counters[0]).reshape(()))
        for rows in self.still:
            x, z_, update = _columns(rows)
            if alpha == 0:
                torch._foreach_zero_(update)
                continue
            rule = {"from_force": shares["from_force"], "accumulate": False, "check_finite": True}
            counts.append(avgpipe_ext.easgd_step_(x, z_, update, alpha, **rule))
        return counts

    @property
    def may_wait(self) -> bool:
        """Done later, with those of the other replicas, it would give the same bits: 16 bits round less often then."""
        dtypes = {(row[0].dtype, row[1].dtype) for call, *_ in self.steps for row in call.rows}
        exact = {(torch.float32, torch.float32), (torch.float64, torch.float64)}
        return dtypes <= exact and all(value is None for value in self.scaling.values())

    def is_finite(self) -> bool:
        """Whether all weights that it steps are."""
        return all(bool(row[0].isfinite().all()) for call, *_ in self.steps for row in call.rows)


def step_together(updates: Sequence[FusedUpdate]) -> list[torch.Tensor] | None:
    """Do all steps, the move of z and all pulls of a round with staleness 0 in one pass.

    28 N + 8 bytes of memory traffic per parameter in float32 with Adam, where N steps, the sum and N pulls take
    52 N + 8. Returns the operators' counts of what is not finite; None, with nothing done, unless all replicas step
    the same places with the same settings.
    """
    plans = [[(c.regions, _round_options(c, options)) for c, options, _ in u.steps] for u in updates]
    if any(plan != plans[0] for plan in plans) or any(options is None for _, options in plans[0]):
        return None
    alpha, counts = updates[0].replica.elasticity.alpha, []
    for (_, options), *steps in zip(plans[0], *(update.steps for update in updates)):
        for call, *_ in steps:
            call.count(1.0)
        columns = [call.columns for call, *_ in steps]
        xs, states = [x for column in columns for x in column[0]], zip(*(column[3:] for column in columns))
        kinds = [state for kind in states for replica in kind for state in replica]
        operator: Any = avgpipe_ext.elastic_round_
        gradients = [g for _, _, grads in steps for g in grads]
        counts.append(operator(xs, gradients, kinds, columns[0][1], alpha, check_finite=True, **options))
    for update in updates:
        for rows in update.still:
            x, z, _ = _columns(rows)
            avgpipe_ext.elastic_pull_(x, z, alpha)
    return counts


def _columns(rows: Sequence[Row]) -> list[list[torch.Tensor]]:
    return [list(column) for column in zip(*rows)]


def _round_options(call: Call, options: dict[str, Any]) -> dict[str, Any] | None:
    """What `elastic_round_` takes for the call's next step; None if only the device knows it."""
    if not call.counters:
        return {"optimizer": "sgd", **options}
    if call.counters[0].device.type != "cpu":
        return None
    others = {name: value for name, value in options.items() if name != "decoupled"}
    step = float(call.counters[0]) + 1
    return {"optimizer": "adamw" if options["decoupled"] else "adam", "step": step, **others}


def _options(optimizer: type, group: Group, made: float) -> dict[str, Any]:
    common = {name: float(group[name]) for name in ("lr", "weight_decay")} | {"maximize": group["maximize"]}
    if optimizer is torch.optim.SGD:
        momentum = {"mu": float(group["momentum"]), "dampening": float(group["dampening"])}
        return common | momentum | {"nesterov": group["nesterov"], "first_step": made == 0}
    betas = {"beta1": float(group["betas"][0]), "beta2": float(group["betas"][1])}
    return common | betas | {"eps": float(group["eps"]), "decoupled": group["decoupled_weight_decay"]}


def _obstacle(inner: torch.optim.Optimizer, replica: Replica) -> str | None:
    """Why no step of ``inner`` can ever be fused."""
    period = replica.elasticity.period
    if type(inner) not in STATE:
        return f"{type(inner).__name__} is not one of torch.optim.SGD, Adam and AdamW"
    if replica.update is None:
        return "one replica without elasticity has nothing to average: the reference follows it"
    if period > 1:
        return f"the period is {period}, and only a step that is a whole round can be fused"
    return replica.not_flat


def _check_group(group: Group) -> None:
    for option in ("amsgrad", "differentiable"):
        if group.get(option):
            raise Unfusable(f"{option} is on")
    settings = {"lr": group["lr"], "weight_decay": group["weight_decay"]}
    settings |= dict(zip(("beta1", "beta2"), group.get("betas", ())))
    for name, value in settings.items():
        if isinstance(value, torch.Tensor) and value.device.type != "cpu":
            raise Unfusable(f"{name} is a tensor on {value.device}; reading it would synchronise")


def _region(p: torch.Tensor, flats: Sequence[torch.Tensor]) -> Region | None:
    """Where a parameter lies in flat buffers; None if it is no dense part of one, or has no elements."""
    if p.layout != torch.strided or p.numel() == 0 or p.stride() != dense_strides(p):
        return None
    for b, flat in enumerate(flats):
        start, odd = divmod(p.data_ptr() - flat.data_ptr(), flat.element_size())
        is_inside = 0 <= start <= flat.numel() - p.numel() and not odd
        if is_inside and (p.dtype, p.device) == (flat.dtype, flat.device):
            return Region(b, start, tuple(p.shape), p.stride())
    return None


def _same_objects(mine: Sequence[Any], theirs: Sequence[Any]) -> bool:
    return len(mine) == len(theirs) and all(map(is_, mine, theirs))


def _same_strides(g: torch.Tensor, p: torch.Tensor) -> bool:
    """Equal where they matter."""
    mine, theirs = g.stride(), p.stride()
    return mine == theirs or all(a == b for size, a, b in zip(p.shape, mine, theirs) if size != 1)
