"""A replica's optimizer step fused with its part of a round.

A step of torch.optim.SGD, Adam or AdamW and the averaging rule can be one pass over memory. Weights, momenta, reference
and update of a replica lie in flat buffers of one layout, so a parameter's place in one of them is its place in all.
Gradients stay where autograd allocated them: an operator gets lists, of the parameters' gradients and of the
views at their places. A parameter without a gradient makes no step and only takes part in the averaging.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from itertools import accumulate
from operator import is_
from typing import Any, TypeAlias

import torch

import avgpipe_ext
from avgpipe.device import current_stream, on_accelerator, used_on
from avgpipe.elastic.flat import ALIGN_BYTES, FlatBuffers, Region
from avgpipe.elastic.replica import CHECKED, STATE, Group, Replica, region_of, same_strides, settings_of

Row: TypeAlias = tuple[torch.Tensor, ...]  # weights, reference, update; in a call also state


class Unfusable(Exception):
    """A step cannot be done in one pass with the averaging."""


class FusedCall:
    """One call of an operator, for parameters of one group and device that have made equally many steps.

    Attributes:
        group: The number of their group.
        made: Their number of steps, known on the host; for SGD 0, or 1 for any more.
        params: The parameters' numbers.
        regions: The parameters' places.
        columns: Their weights, places in reference and update, and states.
        counters: Adam's.
        is_exact: Whether weights and reference are both float32, or both float64.
    """

    def __init__(
        self, group: int, made: float, members: list[tuple[int, Region, Row, dict[str, Any]]]
    ) -> None:
        params, regions, rows, entries = zip(*members)
        self.group, self.made, self.params, self.regions = group, made, params, regions
        self.columns, self._entries = _columns(rows), entries
        dtypes = {(x.dtype, z.dtype) for x, z, *_ in rows}
        self.is_exact = dtypes <= {(torch.float32, torch.float32), (torch.float64, torch.float64)}
        self.counters = [entry["step"] for entry in entries if "step" in entry]
        whole = self.counters[0]._base if self.counters else None  # the counters of a group are one tensor
        self._added = [whole] if whole is not None and len(whole) == len(self.counters) else self.counters

    def count(self) -> None:
        """Count a step."""
        if self.counters:
            torch._foreach_add_(self._added, 1.0)
        elif self.made == 0:
            for entry, momentum in zip(self._entries, self.columns[-1]):
                entry["momentum_buffer"] = momentum
        self.made += 1.0

    def take_back(self, found_inf: torch.Tensor) -> None:
        """Count a step less if the device has skipped it."""
        if self.counters:
            found = found_inf.to(self.counters[0]).reshape(())
            torch._foreach_add_(self._added, found, alpha=-1)  # without alpha the host would read the number


class FusedStep:
    """Prepares the fused steps of one replica."""

    def __init__(self, inner: torch.optim.Optimizer, replica: Replica, z: FlatBuffers) -> None:
        self._inner, self._replica, self._z = inner, replica, z
        fits = type(inner) in STATE and replica.update is not None and not replica.not_flat
        self._is_possible = fits and replica.elasticity.period == 1  # a step must be a whole round
        self._params: list[torch.Tensor] = []
        self._places: Any = None  # the parameters' addresses when they were located
        self._known: list[Any] = []  # what the plan of calls was made for
        self._calls: list[FusedCall] = []
        self._state: dict[str, FlatBuffers] = {}
        # Whether steps are counted on the device, whatever the optimizer's groups ask for.
        self._counts_there = False
        if self._is_possible:  # now, as checking gaps may wait for a device
            with suppress(Unfusable):
                self._locate()

    @property
    def is_possible(self) -> bool:
        """Whether the next step can be fused, whatever its gradients."""
        inner = self._inner
        step = vars(inner).get("step")  # a learning-rate scheduler's wrapper only counts the call
        wraps_own = getattr(step, "__wrapped__", None) is type(inner).step
        is_own = step is None or (wraps_own and hasattr(step, "_wrapped_by_lr_sched"))
        if not self._is_possible or not is_own or inner._optimizer_step_post_hooks:
            return False
        for group in inner.param_groups:
            if group.get("amsgrad") or group.get("differentiable"):
                return False
            for setting in group.values():
                for value in setting if isinstance(setting, tuple) else (setting,):
                    if isinstance(value, torch.Tensor) and on_accelerator(value):
                        return False  # reading it would wait for the device
        return True

    def skips(self, found_inf: torch.Tensor | None) -> bool | None:
        """Whether a GradScaler skips the step; None if only the device knows, and the host need not."""
        if found_inf is None:
            return False
        if not on_accelerator(found_inf) or not self.may_skip_on_device:
            return bool(found_inf)
        self._counts_there = True
        return None

    @property
    def may_skip_on_device(self) -> bool:
        """Whether the host need not know if the next step is skipped."""
        groups = self._inner.param_groups
        if type(self._inner) is torch.optim.SGD:  # a first step equals one on momentum 0, unless dampened
            must_know = any(group["momentum"] and group["dampening"] for group in groups)
        else:  # counters on the device move alike if all parameters step
            must_know = any(p.grad is None for p in self._params)
        return not must_know and all(map(on_accelerator, self._z.flats))

    @torch.no_grad()
    def prepare(
        self, scale: torch.Tensor | None, found_inf: torch.Tensor | None, skips: bool | None
    ) -> FusedUpdate:
        """Prepare a step with the present gradients; raise Unfusable, with nothing stepped, if that fails.

        Args:
            scale: A GradScaler's.
            found_inf: A GradScaler's.
            skips: What :meth:`skips` returned.
        """
        self._replica.load()
        self._locate()
        grads = [None if skips else p.grad for p in self._params]
        for g, p, strides in zip(grads, self._params, self._strides):
            if g is None or (g.layout is torch.strided and g.dtype is p.dtype and g.stride() == strides):
                continue
            if g.layout != torch.strided or g.dtype != p.dtype or not same_strides(g, p):
                raise Unfusable
        seen = self._look(grads)
        if len(seen) != len(self._known) or not all(map(is_, seen, self._known)):
            self._plan(grads)
            self._known = self._look(grads)
        kind, groups = type(self._inner), self._inner.param_groups
        steps = [
            (
                c,
                settings_of(kind, groups[c.group], first=c.made == 0),
                [g for i in c.params if (g := grads[i]) is not None],
            )
            for c in self._calls
        ]
        scaling = {"grad_scale": scale, "found_inf": found_inf if skips is None else None}
        return FusedUpdate(self._replica, steps, self._still, scaling)

    def _look(self, grads: Sequence[torch.Tensor | None]) -> list[Any]:
        """Return all that the choice of calls depends on, beside the parameters' places."""
        groups, state = self._inner.param_groups, self._inner.state
        flags = [bool(group.get(name)) for group in groups for name in ("momentum", "fused", "capturable")]
        held = [value for entry in state.values() for value in entry.values()]
        return [*(g is None for g in grads), *flags, self._counts_there, *state.values(), *held]

    def _plan(self, grads: Sequence[torch.Tensor | None]) -> None:
        """Assign the parameters to calls of an operator."""
        for call in self._calls:
            self._made |= dict(zip(call.params, zip(call.counters, [call.made] * len(call.params))))
        calls: dict[Any, list[Any]] = {}
        still: dict[torch.device, list[Row]] = {}
        for g, (group, members) in enumerate(zip(self._inner.param_groups, self._members)):
            for i in members:
                p, region, row = self._params[i], self._regions[i], self._rows[i]
                if grads[i] is None:
                    still.setdefault(p.device, []).extend([row] if row else [])
                elif region is not None:
                    states, made, entry = self._adopt(group, members, i)
                    calls.setdefault((g, p.device, made), []).append((i, region, (*row, *states), entry))
                elif p.numel():
                    raise Unfusable
        self._calls = [FusedCall(g, made, members) for (g, _, made), members in calls.items()]
        self._still = [rows for rows in still.values() if rows]

    def _locate(self) -> None:
        """Find the parameters' places, unless they are known."""
        sizes = [len(group["params"]) for group in self._inner.param_groups]
        params = [p for group in self._inner.param_groups for p in group["params"]]
        places = sizes, list(map(id, params)), list(map(torch.Tensor.data_ptr, params))
        if places == self._places:
            return
        assert self._replica.update is not None, "z follows this replica"
        self._params, self._places, self._calls, self._known = params, None, [], []
        x, z, update = self._replica.x.flats, self._z.flats, self._replica.update.flats
        self._regions = [region_of(p, x) for p in params]
        try:
            self._check_coverage()
        except Unfusable:
            self._is_possible = False  # not checked again at every step
            raise
        self._rows: list[Row] = [
            (p, r.view(z), r.view(update)) if r else () for p, r in zip(params, self._regions)
        ]
        self._members = [range(end - size, end) for size, end in zip(sizes, accumulate(sizes))]
        # Adam's counters: one tensor for each group, and each parameter's with its value on the host
        self._counters: dict[Any, torch.Tensor] = {}
        self._made: dict[int, tuple[torch.Tensor, float]] = {}
        self._strides = [p.stride() for p in params]
        self._places = places

    def _check_coverage(self) -> None:
        """Raise Unfusable unless the parameters are all of x, except zeros from alignment, and do not overlap."""
        for b, flat in enumerate(self._replica.x.flats):
            places = sorted((r.offset, r.stop) for r in self._regions if r and r.buffer == b)
            edges = [0, *(edge for place in places for edge in place), flat.numel()]
            for start, stop in zip(edges[::2], edges[1::2]):
                is_long = (stop - start) * flat.element_size() >= ALIGN_BYTES
                gaps = flat[start:stop], self._z.flats[b][start:stop]
                if start > stop or is_long or any(map(torch.any, gaps)):
                    raise Unfusable

    def _adopt(
        self, group: Group, members: range, i: int
    ) -> tuple[list[torch.Tensor], float, dict[str, Any]]:
        """Return parameter i's state, moved to its place in flat memory, its number of steps, and its entry.

        For SGD the number is 0 or 1: in a first step, momentum becomes the gradient.
        """
        p, region, x = self._params[i], self._regions[i], self._replica.x
        is_sgd = type(self._inner) is torch.optim.SGD
        if region is None or (is_sgd and not group["momentum"]):
            return [], 1.0, {}
        entry, states, made = self._inner.state[p], [], 1.0
        for name in STATE[type(self._inner)]:
            if name not in self._state:
                self._state[name] = x.layout.zeros([flat.dtype for flat in x.flats])
            mine, value = region.view(self._state[name].flats), entry.get(name)
            if value is None:
                mine.zero_()
                made = 0.0
            elif not isinstance(value, torch.Tensor) or (value.shape, value.dtype) != (p.shape, p.dtype):
                raise Unfusable
            elif (value.data_ptr(), value.stride()) == (mine.data_ptr(), mine.stride()):
                mine = value  # in its place already
            else:
                mine.copy_(value)
                if on_accelerator(value):
                    # Loaded on the caller's stream, read on this one, and dropped below.
                    used_on(current_stream(value.device), [value])
            if value is not None or not is_sgd:
                entry[name] = mine
            states.append(mine)
        return states, made if is_sgd else self._steps_made(group, members, i, entry), entry

    def _steps_made(self, group: Group, members: range, i: int, entry: dict[str, Any]) -> float:
        """Return Adam's step counter as a number; create it, or move it, where torch would have it.

        From the first step on that only the device knows to be skipped, all are on the device.
        """
        on_device = group["fused"] or group["capturable"] or self._counts_there
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
    """One replica's step and averaging, with the gradients and learning rates at its preparation.

    Attributes:
        replica: The replica.
        steps: The calls, with their options and gradients.
        still: The parameters without a step, by device.
        scaling: A GradScaler's tensors.
    """

    replica: Replica
    steps: list[tuple[FusedCall, dict[str, Any], list[torch.Tensor]]]
    still: list[list[Row]]
    scaling: dict[str, torch.Tensor | None]

    def __call__(self, z: FlatBuffers) -> list[torch.Tensor]:
        """Step and average; return the operators' counts of nonfinite values."""
        elasticity, found_inf, counts = self.replica.elasticity, self.scaling["found_inf"], []
        for call, settings, grads in self.steps:
            call.count()
            x, z_, update, *states = call.columns
            options = settings | elasticity.shares | CHECKED
            for name, value in self.scaling.items():
                options[name] = None if value is None else value.to(x[0].device, non_blocking=True)
            operator: Any = avgpipe_ext.elastic_sgd_
            if call.counters:
                operator, options["step"] = avgpipe_ext.elastic_adamw_, call.counters[0]
            momenta: list[Any] = states or [None]
            counts.append(operator(x, grads, *momenta, z_, update, *elasticity.force, **options))
            if found_inf is not None:
                call.take_back(found_inf)
        for rows in self.still:
            x, z_, update = _columns(rows)
            if elasticity.force[0] == 0:
                torch._foreach_zero_(update)
            else:
                counts.append(self.replica.force(x, z_, update))
        return counts

    @property
    def may_wait(self) -> bool:
        """Whether a later step, joint with other replicas', gives the same bits; in 16 bits it rounds less."""
        exact = all(call.is_exact for call, *_ in self.steps)
        return exact and all(value is None for value in self.scaling.values())

    def is_finite(self) -> bool:
        """Whether all weights that it steps are finite."""
        return all(bool(x.isfinite().all()) for call, *_ in self.steps for x in call.columns[0])


