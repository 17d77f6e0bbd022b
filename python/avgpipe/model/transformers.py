"""Models of the transformers library: how to call a model whose blocks run on several stages.

``Pipeline`` takes such a model unchanged. Its stages are the model itself, with the blocks of other stages
left out, so masks, positions, attention, dropout and the head stay the model's own code, and names of
parameters stay the model's.

Input: a tensor, the model's main input such as ``input_ids`` [b, T], or a plain dict of the model's
arguments; entries that are None are left out. Key-value caches are not used.

Output: the model's output, without caches, attentions and the hidden states of all layers. If that is one
tensor, such as ``logits``, the output is this tensor; else it is the model's own output object, with
``aux_loss`` and ``router_logits`` if the configuration enables them. Losses belong to the pipeline.

Between stages pass the hidden states, and only those inputs whose values later blocks use, such as the
attention mask: each stage makes its own masks and positions from them. The library reads a given mask, for
which a GPU must be synchronized: leave it out if there is no padding.
"""

from __future__ import annotations

import importlib
import inspect
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

from avgpipe.errors import reason
from avgpipe.model.blocks import Call
from avgpipe.model.shrink import shrunk

# untyped on purpose: types would be checked against whichever release is installed
_layers: Any = importlib.import_module("transformers.modeling_layers")
_utils: Any = importlib.import_module("transformers.utils")

_TRIALS = ((2, 7, True), (3, 5, False))  # samples, positions, whether some of them are padding


def call_of(model: nn.Module) -> Call:
    """Return how to call a model of transformers.

    Raises:
        ValueError: For a model that cannot be tested, or whose settings stages cannot follow.
    """
    whole: Any = model
    _refuse(whole)
    arguments = inspect.signature(whole.forward).parameters
    named = {name for name, argument in arguments.items() if argument.kind is not argument.VAR_KEYWORD}
    more = set(_utils.TransformersKwargs.__annotations__) if len(named) < len(arguments) else set()
    caches = "use_cache" in named or (more and hasattr(whole.config.get_text_config(), "use_cache"))
    word = _plain_words(whole.config)[0]
    return Call(
        trials=[_trial(whole, named, *sizes, seed=n) for n, sizes in enumerate(_TRIALS)],
        main=str(whole.main_input_name),
        accepts=frozenset(named | more),
        is_block=_finder(whole),
        fixed={"use_cache": False} if caches else {},
        fill=dict.fromkeys(("input_ids", "decoder_input_ids"), word),
        output=output_of,
    )


def is_block(module: nn.Module) -> bool:
    """Return whether a module is a layer in the library's sense, which can recompute on its own."""
    return isinstance(module, _layers.GradientCheckpointingLayer)


def _finder(model: nn.Module) -> Callable[[nn.Module], bool]:
    """Return a test for blocks: the library's layers, or without any, the members of lists."""
    if any(map(is_block, model.modules())):
        return is_block
    lists = (m for m in model.modules() if isinstance(m, nn.ModuleList) and len(m) > 1)
    members = {id(member) for members in lists for member in members}
    return lambda module: id(module) in members


def output_of(returned: Any) -> Any:
    """Return a model's output without caches, attentions and the hidden states of all layers."""
    if not isinstance(returned, _utils.ModelOutput):
        return returned
    kept = {name: value for name, value in returned.items() if _is_kept(name) and value is not None}
    return next(iter(kept.values())) if len(kept) == 1 else type(returned)(**kept)


def _is_kept(name: str) -> bool:
    if name == "last_hidden_state":
        return True
    left_out = ("cache", "key_values", "hidden_state")
    return not (
        name.startswith("encoder_") or name.endswith("attentions") or any(n in name for n in left_out)
    )


def _refuse(model: Any) -> None:
    kind = type(model).__name__
    if any(getattr(m, "gradient_checkpointing", False) for m in model.modules()):
        raise ValueError(
            f"gradient checkpointing of {kind} is on: switch it off and "
            "let the pipeline do it with Plan(recompute='always')"
        )
    for name in ("layerdrop", "encoder_layerdrop", "decoder_layerdrop"):
        if getattr(model.config, name, 0.0):
            raise ValueError(
                f"{kind} leaves out layers at random, which stages cannot agree on: set its config.{name} to 0.0"
            )


