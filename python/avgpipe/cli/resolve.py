"""Complete the options of ``avgpipe train``, and refuse what would fail later.

An option comes from the command line, else from the plan file if it is one of the plan's, else from the run
that is resumed, else it has its default.
"""

from __future__ import annotations

import os
import time
from collections.abc import Mapping
from dataclasses import asdict, fields, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from avgpipe.checkpoint.manifest import LAST, Manifest, checkpoints_in, newest, verify_checkpoint
from avgpipe.cli.config import (
    DEFAULT_MICRO_BATCHES,
    DEFAULT_PIPELINES,
    DEFAULT_STAGES,
    NO_SPARES,
    TrainConfig,
    WorkloadOptions,
)
from avgpipe.errors import CheckpointError
from avgpipe.links import refuse_elsewhere
from avgpipe.plan import Plan
from avgpipe.report.course import parse_target, read_object
from avgpipe.report.loggers import check_loggers
from avgpipe.systems import SYSTEMS, micro_batches, row
from avgpipe.tasks import find_workload

if TYPE_CHECKING:
    import torch

    from avgpipe.runtime.options import Extension
    from avgpipe.tasks import Workload

RUN_FILE = "run.json"
_NOTHING: Mapping[str, Any] = {}
_PARTS_OF_A_RUN = (RUN_FILE, "plan.json", "metrics.jsonl", "summary.json", "timeline.json", "checkpoints")


def resolve(asked: TrainConfig) -> TrainConfig:
    """Complete the configuration of a run.

    Reads at most the plan file and the resumed run's ``run.json``, and calls the function of a script. Raises
    ValueError, TypeError or OSError for invalid options, after cheap checks only.
    """
    if asked.resume and not asked.out:
        raise ValueError("--resume needs --out DIR, the folder of the run to continue")
    launch = _launch()
    is_restart = bool(asked.out) and _is_restart(Path(asked.out), launch)
    resume = asked.resume or (is_restart and has_checkpoint(asked.out))
    source = find_workload(asked.workload)
    stored = _stored(Path(asked.out), source.reference) if resume else {}
    _refuse_other_steps(asked, stored)
    config = TrainConfig.of(**{**stored, **asked.explicit})
    refuse_elsewhere(config.link, config.device)
    config = replace(config, data=_absolute(config.data), pretrained=_absolute(config.pretrained))
    config = replace(config, workload=source.reference)
    facts = source.check(config.build_options())
    target = facts.target if config.target is None else config.target
    if target is not None:
        parse_target(target)
    if not facts.counts_batches and config.max_batches is None:
        raise ValueError(
            f"the loader of {source.reference} has no length: say with --max-batches how many batches to train"
        )
    plan = choose_plan(asked, facts.batch_size, stored)
    if plan.isolate and joined_ranks() is not None:
        raise ValueError(
            "--isolate under torchrun: it starts the processes of its pipelines itself, run avgpipe train alone"
        )
    if config.spares is not None:
        _check_spares(plan)
    if plan.stages > facts.layers:
        model = f"{source.name} {facts.preset}".rstrip()
        raise ValueError(
            f"{plan.stages} stages are more than the {facts.layers} layers of {model}: "
            f"choose --stages 1 to {facts.layers}"
        )
    if plan.micro_batches > facts.batch_size:
        raise ValueError(
            f"a batch of {facts.batch_size} samples cannot be split into {plan.micro_batches} micro-batches: "
            "use a larger --batch-size or fewer --micro-batches"
        )
    return replace(
        config,
        **asdict(plan),
        plan=None,
        **facts.settled,
        target=target,
        out=config.out or f"runs/{source.name}-{time.strftime('%Y%m%d-%H%M%S')}",
        resume=resume,
        launch=launch,
        is_restart=is_restart,
        given=(),
    )


def _check_spares(plan: Plan) -> None:
    """Refuse ``--spares`` where no process could replace another."""
    why = None
    if plan.isolate:
        why = f"with --isolate: {NO_SPARES}"
    elif joined_ranks() is not None:
        why = "under torchrun: it replaces processes that it has started itself, run avgpipe train alone"
    elif plan.workers == 1:
        why = "with one worker: no other one has a copy of its state, use --stages 2 or more"
    if why is not None:
        raise ValueError(f"--spares {why}")


def _absolute(path: str | None) -> str | None:
    """Return an absolute path, as the run may be resumed from another folder."""
    return None if path is None else str(Path(path).absolute())


# ---- torchrun and Slurm ----------------------------------------------------------------------------------------------


def joined_ranks() -> int | None:
    """Return the number of workers that torchrun, or a launcher with its environment variables, started, if any."""
    if "RANK" not in os.environ or "WORLD_SIZE" not in os.environ:
        return None
    return int(os.environ["WORLD_SIZE"])


