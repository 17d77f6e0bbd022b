"""Where the weights of a replica live: flat arenas (and, for systems without a flush, their versions)."""

from avgpipe.weights.arena import Arena
from avgpipe.weights.layout import Buffers, Layout
from avgpipe.weights.versions import Versions

__all__ = ["Arena", "Buffers", "Layout", "Versions"]
