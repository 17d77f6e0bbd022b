"""Training with kills at random moments, compared with undisturbed runs."""

from __future__ import annotations

import statistics

from benchmarks.tables.markdown import Record, against, table

PACE = 0.85


def disturbed(record: Record) -> str:
    rows = []
    for name, run in record["runs"].items():
        if "failed" in run:
            rows.append((name, f"**failed**: {run['failed']}", *[""] * 9))
            continue
        away = [one["seconds"] for one in run.get("away", ())]
        rows.append(
            (
                name,
                f"{run['samples']:,}",
                f"{run['seconds']:.0f}",
                f"{run['samples_per_second']:.0f}",
                f"{run['training_samples_per_second']:.0f}",
                f"{run['loss']:.3f}",
                f"{run['bleu']:.1f}",
                len(run.get("kills", ())),
                run.get("lost", ""),
                run.get("joined", ""),
                f"{statistics.median(away):.1f} ({max(away):.1f})" if away else "",
            )
        )
    return table(
        "run | samples: | seconds: | samples/s: | without pauses: | validation loss: | BLEU: | kills: | "
        "pipelines lost: | joined again: | seconds away, median (most):",
        rows,
    )


def disturbed_bars(record: Record) -> str:
    noise = {name: of["most"] - of["least"] for name, of in record["compared"]["undisturbed"].items()}
    rows = []
    for run in record["compared"]["disturbed"]:
        twice, never = run["samples_twice"], run["samples_never"]
        rows.append(
            (
                run["seed"],
                against(run["pace"], least=PACE),
                against(run["training_pace"], least=PACE),
                f"{against(run['loss_more'], most=noise['loss'], digits=3)} ({noise['loss']:.3f})",
                f"{against(run['bleu_more'], least=-noise['bleu'], digits=1)} ({noise['bleu']:.1f})",
                f"**{twice}**" if twice else 0,
                f"**{never}**" if never else 0,
            )
        )
    return table(
        "seed | speed, of undisturbed: | without pauses: | loss, increase (seeds differ by): | "
        "BLEU, increase (seeds differ by): | samples trained twice: | never:",
        rows,
    )
