"""Runs with injected faults: drawing of faults, the job, a run under one of the launchers, and the verdict."""
