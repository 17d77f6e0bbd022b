"""The model as a chain of layers, found by tracing or by its blocks, cut into stages, and checked."""
