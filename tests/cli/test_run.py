"""A user's own script on several workers."""

import pytest

from tests.cli.command import avgpipe, invoke, strict
from tests.patience import limit

# The workers share the pipe: what is to be one line must be one write.
SCRIPT = """
import os, sys
os.write(1, f'{os.environ["RANK"]} {os.environ["WORLD_SIZE"]} {sys.argv[1:]}\\n'.encode())
if os.environ["RANK"] in sys.argv[2:]:
    sys.exit(7)
"""


@pytest.fixture
def script(tmp_path):
    path = tmp_path / "script.py"
    path.write_text(SCRIPT)
    return str(path)


def finish(*arguments):
    process = avgpipe("run", *arguments)
    stdout, stderr = process.communicate(timeout=limit(60))
    return process.returncode, stdout, stderr


@pytest.mark.promise
def test_every_worker_runs_the_script_with_its_arguments(script):
    code, stdout, stderr = finish("--stages", "2", script, "--stages", "x")
    assert code == 0, stderr
    assert sorted(stdout.splitlines()) == ["0 2 ['--stages', 'x']", "1 2 ['--stages', 'x']"]


@pytest.mark.promise
def test_json_is_all_there_is_on_standard_output(script):
    code, stdout, stderr = finish("--stages", "2", "--json", script, "fail-in:", "1")
    assert code == 1
    answer = strict(stdout)
    assert answer["exit_codes"][1] == 7
    assert "1 2 ['fail-in:', '1']" in stderr
    assert "avgpipe: error: rank 1 failed with exit code 7" in stderr


def test_wrong_arguments(script, tmp_path):
    for arguments, expected in [
        (["nowhere.py"], "'nowhere.py' does not exist"),
        ([str(tmp_path)], "does not exist"),
        (["--stages", "0", script], "--stages 0: must be more than 0"),
    ]:
        result = invoke("run", *arguments)
        assert (result.exit_code, result.stdout) == (2, "")
        assert expected in result.stderr
        assert len(result.stderr.splitlines()) == 1


@pytest.mark.ranks
def test_threads_are_shared_unless_the_user_says_otherwise(tmp_path):
    path = tmp_path / "threads.py"
    path.write_text("import os; os.write(1, os.environ['OMP_NUM_THREADS'].encode() + b'\\n')")
    process = avgpipe("run", "--stages", "2", str(path), OMP_NUM_THREADS="5")
    assert process.communicate(timeout=limit(60))[0].split() == ["5", "5"]
