"""What the benchmark of families of transformers tries, compares and shows."""

import copy
import os

import pytest
import torch

os.environ["HF_HUB_OFFLINE"] = "1"  # read when the library is imported
pytest.importorskip("transformers")

from benchmarks.models import families, tiny
from benchmarks.models.catalogue import NAMED, PLANNED, SETTINGS, Family, class_of
from benchmarks.models.catalogue import families as known
from benchmarks.tables.families import families_count, families_equal, families_not_equal


@pytest.mark.slow
def test_all_with_a_plan_and_the_named_ones_are_tried_once():
    found = known()
    groups = [family.group for family in found]
    assert groups.count(NAMED) == 12
    assert groups.count(PLANNED) > 40
    assert len({family.name for family in found}) == len(found)
    assert SETTINGS.keys() & {family.name for family in found}


def test_classes_are_found_by_configuration_and_by_name():
    assert class_of("llama").__name__ == class_of("LlamaForCausalLM").__name__ == "LlamaForCausalLM"
    with pytest.raises(ValueError, match="does not have it"):
        class_of("NobodysModel")


def test_a_tiny_family_is_equal_to_a_plain_loop():
    row = families.in_one_process(Family("LlamaForCausalLM", NAMED))
    assert row["verdict"] == families.EQUAL, row
    assert row["dtype"] == "float64"


def test_what_cannot_be_built_or_cut_says_why():
    assert families.in_one_process(Family("NobodysModel", NAMED))["verdict"] == families.UNBUILT
    row = families.in_one_process(Family("AlbertForMaskedLM", NAMED))
    assert row["verdict"] == families.REFUSED
    assert "it has no list of blocks" in row["reason"]


def test_another_weight_output_or_gradient_is_a_difference():
    model = tiny.build(Family("GPT2LMHeadModel", NAMED))
    expected, same = (tiny.plain(copy.deepcopy(model)) for _ in range(2))
    assert set(tiny.differences(same, expected).values()) == {0.0}
    gradients = {name: g * (1 + 1e-3) for name, g in same.gradients.items()}
    assert tiny.differences(same._replace(gradients=gradients), expected)["gradients"] == pytest.approx(1e-3)
    assert tiny.differences(same._replace(outputs=[]), expected)["outputs"] == float("inf")
    spoilt = {name: torch.full_like(t, torch.nan) for name, t in same.weights.items()}
    assert tiny.differences(same._replace(weights=spoilt), expected)["weights"] == float("inf")


def test_tables_count_verdicts_and_mark_what_is_wrong():
    same = dict.fromkeys(("outputs", "gradients", "weights"), 2e-16)
    equal = {"class": "A", "parameters": 1_200_000, "dtype": "float64", "one": same, "two": same}
    rows = {
        "a": {"group": PLANNED, "verdict": "equal", **equal},
        "b": {"group": PLANNED, "verdict": "refused", "reason": "cut | there"},
        "c": {"group": PLANNED, "verdict": "not built", "reason": "no class"},
        "d": {"group": NAMED, "verdict": "wrong"},
    }
    counted = families_count({"rows": rows}).splitlines()
    assert (
        counted[2] == "| with a pipeline plan | 3 | 1 | 1 | 1 | 0 | **0.500** | 0.9 equal, of those built |"
    )
    assert counted[3] == "| named without one | 1 | 0 | 0 | 0 | **1** | **0** | 8 equal |"
    assert "| `b` | refused | cut \\| there |" in families_not_equal({"rows": rows})
    assert "| `a`, A | 1.2 M | float64 | 2e-16 |" in families_equal({"rows": rows})
