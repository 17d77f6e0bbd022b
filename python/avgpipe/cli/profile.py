"""``avgpipe profile``: what the layers of a workload cost, as a table and a file."""

from __future__ import annotations

import json
import os
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from avgpipe.cli import options
from avgpipe.cli.errors import arguments, reporting, running
from avgpipe.cli.settings import AUTOCAST
from avgpipe.errors import nearest
from avgpipe.measure.trial import Subject
from avgpipe.planning.profile import LinkProfile, Profile
from avgpipe.timeline.figure import check_picture
from avgpipe.units import format_bytes, parse_numbers, parse_rate, parse_seconds

if TYPE_CHECKING:
    from rich.table import Table

    from avgpipe.workloads.workload import WorkloadFacts

_FILE_COLUMNS = 110  # of a table that is no terminal's
_DEVICES = ("cpu", "cuda")
_MIB = 2**20


def profile(
    workload: options.Workload,
    data: options.Data = None,
    preset: options.Preset = None,
    batch_size: options.BatchSize = None,
    micro_batch_sizes: Annotated[
        str, typer.Option(metavar="B[,B...]", help="Samples of the micro-batches that are timed.")
    ] = "1,2,4,8",
    bandwidth: Annotated[
        str | None,
        typer.Option(
            metavar="RATE",
            help="Of the link between two workers, as 10Gbit; with --latency. Default: measured between two processes.",
        ),
    ] = None,
    latency: Annotated[
        str | None, typer.Option(metavar="T", help="Of a message on that link, as 50us.")
    ] = None,
    workers: Annotated[
        int,
        typer.Option(
            metavar="K",
            help="Profile in so many processes at once, as workers of this machine would compute.",
        ),
    ] = 1,
    device: options.Device = None,
    autocast: options.Autocast = None,
    threads: Annotated[int, typer.Option(metavar="T", help="Of torch, on the CPU.")] = 1,
    budget: Annotated[float, typer.Option(metavar="S", help="About how many seconds to measure.")] = 15,
    out: Annotated[str, typer.Option(metavar="FILE", help="Where the profile goes.")] = "profile.json",
    plot: Annotated[str | None, typer.Option(metavar="FILE", help="Draw a picture.")] = None,
    json_output: Annotated[bool, typer.Option("--json", help="Print the profile and nothing else.")] = False,
) -> None:
    """Time every layer of WORKLOAD, forward, backward and update, and count its bytes: what plans are made from.

    Writes the profile as JSON.
    """
    with reporting(json_output):
        with arguments():
            asked = _Asked(
                parse_sizes(micro_batch_sizes),
                parse_link(bandwidth, latency),
                Subject(
                    *(workload, preset or "tiny", data, batch_size),
                    device=checked_device(device or "cpu"),
                    autocast=checked_autocast(autocast or "auto"),
                    threads=count("--threads", threads, 1),
                ),
                positive("--budget", budget),
                count("--workers", workers, 1),
            )
            check_file("--out", out)
            if plot is not None:
                check_picture(plot)
            check_subject(asked.subject)
        with running():
            found = _measure(asked)
            found.save(out)
            if plot is not None:
                from avgpipe.measure.layers import plot_layers

                plot_layers(found, plot)
            if json_output:
                print(json.dumps(json.loads(found.to_json())))
            else:
                _show(found, out)


@dataclass(frozen=True)
class _Asked:
    sizes: tuple[int, ...]
    link: LinkProfile | None
    subject: Subject
    budget_s: float
    workers: int


def parse_sizes(text: str) -> tuple[int, ...]:
    """Sizes as in "1,2,4,8"; ValueError for anything else."""
    return tuple(sorted(set(parse_numbers("--micro-batch-sizes", text, int, "1,2,4,8", least=1))))


def parse_link(bandwidth: str | None, latency: str | None) -> LinkProfile | None:
    """From "10Gbit" and "50us"; None for two Nones. ValueError, which names the option, for anything else."""
    if bandwidth is None and latency is None:
        return None
    if bandwidth is None or latency is None:
        given = f"--latency {latency}" if bandwidth is None else f"--bandwidth {bandwidth}"
        missing = "--bandwidth" if bandwidth is None else "--latency"
        raise ValueError(f"{given} without {missing}: a link has both, or leave both out to have it measured")
    return LinkProfile(parse_seconds("--latency", latency), parse_rate("--bandwidth", bandwidth))


