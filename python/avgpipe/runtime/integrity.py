"""Detects silent corruption: every ``every`` batches, it compares what must be equal, bit for bit.

- Copies of a parameter that several stages hold, and of a stage's replicas, in each pipeline; replicas'
  running statistics of BatchNorm; all frozen parameters.
- Copies of the reference, and of its average over time, if replicas or dedicated pipelines have their own.
- The outputs and gradients of each stage when one of its micro-batches runs twice, forward and backward.

No batch is in flight meanwhile, and the state afterwards is the same as before.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Iterable, Iterator, Sequence
from itertools import chain
from typing import Any, NamedTuple

import torch
from torch import nn

from avgpipe.device import has_streams
from avgpipe.elastic.flat import is_made_of_others
from avgpipe.errors import PipelineError
from avgpipe.links.codec import checksum
from avgpipe.links.link import detached, tensors_of, wanting_gradients
from avgpipe.model.batch import to_device
from avgpipe.model.context import CallerGenerators
from avgpipe.runtime.batch_norm import DeferredBatchNorm
from avgpipe.runtime.compute import Given, edges_of, run_backward
from avgpipe.runtime.lane import Lane
from avgpipe.runtime.loss import loss_of
from avgpipe.runtime.worker import Worker

_NAMED = 3  # of all differences
_REMEDY = (
    "memory or a device has changed bits, or code other than the optimizer has changed weights. Resume from an earlier "
    "checkpoint, and without that host if it happens again"
)


class Verification:
    """Compares after every ``every`` batches, or a few later: at the end of a round of ``per_round``."""

    def __init__(self, worker: Worker, every: int, per_round: int) -> None:
        self._worker, self._every, self._per_round = worker, every, per_round
        self._since = 0  # batches at the last comparison without a difference

    def resume(self, batches: int) -> None:
        """Continue with weights that were replaced, after ``batches`` in all."""
        self._since = batches
        for lane in self._worker.lanes.values():
            lane.compute.kept = None

    def is_due(self, batches: int) -> bool:
        """Whether to verify before another batch begins, after ``batches``."""
        return batches // self._every > self._since // self._every and batches % self._per_round == 0

    def keeps(self, batch: int, pipeline: int) -> bool:
        """Whether stages keep a micro-batch's input: one pipeline of each worker, in the round before."""
        placement = self._worker.placement
        is_first = pipeline == placement.pipelines[0] or placement.is_dedicated
        return is_first and self.is_due(batch - batch % self._per_round + self._per_round)

    def verify(self, batches: int) -> None:
        """Compare after ``batches``, none in flight; PipelineError on every rank names what differs."""
        worker = self._worker
        with CallerGenerators(worker.device):
            changed = [text for lane in worker.lanes.values() if (text := _unlike_itself(lane, worker))]
        copies, texts = zip(*worker.world.gather([list(_copies(worker)), changed]))
        problems = [*_unequal(worker, chain.from_iterable(copies)), *chain.from_iterable(texts)]
        if problems:
            more = f"; and {len(problems) - _NAMED} more" if len(problems) > _NAMED else ""
            known = (
                f"All was well after batch {self._since - 1}"
                if self._since
                else "Nothing was verified before"
            )
            raise PipelineError(
                f"after batch {batches - 1}: {'; '.join(problems[:_NAMED])}{more}. {known}: {_REMEDY}"
            )
        self._since = batches


# ---- copies ------------------------------------------------------------------------------------------------------


class _Copy(NamedTuple):
    """A tensor with copies elsewhere: those with the same ``of`` and ``name``."""

    of: str
    name: str
    replica: int
    digest: int


def _copies(worker: Worker) -> Iterator[_Copy]:
    for replica in worker.held:
        yield from _of_flat_weights(worker, replica)
        for i in worker.placement.pipelines_of(replica):
            yield from _of_others(worker, replica, i)


def _of_flat_weights(worker: Worker, replica: int) -> Iterator[_Copy]:
    """Yield what is trained: in each pipeline, in the reference, and in its average over time."""
    placement, model = worker.placement, worker.model
    k = placement.stage_of(replica)
    has_twins = len(placement.replicas_of(k)) > 1
    tied = {n for places in model.shared[k].values() for n in places}
    pipelines = placement.pipelines_of(replica)
    held = [(f"pipeline {i}", worker.trained[replica, i].arena.weights, has_twins) for i in pipelines]
    reference, ema = worker.references[replica], worker.emas.get(replica)
    # If updates are applied as they arrive, sums differ in their last bits.
    in_order = reference is None or reference.elasticity.staleness != "asynchronous"
    if reference is not None and (in_order or not placement.is_dedicated):
        held.append(("the reference", reference.z.flats, has_twins or placement.is_dedicated))
    if ema is not None and (in_order or not placement.is_dedicated):
        held.append(("the average over time", ema.flats, has_twins or placement.is_dedicated))
    layout = worker.trained[replica, pipelines[0]].arena.layout
    for of, flats, all_have_copies in held:
        for n, tensor in enumerate(layout.tensors(flats)):
            if all_have_copies or n in tied:
                yield _Copy(of, model.trainable[k][n], replica, digest(tensor))


