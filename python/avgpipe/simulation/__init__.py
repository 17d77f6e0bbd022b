"""When a schedule would finish, and in how much memory. Pure data; imports no torch."""

from avgpipe.simulation.advance import AdvanceChoice, choose_advance
from avgpipe.simulation.costs import Costs
from avgpipe.simulation.steady import steady_batch_s
from avgpipe.simulation.timeline import simulate

__all__ = ["AdvanceChoice", "Costs", "choose_advance", "simulate", "steady_batch_s"]
