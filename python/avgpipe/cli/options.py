"""The options of ``avgpipe train``: types and help. Left out they are None; ``settings`` has the defaults."""

from __future__ import annotations

from typing import Annotated

import typer

from avgpipe.cli.settings import (
    AUTOCAST,
    DEFAULT_MICRO_BATCHES,
    DEFAULT_PIPELINES,
    DEFAULT_STAGES,
    LINKS,
    WIRE_DTYPES,
)
from avgpipe.plan import RECOMPUTE, RULES, WEIGHTS
from avgpipe.schedule import schedule_names
from avgpipe.systems import SYSTEMS
from avgpipe.workloads import LR_SCALINGS, workload_names

_DATA, _PLAN, _RUN = "What to train on", "How to train: the plan", "The run"

Workload = Annotated[
    str, typer.Argument(metavar="WORKLOAD", help=f"What to train: {', '.join(workload_names())}.")
]
Data = Annotated[
    str | None,
    typer.Option(
        metavar="DIR",
        help="Data folder; a language model wants train.txt, valid.txt and test.txt, and reads the source of Python's "
        "standard library without. See the reference for the others.",
        rich_help_panel=_DATA,
    ),
]
Pretrained = Annotated[
    str | None,
    typer.Option(
        metavar="DIR",
        help="Folder of a transformers model whose weights to begin with (bert, gpt).",
        rich_help_panel=_DATA,
    ),
]
LoaderWorkers = Annotated[
    int | None,
    typer.Option(
        metavar="W",
        help="Processes of each worker that make batches ahead. Default: 0.",
        rich_help_panel=_DATA,
    ),
]
Preset = Annotated[
    str | None,
    typer.Option(metavar="tiny|small|paper", help="Size of the model. Default: tiny.", rich_help_panel=_DATA),
]
BatchSize = Annotated[
    int | None,
    typer.Option(
        metavar="B", help="Samples in a pipeline's batch. Default: the preset's.", rich_help_panel=_DATA
    ),
]
Seed = Annotated[
    int | None,
    typer.Option(metavar="S", help="Of weights and dropout. Default: 0.", rich_help_panel=_DATA),
]
System = Annotated[
    str | None,
    typer.Option(metavar="NAME", help=f"{', '.join(SYSTEMS)}. Default: avgpipe.", rich_help_panel=_PLAN),
]
Stages = Annotated[
    int | None,
    typer.Option(
        metavar="K",
        help=f"Workers, one per stage. Default: {DEFAULT_STAGES}, or as many as torchrun started.",
        rich_help_panel=_PLAN,
    ),
]
Pipelines = Annotated[
    int | None,
    typer.Option(
        metavar="N",
        help=f"Pipelines that run side by side. Default: {DEFAULT_PIPELINES}, if the system allows.",
        rich_help_panel=_PLAN,
    ),
]
MicroBatches = Annotated[
    int | None,
    typer.Option(
        metavar="M",
        help=f"Parts of a batch. Default: {DEFAULT_MICRO_BATCHES}, if the system and the batch allow.",
        rich_help_panel=_PLAN,
    ),
]
Schedule = Annotated[
    str | None,
    typer.Option(
        metavar="NAME",
        help=f"{', '.join(schedule_names())}. Default: the system's.",
        rich_help_panel=_PLAN,
    ),
]
StagesPerWorker = Annotated[
    int | None,
    typer.Option(metavar="V", help="Of the schedule interleaved-1f1b. Default: 2.", rich_help_panel=_PLAN),
]
Replication = Annotated[
    str | None,
    typer.Option(
        metavar="R,R,...",
        help="Workers of each stage, which share its micro-batches, as in 2,1,1. Default: one each.",
        rich_help_panel=_PLAN,
    ),
]
Spread = Annotated[
    bool,
    typer.Option(
        "--spread",
        help="Give each pipeline workers of its own, which tell one another their updates over the network.",
        rich_help_panel=_PLAN,
    ),
]
Weights = Annotated[
    str | None,
    typer.Option(
        metavar="|".join(WEIGHTS),
        help="Which version of the weights a batch runs on. Default: what the schedule was published with.",
        rich_help_panel=_PLAN,
    ),
]
Advance = Annotated[
    str | None,
    typer.Option(
        metavar="A",
        help="Forwards that a stage runs ahead: a number, one per stage as in 3,2,1,0, or auto: from the times of "
        "the first batches. Default: stages that follow.",
        rich_help_panel=_PLAN,
    ),
]
Rule = Annotated[
    str | None,
    typer.Option(metavar="|".join(RULES), help="Averaging rule. Default: avgpipe.", rich_help_panel=_PLAN),
]
Staleness = Annotated[
    str | None,
    typer.Option(
        metavar="0|1|asynchronous", help="Rounds that averaging lags. Default: 1.", rich_help_panel=_PLAN
    ),
]
Alpha = Annotated[
    float | None,
    typer.Option(
        metavar="X", help="Pull towards the average, 0 to 1. Default: the rule's.", rich_help_panel=_PLAN
    ),
]
Period = Annotated[
    int | None,
    typer.Option(
        metavar="T", help="Batches of a pipeline between averagings. Default: 1.", rich_help_panel=_PLAN
    ),
]
Recompute = Annotated[
    str | None,
    typer.Option(
        metavar="|".join(RECOMPUTE),
        help="Micro-batches that run their forward again instead of keeping activations. Default: never.",
        rich_help_panel=_PLAN,
    ),
]
LrScaling = Annotated[
    str | None,
    typer.Option(
        metavar="|".join(LR_SCALINGS),
        help="How the learning rate grows with N. Default: the preset's.",
        rich_help_panel=_PLAN,
    ),
]
Plan = Annotated[
    str | None,
    typer.Option(metavar="FILE", help="A plan.json; options given beside it win.", rich_help_panel=_PLAN),
]
Epochs = Annotated[
    int | None,
    typer.Option(
        metavar="E",
        help="Epochs, of all pipelines together. Default: the preset's.",
        rich_help_panel=_RUN,
    ),
]
MaxBatches = Annotated[
    int | None,
    typer.Option(
        metavar="J",
        help="End after so many batches, of all pipelines together. The learning rate's course is stretched over them.",
        rich_help_panel=_RUN,
    ),
]
Target = Annotated[
    float | None,
    typer.Option(
        metavar="X", help="End when the validation metric after an epoch reaches X.", rich_help_panel=_RUN
    ),
]
Device = Annotated[
    str | None,
    typer.Option(metavar="cpu|cuda", help="Default: cpu.", rich_help_panel=_RUN),
]
Link = Annotated[
    str | None,
    typer.Option(
        metavar="|".join(LINKS),
        help="How tensors travel between workers. Default: auto.",
        rich_help_panel=_RUN,
    ),
]
WireDtype = Annotated[
    str | None,
    typer.Option(
        metavar="|".join(WIRE_DTYPES),
        help="In which activations and gradients travel between workers; none: their own.",
        rich_help_panel=_RUN,
    ),
]
Autocast = Annotated[
    str | None,
    typer.Option(
        metavar="|".join(AUTOCAST),
        help="Lower precision for matrix products; auto: where it makes the workload faster. Default: auto.",
        rich_help_panel=_RUN,
    ),
]
SkipNonfinite = Annotated[
    bool,
    typer.Option(
        "--skip-nonfinite",
        help="Leave out batches whose gradients have infinities or NaN.",
        rich_help_panel=_RUN,
    ),
]
Out = Annotated[
    str | None,
    typer.Option(
        metavar="DIR", help="The run's folder. Default: runs/WORKLOAD-DATE-TIME.", rich_help_panel=_RUN
    ),
]
Resume = Annotated[
    bool,
    typer.Option(
        "--resume",
        help="Go on from the last checkpoint in --out; what is not given stays as it was.",
        rich_help_panel=_RUN,
    ),
]
CheckpointMinutes = Annotated[
    float | None,
    typer.Option(
        metavar="T",
        help="Minutes between checkpoints within an epoch. Default: 10.",
        rich_help_panel=_RUN,
    ),
]
Timeout = Annotated[
    float | None,
    typer.Option(metavar="S", help="Seconds to wait for another worker. Default: 300.", rich_help_panel=_RUN),
]
Json = Annotated[
    bool, typer.Option("--json", help="Print summary.json and nothing else.", rich_help_panel=_RUN)
]
