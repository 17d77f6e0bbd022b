"""Elastic averaging: the reference model z, the optimizer wrapper that ties replicas to it, and where weights live."""

from avgpipe.elastic.arena import Arena
from avgpipe.elastic.layout import Buffers, Layout
from avgpipe.elastic.optimizer import ElasticAveraging
from avgpipe.elastic.reference import Reference
from avgpipe.elastic.versions import Versions

__all__ = ["Arena", "Buffers", "ElasticAveraging", "Layout", "Reference", "Versions"]
