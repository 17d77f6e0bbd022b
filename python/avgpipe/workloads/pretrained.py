"""Models of transformers: with initial weights from a seed, or with those of a local folder. Nothing is downloaded."""

from __future__ import annotations

import json
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from avgpipe.errors import reason
from avgpipe.workloads.libraries import library
from avgpipe.workloads.text import DataNotFound

_CONFIG_FILE = "config.json"
_WEIGHT_FILES = (
    "model.safetensors",
    "model.safetensors.index.json",
    "pytorch_model.bin",
    "pytorch_model.bin.index.json",
)
_TOKENIZER_FILES = ("tokenizer.json", "vocab.txt", "vocab.json")


@dataclass(frozen=True)
class Family:
    """Models that share their weights' names.

    Attributes:
        name: for people.
        model_type: what their configuration says.
        body: parts of the names of weights that a folder must have; a head may be missing.
    """

    name: str
    model_type: str
    body: tuple[str, ...]


BERT = Family("BERT", "bert", (".embeddings.", ".encoder."))
GPT2 = Family("GPT-2", "gpt2", ("transformer.",))


def new_model(kind: str, config: Any, seed: int = 0) -> Any:
    """A transformers model of class ``kind`` whose initial weights depend on the seed alone; the caller's random
    state stays as it is.
    """
    transformers = library("transformers", kind)
    with torch.random.fork_rng(devices=[]):
        torch.default_generator.manual_seed(seed)
        return getattr(transformers, kind)(config)


def check_pretrained(family: Family, folder: str | Path) -> dict[str, Any]:
    """The configuration in a folder that ``save_pretrained`` of a model and of its tokenizer wrote.

    Raises:
        DataNotFound: the folder, or one of its files, is not there.
        ValueError: it holds something else than the family's models.
    """
    folder = Path(folder)
    if not folder.is_dir():
        what = "is a file, not a folder" if folder.exists() else "does not exist"
        raise DataNotFound(
            f"pretrained folder {folder} {what}; give one that save_pretrained of a {family.name} wrote"
        )
    needed = {"configuration": (_CONFIG_FILE,), "weights": _WEIGHT_FILES, "tokenizer": _TOKENIZER_FILES}
    for what, names in needed.items():
        if not any((folder / name).is_file() for name in names):
            raise DataNotFound(f"pretrained folder {folder} lacks the {what}: {' or '.join(names)}")
    try:
        config = json.loads((folder / _CONFIG_FILE).read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise ValueError(f"{folder / _CONFIG_FILE} cannot be read: {error}") from None
    found = config.get("model_type") if isinstance(config, dict) else None
    if found != family.model_type:
        raise ValueError(f"pretrained folder {folder} holds a model of type {found!r}, not a {family.name}")
    assert isinstance(config, dict)
    return config


def load_pretrained(
    family: Family, kind: str, folder: str | Path, *, seed: int = 0, **options: Any
) -> tuple[Any, Any]:
    """A model of class ``kind`` with the weights of a folder, float32, and the folder's own tokenizer.

    A head that the folder lacks is drawn from the seed. ``options``: of the configuration.

    Raises: as :func:`check_pretrained`, and ValueError for files that do not fit together.
    """
    check_pretrained(family, folder)
    transformers = library("transformers", kind)
    try:
        with _quiet(transformers), torch.random.fork_rng(devices=[]):
            torch.default_generator.manual_seed(seed)
            model, found = getattr(transformers, kind).from_pretrained(
                folder, local_files_only=True, dtype=torch.float32, output_loading_info=True, **options
            )
            tokenizer = transformers.AutoTokenizer.from_pretrained(folder, local_files_only=True)
    except Exception as error:  # whatever a broken file makes these libraries raise
        raise ValueError(f"pretrained folder {folder} cannot be loaded as {kind}: {reason(error)}") from None
    lost = [key for key in sorted(found["missing_keys"]) if any(part in key for part in family.body)]
    if lost:
        raise ValueError(
            f"the weights in {folder} lack {len(lost)} of a {family.name}'s tensors, such as {lost[0]}"
        )
    if len(tokenizer) > model.config.vocab_size:
        raise ValueError(
            f"the tokenizer in {folder} has {len(tokenizer)} pieces and its model only {model.config.vocab_size}: "
            f"they are not of the same {family.name}"
        )
    return model, tokenizer


@contextmanager
def _quiet(transformers: Any) -> Iterator[None]:
    """Without the progress bars of loading."""
    logging = transformers.utils.logging
    shown = logging.is_progress_bar_enabled()
    logging.disable_progress_bar()
    try:
        yield
    finally:
        if shown:
            logging.enable_progress_bar()
