"""Which plan is best: forecasts by simulation, a search over plans, and trials."""
