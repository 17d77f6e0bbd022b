"""Costs, simulation and partitions of plans. Pure data; imports no torch."""

from avgpipe.planning.advance import AdvanceChoice, choose_advance
from avgpipe.planning.cluster import Level
from avgpipe.planning.costs import Costs
from avgpipe.planning.partition import Partition, partition, partition_methods
from avgpipe.planning.profile import LayerCosts, LayerProfile, LinkProfile, Profile, Skip, Tie
from avgpipe.planning.simulation import Prediction, predict, simulate, steady_batch_s

__all__ = [
    "AdvanceChoice",
    "Costs",
    "LayerCosts",
    "LayerProfile",
    "Level",
    "LinkProfile",
    "Partition",
    "Prediction",
    "Profile",
    "Skip",
    "Tie",
    "choose_advance",
    "partition",
    "partition_methods",
    "predict",
    "simulate",
    "steady_batch_s",
]
