"""Headers are believed only as far as they name what this process knows: they come from others."""

from __future__ import annotations

import json
import sys
from collections import defaultdict
from enum import Enum
from typing import Any

import pytest
import torch
from torch.utils import _pytree as pytree

from avgpipe.links.message import Header, assemble, describe


class Colour(Enum):
    RED = 1


def header(structure: str, leaves: int = 1) -> bytes:
    return json.dumps([structure, [{"value": 1}] * leaves]).encode()


def with_factory(module: str, name: str) -> bytes:
    """As a stranger would write the header of a defaultdict."""
    structure = json.loads(pytree.treespec_dumps(pytree.tree_structure(defaultdict(list, a=1))))
    context = structure[1]["context"]
    context["default_factory_module"], context["default_factory_name"] = module, name
    return header(json.dumps(structure))


@pytest.mark.parametrize("factory", [list, dict, int])
def test_dictionaries_with_defaults_travel(factory: Any) -> None:
    value = defaultdict(factory, a=torch.ones(2))
    told, tensors = describe(value)
    found = assemble(Header.from_bytes(told.to_bytes()), tensors)
    assert type(found) is defaultdict
    assert found.default_factory is factory


@pytest.mark.parametrize(
    ("module", "name"),
    [
        ("os", "system"),
        ("antigravity", "geohash"),
        ("builtins", "eval"),
        ("subprocess", "Popen"),
        ("torch", "load"),
    ],
)
def test_no_header_imports_a_module_or_names_a_function(module: str, name: str) -> None:
    before = set(sys.modules)
    with pytest.raises(TypeError, match=f"a defaultdict of {module}.{name} cannot travel between stages"):
        Header.from_bytes(with_factory(module, name))
    assert set(sys.modules) == before


def test_a_factory_that_cannot_travel_is_refused_where_it_is_sent() -> None:
    told, _ = describe(defaultdict(torch.Tensor, a=torch.ones(2)))
    with pytest.raises(
        TypeError, match=r"a defaultdict of .*Tensor cannot travel between stages; use one of bool"
    ):
        told.to_bytes()


def test_enumerations_as_keys_travel() -> None:
    told, tensors = describe({Colour.RED: torch.ones(2)})
    assert list(assemble(Header.from_bytes(told.to_bytes()), tensors)) == [Colour.RED]


@pytest.mark.parametrize(
    "name", ["antigravity:Colour", "os:system", "subprocess:Popen", f"{__name__}:Nobody"]
)
def test_classes_that_are_no_loaded_enumerations_are_refused(name: str) -> None:
    structure = pytree.treespec_dumps(pytree.tree_structure({Colour.RED: 1}))
    assert f"{__name__}:Colour" in structure
    before = set(sys.modules)
    with pytest.raises(TypeError, match="is no enumeration that this process has loaded"):
        Header.from_bytes(header(structure.replace(f"{__name__}:Colour", name)))
    assert set(sys.modules) == before


@pytest.mark.parametrize("dtype", ["load", "nothing", "nn"])
def test_a_dtype_is_one_of_torch(dtype: str) -> None:
    structure = pytree.treespec_dumps(pytree.tree_structure(1))
    told = json.dumps([structure, [{"tensor": [[2], dtype, False]}]]).encode()
    with pytest.raises(TypeError, match=f"a tensor of '{dtype}', which is no dtype of torch"):
        Header.from_bytes(told)
