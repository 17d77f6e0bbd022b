"""Commands of a run over hosts: what they print is read as lines, their ends are noticed, and none is left."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from avgpipe.errors import PipelineError
from avgpipe_lab.bench.hosts import CommandsOnHosts
from avgpipe_lab.bench.namespaces import Network
from tests.patience import limit

pytestmark = pytest.mark.ranks


class HereNetwork(Network):
    """Hosts without namespaces."""

    def inside(self, number: int) -> list[str]:
        return []


def commands(folder: Path) -> CommandsOnHosts:
    return CommandsOnHosts(HereNetwork(0, 2), folder)


def test_a_line_is_read_once_it_is_complete_and_the_first_host_s_are_searched(tmp_path: Path) -> None:
    first = "import time; print('at 7 ü\\nat 8\\nat', flush=True, end=''); time.sleep(600)"
    with commands(tmp_path) as found:
        found.start(1, "-c", "print('at 1')")
        found.start(0, "-c", first)
        assert found.wait_for(re.compile(r"at (\d+)"), limit(30), 2) == "8"
        found.commands[1].wait(limit(30))
        found.look()
        assert [(host, line) for host, _, line in found.said if host == 0] == [(0, "at 7 ü"), (0, "at 8")]
        assert [line for host, _, line in found.said if host == 1] == ["at 1"]
        with pytest.raises(PipelineError, match=r"(?s)no 'x', in time: .*host 0: at 8"):
            found.wait_until(lambda: False, 0.0, "no 'x'")
    assert [command.returncode for command in found.commands.values()] == [0, -9]


def test_the_end_of_the_first_command_ends_the_wait_unless_it_was_the_last_that_was_missing(
    tmp_path: Path,
) -> None:
    with commands(tmp_path) as found:
        found.start(0, "-c", "print('a 1'); exit(3)")
        found.commands[0].wait(limit(30))
        assert found.wait_for(re.compile("a (1)"), limit(30)) == "1"
        with pytest.raises(PipelineError, match=r"no 'b', the run has ended with exit code 3: host 0: a 1"):
            found.wait_for(re.compile("b"), limit(30))


def test_each_host_has_a_folder_for_temporary_files(tmp_path: Path) -> None:
    with commands(tmp_path) as found:
        for host in range(2):
            found.start(host, "-c", "import tempfile; print(tempfile.gettempdir())")
            found.commands[host].wait(limit(30))
        found.look()
    assert [line for _, _, line in found.said] == [str(found.temporary(host)) for host in range(2)]
