"""Reading a checkpoint under any plan.

Under the plan that wrote it a run goes on bit for bit. Otherwise weights, buffers, optimizer states and learning-
rate schedules are carried over by parameter name: with the same number of pipelines each has its own again, else
all begin at the reference with the optimizer state of a saved pipeline, as one does whose own weights are not finite;
an unfinished round of averaging is dropped.
"""

from __future__ import annotations

import copy
import logging
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from avgpipe.checkpoint.agreement import agreed
from avgpipe.checkpoint.content import check_content
from avgpipe.checkpoint.manifest import Gone, Manifest, read_text
from avgpipe.checkpoint.save import carries, parameter_names
from avgpipe.elastic import ElasticAveraging, Layout
from avgpipe.errors import CheckpointError, reason
from avgpipe.plan import Plan
from avgpipe.runtime.model import Model
from avgpipe.runtime.trained_stage import TrainedStage
from avgpipe.runtime.worker import Worker

_log = logging.getLogger("avgpipe")
_SAME = ("stages", "pipelines", "rule", "staleness", "period", "alpha", "weights", "replication", "spread")


@dataclass(frozen=True)
class Found:
    """What a process needs of a checkpoint, read and checked. ``contents``: by seat, under the plan that wrote it."""

    manifest: Manifest
    directory: Path
    contents: dict[int, dict[str, Any]] | None
    saved: _Saved | None

    def is_finite(self) -> bool:
        """Whether all replicas may go on; what is read by name is mended, and a single pipeline is as it is."""
        if self.manifest.plan["pipelines"] == 1 or self.contents is None:
            return True
        replicas = [r for content in self.contents.values() for r in content["replicas"].values()]
        return all(_is_finite(replica["weights"]) for replica in replicas)


def read_checkpoint(directory: Path, model: Model, worker: Worker, plan: Plan) -> Found:
    """CheckpointError on every rank if one of them cannot; nothing has changed then."""
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
            return "replaced"  # by another checkpoint: the next look finds another manifest
        return "whole" if found.is_finite() else "not finite"

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
            "one; train with skip_nonfinite=True, clip_grad_norm or a lower learning rate",
            directory,
        )
    assert found is not None
    return found


def _read_all(
    manifest: Manifest, directory: Path, model: Model, worker: Worker, plan: Plan, exactly: bool
) -> Found:
    manifest.check_model(model.signature(), directory)
    same = manifest.bounds == model.bounds and all(manifest.plan[n] == getattr(plan, n) for n in _SAME)
    if exactly and same:
        contents = {seat: _read_whole(manifest, directory, worker, seat) for seat in worker.held}
        return Found(manifest, directory, contents, None)
    saved = _Saved([_read(manifest, directory, n, lazily=True) for n in range(len(manifest.files))])
    return Found(manifest, directory, None, saved)


def _is_finite(weights: dict[str, torch.Tensor]) -> bool:
    return all(bool(value.isfinite().all()) for value in weights.values())


def restore_checkpoint(found: Found, model: Model, worker: Worker) -> int:
    """Returns the number of batches that the saved run had begun. A failure leaves ``worker`` half restored."""
    try:
        for seat in worker.held:
            if found.contents is not None:
                _restore_exactly(found.contents[seat], model, worker, seat)
            else:
                assert found.saved is not None
                _restore_by_name(found.saved, model, worker, seat)
    except (LookupError, TypeError, ValueError, AttributeError, StopIteration, RuntimeError) as error:
        raise CheckpointError(
            f"the checkpoint in {found.directory} does not fit: {type(error).__name__}: {reason(error)}; use the "
            "optimizer and schedule that were saved, or another checkpoint"
        ) from error
    worker.world.barrier()
    return found.manifest.batches


def _read_whole(manifest: Manifest, directory: Path, worker: Worker, seat: int) -> dict[str, Any]:
    """All that a seat needs: its own file's, and the first replica's if it is another one."""
    stage, _, group = worker.placement.replicas[seat]
    first = worker.placement.replicas_of(stage, group)[0]
    content = _read(manifest, directory, first, lazily=False)
    if seat != first:
        own = _read(manifest, directory, seat, lazily=False)
        for i, replica in content["replicas"].items():
            replica.update(own["replicas"][i])
    return content


