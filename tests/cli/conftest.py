"""A small text, and a whole run on it that several tests look at."""

import random

import pytest

from tests.cli.command import Run, avgpipe
from tests.patience import limit

WORDS = [f"word{n}" for n in range(40)]


def write_text(folder, train_tokens=8_970, held_out_tokens=600):
    """A text in which words follow each other with a pattern, so that a model can learn."""
    draw = random.Random(0)
    folder.mkdir(parents=True, exist_ok=True)
    for split, count in (("train", train_tokens), ("valid", held_out_tokens), ("test", held_out_tokens)):
        word, lines = 0, []
        for _ in range(count // 10):
            line = []
            for _ in range(9):
                word = (word + draw.choice((1, 1, 1, 7))) % len(WORDS)
                line.append(WORDS[word])
            lines.append(" ".join(line))
        (folder / f"{split}.txt").write_text("\n".join(lines) + "\n")
    return folder


@pytest.fixture(scope="session")
def text(tmp_path_factory):
    return write_text(tmp_path_factory.mktemp("data") / "text")


@pytest.fixture(scope="session")
def options(text):
    """Of a run of two epochs of 65 batches, 2 stages x 2 pipelines."""
    size = ["--batch-size", "4", "--stages", "2", "--pipelines", "2", "--epochs", "2"]
    return ["--data", str(text), *size, "--warmup-rounds", "0"]  # all would be warm-up


@pytest.fixture(scope="session")
def whole(tmp_path_factory, options):
    """The uninterrupted run, through the launcher."""
    out = tmp_path_factory.mktemp("whole") / "run"
    process = avgpipe("train", "awd-lstm", *options, "--out", str(out), "--json")
    stdout, stderr = process.communicate(timeout=limit(100))
    assert process.returncode == 0, stderr
    return Run(out, stdout, stderr)


@pytest.fixture(scope="session")
def small(tmp_path_factory, text):
    """A run of a few batches in one process; tests that change its folder copy it first."""
    out = tmp_path_factory.mktemp("small") / "run"
    arguments = ["--data", str(text), "--batch-size", "4", "--stages", "1", "--pipelines", "2"]
    process = avgpipe("train", "awd-lstm", *arguments, "--max-batches", "4", "--out", str(out))
    stdout, stderr = process.communicate(timeout=limit(100))
    assert process.returncode == 0, stderr
    return Run(out, stdout, stderr)
