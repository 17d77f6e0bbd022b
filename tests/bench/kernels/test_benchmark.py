"""All sections of the benchmark: which there are, what memory they take, and a small run."""

import pytest
import torch

from avgpipe.bench.kernels import benchmark, compiled, workspace
from avgpipe.bench.kernels.benchmark import check_memory, kernel_sections, run_sections
from avgpipe.bench.kernels.settings import QUESTIONS, KernelSettings
from avgpipe.bench.section import Skipped, Variant

SMALL = KernelSettings(elements=(2000,), threads=1, rounds=1, compiles=False)


def test_every_question_is_asked():
    assert {section.question for section in kernel_sections(SMALL)} == set(QUESTIONS)


@pytest.mark.parametrize("question", QUESTIONS)
def test_only_leaves_the_others_out(question):
    settings = KernelSettings(elements=(2000,), only=(question,))
    assert {section.question for section in kernel_sections(settings)} == {question}


def test_every_size_gets_its_sections():
    settings = KernelSettings(elements=(2000, 4000), only=("pull",))
    assert [section.elements for section in kernel_sections(settings)] == [2000, 2000, 4000, 4000]


def test_sections_can_be_told_apart():
    titles = [
        section.title for section in kernel_sections(KernelSettings(elements=(25_000_000, 100_000_000)))
    ]
    # 400 x 4096 elements are the same question at every size.
    assert len(titles) - len(set(titles)) == 2


@pytest.mark.parametrize("section", kernel_sections(SMALL), ids=lambda section: section.title)
def test_operands_need_no_more_memory_than_was_said(section, monkeypatch):
    made = []

    class Recorded(workspace.Workspace):
        def __init__(self, *arguments):
            super().__init__(*arguments)
            made.append(self)

    monkeypatch.setattr(workspace, "Workspace", Recorded)
    section.prepare()
    (space,) = made
    assert 0 < space.held_bytes <= section.memory_bytes


@pytest.mark.parametrize("section", kernel_sections(SMALL), ids=lambda section: section.title)
def test_every_section_begins_with_its_limit_and_names_are_unique(section):
    found = section.prepare()
    names = [item.name for item in found]
    assert isinstance(found[0], Variant)
    assert found[0].role == "limit"
    assert len(names) == len(set(names))


def test_bytes_are_those_that_the_update_must_move():
    def bytes_of(question, name):
        settings = KernelSettings(elements=(2000,), only=(question,), compiles=False)
        found = kernel_sections(settings)[0].prepare()
        return next(v.bytes_per_element for v in found if isinstance(v, Variant) and v.name == name)

    assert bytes_of("adamw", "elastic_adamw_") == 40
    assert bytes_of("adamw", "elastic_adamw_, accumulate=False") == 36
    assert bytes_of("sgd", "elastic_sgd_") == 32
    assert bytes_of("pull", "elastic_pull_") == 12
    assert bytes_of("step", "elastic_step_") == 24
    assert bytes_of("easgd", "easgd_step_") == 20
    assert bytes_of("apply", "reference_apply_") == 72
    assert bytes_of("apply", "reference_apply_, zero=False") == 40
    assert bytes_of("round", "elastic_round_") == 2 * 28 + 8
    assert bytes_of("limit", "triad") == 12


def test_what_does_not_fit_is_refused_with_the_size_that_would():
    sections = kernel_sections(KernelSettings(elements=(100_000_000,)))
    check_memory(sections, 2**40)
    check_memory(sections, None)
    with pytest.raises(
        ValueError, match=r"round, N = 8, 100 M .* GiB .* use --elements \d\.\de\+07 or fewer"
    ):
        check_memory(sections, 10 * 2**30)


def test_a_run_measures_every_variant_and_restores_the_threads():
    before = torch.get_num_threads()
    settings = KernelSettings(elements=(2000,), threads=before + 1, rounds=2, only=("pull",))
    results = list(run_sections(settings, kernel_sections(settings)))
    assert len(results) == 2
    assert all(row.median_s > 0 for result in results for row in result.rows)
    assert torch.get_num_threads() == before


def test_a_compiler_that_does_not_work_is_left_out_with_its_reason(monkeypatch):
    def refuse(*arguments, **options):
        def run():
            raise RuntimeError("no compiler\nfound")

        return run

    monkeypatch.setattr(compiled.torch, "compile", refuse)
    settings = KernelSettings(elements=(2000,), rounds=1, only=("sgd",))
    (first, _) = run_sections(settings, kernel_sections(settings))
    assert first.skipped == (Skipped("torch.compile", "no compiler found"),)


def test_without_compiling_the_reason_is_the_option():
    settings = KernelSettings(elements=(2000,), rounds=1, only=("sgd",), compiles=False)
    result = next(benchmark.run_sections(settings, kernel_sections(settings)))
    assert [(item.name, item.reason) for item in result.skipped] == [("torch.compile", "--no-compile")]