def _read(manifest: Manifest, directory: Path, number: int, *, lazily: bool) -> dict[str, Any]:
    """Content of a saved seat. ``lazily``: its tensors are views of the file, read when they are copied."""
    with manifest.open(directory, number) as file:
        # By its descriptor, which outlives the name: the checkpoint may be replaced meanwhile.
        path = f"/dev/fd/{file.fileno()}"
        try:
            content = torch.load(path, map_location="cpu", weights_only=True, mmap=lazily)
            check_content(content, manifest.signature, manifest.pipelines_in(number))
        except Exception as error:
            raise CheckpointError(
                f"corrupt checkpoint: {directory / manifest.files[number][0]} does not load ({reason(error)}); use "
                "another one"
            ) from error
    return content  # type: ignore[no-any-return]


@torch.no_grad()
def _restore_exactly(content: dict[str, Any], model: Model, worker: Worker, seat: int) -> None:
    k, reference = worker.placement.stage_of(seat), worker.references[seat]
    if reference is not None:
        pipeline = worker.placement.pipelines_of(seat)[0]
        _put_in_place(content, worker.trained[seat, pipeline].arena.layout)
        reference.load_state_dict(content["reference"]["state"])
    for i, saved in content["replicas"].items():
        replica = worker.trained[seat, i]
        if replica.optimizer is not None:  # first: another optimizer than the saved one may refuse its state
            replica.optimizer.load_state_dict(saved["optimizer"]["state"])
        if replica.lr_scheduler is not None and saved["lr_scheduler"] is not None:
            replica.lr_scheduler.load_state_dict(saved["lr_scheduler"])
        _copy_weights(replica, model.trainable[k], saved["weights"])
        _restore_versions(replica, model.trainable[k], saved["older"])
        _copy_rest(replica, model, k, saved["rest"])
        _restore_loss_scale(replica, saved.get("loss_scale"))
        _restore_carries(replica, saved["carry"])


def _put_in_place(content: dict[str, Any], layout: Layout) -> None:
    """Bring the saved flat buffers into ``layout``: the saving run's model may have had other strides."""
    saved = Layout(next(iter(content["replicas"].values()))["weights"].values())

    def moved(flats: list[torch.Tensor]) -> list[torch.Tensor]:
        buffers = layout.zeros()
        for mine, value in zip(buffers.tensors(), saved.tensors(flats)):
            mine.copy_(value)
        return buffers.flats

    state = content["reference"]["state"]
    state["parameters"] = moved(state["parameters"])
    state["pending"] = {i: moved(update) for i, update in state["pending"].items()}
    for replica in content["replicas"].values():
        elastic = replica["optimizer"]["state"]["elastic"]
        if elastic["start"] is not None:
            elastic["start"] = moved(elastic["start"])


class _Saved:
    """The files of all saved seats, merged by name."""

    def __init__(self, contents: list[dict[str, Any]]) -> None:
        self._all = contents
        self.contents = [content for content in contents if "reference" in content]  # of each stage
        self.pipelines = 1 + max(i for content in contents for i in content["replicas"])
        self.finite = [i for i in range(self.pipelines) if _is_finite(self.replica(i, "weights"))]

    def reference(self) -> dict[str, torch.Tensor]:
        merged: dict[str, torch.Tensor] = {}
        for content in self.contents:
            source = (
                content["reference"] or content["replicas"][0]
            )  # without a reference there is one pipeline
            merged.update(source["weights"])
        return merged

    def replica(self, i: int, what: str) -> dict[str, Any]:
        """``weights`` or ``rest`` of a pipeline over all stages."""
        merged: dict[str, Any] = {}
        for content in self.contents:
            merged.update(content["replicas"].get(i, {}).get(what, {}))
        return merged

    def carry(self, i: int) -> dict[str, dict[int, Any]]:
        """What a pipeline carries, by place and micro-batch."""
        merged: dict[str, dict[int, Any]] = {}
        for content in self._all:
            for place, values in content["replicas"].get(i, {}).get("carry", {}).items():
                merged.setdefault(place, {}).update(values)
        return merged

    def loss_scale(self, i: int) -> dict[str, Any] | None:
        """That of a pipeline, which its last stage holds."""
        held = [content["replicas"].get(i, {}).get("loss_scale") for content in self.contents]
        return next((state for state in held if state is not None), None)

    def optimizer(self, i: int) -> tuple[dict[str, Any], list[dict[str, Any]], Any]:
        """State by parameter name, settings of the parameter groups, and the learning-rate schedule's state."""
        states: dict[str, Any] = {}
        groups: list[dict[str, Any]] = []
        lr_scheduler = None
        for content in self.contents:
            replica = content["replicas"].get(i)
            if replica is None or replica["optimizer"] is None:
                continue
            state, names = replica["optimizer"]["state"], replica["optimizer"]["names"]
            states.update({names[n]: value for n, value in state["state"].items()})
            groups = groups or state["param_groups"]
            lr_scheduler = lr_scheduler or replica["lr_scheduler"]
        return states, groups, lr_scheduler


