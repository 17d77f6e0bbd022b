"""Runs into which faults are injected: what is drawn, the job, a run under one of the launchers, and the verdict."""
