"""What lives where: the cut of a chain of layers into stages. Pure data, imports no torch."""

from avgpipe.partition.balance import balance

__all__ = ["balance"]
