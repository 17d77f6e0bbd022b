"""The position in a run of the code that executes now: keys of random numbers, and state that layers carry over.

The random numbers of a layer depend on (seed, pipeline, batch, micro-batch, layer) only. So dropout depends
neither on timing nor on the number of stages, recomputation repeats it, and a run can be replayed.

A recurrent layer whose hidden state continues from one batch to the next keeps it in a :class:`Carry`, which
holds one value per micro-batch and stays correct under recomputation. Other layers do not need this module.
"""

from __future__ import annotations

import inspect
import logging
import random
import sys
from collections.abc import Callable, Iterable, Iterator
from contextlib import AbstractContextManager, ExitStack, contextmanager
from typing import Any, NamedTuple, Protocol

import torch
from torch import nn
from torch.utils import _pytree as pytree

from avgpipe.device import generator_of, generators_of


class Position(NamedTuple):
    """The position of a forward or backward in a run."""

    pipeline: int = 0
    batch: int = -1  # -1: outside of any pipeline, where every call is a new batch
    micro_batch: int = 0


_here = Position()


def position() -> Position:
    """Return the position of the running computation."""
    return _here


def set_position(there: Position) -> Position:
    """Set the position and return the one before."""
    global _here
    before, _here = _here, there
    return before


class Carry(nn.Module):
    """A pytree of tensors that a layer carries from a batch to the next one of the same pipeline, per micro-batch.

    Not a part of ``state_dict()``. ``get`` returns the value of ``set`` in the *previous* batch, also when
    recomputation runs a forward a second time, or None at the beginning::

        hidden = self.carry.get()
        output, hidden = self.lstm(x, hidden)
        self.carry.set((hidden[0].detach(), hidden[1].detach()))
    """

    def __init__(self) -> None:
        super().__init__()
        self.values: dict[int, Any] = {}  # by micro-batch, the value of the newest batch
        self._newest: dict[int, int] = {}  # by micro-batch, that batch
        # By batch and micro-batch, the value before: a forward may run again after later batches have
        # written.
        self._read: dict[tuple[int, int], Any] = {}

    def get(self) -> Any:
        newest = self.values.get(_here.micro_batch)
        return self._read.get((_here.batch, _here.micro_batch), newest)

    def set(self, value: Any) -> None:
        _, batch, m = _here
        if (batch, m) in self._read:
            if self._newest[m] != batch:
                return  # this forward runs again, after later ones
        elif batch != -1 and torch.is_grad_enabled():
            self._read[batch, m] = self.values.get(m)
        self.values[m], self._newest[m] = value, batch

    def forget(self, batch: int) -> None:
        """Drop the state that only forwards of ``batch`` need, none of which will run again."""
        for place in [place for place in self._read if place[0] == batch]:
            del self._read[place]

    def drop_nonfinite(self) -> None:
        """Reset carried values with infinities or NaN, as their batch is skipped."""
        for m, value in list(self.values.items()):
            tensors = [x for x in pytree.tree_leaves(value) if isinstance(x, torch.Tensor)]
            if not all(bool(x.isfinite().all()) for x in tensors):
                del self.values[m]

    @contextmanager
    def unchanged(self) -> Iterator[None]:
        """Allow forwards inside, between batches: afterwards all is as before."""
        before = self.values, self._newest, self._read
        self.values, self._newest, self._read = dict(self.values), dict(self._newest), dict(self._read)
        try:
            yield
        finally:
            self.values, self._newest, self._read = before

    def hide_from_compiler(self) -> None:
        """Make torch.compile call ``get`` and ``set`` uncompiled: compiled, they would be for one batch only."""
        disable: Any = torch.compiler.disable  # torch leaves it untyped
        for name in ("get", "set"):
            setattr(self, name, disable(getattr(self, name)))

    def reset(self) -> None:
        self.values.clear()
        self._newest.clear()
        self._read.clear()

    def forward(self, *_: torch.Tensor) -> None:
        raise TypeError("a Carry is not called; use get() and set()")


_MASK = (1 << 64) - 1


def mix(*words: int) -> int:
    """Hash integers to 64 bits, by the finaliser of SplitMix64 (Steele, Lea and Flood 2014) over each word."""
    return mix_more(0, *words)


