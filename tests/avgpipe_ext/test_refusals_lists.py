"""Wrong rounds, and what cannot be packed: ValueError with the values that clashed and the way out."""

from __future__ import annotations

import re

import pytest
import torch

import avgpipe_ext
from tests.avgpipe_ext.refusing import raises

NAN, INF = float("nan"), float("inf")


def make_round(kinds=1, replicas=2, tensors=2):
    """xs, grads, states, z of a round, all apart."""
    count = replicas * tensors
    return [[torch.ones(3, 4) for _ in range(n)] for n in (count, count, kinds * count, tensors)]


def refuses_round(match, *parts, alpha=0.5, optimizer="sgd", lr=0.1, mu=0.9, **options):
    options |= {"optimizer": optimizer, "lr": lr, "mu": mu}
    raises(avgpipe_ext.elastic_round_, "elastic_round_", match, *parts, alpha, **options)


NAMES = ("xs", "grads", "states", "z")


@pytest.mark.parametrize(
    ("wrong", "message"),
    [
        (torch.ones(4, 3), r"has shape \(4, 3\) but .* has \(3, 4\); pass tensors of one shape"),
        (torch.ones(3, 4).int(), "has dtype int32; pass float32, float64, bfloat16 or float16"),
        (torch.ones(3, 4).double(), "has dtype float64 but .* has float32; pass one dtype, or float32"),
        (torch.ones(3, 8)[:, ::2], r"has strides \(8, 2\), which leave gaps or overlap; pass .contiguous"),
        (torch.ones(4, 3).t(), r"has strides \(1, 3\) but .* has \(4, 1\); give all tensors one memory"),
    ],
    ids=["shape", "integer", "dtype", "gaps", "order"],
)
def test_tensors_of_rounds(wrong, message):
    for kind, name in enumerate(NAMES[1:], 1):
        parts = make_round()
        parts[kind][-1] = wrong
        refuses_round(re.escape(f"{name}[{len(parts[kind]) - 1}]") + ".*" + message, *parts)


def test_lists_of_rounds():
    for kind, found in ((0, "grads has 4 tensors but xs has 3"), (1, "grads has 3 tensors but xs has 4")):
        parts = make_round(kinds=0)
        parts[kind].pop()
        refuses_round(f"{found}; pass lists of one length", *parts, mu=0.0)
    parts = make_round(kinds=0)
    parts[3].append(torch.ones(3, 4))
    refuses_round("xs has 4 tensors but z has 3; pass as many, or a multiple", *parts, mu=0.0)
    parts = make_round(kinds=0)
    parts[3].clear()
    refuses_round("xs has 4 tensors but z has 0", *parts, mu=0.0)


def test_states_of_rounds():
    parts = make_round(kinds=0)
    refuses_round("mu is 0.9 but there is no momentum", *parts)
    refuses_round(
        "there are 0 states for 4 xs; pass 2 for each: all exp_avg, then all exp_avg_sq",
        *parts,
        optimizer="adam",
    )
    parts = make_round(kinds=1)
    refuses_round("mu is 0 but there are 4 momentum buffers; pass none", *parts, mu=0.0)
    refuses_round("there are 4 states for 4 xs; pass 2 for each", *parts, optimizer="adamw")
    parts[2].pop()
    refuses_round("there are 3 states for 4 xs; pass 1 for each: all momentum buffers", *parts)


@pytest.mark.parametrize("name", ["", "AdamW", "rmsprop"])
def test_optimizers_of_rounds(name):
    message = f"optimizer is '{name}'; pass 'sgd', 'adam' or 'adamw'"
    refuses_round(message, *make_round(), optimizer=name)


def test_numbers_of_rounds():
    refuses_round("alpha is nan; pass a finite number", *make_round(), alpha=NAN)
    refuses_round("lr is inf; pass a finite number", *make_round(), lr=INF)
    refuses_round("mu is nan; pass a finite number", *make_round(), mu=NAN)
    refuses_round("step is 0; count steps from 1", *make_round(2), optimizer="adam", step=0)
    refuses_round("beta2 is 1; pass a number from 0 to below 1", *make_round(2), optimizer="adam", beta2=1.0)


def test_shared_memory_in_rounds():
    for a, b in ((0, 0), (0, 1), (0, 2), (0, 3), (2, 2), (2, 3), (1, 3), (3, 3)):
        parts = make_round()
        parts[b][-1] = parts[a][0]
        refuses_round("shares 48 bytes of memory with .*; pass a .clone", *parts)
    parts = make_round()
    parts[1] = [parts[1][0]] * 4  # gradients are only read
    avgpipe_ext.elastic_round_(*parts, 0.5, optimizer="sgd", lr=0.1, mu=0.9)


def test_what_cannot_be_packed():
    name, pack = "pack", avgpipe_ext.pack
    raises(pack, name, "there are no tensors; pass at least one", [])
    raises(pack, name, r"tensors\[1\] has dtype int64; pass float32", [torch.ones(2), torch.ones(2).long()])
    raises(pack, name, "dtype has dtype int64; pass float32", [torch.ones(2)], torch.int64)
    raises(pack, name, "several dtypes; pass dtype=", [torch.ones(2), torch.ones(2).half()])


def test_what_cannot_be_unpacked():
    name, unpack_ = "unpack_", avgpipe_ext.unpack_
    way_out = "pass a contiguous one of one dimension and as many elements"
    tensors = [torch.ones(2), torch.ones(3)]
    raises(unpack_, name, f"4 elements, the tensors together 5; {way_out}", torch.ones(4), tensors)
    raises(unpack_, name, f"buffer has 2 dimensions and 5 elements.*; {way_out}", torch.ones(5, 1), tensors)
    raises(unpack_, name, way_out, torch.ones(10)[::2], tensors)
    raises(unpack_, name, r"buffer(\[0\])? has dtype int64; pass float32", torch.ones(5).long(), tensors)
    raises(
        unpack_, name, r"tensors\[1\] has dtype int32", torch.ones(3), [torch.ones(2), torch.ones(1).int()]
    )
    buffer = torch.ones(5)
    raises(
        unpack_,
        name,
        r"tensors\[0\] shares 8 bytes of memory with buffer",
        buffer,
        [buffer[:2], torch.ones(3)],
    )
    whole = torch.ones(4)
    raises(unpack_, name, r"tensors\[1\] shares 8 bytes", torch.ones(6), [whole, whole[2:]])
    raises(unpack_, name, "by which elements share memory", torch.ones(4), [torch.ones(1).expand(4)])


def test_meta_tensors_among_others():
    parts = make_round()
    parts[1][-1] = parts[1][-1].to("meta")
    with pytest.raises(ValueError, match="on meta"):
        avgpipe_ext.elastic_round_(*parts, 0.5, optimizer="sgd", lr=0.1, mu=0.9)
    with pytest.raises(ValueError, match="on meta"):
        avgpipe_ext.unpack_(torch.ones(3), [torch.ones(3, device="meta")])
    with pytest.raises(ValueError, match="on meta"):
        avgpipe_ext.pack([torch.ones(3), torch.ones(3, device="meta")])
