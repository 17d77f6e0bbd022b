"""Variants that are said to do the same work leave the same numbers behind."""

import pytest
import torch

from avgpipe.bench.kernels import lists, optimizers, packing, rounds, rules
from avgpipe.bench.kernels.settings import KernelSettings
from avgpipe.bench.kernels.workspace import Workspace, equal_shapes, model_shapes, one_tensor
from avgpipe.bench.section import Variant

ELEMENTS = 2000
SETTINGS = KernelSettings(compiles=False)
LAYOUTS = {"one tensor": one_tensor(ELEMENTS), "61 tensors": model_shapes(ELEMENTS)}


def variants(make, shapes):
    space = Workspace(ELEMENTS, shapes, SETTINGS)
    return space, [item for item in make(space) if isinstance(item, Variant)]


def after(make, shapes, name, result):
    """What an operand holds once a variant has run, on fresh operands."""
    space, found = variants(make, shapes)
    chosen = next(variant for variant in found if variant.name == name)
    with torch.no_grad():
        chosen.run()
    return torch.cat([tensor.detach().flatten() for tensor in space.tensors(result)])


def pairs(make, shapes):
    """Names of ours and of a baseline that does the same."""
    _, found = variants(make, shapes)
    baselines = [variant.name for variant in found if variant.role == "baseline"]
    ours = [variant for variant in found if variant.role == "ours"]
    return [(o.name, b) for o in ours for b in (baselines if o.against is None else o.against)]


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize(
    ("make", "results"),
    [
        (optimizers.adamw, ("x", "first", "second", "update")),
        (optimizers.sgd, ("x", "first", "update")),
        (rules.pull, ("x",)),
        (rules.step, ("x", "update")),
        (rules.easgd, ("x", "update")),
    ],
)
def test_baselines_compute_what_our_operator_computes(make, results, layout):
    shapes = LAYOUTS[layout]
    compared = pairs(make, shapes)
    assert compared
    for ours, baseline in compared:
        for result in results:
            a, b = after(make, shapes, ours, result), after(make, shapes, baseline, result)
            # x and update are about 0.01 and differ by a few roundings of sums of that size.
            torch.testing.assert_close(a, b, rtol=1e-5, atol=1e-8, msg=lambda m, n=baseline: f"{n}: {m}")


def test_each_apply_has_its_own_baseline():
    shapes = one_tensor(ELEMENTS)
    compared = pairs(rules.apply, shapes)
    assert len(compared) == 2
    for ours, baseline in compared:
        for result in ("z", "update 0", "update 7"):
            a, b = after(rules.apply, shapes, ours, result), after(rules.apply, shapes, baseline, result)
            torch.testing.assert_close(a, b, rtol=1e-5, atol=1e-8)


def test_a_round_is_what_its_parts_are_together():
    make, shapes = rounds.round_of(2), one_tensor(ELEMENTS)
    whole = [name for name in (b for _, b in pairs(make, shapes)) if name.endswith("pull")]
    assert len(whole) == 2
    for baseline in whole:
        for result in ("x 0", "x 1", "z", "first 1", "second 0"):
            a, b = after(make, shapes, "elastic_round_", result), after(make, shapes, baseline, result)
            torch.testing.assert_close(a, b, rtol=1e-5, atol=1e-8)


@pytest.mark.parametrize("operator", ["elastic_adamw_", "elastic_pull_"])
def test_a_list_ends_as_the_arena_does(operator):
    make, shapes = lists.list_or_arena(operator), equal_shapes(400, ELEMENTS // 400)
    space, found = variants(make, shapes)
    for name in ("x", "z"):  # the list repeats one random block in each tensor, the arena runs through it
        torch.cat(space.tensors(name), out=space.flat(name))
    if operator == "elastic_adamw_":
        for name in ("grad", "first", "second", "update"):
            torch.cat(space.tensors(name), out=space.flat(name))
    for variant in found:
        if variant.role != "limit":
            variant.run()
    assert torch.equal(torch.cat(space.tensors("x")), space.flat("x"))


@pytest.mark.parametrize("wire", [torch.float32, torch.bfloat16])
def test_packing_and_its_baselines_make_the_same_buffer(wire):
    _, found = variants(packing.pack(wire), LAYOUTS["61 tensors"])
    ours, cat = (next(v for v in found if v.name.startswith(name)).run() for name in ("pack", "torch.cat"))
    assert torch.equal(ours, cat)


@pytest.mark.parametrize("wire", [torch.float32, torch.bfloat16])
def test_unpacking_and_its_baselines_fill_the_same_tensors(wire):
    make, shapes = packing.unpack(wire), LAYOUTS["61 tensors"]
    results = [after(make, shapes, name, "x") for name in ("unpack_", "_foreach_copy_", "copy_, one by one")]
    assert torch.equal(results[0], results[1])
    assert torch.equal(results[0], results[2])
