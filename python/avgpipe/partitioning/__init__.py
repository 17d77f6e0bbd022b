"""What lives where: the cut of a chain of layers into stages. Pure data, imports no torch."""

from avgpipe.partitioning.balance import balance
from avgpipe.partitioning.methods import partition, partition_methods
from avgpipe.partitioning.network import Level
from avgpipe.partitioning.result import Partition

__all__ = ["Level", "Partition", "balance", "partition", "partition_methods"]
