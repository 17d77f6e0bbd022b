"""Reading a checkpoint under any plan.

Under the plan that wrote it a run goes on bit for bit. Otherwise weights, buffers, optimizer states and learning-
rate schedules are carried over by parameter name: with the same number of pipelines each has its own again, else
all begin at the reference with the optimizer state of a saved pipeline, as one does whose own weights are not finite;
an unfinished round of averaging is dropped.
"""

from __future__ import annotations

import copy
import json
import logging
from collections.abc import Collection, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from avgpipe.checkpoint.folder import agreed
from avgpipe.checkpoint.manifest import Gone, Manifest, read_text
from avgpipe.checkpoint.save import carries, parameter_names
from avgpipe.elastic import ElasticAveraging, Layout
from avgpipe.errors import CheckpointError, reason
from avgpipe.plan import Plan
from avgpipe.runtime.model import Model
from avgpipe.runtime.trained_stage import TrainedStage
from avgpipe.runtime.worker import Worker

_log = logging.getLogger("avgpipe")
# Options of the plan that must be the same for a run to go on bit for bit.
_SAME = ("stages", "pipelines", "rule", "staleness", "period", "alpha", "weights", "replication", "spread")


@dataclass(frozen=True)
class FoundCheckpoint:
    """What a process needs of a checkpoint, read and checked.

    Attributes:
        contents: by stage replica, under the plan that wrote the checkpoint.
        saved: all of it by name, under another plan.
    """

    manifest: Manifest
    directory: Path
    contents: dict[int, dict[str, Any]] | None
    saved: _SavedStages | None

    def is_finite(self) -> bool:
        """Whether all replicas may go on; what is read by name is mended, and a single pipeline is as it is."""
        if self.manifest.plan["pipelines"] == 1 or self.contents is None:
            return True
        replicas = [r for content in self.contents.values() for r in content["replicas"].values()]
        return all(_is_finite(replica["weights"]) for replica in replicas)


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
) -> FoundCheckpoint:
    manifest.check_model(model.signature(), directory)
    options = json.loads(plan.to_json())
    same = manifest.bounds == model.bounds and all(manifest.plan[n] == options[n] for n in _SAME)
    if exactly and same:
        contents = {number: _read_whole(manifest, directory, worker, number) for number in worker.held}
        return FoundCheckpoint(manifest, directory, contents, None)
    saved = _SavedStages([_read(manifest, directory, n, lazily=True) for n in range(len(manifest.files))])
    return FoundCheckpoint(manifest, directory, None, saved)


def _is_finite(weights: dict[str, torch.Tensor]) -> bool:
    return all(bool(value.isfinite().all()) for value in weights.values())


def restore_checkpoint(found: FoundCheckpoint, model: Model, worker: Worker) -> int:
    """Restore, and return the number of batches that the saved run had begun.

    A failure leaves ``worker`` half restored.
    """
    try:
        for number in worker.held:
            if found.contents is not None:
                _restore_exactly(found.contents[number], model, worker, number)
            else:
                assert found.saved is not None
                _restore_by_name(found.saved, model, worker, number)
    except (LookupError, TypeError, ValueError, AttributeError, StopIteration, RuntimeError) as error:
        raise CheckpointError(
            f"the checkpoint in {found.directory} does not fit: {type(error).__name__}: {reason(error)}; use the "
            "optimizer and schedule that were saved, or another checkpoint"
        ) from error
    worker.world.barrier()
    return found.manifest.batches


def _read_whole(manifest: Manifest, directory: Path, worker: Worker, number: int) -> dict[str, Any]:
    """Read all that a stage replica needs: its own file, and the first replica's if it is another one."""
    stage, _, group = worker.placement.replicas[number]
    first = worker.placement.replicas_of(stage, group)[0]
    content = _read(manifest, directory, first, lazily=False)
    if number != first:
        own = _read(manifest, directory, number, lazily=False)
        for i, replica in content["replicas"].items():
            replica.update(own["replicas"][i])
    return content


