"""Injected faults: their description and their effects; ``avgpipe.testing`` arms them."""
