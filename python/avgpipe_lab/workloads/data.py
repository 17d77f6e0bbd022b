"""Data folders: their files and texts; or, without a folder, the source of the Python standard library."""

from __future__ import annotations

import gzip
import re
import sysconfig
import zlib
from collections import Counter
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import NamedTuple

import torch
from torch import Tensor

from avgpipe.tasks import DataNotFound

EOS, UNKNOWN = "<eos>", "<unk>"

_SPLITS = ("train", "valid")
_TEXT_NAMES = ("{}.txt", "{}.txt.gz", "wiki.{}.tokens", "wiki.{}.tokens.gz")
TEXT_FOLDER = "a folder with train.txt and valid.txt (.txt.gz and wiki.<split>.tokens are read too)"

# Folders of the standard library that are not everywhere, not the library's, or tables instead of programs.
_SKIPPED = re.compile(r"(.*/)?((site|dist)-packages|tests?|idlelib|turtledemo|lib2to3|encodings|pydoc_data)/")

# In this order: one or more line ends (blank lines make no token), indentation, words, single signs.
_SOURCE_TOKEN = re.compile(r"(?:[ \t]*\n)+|^ +|\w+|[^\w\s]", re.MULTILINE)

# Names of a split of translations before the language; the first existing one is read.
_TRANSLATIONS = {"train": ("train",), "valid": ("val", "valid", "dev")}
TRANSLATIONS_FOLDER = "a folder with train.{en,de} and val.{en,de}, a sentence a line (.gz is read too)"

MRPC_FILES = ("msr_paraphrase_train.txt", "dev_ids.tsv")
_MRPC_HEADER = "Quality\t#1 ID\t#2 ID\t#1 String\t#2 String"
_MRPC_ROW = re.compile("([01])\t([^\t]*\t[^\t]*)\t([^\t]*)\t([^\t]*)")

# ---- files ---------------------------------------------------------------------------------------------------------


def find_files(
    folder: str | Path, wanted: Mapping[str, Sequence[str]], works: str, *, kind: str = "data folder"
) -> dict[str, Path]:
    """Find in a folder, for each key, the first existing file of several names.

    Args:
        folder: where to look.
        wanted: the names by key.
        works: a valid alternative, for the message.
        kind: name of the folder in the message.

    Raises:
        DataNotFound: the folder, or all files of a key, do not exist.
    """
    folder = Path(folder)
    if not folder.is_dir():
        what = "is a file, not a folder" if folder.exists() else "does not exist"
        raise DataNotFound(f"{kind} {folder} {what}; give {works}")
    found = {key: [folder / n for n in names if (folder / n).is_file()] for key, names in wanted.items()}
    missing = [wanted[key][0] for key, files in found.items() if not files]
    if missing:
        raise DataNotFound(f"{kind} {folder} lacks {', '.join(missing)}; give {works}")
    return {key: files[0] for key, files in found.items()}


def read_bytes(file: Path) -> bytes:
    """Read a file, decompressed if its name ends in .gz. Raises ValueError for a file that cannot be read."""
    try:
        raw = file.read_bytes()
        return gzip.decompress(raw) if file.suffix == ".gz" else raw
    except (OSError, EOFError, zlib.error) as error:
        raise ValueError(f"{file} cannot be read: {error}") from None


def read_file(file: Path) -> str:
    """Read UTF-8 text as :func:`read_bytes` does, with or without a byte-order mark."""
    try:
        return read_bytes(file).decode("utf-8-sig")
    except UnicodeDecodeError as error:
        byte = f"byte {error.start} is {error.object[error.start]:#04x}"
        raise ValueError(f"{file} is not UTF-8 text: {byte}") from None


def _lines(file: Path) -> list[str]:
    # Not splitlines(): it also splits at characters that may occur inside a sentence.
    return [line.removesuffix("\r") for line in read_file(file).removesuffix("\n").split("\n")]


# ---- running text --------------------------------------------------------------------------------------------------


class Corpus(NamedTuple):
    """A text as token numbers.

    Attributes:
        vocabulary: the token of each number, most frequent in train first.
        train, valid: int64 [tokens], each number an index of ``vocabulary``.
    """

    vocabulary: tuple[str, ...]
    train: Tensor
    valid: Tensor


