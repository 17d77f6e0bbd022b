"""The training of presets: sizes of batches, optimizers, and learning-rate schedules."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import partial
from typing import Any, Literal, NamedTuple

import torch
from torch import Tensor, nn
from torch.optim import SGD, Adam, AdamW, Muon, Optimizer
from torch.optim.lr_scheduler import LambdaLR

from avgpipe.rules import RULES
from avgpipe.tasks import BatchLoader, BuildOptions, Workload
from avgpipe_lab.workloads.batches import MakeBatch, SampleBatches
from avgpipe_lab.workloads.tokens import TokenLoss

Model = nn.Module | Sequence[nn.Module]


@dataclass(frozen=True)
class Recipe:
    """The numbers that one pipeline trains with.

    Attributes:
        batch_size: samples in a batch of the loader.
        epochs: epochs, over all pipelines together.
        optimizer: SGD has ``momentum``, the Adams ``betas``; "muon" is :class:`MuonAdamW`.
        lr: peak learning rate of a single pipeline.
        lr_scaling: how the learning rate grows with the number of pipelines; None: see :meth:`scaled_lr`.
        weight_decay: weight decay of parameters with two and more dimensions; biases and the weights of norms
            have it only with NT-ASGD.
        clip_grad_norm: the largest norm of all gradients together, or None.
        warmup: linear warm-up over this share of the steps.
        decay: the schedule after warm-up. "steps": a factor of a tenth at each of the ``milestones``, shares
            of the steps.
    """

    batch_size: int
    epochs: int
    optimizer: Literal["sgd", "nt-asgd", "adam", "adamw", "muon"]
    lr: float
    lr_scaling: Literal["none", "sqrt", "linear"] | None = None
    weight_decay: float = 0.0
    momentum: float = 0.9
    betas: tuple[float, float] = (0.9, 0.999)
    clip_grad_norm: float | None = None
    warmup: float = 0.0
    decay: Literal["none", "linear", "cosine", "steps"] = "linear"
    milestones: tuple[float, ...] = (0.5, 0.75)

    def with_options(self, options: BuildOptions) -> Recipe:
        """Return this recipe with the options applied."""
        names = ("batch_size", "epochs", "optimizer", "lr", "lr_scaling")
        return replace(self, **{name: getattr(options, name) or getattr(self, name) for name in names})

    def scaled_lr(self, options: BuildOptions) -> float:
        """Return the learning rate of each of N pipelines: lr, lr sqrt(N) or lr N.

        If each pipeline trains on its own batches, the reference moves by the mean of updates from N batches,
        which need a learning rate as for an N-fold batch. If pipelines share a batch, updates that are linear
        in the gradient add up to one pipeline's, at its rate, and so do those of one optimizer for all; a
        separate Adam per pipeline divides by second moments, which include the greater noise of smaller
        shares.
        """
        n, divides = options.pipelines, self.optimizer in ("adam", "adamw")
        own = divides and not RULES[options.rule].tries
        scaling = self.lr_scaling or ("sqrt" if own or options.batch != "global" else "none")
        return self.lr * {"none": 1.0, "sqrt": math.sqrt(n), "linear": n}[scaling]

    def lr_factor(self, steps: int, step: int) -> float:
        """Return the factor of the learning rate at ``step`` (from 0) of ``steps``."""
        warmup = math.ceil(self.warmup * steps)
        if step < warmup:
            return (step + 1) / (warmup + 1)
        if self.decay == "none":
            return 1.0
        if self.decay == "steps":
            return float(0.1 ** sum(step >= share * steps for share in self.milestones))
        done = min(1.0, (step - warmup) / max(1, steps - warmup))
        return 1 - done if self.decay == "linear" else (1 + math.cos(math.pi * done)) / 2

    def optimizer_for(self, options: BuildOptions, model: Model) -> partial[Optimizer]:
        """Return a function that makes the optimizer of some of the ``model``'s parameters.

        For Muon it takes them as pairs (name, parameter), since it needs their names.
        """
        lr = self.scaled_lr(options)
        if self.optimizer == "muon":
            return partial(_muon, self, lr, hidden_matrices(model))
        return partial(_optimizer, self, lr)

    def lr_scheduler_for(self, epoch_batches: int, options: BuildOptions) -> partial[LambdaLR] | None:
        """Return a function that makes the scheduler of an optimizer; None: the rate is constant.

        The schedule ends with the last epoch, each of ``epoch_batches`` of all pipelines together, or with
        ``options.max_batches``.
        """
        if self.warmup == 0 and self.decay == "none":
            return None
        batches = min(self.epochs * epoch_batches, options.max_batches or math.inf)
        steps = max(1, math.ceil(batches / options.batches_per_round))
        return partial(LambdaLR, lr_lambda=partial(self.lr_factor, steps))


def _optimizer(training: Recipe, lr: float, params: Iterable[nn.Parameter]) -> Optimizer:
    params = list(params)
    if training.optimizer == "nt-asgd":
        return NTASGD(params, lr, weight_decay=training.weight_decay)
    groups: list[dict[str, Any]] = [
        {"params": [p for p in params if p.dim() > 1], "weight_decay": training.weight_decay},
        {"params": [p for p in params if p.dim() <= 1], "weight_decay": 0.0},
    ]
    # Both groups even if one is empty: so every stage has the same groups, and a checkpoint fits any other
    # cut.
    if training.optimizer == "sgd":
        return SGD(groups, lr=lr, momentum=training.momentum)
    kind = Adam if training.optimizer == "adam" else AdamW
    return kind(groups, lr=lr, betas=training.betas)


def _muon(
    training: Recipe, lr: float, hidden: frozenset[str], named_params: Iterable[tuple[str, nn.Parameter]]
) -> Optimizer:
    named = list(named_params)
    others = [p for name, p in named if name not in hidden]
    groups: list[dict[str, Any]] = [
        {"params": [p for name, p in named if name in hidden], "muon": True},
        {"params": [p for p in others if p.dim() > 1]},
        {"params": [p for p in others if p.dim() <= 1], "weight_decay": 0.0},
    ]
    return MuonAdamW(groups, lr, betas=training.betas, weight_decay=training.weight_decay)


class Samples(NamedTuple):
    """Independent samples, whose batches are the same for any number of stages and pipelines.

    Attributes:
        order: takes batch size, seed and epoch; returns the order in which an epoch trains on its samples.
        train, valid: make batches of samples.
        valid_order: the samples of the validation, in order.
    """

    order: Callable[[int, int, int], Tensor]
    train: MakeBatch
    valid: MakeBatch
    valid_order: Tensor

    def batches(self, size: int, options: BuildOptions) -> Batches:
        seed, workers = options.seed, options.loader_workers
        valid = SampleBatches(self.valid_order, size, self.valid, workers=workers)

        def train(epoch: int, start: int = 0) -> SampleBatches:
            return SampleBatches(self.order(size, seed, epoch), size, self.train, seed, epoch, start, workers)

        return train, lambda: valid


# fields of ``Workload``, to train and to validate
Batches = tuple[Callable[..., BatchLoader], Callable[[], BatchLoader]]
Built = tuple[Samples | Batches, dict[str, Any]]  # result of a workload's ``build``


def make_workload(
    name: str, options: BuildOptions, recipe: Recipe, data: Samples | Batches, fields: dict[str, Any]
) -> Workload:
    """Make a workload with the training of ``recipe``, to which the options were applied, and with ``fields``."""
    train, valid = data.batches(recipe.batch_size, options) if isinstance(data, Samples) else data
    loss = fields["loss_fn"]
    common = {
        "train_batches": train,
        "valid_batches": valid,
        "batch_size": recipe.batch_size,
        "epochs": recipe.epochs,
        "clip_grad_norm": recipe.clip_grad_norm,
        "optimizer": recipe.optimizer_for(options, fields["layers"]),
        "lr_scheduler": recipe.lr_scheduler_for(len(train(0)), options),
        "loss_weight": loss.weight if isinstance(loss, TokenLoss) else None,
    }
    return Workload(name, str(options.preset), **{**common, **fields})


class MuonAdamW(Optimizer):
    """Muon for the groups with ``muon=True``, AdamW for the others: one optimizer with one state.

    A step is that of ``torch.optim.Muon`` over the former and of ``torch.optim.AdamW`` over the latter, bit
    for bit, and a group has that class's options, with its defaults. Muon (Jordan et al. 2024) makes the
    momentum of a matrix about orthogonal; times 0.2 sqrt(max(rows, columns)) its elements are as large as
    AdamW's steps, so that both share one learning rate and one weight decay (Liu et al. 2025, arXiv
    2502.16982, section 2.2). A parameter is one matrix: matrices stacked in it, such as the four gates of an
    LSTM or queries, keys and values, are made orthogonal together, and the kernels of a convolution are a
    matrix with a row for each output.

    Args:
        params: Parameters, or groups of them. Those of Muon have two or more dimensions, of which the first is rows.
        lr: Learning rate.
        betas: AdamW's.
        weight_decay: Decoupled from the gradient, in both.
    """

    def __init__(
        self,
        params: Any,
        lr: float = 1e-3,
        *,
        betas: tuple[float, float] = (0.9, 0.999),
        weight_decay: float = 0.01,
    ) -> None:
        super().__init__(params, {"muon": False, "lr": lr, "betas": betas, "weight_decay": weight_decay})

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        empty = {**self.defaults, **param_group, "params": []}
        made = Muon([empty], adjust_lr_fn="match_rms_adamw") if empty["muon"] else AdamW([empty])
        super().add_param_group({**made.param_groups[0], "params": param_group["params"]})
        group = self.param_groups[-1]
        for p in group["params"]:
            if group["muon"] and p.dim() < 2:
                raise ValueError(
                    f"Muon steps matrices, not a parameter of shape {tuple(p.shape)}: put it in a group without muon"
                )

    @torch.no_grad()
    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        for group in self.param_groups:
            if group["muon"]:
                self._step_matrices(group)
            else:
                _part(AdamW, group, self.state).step()
        return loss

    def _step_matrices(self, group: dict[str, Any]) -> None:
        stepped = [(p, p.detach().flatten(1)) for p in group["params"] if p.grad is not None]
        for p, matrix in stepped:
            matrix.grad = p.grad.flatten(1)
        state = {matrix: self.state[p] for p, matrix in stepped}
        _part(Muon, {**group, "params": [matrix for _, matrix in stepped]}, state).step()
        for p, matrix in stepped:
            if matrix.data_ptr() != p.data_ptr():  # a channels-last kernel has no such view
                p.copy_(matrix.view_as(p))


def _part(kind: type[Muon] | type[AdamW], group: dict[str, Any], state: Any) -> Any:
    """Make an optimizer for one step of a group, with the group's current options and state."""
    part: Any = kind([{**group}])
    part.state = state
    return part


