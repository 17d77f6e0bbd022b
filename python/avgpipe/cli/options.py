"""Commands whose options are the fields of a dataclass.

A field's name is the option's, its type decides how a value is written, its default holds where the option is
not given, and the docstring of the class has the help: an option is declared there and nowhere else.
"""

from __future__ import annotations

import inspect
import json
import math
import re
from collections.abc import Callable, Mapping
from dataclasses import MISSING, Field, asdict, dataclass, field, fields, replace
from importlib import import_module
from types import UnionType
from typing import Annotated, Any, Literal, NamedTuple, TypeVar, Union, get_args, get_origin, get_type_hints

import typer

from avgpipe.cli.output import arguments, reporting
from avgpipe.errors import nearest
from avgpipe.files import json_object
from avgpipe.plan import as_tuples

_KEYWORD = inspect.Parameter.KEYWORD_ONLY
_FEW = 5  # most choices that a help page shows beside the option's name
_O = TypeVar("_O", bound="Options")


@dataclass(frozen=True)
class Value:
    """How an option's value is written; used as metadata of ``Annotated``.

    Attributes:
        metavar: Placeholder of the value in help pages.
        parse: Makes the value from the option's name and the text; None keeps the text.
        choices: The texts that are accepted; None accepts all.
        besides: Returns whether a text is accepted in addition to the choices, such as the name of a file.
        positional: Whether the value is written without the option's name.
        rest: Whether the option takes all remaining words.
        repeated: Whether the option may be given several times.
    """

    metavar: str = "TEXT"
    parse: Callable[[str, str], Any] | None = None
    choices: tuple[str, ...] | None = None
    besides: Callable[[str], bool] = lambda text: False
    positional: bool = False
    rest: bool = False
    repeated: bool = False

    def read(self, name: str, text: Any) -> Any:
        if self.rest:
            return tuple(text)
        if self.repeated:
            return tuple(dict.fromkeys(replace(self, repeated=False).read(name, one) for one in text))
        if self.choices is not None and text not in self.choices and not self.besides(text):
            raise ValueError(f"unknown {name.lstrip('-')} {text!r}: {nearest(text, self.choices)}")
        return text if self.parse is None else self.parse(name, text)


@dataclass(frozen=True, kw_only=True)
class Options:
    """The options that every command has.

    Attributes:
        json: Print one JSON object and nothing else.
        given: Names of the options that were given; the others have their defaults.
    """

    json: bool = False
    given: tuple[str, ...] = field(default=(), metadata={"internal": True})

    @classmethod
    def of(cls: type[_O], **given: Any) -> _O:
        """Make the options of a command from those that were given."""
        return cls(**given, given=tuple(given))

    @property
    def explicit(self) -> dict[str, Any]:
        """Return the options that were given, by name."""
        return {name: getattr(self, name) for name in self.given}

    @property
    def complete(self) -> dict[str, Any]:
        """Return the options by name with defaults, without disabled ones and output paths."""
        values = {
            f.name: getattr(self, f.name) for f in _options(type(self)) if f.name not in ("json", "plot")
        }
        return {
            name: v for name, v in values.items() if v is not None and v is not False and v not in ("", ())
        }

    def to_json(self) -> str:
        return json.dumps(asdict(replace(self, given=())), indent=2) + "\n"

    @classmethod
    def from_json(cls: type[_O], text: str) -> _O:
        values = cls.known(json_object("the options", text))
        try:
            return cls(**values)
        except TypeError as error:
            raise ValueError(f"the options are those of no {cls.__name__}: {error}") from error

    @classmethod
    def known(cls, values: Mapping[str, Any]) -> dict[str, Any]:
        """Return the options among the values of a JSON object."""
        names = {f.name for f in fields(cls)} - {"given"}
        return {name: as_tuples(value) for name, value in values.items() if name in names}


class Command(NamedTuple):
    """A command: its options, and the function that gets them, as "module:function"; by default ``run``."""

    options: type[Options]
    function: str


class CommandGroup(NamedTuple):
    """Commands under one name, as ``avgpipe bench kernels``."""

    help: str
    commands: Mapping[str, Command]


def flag(name: str) -> str:
    """Return the option of the field ``name``; the unit in the field's name appears in its help instead."""
    return "--" + re.sub("_(s|bytes)$", "", name).replace("_", "-")


def internal(default: Any) -> Any:
    """Make a field that is no option."""
    return field(default=default, metadata={"internal": True})


def words(options: Mapping[str, Any]) -> list[str]:
    """Return the command line words that give ``options``."""
    found: list[str] = []
    for name, value in options.items():
        found += [flag(name)] if value is True else [flag(name), _text(value)]
    return found


