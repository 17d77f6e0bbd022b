"""A model cut between the blocks that its own forward calls: every piece is the model itself, with parts left out."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from functools import partial
from itertools import pairwise
from typing import Any

import torch
from torch import nn

from avgpipe.errors import reason
from avgpipe.model.blocks import Anatomy, Call
from avgpipe.model.context import in_mode
from avgpipe.model.dissect import anatomy_of
from avgpipe.model.outline import Exchange, OwnBlock, Reached
from avgpipe.model.parts import PartLayer, Values, Whole
from avgpipe.model.proof import difference
from avgpipe.model.shell import shell_of

_ELSEWHERE = (
    "cut it elsewhere, with Plan(partition=...), or pass a list of layers, with Source(names_of=model)"
)
_INPUTS = "inputs"  # name of the inputs, which every piece passes on in addition to values of blocks


class Piece(PartLayer):
    """Consecutive units of a model; see ``avgpipe.model.blocks``.

    The first takes the model's input, a tensor or a dict of arguments, and the last returns the model's
    output. Between them pass the values of blocks and, in a dict, the inputs; inputs whose values no later
    unit uses are passed as dtype and sizes.

    Attributes:
        calls: Name of the piece's first module.
        values: Its input and output values, by name.
    """

    def __init__(self, anatomy: Anatomy, begin: int, end: int) -> None:
        super().__init__()
        self._exchange = Exchange(anatomy.writes)
        self.shell = shell_of(anatomy, begin, end, self._exchange)
        self._call = replace(anatomy.call, trials=())
        self._is_first, self._is_last = begin == 0, end == anatomy.units
        self._takes, self._gives = anatomy.alive(begin), anatomy.alive(end)
        uses = anatomy.used(begin, end) & set(self._takes)
        self.values = Values((*self._takes, _INPUTS), (*self._gives, _INPUTS), frozenset(uses | {_INPUTS}))
        tried = frozenset(anatomy.call.trials[0])
        # For inputs that were not tried, each unit may need the values.
        self._made = tried.difference(*anatomy.looks_at[begin:])
        self._reduced = tried.difference(*anatomy.looks_at[end:])
        self._next = anatomy.blocks[min(end, len(anatomy.blocks)) - 1]
        own = anatomy.blocks[begin - 1] if 0 < begin <= len(anatomy.blocks) else None
        names = {id(m): name for name, m in anatomy.model.named_modules()}
        held = (names[id(m)] for m in self.shell.modules() if m._parameters and id(m) in names)
        self.calls = own or next(held, "")

    def compiled_parts(self) -> list[nn.Module]:
        """Return the parts for torch.compile: the blocks, without the model's code around them."""
        return [module.block for module in self.modules() if isinstance(module, OwnBlock)]

    def forward(self, value: Any) -> Any:
        exchange = self._exchange
        if self._is_first:
            arrived, inputs = {}, self._call.arguments(value)
        else:
            *values, inputs = value
            arrived = dict(zip(self._takes, values))
        exchange.arrived, exchange.taken = arrived, {}
        device = next((t.device for t in arrived.values() if t is not None), None)
        there: dict[str, torch.Tensor] = {}
        try:
            arguments = {name: self._filled(name, given, device) for name, given in inputs.items()}
            returned = self.shell(**arguments, **self._call.fixed)
            if self._is_last:
                return self._call.output(returned)
        except Reached:
            # Of repeated arguments of a block, some may be made up by outlines.
            there = exchange.taken | arrived
        finally:
            exchange.arrived, exchange.taken = {}, {}
        try:
            values = [there[value] for value in self._gives]
        except KeyError:
            raise RuntimeError(
                f"the model's forward has not called the block {self._next}, at which a stage ends: it must call all "
                "its blocks, one after another"
            ) from None
        return (*values, {name: self._passed(name, given) for name, given in inputs.items()})

    def _filled(self, name: str, given: Any, device: torch.device | None) -> Any:
        """Return an input as the forward takes it: made up if only dtype and sizes have arrived."""
        if name not in self._made or not isinstance(given, tuple):
            return given
        dtype, *sizes = given
        return torch.full(
            (), self._call.fill.get(name, 0), dtype=getattr(torch, dtype), device=device
        ).expand(sizes)

    def _passed(self, name: str, given: Any) -> Any:
        """Return an input as later units need it."""
        if name not in self._reduced or not isinstance(given, torch.Tensor):
            return given
        return (str(given.dtype)[6:], *given.shape)


class BlockChain(Whole):
    """The chain of a model's units, each as a piece.

    Args:
        sample: The model that is run to find its anatomy; cuts are checked on it.
        call: How it is called.
        model: The whole model, with the same classes and names as the sample; pieces share its modules; by
            default the sample itself.

    Raises:
        ValueError: The model's forward is no chain of blocks.
    """

    def __init__(self, sample: nn.Module, call: Call, model: nn.Module | None = None) -> None:
        self._sample = anatomy_of(sample, call)
        self._anatomy = self._sample if model is None else replace(self._sample, model=model)
        self.model, self.trial = self._anatomy.model, dict(call.trials[0])
        super().__init__(Piece(self._anatomy, unit, unit + 1) for unit in range(self._anatomy.units))

    def called(self, model: nn.Module, value: Any) -> Any:
        """Return the output of a copy of the whole model for a batch's inputs, in the form of the last piece's."""
        call = self._anatomy.call
        return call.output(model(**call.arguments(value), **call.fixed))

    def stage(self, begin: int, end: int) -> list[nn.Module]:
        """Return one piece that runs the layers from ``begin`` on, before ``end``."""
        return [Piece(self._anatomy, begin, end)]

    def prove(self, bounds: Sequence[int]) -> None:
        """Refuse, with ValueError, a cut whose stages compute anything else than the whole model.

        Outputs and gradients are compared, in evaluation mode, on all of the trials.
        """
        model = self._sample.model
        pieces = [Piece(self._sample, begin, end) for begin, end in pairwise(bounds)]
        where = f"when it is cut at {', '.join(piece.calls for piece in pieces[1:])}"
        with in_mode(model, False):
            for inputs in self._sample.call.trials:
                stages = partial(_run, pieces, dict(inputs))
                try:
                    found = difference(model, partial(self.called, model, inputs), stages)
                except Exception as error:
                    raise ValueError(
                        f"{type(model).__name__} does not run {where}: {reason(error)}; {_ELSEWHERE}"
                    ) from error
                if found is not None:
                    raise ValueError(f"{type(model).__name__} is not the same {where}: {found}; {_ELSEWHERE}")


def _run(pieces: Sequence[Piece], value: Any) -> Any:
    for piece in pieces:
        value = piece.eval()(value)
    return value
