import dataclasses

import pytest

from avgpipe.schedule import Action


@pytest.mark.parametrize("token", ["F0", "B3", "I12", "W3", "U", "F999999999"])
def test_a_token_parses_to_the_action_that_prints_as_it(token):
    assert str(Action.parse(token)) == token


def test_parse_gives_kind_and_micro_batch():
    assert Action.parse("B3") == Action("B", 3)
    assert Action.parse("U") == Action("U") == Action("U", None)


@pytest.mark.parametrize(
    "token",
    ["", "F", "3", "X3", "f3", "F-1", "F03", " F3", "F3 ", "F3\n", "U0", "F3B3", "F\u0663", "F" + "9" * 5000],
)
def test_parse_refuses_anything_else(token):
    with pytest.raises(ValueError, match="is not an action"):
        Action.parse(token)


@pytest.mark.parametrize(
    ("kind", "micro_batch"),
    [("U", 0), ("F", None), ("F", -1), ("B", True), ("F", 1.0), ("X", 1), ("FB", 1), ("F", "1")],
)
def test_an_impossible_action_is_refused_with_its_value(kind, micro_batch):
    with pytest.raises(ValueError, match=r"kind=|micro_batch="):
        Action(kind, micro_batch)


def test_actions_are_frozen_and_hashable():
    with pytest.raises(dataclasses.FrozenInstanceError):
        Action("F", 1).kind = "B"
    assert len({Action("F", 1), Action("F", 1), Action("B", 1)}) == 2