def load_text(
    path: str | Path | None, *, vocabulary_size: int | None = None, max_bytes: int | None = None
) -> Corpus:
    """Read a corpus; its vocabulary is that of train.

    Args:
        path: a folder with ``train`` and ``valid``, each as ``.txt``, ``.txt.gz`` or ``wiki.<split>.tokens``, UTF-8.
            Tokens are split at white space, and each line ends with ``<eos>``. None: the source of this Python's
            standard library, tokenised into words, signs, indentation and line ends (``<eos>``), and divided by file.
        vocabulary_size: keep this number of types of train, with ``<unk>``; the others become ``<unk>``.
            None: all. Types that train lacks become ``<unk>`` in any case.
        max_bytes: bytes of the standard library to read, in whole files. Folders are always read whole.

    Raises:
        DataNotFound: the folder, or one of its files, does not exist.
        ValueError: a file is not readable as text.
    """
    read = {split: [read_file(file)] for split, file in find_text(path).items()}
    texts, source = read or _standard_library(max_bytes), path is None
    tokens = {s: [t for text in texts[s] for t in split_words(text, source=source)] for s in _SPLITS}
    # equal counts: the first to appear first
    types = [token for token, _ in Counter(tokens["train"]).most_common()]
    size = vocabulary_size
    if size is not None and len(types) > size - (UNKNOWN not in types):
        types = [token for token in types if token != UNKNOWN][: size - 1]
    if UNKNOWN not in types and (size is not None or not set(types).issuperset(tokens["valid"])):
        types.append(UNKNOWN)
    number = {token: index for index, token in enumerate(types)}
    other = number.get(UNKNOWN, -1)  # -1 is never used: without <unk> every token has its number
    numbers = {s: torch.tensor([number.get(t, other) for t in tokens[s]], dtype=torch.int64) for s in _SPLITS}
    return Corpus(tuple(types), **numbers)


def read_text(path: str | Path | None, max_bytes: int | None = None) -> dict[str, str]:
    """Read "train" and "valid" unchanged from their files, with one kind of line end.

    Args:
        path: a folder for :func:`load_text`, or None: the standard library's source, file after file.
        max_bytes: bytes to read; of a folder's files the first lines, eight tenths for train and one for
            valid; of the standard library whole files. None: all.

    Raises:
        DataNotFound: the folder, or one of its files, does not exist.
        ValueError: a file is not readable as text, or has no words.
    """
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
    """Split a text into the words that :func:`load_text` counts, with a word for every line's end.

    ``source``: a program's text, in which indentation and single signs are words and blank lines are not.
    """
    if source:
        return [EOS if token[-1] == "\n" else token for token in _SOURCE_TOKEN.findall(text)]
    return _ended(text).replace("\n", f" {EOS} ").split()


def find_text(path: str | Path | None, works: str = TEXT_FOLDER) -> dict[str, Path]:
    """Find the file of each split in a folder, without reading them; none for None. Raises DataNotFound."""
    wanted = {split: [name.format(split) for name in _TEXT_NAMES] for split in _SPLITS}
    return {} if path is None else find_files(path, wanted, works)


def _ended(text: str) -> str:
    text = text.replace("\r\n", "\n")
    return text + "\n" if text and not text.endswith("\n") else text


def _first_lines(text: str, limit_bytes: int) -> str:
    """Return whole lines of at most ``limit_bytes`` together, or the first one with words."""
    raw = text.encode()
    kept = raw[: raw.rfind(b"\n", 0, limit_bytes) + 1].decode()
    first = re.match(r"\s*[^\n]*\n", text)
    return kept if kept.strip() or not first else first.group()


def _standard_library(max_bytes: int | None) -> dict[str, list[str]]:
    """Read the files of each split."""
    root = Path(sysconfig.get_path("stdlib"))
    names = sorted(file.relative_to(root).as_posix() for file in root.rglob("*.py"))
    files: dict[str, list[str]] = {"train": [], "valid": []}
    used = 0
    for index, name in enumerate(name for name in names if not _SKIPPED.match(name)):
        source = (root / name).read_text(encoding="utf-8", errors="replace")
        used += len(source)
        if max_bytes is not None and used > max_bytes and index >= 10:
            break
        if index % 10 != 9:  # of ten files in a row, one is for validation and one is kept for a test
            files["valid" if index % 10 == 4 else "train"].append(source)
    if not all(any(map(str.strip, sources)) for sources in files.values()):
        raise DataNotFound(f"too few Python sources in {root}; give {TEXT_FOLDER}")
    return files


