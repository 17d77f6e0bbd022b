"""The loss of a transformers model, for micro-batches whose losses add up to that of the batch.

A model's forward computes its loss from labels that only the last stage has. Most heads use one of three
losses: the cross entropy of the next tokens, of tokens, or a mean over samples. The model's ``loss_type``
names it, and a forward on a tiny input confirms it.
"""

from __future__ import annotations

import importlib
import math
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

from avgpipe.errors import library, reason
from avgpipe.model.context import in_mode
from avgpipe.model.transformers import call_of, twin_of

# untyped on purpose: types would be checked against whichever release is installed
_losses: Any = library("transformers.loss.loss_utils", "avgpipe.interop.hf", "transformers accelerate")
_outputs: Any = importlib.import_module("transformers.modeling_outputs")

IGNORED = -100  # label that the loss ignores

# Maps (outputs, labels, num_items_in_batch) to the loss of some samples, divided by the items of all the
# batch.
ItemLoss = Callable[[Any, Tensor, Tensor], Tensor]
Count = Callable[[Tensor], Tensor]  # counts the labels that are items


class TrainerLoss:
    """A loss as transformers' Trainer takes it, as ``loss_fn(output, labels)`` of a Pipeline: ``(sum, count)``.

    Args:
        function: ``function(outputs, labels, num_items_in_batch)``, where ``outputs`` is an output object of
            transformers.
        count: Counts the items of labels.
        divides: Whether ``function`` divides by its last argument; None: decided at the first micro-batch. A
            function that does not is treated as a mean over samples.
    """

    def __init__(self, function: ItemLoss, count: Count, divides: bool | None = True) -> None:
        self._function, self._count, self._divides = function, count, divides

    def __call__(self, output: Any, labels: Tensor) -> Any:
        outputs, count = _as_outputs(output), self._count(labels)
        one = torch.ones_like(count)
        value = self._function(outputs, labels, one)
        if self._divides is None:
            with torch.no_grad():
                halved = self._function(outputs, labels, 2 * one)
            self._divides = math.isclose(
                2 * float(halved), float(value.detach()), rel_tol=1e-2, abs_tol=1e-12
            )
        return (value, count) if self._divides else value

    def mean(self, output: Any, labels: Tensor) -> Tensor:
        """Return the loss of all of ``labels``."""
        found = self(output, labels)
        mean: Tensor = found[0] / found[1] if isinstance(found, tuple) else found
        return mean


def counted(labels: Tensor) -> Tensor:
    """Count the labels that are not ignored."""
    return (labels != IGNORED).sum()


def counted_behind_first(labels: Tensor) -> Tensor:
    """Count as :func:`counted`, without the first position, which is never predicted."""
    return counted(labels[..., 1:])


def trainer_loss(
    model: nn.Module,
    compute_loss_func: Callable[..., Any] | None = None,
    smoother: Any = None,
    count: Count | None = None,
) -> TrainerLoss:
    """Return the loss that transformers' Trainer would train ``model`` with.

    Args:
        model: A transformers model, or a PeftModel around one; any module if there is a
            ``compute_loss_func``.
        compute_loss_func: The Trainer's ``compute_loss_func(outputs, labels, num_items_in_batch=)``.
        smoother: transformers' LabelSmoother, if labels are smoothed.
        count: The Trainer's rule for the items of a sequence; by default that of the model's own loss.

    Raises:
        ValueError: For a model with another loss than those known here.
    """
    given: Any = model
    base = given.get_base_model() if hasattr(given, "get_base_model") else given
    head = getattr(base, "loss_function", None)
    shifts = head is _losses.ForCausalLMLoss and not base.config.is_encoder_decoder
    own_count = counted_behind_first if shifts else counted
    if compute_loss_func is not None:
        return TrainerLoss(
            lambda outputs, labels, items: compute_loss_func(outputs, labels, num_items_in_batch=items),
            count or own_count,
            divides=None,
        )
    if head not in _OF_HEADS:
        raise ValueError(
            f"the loss of {type(base).__name__} is not known to a pipeline, in which only the last stage has labels: "
            "give compute_loss_func(outputs, labels, num_items_in_batch)"
        )
    function = _OF_HEADS[head](base.config, shifts)
    _prove(base, TrainerLoss(function, own_count))
    if smoother is not None:

        def smoothed(outputs: Any, labels: Tensor, items: Tensor) -> Any:
            return smoother(outputs, labels, shift_labels=shifts, num_items_in_batch=items)

        return TrainerLoss(smoothed, own_count)
    is_of_samples = _OF_HEADS[head] is _of_samples
    return TrainerLoss(function, own_count if is_of_samples else count or own_count)


