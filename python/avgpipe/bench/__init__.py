"""Microbenchmarks: each question beside its baselines and the machine's own limit, measured in one run.

A benchmark is a list of `Section` values; `timing` measures their variants in turn, `result` makes rows of the
samples, `table` and `picture` show them.
"""
