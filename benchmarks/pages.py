"""Fill the tables of docs/results/, docs/gpu.md and two pages of docs/design/ from the records in benchmarks/results/.

    python -m benchmarks.pages            # write the pages
    python -m benchmarks.pages --check    # exit code 1 if a page is not what the records give

A table lies between two marks. The first names the function of benchmarks/tables/ that makes it, and its
records:

    <!-- generated: overhead overlap-overhead-2026-11-23 -->
    <!-- end -->

A name that ends in * is the newest such record; if there is none yet, the table says so. Everything outside
the marks is written by hand and kept. Bold figures miss their bar.
"""

from __future__ import annotations

import argparse
import re
import sys
from collections.abc import Callable
from pathlib import Path

from avgpipe.files import read_json
from benchmarks.tables import (
    checkpoints,
    disturbed,
    exchange,
    families,
    faults,
    gpu,
    hosts,
    injected,
    models,
    one_card,
    operators,
    papers,
    pipelines,
    plans,
    slips,
    statistics,
    training,
    versions,
)
from benchmarks.tables.markdown import NOTHING, Record, table

ROOT = Path(__file__).parents[1]
RECORDS = ROOT / "benchmarks" / "results"
PAGES = ROOT / "docs" / "results"

_BLOCK = re.compile(r"(<!-- generated: ([^\n]*?) -->\n).*?(<!-- end -->)", re.DOTALL)


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--check", action="store_true", help="write nothing; exit 1 if a page would change")
    parser.add_argument("pages", nargs="*", type=Path, help="default: all that have such tables")
    arguments = parser.parse_args()
    stale = []
    for path in arguments.pages or every_page():
        text = path.read_text()
        filled = fill(text)
        if filled != text:
            stale.append(path)
            if not arguments.check:
                path.write_text(filled)
    for path in stale:
        print(f"{path}: {'not what the records give' if arguments.check else 'written'}")
    sys.exit(1 if arguments.check and stale else 0)


def every_page() -> list[Path]:
    """Return the pages of results, the one on GPUs, and those on the library's shape and on many hosts."""
    return [
        *PAGES.parent.glob("gpu.md"),
        *PAGES.parent.glob("design/shape.md"),
        *PAGES.parent.glob("design/scaling-hosts.md"),
        *sorted(PAGES.glob("*.md")),
    ]


def fill(text: str) -> str:
    """Return the page with its tables made again."""
    return _BLOCK.sub(lambda found: f"{found[1]}\n{make(found[2])}\n\n{found[3]}", text)


def make(mark: str) -> str:
    """Make the table of a mark: the name of the table, then the names of its records."""
    name, *records = mark.split()
    if name not in TABLES:
        raise ValueError(f"no table {name!r} is known; known are {', '.join(TABLES)}")
    loaded = [load(record) for record in records]
    if None in loaded and not name.startswith(
        ("gpu", "one-card")
    ):  # which also have content without a record
        return NOTHING
    return TABLES[name](*loaded)


def load(name: str) -> Record | None:
    """Read a record. A record without a date has it in its name."""
    if name.endswith("*"):
        found = sorted(RECORDS.glob(f"{name}.json"))
        if not found:
            return None
        name = found[-1].stem
    record: Record = read_json(RECORDS / f"{name}.json")
    return {"record": name, "date": name[-len("2026-11-21") :], **record}


def source(*records: Record) -> str:
    """List when, how and where each record was made."""
    rows = []
    for record in records:
        machine = record.get("machine") or "not recorded"
        if isinstance(machine, dict):
            known = (machine.get("cpu"), f"{machine['cores']} cores", _threads(machine), _load(machine))
            machine = ", ".join(filter(None, known))
        command = record.get("command")
        torch = (record.get("versions") or {}).get("torch", "not recorded")
        rows.append(
            (
                f"`{record['record']}.json`",
                record["date"],
                f"`{command}`" if command else "not recorded",
                machine,
                torch,
            )
        )
    return table("record | date | command as recorded | machine | torch", rows)


def _threads(machine: Record) -> str:
    return f"{machine['threads']} thread{'s' * (machine['threads'] > 1)}" if "threads" in machine else ""


def _load(machine: Record) -> str:
    return f"load {machine['load_average']:.1f}" if "load_average" in machine else ""


TABLES: dict[str, Callable[..., str]] = {
    made.__name__.replace("_", "-"): made
    for made in (
        *(models.vision, models.vision_count),
        *(source, checkpoints.checkpoints),
        *(disturbed.disturbed, disturbed.disturbed_bars),
        *(injected.injected, injected.injected_kinds, injected.injected_phases, injected.injected_violations),
        *(training.losses, training.workloads, training.sixteen_bits),
        *(operators.operators, operators.more_operators),
        *(pipelines.emulated, pipelines.emulated_bars, pipelines.real_models, pipelines.compiled),
        *(pipelines.audit, pipelines.audit_later, pipelines.launches),
        *(pipelines.overhead, pipelines.latency, pipelines.bandwidth, pipelines.group_link, pipelines.memory),
        *(pipelines.meta_memory, pipelines.compared, pipelines.simulated, pipelines.report_page),
        *(plans.rates, plans.large_simulations, plans.growth, plans.vgg16, plans.vgg16_by_efficiency),
        *(plans.predictions, plans.emulated_predictions),
        *(plans.tuning_time, plans.finals, plans.large_plans),
        *(
            papers.papers_forecast,
            papers.papers_batches,
            papers.papers_memory,
            papers.papers_busy,
            papers.papers_epochs,
        ),
        *(papers.papers_plans, papers.papers_batch_sizes, papers.papers_scales, papers.papers_targets),
        *(papers.papers_bars, papers.papers_real, papers.papers_real_lines, papers.papers_real_plans),
        *(statistics.statistics_passes, statistics.statistics_passes_higher, statistics.statistics_losses),
        statistics.statistics_early,
        *(slips.slips_count, slips.slips_plans, slips.slips_silent, slips.slips_design, slips.slips_ranks),
        *(families.families_count, families.families_not_equal, families.families_equal),
        *(faults.faults_pauses, faults.faults_lost_pipeline, faults.faults_lost_worker),
        *(faults.faults_copies, faults.faults_copies_memory),
        *(exchange.exchange_seconds, exchange.exchange_bytes),
        *(exchange.members_promises, exchange.members_seconds, exchange.members_cost, exchange.members_sizes),
        *(hosts.hosts_steps, hosts.hosts_speeds),
        *(gpu.gpu_state, gpu.gpu_stages, gpu.gpu_verdicts, gpu.gpu_kernels, gpu.gpu_counters),
        *(gpu.gpu_pipelines, gpu.gpu_actions, gpu.gpu_answers),
        *(
            one_card.one_card_fill,
            one_card.one_card_phases,
            one_card.one_card_shared_worker,
            one_card.one_card_lanes,
            one_card.one_card_more,
        ),
        *(one_card.one_card_partitions, one_card.one_card_cluster, one_card.one_card_expected),
        *(statistics.statistics_targets, statistics.statistics_search, statistics.statistics_variants),
        versions.versions,
    )
}

if __name__ == "__main__":
    main()
