"""How torch.optim.SGD, Adam and AdamW step, for the fused pass: settings, state, and the operator that does it."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol, TypeAlias

import torch

import avgpipe_ext
from avgpipe.elastic.places import Places, Unfusable
from avgpipe.elastic.states import Counters, Slots

Group: TypeAlias = dict[str, Any]


@dataclass
class Call:
    """The tensors of one call of an operator: of one group, with equal counters, in the dtype of one buffer.

    Each tensor of the lists is one parameter, or a run of several in flat memory.
    """

    group: int
    params: list[int] = field(default_factory=list)
    is_first: bool = False
    x: list[torch.Tensor] = field(default_factory=list)
    grad: list[torch.Tensor] = field(default_factory=list)
    states: list[list[torch.Tensor]] = field(default_factory=list)
    z: list[torch.Tensor] = field(default_factory=list)
    update: list[torch.Tensor] = field(default_factory=list)


class Steps(Protocol):
    """Of one optimizer. Parameters go by their number; ``members`` are those of a group.

    names: of the entries in each parameter's state; SGD without momentum has none.
    """

    names: tuple[str, ...]

    @property
    def revision(self) -> int:
        """Moves when a state tensor has been replaced by another one."""

    def adopt(self, group: Group, members: range, stepping: Sequence[int]) -> None:
        """Bring the state of the parameters that step to its places, zeros if there is none."""

    def keys(self, group: Group, members: range, stepping: Sequence[int]) -> list[Any]:
        """Of each parameter that steps; one call is for parameters of equal keys."""

    def slots(self, group: Group) -> Sequence[Slots]:
        """The state tensors in use."""

    def needs_to_know(self, group: Group) -> bool:
        """The host must know whether a GradScaler skips a step."""

    def options(self, group: Group) -> dict[str, Any]:
        """The group's settings, as the operator calls them."""

    def count(self, members: range, stepping: Sequence[int], by: float | torch.Tensor) -> None:
        """Count a step, or ``by`` -1 on the device one that was skipped after all."""

    def apply(self, call: Call, members: range, alpha: float, staleness: int, **options: Any) -> torch.Tensor:
        """The operator's count of what was not finite."""

    def round_options(self, call: Call, members: range, options: dict[str, Any]) -> dict[str, Any] | None:
        """What `elastic_round_` takes for the call's next step; None if only the device knows it."""


class SgdSteps:
    names: tuple[str, ...] = ("momentum_buffer",)

    def __init__(self, inner: torch.optim.Optimizer, places: Places) -> None:
        self._inner, self._places = inner, places
        self._momentum = Slots("momentum_buffer", places)
        # parameters without momentum, by the first of a group's members
        self._firsts: dict[int, list[int]] = {}

    @property
    def revision(self) -> int:
        return self._momentum.revision

    def adopt(self, group: Group, members: range, stepping: Sequence[int]) -> None:
        if not group["momentum"]:
            return
        tensors, params, state = self._momentum.tensors, self._places.params, self._inner.state
        firsts: list[int] = []
        self._firsts[members.start] = firsts
        for i in stepping:
            known = state[params[i]]
            value = known.get("momentum_buffer")
            if value is None:
                self._momentum.make(i)
                firsts.append(i)
            elif value is not tensors[i]:
                known["momentum_buffer"] = self._momentum.take(i, value)

    def keys(self, group: Group, members: range, stepping: Sequence[int]) -> list[Any]:
        """Whether this is the parameter's first step, in which momentum becomes the gradient."""
        firsts = set(self._firsts.get(members.start, ()))
        return [i in firsts for i in stepping]

    def slots(self, group: Group) -> Sequence[Slots]:
        return (self._momentum,) if group["momentum"] else ()

    def needs_to_know(self, group: Group) -> bool:
        return bool(group["momentum"] and group["dampening"])  # else a first step is as any on momentum 0

    def options(self, group: Group) -> dict[str, Any]:
        return {
            "lr": float(group["lr"]),
            "mu": float(group["momentum"]),
            "dampening": float(group["dampening"]),
            "weight_decay": float(group["weight_decay"]),
            "nesterov": group["nesterov"],
            "maximize": group["maximize"],
        }

    def count(self, members: range, stepping: Sequence[int], by: float | torch.Tensor) -> None:
        """SGD counts no further than to its first step."""
        for i in self._firsts.pop(members.start, ()):
            self._inner.state[self._places.params[i]]["momentum_buffer"] = self._momentum.of(i)

    def apply(self, call: Call, members: range, alpha: float, staleness: int, **options: Any) -> torch.Tensor:
        momentum = call.states[0] if call.states else None
        tensors = (call.x, call.grad, momentum, call.z, call.update)
        return avgpipe_ext.elastic_sgd_(*tensors, alpha, staleness, first_step=call.is_first, **options)

    def round_options(self, call: Call, members: range, options: dict[str, Any]) -> dict[str, Any] | None:
        return {"optimizer": "sgd", "first_step": call.is_first, **options}


