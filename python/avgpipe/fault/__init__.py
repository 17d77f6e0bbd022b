"""Pipelines and ranks that are lost, replaced, or join: what a run does that must go on. Loaded when asked for."""