@torch.no_grad()
def _restore_by_name(saved: _Saved, model: Model, worker: Worker, seat: int) -> None:
    k = worker.placement.stage_of(seat)
    names = model.trainable[k]
    reference, weights = worker.references[seat], saved.reference()
    pipelines = worker.placement.pipelines_of(seat)
    of_all = worker.placement.pipelines
    if reference is not None:
        views = worker.trained[seat, pipelines[0]].arena.layout.tensors(reference.parameters)
        for name, view in zip(names, views):
            view.copy_(weights[name])
    for i in pipelines:
        replica, source = worker.trained[seat, i], i % saved.pipelines
        goes_on = of_all == saved.pipelines and source in saved.finite
        if source not in saved.finite:
            source = next(iter(saved.finite), source)
        own = saved.replica(source, "weights") if goes_on and of_all > 1 else weights
        _copy_weights(replica, names, own)
        _restore_versions(replica, names, {})
        _copy_rest(replica, model, k, saved.replica(source, "rest"))
        _restore_optimizer(replica, names, *saved.optimizer(source))
        _restore_loss_scale(replica, saved.loss_scale(source))
        if goes_on:
            _restore_carries(replica, saved.carry(source))


def _restore_optimizer(
    replica: TrainedStage,
    names: list[str],
    states: dict[str, Any],
    groups: list[dict[str, Any]],
    lr_scheduler: Any,
) -> None:
    if replica.optimizer is None:
        return
    inner = replica.optimizer.inner if isinstance(replica.optimizer, ElasticAveraging) else replica.optimizer
    current = inner.state_dict()
    if len(groups) == len(current["param_groups"]):
        for mine, theirs in zip(current["param_groups"], groups):
            mine.update({key: value for key, value in theirs.items() if key != "params"})
    order = parameter_names(replica, names)
    # copies: a tied parameter's state goes to several stages, and a saved pipeline's to several new ones
    current["state"] = {n: copy.deepcopy(states[name]) for n, name in enumerate(order) if name in states}
    inner.load_state_dict(current)
    if replica.lr_scheduler is not None and lr_scheduler is not None:
        replica.lr_scheduler.load_state_dict(lr_scheduler)


def _copy_weights(replica: TrainedStage, names: list[str], values: dict[str, torch.Tensor]) -> None:
    for name, view in zip(names, replica.arena.layout.tensors(replica.arena.weights)):
        view.copy_(values[name])


def _restore_versions(
    replica: TrainedStage, names: list[str], older: dict[int, dict[str, torch.Tensor]]
) -> None:
    if replica.versions is None:
        return
    layout = replica.arena.layout
    buffers = {behind: layout.zeros() for behind in older}
    for behind, values in older.items():
        for name, view in zip(names, buffers[behind].tensors()):
            view.copy_(values[name])
    replica.versions.restore({behind: buffer.flats for behind, buffer in buffers.items()})


def _copy_rest(replica: TrainedStage, model: Model, k: int, values: dict[str, torch.Tensor]) -> None:
    """Frozen parameters and buffers."""
    state = replica.stage.layers.state_dict(keep_vars=True)
    for entry in model.entries[k]:
        if entry.arena is None and entry.names[0] in values:
            state[entry.local].data.copy_(values[entry.names[0]])


def _restore_loss_scale(replica: TrainedStage, state: dict[str, Any] | None) -> None:
    if replica.loss_scale is not None and state is not None:
        replica.loss_scale.load_state_dict(state)


def _restore_carries(replica: TrainedStage, values: dict[str, Any]) -> None:
    device = replica.stage.device
    for place, carry in carries(replica).items():
        carry.values = {
            m: torch.utils._pytree.tree_map(lambda t: t.to(device).clone(), value)
            for m, value in values.get(place, {}).items()
        }