def hidden_matrices(model: Model) -> frozenset[str]:
    """Return the names of parameters for Muon: matrices and kernels of neither embeddings nor the output layer.

    An embedding belongs to a module whose class has ``Embedding`` in its name, or which is called
    ``embedding``. The output layer holds the last weight of two or more dimensions. Parameters tied to one of
    them are not hidden matrices.
    """
    whole = model if isinstance(model, nn.Module) else nn.ModuleList(model)
    classes = {name: type(module).__name__ for name, module in whole.named_modules(remove_duplicate=False)}
    weights = {name: p for name, p in whole.named_parameters(remove_duplicate=False) if p.dim() > 1}
    holders = {name: classes[name.rpartition(".")[0]] for name in weights}
    outer = {
        id(p) for name, p in weights.items() if "Embedding" in holders[name] or name.endswith(".embedding")
    }
    outer |= {id(p) for p in [*weights.values()][-1:]}
    inner = {name: p for name, p in weights.items() if id(p) not in outer}
    return frozenset(name for name, p in inner.items() if p.dim() == 2 or "Conv" in holders[name])


class NTASGD(SGD):
    """SGD that, once triggered, keeps the running mean of its weights in ``state[p]["ax"]``.

    Non-monotonically triggered averaged SGD (Merity, Keskar, Socher, ICLR 2018, section 3, algorithm 1). The mean
    counts the weights at the trigger and after every later step, ``param_groups[...]["averaged"]`` in all (0 before
    the trigger). Training continues with the plain weights; :meth:`averages` swaps in the means. torch's ASGD
    with ``t0`` computes nearly this, but it applies a change of the learning rate one step late, which spoils learning
    rates that follow the length of a segment.

    Losses passed to :meth:`observe` are in ``param_groups[0]``, so ``state_dict`` holds everything.
    """

    def __init__(self, params: Any, lr: float, *, weight_decay: float = 0.0, window: int = 5) -> None:
        super().__init__(params, lr=lr, weight_decay=weight_decay)
        for group in self.param_groups:
            group.update(averaged=0, window=window, validation_losses=[])
        self.register_step_post_hook(_average)

    @property
    def triggered(self) -> bool:
        return bool(self.param_groups[0]["averaged"] > 0)

    def trigger(self) -> None:
        """Begin to average, with the current weights; a second call does nothing."""
        if self.triggered:
            return
        for group in self.param_groups:
            group["averaged"] = 1
            for p in group["params"]:
                if p.requires_grad:
                    self.state[p]["ax"] = p.detach().clone()

    def observe(self, loss: float) -> None:
        """Note a validation loss; trigger if it is worse than the best that is at least ``window`` losses older."""
        group = self.param_groups[0]
        losses = group["validation_losses"]
        group["validation_losses"] = [*losses, loss]
        if loss > min(losses[: max(0, len(losses) - group["window"])], default=math.inf):
            self.trigger()

    @contextmanager
    def averages(self) -> Iterator[None]:
        """Return a context in which the parameters hold their means; before the trigger there are none."""
        means = {p: state["ax"] for p, state in self.state.items() if "ax" in state}
        own = [p.detach().clone() for p in means]
        with torch.no_grad():
            torch._foreach_copy_(list(means), list(means.values()))
        try:
            yield
        finally:
            with torch.no_grad():
                torch._foreach_copy_(list(means), own)


@torch.no_grad()
def _average(optimizer: Optimizer, _args: Any, _kwargs: Any) -> None:
    for group in optimizer.param_groups:
        group["averaged"] += group["averaged"] > 0
        for p in group["params"]:
            if "ax" in optimizer.state.get(p, ()):
                optimizer.state[p]["ax"].lerp_(p, 1 / group["averaged"])
