"""Reads a checkpoint under any plan.

Under the plan that wrote it a run resumes bit for bit. Otherwise weights, buffers, optimizer states and
learning- rate schedules are transferred by parameter name: with the same number of pipelines each has its own
again, else all begin at the reference with the optimizer state of a saved pipeline, as does one whose own
weights are not finite; an unfinished round of averaging is dropped.
"""

from __future__ import annotations

import copy
import json
import logging
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import nullcontext
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from avgpipe.checkpoint.content import carries, parameter_names, put_together
from avgpipe.checkpoint.fitting import (
    KERNELS,
    check_counts,
    check_scale,
    check_schedule,
    loading,
    with_own_kernels,
)
from avgpipe.checkpoint.folder import agreed
from avgpipe.checkpoint.manifest import Gone, Manifest, read_text
from avgpipe.elastic.flat import Layout
from avgpipe.elastic.optimizer import EXTRA_KEY
from avgpipe.errors import CheckpointError, reason
from avgpipe.model.model import Model
from avgpipe.plan import Plan
from avgpipe.runtime.several import rescheduled
from avgpipe.runtime.trained_stage import TrainedStage
from avgpipe.runtime.worker import Worker

_log = logging.getLogger("avgpipe")
# Options of the plan that must be equal for a run to resume bit for bit.
_SAME = ("stages", "pipelines", "rule", "staleness", "period", "alpha", "weights", "replication", "spread")
_STATES = ("optimizer", "lr_scheduler", "loss_scale")
OF_STAGE = ("params", "param_names")  # in an optimizer's group, the entries that differ from stage to stage


class SavedStages:
    """Contents of files of stage replicas, merged by name: all of a checkpoint, or those of one stage.

    ``exactly``: whether they are restored bit for bit, by stage; else by name.
    """

    def __init__(self, contents: list[dict[str, Any]], exactly: bool) -> None:
        self._all, self.exactly = contents, exactly
        self._whole = [content for content in contents if "reference" in content]  # one of each stage
        self.pipelines = sorted({i for content in contents for i in content["replicas"]})
        weights = {i: self.replica(i, "weights").values() for i in self.pipelines}
        self.finite = [i for i in weights if all(bool(value.isfinite().all()) for value in weights[i])]

    @property
    def averaging(self) -> dict[str, Any]:
        """The state of one stage's reference."""
        return self._whole[0]["reference"]["state"]  # type: ignore[no-any-return]

    def replicas(self, i: int) -> list[dict[str, Any]]:
        """Return a pipeline's saved replicas, stage by stage."""
        return [content["replicas"][i] for content in self._whole if i in content["replicas"]]

    def replica(self, i: int, what: str) -> dict[str, Any]:
        """Return ``weights`` or ``rest`` of a pipeline."""
        return {name: value for replica in self.replicas(i) for name, value in replica[what].items()}

    def reference(self) -> dict[str, torch.Tensor]:
        """Return the weights that all begin at: without a reference, those of the single pipeline."""
        sources = [c["reference"] or next(iter(c["replicas"].values())) for c in self._whole]
        return {name: value for source in sources for name, value in source["weights"].items()}

    def ema(self) -> tuple[dict[str, torch.Tensor], int] | None:
        """Return the average over updates, and their number; None if none was kept."""
        found = [content["ema"] for content in self._whole if "ema" in content]
        if not found:
            return None
        return {name: value for of in found for name, value in of["weights"].items()}, found[0]["updates"]

    def carry(self, i: int) -> dict[str, dict[int, Any]]:
        """Return a pipeline's carried state, by place and micro-batch."""
        merged: dict[str, dict[int, Any]] = {}
        for content in self._all:
            for place, values in content["replicas"].get(i, {}).get("carry", {}).items():
                merged.setdefault(place, {}).update(values)
        return merged

    def first(self, i: int, what: str) -> Any:
        """Return the state ``what`` of a pipeline's first stage that has it."""
        return next((replica[what] for replica in self.replicas(i) if replica[what] is not None), None)


@dataclass(frozen=True)
class FoundCheckpoint:
    """The part of a checkpoint that a process needs, read and checked.

    Attributes:
        batches: How many the saved run had begun.
        saved: The source of each of the process's stage replicas: all exact, or none.
    """

    directory: Path
    batches: int
    saved: dict[int, SavedStages]