def step_together(updates: Sequence[FusedUpdate]) -> list[torch.Tensor] | None:
    """Do all steps, the move of z and all pulls of a round with staleness 0 in one pass.

    28 N + 8 bytes of memory traffic per parameter in float32 with Adam, where N steps, the sum and N pulls take
    52 N + 8. Returns the operators' counts of nonfinite values; None, with nothing done, unless all replicas
    step the same places with the same settings.
    """
    plans = [[(c.regions, _round_options(c, options)) for c, options, _ in u.steps] for u in updates]
    if any(plan != plans[0] for plan in plans) or any(options is None for _, options in plans[0]):
        return None
    alpha, counts = updates[0].replica.elasticity.alpha, []
    for (_, options), *steps in zip(plans[0], *(update.steps for update in updates)):
        for call, *_ in steps:
            call.count()
        columns = [call.columns for call, *_ in steps]
        xs = [x for column in columns for x in column[0]]
        states = [
            state for kind in zip(*(column[3:] for column in columns)) for each in kind for state in each
        ]
        gradients = [g for _, _, grads in steps for g in grads]
        operator: Any = avgpipe_ext.elastic_round_
        counts.append(operator(xs, gradients, states, columns[0][1], alpha, check_finite=True, **options))
    for update in updates:
        for rows in update.still:
            x, z, _ = _columns(rows)
            avgpipe_ext.elastic_pull_(x, z, alpha)
    return counts


