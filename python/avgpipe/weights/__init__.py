"""Where the weights of a replica live: flat arenas (and, for systems without a flush, their versions)."""

from avgpipe.weights.arena import Arena, Layout

__all__ = ["Arena", "Layout"]