def read_checkpoint(directory: Path, model: Model, worker: Worker, plan: Plan) -> FoundCheckpoint:
    """Read what this rank needs; CheckpointError on every rank if one of them cannot. Nothing changes."""
    what, world = f"nothing was loaded from {directory}", worker.world
    before = text = ""
    exactly, found = True, None

    def look() -> str:
        nonlocal found
        try:
            found = _read_all(Manifest.parse(text, directory), directory, model, worker, plan, exactly)
        except Gone:
            if text == before:
                raise
            return "replaced"  # by another checkpoint: the next attempt reads another manifest
        # Restoring by name repairs it, and a single pipeline resumes unchanged.
        strict = [saved for saved in found.saved.values() if saved.exactly and plan.pipelines > 1]
        return "whole" if all(saved.finite == saved.pipelines for saved in strict) else "not finite"

    while True:
        text = agreed(world, what, lambda: read_text(directory) if world.rank == 0 else "")[0]
        outcomes = set(agreed(world, what, look))
        if outcomes == {"whole"}:
            break
        before = text if "replaced" in outcomes else ""
        exactly = exactly and "not finite" not in outcomes
    if not exactly and world.rank == 0:
        _log.warning(
            "replicas in %s have infinities or NaN: they begin at the reference, with the optimizer state of a finite "
            "one; train with Precision(skip_nonfinite=True), clip_grad_norm or a lower learning rate",
            directory,
        )
    assert found is not None
    return found


def _read_all(
    manifest: Manifest, directory: Path, model: Model, worker: Worker, plan: Plan, exactly: bool
) -> FoundCheckpoint:
    manifest.check_model(model.signature(), directory)
    options = json.loads(plan.to_json())
    same = manifest.bounds == model.bounds and _what_must_be_same(manifest.plan) == _what_must_be_same(
        options
    )
    exactly = exactly and same

    def merged(files: Iterable[int]) -> SavedStages:
        contents = [_read(manifest, directory, n, lazily=not exactly) for n in files]
        if not any(trained.has_modes for trained in worker.trained.values()):
            _take_evaluated(contents)
        return SavedStages(contents, exactly)

    if exactly:
        saved = {n: merged(numbers) for n, numbers in _needed(worker).items()}
    else:
        saved = dict.fromkeys(worker.held, merged(range(len(manifest.files))))
    return FoundCheckpoint(directory, manifest.batches, saved)


def _needed(worker: Worker) -> dict[int, list[int]]:
    """Return the stage replicas whose contents restore each stage replica of this process, bit for bit.

    Its own, and the first replica's, which has what all replicas of a stage share.
    """
    places, replicas = worker.placement, worker.placement.replicas
    return {n: sorted({places.replicas_of(*replicas[n][::2])[0], n}) for n in worker.held}


def _take_evaluated(contents: list[dict[str, Any]]) -> None:
    """Make the weights those of evaluation, if the saved optimizers had others for training."""
    for replica in (replica for content in contents for replica in content["replicas"].values()):
        if "evaluated" in replica:
            replica["weights"] = replica["evaluated"]


def _read(manifest: Manifest, directory: Path, number: int, *, lazily: bool) -> dict[str, Any]:
    """Read the file of a stage replica. ``lazily``: its tensors are views of the file, read when they are copied."""
    with manifest.opened(directory, number) as file:
        # By its descriptor, which outlives the name: the checkpoint may be replaced meanwhile.
        path = f"/dev/fd/{file.fileno()}"
        try:
            content = torch.load(path, map_location="cpu", weights_only=True, mmap=lazily)
            if content["replicas"].keys() != set(manifest.pipelines_in(number)):
                raise ValueError(f"it has the pipelines {sorted(content['replicas'])}")
        except Exception as error:
            raise CheckpointError(
                f"corrupt checkpoint: {directory / manifest.files[number][0]} does not load ({reason(error)}); use "
                "another one"
            ) from error
    return content  # type: ignore[no-any-return]


def restore_checkpoint(found: FoundCheckpoint, model: Model, worker: Worker) -> int:
    """Restore, and return the number of batches that the saved run had begun.

    A failure leaves ``worker`` partly restored.
    """
    try:
        restore_stages(found.saved, model, worker)
    except (
        LookupError,
        TypeError,
        ValueError,
        AttributeError,
        StopIteration,
        RuntimeError,
        ArithmeticError,
    ) as error:
        raise CheckpointError(
            f"the checkpoint in {found.directory} does not fit: {type(error).__name__}: {reason(error)}; use the "
            "optimizer and schedule that were saved, or another checkpoint"
        ) from error
    worker.world.barrier()
    return found.batches


def restore(contents: Mapping[int, dict[str, Any]], model: Model, worker: Worker) -> None:
    """Restore this process's stage replicas bit for bit from contents in memory, which are not changed.

    ``contents``: by number of the stage replica, from a Snapshot of a pipeline with the same plan; with a
    replicated stage, also the first replica's.
    """
    own = {n: [_unshared(contents[m]) for m in numbers] for n, numbers in _needed(worker).items()}
    restore_stages({n: SavedStages(found, exactly=True) for n, found in own.items()}, model, worker)
    for (n, i), lane in worker.lanes.items():  # the run continues; after a load it begins at 0
        lane.update.skipped = contents[n]["replicas"][i].get("skipped", 0)


