"""Checks that the state which an optimizer or a learning-rate schedule has loaded is one that it could have made.

A checkpoint's checksums say that it is what was written, not that a run wrote it. Loaded unseen, a state of other
shapes or settings fails at the first step, or trains something else. So an optimizer steps a parameter without memory:
once to see the state that it makes, and once from the loaded state, with the loaded settings. Torch's own optimizers
make every entry in their first step, so theirs must be the same; another's may change later, and must work.
"""

from __future__ import annotations

import math
import sys
from collections import OrderedDict, defaultdict
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from types import FunctionType
from typing import Any

import torch
from torch import nn

from avgpipe.checkpoint.content import readable, taken_apart
from avgpipe.errors import check_count, reason
from avgpipe.runtime.optimizers import members_of

_OF_STAGE = ("params", "param_names")
# Settings that say which kernels step on a device: the state is the same, and a checkpoint does not decide them.
KERNELS = ("fused", "foreach", "capturable", "differentiable")
_PLAIN = (type(None), bool, int, float, complex, str, bytes, type, FunctionType, torch.dtype, torch.device)
_State = Mapping[str, Any]


@contextmanager
def loading(optimizer: torch.optim.Optimizer) -> Iterator[None]:
    """Check, after the block has loaded it, the optimizer's state; ValueError for one that it could not have made."""
    members = members_of(getattr(optimizer, "inner", optimizer))
    before = [[dict(group) for group in one.param_groups] for one in members]
    yield
    for one, own in zip(members, before):
        _Fitting(one).check(own)


def with_own_kernels(
    optimizer: torch.optim.Optimizer, groups: Sequence[dict[str, Any]]
) -> list[dict[str, Any]]:
    """Return groups of a state with the optimizer's own choice of kernels, before it is loaded."""
    own = [{k: group[k] for k in KERNELS if k in group} for group in optimizer.param_groups]
    own += [{}] * (len(groups) - len(own))  # too many: loading says so
    return [group | mine for group, mine in zip(groups, own)]