def _read(manifest: Manifest, directory: Path, number: int, *, lazily: bool) -> dict[str, Any]:
    """Read the file of a stage replica. ``lazily``: its tensors are views of the file, read when they are copied."""
    with manifest.open(directory, number) as file:
        # By its descriptor, which outlives the name: the checkpoint may be replaced meanwhile.
        path = f"/dev/fd/{file.fileno()}"
        try:
            content = torch.load(path, map_location="cpu", weights_only=True, mmap=lazily)
            _check_content(content, manifest.signature, manifest.pipelines_in(number))
        except Exception as error:
            raise CheckpointError(
                f"corrupt checkpoint: {directory / manifest.files[number][0]} does not load ({reason(error)}); use "
                "another one"
            ) from error
    return content  # type: ignore[no-any-return]


@torch.no_grad()
def _restore_exactly(content: dict[str, Any], model: Model, worker: Worker, number: int) -> None:
    k, reference = worker.placement.stage_of(number), worker.references[number]
    if reference is not None:
        pipeline = worker.placement.pipelines_of(number)[0]
        _put_in_place(content, worker.trained[number, pipeline].arena.layout)
        reference.load_state_dict(content["reference"]["state"])
    for i, saved in content["replicas"].items():
        trained = worker.trained[number, i]
        if trained.optimizer is not None:  # first: another optimizer than the saved one may refuse its state
            trained.optimizer.load_state_dict(saved["optimizer"]["state"])
        if trained.lr_scheduler is not None and saved["lr_scheduler"] is not None:
            trained.lr_scheduler.load_state_dict(saved["lr_scheduler"])
        _restore(trained, model, k, saved["weights"], saved["rest"], saved["loss_scale"], saved["older"])
        _restore_carries(trained, saved["carry"])


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


class _SavedStages:
    """The files of all saved stage replicas, merged by name."""

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
def _restore_by_name(saved: _SavedStages, model: Model, worker: Worker, number: int) -> None:
    k = worker.placement.stage_of(number)
    names = model.trainable[k]
    reference, weights = worker.references[number], saved.reference()
    pipelines = worker.placement.pipelines_of(number)
    of_all = worker.placement.pipelines
    if reference is not None:
        views = worker.trained[number, pipelines[0]].arena.layout.tensors(reference.parameters)
        for name, view in zip(names, views):
            view.copy_(weights[name])
    for i in pipelines:
        trained, source = worker.trained[number, i], i % saved.pipelines
        goes_on = of_all == saved.pipelines and source in saved.finite
        if source not in saved.finite:
            source = next(iter(saved.finite), source)
        own = saved.replica(source, "weights") if goes_on and of_all > 1 else weights
        _restore(trained, model, k, own, saved.replica(source, "rest"), saved.loss_scale(source), {})
        _restore_optimizer(trained, names, *saved.optimizer(source))
        if goes_on:
            _restore_carries(trained, saved.carry(source))


def _restore_optimizer(
    trained: TrainedStage,
    names: list[str],
    states: dict[str, Any],
    groups: list[dict[str, Any]],
    lr_scheduler: Any,
) -> None:
    if trained.optimizer is None:
        return
    inner = trained.optimizer.inner if isinstance(trained.optimizer, ElasticAveraging) else trained.optimizer
    current = inner.state_dict()
    if len(groups) == len(current["param_groups"]):
        for mine, theirs in zip(current["param_groups"], groups):
            mine.update({key: value for key, value in theirs.items() if key != "params"})
    order = parameter_names(trained, names)
    # copies: a tied parameter's state goes to several stages, and a saved pipeline's to several new ones
    current["state"] = {n: copy.deepcopy(states[name]) for n, name in enumerate(order) if name in states}
    inner.load_state_dict(current)
    if trained.lr_scheduler is not None and lr_scheduler is not None:
        trained.lr_scheduler.load_state_dict(lr_scheduler)