def _unshared(content: dict[str, Any]) -> dict[str, Any]:
    """Return a content with copies of the parts that a pipeline uses directly, not of those it copies."""
    replicas = {
        i: replica | {what: copy.deepcopy(replica[what]) for what in _STATES if what in replica}
        for i, replica in content["replicas"].items()
    }
    reference = content.get("reference")
    if reference is None:
        return content | {"replicas": replicas}
    averaging = reference["state"] | {"outer": copy.deepcopy(reference["state"]["outer"])}
    return content | {"replicas": replicas, "reference": reference | {"state": averaging}}


@torch.no_grad()
def restore_stages(saved: Mapping[int, SavedStages], model: Model, worker: Worker) -> None:
    """Restore stage replicas of this process from saved ones, by number."""
    for number, stages in saved.items():
        _restore_reference(stages, model, worker, number)
        for i in worker.placement.pipelines_of(number):
            _restore(stages, model, worker, number, i)
        _restore_ema(stages, model, worker, number)


def _what_must_be_same(plan: Mapping[str, Any]) -> list[Any]:
    """Return the options of a plan that must be equal for a run to resume bit for bit."""
    # Runs without this option had batches for each pipeline; for a single pipeline it has no effect.
    batch = plan.get("batch", "per-pipeline") if plan["pipelines"] > 1 else None
    return [batch, plan.get("correction"), *(plan[name] for name in _SAME)]


def _layout_of(worker: Worker, number: int) -> Layout:
    """Return the layout of a stage replica's weights, which is the same for all pipelines."""
    return worker.trained[number, worker.placement.pipelines_of(number)[0]].arena.layout


def _restore_ema(saved: SavedStages, model: Model, worker: Worker, number: int) -> None:
    """Continue the saved average; begin a new one if none was saved."""
    if (ema := worker.emas.get(number)) is None:
        return
    ema.restart(worker.weights(number, "reference"))
    if (found := saved.ema()) is not None:
        values, updates = found
        check_counts({"updates": updates}, "updates")
        ema.updates = updates
        names = model.trainable[worker.placement.stage_of(number)]
        _copy(values, names, _layout_of(worker, number).tensors(ema.flats))


def _restore_reference(saved: SavedStages, model: Model, worker: Worker, number: int) -> None:
    reference, k = worker.references[number], worker.placement.stage_of(number)
    if reference is None:
        return
    layout = _layout_of(worker, number)
    if saved.exactly:
        _put_in_place(saved, layout)
        state = saved.averaging
        check_counts(state, "round", "arrivals_in_round", "dropped_updates")
        if reference.outer is not None:
            state["outer"] = put_together(state["outer"], reference.outer)
        with nullcontext() if reference.outer is None else loading(reference.outer):
            reference.load_state_dict(state)
    else:
        _copy(saved.reference(), model.trainable[k], layout.tensors(reference.parameters))


def _put_in_place(saved: SavedStages, layout: Layout) -> None:
    """Move the saved flat buffers into ``layout``: the saving run's model may have had other strides."""
    theirs = Layout(saved.reference().values())

    def moved(flats: list[torch.Tensor]) -> list[torch.Tensor]:
        buffers = layout.zeros()
        for mine, value in zip(buffers.tensors(), theirs.tensors(flats)):
            mine.copy_(value)
        return buffers.flats

    state = saved.averaging
    state["parameters"] = moved(state["parameters"])
    state["pending"] = {i: moved(update) for i, update in state["pending"].items()}
    for replica in (replica for i in saved.pipelines for replica in saved.replicas(i)):
        elastic = replica["optimizer"]["state"]["elastic"]
        if elastic["start"] is not None:
            elastic["start"] = moved(elastic["start"])