def checked_device(device: str) -> str:
    from avgpipe.cli.checks import check_device

    if device not in _DEVICES:
        raise ValueError(f"--device {device}: use {' or '.join(_DEVICES)}")
    check_device(device)
    return device


def checked_autocast(name: str) -> str:
    if name not in AUTOCAST:
        raise ValueError(f"--autocast {name}: {nearest(name, AUTOCAST)}")
    return name


def positive(option: str, value: float) -> float:
    if not 0 < value < float("inf"):
        raise ValueError(f"{option} {value:g}: must be above 0")
    return value


def count(option: str, value: int, least: int) -> int:
    if value < least:
        raise ValueError(f"{option} {value}: must be at least {least}")
    return value


def check_subject(subject: Subject) -> WorkloadFacts:
    """That the workload can be built, without reading its data. ValueError where it cannot."""
    from avgpipe.workloads import check_workload

    return check_workload(
        subject.workload, preset=subject.preset, data=subject.data, batch_size=subject.batch_size
    )


def check_file(option: str, out: str) -> None:
    """That a file can be written, before anything is measured."""
    folder = Path(out).absolute().parent
    if Path(out).is_dir() or not folder.is_dir() or not os.access(folder, os.W_OK):
        raise ValueError(f"{option} {out}: cannot be written, name a file in a folder that you may write to")


def _measure(asked: _Asked) -> Profile:
    from avgpipe.measure.subject import profile_of

    if sys.stderr.isatty():
        print(f"measuring for about {asked.budget_s:g} s ...", file=sys.stderr, flush=True)
    return profile_of(
        asked.subject,
        micro_batch_sizes=asked.sizes,
        link=asked.link,
        budget_s=asked.budget_s,
        at_once=asked.workers,
    )


# ---- for a reader --------------------------------------------------------------------------------------------------


def _show(found: Profile, out: str) -> None:
    from rich.console import Console

    screen = Console(highlight=False, markup=False)
    if not screen.is_terminal:
        screen.width = _FILE_COLUMNS
    size = found.micro_batch_sizes[-1]
    screen.print(f"{found.model}: a micro-batch of {size} on {found.device}", style="bold")
    screen.print(_table(found, size))
    for samples in found.micro_batch_sizes:
        costs = found.at(samples)
        whole_s = sum(c.forward_s + c.backward_s for c in costs)
        screen.print(
            f"micro-batch of {samples}: {1e3 * whole_s:.2f} ms, {1e3 * whole_s / samples:.2f} ms per sample, "
            f"gain of a second lane {found.lane_gain(samples):.2f}"
        )
    screen.print(_around(found))
    screen.print(f"profile: {out}")


def _table(found: Profile, size: int) -> Table:
    from rich import box
    from rich.table import Table

    table = Table(box=box.SIMPLE_HEAD, pad_edge=False, show_footer=True)
    layers, costs = found.layers, found.at(size)
    held, output = [c.held_bytes for c in costs], found.boundary_bytes(size)
    columns = [
        ("forward ms", [1e3 * c.forward_s for c in costs], 3),
        ("backward ms", [1e3 * c.backward_s for c in costs], 3),
        ("of it inputs", [1e3 * c.input_backward_s for c in costs], 3),
        ("held MiB", [size / _MIB for size in held], 2),
        ("sent MiB", [size / _MIB for size in [*output, 0.0]], 2),
        ("weights MiB", [layer.parameter_bytes / _MIB for layer in layers], 2),
        ("update ms", [1e3 * layer.update_s for layer in layers], 3),
    ]
    table.add_column("layer", footer="total", no_wrap=True)
    for heading, values, digits in columns:
        total = found.parameter_bytes(0, len(layers)) / _MIB if heading == "weights MiB" else sum(values)
        footer = "" if heading == "sent MiB" else f"{total:.{digits}f}"
        table.add_column(heading, footer=footer, justify="right", no_wrap=True)
    for n, layer in enumerate(layers):
        table.add_row(layer.name, *(f"{values[n]:.{digits}f}" for _, values, digits in columns))
    return table


def _around(found: Profile) -> str:
    words = [f"the runtime adds {1e6 * found.action_s:.0f} µs to an action"]
    if found.process_bytes:
        words.append(f"a worker without a model has {format_bytes(found.process_bytes)}")
    if found.link is not None:
        rate = found.link.bytes_per_s / 1e9
        words.append(f"link: {1e6 * found.link.latency_s:.0f} µs and {rate:.3g} GB/s")
    return "; ".join(words)
