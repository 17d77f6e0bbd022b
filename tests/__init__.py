"""Tests of avgpipe.

They train on a few batches, all of which would lie within the rounds that a default plan waits for at the beginning, so
that nothing would test what comes after. Here a plan has none unless a test asks for it.
"""

from avgpipe import rules

rules.WARMUP_ROUNDS = 0