def mix_more(key: int, *words: int) -> int:
    """Hash further words after those that made ``key``."""
    for word in words:
        key = (key + word + 0x9E3779B97F4A7C15) & _MASK
        key = ((key ^ (key >> 30)) * 0xBF58476D1CE4E5B9) & _MASK
        key = ((key ^ (key >> 27)) * 0x94D049BB133111EB) & _MASK
        key ^= key >> 31
    return key


# Device that layers draw on, and the key of a stage's forward, if it trains.
_layers: tuple[torch.device, int] | None = None


def key_layers(device: torch.device, key: int | None) -> None:
    """Set the source of the running stage's random numbers, see :func:`begin_layer`. None: nothing to seed."""
    global _layers
    _layers = None if key is None else (device, key)


class LayersBegin(Protocol):
    """Is called instead of seeding the generators, while it is there; see :func:`watch_draws`."""

    def begin_layer(self, device: torch.device, key: int, number: int) -> None:
        """Make what layer ``number`` draws on ``device`` a function of its stage's ``key``."""


_draws: LayersBegin | None = None


def watch_draws(draws: LayersBegin | None) -> None:
    """Have ``draws`` called when layers begin; None: seed the generators again."""
    global _draws
    _draws = draws


def begin_layer(number: int) -> None:
    """Seed the generators for layer ``number``; for a module that runs several layers of the unsplit model."""
    if _layers is not None and _here.batch != -1:
        seed_layer(*_layers, number)


def seed_layer(device: torch.device, key: int, number: int) -> None:
    """Seed the generators for layer ``number`` of a stage whose forward has this key."""
    if _draws is None:
        seed_generators(device, mix_more(key, number))
    else:
        _draws.begin_layer(device, key, number)


def seed_generators(device: torch.device, key: int) -> None:
    """Seed the default generators that a layer on ``device`` draws from."""
    torch.default_generator.manual_seed(key)
    if device.type != "cpu":
        generator_of(device).manual_seed(key)


class _PutAside(AbstractContextManager[Any]):
    """Sets some state of the caller aside inside the ``with`` block."""

    def given_back(self) -> GivenBack:
        """Run the caller's own code inside this block with the state that was set aside."""
        return GivenBack(self)


class GivenBack(AbstractContextManager[None]):
    """Restores inside the ``with`` block the state that was set aside: the caller's own code runs there."""

    def __init__(self, *aside: _PutAside) -> None:
        self._aside = aside

    def __enter__(self) -> None:
        for aside in self._aside:
            aside.__exit__(None, None, None)

    def __exit__(self, *_: object) -> None:
        for aside in reversed(self._aside):
            aside.__enter__()


class CallerGenerators(_PutAside):
    """Sets the states of the caller's generators aside, while layers seed the default ones."""

    def __init__(self, device: torch.device) -> None:
        self._generators = generators_of(device)

    def __enter__(self) -> CallerGenerators:
        self._states = [generator.get_state() for generator in self._generators]
        return self

    def __exit__(self, *_: object) -> None:
        for generator, state in zip(self._generators, self._states):
            generator.set_state(state)


_END = object()


class CallerModes(_PutAside):
    """Sets the caller's ``no_grad`` and ``inference_mode`` aside, which would prevent training.

    A generator that yields inside such a mode leaves it on for its caller, as a loader with a teacher model
    does. A mode that the caller's code leaves on in :meth:`given_back` is on again after the ``with`` block,
    and off inside it.
    """

    def __init__(self) -> None:
        self._ours: ExitStack | None = None

    def __enter__(self) -> CallerModes:
        self._ours = None
        # Each may be on without the other: enable_grad() inside of inference_mode() leaves inference mode on.
        if torch.is_inference_mode_enabled() or not torch.is_grad_enabled():
            self._ours = ExitStack()
            self._ours.enter_context(torch.inference_mode(False))
            self._ours.enter_context(torch.enable_grad())
        return self

    def __exit__(self, *_: object) -> None:
        if self._ours is not None:
            self._ours.close()

    def made_outside(self, values: Iterator[Any]) -> Iterator[Any]:
        """Yield values made by the caller's own code, in the caller's modes."""
        while True:
            with self.given_back():
                found = next(values, _END)
            if found is _END:
                return
            yield found


# ---- generators that a forward may use -------------------------------------------------------------------------------


def callers_generators() -> dict[str, Any]:
    """Return the states of Python's and NumPy's generators, by name."""
    states: dict[str, Any] = {"random": random.getstate()}
    if numpy := sys.modules.get("numpy"):
        states["numpy.random"] = numpy.random.get_state()
    return states


