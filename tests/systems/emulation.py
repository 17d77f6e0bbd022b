"""What each published system computes: slowly, in one process, with none of the library's code.

Two questions define a system: on which version of the weights does a stage run a batch, and when does it update? A
version is counted in updates of the stage: version v is what v updates have made. For batch j on stage k of K:

    one_device    version j: w(j+1) = w(j) - v grad(w(j)). GPipe, DAPPLE, model parallelism and BSP data parallelism
                  give this, for they flush.
    pipedream     the version that stage k has when it runs the batch's first forward; with one micro-batch,
                  max(0, j-(K-1-k)). Narayanan et al. 2019, "PipeDream", sections 3.2 and 3.3.
    two_buffered  version max(j-1, 0) on every stage: w(j+1) = w(j) - v grad(w(j-1)). Narayanan et al. 2021,
                  "Memory-Efficient Pipeline-Parallel DNN Training" (PipeDream-2BW), section 3.1.
    elastic       one_device on N replicas in turn, and the exchange with a reference: EASGD (Zhang, Choromanska,
                  LeCun 2015), AvgPipe (Chen et al. 2023), EA-Pipe (Jang, Yoo, Yook 2024: easgd with N = K, M = 1).

In all of them a batch's gradient is the sum over its micro-batches, and an update moves the newest weights. A late
gradient may be corrected, see ``predicted`` and ``corrected``. Every stage
has an optimizer, an LR scheduler and copies of tied parameters of its own; the gradient of a tied parameter is the sum
over the stages that hold it, so its copies stay alike. BatchNorms normalise micro-batches, and move their running
statistics with the update, by the statistics of the whole batch. Dropout must be off.
"""

from __future__ import annotations

import copy
from collections import OrderedDict, defaultdict, deque
from collections.abc import Callable, Collection, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import torch
from torch import nn
from torch.func import functional_call
from torch.nn.modules.batchnorm import _BatchNorm
from torch.utils._pytree import tree_flatten, tree_leaves, tree_map, tree_unflatten

Batches = Sequence[tuple[Any, Any]]
Weights = dict[str, torch.Tensor]


def samples_of(value: Any) -> int:
    return next(len(t) for t in tree_leaves(value) if isinstance(t, torch.Tensor) and t.dim() > 0)


def by_samples(targets: list[Any]) -> list[float]:
    """The share of each micro-batch in the batch's loss, where that is a mean over samples."""
    sizes = [samples_of(t) for t in targets]
    return [n / sum(sizes) for n in sizes]


