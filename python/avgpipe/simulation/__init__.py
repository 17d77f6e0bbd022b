"""When a schedule would finish, and in how much memory. Pure data; imports no torch."""

from avgpipe.simulation.advance import AdvanceChoice, choose_advance
from avgpipe.simulation.bounds import Bounds, makespan_bounds
from avgpipe.simulation.costs import Costs
from avgpipe.simulation.prediction import Prediction, predict
from avgpipe.simulation.steady import steady_batch_s
from avgpipe.simulation.timeline import simulate

__all__ = [
    "AdvanceChoice",
    "Bounds",
    "Costs",
    "Prediction",
    "choose_advance",
    "makespan_bounds",
    "predict",
    "simulate",
    "steady_batch_s",
]
