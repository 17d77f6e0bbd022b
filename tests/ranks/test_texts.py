"""Texts that every rank gathers."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from avgpipe.ranks.texts import gather_texts


@pytest.mark.parametrize("text", ["", "a", "Übung 日本", "x" * 10_000, "\udc80 as a file's name may be"])
def test_texts_of_unequal_length_come_back_whole(text: str) -> None:
    others = [b"", b"longer than most of the texts are", "日本".encode()]

    def gather(tensor: torch.Tensor) -> list[torch.Tensor]:
        if tensor.dtype == torch.int64:
            return [torch.tensor([n]) for n in (tensor.item(), *map(len, others))]
        padded = [
            torch.tensor(list(other) + [0] * (len(tensor) - len(other)), dtype=torch.uint8)
            for other in others
        ]
        return [tensor, *padded]

    assert gather_texts(text, gather) == [text, *(other.decode() for other in others)]


def test_nothing_of_the_package_unpickles() -> None:
    package = Path(__file__).parents[2] / "python" / "avgpipe"
    words = (
        "import pickle",
        "all_gather_object",
        "broadcast_object_list",
        "weights_only=False",
        "treespec_loads(",
    )
    found = {
        (path.name, word)
        for path in package.rglob("*.py")
        for word in words
        if word in path.read_text(encoding="utf-8")
    }
    assert found == {("message.py", "treespec_loads(")}  # behind check_structure