# ---- translations and paraphrases ----------------------------------------------------------------------------------


def find_translations(folder: str | Path) -> dict[str, Path]:
    """Find the files of a folder such as Multi30k's by split and language. Raises DataNotFound."""
    wanted = {
        f"{split}.{language}": [f"{stem}.{language}{end}" for stem in stems for end in ("", ".gz")]
        for split, stems in _TRANSLATIONS.items()
        for language in ("en", "de")
    }
    return find_files(folder, wanted, TRANSLATIONS_FOLDER)


def read_translations(folder: str | Path) -> dict[str, list[tuple[str, str]]]:
    """Read sentences and their translations, of "train" and "valid".

    Raises:
        DataNotFound: the folder, or one of its files, does not exist.
        ValueError: a file cannot be read as text, has an empty line, or two files do not have the same number of lines.
    """
    files, pairs = find_translations(folder), {}
    for split in _TRANSLATIONS:
        names = [files[f"{split}.{language}"] for language in ("en", "de")]
        sentences = [[line.strip() for line in _lines(file)] for file in names]
        for file, lines in zip(names, sentences):
            if "" in lines:
                where = lines.index("") + 1
                raise ValueError(f"{file} has an empty line, line {where}: remove the pair from both files")
        english, german = map(len, sentences)
        if english != german:
            wrong = f"{names[0]} has {english} lines and {names[1].name} {german}"
            raise ValueError(f"{wrong}: line n of both must be the same sentence")
        pairs[split] = list(zip(*sentences))
    return pairs


class Paraphrase(NamedTuple):
    """Two sentences; ``label`` is 1 if one is a paraphrase of the other, else 0."""

    first: str
    second: str
    label: int


def has_paraphrases(folder: Path) -> bool:
    """Return whether a folder holds any of the corpus's files."""
    return any((folder / name).is_file() for name in MRPC_FILES)


def find_paraphrases(folder: str | Path) -> dict[str, Path]:
    """Find the corpus's two files, without reading them. Raises DataNotFound."""
    return find_files(
        folder, {name: [name] for name in MRPC_FILES}, f"a folder with {' and '.join(MRPC_FILES)}"
    )


def read_paraphrases(folder: str | Path) -> dict[str, list[Paraphrase]]:
    """Read "train" and "valid" of the Microsoft Research Paraphrase Corpus (Dolan and Brockett, 2005), in their order.

    The files are as they are distributed: tab-separated, without quoting, one header line. "valid" is GLUE's dev split
    (Wang et al., 2018, arXiv 1804.07461): the rows that ``dev_ids.tsv`` names.

    Raises:
        DataNotFound: the folder, or one of its files, does not exist.
        ValueError: a file is of another format or truncated (the message names file and line), or a split is empty.
    """
    file, dev = find_paraphrases(folder).values()
    header, *lines = _lines(file)
    if header != _MRPC_HEADER:
        raise ValueError(f"{file} begins with {header[:60]!r}, not with the header {_MRPC_HEADER!r}")
    named = set(filter(None, _lines(dev)))
    missing = set(named)
    pairs: dict[str, list[Paraphrase]] = {"train": [], "valid": []}
    for number, line in enumerate(lines, start=2):
        row = _MRPC_ROW.fullmatch(line)
        if row is None:
            wrong = f"{file}, line {number}: {line[:60]!r} is no label (0 or 1), two ids and two sentences, "
            raise ValueError(wrong + "tab-separated: the file is truncated or of another format")
        label, ids, first, second = row.groups()
        missing.discard(ids)
        pair = Paraphrase(first.strip(), second.strip(), int(label))
        pairs["valid" if ids in named else "train"].append(pair)
    if missing:
        lacks = f"{len(missing)} of the {len(named)} pairs that {dev.name} names, such as {min(missing)!r}"
        raise ValueError(f"{file} lacks {lacks}: one of the two files is truncated or of another data set")
    for split, found in pairs.items():
        if not found:
            raise ValueError(f"the {split} split in {folder} is empty: it has no pair")
    return pairs