def _launch() -> str | None:
    """Return the name of torchrun, or of Slurm, for what started the workers.

    All launches of torchrun without a name are called "none"; on one host the ids of their processes distinguish
    them. A job of Slurm keeps its number in the queue.
    """
    name = os.environ.get("TORCHELASTIC_RUN_ID")
    if name is None and "SLURM_JOB_ID" in os.environ:
        return f"slurm-{os.environ['SLURM_JOB_ID']}"
    if name == "none" and os.environ.get("LOCAL_WORLD_SIZE") == os.environ.get("WORLD_SIZE"):
        return f"none-{os.getppid()}"
    return name


def _is_restart(out: Path, launch: str | None) -> bool:
    """Return whether the workers were restarted, and an earlier attempt of the launch began the run in ``out``."""
    of_torchrun = bool(os.environ.get("TORCHELASTIC_RUN_ID"))
    count = "TORCHELASTIC_RESTART_COUNT" if of_torchrun else "SLURM_RESTART_COUNT"
    if int(os.environ.get(count, "0")) == 0:
        return False
    values = read_object(out / RUN_FILE, [])
    return bool(values) and values.get("launch") == launch


# ---- the run that is resumed -----------------------------------------------------------------------------------------


def has_checkpoint(out: str | os.PathLike[str]) -> bool:
    return bool(checkpoints_in(Path(out) / "checkpoints"))


def _stored(out: Path, workload: str) -> dict[str, Any]:
    """Return the configuration of the run in ``out``; none if it has none: the checkpoint is enough."""
    problems = list[str]()
    values = read_object(out / RUN_FILE, problems)
    if problems:
        raise ValueError(f"{out}/{problems[0]}: remove that file, and give the run's options again")
    if values and values.get("workload") != workload:
        trained = str(values.get("workload"))
        file = trained.rpartition(":")[0]
        moved = f"put it back, or write its new path into {out / RUN_FILE}" if file else ""
        way = moved if moved and not Path(file).exists() else "name that workload"
        raise ValueError(f"{out} is a run of {trained!r}, not of {workload!r}: {way}")
    return TrainConfig.known(values)


def _refuse_other_steps(asked: TrainConfig, stored: dict[str, Any]) -> None:
    """Refuse options that the checkpoint's optimizer state, which includes the learning rate, would override."""
    for name in ("optimizer", "lr"):
        if name in asked.given and name in stored and getattr(asked, name) != stored[name]:
            default = "the preset's" if stored.get("preset") else "its default"
            before = default if stored[name] is None else stored[name]
            raise ValueError(
                f"--{name} {getattr(asked, name)}: the run in {asked.out} trains with {before}, which its "
                f"checkpoint continues: leave out --{name}, or name a new --out to start a new run"
            )


# ---- the plan --------------------------------------------------------------------------------------------------------


def choose_plan(asked: TrainConfig, batch_size: int, stored: Mapping[str, Any] = _NOTHING) -> Plan:
    """Return the plan that the options ask for; ``stored``: the configuration of the run that is resumed."""
    names = [f.name for f in fields(Plan)]
    loaded = stored if asked.plan is None else asdict(Plan.load(asked.plan))
    base = {name: value for name, value in loaded.items() if name in names}
    explicit = {name: value for name, value in asked.explicit.items() if name in names}
    _drop_what_depends(base, explicit)
    ranks = joined_ranks()
    chosen = {**base, **explicit}
    system = chosen.pop("system", "avgpipe")
    chosen.setdefault("stages", ranks if ranks is not None and ranks > 1 else DEFAULT_STAGES)
    plan = Plan.for_system(system, **with_sizes(system, chosen, batch_size))
    if ranks is not None and ranks not in (1, plan.workers):
        raise ValueError(f"{ranks} workers were started for a plan of {plan.workers}: start one for each")
    return plan


# Stored choices that depend on an overridden option; for a system also the options that it sets.
_DEPENDS = {
    "system": ("schedule", "weights", "replication", "placement", "advance"),
    "schedule": ("weights", "placement", "advance"),
    "stages": ("partition", "replication", "placement"),
    "replication": ("placement",),
}


def _drop_what_depends(base: dict[str, Any], explicit: dict[str, Any]) -> None:
    """Drop choices of a stored plan that depend on overridden options."""
    overridden = [name for name in _DEPENDS if name in base and explicit.get(name, base[name]) != base[name]]
    dropped = {dependent for name in overridden for dependent in _DEPENDS[name]}
    if "system" in overridden:
        dropped.update(SYSTEMS[explicit["system"]])
    if "stages" in overridden and isinstance(base.get("advance"), list | tuple):
        dropped.add("advance")  # one number per stage
    if explicit.get("pipelines") == 1:
        dropped.add("isolate")  # there is no other pipeline
    for name in dropped:
        base.pop(name, None)


# ---- checks before a worker starts and before anything is written ----------------------------------------------------