def _columns(rows: Sequence[Row]) -> list[list[torch.Tensor]]:
    return [list(column) for column in zip(*rows)]


def _round_options(call: FusedCall, options: dict[str, Any]) -> dict[str, Any] | None:
    """Return the options of `elastic_round_` for the call's next step; None if only the device knows them."""
    if not call.counters:
        return {"optimizer": "sgd", **options}
    if on_accelerator(call.counters[0]):
        return None
    others = {name: value for name, value in options.items() if name != "decoupled"}
    step = float(call.counters[0]) + 1
    return {"optimizer": "adamw" if options["decoupled"] else "adam", "step": step, **others}


# ---- steps that an optimizer leaves out by itself, as torch.amp.GradScaler asks it -----------------------------------


_FUSED = torch.optim.SGD, torch.optim.Adam, torch.optim.AdamW


def takes_found_inf(optimizer: torch.optim.Optimizer) -> bool:
    """Whether an optimizer of torch leaves a step out by itself, with all of its state as before."""
    if type(optimizer) not in _FUSED or not all(group["fused"] for group in optimizer.param_groups):
        return False
    # The first step of a momentum makes its memory, and would leave it without values.
    return not isinstance(optimizer, torch.optim.SGD) or all(
        not group["momentum"] or optimizer.state[p].get("momentum_buffer") is not None
        for group in optimizer.param_groups
        for p in group["params"]
    )


@contextmanager
def skipping(optimizer: Any, found_inf: torch.Tensor) -> Iterator[None]:
    """Have an optimizer leave out its step inside if ``found_inf``, float32 on its device, is 1."""
    optimizer.grad_scale, optimizer.found_inf = None, found_inf
    try:
        yield
    finally:
        del optimizer.grad_scale, optimizer.found_inf
