"""All slips, from the files that have them."""

from __future__ import annotations

from benchmarks.slips import (
    in_data,
    in_forward,
    in_loader,
    in_loop,
    in_loss,
    in_modules,
    in_optimizer,
    in_torch,
    in_world,
)
from benchmarks.slips.slip import SLIPS

PLACES = {
    module.__name__.rpartition(".in_")[2]: module
    for module in (
        in_forward,
        in_modules,
        in_torch,
        in_world,
        in_data,
        in_loader,
        in_loss,
        in_optimizer,
        in_loop,
    )
}

__all__ = ["PLACES", "SLIPS"]
