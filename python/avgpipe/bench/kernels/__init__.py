"""``avgpipe bench kernels``: our operators, what one writes in torch instead, and the machine's limit.

Bytes are counted by what the update must move: each operand that is read and each that is written, once.
"""