def check_run(config: TrainConfig) -> None:
    """Refuse what would fail later: folder, device, data, model, checkpoint. ValueError, CheckpointError or OSError."""
    check_folder(config)
    check_device(config.device)
    check_loggers(config.logger)
    from avgpipe.model.layers import layers_of
    from avgpipe.model.model import Model

    workload, plan = prepare(config)
    if config.target is not None and workload.valid_batches is None:
        raise ValueError(
            f"target {config.target}: {workload.label} has nothing to validate on: give it held_out"
        )
    model = Model.cut(workload.layers, layers_of(workload.layers), plan.stages, plan.partition)
    if config.resume:
        newest(config.checkpoints, lambda path: verify_checkpoint(path, model.signature()))


def prepare(config: TrainConfig) -> tuple[Workload, Plan]:
    """Return the workload, and the plan with a cut: the configured one, else balanced by the costs of layers."""
    from avgpipe.model.model import stage_bounds
    from avgpipe.tasks import build_workload

    plan = config.to_plan()
    workload = build_workload(config.workload, config.build_options(plan))
    if plan.partition is None and isinstance(workload.layers, list):
        plan = replace(plan, partition=tuple(stage_bounds(workload.layers, plan.stages, None)[1:-1]))
    return workload, plan


def autocast_of(config: WorkloadOptions, workload: Workload) -> torch.dtype | None:
    """Return the dtype for ``torch.autocast``, None for none."""
    return workload.autocast.get(config.device) if config.autocast == "auto" else dtype_of(config.autocast)


def profile_options(config: WorkloadOptions, workload: Workload) -> dict[str, Any]:
    """Return the arguments of a profile that a workload needs."""
    return {
        "loss_fn": workload.loss_fn,
        "optimizer": workload.optimizer,
        "clip_grad_norm": workload.clip_grad_norm,
        "autocast": autocast_of(config, workload),
        "device": config.device,
    }


def pipeline_options(config: WorkloadOptions, workload: Workload) -> dict[str, Any]:
    """Return the arguments of a pipeline that a workload needs."""
    from avgpipe.options import BitChecks, Precision, Source

    options = profile_options(config, workload)
    autocast = options.pop("autocast")
    extensions: list[Extension] = [Source(loss_weight=workload.loss_weight)]
    if isinstance(config, TrainConfig):
        precision = Precision(
            autocast=autocast, wire_dtype=dtype_of(config.wire_dtype), skip_nonfinite=config.skip_nonfinite
        )
        extensions += [precision, BitChecks(every=config.verify_every, wire=config.verify_wire)]
        options |= {name: getattr(config, name) for name in ("seed", "timeout_s", "link")}
        options["lr_scheduler"] = workload.lr_scheduler
    else:
        extensions.append(Precision(autocast=autocast))
    return {**options, "extensions": extensions}


def dtype_of(name: str) -> torch.dtype | None:
    """Return the dtype of an option's value, None for "none"."""
    import torch

    return None if name == "none" else getattr(torch, name)


def check_folder(config: TrainConfig) -> None:
    """Refuse a folder that cannot be written to, or that holds another run."""
    out = Path(config.out)
    if out.exists() and not out.is_dir():
        raise ValueError(f"--out {out} is a file: name a folder")
    if config.resume:
        if not has_checkpoint(out):
            raise CheckpointError(
                f"--resume: no checkpoint in {config.checkpoints / LAST}; "
                "leave out --resume and name a new --out to start a new run"
            )
        newest(config.checkpoints, Manifest.read)
        return
    if config.is_restart:
        return
    found = next((name for name in _PARTS_OF_A_RUN if (out / name).exists()), None)
    if found is not None:
        raise ValueError(
            f"--out {out} holds another run ({found}): add --resume to continue it, or name another folder"
        )
    nearest_folder = next(folder for folder in (out, *out.absolute().parents) if folder.exists())
    if not nearest_folder.is_dir() or not os.access(nearest_folder, os.W_OK):
        raise ValueError(
            f"--out {out} cannot be created: {nearest_folder} is not a folder that you may write to"
        )


def check_device(device: str) -> None:
    from avgpipe.device import own_device

    try:
        own_device(device)
    except ValueError as error:
        why = str(error).partition(": ")[2]
        raise ValueError(f"--device {device}: {why}; see avgpipe doctor") from None


def with_sizes(system: str, options: Mapping[str, Any], batch_size: int) -> dict[str, Any]:
    """Return the options of a plan with the default pipelines and micro-batches, where a system leaves them open.

    Args:
        system: Name of the system.
        options: The options that were given, with ``stages``.
        batch_size: Samples of a batch.
    """
    fixed_ones, found = SYSTEMS[system], dict(options)
    if "pipelines" not in fixed_ones:
        found.setdefault("pipelines", DEFAULT_PIPELINES)
    if "micro_batches" not in fixed_ones:
        # They only keep stages busy.
        wanted = 1 if "stages" in fixed_ones else min(DEFAULT_MICRO_BATCHES, batch_size)
        stages = options["stages"]
        replication = options.get("replication", row(system, stages).get("replication"))
        found.setdefault("micro_batches", micro_batches(system, stages, replication, wanted))
    return found
