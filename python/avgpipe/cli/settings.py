"""What a training run is: every option with its value, as one object that travels to the workers as JSON.

An option comes from the command line, else from the plan file (those of the plan), else from the run that is
resumed, else it has its default.
"""

from __future__ import annotations

import json
import math
import os
import time
from dataclasses import asdict, dataclass, fields, replace
from pathlib import Path
from typing import Any

from avgpipe import systems
from avgpipe.errors import nearest
from avgpipe.plan import Plan
from avgpipe.systems import SYSTEMS
from avgpipe.units import parse_numbers
from avgpipe.workloads import LR_SCALINGS, BuildOptions, check_workload

PLAN_OPTIONS = tuple(f.name for f in fields(Plan))
LINKS = ("auto", "shm", "gloo", "cuda-ipc", "nccl")  # the runtime's, which needs torch
_ON_CUDA = ("cuda-ipc", "nccl")
WIRE_DTYPES = ("none", "bfloat16", "float16")
AUTOCAST = ("auto", "none", "bfloat16", "float16")
DEFAULT_STAGES, DEFAULT_PIPELINES, DEFAULT_MICRO_BATCHES = 2, 2, 4
RUN_FILE = "run.json"
# The variable of the environment in which workers get theirs: anybody may read a command line, with its paths.
SETTINGS = "AVGPIPE_SETTINGS"


@dataclass(frozen=True)
class TrainSettings:
    """plan: the options of ``Plan``, its partition as asked for. epochs, max_batches: of the whole run, whatever was
    resumed. target: of the workload's metric. timeout_s: seconds to wait for another worker. checkpoint_minutes:
    between checkpoints within an epoch. link: one of ``LINKS``. wire_dtype: one of ``WIRE_DTYPES``. autocast: one of
    ``AUTOCAST``. skip_nonfinite: as of ``Pipeline``. pretrained, lr_scaling, loader_workers: as in ``BuildOptions``.
    launch: torchrun's name for what started the workers. restarts: it has started them before, and they began this run.
    """

    workload: str
    plan: dict[str, Any]
    batch_size: int
    epochs: int
    out: str
    preset: str = "tiny"
    data: str | None = None
    max_batches: int | None = None
    target: float | None = None
    device: str = "cpu"
    seed: int = 0
    resume: bool = False
    timeout_s: float = 300.0
    checkpoint_minutes: float = 10.0
    link: str = "auto"
    wire_dtype: str = "none"
    autocast: str = "auto"
    skip_nonfinite: bool = False
    pretrained: str | None = None
    lr_scaling: str | None = None
    loader_workers: int = 0
    launch: str | None = None
    restarts: bool = False

    @property
    def workers(self) -> int:
        return Plan(**self.plan).workers

    @property
    def last_checkpoint(self) -> Path:
        return Path(self.out) / "checkpoints" / "last"

    def to_json(self) -> str:
        return json.dumps(asdict(self), indent=2) + "\n"

    @classmethod
    def from_json(cls, text: str) -> TrainSettings:
        return cls(**json.loads(text))

    def build_options(self) -> BuildOptions:
        return _build_options(asdict(self), self.plan["pipelines"])


def resolve(workload: str, asked: dict[str, Any], plan_file: str | None = None) -> TrainSettings:
    """Settings of the options that were ``asked`` for; those left out are None.

    Reads at most the plan file and the resumed run's ``run.json``. Raises ValueError, TypeError or OSError for what
    cannot be, cheap checks only.
    """
    given = {name: value for name, value in asked.items() if value is not None}
    _check_values(given)
    if given.get("resume") and "out" not in given:
        raise ValueError("--resume needs --out DIR, the folder of the run to go on with")
    launch = _launch()
    restarts = "out" in given and _is_restart(Path(given["out"]), launch)
    if restarts and has_checkpoint(given["out"]):
        given["resume"] = True
    known = {f.name for f in fields(TrainSettings)}
    stored = _stored(Path(given["out"]), workload) if given.get("resume") else {}
    values = {n: v for n, v in {**stored, **given}.items() if n in known and n != "plan"}
    _check_link(values.get("link"), values.get("device"))
    values.setdefault("out", f"runs/{workload}-{time.strftime('%Y%m%d-%H%M%S')}")
    for folder in ("data", "pretrained"):
        if values.get(folder) is not None:
            values[folder] = str(Path(values[folder]).absolute())  # the run may be resumed from elsewhere
    facts = check_workload(workload, _build_options(values, pipelines=1))
    plan = _plan(given, stored.get("plan"), plan_file, facts.batch_size)
    if plan.stages > facts.layers:
        raise ValueError(
            f"{plan.stages} stages are more than the {facts.layers} layers of {workload} {facts.preset}: "
            f"choose --stages 1 to {facts.layers}"
        )
    if plan.micro_batches > facts.batch_size:
        raise ValueError(
            f"a batch of {facts.batch_size} samples cannot make {plan.micro_batches} micro-batches: "
            "use a larger --batch-size or fewer --micro-batches"
        )
    values |= {
        "launch": launch,
        "restarts": restarts,
        "plan": asdict(plan),
        "batch_size": facts.batch_size,
        "epochs": facts.epochs,
        "workload": workload,
    }
    return replace(TrainSettings(**values), resume=bool(given.get("resume")))


def _build_options(values: dict[str, Any], pipelines: int) -> BuildOptions:
    known = {f.name for f in fields(BuildOptions)}
    asked = {name: value for name, value in values.items() if name in known}
    for folder in ("data", "pretrained"):
        if asked.get(folder) is not None:
            asked[folder] = Path(asked[folder])
    return BuildOptions(**asked, pipelines=pipelines)


