"""Ways that are said to do the same work leave the same numbers behind."""

import math
from dataclasses import replace

import pytest
import torch

from avgpipe_lab import bench
from avgpipe_lab.bench import kernels
from avgpipe_lab.bench.kernels import QUESTIONS, check, make_operands, measure, model_shapes, ways
from avgpipe_lab.commands import MIN_ELEMENTS, KernelsConfig

CONFIG = KernelsConfig(threads=1, rounds=1, no_compile=True)
SHAPES = {"one tensor": [(2000,)], "61 tensors": model_shapes(2000)}
# Operands that hold the results: their numbers among all.
Z, X, UPDATE, LAST, OUT = 0, 1, 6, 7, 8
RESULTS = {
    "pull": (X,),
    "step": (X, UPDATE),
    "easgd": (X, UPDATE),
    "apply": (Z,),
    "trial-sgd": (OUT, UPDATE),
    "trial-adamw": (OUT, UPDATE),
    "predict-sgd": (OUT,),
    "predict-adam": (OUT,),
    "correct": (X, LAST),
    "unpack": (X,),
}


def after(question, name, shapes):
    """All operands once a way has run on fresh ones, and what it returned."""
    operands = make_operands(shapes, CONFIG)
    (run,) = [run for of, way, run in ways(operands) if (of, way) == (question, name)]
    with torch.no_grad():
        returned = run()
    flat = [torch.cat([tensor.detach().flatten() for tensor in tensors]) for tensors in operands]
    return flat, returned


def names(question):
    return [name for of, name, _ in ways(make_operands([(2000,)], CONFIG)) if of == question]


@pytest.mark.parametrize("case", SHAPES)
@pytest.mark.parametrize("question", RESULTS)
def test_baselines_compute_what_our_operator_computes(question, case):
    ours, *baselines = names(question)
    expected, _ = after(question, ours, SHAPES[case])
    for name in baselines:
        found, _ = after(question, name, SHAPES[case])
        for result in RESULTS[question]:
            # x and update are about 0.01 and differ by a few roundings of sums of that size.
            torch.testing.assert_close(found[result], expected[result], rtol=1e-5, atol=1e-8)


@pytest.mark.parametrize("question", ["adamw", "sgd"])
def test_torch_s_optimizers_change_what_ours_changes(question):
    # Theirs begin at their first step, ours beyond the first ones.
    for name in names(question):
        operands, _ = after(question, name, SHAPES["61 tensors"])
        fresh, _ = after("pack", "pack", SHAPES["61 tensors"])
        assert all(not torch.equal(operands[n], fresh[n]) for n in (X, UPDATE))
        assert torch.equal(operands[Z], fresh[Z])


def test_packing_makes_the_buffer_of_its_baseline():
    ours, expected = (
        after("pack", "pack", SHAPES["61 tensors"])[1],
        make_operands(SHAPES["61 tensors"], CONFIG)[X],
    )
    assert torch.equal(ours, torch.cat([tensor.flatten() for tensor in expected]))


@pytest.mark.parametrize("question", QUESTIONS)
def test_a_section_has_its_limit_first_and_unique_names(question):
    operands = make_operands([(2000,)], CONFIG)
    runs = {name: run for of, name, run in ways(operands) if of == question}
    head = {"question": question, "case": "one tensor", "asks": "", "elements": 2000}
    found = measure(head, 3, runs, operands[0], CONFIG)
    rows = found["rows"]
    assert rows[0]["role"] == "limit"
    assert [row["name"] for row in rows if row["role"] == "ours"] == list(runs)[:1]
    assert len({row["name"] for row in rows}) == len(rows)
    assert all(row["median_ms"] > 0 for row in rows)


def test_what_does_not_fit_is_refused_with_the_size_that_would(monkeypatch):
    monkeypatch.setattr(bench, "free_bytes", lambda device: 4 * 2**30)
    with pytest.raises(ValueError, match=r"needs .* GiB .* use --elements \d{8} or less"):
        check(KernelsConfig(elements=(10**8,)))
    monkeypatch.setattr(bench, "free_bytes", lambda device: math.inf)
    check(KernelsConfig(elements=(10**8,)))


def test_a_compiler_that_does_not_work_is_left_out_with_its_reason(monkeypatch):
    def refuse(*_, **__):
        raise RuntimeError("no compiler\nfound")

    monkeypatch.setattr(kernels.torch, "compile", lambda *_, **__: refuse)
    operands = make_operands([(2000,)], CONFIG)
    runs = {name: run for question, name, run in ways(operands) if question == "sgd"}
    head = {"question": "sgd", "case": "one tensor", "asks": "", "elements": 2000}

    def skipped(config):
        return measure(head, 8, runs, operands[0], config)["skipped"]

    assert skipped(replace(CONFIG, no_compile=False)) == [
        {"name": "torch.compile", "reason": "no compiler found"}
    ]
    assert skipped(CONFIG) == [{"name": "torch.compile", "reason": "--no-compile"}]


@pytest.mark.parametrize("elements", [MIN_ELEMENTS, 100_000, 25_000_000, 100_000_000])
def test_a_model_has_61_tensors_and_all_elements(elements):
    shapes = model_shapes(elements)
    assert len(shapes) == 61
    assert sum(map(math.prod, shapes)) == elements
    assert all(math.prod(shape) > 0 for shape in shapes)


@pytest.mark.parametrize("dtype", ["float32", "float64", "bfloat16", "float16"])
def test_values_are_normal_numbers(dtype):
    values = make_operands([(100_000,)], replace(CONFIG, dtype=dtype))[0][0]
    assert values.dtype == getattr(torch, dtype)
    assert 0.004 < values.min().item() < values.max().item() < 0.016
