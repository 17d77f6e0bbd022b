"""Models of transformers and pieces of tokenizers, both optional: new ones, or those of a local folder.

Nothing is downloaded.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import torch

from avgpipe.errors import reason
from avgpipe.files import read_json
from avgpipe_lab.workloads import library
from avgpipe_lab.workloads.data import find_files

_WEIGHTS = ("model.safetensors", "pytorch_model.bin")
_FOLDER = {
    "configuration": ("config.json",),
    "weights": tuple(name + index for index in ("", ".index.json") for name in _WEIGHTS),
    "tokenizer": ("tokenizer.json", "vocab.txt", "vocab.json"),
}

Encode = Callable[[Sequence[str]], list[list[int]]]  # the numbers of each line's pieces


class Vocabulary(NamedTuple):
    """The number of pieces, and the numbers of the special ones."""

    size: int
    pad: int
    begin: int
    end: int
    mask: int


class Subwords:
    """Pieces of words learnt from text: byte-level BPE, which can encode every text.

    Byte-pair encoding: Sennrich, Haddow, Birch, ACL 2016, arXiv 1508.07909. A word includes the space before
    it; the first word of a line gets one, too, so that a word has the same pieces everywhere.
    """

    SPECIAL = ("<pad>", "<s>", "</s>", "<mask>")
    pad, begin, end, mask = range(4)

    def __init__(self, tokenizer: Any) -> None:
        """Wrap a ``tokenizers.Tokenizer``; see :meth:`learn`."""
        tokenizer.encode_special_tokens = True  # "<s>" in a text is three characters, not the special piece
        self._tokenizer = tokenizer

    @classmethod
    def learn(cls, lines: Iterable[str], size: int, *, lowercase: bool = False) -> Subwords:
        """Learn from lines. The same lines give the same pieces in every process.

        Args:
            lines: lines to learn from.
            size: number of pieces, with the special ones and one for each byte; a short text gives fewer.
            lowercase: whether all text is lower-cased first.

        Raises:
            LibraryNotFound: tokenizers is not installed.
        """
        tokenizers = library("tokenizers", "a vocabulary of subwords")
        normalizers, byte_level = tokenizers.normalizers, tokenizers.pre_tokenizers.ByteLevel
        steps = [normalizers.Lowercase()] * lowercase + [normalizers.Prepend(" ")]
        tokenizer = tokenizers.Tokenizer(tokenizers.models.BPE())
        tokenizer.normalizer = normalizers.Sequence(steps)
        tokenizer.pre_tokenizer = byte_level(add_prefix_space=False)
        tokenizer.decoder = tokenizers.decoders.ByteLevel()
        kept = {"special_tokens": list(cls.SPECIAL), "initial_alphabet": sorted(byte_level.alphabet())}
        trainer = tokenizers.trainers.BpeTrainer(vocab_size=size, show_progress=False, **kept)
        tokenizer.train_from_iterator(lines, trainer)
        return cls(tokenizer)

    def __len__(self) -> int:
        return int(self._tokenizer.get_vocab_size())

    @property
    def vocabulary(self) -> Vocabulary:
        return Vocabulary(len(self), self.pad, self.begin, self.end, self.mask)

    def encode(self, lines: Sequence[str]) -> list[list[int]]:
        """Return the numbers of each line's pieces, without special ones. An empty line has none."""
        return [encoded.ids for encoded in self._tokenizer.encode_batch(list(lines))]

    def decode(self, rows: Iterable[Sequence[int]]) -> list[str]:
        """Return the text of each row; special pieces are left out, and bytes that are no UTF-8 become U+FFFD.

        ``decode(encode(lines))`` returns the lines, in lower case if the pieces are.
        """
        texts = self._tokenizer.decode_batch([list(row) for row in rows], skip_special_tokens=True)
        return [text.removeprefix(" ") for text in texts]


def new_model(kind: str, config: Any, seed: int = 0) -> Any:
    """Make a transformers model of class ``kind`` whose initial weights depend on the seed only.

    The caller's random state is unchanged.
    """
    transformers = library("transformers", kind)
    with torch.random.fork_rng(devices=[]):
        torch.default_generator.manual_seed(seed)
        return getattr(transformers, kind)(config)


def check_pretrained(folder: str | Path, model_type: str) -> dict[str, Any]:
    """Read the configuration in a folder that ``save_pretrained`` of a model and of its tokenizer wrote.

    Raises:
        DataNotFound: the folder, or one of its files, does not exist.
        ValueError: it holds a model of another type.
    """
    works = f"one that save_pretrained of a {model_type} model and of its tokenizer wrote"
    file = find_files(folder, _FOLDER, works, kind="pretrained folder")["configuration"]
    try:
        config = read_json(file, finite=False)
        found = config["model_type"]
    except (OSError, ValueError, LookupError, TypeError) as error:
        raise ValueError(f"{file} cannot be read: {reason(error)}") from None
    if found != model_type:
        raise ValueError(f"pretrained folder {folder} holds a model of type {found!r}, not {model_type!r}")
    return dict(config)


def config_of(folder: Path | None, model_type: str, sizes: dict[str, Any]) -> dict[str, Any]:
    """Return ``sizes``, overridden by the configuration of a pretrained folder; see :func:`check_pretrained`."""
    return sizes if folder is None else {**sizes, **check_pretrained(folder, model_type)}


def load_pretrained(kind: str, folder: str | Path, model_type: str, *, seed: int = 0, **options: Any) -> Any:
    """Load a model of class ``kind`` with the weights of a folder, float32, and the folder's own tokenizer.

    A head that the folder lacks is drawn from the seed. ``options``: fields of the configuration.

    Returns:
        The model and the tokenizer.

    Raises:
        ValueError: see :func:`check_pretrained`, and for files that do not fit together.
    """
    check_pretrained(folder, model_type)
    transformers = library("transformers", kind)
    transformers.utils.logging.disable_progress_bar()
    try:
        with torch.random.fork_rng(devices=[]):
            torch.default_generator.manual_seed(seed)
            model, found = getattr(transformers, kind).from_pretrained(
                folder, local_files_only=True, dtype=torch.float32, output_loading_info=True, **options
            )
            tokenizer = transformers.AutoTokenizer.from_pretrained(folder, local_files_only=True)
    except Exception as error:  # these libraries raise many types for a broken file
        raise ValueError(f"pretrained folder {folder} cannot be loaded as {kind}: {reason(error)}") from None
    # A head may be missing, and the pooling layer before it.
    body = f"{model.base_model_prefix}."
    lost = sorted(key for key in found["missing_keys"] if key.startswith(body) and ".pooler." not in key)
    if lost:
        some = f"{len(lost)} of a {model_type}'s tensors, such as {lost[0]}"
        raise ValueError(f"the weights in {folder} lack {some}")
    if len(tokenizer) > model.config.vocab_size:
        numbers = f"{len(tokenizer)} pieces and its model only {model.config.vocab_size}"
        raise ValueError(
            f"the tokenizer in {folder} has {numbers}: they do not belong to the same {model_type}"
        )
    return model, tokenizer
