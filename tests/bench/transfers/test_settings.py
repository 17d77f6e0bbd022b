"""The options of the transfers' benchmark."""

import pytest

from avgpipe.bench.transfers.settings import LINKS, TransferSettings, parse_sizes


def test_defaults_survive_json_and_the_command():
    settings = TransferSettings()
    assert settings.links == LINKS
    assert TransferSettings.from_json(settings.to_json()) == settings
    words = settings.command()
    assert parse_sizes(words[words.index("--sizes") + 1]) == settings.sizes


def test_sizes_have_units():
    assert parse_sizes("8, 256KiB,1MiB") == (8, 2**18, 2**20)
    with pytest.raises(ValueError, match="--sizes much"):
        parse_sizes("1MiB,much")


@pytest.mark.parametrize(
    ("values", "named"),
    [
        ({"links": ()}, "--links"),
        ({"links": ("shm", "tcp")}, "--links tcp"),
        ({"sizes": (12,)}, "--sizes 12"),
        ({"sizes": (0,)}, "--sizes 0"),
        ({"sizes": ()}, "--sizes"),
        ({"rounds": 0}, "--rounds 0"),
        ({"timeout_s": 0}, "--timeout 0"),
        ({"timeout_s": float("nan")}, "--timeout nan"),
    ],
)
def test_what_cannot_be_is_refused(values, named):
    with pytest.raises(ValueError, match=named):
        TransferSettings(**values)
