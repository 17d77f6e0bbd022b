"""Tiny models of families of transformers, what to feed them, and their training by a plain loop."""

from __future__ import annotations

import copy
import inspect
from collections.abc import Iterator
from typing import Any, NamedTuple

import torch
from torch import nn
from torch.utils._pytree import tree_leaves

from avgpipe.model.shrink import shrunk
from avgpipe.model.transformers import output_of
from benchmarks.models.catalogue import Family, class_of
from benchmarks.models.depth import with_layers

LAYERS, SAMPLES, POSITIONS, MICRO_BATCHES, STEPS = 4, 4, 9, 2, 3
LEARNING_RATE = 0.1
_MOST = 40_000_000  # parameters: more would not be tiny


class Trained(NamedTuple):
    """What a training gives: outputs of the first batch before it, gradients of its first step, weights after it."""

    outputs: list[torch.Tensor]
    gradients: dict[str, torch.Tensor]
    weights: dict[str, torch.Tensor]


def build(family: Family) -> nn.Module:
    """Return a tiny model without dropout, in float64 if it runs so, else in float32.

    Raises:
        Exception: whatever keeps it from being built, or from running.
    """
    kind = class_of(family.name)
    config = shrunk(with_layers(kind.config_class(**family.settings), LAYERS))
    _make_certain(config)
    with torch.device("meta"):
        count = sum(p.numel() for p in kind(config).parameters())
    if count > _MOST:
        raise ValueError(f"its smallest configuration has {count / 1e6:.0f} million parameters")
    torch.manual_seed(0)
    model = kind(config).train()
    for module in model.modules():
        if isinstance(module, nn.Dropout):
            module.p = 0.0
    try:
        model, trained = model.double(), plain(copy.deepcopy(model).double(), steps=1)
    except Exception:
        model, trained = model.float(), plain(copy.deepcopy(model).float(), steps=1)
    if not all(bool(grad.isfinite().all()) for grad in trained.gradients.values()):
        raise ValueError("its gradients are not finite in a plain loop")
    return model


def _make_certain(config: Any) -> None:
    """Switch off what is drawn at random, and caches, and have weights large enough for all of them to matter."""
    for name, value in dict(vars(config)).items():
        if hasattr(value, "to_dict"):
            _make_certain(value)
        elif "drop" in name and isinstance(value, float):
            setattr(config, name, 0.0)
        elif name == "initializer_range":
            setattr(config, name, 0.1)
        elif name in ("apply_spec_augment", "use_cache"):
            setattr(config, name, False)


# ---- data ----------------------------------------------------------------------------------------------------------


def batch(model: Any, seed: int) -> tuple[dict[str, torch.Tensor], torch.Tensor]:
    """Return inputs, in which a sample of each micro-batch is padded where there is a mask for that, and targets."""
    draw = torch.Generator().manual_seed(seed)
    config, main = model.config, model.main_input_name
    asked = inspect.signature(model.forward).parameters
    inputs = _signal(model, draw)
    if main == "input_ids":
        words = torch.randint(*_plain_words(config), (SAMPLES, POSITIONS), generator=draw)
        inputs["input_ids"] = words
        if "attention_mask" in asked:
            mask = torch.ones_like(words)
            mask[::MICRO_BATCHES, -3:] = 0
            inputs["attention_mask"] = mask
    if config.is_encoder_decoder:
        inputs["decoder_input_ids"] = torch.randint(*_plain_words(config), (SAMPLES, 5), generator=draw)
    return inputs, torch.linspace(0, 1, SAMPLES, dtype=model.dtype) + seed


def _plain_words(config: Any) -> tuple[int, int]:
    """Return where words begin and end that are special in no family: not at the ends of the vocabulary."""
    words = config.get_text_config().vocab_size
    return words // 8, words * 3 // 4


def _signal(model: Any, draw: torch.Generator) -> dict[str, torch.Tensor]:
    """Return an image or a sound, where the model takes one."""
    config, main = model.config, model.main_input_name
    sizes: tuple[int, ...]
    vision = getattr(config, "vision_config", None)
    if main == "pixel_values" or (type(model).__name__ == "CLIPModel" and vision is not None):
        name, of = "pixel_values", vision or config
        sizes = (of.num_channels, of.image_size, of.image_size)
    elif main == "input_features":
        name, sizes = main, (config.num_mel_bins, 2 * config.max_source_positions)
    elif main == "input_values":
        name, sizes = main, (4000,)
    else:
        return {}
    return {name: torch.randn(SAMPLES, *sizes, generator=draw).to(model.dtype)}


