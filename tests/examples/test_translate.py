from __future__ import annotations

import pytest

from tests.cli.command import avgpipe
from tests.examples.scripts import COMMANDS, EXAMPLES, printed
from tests.patience import limit

pytestmark = pytest.mark.ranks

for needed in ("tokenizers", "sacrebleu"):
    pytest.importorskip(needed)
SCRIPT = EXAMPLES / "translate.py"


@pytest.fixture(scope="module")
def run(tmp_path_factory):
    """A run that has seen a few batches of sentences that are translated word by word."""
    data = tmp_path_factory.mktemp("pairs")
    for split, count in (("train", 60), ("val", 5), ("test_2016_flickr", 5)):
        rows = [[(n * 7 + w * 3) % 11 for w in range(1 + n % 5)] for n in range(count)]
        for suffix, word in (("en", "w"), ("de", "v")):
            text = "".join(" ".join(f"{word}{number}" for number in row) + "\n" for row in rows)
            (data / f"{split}.{suffix}").write_text(text)
    out = data / "run"
    sizes = ("--max-batches", "4", "--batch-size", "4", "--stages", "1", "--pipelines", "1")
    process = avgpipe("train", "gnmt", "--data", str(data), *sizes, "--out", str(out))
    _, stderr = process.communicate(timeout=limit(100))
    assert process.returncode == 0, stderr
    return out


@pytest.mark.slow
@pytest.mark.parametrize("command", COMMANDS)
def test_every_sentence_has_one_translation(command, run):
    text = printed(SCRIPT, command, str(run), "w1 w2", "w3")
    assert len(text.split("\n")) == 3  # of one rank only, each ended
    assert text == printed(SCRIPT, "python", str(run), "w1 w2", "w3")
