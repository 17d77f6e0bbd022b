"""Saves a pipeline and restores it, whatever the number of stages and pipelines."""

from avgpipe.checkpoint.load import read_checkpoint, restore, restore_checkpoint
from avgpipe.checkpoint.manifest import Manifest, verify_checkpoint
from avgpipe.checkpoint.snapshot import Snapshot

__all__ = [
    "Manifest",
    "Snapshot",
    "read_checkpoint",
    "restore",
    "restore_checkpoint",
    "verify_checkpoint",
]
