"""The commands of the laboratory: what their options accept."""

import pytest

from avgpipe.systems import SYSTEMS
from avgpipe_lab.commands import check_systems


@pytest.mark.parametrize(
    ("names", "message"),
    [
        ((), "systems: unknown system ''"),
        (("gpip",), "systems: unknown system 'gpip': did you mean 'gpipe'"),
        (("gpipe", "dapple", "gpipe"), "systems: gpipe is named twice"),
    ],
)
def test_names_of_systems_are_known_and_named_once(names: tuple[str, ...], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        check_systems("systems", names)
    check_systems("systems", tuple(SYSTEMS))
