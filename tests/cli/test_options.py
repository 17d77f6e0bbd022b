"""Fields of a dataclass as options of a command."""

from __future__ import annotations

import sys
from dataclasses import dataclass, replace
from types import SimpleNamespace
from typing import Annotated, Literal

import pytest
import typer
from typer.testing import CliRunner

from avgpipe.cli.config import SimulateConfig, TrainConfig
from avgpipe.cli.options import Command, Options, Value, callback, flag, internal, parse_count, words
from avgpipe.plan import Plan
from avgpipe.systems import SYSTEMS
from avgpipe_lab.commands import CompareConfig


def parse_pair(name, text):
    try:
        return tuple(int(part) for part in text.split("+"))
    except ValueError:
        raise ValueError(f"{name} {text}: write two numbers as 1+2") from None


@dataclass(frozen=True, kw_only=True)
class OvenOptions(Options):
    """The oven.

    Attributes:
        heat_s: Seconds of heating, which may be
            described on two lines.
        fan: Turn the fan on.
    """

    heat_s: float = 1.5
    fan: bool = False


@dataclass(frozen=True, kw_only=True)
class BakeConfig(OvenOptions):
    """Bake WHAT.

    Takes a while.

    Attributes:
        what: What to bake.
        loaves: How many. Default: as many as fit.
        kind: Kind of flour.
        shape: Shape of a loaf.
        size: Its size.
        seed: What to put on it, as often as you like.
    """

    what: Annotated[str, Value("WHAT", positional=True)]
    loaves: Annotated[int | None, Value("NUMBER", parse_count)] = None
    kind: Literal["rye", "wheat"] = "rye"
    shape: Annotated[str, Value("NAME", choices=("round", "long", "flat", "tin", "roll", "ring"))] = "round"
    size: Annotated[tuple[int, ...] | None, Value("A+B", parse_pair)] = None
    seed: Annotated[tuple[str, ...], Value("NAME", choices=("poppy", "sesame"), repeated=True)] = ()
    secret: int = internal(0)


@pytest.fixture
def bake(monkeypatch):
    """Runs the command: what its function got, or what it printed."""
    asked = []
    monkeypatch.setitem(sys.modules, "tests.cli.oven", SimpleNamespace(run=asked.append))
    app = typer.Typer()
    app.command()(callback(Command(BakeConfig, "tests.cli.oven")))

    def run(*arguments):
        result = CliRunner(env={"COLUMNS": "200", "TERMINAL_WIDTH": "200"}).invoke(app, arguments)
        return asked.pop() if asked else result

    return run


def test_what_is_not_given_has_its_default(bake):
    found = bake("bread")
    assert found == BakeConfig.of(what="bread")
    assert (found.heat_s, found.fan, found.kind, found.loaves, found.json) == (1.5, False, "rye", None, False)
    assert found.explicit == {"what": "bread"}


def test_what_is_given_is_read_by_its_type(bake):
    found = bake(
        "bread", "--heat", "3", "--fan", "--kind", "wheat", "--size", "3+4", "--loaves", "2", "--json"
    )
    assert (found.heat_s, found.fan, found.kind, found.size, found.loaves, found.json) == (
        *(3.0, True, "wheat", (3, 4), 2, True),
    )
    assert set(found.given) == {"what", "heat_s", "fan", "kind", "size", "loaves", "json"}


def test_an_option_may_be_given_several_times(bake):
    assert bake("bread", "--seed", "sesame", "--seed", "poppy", "--seed", "sesame").seed == (
        "sesame",
        "poppy",
    )
    assert bake("bread").seed == ()
    assert "unknown seed 'popy': did you mean 'poppy'?" in bake("bread", "--seed", "popy").output


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (("--heat", "much"), "--heat much: write a number"),
        (("--heat", "inf"), "--heat inf: must be a finite number"),
        (("--loaves", "0"), "--loaves 0: must be more than 0"),
        (("--loaves", "1.5"), "--loaves 1.5: write a whole number"),
        (("--kind", "wheet"), "unknown kind 'wheet': did you mean 'wheat'? valid names: rye, wheat"),
        (("--shape", "cube"), "unknown shape 'cube': "),
        (("--size", "3"), None),
        (("--size", "3x4"), "--size 3x4: write two numbers as 1+2"),
    ],
)
def test_what_cannot_be_read_is_refused_in_one_line(bake, options, message):
    result = bake("bread", *options)
    if message is None:
        assert result.size == (3,)
        return
    assert result.exit_code == 2
    assert result.stderr.startswith(f"avgpipe: error: {message}")
    assert result.stderr.count("\n") == 1


