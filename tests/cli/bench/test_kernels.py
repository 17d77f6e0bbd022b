"""Variants that are said to do the same work leave the same numbers behind, in the memory that was counted."""

import math
from dataclasses import replace

import pytest
import torch

from avgpipe.cli.bench import kernels
from avgpipe.cli.bench.commands import MIN_ELEMENTS, KernelsConfig
from avgpipe.cli.bench.kernels import Operands, cases, choose, measure, memory_bytes
from avgpipe.cli.bench.sections import Variant

ELEMENTS = 2000
CASES = cases(ELEMENTS, "float32")
CONFIG = KernelsConfig(threads=1, rounds=1, no_compile=True)
# Results of each question; those of "lists", "pack" and "unpack" are compared below.
RESULTS = {
    "adamw": ("x", "first", "second", "update"),
    "sgd": ("x", "first", "update"),
    "pull": ("x",),
    "step": ("x", "update"),
    "easgd": ("x", "update"),
    "apply": ("z",),
    "round": ("x 0", "x 1", "z", "first 1", "second 0"),
}


def title(case):
    return f"{case.question}, {case.case}"


def prepared(case):
    operands = Operands(case.shapes, torch.float32, "cpu", compiles=False)
    return operands, [v for v in case.variants(operands) if isinstance(v, Variant)]


def after(case, name, result):
    """What an operand holds once a variant has run, on fresh operands."""
    operands, variants = prepared(case)
    with torch.no_grad():
        next(v for v in variants if v.name == name).run()
    return torch.cat([tensor.detach().flatten() for tensor in operands.lists(result)[0]])


@pytest.mark.parametrize("case", [c for c in CASES if c.question in RESULTS], ids=title)
def test_baselines_compute_what_our_operator_computes(case):
    _, variants = prepared(case)
    (ours,) = [v.name for v in variants if v.role == "ours"]
    # torch's optimizers begin at their first step, ours beyond the first ones.
    baselines = [v.name for v in variants if v.role == "baseline" and "foreach rule" not in v.name]
    for baseline in baselines:
        for result in RESULTS[case.question]:
            a, b = after(case, ours, result), after(case, baseline, result)
            # x and update are about 0.01 and differ by a few roundings of sums of that size.
            torch.testing.assert_close(a, b, rtol=1e-5, atol=1e-8, msg=lambda m, n=baseline: f"{n}: {m}")


@pytest.mark.parametrize("question", ["adamw", "sgd"])
def test_what_is_compiled_is_the_operator_s_work(question, monkeypatch):
    monkeypatch.setattr(kernels.torch, "compile", lambda update, **_: update)
    case = next(c for c in CASES if c.question == question)
    for result in RESULTS[question]:
        found = []
        for name in (f"elastic_{question}_", "torch.compile"):
            operands = Operands(case.shapes, torch.float32, "cpu", compiles=name == "torch.compile")
            for variant in case.variants(operands):
                if variant.name == name and name != "torch.compile":  # which has run once
                    variant.run()
            found.append(operands.lists(result)[0][0])
        torch.testing.assert_close(*found, rtol=1e-5, atol=1e-8)


@pytest.mark.parametrize("wire", ["float32", "bfloat16"])
def test_packing_and_its_baselines_make_the_same_buffer(wire):
    case = next(c for c in CASES if c.question == "pack" and c.case.endswith(wire))
    _, variants = prepared(case)
    ours, cat = (next(v for v in variants if v.name.startswith(name)).run() for name in ("pack", "torch.cat"))
    assert torch.equal(ours, cat)
    case = next(c for c in CASES if c.question == "unpack" and c.case.endswith(wire))
    assert torch.equal(after(case, "unpack_", "x"), after(case, "_foreach_copy_", "x"))


@pytest.mark.parametrize("case", CASES, ids=title)
def test_a_section_takes_no_more_memory_than_was_said(case, monkeypatch):
    made = []
    empty = torch.empty

    def counting(*arguments, **options):
        made.append(empty(*arguments, **options))
        return made[-1]

    monkeypatch.setattr(kernels.torch, "empty", counting)
    prepared(case)
    assert sum(t.nbytes for t in made) <= memory_bytes(case, "float32")


@pytest.mark.parametrize("case", CASES, ids=title)
def test_a_section_has_its_limit_first_and_unique_names(case):
    found = measure(case, CONFIG)
    names = [row["name"] for row in found["rows"]]
    assert found["rows"][0]["role"] == "limit"
    assert len(names) == len(set(names))
    assert all(row["median_ms"] > 0 for row in found["rows"])


@pytest.mark.parametrize(
    ("question", "name", "size"),
    [
        ("adamw", "elastic_adamw_", 40),
        ("sgd", "elastic_sgd_", 32),
        ("pull", "elastic_pull_", 12),
        ("step", "elastic_step_", 24),
        ("easgd", "easgd_step_", 20),
        ("apply", "reference_apply_, zero=False", 40),
        ("round", "elastic_round_", 2 * 28 + 8),
    ],
)
def test_bytes_are_those_that_the_update_must_move(question, name, size):
    _, variants = prepared(next(c for c in CASES if c.question == question))
    assert next(v.bytes_per_element for v in variants if v.name == name) == size


def test_only_leaves_the_others_out():
    found = choose(KernelsConfig(elements=(2000, 4000), only=("pull",)))
    assert [(c.question, c.elements) for c in found] == [("pull", 2000)] * 2 + [("pull", 4000)] * 2


def test_what_does_not_fit_is_refused_with_the_size_that_would(monkeypatch):
    monkeypatch.setattr(kernels, "memory_available_bytes", lambda device: 10 * 2**30)
    with pytest.raises(
        ValueError, match=r"round, N = 8: needs .* GiB .* use --elements \d\.\de\+07 or fewer"
    ):
        choose(KernelsConfig(elements=(10**8,)))
    monkeypatch.setattr(kernels, "memory_available_bytes", lambda device: None)
    assert choose(KernelsConfig(elements=(10**8,)))


def test_a_compiler_that_does_not_work_is_left_out_with_its_reason(monkeypatch):
    def refuse(*_, **__):
        raise RuntimeError("no compiler\nfound")

    monkeypatch.setattr(kernels.torch, "compile", lambda *_, **__: refuse)
    case = next(c for c in CASES if c.question == "sgd")
    skipped = {"name": "torch.compile", "reason": "no compiler found"}
    assert measure(case, replace(CONFIG, no_compile=False))["skipped"] == [skipped]
    assert measure(case, CONFIG)["skipped"] == [skipped | {"reason": "--no-compile"}]


@pytest.mark.parametrize("elements", [MIN_ELEMENTS, 100_000, 25_000_000, 100_000_000])
def test_a_model_has_61_tensors_and_all_elements(elements):
    shapes = next(c.shapes for c in cases(elements, "float32") if c.case == "61 tensors")
    assert len(shapes) == 61
    assert sum(map(math.prod, shapes)) == elements
    assert all(math.prod(shape) > 0 for shape in shapes)


@pytest.mark.parametrize("dtype", ["float32", "float64", "bfloat16", "float16"])
def test_values_are_normal_numbers(dtype):
    (values,) = Operands([(100_000,)], getattr(torch, dtype), "cpu", False).ours("x")
    assert values.dtype == getattr(torch, dtype)
    assert 0.004 < values.min().item() < values.max().item() < 0.016
