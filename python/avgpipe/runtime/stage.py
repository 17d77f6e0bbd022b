"""The layers of one stage, run under keyed random generators."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

from avgpipe.errors import StageError
from avgpipe.links.message import tensors_of
from avgpipe.runtime.batch_norm import defer_batch_norms
from avgpipe.runtime.compiled import Compiler, compiler_error, reason_of
from avgpipe.runtime.context import Carry, Position, set_position
from avgpipe.runtime.inputs import Inputs
from avgpipe.runtime.rng import mix, mix_more, seed_generators


class Stage(nn.Module):
    """Layers ``first``, ``first + 1``, ... of the model; each receives what the one before returned.

    The layers are copied, and compiled by ``compiler``. ``statistics``: what their BatchNorms have seen of the batch
    in hand, to be committed when it is done.
    """

    def __init__(
        self,
        layers: Sequence[nn.Module],
        first: int,
        index: int,
        seed: int,
        device: torch.device,
        compiler: Compiler | None = None,
    ):
        super().__init__()
        self.layers = (compiler or Compiler()).copied(layers).to(device)
        self.statistics = defer_batch_norms(self.layers)
        self.first, self.index, self.seed, self.device = first, index, seed, device
        self.inputs = Inputs(index)
        self._chain = list(enumerate(self.layers, first))  # quicker to walk than a ModuleList

    def forward(self, value: Any, place: Position, again: bool = False) -> Any:
        """``again``: the same value comes for another forward."""
        before = set_position(place)
        try:
            return self.inputs.run(self._run, value, place, self.training, again)
        finally:
            if self.statistics.layers:
                self.statistics.end_forward()
            set_position(before)

    def _run(self, value: Any, place: Position) -> Any:
        if self.statistics.layers:
            self.statistics.begin_forward()
        training = self.training
        key = mix(self.seed, *place) if training else 0
        for number, layer in self._chain:
            if training:
                seed_generators(self.device, mix_more(key, number))
            value = self._call(number, layer, value)
        return value

    def recomputed(self, value: Any, place: Position) -> Any:
        """As a call, but keeps only ``value`` and runs the layers again in the backward."""
        # The generators are keyed, so the second forward draws what the first one drew without saving their state.
        return checkpoint(self, value, place, True, use_reentrant=False, preserve_rng_state=False)

    def _call(self, number: int, layer: nn.Module, value: Any) -> Any:
        try:
            return layer(value)
        except torch.OutOfMemoryError:
            raise
        except (RuntimeError, TypeError, ValueError, IndexError, AttributeError, compiler_error()) as error:
            got = ", ".join(f"{list(t.shape)} {str(t.dtype)[6:]}" for t in tensors_of(value)) or repr(value)
            source = f"; it came from stage {self.index - 1}" if number == self.first and self.index else ""
            raise StageError(
                f"stage {self.index}, layer {number} ({type(layer).__name__}) failed on its input "
                f"({got}{source}): {reason_of(error)}"
            ) from error

    def carries(self) -> list[Carry]:
        return [m for m in self.modules() if isinstance(m, Carry)]
