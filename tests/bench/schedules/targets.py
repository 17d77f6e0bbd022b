"""What the workers of test_benchmark.py run."""

import os


def one_row_fails(settings, without=()):
    """The benchmark's worker, but rank 1 fails at pipedream's second batch."""
    from avgpipe.bench.schedules import benchmark
    from avgpipe.bench.schedules.our_rows import OurRow

    whole = OurRow.losses

    def losses(self, batches):
        for n, loss in enumerate(whole(self, batches)):
            if self.name == "avgpipe pipedream" and n == 1 and os.environ["RANK"] == "1":
                raise ValueError("rank 1 had enough")
            yield loss

    OurRow.losses = losses
    return benchmark.worker(settings, without)
