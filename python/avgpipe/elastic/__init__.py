"""Elastic averaging: the reference model z, the optimizer that ties replicas to it, and flat memory for weights."""

from avgpipe.elastic.flat import Arena, Layout
from avgpipe.elastic.optimizer import ElasticAveraging
from avgpipe.elastic.reference import Reference
from avgpipe.elastic.versions import Versions, refuse_hidden_weights

__all__ = ["Arena", "ElasticAveraging", "Layout", "Reference", "Versions", "refuse_hidden_weights"]