def _as_outputs(output: Any) -> Any:
    """Return an output object: a pipeline returns a tensor instead of an output object with one."""
    return _outputs.CausalLMOutput(logits=output) if isinstance(output, Tensor) else output


# ---- losses of heads -----------------------------------------------------------------------------------------------


def _of_tokens(config: Any, shifts: bool) -> ItemLoss:
    function = _losses.ForCausalLMLoss if shifts else _losses.ForMaskedLMLoss
    count = counted_behind_first if shifts else counted
    coefficient = getattr(config, "router_aux_loss_coef", 0.0)

    def loss(outputs: Any, labels: Tensor, items: Tensor) -> Tensor:
        logits = outputs["logits"]
        value: Tensor = function(logits, labels, logits.shape[-1], num_items_in_batch=items)
        routing = outputs.get("aux_loss")  # a separate mean, weighted like the tokens
        if routing is not None:
            value = value + coefficient * routing * count(labels) / items
        return value

    return loss


def _of_samples(config: Any, shifts: bool) -> ItemLoss:
    def loss(outputs: Any, labels: Tensor, items: Tensor) -> Tensor:
        mean: Tensor = _losses.ForSequenceClassificationLoss(
            labels=labels, pooled_logits=outputs["logits"], config=config
        )
        return mean * counted(labels) / items

    return loss


_OF_HEADS: dict[Any, Callable[[Any, bool], ItemLoss]] = {
    _losses.ForCausalLMLoss: _of_tokens,
    _losses.ForMaskedLMLoss: _of_tokens,
    _losses.ForTokenClassification: _of_tokens,
    _losses.ForSequenceClassificationLoss: _of_samples,
}


# ---- the proof -----------------------------------------------------------------------------------------------------


def _prove(model: Any, loss: TrainerLoss) -> None:
    """Raise ValueError unless the model's forward computes this loss on a tiny input."""
    if any(parameter.is_meta for parameter in model.parameters()):
        model = twin_of(model)
    dtype = next(iter(model.parameters())).dtype
    inputs = dict(call_of(model).trials[0])
    kind = getattr(model.config, "problem_type", None)
    try:
        with torch.no_grad(), in_mode(model, False):
            labels = _labels(model.config, model(**inputs)["logits"])
            returned = model(**inputs, labels=labels)
            expected, found = float(returned["loss"]), float(loss.mean(returned, labels))
    except (KeyError, TypeError, ValueError, RuntimeError, IndexError) as error:
        raise ValueError(
            f"the loss of {type(model).__name__} cannot be tried on a tiny input ({type(error).__name__}: "
            f"{reason(error)}): give compute_loss_func(outputs, labels, num_items_in_batch)"
        ) from error
    finally:
        if hasattr(model.config, "problem_type"):
            model.config.problem_type = kind  # the first labels set it
    if not math.isclose(expected, found, rel_tol=math.sqrt(torch.finfo(dtype).eps)):
        raise ValueError(
            f"{type(model).__name__} has the loss {expected:.6g} on a tiny input, but its kind of head has "
            f"{found:.6g}: give compute_loss_func(outputs, labels, num_items_in_batch)"
        )


def _labels(config: Any, logits: Tensor) -> Tensor:
    """Make labels for ``logits``."""
    if logits.dim() == 3:
        labels = torch.arange(logits[..., 0].numel(), device=logits.device).reshape(logits.shape[:2])
        labels = labels % logits.shape[-1]
        labels[0, :2] = IGNORED
        return labels
    kind = getattr(config, "problem_type", None)
    if kind == "regression" or (kind is None and logits.shape[-1] == 1):
        return torch.linspace(0, 1, logits.numel(), dtype=logits.dtype, device=logits.device).reshape(
            logits.shape
        )
    if kind == "multi_label_classification":
        return (torch.arange(logits.numel(), device=logits.device) % 2).reshape(logits.shape).to(logits.dtype)
    return torch.arange(len(logits), device=logits.device) % logits.shape[-1]
