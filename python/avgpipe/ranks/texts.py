"""Texts of all ranks, gathered as the tensors that collectives take: never as pickles."""

from __future__ import annotations

from collections.abc import Callable

import torch
import torch.distributed as dist


def gather_texts(text: str, gather: Callable[[torch.Tensor], list[torch.Tensor]]) -> list[str]:
    """Those of all ranks, in rank order. ``gather``: of tensors of one shape."""
    own = text.encode(errors="surrogateescape")
    sizes = [int(n) for n in gather(torch.tensor([len(own)]))]
    padded = torch.zeros(max(1, *sizes), dtype=torch.uint8)
    padded[: len(own)] = torch.frombuffer(bytearray(own), dtype=torch.uint8) if own else padded[:0]
    parts = [part[:n].cpu().numpy().tobytes() for part, n in zip(gather(padded), sizes)]
    return [part.decode(errors="surrogateescape") for part in parts]


def gather_in(group: dist.ProcessGroup | None) -> Callable[[torch.Tensor], list[torch.Tensor]]:
    """How to gather in a group, or in the default one, with its own time limit."""
    device = torch.device("cuda" if dist.get_backend(group) == "nccl" else "cpu")

    def gather(tensor: torch.Tensor) -> list[torch.Tensor]:
        sent = tensor.to(device)
        parts = [torch.empty_like(sent) for _ in range(dist.get_world_size(group))]
        dist.all_gather(parts, sent, group=group)
        return parts

    return gather
