"""What the file of a stage replica may hold: plain containers and tensors, as a save writes them."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from typing import Any

import torch

from avgpipe.checkpoint.manifest import expect, is_count

_STATE: Any = dict | None
_STATES = {"optimizer": _STATE, "lr_scheduler": _STATE, "loss_scale": _STATE}
_LATER = {"evaluated": dict}  # of a replica, by an optimizer with modes
_REPLICA = {"weights": dict, "rest": dict, "carry": dict, "older": dict, **_STATES}


def check_content(content: Any, signature: Mapping[str, list[Any]], pipelines: Collection[int]) -> None:
    """Raise ValueError for what no save has written.

    Args:
        signature: Shape and dtype by tensor name.
        pipelines: Whose replicas the file has.
    """
    expect("content", content, dict)
    if "reference" not in content:
        expect("content", content, {"replicas": {i: {"carry": dict} for i in pipelines}})
        return
    expect("content.replicas", content.get("replicas"), dict.fromkeys(pipelines, dict))
    replicas = {
        i: _REPLICA | {what: kind for what, kind in _LATER.items() if what in content["replicas"][i]}
        for i in pipelines
    }
    ema = {"ema": {"weights": dict, "updates": is_count}} if "ema" in content else {}
    expect("content", content, {"reference": _STATE, "replicas": replicas, **ema})
    named = []
    if (reference := content["reference"]) is not None:
        expect("reference", reference, {"weights": dict, "state": dict})
        named.append(reference["weights"])
    for replica in content["replicas"].values():
        expect("older", replica["older"], dict.fromkeys(replica["older"], dict))
        if (optimizer := replica["optimizer"]) is not None:
            expect("optimizer", optimizer, {"state": dict, "names": list})
        named += [replica["weights"], replica["rest"], *replica["older"].values()]
        named += [replica[what] for what in _LATER if what in replica]
    for name, value in (item for values in named for item in values.items()):
        found = [list(value.shape), str(value.dtype)[6:]] if isinstance(value, torch.Tensor) else None
        if found is None or signature.get(name) != found:
            raise ValueError(f"{name!r} is {found}, and {signature.get(name)} in the manifest")
    for name, value in content["ema"]["weights"].items() if ema else ():
        shape = list(value.shape) if isinstance(value, torch.Tensor) else None
        if shape is None or signature.get(name, [None])[0] != shape:
            raise ValueError(f"the average of {name!r} is {shape}, and {signature.get(name)} in the manifest")
