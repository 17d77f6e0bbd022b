"""Elastic averaging: the reference model z, the optimizer that ties replicas to it, and flat memory for weights."""

from avgpipe.elastic.correction import CorrectedSteps, WeightPrediction
from avgpipe.elastic.ema import MovingAverage
from avgpipe.elastic.flat import Arena, Layout
from avgpipe.elastic.optimizer import ElasticAveraging
from avgpipe.elastic.reference import Reference
from avgpipe.elastic.subclasses import copied, is_made_of_others, local_part
from avgpipe.elastic.versions import Version, Versions, refuse_hidden_weights

__all__ = [
    "Arena",
    "CorrectedSteps",
    "ElasticAveraging",
    "Layout",
    "MovingAverage",
    "Reference",
    "Version",
    "Versions",
    "WeightPrediction",
    "copied",
    "is_made_of_others",
    "local_part",
    "refuse_hidden_weights",
]
