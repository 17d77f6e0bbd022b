"""Loss, replacement and joining of pipelines and ranks in a run. Loaded on request."""