def _of_others(worker: Worker, replica: int, pipeline: int) -> Iterator[_Copy]:
    """Yield frozen parameters, and statistics of BatchNorms, which all replicas of a stage update alike."""
    k = worker.placement.stage_of(replica)
    layers = worker.trained[replica, pipeline].stage.layers
    norms = {
        f"{prefix}.{name}"
        for prefix, module in layers.named_modules()
        if isinstance(module, DeferredBatchNorm)
        for name in module._buffers
    }
    state = layers.state_dict(keep_vars=True)
    for entry in worker.model.entries[k]:
        tensor = state[entry.local]
        if entry.arena is None and isinstance(tensor, nn.Parameter):
            yield _Copy("the model", entry.names[0], replica, digest(tensor))
        elif entry.local in norms:
            yield _Copy(f"pipeline {pipeline}, stage {k}", entry.names[0], replica, digest(tensor))


def _unequal(worker: Worker, rows: Iterable[Sequence[Any]]) -> Iterator[str]:
    """Yield a sentence for each set of copies that differ."""
    copies: dict[tuple[str, str], list[_Copy]] = defaultdict(list)
    for row in rows:
        copy = _Copy(*row)
        copies[copy.of, copy.name].append(copy)
    for (of, name), found in copies.items():
        counts = Counter(copy.digest for copy in found).most_common()
        if len(counts) > 1:
            others = [copy for copy in found if copy.digest != counts[0][0]]
            most = [copy for copy in found if copy.digest == counts[0][0]]
            yield (
                f"{name!r} of {of} has other bits on {_holders(worker, others)} than on {_holders(worker, most)}"
            )


def _holders(worker: Worker, copies: Iterable[_Copy]) -> str:
    replicas = dict.fromkeys(copy.replica for copy in copies)
    return " and ".join(_holder(worker, replica) for replica in replicas)


def _holder(worker: Worker, replica: int) -> str:
    return f"{worker.placement.name(replica)} (rank {worker.placement.rank_of(replica)})"


# ---- the same again ----------------------------------------------------------------------------------------------


def _unlike_itself(lane: Lane, worker: Worker) -> str | None:
    """Run the kept micro-batch twice; return where the two runs begin to differ, or None."""
    given, lane.compute.kept = lane.compute.kept, None
    # A device's order of sums may differ from run to run, unless torch is set to be deterministic.
    if given is None or (has_streams(worker.device) and not torch.are_deterministic_algorithms_enabled()):
        return None
    first, second = _seen(lane, worker, given), _seen(lane, worker, given)
    different = next((what for (what, a), (_, b) in zip(first, second) if a != b), None)
    if different is None:
        return None
    return (
        f"{different} has other bits when micro-batch {given.micro_batch} of batch {given.work.batch} (pipeline "
        f"{lane.pipeline}) runs again on {_holder(worker, lane.route.replica)}, unless that layer draws, counts or "
        "computes what it does not repeat"
    )


def _seen(lane: Lane, worker: Worker, given: Given) -> list[tuple[str, int]]:
    """Run the kept micro-batch, and return digests of all that layers compute from it, in order."""
    trained, stage = lane.trained, lane.trained.stage
    seen: list[tuple[str, int]] = []

    def see(number: int, output: Any) -> None:
        kind = type(stage.layers[number - stage.first]).__name__
        what = f"the output of layer {number} ({kind})"
        seen.extend((what, digest(tensor)) for tensor in tensors_of(output))

    grads = trained.take_grads()
    try:
        with stage.undisturbed(given.work.place(lane.pipeline, given.micro_batch)), stage.observed(see):
            of_inputs = _repeated(lane, worker, given)
        named = [*zip(worker.model.trainable[stage.index], trained.take_grads())]
    finally:
        trained.put_grads(grads)
    seen += [
        (f"the gradient of {name!r}", digest(grad)) for name, grad in reversed(named) if grad is not None
    ]
    seen += [
        (f"the gradient of stage {stage.index}'s input", digest(grad))
        for grad in of_inputs
        if grad is not None
    ]
    return seen


def _repeated(lane: Lane, worker: Worker, given: Given) -> list[torch.Tensor | None]:
    """Run a forward again, and a backward from gradients of one; return the gradients of the inputs.

    Parameters get gradients; layers draw, count and carry state as in training; see Stage.undisturbed.
    """
    work, m, value = given
    value, stage, compute = detached(value), lane.trained.stage, lane.compute
    with compute.autocast():
        run = stage.recomputed if compute.recomputes(work, m) else stage
        output = run(value, work.place(lane.pipeline, m))
        if lane.route.last:
            target = to_device(work.targets[m], worker.device)
            output = loss_of(worker.spec.options.loss_fn, output, target)[0]
    roots = wanting_gradients(output)
    if roots:
        run_backward(edges_of(output), [torch.ones_like(t) for t in roots])
    return [x.grad for x in wanting_gradients(value)]


# ---- checksums of tensors --------------------------------------------------------------------------------------------


def digest(tensor: torch.Tensor, start: int = 0) -> int:
    """Return 32 bits computed from a tensor's bits and ``start``; waits for the device."""
    if is_made_of_others(tensor):
        for name in tensor.__tensor_flatten__()[0]:  # type: ignore[attr-defined]
            start = digest(getattr(tensor, name), start)
        return start
    if tensor.is_sparse:
        tensor = tensor.coalesce()
        return digest(tensor.values(), digest(tensor.indices(), start))
    plain = tensor.detach().resolve_conj().resolve_neg().cpu().contiguous()
    return checksum(plain.reshape(-1).view(torch.uint8).numpy(), start)