@dataclass(frozen=True)
class Case:
    """A training to emulate.

    layers: makes the layers, float64, with the same weights at every call; named as in ``nn.Sequential(*layers)``.
    bounds: for a number of stages, the first layer of each stage, then the number of layers; else they are cut evenly.
    optimizer, lr_scheduler: called once a stage, on its parameters and on its optimizer.
    clip_grad_norm: limit of the norm of a batch's gradient over all stages, tied parameters counted once; a batch for
        which that is not a finite number has no gradient, and nobody has seen it.
    loss_fn: a mean; each micro-batch's counts by its samples.
    micro_batches: M, at most one a sample.
    full: the samples of a full batch, where micro-batches of a shorter one must have two samples at least, as BatchNorm
        needs them.
    correction: what is done about gradients that are late: None, "predicted", "error-feedback" or "nesterov".
    """

    layers: Callable[[], Iterable[nn.Module]]
    loss_fn: Callable[[Any, Any], torch.Tensor]
    optimizer: Callable[[list[nn.Parameter]], torch.optim.Optimizer]
    bounds: dict[int, list[int]] = field(default_factory=dict)
    lr_scheduler: Callable[[torch.optim.Optimizer], Any] | None = None
    clip_grad_norm: float | None = None
    micro_batches: int = 1
    correction: str | None = None
    full: int | None = None

    def parts_of(self, batch: tuple[Any, Any]) -> int:
        """Micro-batches of a batch: a short one makes fewer."""
        samples = samples_of(batch[0])
        parts = min(self.micro_batches, samples)
        is_short = self.full is not None and samples < self.full and self.full // self.micro_batches > 1
        return max(1, min(parts, samples // 2)) if is_short else parts


@dataclass(frozen=True)
class Trained:
    """losses: of the batches. stages: each stage's state, under the unsplit model's names. state: the unsplit model's.

    versions: versions[j][k] is the one on which stage k ran batch j.
    """

    losses: list[float]
    stages: list[Weights]
    state: Weights
    versions: list[list[int]]


@dataclass(frozen=True)
class Averaged:
    """losses: of the batches, j being that of replica j % N. reference, replicas: states of the unsplit model.

    The reference's floating-point buffers are the mean of the replicas', its others the first replica's.
    """

    losses: list[float]
    reference: Weights
    replicas: list[Weights]


# ---- the systems ---------------------------------------------------------------------------------------------------


def one_device(case: Case, batches: Batches, K: int = 1) -> Trained:
    """Every batch sees the update of the one before. K only cuts the result into stages."""
    model = Model(case, K)
    for j, batch in enumerate(batches):
        model.train(j, batch, version=j)
    return model.trained()


def two_buffered(case: Case, batches: Batches, K: int) -> Trained:
    """PipeDream-2BW. That a pipeline may run dry in between, to evaluate or to save, changes nothing."""
    if case.micro_batches < K:
        raise ValueError(f"2BW needs at least K = {K} micro-batches, not {case.micro_batches}")
    model = Model(case, K)
    model.late = [1] * K
    for j, batch in enumerate(batches):
        model.train(j, batch, version=max(j - 1, 0))
    return model.trained()


def pipedream(
    case: Case,
    batches: Batches,
    K: int,
    *,
    stash: bool = True,
    vertical_sync: bool = False,
    drains: Collection[int] = (),
    advance: Sequence[int] = (),
) -> Trained:
    """1F1B without flush, one update a batch. ``drains``: batches after which the pipeline runs dry and fills anew.

    stash: forwards and backwards of a batch use the same weights. Without, a backward uses the newest weights of its
    stage with the activations of the forward, so that its result is the gradient of nothing.
    vertical_sync: all stages use the version that the first stage had for the batch.
    advance: by stage, the forwards that run ahead of 1F1B.
    """
    model = Model(case, K)
    # So many micro-batches are ahead of a backward.
    warm_ups = [K - k + a for k, a in enumerate(advance or [0] * K)]
    ahead = [warm_ups[0 if vertical_sync else k] - 1 for k in range(K)]
    model.late = [-(-n // case.micro_batches) for n in ahead]
    parts = [case.parts_of(batch) for batch in batches]
    todo = [deque(steps_of_stage(warm_ups[k], parts, drains)) for k in range(K)]
    while any(todo):
        able = [k for k in range(K) if todo[k] and model.can(k, todo[k][0])]
        assert able, f"deadlock before {[str(steps[0]) for steps in todo if steps]}"
        for k in able:
            kind, j, m = todo[k].popleft()
            if kind == "F":
                if (k, m) == (0, 0):
                    model.begin(j, batches[j])
                if m == 0:
                    versions = model.flights[j].versions
                    versions[k] = versions[0] if vertical_sync and k > 0 else model.stages[k].updates
                model.forward(k, j, m)
            elif kind == "B":
                model.backward(k, j, m, stash)
            else:
                model.update(k, j)
    return model.trained()


class Step(NamedTuple):
    """F: forward and B: backward of micro-batch m of batch j; U: the update of batch j, m being -1."""

    kind: str
    j: int
    m: int = -1


def steps_of_stage(warm_up: int, parts: list[int], drains: Collection[int]) -> list[Step]:
    """What a stage does: ``warm_up`` forwards, then a backward and a forward in turn. A batch's last backward updates.

    ``parts``: micro-batches of each batch; those of consecutive batches are one sequence.
    """
    steps, sequence = [], []
    for j, M in enumerate(parts):
        sequence += [(j, m) for m in range(M)]
        if j in drains or j == len(parts) - 1:
            steps += [Step("F", *place) for place in sequence[:warm_up]]
            for n, (i, m) in enumerate(sequence):
                steps.append(Step("B", i, m))
                steps += [Step("U", i)] if m == parts[i] - 1 else []
                steps += [Step("F", *place) for place in sequence[n + warm_up : n + warm_up + 1]]
            sequence = []
    return steps


def elastic(
    case: Case,
    batches: Batches,
    N: int,
    *,
    rule: str = "avgpipe",
    staleness: int = 1,
    period: int = 1,
    alpha: float | None = None,
) -> Averaged:
    """N replicas, batch j on replica j % N; a round is ``period`` steps of each. An unfinished round leaves z alone.

    avgpipe, d_i being what the optimizer has moved replica i in the round, z and x_i those of its beginning:
        z' = z + sum_i d_i / N;  x_i' = x_i + d_i + alpha (z' - (x_i + d_i))  staleness 0
                                 x_i' = x_i + d_i + alpha (z - x_i)           staleness 1
    easgd, synchronous, x_i being the replica's weights after its steps, whatever the staleness:
        e_i = alpha (x_i - z);  x_i' = x_i - e_i;  z' = z + sum_i e_i
    """
    if alpha is None:
        alpha = 0.9 / N if rule == "easgd" else 1 / N if N > 1 else 0.0
    replicas = [Model(case, 1) for _ in range(N)]
    z = replicas[0].stages[0].newest
    begun, moves = [z] * N, {}
    for j, batch in enumerate(batches):
        i, done = j % N, j // N + 1
        stage = replicas[i].stages[0]
        replicas[i].train(j, batch, version=stage.updates)
        if done % period:
            continue
        x = stage.newest
        if rule == "easgd":
            moves[i] = {n: alpha * (x[n] - z[n]) for n in z}
            stage.assign({n: x[n] - moves[i][n] for n in z})
        else:
            moves[i] = {n: (x[n] - begun[i][n]) / N for n in z}
            if staleness == 1:
                stage.assign({n: x[n] + alpha * (z[n] - begun[i][n]) for n in z})
        if len(moves) == N:
            z = {n: z[n] + sum(moves[i][n] for i in range(N)) for n in z}
            if rule == "avgpipe" and staleness == 0:
                for replica in replicas:
                    x = replica.stages[0].newest
                    replica.stages[0].assign({n: x[n] + alpha * (z[n] - x[n]) for n in z})
            begun, moves = [replica.stages[0].newest for replica in replicas], {}
    losses = [replicas[j % N].flights[j].loss for j in range(len(batches))]
    return Averaged(losses, _reference(case, z, replicas), [replica.state() for replica in replicas])


def _reference(case: Case, z: Weights, replicas: list[Model]) -> Weights:
    model = Model(case, 1)
    model.stages[0].assign(z)
    for name, buffer in model.stages[0].module.named_buffers():
        values = torch.stack([replica.state()[name] for replica in replicas])
        buffer.copy_(values.mean(0) if values.is_floating_point() else values[0])
    return model.state()


# ---- corrections of late gradients ---------------------------------------------------------------------------------


def predicted(
    weights: Weights, parameters: dict[str, nn.Parameter], knowledge: list[Any]
) -> Callable[[int], Weights]:
    """What ``weights`` will be after so many more updates, as the optimizer's state of now tells."""

    def after(updates: int) -> Weights:
        found = {name: w.clone() for name, w in weights.items()}
        for group, states in knowledge:
            for name, state in states:
                w = found[name]
                if "momentum_buffer" in state:
                    w -= updates * group["lr"] * state["momentum_buffer"]
                elif "exp_avg" in state:
                    beta1, beta2 = group["betas"]
                    step = float(state["step"])
                    m = state["exp_avg"] / (1 - beta1**step)
                    v = state["exp_avg_sq"] / (1 - beta2**step)
                    w *= (1 - group["lr"] * group["weight_decay"]) ** updates
                    w -= updates * group["lr"] * m / (v.sqrt() + group["eps"])
        return found

    return after


FEEDBACK = ("error-feedback", "nesterov")


def corrected(
    correction: str, before: Weights, after: Weights, last: Weights | None, late: int
) -> tuple[Weights, Weights]:
    """New weights, and the corrected step, from the optimizer's step and the corrected one before it."""
    momentum, gain = (0.0, float(late)) if correction == "error-feedback" else (0.9, 0.9)
    new, steps = {}, {}
    for name, w in before.items():
        d = after[name] - w
        old = torch.zeros_like(d) if last is None else last[name]
        steps[name] = v = momentum * old + (1 - momentum) * d
        carried = v if last is None and momentum == 0 else old
        new[name] = w + v + gain * (v - carried)
    return new, steps


# ---- a model in stages ---------------------------------------------------------------------------------------------


class Passed(NamedTuple):
    """What a forward leaves for its backward: its own copy of the weights, and its inputs that want gradients."""

    weights: Weights
    inputs: list[torch.Tensor]
    output: Any


# What a stage's BatchNorms saw of a batch, by layer and call within a forward: [channels, values] per micro-batch.
Seen = dict[tuple[_BatchNorm, int], list[torch.Tensor]]


class Stage:
    """Layers with an optimizer of their own; ``history[v]`` is version v of the weights."""

    def __init__(self, case: Case, layers: nn.Module) -> None:
        self.module = copy.deepcopy(layers).train()
        self.weights = dict(self.module.named_parameters())  # those tied within the stage once
        trained = [p for p in self.weights.values() if p.requires_grad]
        self.optimizer = case.optimizer(trained) if trained else None
        self.lr_scheduler = (
            case.lr_scheduler(self.optimizer) if case.lr_scheduler and self.optimizer else None
        )
        self.history = [self.newest]
        self.correction = case.correction
        self.predictions = [self.predictor()]  # by version, made from what its optimizer knew then
        self.last: Weights | None = None  # the corrected step before

    def predictor(self) -> Callable[[int], Weights]:
        return predicted(self.newest, self.weights, copy.deepcopy(self._knowledge()))

    def _knowledge(self) -> list[tuple[dict[str, Any], list[tuple[str, dict[str, Any]]]]]:
        """The groups of the optimizer, each with its parameters' names and states."""
        names = {p: name for name, p in self.weights.items()}
        return [
            (
                {key: value for key, value in group.items() if key != "params"},
                [(names[p], self.optimizer.state.get(p, {})) for p in group["params"]],
            )
            for group in (self.optimizer.param_groups if self.optimizer else [])
        ]

    @property
    def newest(self) -> Weights:
        return {name: p.detach().clone() for name, p in self.weights.items()}

    @property
    def updates(self) -> int:
        return len(self.history) - 1

    def forward(self, version: int, delay: int, value: Any, seen: Seen) -> Passed:
        """``delay``: updates between that version and the batch's own."""
        predicts = self.correction == "predicted" and delay
        chosen = self.predictions[version](delay) if predicts else self.history[version]
        weights = {n: w.clone().requires_grad_(self.weights[n].requires_grad) for n, w in chosen.items()}
        leaves, spec = tree_flatten(value)
        inputs = [
            t.detach().clone().requires_grad_(t.requires_grad) if isinstance(t, torch.Tensor) else t
            for t in leaves
        ]
        # Copies, for layers may write into their inputs and BatchNorms into their buffers.
        given = [t.clone() if isinstance(t, torch.Tensor) else t for t in inputs]
        buffers = {n: b.clone() for n, b in self.module.named_buffers()}
        with _noting(self.module, seen):
            output = functional_call(self.module, weights | buffers, (tree_unflatten(given, spec),))
        return Passed(weights, with_gradient(inputs), output)

    def backward(
        self, passed: Passed, gradients: list[torch.Tensor | None], stash: bool
    ) -> tuple[list[torch.Tensor | None], dict[str, torch.Tensor | None]]:
        """Gradients of the inputs and of the weights, from those of the outputs."""
        if not stash:
            # What autograd has kept of the weights is this memory; what it has kept of activations lies elsewhere.
            for name, w in passed.weights.items():
                w.data.copy_(self.weights[name].data)
        known = [
            (t, g) for t, g in zip(with_gradient(passed.output), gradients, strict=True) if g is not None
        ]
        names = [n for n, w in passed.weights.items() if w.requires_grad]
        wanted = [*passed.inputs, *(passed.weights[n] for n in names)]
        grads: Sequence[torch.Tensor | None] = [None] * len(wanted)
        if known:
            outputs, given = zip(*known)
            grads = torch.autograd.grad(outputs, wanted, given, allow_unused=True)
        count = len(passed.inputs)
        return list(grads[:count]), dict(zip(names, grads[count:]))

    def update(self, gradients: dict[str, torch.Tensor | None], seen: Seen, late: int) -> None:
        """``late``: by how many updates the gradients of this stage are, once the pipeline is full."""
        _move_statistics(seen)
        for name, gradient in gradients.items():
            self.weights[name].grad = gradient
        before = self.newest
        if self.optimizer:
            self.optimizer.step()
        if self.correction in FEEDBACK and late and any(g is not None for g in gradients.values()):
            new, self.last = corrected(self.correction, before, self.newest, self.last, late)
            for name, w in new.items():
                self.weights[name].data.copy_(w)
        if self.lr_scheduler:
            self.lr_scheduler.step()
        self.history.append(self.newest)
        self.predictions.append(self.predictor())

    def assign(self, weights: Weights) -> None:
        """Other values for the newest version."""
        for name, w in weights.items():
            self.weights[name].data.copy_(w)
        self.history[-1] = self.newest


def with_gradient(value: Any) -> list[torch.Tensor]:
    return [t for t in tree_leaves(value) if isinstance(t, torch.Tensor) and t.requires_grad]


class Flight:
    """A batch on its way through K stages; keys are (k, m)."""

    def __init__(self, case: Case, batch: tuple[Any, Any], K: int) -> None:
        inputs, targets = batch
        self.parts = case.parts_of(batch)
        self.inputs, self.targets = split(inputs, self.parts), split(targets, self.parts)
        self.shares = by_samples(self.targets)
        self.loss = 0.0
        self.versions = [-1] * K
        self.passed: dict[tuple[int, int], Passed] = {}
        self.gradients: dict[tuple[int, int], list[torch.Tensor | None]] = {}  # of a stage's inputs
        self.sums: list[dict[str, torch.Tensor | None]] = [{} for _ in range(K)]  # of its weights
        self.seen: list[Seen] = [defaultdict(list) for _ in range(K)]

    def backwards_done(self, k: int) -> bool:
        return all((k, m) in self.gradients for m in range(self.parts))


def split(value: Any, parts: int) -> list[Any]:
    """Micro-batches whose sizes differ by at most one sample, the larger ones first."""

    def piece(m: int) -> Any:
        return tree_map(
            lambda t: t.tensor_split(parts)[m] if isinstance(t, torch.Tensor) and t.dim() > 0 else t, value
        )

    return [piece(m) for m in range(parts)]


class Model:
    """K stages and the batches that are, or have been, under way."""

    def __init__(self, case: Case, K: int) -> None:
        layers = list(case.layers())
        bounds = case.bounds.get(K, [k * len(layers) // K for k in range(K + 1)])
        cut = [
            nn.Sequential(OrderedDict((str(n), layers[n]) for n in range(bounds[k], bounds[k + 1])))
            for k in range(K)
        ]
        self.case, self.K = case, K
        self.holders = _holders(cut)
        self.coupled = bool(self.holders) or case.clip_grad_norm is not None
        self.stages = [Stage(case, part) for part in cut]
        self.late = [0] * K  # by how many updates a stage's gradients are, once the pipeline is full
        self.flights: dict[int, Flight] = {}

    def begin(self, j: int, batch: tuple[Any, Any]) -> None:
        self.flights[j] = Flight(self.case, batch, self.K)

    def train(self, j: int, batch: tuple[Any, Any], version: int) -> None:
        """One batch from its first forward to its update, on one version on all stages."""
        self.begin(j, batch)
        self.flights[j].versions = [version] * self.K
        for m in range(self.flights[j].parts):
            for k in range(self.K):
                self.forward(k, j, m)
            for k in reversed(range(self.K)):
                self.backward(k, j, m)
        for k in range(self.K):
            self.update(k, j)

    def can(self, k: int, step: Step) -> bool:
        """Whether what a stage's step needs of other stages is there."""
        kind, j, m = step
        if kind == "F":
            return k == 0 or (j in self.flights and (k - 1, m) in self.flights[j].passed)
        if kind == "B":
            return k == self.K - 1 or (k + 1, m) in self.flights[j].gradients
        return not self.coupled or all(self.flights[j].backwards_done(other) for other in range(self.K))

    def forward(self, k: int, j: int, m: int) -> None:
        flight = self.flights[j]
        value = flight.inputs[m] if k == 0 else flight.passed[k - 1, m].output
        passed = self.stages[k].forward(flight.versions[k], j - flight.versions[k], value, flight.seen[k])
        if k == self.K - 1:
            share, loss = flight.shares[m], None
            if share:  # the mean over nothing is not a number
                loss = share * self.case.loss_fn(passed.output, flight.targets[m])
                flight.loss += float(loss.detach())
            passed = passed._replace(output=loss)
        flight.passed[k, m] = passed

    def backward(self, k: int, j: int, m: int, stash: bool = True) -> None:
        flight = self.flights[j]
        passed = flight.passed[k, m]
        if k == self.K - 1:
            received: list[torch.Tensor | None] = [torch.ones_like(t) for t in with_gradient(passed.output)]
        else:
            received = flight.gradients[k + 1, m]
        flight.gradients[k, m], grads = self.stages[k].backward(passed, received, stash)
        for name, g in grads.items():
            flight.sums[k][name] = _sum([flight.sums[k].get(name), g])

    def update(self, k: int, j: int) -> None:
        flight = self.flights[j]
        own = self._gradient(flight, k)
        limit = self.case.clip_grad_norm
        if limit is not None:
            counted = [
                g
                for other in range(self.K)
                for name, g in self._gradient(flight, other).items()
                if g is not None and self.holders.get((other, name), [(other, name)])[0] == (other, name)
            ]
            norm = torch.cat([g.flatten() for g in counted]).norm()
            factor = min(1.0, limit / (float(norm) + 1e-6))
            own = {name: None if g is None else factor * g for name, g in own.items()}
            if not norm.isfinite():
                self.stages[k].update(dict.fromkeys(own), {}, self.late[k])
                return
        self.stages[k].update(own, flight.seen[k], self.late[k])

    def _gradient(self, flight: Flight, k: int) -> dict[str, torch.Tensor | None]:
        """Of a batch by the weights of stage k; of tied ones by all their copies."""
        return {
            name: _sum(
                [flight.sums[other].get(theirs) for other, theirs in self.holders.get((k, name), [(k, name)])]
            )
            for name in flight.sums[k]
        }

    def state(self) -> Weights:
        return {name: value for stage in self._stage_states() for name, value in stage.items()}

    def _stage_states(self) -> list[Weights]:
        return [{n: t.clone() for n, t in stage.module.state_dict().items()} for stage in self.stages]

    def trained(self) -> Trained:
        flights = [self.flights[j] for j in sorted(self.flights)]
        versions = [flight.versions for flight in flights]
        return Trained([flight.loss for flight in flights], self._stage_states(), self.state(), versions)


def _sum(gradients: list[torch.Tensor | None]) -> torch.Tensor | None:
    """None counts as zero; of nothing but None, None: an optimizer passes over such weights."""
    there = [g for g in gradients if g is not None]
    return torch.stack(there).sum(0) if there else None


def _holders(stages: list[nn.Sequential]) -> dict[tuple[int, str], list[tuple[int, str]]]:
    """For each (stage, name) whose parameter other stages have too: all its places, in stage order."""
    places = defaultdict(list)
    for k, stage in enumerate(stages):
        for name, p in stage.named_parameters():
            places[p].append((k, name))
    return {place: found for found in places.values() if len(found) > 1 for place in found}


# ---- BatchNorm -----------------------------------------------------------------------------------------------------


@contextmanager
def _noting(module: nn.Module, seen: Seen) -> Iterator[None]:
    """Note the inputs of the BatchNorms inside, one forward."""
    calls: dict[_BatchNorm, int] = defaultdict(int)

    def note(norm: _BatchNorm, args: tuple[torch.Tensor]) -> None:
        seen[norm, calls[norm]].append(args[0].detach().transpose(0, 1).flatten(1).clone())
        calls[norm] += 1

    norms = [m for m in module.modules() if isinstance(m, _BatchNorm) and m.track_running_stats]
    handles = [norm.register_forward_pre_hook(note) for norm in norms]
    yield
    for handle in handles:
        handle.remove()


def _move_statistics(seen: Seen) -> None:
    """As torch does in a forward of the whole batch, once for each call of a layer."""
    for (layer, _), parts in seen.items():
        norm: Any = layer  # its statistics are there
        values = torch.cat(parts, dim=1)
        norm.num_batches_tracked += 1
        momentum = 1 / int(norm.num_batches_tracked) if norm.momentum is None else norm.momentum
        norm.running_mean.lerp_(values.mean(1), momentum)
        norm.running_var.lerp_(values.var(1, correction=1), momentum)
