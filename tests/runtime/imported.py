"""What the process from which workers are forked imports first. No thread may run in it, so nothing is computed."""

import torch
import torch.distributed

import avgpipe
import avgpipe.pipeline
import avgpipe_ext

__all__ = ["avgpipe", "avgpipe_ext", "torch"]
