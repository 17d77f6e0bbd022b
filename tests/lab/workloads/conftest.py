import random

import pytest
import torch


@pytest.fixture(autouse=True)
def _one_thread():
    """Small tensors gain nothing from threads, and lose much where cores are shared."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


@pytest.fixture
def text_folder(tmp_path):
    """A folder with a small text of 40 types in which each word decides most of the next."""
    draw = random.Random(1)
    word = 0
    for split, lines in (("train", 300), ("valid", 40)):
        text = []
        for _ in range(lines):
            line = []
            for _ in range(9):
                word = (word * 7 + 3) % 38 if draw.random() < 0.9 else draw.randrange(38)
                line.append(f"w{word}")
            text.append(" ".join([*line, "<unk>"]))
        (tmp_path / f"{split}.txt").write_text("\n".join(text) + "\n")
    return tmp_path