def _restore(saved: SavedStages, model: Model, worker: Worker, number: int, pipeline: int) -> None:
    """Restore one pipeline's copy of a stage."""
    placement, trained = worker.placement, worker.trained[number, pipeline]
    k = placement.stage_of(number)
    names, layout = model.trainable[k], trained.arena.layout
    source, goes_on = pipeline, True
    if not saved.exactly:
        source = pipeline % len(saved.pipelines)
        goes_on = len(placement.pipelines) == len(saved.pipelines) and source in saved.finite
        if source not in saved.finite:
            source = next(iter(saved.finite), source)
    # First: an optimizer other than the saved one may refuse its state. A shared one is the same pipeline's.
    shared = trained.elastic is not None and trained.elastic.shares_state and not saved.exactly
    _restore_optimizer(trained, names, saved, next(iter(saved.finite), 0) if shared else source)
    restore_schedule(trained, saved.first(source, "lr_scheduler"), saved.exactly)
    if trained.loss_scale is not None and (scale := saved.first(source, "loss_scale")) is not None:
        check_scale(scale)
        trained.loss_scale.load_state_dict(scale)
    own = goes_on and len(placement.pipelines) > 1
    weights = saved.replica(source, "weights") if own else saved.reference()
    _copy(weights, names, layout.tensors(trained.arena.weights))
    if trained.elastic is not None and not saved.exactly:
        trained.elastic.replaced()
    if trained.versions is not None:
        older = saved.replicas(source)[0]["older"] if saved.exactly else {}
        buffers = {behind: layout.zeros().flats for behind in older}
        for behind, flats in buffers.items():
            _copy(older[behind], names, layout.tensors(flats))
        trained.versions.restore(buffers)
    rest, state = saved.replica(source, "rest"), trained.stage.layers.state_dict(keep_vars=True)
    for entry in model.entries[k]:
        if entry.arena is None and entry.names[0] in rest:
            state[entry.local].data.copy_(rest[entry.names[0]])
    if goes_on:
        carried = saved.carry(source)
        for place, carry in carries(trained).items():
            carry.values = {
                m: torch.utils._pytree.tree_map(lambda t: t.to(trained.stage.device).clone(), value)
                for m, value in carried.get(place, {}).items()
                if placement.replica_for(k, m, pipeline) == number  # the others' would become outdated here
            }


def _copy(values: dict[str, torch.Tensor], names: list[str], targets: list[torch.Tensor]) -> None:
    for name, target in zip(names, targets):
        value = values[name]
        if value.shape != target.shape or value.dtype != target.dtype:
            raise ValueError(
                f"{name!r} is {value.dtype} of shape {list(value.shape)} instead of {target.dtype} of shape "
                f"{list(target.shape)}"
            )
        target.copy_(value)


def restore_schedule(trained: TrainedStage, state: Any, exactly: bool) -> None:
    """Restore the learning-rate schedule, after the optimizer."""
    if trained.lr_scheduler is not None and trained.optimizer is not None and state is not None:
        inner = trained.elastic.inner if trained.elastic is not None else trained.optimizer
        fitting = state if exactly else rescheduled(state, inner)
        check_schedule(trained.lr_scheduler.state_dict(), fitting, trained.lr_scheduler)
        trained.lr_scheduler.load_state_dict(fitting)


def _restore_optimizer(trained: TrainedStage, names: list[str], saved: SavedStages, source: int) -> None:
    if trained.optimizer is None:
        return
    inner = trained.elastic.inner if trained.elastic is not None else trained.optimizer
    if saved.exactly:
        whole = saved.first(source, "optimizer")["state"]
        check_counts(whole.get(EXTRA_KEY, {}), "local_steps", "position")
        with loading(trained.optimizer):
            own_groups = with_own_kernels(inner, whole["param_groups"])
            state = put_together(whole["state"], inner)
            trained.optimizer.load_state_dict({**whole, "state": state, "param_groups": own_groups})
        return
    stages = [replica["optimizer"] for replica in saved.replicas(source) if replica["optimizer"] is not None]
    groups = {
        stage["names"][n]: group
        for stage in stages
        for group in stage["state"]["param_groups"]
        for n in group["params"]
    }
    states = {stage["names"][n]: value for stage in stages for n, value in stage["state"]["state"].items()}
    order = parameter_names(trained, inner, names)
    load_by_name(inner, order, groups, states, lambda state: put_together(copy.deepcopy(state), inner))
    if trained.elastic is not None:
        trained.elastic.restored()


def load_by_name(
    optimizer: torch.optim.Optimizer,
    order: Sequence[str],
    groups: Mapping[str, Mapping[str, Any]],
    states: Mapping[str, Any],
    copied: Callable[[Any], Any],
) -> None:
    """Load an optimizer's state from another division into stages.

    Args:
        order: names of the optimizer's parameters, in the order of numbers in its ``state_dict``.
        groups: by name of a parameter, the settings of the group that had it; a group gets those of its first one.
        states: by name of a parameter, its state.
        copied: copies a state: that of a tied parameter goes to several stages, a pipeline's to several ones.
    """
    current = optimizer.state_dict()
    for mine in current["param_groups"]:
        theirs: Mapping[str, Any] = next((groups[order[n]] for n in mine["params"] if order[n] in groups), {})
        for key, value in theirs.items():
            if key not in (*OF_STAGE, *KERNELS):
                now = mine.get(key)
                # A learning rate that is a tensor, as torchao's optimizers require, stays one.
                mine[key] = torch.as_tensor(value).to(now) if isinstance(now, torch.Tensor) else value
    current["state"] = {n: copied(states[name]) for n, name in enumerate(order) if name in states}
    with loading(optimizer):
        optimizer.load_state_dict(current)
