"""``avgpipe bench transfers``: what it prints and refuses."""

import pytest

from tests.cli.command import invoke, strict

SMALL = ("bench", "transfers", "--sizes", "1KiB,64KiB", "--rounds", "1")


@pytest.fixture(scope="module")
def found():
    result = invoke(*SMALL, "--json")
    assert result.exit_code == 0, result.stderr
    return strict(result.stdout)


@pytest.mark.ranks
@pytest.mark.slow
def test_json_has_latency_and_bandwidths_with_gloo_and_memcpy(found):
    assert found["command"] == (
        "avgpipe bench transfers --links shm,gloo,local --sizes 1024,65536 --rounds 1 --timeout 30"
    )
    sections = {(s["question"], s["case"]): s for s in found["sections"]}
    questions = ("handed over", "read once")
    assert list(sections) == [
        ("latency", "1 KiB"),
        *((q, case) for case in ("1 KiB", "64 KiB") for q in questions),
    ]
    names = [row["name"] for row in sections["latency", "1 KiB"]["rows"]]
    assert names[:4] == ["shm, spinning", "shm, sleeping", "gloo, spinning", "gloo, sleeping"]
    section = sections["handed over", "64 KiB"]
    assert section["limit"] == "memcpy"
    rows = {row["name"]: row for row in section["rows"]}
    assert list(rows) == ["memcpy", "shm", "gloo", "local", "plain gloo"]
    shm = rows["shm"]
    assert shm["gb_per_s"] == pytest.approx(65536 / shm["median_ms"] / 1e6)
    assert shm["ratios"] == {"plain gloo": pytest.approx(rows["plain gloo"]["median_ms"] / shm["median_ms"])}
    assert shm["fraction_of_limit"] == pytest.approx(rows["memcpy"]["median_ms"] / shm["median_ms"])


@pytest.mark.ranks
@pytest.mark.slow
def test_a_person_reads_tables():
    result = invoke("bench", "transfers", "--sizes", "8", "--rounds", "1", "--links", "local")
    assert result.exit_code == 0
    assert "message handed over, and added up by the receiver" in result.stdout
    assert "plain gloo" in result.stdout
    assert "shm, spinning" not in result.stdout


@pytest.mark.parametrize(
    ("options", "named"),
    [
        (("--links", "tcp"), "--links tcp"),
        (("--links", ""), "--links"),
        (("--sizes", "big"), "--sizes big"),
        (("--sizes", "1024GiB"), "GiB are free"),
        (("--rounds", "0"), "--rounds 0"),
    ],
)
def test_wrong_arguments_are_refused_in_one_line(options, named):
    result = invoke("bench", "transfers", *options, "--json")
    assert result.exit_code == 2
    assert named in strict(result.stdout)["error"]
    assert result.stderr.count("\n") == 1
