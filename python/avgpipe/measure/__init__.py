"""Costs of a model on this machine, and the best plan: profiles, forecasts, trials, the search over plans."""
