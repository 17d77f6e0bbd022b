"""``avgpipe tune``: a good plan for a workload, predicted from a profile and, where the devices are here, measured."""

from __future__ import annotations

import json
from typing import Annotated

import typer

from avgpipe.cli import options
from avgpipe.cli.errors import arguments, reporting, running
from avgpipe.cli.profile import check_file, checked_autocast, checked_device, count, parse_link, positive
from avgpipe.cli.tune_question import Question
from avgpipe.measure.shapes import PIPELINES
from avgpipe.measure.trial import Subject
from avgpipe.units import parse_bytes, parse_numbers


def tune(
    workload: Annotated[
        str | None,
        typer.Argument(metavar="[WORKLOAD]", help="What to train; without, give --profile and --batch-size."),
    ] = None,
    data: options.Data = None,
    preset: options.Preset = None,
    batch_size: options.BatchSize = None,
    workers: Annotated[
        int | None, typer.Option(metavar="K", help="Devices, or on the CPU processes of one thread.")
    ] = None,
    memory_limit: Annotated[
        str | None,
        typer.Option(
            metavar="SIZE", help="Of a worker, as 2GiB; on the CPU its whole process counts. Default: none."
        ),
    ] = None,
    pipelines: Annotated[
        str, typer.Option(metavar="N[,N...]", help="Numbers of pipelines to try.")
    ] = ",".join(map(str, PIPELINES)),
    micro_batches: Annotated[
        str | None,
        typer.Option(
            metavar="M[,M...]", help="Numbers of micro-batches to try. Default: up to one for each sample."
        ),
    ] = None,
    profile: Annotated[
        str | None,
        typer.Option(metavar="FILE", help="Of avgpipe profile. Default: the workload is profiled first."),
    ] = None,
    cluster: Annotated[
        str | None,
        typer.Option(
            metavar="FILE",
            help="TOML: the devices and links that the plan is for, in place of --workers. Nothing is timed then.",
        ),
    ] = None,
    bandwidth: Annotated[
        str | None,
        typer.Option(
            metavar="RATE",
            help="Of the link between two workers, as 10Gbit; with --latency. Nothing is timed then.",
        ),
    ] = None,
    latency: Annotated[str | None, typer.Option(metavar="T", help="Of a message on it, as 50us.")] = None,
    device: options.Device = None,
    autocast: options.Autocast = None,
    budget: Annotated[float, typer.Option(metavar="S", help="About how many seconds to profile.")] = 15,
    trials: Annotated[int, typer.Option(metavar="T", help="How many of the best plans to time.")] = 3,
    baselines: Annotated[
        bool, typer.Option("--baselines", help="Time max-num and max-size of the AvgPipe paper, too.")
    ] = False,
    traversal: Annotated[
        bool, typer.Option("--traversal", help="Time every setting, too: this takes very long.")
    ] = False,
    out: Annotated[str, typer.Option(metavar="FILE", help="Where the plan goes.")] = "plan.json",
    json_output: Annotated[
        bool, typer.Option("--json", help="Print what was found and nothing else.")
    ] = False,
) -> None:
    """Find a good plan for WORKLOAD on so many workers, without trying them all.

    Profiles the layers, simulates plans of many sizes, leaves out what does not fit into the memory, and times the best
    few where the devices are here. Prints predicted and measured times and memory; writes the plan.
    """
    with reporting(json_output):
        with arguments():
            subject = None
            if workload is not None:
                subject = Subject(
                    *(workload, preset or "tiny", data, batch_size),
                    device=checked_device(device or "cpu"),
                    autocast=checked_autocast(autocast or "auto"),
                )
            question = Question(
                *(subject, profile, cluster, batch_size, workers),
                None if memory_limit is None else parse_bytes("--memory-limit", memory_limit),
                parse_link(bandwidth, latency),
                _numbers("--pipelines", pipelines),
                None if micro_batches is None else _numbers("--micro-batches", micro_batches),
                positive("--budget", budget),
                count("--trials", trials, 0),
                *(baselines, traversal),
            )
            check_file("--out", out)
            prepared = question.prepared()
        with running():
            known, profile_s = prepared.profiled()
        with arguments():  # only the profile tells what fits into the memory
            found = prepared.answer(known, profile_s)
        with running():
            found.plan.save(out)
        if json_output:
            print(json.dumps(found.to_json()))
            return
        from avgpipe.measure.table import show

        for note in prepared.notes:
            print(note)
        show(found, out)


def _numbers(option: str, text: str) -> tuple[int, ...]:
    return tuple(sorted(set(parse_numbers(option, text, int, "1,2,4", least=1))))