class _Fitting:
    def __init__(self, optimizer: torch.optim.Optimizer) -> None:
        self._optimizer, self._name = optimizer, type(optimizer).__name__
        self._is_torchs = f"{type(optimizer).__module__}.".startswith("torch.optim.")
        self._known: dict[Any, tuple[_State, str]] = {}

    def check(self, own: list[dict[str, Any]]) -> None:
        """``own``: the groups before."""
        for n, (ours, group) in enumerate(zip(own, self._optimizer.param_groups)):
            self._check_settings(ours, group)
            for p in group["params"]:
                state = self._optimizer.state.get(p, {})
                if not isinstance(state, Mapping):
                    raise ValueError(f"{self._name} has a {type(state).__name__} instead of a state by name")
                # shards have states of their own classes
                if (state or p.requires_grad) and type(p) in (torch.Tensor, nn.Parameter):
                    made = self._first_step(n, p, ours, group)
                    if state:
                        self._check_state(n, p, group, state, *made)

    def _check_settings(self, ours: _State, theirs: _State) -> None:
        takes_numbers = theirs.get("foreach") and not theirs.get("capturable")  # such a step refuses tensors
        for name, value in ours.items():
            if name not in theirs and name in self._optimizer.defaults:
                raise ValueError(f"a group of {self._name} lacks {name}, which is like {value!r:.60}")
            if name not in theirs or name in (*_OF_STAGE, *KERNELS):
                continue
            is_new = isinstance(theirs[name], torch.Tensor) and not isinstance(value, torch.Tensor)
            if not _alike(readable(value), theirs[name]) or (is_new and takes_numbers):
                raise ValueError(
                    f"a group of {self._name} has {name} = {theirs[name]!r:.60} instead of a value like {value!r:.60}"
                )

    def _first_step(self, n: int, p: torch.Tensor, ours: _State, group: _State) -> tuple[_State, str]:
        """Return what the first step of a parameter makes, and why it failed, if it does with own settings too."""
        expected, failure = self._stepped(n, p, group, {})
        if failure and not self._stepped(-1 - n, p, ours, {})[1]:
            raise ValueError(f"{self._name} cannot step with these settings of a group: {failure}")
        return expected, failure

    def _check_state(
        self, n: int, p: torch.Tensor, group: _State, state: _State, expected: _State, failure: str
    ) -> None:
        where = f"the state of {self._name} for a parameter of shape {list(p.shape)}"
        if self._is_torchs and expected:
            lacking = [name for name in expected if name not in state]
            more = [name for name in state if name not in expected and state[name] is not None]
            if lacking or more:
                raise ValueError(f"{where} has {', '.join(map(str, state))} instead of {', '.join(expected)}")
        for name, value in state.items():
            if _repeats(value):
                raise ValueError(f"{where} has a {name!r} whose elements share memory")
            made = expected.get(name)
            is_fixed = self._is_torchs or not isinstance(made, torch.Tensor) or made.shape in (p.shape, ())
            if made is not None and is_fixed and not _fits(value, made):
                raise ValueError(f"{where} has {name!r} of {_outline(value)} instead of {_outline(made)}")
        if not failure:
            # what the optimizer keeps beside the parameter is without memory, as the parameter is
            on_device = {k: _to_meta(v) if _is_on_meta(expected.get(k)) else v for k, v in state.items()}
            failure = self._stepped(n, p, group, on_device)[1]
            if failure:
                raise ValueError(f"{where} cannot be stepped from: {failure}")

    def _stepped(self, n: int, p: torch.Tensor, group: _State, state: _State) -> tuple[_State, str]:
        """Return the state of a parameter without memory after a step, and why the step failed, if it did."""
        values = {name: _without_memory(value) for name, value in state.items()}
        shown = tuple((name, _scalar(v) if _is_scalar(v) else _outline(v)) for name, v in values.items())
        key = n, p.shape, p.stride(), p.dtype, shown
        if key not in self._known:
            self._known[key] = self._try(p, group, values)
        return self._known[key]

    def _try(self, p: torch.Tensor, group: _State, state: dict[str, Any]) -> tuple[_State, str]:
        own = {k: v for k, v in vars(self._optimizer).items() if k not in ("state", "param_groups", "step")}
        hooks = {
            k: OrderedDict[int, Any]() for k in own if k.startswith("_optimizer_")
        }  # of the caller: not for a try
        rest = {k: v for k, v in own.items() if k not in hooks}
        if not all(map(_is_plain, rest.values())):
            return (
                {},
                "its optimizer keeps more than plain values",
            )  # such as other optimizers, which would step
        mine = nn.Parameter(torch.empty_strided(p.shape, p.stride(), dtype=p.dtype, device="meta"))
        mine.grad = torch.empty_like(mine)
        settings = {k: _without_memory(v) for k, v in group.items() if k not in _OF_STAGE}
        settings |= dict.fromkeys((k for k in KERNELS if k in settings), False)
        made: Any = object.__new__(type(self._optimizer))
        vars(made).update({k: v.copy() if isinstance(v, dict | list) else v for k, v in rest.items()})
        vars(made).update(hooks, state=defaultdict(dict))
        made.param_groups = [{**settings, "params": [mine]}]
        if state:
            made.state[mine] = state
        step: Callable[[Any], Any] = type(made).step
        if getattr(step, "hooked", None):  # by torch's class, for hooks that all optimizers have
            step = step.__wrapped__  # type: ignore[attr-defined]
        try:
            with _uncompiled():
                step(made)
        except Exception as error:
            return dict(made.state.get(mine, {})), f"{type(error).__name__}: {reason(error)}"
        return dict(made.state.get(mine, {})), ""


def _uncompiled() -> AbstractContextManager[Any]:
    """Let compiled functions run as they were written: a step without memory is no reason to compile one."""
    if "torch._dynamo" not in sys.modules:
        return nullcontext()
    return torch.compiler.set_stance("force_eager")  # type: ignore[no-any-return]


def check_schedule(ours: Mapping[str, Any], theirs: Any, schedule: object) -> None:
    """Refuse a schedule's state with values unlike its own, or with names that would hide its methods."""
    kind = type(schedule).__name__
    if not isinstance(theirs, Mapping):
        raise ValueError(f"the state of {kind} is a {type(theirs).__name__} instead of values by name")
    for name, value in theirs.items():
        if name in ours and not _alike(readable(ours[name]), value, finite=False):
            raise ValueError(
                f"the state of {kind} has {name} = {value!r:.60} instead of a value like {ours[name]!r:.60}"
            )
        if name not in ours and hasattr(type(schedule), str(name)):
            raise ValueError(f"the state of {kind} has {name!r}, which is no value of its state")


