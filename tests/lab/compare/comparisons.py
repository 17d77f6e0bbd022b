"""Hand-made comparisons."""

from dataclasses import replace

from avgpipe_lab.compare.comparison import OK, Comparison, Figures, SystemResult

PLAIN = Figures(
    stages=2,
    pipelines=1,
    micro_batches=4,
    replicas=1,
    schedule="1f1b",
    batch_size=16,
    seed=0,
    epochs=2.0,
    batches=50,
    samples=800,
    train_seconds=80.0,
    samples_to_target=None,
    seconds_to_target=None,
    peak_memory_bytes=400 * 2**20,
    busy_fraction=0.5,
    metric=120.0,
    best_metric=110.0,
)


def at(samples_per_s, **changes):
    """The same work at another speed."""
    return replace(PLAIN, train_seconds=PLAIN.samples / samples_per_s, **changes)


def reaching(seconds, **changes):
    found = {"seconds_to_target": seconds, "samples_to_target": PLAIN.samples, "train_seconds": seconds}
    return replace(PLAIN, **{**found, **changes})


REPLICAS = {"stages": 1, "replicas": 2}


def compared(*outcomes, **systems):
    """Of ``outcomes``, then of ``systems`` by name, "_" for "-"."""
    names = ("target", "trivial", "metric_name", "lower_is_better", "memory_limit_bytes")
    options = {"metric_name": "perplexity", **{n: systems.pop(n) for n in names if n in systems}}
    more = (SystemResult(name.replace("_", "-"), OK, figures) for name, figures in systems.items())
    return Comparison("awd-lstm tiny", 2, (*outcomes, *more), **options)