class AdamSteps:
    names: tuple[str, ...] = ("step", "exp_avg", "exp_avg_sq")

    def __init__(self, inner: torch.optim.Optimizer, places: Places) -> None:
        self._inner, self._places = inner, places
        self._moments = (Slots("exp_avg", places), Slots("exp_avg_sq", places))
        self._counters: dict[int, Counters] = {}  # by the first of a group's members

    @property
    def revision(self) -> int:
        return sum(slots.revision for slots in self._moments)

    def adopt(self, group: Group, members: range, stepping: Sequence[int]) -> None:
        counters = self._counters_of(group, members)
        first, second = self._moments
        firsts, seconds, views, params = first.tensors, second.tensors, counters.views, self._places.params
        state, start = self._inner.state, members.start
        for i in stepping:
            known = state[params[i]]
            if not known:
                known["step"] = counters.put(i, 0.0)
                known["exp_avg"], known["exp_avg_sq"] = first.make(i), second.make(i)
                continue
            if known["exp_avg"] is not firsts[i]:
                known["exp_avg"] = first.take(i, known["exp_avg"])
            if known["exp_avg_sq"] is not seconds[i]:
                known["exp_avg_sq"] = second.take(i, known["exp_avg_sq"])
            if known["step"] is not views[i - start]:
                known["step"] = counters.put(i, known["step"])

    def keys(self, group: Group, members: range, stepping: Sequence[int]) -> list[Any]:
        """Equal for parameters that have made equally many steps."""
        return self._counters[members.start].ages(stepping)

    def slots(self, group: Group) -> Sequence[Slots]:
        return self._moments

    def needs_to_know(self, group: Group) -> bool:
        return not (group["fused"] or group["capturable"])  # the counters are on the host

    def options(self, group: Group) -> dict[str, Any]:
        return {
            "lr": float(group["lr"]),
            "beta1": float(group["betas"][0]),
            "beta2": float(group["betas"][1]),
            "eps": float(group["eps"]),
            "weight_decay": float(group["weight_decay"]),
            "decoupled": group["decoupled_weight_decay"],
            "maximize": group["maximize"],
        }

    def count(self, members: range, stepping: Sequence[int], by: float | torch.Tensor) -> None:
        self._counters[members.start].advance(stepping, by)

    def apply(self, call: Call, members: range, alpha: float, staleness: int, **options: Any) -> torch.Tensor:
        first, second = call.states
        tensors = (call.x, call.grad, first, second, call.z, call.update)
        step = self._counters[members.start].of(call.params[0])
        return avgpipe_ext.elastic_adamw_(*tensors, alpha, staleness, step=step, **options)

    def round_options(self, call: Call, members: range, options: dict[str, Any]) -> dict[str, Any] | None:
        made = self._counters[members.start].of(call.params[0])
        if made.device.type != "cpu":
            return None
        others = {name: value for name, value in options.items() if name != "decoupled"}
        return {"optimizer": "adamw" if options["decoupled"] else "adam", "step": made + 1, **others}

    def _counters_of(self, group: Group, members: range) -> Counters:
        """Of the dtype and on the device that torch would choose."""
        device = torch.device("cpu")
        if group["fused"] or group["capturable"]:
            devices = {self._places.params[i].device for i in members}
            if len(devices) > 1:
                raise Unfusable("a parameter group with fused or capturable is on several devices")
            device = devices.pop() if devices else device
        wide = torch.get_default_dtype() == torch.float64 and not group["fused"]
        kind = (torch.float64 if wide else torch.float32, device)
        mine = self._counters.get(members.start)
        if mine is None or mine.members != members or mine.kind != kind:
            mine = self._counters[members.start] = Counters(members, *kind)
        return mine
