"""Comparisons of systems: their table, advice and pictures."""
