"""``avgpipe bench schedules``: whole pipelines on an emulated cluster, beside torch's schedules and the bounds.

Every worker is a process whose stage computes nothing but takes its time, so that the runtime, the tensors and
the links are real and the machine needs no more cores than they do. `cluster` starts processes for any such
comparison.
"""
