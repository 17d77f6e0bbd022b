"""Question: do hosts of different speeds train as fast as the sum of their speeds?

    OMP_NUM_THREADS=1 python -m benchmarks.hosts.speeds

One isolated pipeline on each of three hosts, emulated by network namespaces on this machine, as root. A layer sleeps
for ``--sample-ms`` for each sample on a host of speed 1, and twice as long on one of speed 0.5. The pipelines share
each batch. In turns with them one host trains alone, without other pipelines, at each of the speeds: the limit is the
sum of what all hosts reach alone. Shares follow the paces after some 40 steps, which are not timed.
"""

from __future__ import annotations

import argparse

from avgpipe_lab.bench.namespaces import check_namespaces, network
from benchmarks.common.record import say, write_record
from benchmarks.hosts.training import train
from benchmarks.tables.hosts import hosts_speeds

_SETTLE = 60  # steps, until shares are steady


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--speeds", default="1,1,0.5", help="of each host")
    parser.add_argument("--samples", type=int, default=25, help="of a batch, each a micro-batch")
    parser.add_argument("--sample-ms", type=float, default=20.0)
    parser.add_argument("--mib", type=float, default=1.0, help="of the model's gradient")
    parser.add_argument("--rate", type=float, default=1e9, help="bits a second that a host sends")
    parser.add_argument("--steps", type=int, default=60, help="that are timed in a turn")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--out", help="file of the record; default: in benchmarks/results")
    asked = parser.parse_args()
    check_namespaces("this benchmark")
    speeds = [float(speed) for speed in asked.speeds.split(",")]
    job = ["--mib", f"{asked.mib:g}", "--micro-batches", str(asked.samples)]
    job += ["--sample-s", f"{asked.sample_ms / 1e3:g}"]
    turns: list[float] = []
    alone: dict[float, list[float]] = {speed: [] for speed in speeds}
    with network(len(speeds), asked.rate, own_boot_ids=True) as net:
        for number in range(asked.rounds):
            for speed, each in alone.items():
                words = [*job, "--pipelines", "1", "--speeds", f"{speed:g}"]
                each.append(train(net, words, asked.steps // 4, is_alone=True).samples_per_s)
            words = [*job, "--pipelines", str(len(speeds)), "--speeds", asked.speeds]
            turns.append(train(net, words, asked.steps, settle=_SETTLE).samples_per_s)
            found = {f"{speed:g}": f"{each[-1]:.1f}" for speed, each in alone.items()}
            say(f"round {number + 1} of {asked.rounds}: alone {found}, all {turns[-1]:.1f} samples/s")
    settings = {name: getattr(asked, name) for name in ("samples", "sample_ms", "mib", "rate", "steps")}
    record = {**settings, "speeds": speeds, "samples_per_s": turns}
    record["alone"] = [{"speed": speed, "samples_per_s": each} for speed, each in alone.items()]
    write_record("hosts-speeds", "hosts of different speeds", record, asked.out)
    print(hosts_speeds(record))


if __name__ == "__main__":
    main()
