"""``avgpipe profile``: measures the costs of a workload's layers, as a table and a file."""

from __future__ import annotations

import json

from rich.table import Table

from avgpipe.cli.config import ProfileConfig
from avgpipe.cli.measuring import link_of, profile_of
from avgpipe.cli.output import answer, arguments, check_file, grid, running, show_status
from avgpipe.cli.resolve import check_device
from avgpipe.planning.chain import Chain
from avgpipe.planning.profile import Profile
from avgpipe.tasks import check_workload
from avgpipe.units import format_bytes

_MIB = 2**20


def run(config: ProfileConfig) -> None:
    with arguments():
        check_device(config.device)
        link_of(config)
        check_file(config.out)
        check_workload(config.workload, config.build_options())
    with running():
        show_status(f"measuring for about {config.budget_s:g} s ...")
        found = profile_of(config, config.micro_batch_sizes, config.workers)
        show_status("")
        found.save(config.out)
    size = found.micro_batch_sizes[-1]
    answer(
        config.json,
        json.loads(found.to_json()),
        f"{found.model}: a micro-batch of {size} on {found.device}",
        _table(found, size),
        *(_micro_batch(found, samples) for samples in found.micro_batch_sizes),
        "; ".join(_surroundings(found)),
        f"profile: {config.out}",
    )


def _micro_batch(found: Profile, samples: int) -> str:
    whole_s = sum(c.forward_s + c.backward_s for c in found.at(samples))
    return (
        f"micro-batch of {samples}: {1e3 * whole_s:.2f} ms, {1e3 * whole_s / samples:.2f} ms per sample, "
        f"gain of a second pipeline on the device {found.lane_gain(samples):.2f}"
    )


def _surroundings(found: Profile) -> list[str]:
    said = [f"the runtime adds {1e6 * found.action_s:.0f} µs to an action"]
    if found.process_bytes:
        said.append(f"a worker without a model has {format_bytes(found.process_bytes)}")
    if found.link is not None:
        rate = found.link.bytes_per_s / 1e9
        said.append(f"link: {1e6 * found.link.latency_s:.0f} µs and {rate:.3g} GB/s")
    return said


def _table(found: Profile, size: int) -> Table:
    layers, costs = found.layers, found.at(size)
    columns = {
        "forward ms": [1e3 * c.forward_s for c in costs],
        "backward ms": [1e3 * c.backward_s for c in costs],
        "of it inputs": [1e3 * c.input_backward_s for c in costs],
        "saved MiB": [c.held_bytes / _MIB for c in costs],
        "sent MiB": [sent / _MIB for sent in found.boundary_bytes(size)],
        "weights MiB": [layer.parameter_bytes / _MIB for layer in layers],
        "update ms": [1e3 * layer.update_s for layer in layers],
    }
    for values in columns.values():
        values.append(sum(values))
    # tied ones count once
    columns["weights MiB"][-1] = Chain(found, size).parameter_bytes(0, len(layers)) / _MIB
    columns["sent MiB"].pop()  # it does not add up

    def cells(n: int) -> dict[str, str]:
        known = {heading: values[n] for heading, values in columns.items() if n < len(values)}
        return {h: f"{value:.{2 if h.endswith('MiB') else 3}f}" for h, value in known.items()}

    names = [*(layer.name for layer in layers), "total"]
    return grid([{"layer": name, **cells(n)} for n, name in enumerate(names)])
