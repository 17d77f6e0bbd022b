"""What a file of a checkpoint may hold."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from typing import Any

import torch

_REPLICA = {"weights", "rest", "carry", "older", "optimizer", "lr_scheduler", "loss_scale"}


def check_content(content: Any, signature: Mapping[str, list[Any]], pipelines: Collection[int]) -> None:
    """Raise ValueError for what no save has written. ``signature``: shape and dtype by tensor name. ``pipelines``:
    whose replicas the file has.
    """
    replicas = _a(dict, _a(dict, content, "the content").get("replicas"), "'replicas'")
    if replicas.keys() != set(pipelines):
        raise ValueError(f"it has replicas of pipelines {list(replicas)}, not of {list(pipelines)}")
    whole = "reference" in content
    for i, replica in replicas.items():
        expected = _REPLICA if whole else {"carry"}
        if _a(dict, replica, f"replica {i}").keys() != expected:
            raise ValueError(f"replica {i} has {sorted(map(str, replica))}, not {sorted(expected)}")
        _a(dict, replica["carry"], "'carry'")
        if whole:
            _check_replica(replica, signature)
    if whole and content["reference"] is not None:
        reference = _a(dict, content["reference"], "'reference'")
        _check_tensors(reference.get("weights"), signature)
        _a(dict, reference.get("state"), "the state of the reference")


def _check_replica(replica: dict[str, Any], signature: Mapping[str, list[Any]]) -> None:
    _check_tensors(replica["weights"], signature)
    _check_tensors(replica["rest"], signature)
    for behind, weights in _a(dict, replica["older"], "'older'").items():
        _a(int, behind, "a version")
        _check_tensors(weights, signature)
    if replica["optimizer"] is not None:
        optimizer = _a(dict, replica["optimizer"], "'optimizer'")
        _a(dict, optimizer.get("state"), "the state of the optimizer")
        _a(list, optimizer.get("names"), "the names of the optimizer's parameters")
    for name in ("lr_scheduler", "loss_scale"):
        if replica[name] is not None:
            _a(dict, replica[name], f"{name!r}")


def _check_tensors(values: Any, signature: Mapping[str, list[Any]]) -> None:
    for name, value in _a(dict, values, "a list of tensors").items():
        found = [list(value.shape), str(value.dtype)[6:]] if isinstance(value, torch.Tensor) else None
        if found is None or signature.get(name) != found:
            raise ValueError(f"{name!r} is {found}, and {signature.get(name)} in the manifest")


def _a(kind: type, value: Any, what: str) -> Any:
    if not isinstance(value, kind):
        raise ValueError(f"{what} is a {type(value).__name__}, not a {kind.__name__}")
    return value
