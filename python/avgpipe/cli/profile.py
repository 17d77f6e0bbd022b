"""``avgpipe profile``: what the layers of a workload cost, as a table and a file."""

from __future__ import annotations

import json
import os
import sys
from pathlib import Path

from rich import box
from rich.console import Console
from rich.table import Table

from avgpipe.cli.config import ProfileConfig
from avgpipe.cli.errors import arguments, running
from avgpipe.cli.measuring import link_of, profile_of
from avgpipe.cli.resolve import check_device
from avgpipe.planning.chain import Chain
from avgpipe.planning.profile import Profile
from avgpipe.report.layers import plot_layers
from avgpipe.timeline.plot import check_picture
from avgpipe.units import format_bytes
from avgpipe.workloads import check_workload

_FILE_COLUMNS = 110  # of a table that is not for a terminal
_MIB = 2**20


def run(config: ProfileConfig) -> None:
    with arguments():
        check_device(config.device)
        link_of(config)
        check_file(config.out)
        if config.plot is not None:
            check_picture(config.plot)
        check_workload(config.workload, config.build_options())
    with running():
        if sys.stderr.isatty():
            print(f"measuring for about {config.budget_s:g} s ...", file=sys.stderr, flush=True)
        found = profile_of(config, config.micro_batch_sizes, config.workers)
        found.save(config.out)
        if config.plot is not None:
            plot_layers(found, config.plot)
        if config.json:
            print(json.dumps(json.loads(found.to_json())))
        else:
            _show(found, config.out)


def check_file(out: str) -> None:
    """Refuse an ``--out`` that cannot be written, before anything is measured."""
    folder = Path(out).absolute().parent
    if Path(out).is_dir() or not folder.is_dir() or not os.access(folder, os.W_OK):
        raise ValueError(f"--out {out}: cannot be written, name a file in a folder that you may write to")


# ---- for a reader ----------------------------------------------------------------------------------------------------


def _show(found: Profile, out: str) -> None:
    screen = Console(highlight=False, markup=False)
    if not screen.is_terminal:
        screen.width = _FILE_COLUMNS
    size = found.micro_batch_sizes[-1]
    screen.print(f"{found.model}: a micro-batch of {size} on {found.device}", style="bold")
    screen.print(_table(found, size))
    for samples in found.micro_batch_sizes:
        whole_s = sum(c.forward_s + c.backward_s for c in found.at(samples))
        screen.print(
            f"micro-batch of {samples}: {1e3 * whole_s:.2f} ms, {1e3 * whole_s / samples:.2f} ms per sample, "
            f"gain of a second pipeline on the device {found.lane_gain(samples):.2f}"
        )
    words = [f"the runtime adds {1e6 * found.action_s:.0f} µs to an action"]
    if found.process_bytes:
        words.append(f"a worker without a model has {format_bytes(found.process_bytes)}")
    if found.link is not None:
        rate = found.link.bytes_per_s / 1e9
        words.append(f"link: {1e6 * found.link.latency_s:.0f} µs and {rate:.3g} GB/s")
    screen.print("; ".join(words))
    screen.print(f"profile: {out}")


def _table(found: Profile, size: int) -> Table:
    layers, costs = found.layers, found.at(size)
    columns = [
        ("forward ms", [1e3 * c.forward_s for c in costs], 3),
        ("backward ms", [1e3 * c.backward_s for c in costs], 3),
        ("of it inputs", [1e3 * c.input_backward_s for c in costs], 3),
        ("saved MiB", [c.held_bytes / _MIB for c in costs], 2),
        ("sent MiB", [sent / _MIB for sent in [*found.boundary_bytes(size), 0.0]], 2),
        ("weights MiB", [layer.parameter_bytes / _MIB for layer in layers], 2),
        ("update ms", [1e3 * layer.update_s for layer in layers], 3),
    ]
    table = Table(box=box.SIMPLE_HEAD, pad_edge=False, show_footer=True)
    table.add_column("layer", footer="total", no_wrap=True)
    for heading, values, digits in columns:
        total = (
            Chain(found, size).parameter_bytes(0, len(layers)) / _MIB
            if heading == "weights MiB"
            else sum(values)
        )
        footer = "" if heading == "sent MiB" else f"{total:.{digits}f}"
        table.add_column(heading, footer=footer, justify="right", no_wrap=True)
    for n, layer in enumerate(layers):
        table.add_row(layer.name, *(f"{values[n]:.{digits}f}" for _, values, digits in columns))
    return table
