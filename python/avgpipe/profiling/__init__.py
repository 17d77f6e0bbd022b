"""What each layer of a model costs."""

from avgpipe.profiling.profile import LayerCosts, LayerProfile, LinkProfile, Profile, Skip, Tie

__all__ = ["LayerCosts", "LayerProfile", "LinkProfile", "Profile", "Skip", "Tie"]
