"""Texts for language models: a folder with train, valid and test, or the Python standard library's source."""

from __future__ import annotations

import gzip
import re
import sysconfig
import zlib
from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch

SPLITS = ("train", "valid", "test")
EOS = "<eos>"
UNKNOWN = "<unk>"

# {} is the split; the first that exists is read
_FILE_NAMES = ("{}.txt", "{}.txt.gz", "wiki.{}.tokens", "wiki.{}.tokens.gz")

# Folders of the standard library that are not everywhere, not the library's, or tables rather than programs.
_SKIPPED = {
    "site-packages",
    "dist-packages",
    "test",
    "tests",
    "idlelib",
    "turtledemo",
    "lib2to3",
    "encodings",
    "pydoc_data",
}

# In this order: one or more line ends (blank lines make no token), indentation, words, single signs.
_SOURCE_TOKEN = re.compile(r"(?:[ \t]*\n)+|^ +|\w+|[^\w\s]", re.MULTILINE)


class DataNotFound(FileNotFoundError, ValueError):
    """The data that a workload should read is not there. The message names the folder and what is missing."""


@dataclass(frozen=True)
class Corpus:
    """A text as token numbers.

    Attributes:
        vocabulary: the token of each number, most frequent in train first.
        train, valid, test: int64 [tokens], each number an index of ``vocabulary``.
    """

    vocabulary: tuple[str, ...]
    train: torch.Tensor
    valid: torch.Tensor
    test: torch.Tensor


def load_text(
    path: str | Path | None, *, vocabulary_size: int | None = None, max_bytes: int | None = None
) -> Corpus:
    """Read a corpus; its vocabulary is that of train.

    Args:
        path: a folder with ``train``, ``valid`` and ``test``, each as ``.txt``, ``.txt.gz`` or
            ``wiki.<split>.tokens``, UTF-8. Tokens are split at white space, and each line ends with
            ``<eos>``. None: the source of this Python's standard library, tokenised into words, signs,
            indentation and line ends (``<eos>``), and divided by file.
        vocabulary_size: keep so many types of train, ``<unk>`` among them; the others become ``<unk>``. None:
            all. Types that train lacks become ``<unk>`` in any case.
        max_bytes: how much of the standard library to read, in whole files. Folders are always read whole.

    Raises:
        DataNotFound: the folder, or one of its files, is not there.
        ValueError: a file is not readable as text.
    """
    if vocabulary_size is not None and vocabulary_size < 1:
        raise ValueError(f"vocabulary_size must be at least 1, got {vocabulary_size}")
    if path is None:
        files = _standard_library(max_bytes)
        tokens = {
            split: [t for file in files[split] for t in split_words(file, source=True)] for split in SPLITS
        }
    else:
        tokens = {split: split_words(read_file(file)) for split, file in find_text(path).items()}
    return _numbered(tokens, vocabulary_size)


