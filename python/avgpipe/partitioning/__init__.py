"""What lives where: the cut of a chain of layers into stages. Pure data, imports no torch."""

from avgpipe.partitioning.balance import balance

__all__ = ["balance"]
