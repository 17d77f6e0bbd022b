"""Checksums of tensors, to compare copies."""

from __future__ import annotations

import torch

from avgpipe.elastic.subclasses import is_made_of_others
from avgpipe.links.checksum import checksum


def digest(tensor: torch.Tensor, start: int = 0) -> int:
    """Return 32 bits computed from a tensor's bits and ``start``; waits for the device."""
    if is_made_of_others(tensor):
        for name in tensor.__tensor_flatten__()[0]:  # type: ignore[attr-defined]
            start = digest(getattr(tensor, name), start)
        return start
    if tensor.is_sparse:
        tensor = tensor.coalesce()
        return digest(tensor.values(), digest(tensor.indices(), start))
    plain = tensor.detach().resolve_conj().resolve_neg().cpu().contiguous()
    return checksum(plain.reshape(-1).view(torch.uint8).numpy(), start)
