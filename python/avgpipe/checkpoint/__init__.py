"""Saves a pipeline and restores it, whatever the number of stages and pipelines."""

from avgpipe.checkpoint.load import read_checkpoint, restore_checkpoint
from avgpipe.checkpoint.manifest import Manifest, verify_checkpoint
from avgpipe.checkpoint.save import save_checkpoint

__all__ = ["Manifest", "read_checkpoint", "restore_checkpoint", "save_checkpoint", "verify_checkpoint"]
