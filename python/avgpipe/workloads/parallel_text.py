"""Texts for translation: a folder in which line n of two files is the same sentence in two languages."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from avgpipe.workloads.text import DataNotFound, read_file

SPLITS = ("train", "valid", "test")

# Names of a split before the language; the first that is there is read. Those of Multi30k come first.
_STEMS = {"train": ("train",), "valid": ("val", "valid", "dev"), "test": ("test_2016_flickr", "test")}


@dataclass(frozen=True)
class Pairs:
    """Sentences of the source language and, at the same index, their translations."""

    source: tuple[str, ...]
    target: tuple[str, ...]

    def __len__(self) -> int:
        return len(self.source)


@dataclass(frozen=True)
class ParallelText:
    train: Pairs
    valid: Pairs
    test: Pairs


def read_parallel(
    folder: str | Path, limit: int | None = None, *, source: str = "en", target: str = "de"
) -> ParallelText:
    """Read a folder of sentence pairs, such as Multi30k (Elliott, Frank, Sima'an, Specia, 2016).

    Args:
        folder: with ``train``, ``val`` (or ``valid``, ``dev``) and ``test_2016_flickr`` (or ``test``), each as
            ``.<language>`` or ``.<language>.gz``: UTF-8, a sentence a line.
        limit: read so many pairs of train, from its beginning; None: all.
        source, target: the languages, as the files' names end.

    Raises:
        DataNotFound: the folder, or one of its files, is not there.
        ValueError: a file cannot be read as text, has no lines or an empty one, or two files do not have the
            same number of lines.
    """
    if limit is not None and limit < 1:
        raise ValueError(f"limit must be at least 1, got {limit}")
    found = find_parallel(folder, source=source, target=target)
    splits = {split: _pairs(*files) for split, files in found.items()}
    if limit is not None:
        splits["train"] = Pairs(splits["train"].source[:limit], splits["train"].target[:limit])
    return ParallelText(**splits)


def find_parallel(
    folder: str | Path, *, source: str = "en", target: str = "de"
) -> dict[str, tuple[Path, Path]]:
    """The source and target files of each split, without reading them. Raises DataNotFound."""
    folder = Path(folder)
    if not folder.is_dir():
        what = "is a file, not a folder" if folder.exists() else "does not exist"
        raise DataNotFound(f"data folder {folder} {what}; give {wanted(source, target)}")
    found, missing = {}, []
    for split, stems in _STEMS.items():
        files = {}
        for language in (source, target):
            names = [f"{stem}.{language}{ending}" for stem in stems for ending in ("", ".gz")]
            file = next((folder / name for name in names if (folder / name).is_file()), None)
            if file is None:
                missing.append(names[0])
            else:
                files[language] = file
        if len(files) == 2:
            found[split] = (files[source], files[target])
    if missing:
        raise DataNotFound(f"data folder {folder} lacks {', '.join(missing)} (.gz is read too)")
    return found


def wanted(source: str = "en", target: str = "de") -> str:
    """What a folder of sentence pairs must have, in words."""
    names = ", ".join(f"{stems[0]}.{{{source},{target}}}" for stems in _STEMS.values())
    return f"a folder with {names}, a sentence a line (.gz is read too)"


def _pairs(source: Path, target: Path) -> Pairs:
    lines = Pairs(_lines(source), _lines(target))
    if len(lines.source) != len(lines.target):
        raise ValueError(
            f"{source} has {len(lines.source)} lines and {target.name} {len(lines.target)}: "
            "line n of both must be the same sentence"
        )
    return lines


def _lines(file: Path) -> tuple[str, ...]:
    # Not splitlines(): it also divides at signs that may stand inside a sentence, and the files would not match.
    lines = [line.strip() for line in read_file(file).removesuffix("\n").split("\n")]
    if lines == [""]:
        raise ValueError(f"{file} is empty")
    if "" in lines:
        raise ValueError(
            f"{file} has an empty line, line {lines.index('') + 1}: remove the pair from both files"
        )
    return tuple(lines)