def test_a_refusal_is_reported_in_json_too(bake):
    result = bake("bread", "--loaves", "0", "--json")
    assert result.stdout == '{"error": "--loaves 0: must be more than 0", "exit_code": 2}\n'


@pytest.mark.parametrize("options", [(), ("bread", "--hot")])
def test_usage_errors_exit_with_2(bake, options):
    assert bake(*options).exit_code == 2


def test_the_help_page_is_the_docstring_and_the_fields(bake):
    text = bake("--help").stdout
    assert "Bake WHAT." in text
    assert "Takes a while." in text
    for part in (
        "─ The oven ─",
        "Seconds of heating, which may be described on two lines. Default: 1.5.",
        "How many. Default: as many as fit.",
        "rye|wheat",
        "Shape of a loaf. One of round, long, flat, tin, roll, ring. Default: round.",
        "Print one JSON object and nothing else.",
    ):
        assert part in text
    for part in ("Attributes", "secret", "given"):
        assert part not in text


def test_options_become_the_words_that_give_them():
    options = {"heat_s": 3.0, "fan": True, "size": (1, 2), "what_bytes": 5, "more": 0.1234567}
    found = ["--heat", "3", "--fan", "--size", "1,2", "--what", "5", "--more", "0.1234567"]
    assert words(options) == found
    assert flag("batch_size") == "--batch-size"


def test_a_configuration_travels_as_json():
    found = BakeConfig.of(what="bread", size=(1, 2))
    assert BakeConfig.from_json(found.to_json()) == replace(found, given=())
    assert OvenOptions.from_json(found.to_json()) == OvenOptions()


def test_a_configuration_is_spelled_out():
    assert BakeConfig.of(what="bread", json=True).complete == {
        "heat_s": 1.5,
        "what": "bread",
        "kind": "rye",
        "shape": "round",
    }


def test_an_option_without_help_is_noticed():
    @dataclass(frozen=True, kw_only=True)
    class Undocumented(Options):
        loaves: int = 1

    globals()["Undocumented"] = Undocumented
    with pytest.raises(KeyError, match="loaves"):
        callback(Command(Undocumented, "nowhere"))


def test_the_options_of_a_plan_are_its_fields():
    assert set(Plan.__dataclass_fields__) <= set(TrainConfig.__dataclass_fields__)


def test_required_options_are_named(bake):
    app = typer.Typer()
    app.command()(callback(Command(SimulateConfig, "nowhere")))
    result = CliRunner().invoke(app, ["--forward-ms", "2"])
    assert result.exit_code == 2
    assert "--backward-ms" in result.stderr


@pytest.mark.parametrize(
    ("text", "names"),
    [("all", tuple(SYSTEMS)), ("gpipe, avgpipe", ("gpipe", "avgpipe"))],
)
def test_systems_are_names_or_all(monkeypatch, text, names):
    asked = []
    monkeypatch.setitem(sys.modules, "tests.cli.oven", SimpleNamespace(run=asked.append))
    app = typer.Typer()
    app.command()(callback(Command(CompareConfig, "tests.cli.oven")))
    CliRunner().invoke(app, ["awd-lstm", "--systems", text])
    assert asked[0].systems == names


@pytest.mark.parametrize(
    ("options", "expected"),
    [
        (("--advance", "2"), {"advance": 2}),
        (("--advance", "3,2,1,0"), {"advance": (3, 2, 1, 0)}),
        (("--advance", "auto"), {"advance": "auto"}),
        (("--staleness", "0"), {"staleness": 0}),
        (("--staleness", "asynchronous"), {"staleness": "asynchronous"}),
        (("--replication", "2,1"), {"replication": (2, 1)}),
    ],
)
def test_values_of_several_kinds(monkeypatch, options, expected):
    asked = []
    monkeypatch.setitem(sys.modules, "tests.cli.oven", SimpleNamespace(run=asked.append))
    app = typer.Typer()
    app.command()(callback(Command(TrainConfig, "tests.cli.oven")))
    CliRunner().invoke(app, ["awd-lstm", *options])
    assert asked[0].explicit == {"workload": "awd-lstm", **expected}
