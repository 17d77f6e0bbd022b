"""What a model is to a pipeline: a chain of layers, found by tracing or by its blocks, cut into stages, and proved."""