def _restore(
    trained: TrainedStage,
    model: Model,
    k: int,
    weights: dict[str, torch.Tensor],
    rest: dict[str, torch.Tensor],
    loss_scale: dict[str, Any] | None,
    older: dict[int, dict[str, torch.Tensor]],
) -> None:
    """Copy what a pipeline's stage ``k`` consists of. ``rest``: frozen parameters and buffers."""
    names, layout = model.trainable[k], trained.arena.layout
    for name, view in zip(names, layout.tensors(trained.arena.weights)):
        view.copy_(weights[name])
    if trained.versions is not None:
        buffers = {behind: layout.zeros() for behind in older}
        for behind, values in older.items():
            for name, view in zip(names, buffers[behind].tensors()):
                view.copy_(values[name])
        trained.versions.restore({behind: buffer.flats for behind, buffer in buffers.items()})
    state = trained.stage.layers.state_dict(keep_vars=True)
    for entry in model.entries[k]:
        if entry.arena is None and entry.names[0] in rest:
            state[entry.local].data.copy_(rest[entry.names[0]])
    if trained.loss_scale is not None and loss_scale is not None:
        trained.loss_scale.load_state_dict(loss_scale)


def _restore_carries(trained: TrainedStage, values: dict[str, Any]) -> None:
    device = trained.stage.device
    for place, carry in carries(trained).items():
        carry.values = {
            m: torch.utils._pytree.tree_map(lambda t: t.to(device).clone(), value)
            for m, value in values.get(place, {}).items()
        }


# ---- what a file may hold ----------------------------------------------------------------------------------------

_REPLICA = {"weights", "rest", "carry", "older", "optimizer", "lr_scheduler", "loss_scale"}


def _check_content(content: Any, signature: Mapping[str, list[Any]], pipelines: Collection[int]) -> None:
    """Raise ValueError for what no save has written.

    Args:
        signature: shape and dtype by tensor name.
        pipelines: whose replicas the file has.
    """
    replicas = _a(dict, _a(dict, content, "the content").get("replicas"), "'replicas'")
    if replicas.keys() != set(pipelines):
        raise ValueError(f"it has replicas of pipelines {list(replicas)}, not of {list(pipelines)}")
    whole = "reference" in content
    for i, replica in replicas.items():
        expected = _REPLICA if whole else {"carry"}
        if _a(dict, replica, f"replica {i}").keys() != expected:
            raise ValueError(f"replica {i} has {sorted(map(str, replica))}, not {sorted(expected)}")
        _a(dict, replica["carry"], "'carry'")
        if whole:
            _check_replica(replica, signature)
    if whole and content["reference"] is not None:
        reference = _a(dict, content["reference"], "'reference'")
        _check_tensors(reference.get("weights"), signature)
        _a(dict, reference.get("state"), "the state of the reference")


def _check_replica(replica: dict[str, Any], signature: Mapping[str, list[Any]]) -> None:
    _check_tensors(replica["weights"], signature)
    _check_tensors(replica["rest"], signature)
    for behind, weights in _a(dict, replica["older"], "'older'").items():
        _a(int, behind, "a version")
        _check_tensors(weights, signature)
    if replica["optimizer"] is not None:
        optimizer = _a(dict, replica["optimizer"], "'optimizer'")
        _a(dict, optimizer.get("state"), "the state of the optimizer")
        _a(list, optimizer.get("names"), "the names of the optimizer's parameters")
    for name in ("lr_scheduler", "loss_scale"):
        if replica[name] is not None:
            _a(dict, replica[name], f"{name!r}")


def _check_tensors(values: Any, signature: Mapping[str, list[Any]]) -> None:
    for name, value in _a(dict, values, "a list of tensors").items():
        found = [list(value.shape), str(value.dtype)[6:]] if isinstance(value, torch.Tensor) else None
        if found is None or signature.get(name) != found:
            raise ValueError(f"{name!r} is {found}, and {signature.get(name)} in the manifest")


def _a(kind: type, value: Any, what: str) -> Any:
    if not isinstance(value, kind):
        raise ValueError(f"{what} is a {type(value).__name__}, not a {kind.__name__}")
    return value
