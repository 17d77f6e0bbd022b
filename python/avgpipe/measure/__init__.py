"""What a model costs on this machine, and which plan is best: profiles, forecasts, trials, the search over plans."""
