"""Writes a checkpoint: each rank writes the files of its stage replicas, then the first rank the manifest."""

from __future__ import annotations

import os
import secrets
import shutil
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch

from avgpipe.checkpoint.folder import FolderLocks, NotFinite, agreed
from avgpipe.checkpoint.manifest import NAME, BlockFile, Manifest, file_name
from avgpipe.errors import CheckpointError
from avgpipe.faults.kinds import writing, written
from avgpipe.files import make_folder
from avgpipe.ranks import environment as probe
from avgpipe.ranks.world import World
from avgpipe.runtime.placement import Placement


def save_checkpoint(
    directory: Path,
    contents: Mapping[int, dict[str, Any]],
    manifest: Manifest,
    world: World,
    locks: FolderLocks,
    place: Mapping[str, Any],
    also: Sequence[Path] = (),
) -> None:
    """Write a checkpoint; if one rank fails, raise CheckpointError on every rank, and keep the old one.

    Args:
        contents: of this rank's stage replicas, by their numbers.
        manifest: without the files.
        place: what faults call this process.
        also: other folders, which get the same checkpoint first.
    """
    # All ranks choose the same file names, which differ from those of the present checkpoint.
    token = int(world.broadcast(torch.tensor(secrets.randbits(48)), 0))
    names = [file_name(replica, token) for replica in manifest.replicas]
    held = ExitStack()

    def write_own() -> list[list[int]]:
        make_folder(directory)
        if world.rank == 0:
            held.enter_context(locks.saving(directory))
        places = {n: {**place, "stage": manifest.replicas[n].stage} for n in contents}
        return [[n, *_write(directory / names[n], contents[n], places[n])] for n in contents]

    def write_manifest() -> None:
        if world.rank == 0:
            probe.at("save", action="manifest", **place)
            whole = replace(manifest, files=[[names[n], *rest] for n, *rest in table])
            for folder in also:
                _link(directory, names, folder)
                _commit(whole, folder)
            _commit(whole, directory)  # last: a failure before this leaves it unchanged

    what = nothing_saved(directory)
    with held:
        try:
            table = sorted(row for rows in agreed(world, what, write_own) for row in rows)
            agreed(world, what, write_manifest)  # no rank continues, or ends, before the checkpoint exists
        except CheckpointError:
            _remove([directory / names[n] for n in contents])
            raise


def _commit(manifest: Manifest, directory: Path) -> None:
    """Make the files of a manifest the checkpoint of their folder."""
    manifest.write(directory)
    names = {name for name, *_ in manifest.files}
    shards = directory.glob("stage-*-????????????.pt")  # of any placement
    _remove([*(path for path in shards if path.name not in names), *directory.glob(f".{NAME}.*.tmp")])


def _link(directory: Path, names: Sequence[str], folder: Path) -> None:
    """Link files, which are never changed, in another folder; copy them if the file system has no links."""
    make_folder(folder)
    for name in names:
        try:
            os.link(directory / name, folder / name)
        except OSError:
            shutil.copyfile(directory / name, folder / name)


def nothing_saved(directory: Path) -> str:
    return f"nothing was saved to {directory}"


def _write(path: Path, content: dict[str, Any], place: Mapping[str, Any]) -> tuple[int, int]:
    """Write the file of a stage replica; return its size and checksum."""
    try:
        with path.open("wb", buffering=0) as file, _without_crcs():
            blocks = BlockFile(file)
            torch.save(content, writing(blocks, **place))
            blocks.finish()
    except (OSError, RuntimeError) as error:
        # torch.save raises its own error in place of that of a file that cannot be written.
        cause = error if isinstance(error, OSError) else error.__context__
        if not isinstance(cause, OSError):
            raise
        cause.filename = cause.filename or str(path)
        raise cause from None
    written(path, **place)
    return blocks.size, blocks.checksum


@contextmanager
def _without_crcs() -> Iterator[None]:
    """Let torch leave out checksums, which it does not check on loading; in this thread."""
    before = torch.serialization.get_crc32_options()
    torch.serialization.set_crc32_options(False)
    try:
        yield
    finally:
        torch.serialization.set_crc32_options(before)


def refuse_nonfinite(contents: Mapping[int, dict[str, Any]], placement: Placement) -> None:
    """Refuse infinities and NaN, so that they do not replace the checkpoint from which a run could resume."""
    for number, content in contents.items():
        if "reference" not in content:
            continue
        source = content["reference"] or next(iter(content["replicas"].values()))
        bad = next((name for name, value in source["weights"].items() if not _is_finite(value)), None)
        if bad is not None:
            raise NotFinite(
                f"{bad!r} on {placement.name(number)} has infinities or NaN; load an earlier checkpoint, and train "
                "with Precision(skip_nonfinite=True), clip_grad_norm or a lower learning rate"
            )


def _is_finite(value: torch.Tensor) -> bool:
    # A sum is as fast as memory, and not finite if a value is not; of large values it may overflow.
    return bool(value.sum().isfinite()) or bool(value.isfinite().all())


def _remove(paths: list[Path]) -> None:
    for path in paths:
        with suppress(OSError):  # the next save tries again
            path.unlink(missing_ok=True)
