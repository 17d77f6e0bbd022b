"""Elastic averaging: the reference model z, the optimizer that ties replicas to it, and flat memory for weights."""