def read_text(path: str | Path | None, max_bytes: int | None = None) -> dict[str, str]:
    """The text of each of ``SPLITS`` as it stands in its file, with line ends ``\\n``.

    Args:
        path: a folder as :func:`load_text` reads it, or None: the standard library's source, file after file.
        max_bytes: how much to read of the three splits together, eight tenths of it train: of a folder's files
            the first lines, of the standard library whole files. None: all.

    Raises:
        DataNotFound: the folder, or one of its files, is not there.
        ValueError: a file is not readable as text, or has no words.
    """
    if max_bytes is not None and max_bytes < 1:
        raise ValueError(f"max_bytes must be at least 1, got {max_bytes}")
    if path is None:
        return {split: "".join(map(_ended, files)) for split, files in _standard_library(max_bytes).items()}
    texts = {}
    for split, file in find_text(path).items():
        text = _ended(read_file(file))
        if max_bytes is not None:
            text = _first_lines(text, max_bytes * (8 if split == "train" else 1) // 10)
        if not text.strip():
            raise ValueError(f"{file} has no words: give a text for {split}")
        texts[split] = text
    return texts


def split_words(text: str, *, source: bool = False) -> list[str]:
    """The words of a text as :func:`load_text` counts them, every line's end one of them.

    ``source``: a program's text, in which indentation and single signs are words and blank lines are not.
    """
    if source:
        return [EOS if token[-1] == "\n" else token for token in _SOURCE_TOKEN.findall(text)]
    return _ended(text).replace("\n", f" {EOS} ").split()


def find_text(path: str | Path) -> dict[str, Path]:
    """The file of each split in a folder, without reading them. Raises DataNotFound."""
    folder = Path(path)
    if not folder.is_dir():
        what = "is a file, not a folder" if folder.exists() else "does not exist"
        raise DataNotFound(
            f"data folder {folder} {what}; give a folder with train.txt, valid.txt and test.txt"
        )
    found: dict[str, Path] = {}
    for split in SPLITS:
        candidates = (folder / name.format(split) for name in _FILE_NAMES)
        file = next((c for c in candidates if c.is_file()), None)
        if file is not None:
            found[split] = file
    missing = [f"{split}.txt" for split in SPLITS if split not in found]
    if missing:
        raise DataNotFound(
            f"data folder {folder} lacks {', '.join(missing)} (.txt.gz and wiki.<split>.tokens are read too)"
        )
    return found


def read_file(file: Path) -> str:
    """UTF-8 text, unpacked where the name ends in .gz. Raises ValueError for what cannot be read."""
    try:
        raw = gzip.decompress(file.read_bytes()) if file.suffix == ".gz" else file.read_bytes()
        return raw.decode("utf-8")
    except UnicodeDecodeError as error:
        raise ValueError(
            f"{file} is not UTF-8 text: byte {error.start} is {error.object[error.start]:#04x}"
        ) from None
    except (OSError, EOFError, zlib.error) as error:
        raise ValueError(f"{file} cannot be read: {error}") from None


def _ended(text: str) -> str:
    text = text.replace("\r\n", "\n")
    return text + "\n" if text and not text.endswith("\n") else text


def _first_lines(text: str, limit_bytes: int) -> str:
    """Whole lines of at most ``limit_bytes`` together, or the first that has words."""
    raw = text.encode()
    kept = raw[: raw.rfind(b"\n", 0, limit_bytes) + 1].decode()
    if kept.strip():
        return kept
    first = re.match(r"\s*[^\n]*\n", text)
    return first.group() if first else text


def _standard_library(max_bytes: int | None) -> dict[str, list[str]]:
    """The files of each split."""
    root = Path(sysconfig.get_path("stdlib"))
    files: dict[str, list[str]] = {split: [] for split in SPLITS}
    used = 0
    for index, file in enumerate(_source_files(root)):
        source = file.read_text(encoding="utf-8", errors="replace")
        used += len(source)
        if max_bytes is not None and used > max_bytes and index >= 10:
            break
        # of ten files in a row, one is for validation and one for the test
        files[{4: "valid", 9: "test"}.get(index % 10, "train")].append(source)
    if not all(any(map(str.strip, sources)) for sources in files.values()):
        raise DataNotFound(
            f"too few Python sources in {root}; give a folder with train.txt, valid.txt and test.txt"
        )
    return files


def _source_files(root: Path) -> list[Path]:
    files = [f for f in root.rglob("*.py") if _SKIPPED.isdisjoint(f.relative_to(root).parts[:-1])]
    return sorted(files, key=lambda f: f.relative_to(root).as_posix())


def _numbered(tokens: dict[str, list[str]], vocabulary_size: int | None) -> Corpus:
    vocabulary = _vocabulary(tokens["train"], vocabulary_size)
    number = {token: index for index, token in enumerate(vocabulary)}
    unknown = any(not number.keys() >= set(tokens[split]) for split in SPLITS)
    if UNKNOWN not in number and (unknown or vocabulary_size is not None):
        number[UNKNOWN] = len(vocabulary)
        vocabulary.append(UNKNOWN)
    numbers = {split: _lookup(tokens[split], number) for split in SPLITS}
    return Corpus(tuple(vocabulary), **numbers)


def _vocabulary(train: Iterable[str], size: int | None) -> list[str]:
    counts = Counter(train)  # equal counts stay in the order of their first appearance
    if size is not None and len(counts) > size - (UNKNOWN not in counts):
        counts.pop(UNKNOWN, None)
        return [token for token, _ in counts.most_common(size - 1)]
    return [token for token, _ in counts.most_common()]


def _lookup(tokens: list[str], number: dict[str, int]) -> torch.Tensor:
    unknown = number.get(UNKNOWN, -1)  # -1 is never used: without <unk> every token has its number
    numbers = (number.get(token, unknown) for token in tokens)
    return torch.from_numpy(np.fromiter(numbers, dtype=np.int64, count=len(tokens)))