def loss_of(output: Any, target: torch.Tensor) -> torch.Tensor:
    """Return a mean over samples of all numbers that a model returns, each of which counts differently."""
    total = torch.zeros_like(target)
    for leaf in _numbers(output):
        if leaf.shape[:1] == target.shape:
            flat = leaf.flatten(1).to(target.dtype)
            total = total + (flat * torch.linspace(-1, 1, flat.shape[1], dtype=flat.dtype)).mean(1)
    return (total - target).square().mean()


def _numbers(output: Any) -> list[torch.Tensor]:
    return [t for t in tree_leaves(output) if isinstance(t, torch.Tensor) and t.is_floating_point()]


def sgd(named_params: Any, gradients: dict[str, torch.Tensor]) -> torch.optim.Optimizer:
    """Return an optimizer that leaves those of its first step in ``gradients``."""
    named = list(named_params)
    optimizer = torch.optim.SGD([p for _, p in named], lr=LEARNING_RATE, momentum=0.9)

    def keep(*_: Any) -> None:
        for name, p in named:
            if p.grad is not None:
                gradients.setdefault(name, p.grad.clone())

    optimizer.register_step_pre_hook(keep)
    return optimizer


# ---- training ------------------------------------------------------------------------------------------------------


def plain(model: Any, steps: int = STEPS) -> Trained:
    """Train a model in a plain loop by its own forward, accumulating over the micro-batches."""
    with torch.no_grad():
        model.eval()
        each = [_numbers(output_of(model(**inputs))) for inputs, _ in _micro_batches(model, 0)]
        outputs = [torch.cat(parts) for parts in zip(*each)]
    model.train()
    gradients: dict[str, torch.Tensor] = {}
    optimizer = sgd(model.named_parameters(), gradients)
    for n in range(steps):
        for inputs, target in _micro_batches(model, n):
            (loss_of(output_of(model(**inputs)), target) / MICRO_BATCHES).backward()
        optimizer.step()
        optimizer.zero_grad()
    return Trained(outputs, gradients, model.state_dict())


def _micro_batches(model: Any, seed: int) -> Iterator[tuple[dict[str, torch.Tensor], torch.Tensor]]:
    inputs, target = batch(model, seed)
    for *given, y in zip(*(t.tensor_split(MICRO_BATCHES) for t in (*inputs.values(), target))):
        yield dict(zip(inputs, given)), y


def piped(model: nn.Module) -> Trained:
    """Train a model in two stages: in this process, or with the ranks that torchrun's environment names."""
    from avgpipe import Pipeline, Plan

    plan = Plan(stages=2, micro_batches=MICRO_BATCHES)
    gradients: dict[str, torch.Tensor] = {}

    def optimizer(named_params: Any) -> torch.optim.Optimizer:
        return sgd(named_params, gradients)

    with Pipeline(model, plan, loss_fn=loss_of, optimizer=optimizer, timeout_s=120) as pipeline:
        gradients.clear()  # of steps that the pipeline has tried on small tensors
        outputs = _numbers(pipeline.predict(batch(model, 0)[0]))
        for n in range(STEPS):
            pipeline.step(*batch(model, n))
        return Trained(outputs, gradients, pipeline.state_dict())


def differences(got: Trained, expected: Trained) -> dict[str, float]:
    """Return the largest differences, relative to the largest number in what is compared: infinite for other shapes.

    Of gradients those that ``got`` has are compared: of another rank's stage it has none.
    """
    if not got.gradients or not got.gradients.keys() <= expected.gradients.keys():
        by = float("inf")
    else:
        kept = [[of[name] for name in got.gradients] for of in (got.gradients, expected.gradients)]
        by = _relative(*kept, size=_largest(list(expected.gradients.values())))
    weights = [of.weights[name] for name in expected.weights for of in (got, expected) if name in of.weights]
    return {
        "outputs": _relative(got.outputs, expected.outputs),
        "gradients": by,
        "weights": _relative(weights[::2], weights[1::2]),
    }


def _relative(got: list[torch.Tensor], expected: list[torch.Tensor], size: float | None = None) -> float:
    if [t.shape for t in got] != [t.shape for t in expected]:
        return float("inf")
    by = _largest([a.double() - b.double() for a, b in zip(got, expected)])
    size = _largest(expected) if size is None else size
    return by / size if size > 0 and by == by else float("inf")


def _largest(tensors: list[torch.Tensor]) -> float:
    return max((float(t.abs().max()) for t in tensors if t.numel()), default=0.0)