def joined_ranks() -> int | None:
    """How many workers torchrun, or a launcher with its environment variables, has started; None: not started so."""
    if "RANK" not in os.environ or "WORLD_SIZE" not in os.environ:
        return None
    return int(os.environ["WORLD_SIZE"])


def _launch() -> str | None:
    """torchrun's name for what started the workers. Launches that were given none are all called "none": on one host
    their processes tell them apart.
    """
    name = os.environ.get("TORCHELASTIC_RUN_ID")
    if name == "none" and os.environ.get("LOCAL_WORLD_SIZE") == os.environ.get("WORLD_SIZE"):
        return f"none-{os.getppid()}"
    return name


def _is_restart(out: Path, launch: str | None) -> bool:
    """Whether torchrun has started the workers again, and an earlier attempt began the run in ``out``."""
    if joined_ranks() is None or int(os.environ.get("TORCHELASTIC_RESTART_COUNT", "0")) == 0:
        return False
    values = _read(out)
    return values is not None and values.get("launch") == launch


def has_checkpoint(out: str | os.PathLike[str]) -> bool:
    return (Path(out) / "checkpoints" / "last" / "manifest.json").is_file()


def parse_advance(text: str | None) -> int | list[int] | str | None:
    """ "2" for every stage, "3,2,1,0" for each, or "auto"."""
    if text is None or text == "auto":
        return text
    numbers = list(parse_numbers("--advance", text, int, "2, 3,2,1,0 for each stage, or auto"))
    return numbers if len(numbers) > 1 else numbers[0]


def parse_replication(text: str | None) -> list[int] | None:
    """ "2,1,1": of each stage."""
    return None if text is None else list(parse_numbers("--replication", text, int, "2,1,1 for each stage"))


def parse_staleness(text: str | None) -> int | str | None:
    return int(text) if text is not None and text.isdigit() else text


def _check_values(given: dict[str, Any]) -> None:
    """Numbers and names that neither the plan nor the workload checks, or that they would name otherwise."""
    positive = ("stages", "pipelines", "micro_batches", "batch_size", "epochs", "max_batches", "period")
    for name in (*positive, "timeout_s", "checkpoint_minutes"):
        value = given.get(name)
        if value is not None and not (math.isfinite(value) and value > 0):
            option = {"timeout_s": "timeout"}.get(name, name).replace("_", "-")
            raise ValueError(f"--{option} {value:g}: must be more than 0")
    target = given.get("target")
    if target is not None and not math.isfinite(target):
        raise ValueError(f"--target {target}: must be a finite number")
    choices_of = {
        "device": ("cpu", "cuda"),
        "link": LINKS,
        "wire_dtype": WIRE_DTYPES,
        "autocast": AUTOCAST,
        "lr_scaling": LR_SCALINGS,
    }
    for name, choices in choices_of.items():
        value = given.get(name)
        if value is not None and value not in choices:
            raise ValueError(f"unknown {name.replace('_', '-')} {value!r}: {nearest(value, choices)}")


def _check_link(link: str | None, device: str | None) -> None:
    if link in _ON_CUDA and device != "cuda":
        raise ValueError(f"--link {link} joins CUDA devices: add --device cuda, or use --link auto")


def _read(out: Path) -> dict[str, Any] | None:
    try:
        values = json.loads((out / RUN_FILE).read_text())
    except (OSError, ValueError):
        return None
    return values if isinstance(values, dict) else None


def _stored(out: Path, workload: str) -> dict[str, Any]:
    """The settings of the run in ``out``; none if it has no readable ones, for the checkpoint is what matters."""
    values = _read(out)
    if values is None:
        return {}
    if values.get("workload") != workload:
        raise ValueError(
            f"{out} is a run of {values.get('workload')!r}, not of {workload!r}: name that workload"
        )
    return values


def _plan(
    given: dict[str, Any], stored: dict[str, Any] | None, plan_file: str | None, batch_size: int
) -> Plan:
    base = asdict(Plan.load(plan_file)) if plan_file is not None else dict(stored or {})
    explicit = {name: given[name] for name in PLAN_OPTIONS if name in given}
    _drop_what_depends(base, explicit)
    ranks = joined_ranks()
    chosen = {**base, **explicit}
    system = chosen.pop("system", "avgpipe")
    row = SYSTEMS.get(system, {})
    stages = chosen.setdefault("stages", ranks if ranks is not None and ranks > 1 else DEFAULT_STAGES)
    if "pipelines" not in row:
        chosen.setdefault("pipelines", DEFAULT_PIPELINES)
    if "micro_batches" not in row:
        wanted = 1 if "stages" in row else min(DEFAULT_MICRO_BATCHES, batch_size)  # they serve to fill stages
        replication = chosen.get(
            "replication", systems.row(system, stages).get("replication") if row else None
        )
        chosen.setdefault("micro_batches", systems.micro_batches(system, stages, replication, wanted))
    plan = Plan.for_system(system, **chosen)
    if ranks is not None and ranks not in (1, plan.workers):
        raise ValueError(f"{ranks} workers were started for a plan of {plan.workers}: start one for each")
    return plan


def _drop_what_depends(base: dict[str, Any], explicit: dict[str, Any]) -> None:
    """Forget choices of a stored plan that were made for a system, schedule or number of stages that is overridden."""

    def overridden(name: str) -> bool:
        return name in explicit and name in base and explicit[name] != base[name]

    stages, schedule, system = (overridden(n) for n in ("stages", "schedule", "system"))
    if system:
        for name in ("schedule", "weights", "replication", *SYSTEMS.get(explicit["system"], {})):
            base.pop(name, None)
    if stages:
        base.pop("partition", None)
        base.pop("replication", None)
    if schedule:
        base.pop("weights", None)
    if system or schedule or (stages and isinstance(base.get("advance"), list)):
        base.pop("advance", None)