def check_counts(state: Mapping[str, Any], *names: str) -> None:
    """Refuse a state whose counts are no whole numbers of at least 0."""
    for name in names:
        check_count(name, state.get(name, 0), 0, 2**62)


def check_scale(state: Mapping[str, Any]) -> None:
    """Refuse the state of a loss scale that is no positive number."""
    check_counts({"growth_tracker": int(state["growth_tracker"])}, "growth_tracker")
    if not 0 < float(state["scale"]) < math.inf:
        raise ValueError(f"the loss scale is {state['scale']!r}: it must be a finite number above 0")


# ---- values ----------------------------------------------------------------------------------------------------------


def _is_scalar(value: Any) -> bool:
    if isinstance(value, torch.Tensor):
        is_one = type(value) in (torch.Tensor, nn.Parameter) and value.numel() == 1 and not value.is_meta
        return is_one and value.dtype != torch.bool
    return isinstance(value, int | float) and not isinstance(value, bool)


def _scalar(value: Any) -> Any:
    return value.item() if isinstance(value, torch.Tensor) else value


def _is_finite(value: Any) -> bool:
    found = _scalar(value)
    most = 2**63 if isinstance(found, int) else math.inf  # of what torch takes
    return isinstance(found, int | float) and abs(found) < most


def _alike(ours: Any, theirs: Any, finite: bool = True) -> bool:
    """Whether a setting may replace another: a number for a number, and anything plain for None."""
    if _is_scalar(ours):
        return _is_scalar(theirs) and (not finite or _is_finite(theirs))
    if isinstance(ours, bool):
        return isinstance(theirs, bool)
    if ours is None:
        return theirs is None or isinstance(theirs, bool | str) or (_is_scalar(theirs) and _is_finite(theirs))
    if isinstance(ours, list | tuple):
        # a schedule of another stage has as many entries as groups are there
        same = isinstance(theirs, list | tuple) and (len(ours) == len(theirs) or not finite)
        return same and all(_alike(a, b, finite) for a, b in zip(ours, theirs))
    return isinstance(theirs, Mapping) if isinstance(ours, Mapping) else isinstance(theirs, type(ours))


def _fits(value: Any, made: Any) -> bool:
    """Whether an entry of a state is like the one that was made."""
    is_single = _is_scalar(made) or (isinstance(made, torch.Tensor) and made.numel() == 1)
    if isinstance(value, torch.Tensor) and isinstance(made, torch.Tensor) and is_single:
        is_single = value.is_floating_point() == made.is_floating_point()
    return _is_scalar(value) and _is_finite(value) if is_single else _outline(value) == _outline(made)


def _outline(value: Any) -> str:
    """Return what is alike in entries of states that may replace each other."""
    if isinstance(value, torch.Tensor) and type(value) not in (torch.Tensor, nn.Parameter):
        return _outline(taken_apart(value))
    if isinstance(value, torch.Tensor):
        layout = "" if value.layout == torch.strided else f", {value.layout}"
        return f"{value.dtype}{layout} of shape {list(value.shape)}"
    if isinstance(value, Mapping):
        return f"{{{', '.join(f'{name}: {_outline(part)}' for name, part in value.items())}}}"
    return f"{value!r:.60}" if isinstance(value, str | None) else type(value).__name__


def _repeats(value: Any) -> bool:
    if type(value) not in (torch.Tensor, nn.Parameter) or value.layout != torch.strided:
        return False
    return any(size > 1 and stride == 0 for size, stride in zip(value.shape, value.stride()))


def _without_memory(value: Any) -> Any:
    """Return a copy without memory of a tensor; a scalar, which steps read, is copied to the host."""
    if not isinstance(value, torch.Tensor):
        return value
    return value.detach().cpu().clone() if _is_scalar(value) else _to_meta(value)


def _to_meta(value: Any) -> Any:
    return value.detach().to("meta") if isinstance(value, torch.Tensor) else value


def _is_on_meta(value: Any) -> bool:
    return isinstance(value, torch.Tensor) and value.is_meta


def _is_plain(value: Any) -> bool:
    if isinstance(value, Mapping):
        return all(map(_is_plain, value.values()))
    if isinstance(value, list | tuple | set):
        return all(map(_is_plain, value))
    return isinstance(value, _PLAIN) or (isinstance(value, torch.Tensor) and value.numel() == 1)