# ---- inputs for a test call ----------------------------------------------------------------------------------------


def _trial(
    model: Any, named: set[str], samples: int, positions: int, padded: bool, seed: int
) -> dict[str, Any]:
    """Make small inputs of a model."""
    config, main = model.config, model.main_input_name
    tensor = next(iter(model.parameters()))
    draw = torch.Generator().manual_seed(seed)
    if main == "input_ids":
        inputs = _text(config, named, samples, positions, padded, draw)
    else:
        make = _SIGNALS.get(main)
        if make is None:
            raise ValueError(
                f"{type(model).__name__} takes {main}, of which no small example can be made here"
            )
        inputs = {main: torch.randn(samples, *make(config), generator=draw)}
    # An image tower beside a text tower; elsewhere words replace images, which no trial needs.
    stands_for = hasattr(config, "image_token_id") or hasattr(config, "image_token_index")
    if (
        main == "input_ids"
        and "pixel_values" in named
        and hasattr(config, "vision_config")
        and not stands_for
    ):
        inputs["pixel_values"] = torch.randn(samples, *_image(config.vision_config), generator=draw)
    if config.is_encoder_decoder and "decoder_input_ids" in named:
        inputs["decoder_input_ids"] = _words(config, (samples, positions - 2), draw)
    return {
        name: x.to(tensor.device, tensor.dtype if x.is_floating_point() else None)
        for name, x in inputs.items()
    }


def _text(
    config: Any, named: set[str], samples: int, positions: int, padded: bool, draw: torch.Generator
) -> dict[str, Tensor]:
    words = _words(config, (samples, positions), draw)
    inputs = {"input_ids": words}
    if padded and "attention_mask" in named:
        inputs["attention_mask"] = torch.ones_like(words)
        inputs["attention_mask"][0, -2:] = 0
        pad = getattr(config.get_text_config(), "pad_token_id", None)
        if isinstance(pad, int) and pad >= 0:
            words[0, -2:] = pad
    kinds = getattr(config, "type_vocab_size", 0)
    if padded and "token_type_ids" in named and kinds:
        inputs["token_type_ids"] = torch.randint(kinds, words.shape, generator=draw)
    return inputs


def _words(config: Any, shape: tuple[int, int], draw: torch.Generator) -> Tensor:
    choice = torch.tensor(_plain_words(config))
    return choice[torch.randint(len(choice), shape, generator=draw)]


def _plain_words(config: Any) -> list[int]:
    """Return some numbers of words that are not special; [0] if there are no words."""
    text = config.get_text_config()
    size = getattr(text, "vocab_size", None) or 0
    fields = [value for name, value in vars(text).items() if name.endswith(("token_id", "token_index"))]
    special = {word for value in fields for word in (value if isinstance(value, list | tuple) else [value])}
    return [n for n in reversed(range(size)) if n not in special][:100] or [0]


def _image(config: Any) -> tuple[int, ...]:
    size = config.image_size
    height, width = (size, size) if isinstance(size, int) else size
    frames = getattr(config, "num_frames", None)
    return (*([frames] if frames else []), config.num_channels, height, width)


# by a model's main input that is no text: its sizes without the samples
_SIGNALS: dict[str, Callable[[Any], tuple[int, ...]]] = {
    "pixel_values": _image,
    "input_features": lambda config: (config.num_mel_bins, 2 * config.max_source_positions),
    "input_values": lambda config: (4000,),
}


def twin_of(model: nn.Module) -> nn.Module:
    """Make a tiny model of the same kind, depth and names as one on the meta device.

    Raises:
        ValueError: No such model can be made.
    """
    whole: Any = model
    try:
        with torch.random.fork_rng(devices=[]), torch.device("cpu"):
            torch.default_generator.manual_seed(0)
            twin: nn.Module = type(whole)(shrunk(whole.config))
    except Exception as error:
        raise ValueError(
            f"{type(model).__name__} is on the meta device, and no tiny model like it can be made to observe its "
            f"forward ({reason(error)}): build it with values"
        ) from error
    mine, other = ({name for name, _ in of.named_parameters()} for of in (model, twin))
    if mine != other:
        raise ValueError(
            f"{type(model).__name__} is on the meta device, and a tiny model like it has other parameters, such as "
            f"{sorted(mine ^ other)[0]}: build it with values"
        )
    return twin