def generators(*devices: torch.device) -> dict[str, Any]:
    """Return the states of all generators that a forward on the host, and ``devices``, may use, by name."""
    torchs = {str(d): generator_of(d).get_state() for d in devices if d.type != "cpu"}
    return {**callers_generators(), "torch": torch.default_generator.get_state(), **torchs}


def set_generators(states: dict[str, Any]) -> None:
    """Restore states, of all or of some."""
    put: dict[str, Callable[[Any], Any]] = {
        "random": random.setstate,
        "torch": torch.default_generator.set_state,
    }
    if numpy := sys.modules.get("numpy"):
        put["numpy.random"] = numpy.random.set_state
    for name, state in states.items():
        (put.get(name) or generator_of(torch.device(name)).set_state)(state)


def moved(before: dict[str, Any], after: dict[str, Any]) -> list[str]:
    """Return the generators that were used between two states."""
    same: dict[str, Callable[[Any, Any], bool]] = {
        "random": lambda a, b: bool(a == b),
        "numpy.random": lambda a, b: bool(a[2:] == b[2:] and (a[1] == b[1]).all()),
    }
    return [name for name in before if not same.get(name, torch.equal)(before[name], after[name])]


# ---- modes -----------------------------------------------------------------------------------------------------------


def is_evaluated(modules: Iterable[Any]) -> bool:
    """Return whether all modules are in evaluation mode, as in a loaded model: then the mode is not deliberate."""
    of_all = (m for whole in modules if isinstance(whole, nn.Module) for m in whole.modules())
    return not any(module.training for module in of_all)


def evaluated_in(layers: Iterable[nn.Module]) -> list[str]:
    """Name the modules of a chain that are in evaluation mode."""
    return [
        f"layer {n}, {name}" if name else f"layer {n}"
        for n, layer in enumerate(layers)
        for name, module in layer.named_modules()
        if not module.training
    ]


def tells_modes_apart(modules: Iterable[nn.Module]) -> bool:
    """Return whether some layer behaves differently in training and in evaluation."""
    kinds = (nn.modules.batchnorm._NormBase, nn.modules.dropout._DropoutNd)
    of_all = [m for whole in modules for m in whole.modules()]
    own = [m for m in of_all if type(m).__module__.split(".")[0] not in ("torch", "transformers", "avgpipe")]
    return any(isinstance(m, kinds) and getattr(m, "p", 1) > 0 for m in of_all) or any(map(reads_mode, own))


class Modes:
    """Sets a module to training or evaluation, except for modules that are in evaluation mode now, on purpose.

    ``keeps``: False if no module is to stay in evaluation mode.
    """

    def __init__(self, module: nn.Module, keeps: bool = True) -> None:
        self._module = module
        self._kept = [m for m in module.modules() if keeps and not m.training]

    def train(self, training: bool = True) -> None:
        self._module.train(training)
        for module in self._kept:
            module.training = False

    @contextmanager
    def evaluating(self) -> Iterator[None]:
        """Evaluate inside of the ``with`` block, and restore the caller's modes after it."""
        self.train(False)
        try:
            yield
        finally:
            self.train()


@contextmanager
def in_mode(model: nn.Module, training: bool) -> Iterator[None]:
    """Set a model and all its modules to training or evaluation inside of the ``with`` block; see :class:`Modes`."""
    before = [(module, module.training) for module in model.modules()]
    keeps = training and not is_evaluated([model])
    for module, was in before:
        module.training = training and (was or not keeps)
    try:
        yield
    finally:
        for module, was in before:
            module.training = was


@contextmanager
def without_logs() -> Iterator[None]:
    """Silence all loggers inside: torch logs what fails, and here some things are tried."""
    before = logging.root.manager.disable
    logging.disable()
    try:
        yield
    finally:
        logging.disable(before)


_HOOKS = "_forward_hooks", "_forward_pre_hooks", "_backward_hooks", "_backward_pre_hooks"


def has_hooks(module: nn.Module) -> bool:
    """Return whether a hook is registered on this module itself."""
    return any(vars(module)[of] for of in _HOOKS)


def reads_mode(module: nn.Module) -> bool:
    """Return whether a module's own forward reads ``self.training``, as far as its code shows."""
    code = getattr(inspect.unwrap(module.forward), "__code__", None)
    return code is not None and "training" in code.co_names