def callback(command: Command) -> Callable[..., None]:
    """Make the function of a typer command: it passes the command's options to the command's own function.

    The module is imported when its command runs, so that help pages and refusals are quick.
    """
    config, (module, _, name) = command.options, command.function.partition(":")
    shown, hints, helps = _options(config), get_type_hints(config, include_extras=True), _helps(config)
    values = {f.name: _value(hints[f.name]) for f in shown}

    def run(**texts: Any) -> None:
        with reporting(texts["json"]):
            with arguments():
                given = {n: text for n, text in texts.items() if text not in (None, False, [])}
                asked = config.of(**{n: values[n].read(flag(n), text) for n, text in given.items()})
                answer = getattr(import_module(module), name or "run")
            answer(asked)

    parameters = [_parameter(f, values[f.name], helps[f.name], _panel(config, f.name)) for f in shown]
    run.__doc__ = _about(config)
    run.__annotations__ = {p.name: p.annotation for p in parameters}
    run.__signature__ = inspect.Signature(parameters)  # type: ignore[attr-defined]
    return run


_FLAG = Value("")  # of an option without a value


def _options(config: type[Options]) -> list[Field[Any]]:
    """Return the fields that are options; those that all commands have are last."""
    found = [f for f in fields(config) if "internal" not in f.metadata]
    return sorted(found, key=lambda f: f.name == "json")


def _value(annotation: Any) -> Value:
    """Return how values of a type are written."""
    if annotation is bool:
        return _FLAG
    if get_origin(annotation) in (Union, UnionType):
        (annotation,) = (a for a in get_args(annotation) if a is not type(None))
    if get_origin(annotation) is Annotated:
        (value,) = annotation.__metadata__
        assert isinstance(value, Value)
        return value
    if get_origin(annotation) is Literal:
        names = get_args(annotation)
        return Value("|".join(names), choices=names)
    return Value() if annotation is str else Value("NUMBER", _number(annotation))


def _parameter(f: Field[Any], value: Value, text: str, panel: str | None) -> inspect.Parameter:
    """Make the argument of a typer command for an option: a text, None or False if not given."""
    if value is _FLAG:
        option = typer.Option(flag(f.name), help=text, rich_help_panel=panel)
        return inspect.Parameter(f.name, _KEYWORD, default=False, annotation=Annotated[bool, option])
    text, to, otherwise = text.partition(" Default: ")
    if value.choices is not None and len(value.choices) > _FEW:
        text += f" One of {', '.join(value.choices)}."
    if not to and f.default not in (MISSING, None, "", ()):
        to, otherwise = " Default: ", f"{_text(f.default)}."
    text += to + otherwise
    info = (
        typer.Argument(metavar=value.metavar, help=text)
        if value.positional
        else typer.Option(flag(f.name), metavar=value.metavar, help=text, rich_help_panel=panel)
    )
    kind, required = list[str] if value.rest or value.repeated else str, f.default is MISSING
    default = inspect.Parameter.empty if required else None
    return inspect.Parameter(f.name, _KEYWORD, default=default, annotation=Annotated[kind | None, info])


def _text(value: Any) -> str:
    if isinstance(value, tuple):
        return ",".join(map(_text, value))
    return str(int(value)) if isinstance(value, float) and value.is_integer() else str(value)


def _about(config: type[Options]) -> str:
    return inspect.cleandoc(config.__doc__ or "").partition("Attributes:")[0].strip()


def _helps(config: type[Options]) -> dict[str, str]:
    """Return the help of each option, from the docstrings of the class and its bases."""
    found = {}
    for base in reversed(config.__mro__):
        entries = inspect.cleandoc(base.__doc__ or "").partition("Attributes:\n")[2]
        for name, text in re.findall(r"^    (\w+): (.*?)(?=^    \w|\Z)", entries, re.MULTILINE | re.DOTALL):
            found[name] = " ".join(text.split())
    return found


def _panel(config: type[Options], name: str) -> str | None:
    """Return the heading over an option: the first sentence of its group's docstring."""
    group = next(base for base in config.__mro__ if name in base.__annotations__)
    return None if group in (config, Options) else _about(group).partition("\n")[0].rstrip(".")


# ---- values ----------------------------------------------------------------------------------------------------------


def _number(kind: type[int] | type[float], positive: bool = False) -> Callable[[str, str], Any]:
    """Make the parser of one number."""

    def read(name: str, text: str) -> int | float:
        try:
            value = kind(text)
        except ValueError:
            raise ValueError(f"{name} {text}: write a {'whole ' * (kind is int)}number") from None
        if kind is float and not math.isfinite(value):
            raise ValueError(f"{name} {text}: must be a finite number")
        if positive and value <= 0:
            raise ValueError(f"{name} {text}: must be more than 0")
        return value

    return read


parse_count, parse_positive = _number(int, positive=True), _number(float, positive=True)
