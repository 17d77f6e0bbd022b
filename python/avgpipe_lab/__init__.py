"""avgpipe's laboratory: what compares and reproduces, beside the library.

The models of the papers with their data, ``avgpipe.compare``, the planners of papers, benchmarks, and pages about runs.
The library does not import it: it finds commands, workloads and partitioners by entry points, see ``avgpipe.plugins``.
"""
