"""Elastic averaging: the reference model z, and the optimizer wrapper that ties replicas to it."""

from avgpipe.averaging.optimizer import ElasticAveraging
from avgpipe.averaging.reference import Reference

__all__ = ["ElasticAveraging", "Reference"]
