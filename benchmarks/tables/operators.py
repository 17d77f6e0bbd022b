"""The operators compared with the memory limit and with torch."""

from __future__ import annotations

import re

from benchmarks.tables.markdown import Record, against, table

_OPERATORS: list[tuple[str, str, str, list[tuple[str, float | None]]]] = [
    (
        "`elastic_adamw_`, 40",
        "adamw",
        "elastic_adamw_",
        [
            ("milliseconds", None),
            ("limit", 0.9),
            ("AdamW(fused) + foreach rule", 1.7),
            ("AdamW(foreach) + foreach rule", 4),
            ("torch.compile", 1),
        ],
    ),
    (
        "`elastic_sgd_` with momentum, 32",
        "sgd",
        "elastic_sgd_",
        [("milliseconds", None), ("limit", 0.9), ("SGD(fused) + foreach rule", 1.8), ("torch.compile", 1)],
    ),
    (
        "`elastic_pull_`, 12",
        "pull",
        "elastic_pull_",
        [("limit", 0.75), ("_foreach_mul_ + _foreach_add_", 1.5), ("_foreach_lerp_", None)],
    ),
    ("`elastic_step_`, 24", "step", "elastic_step_", [("limit", 0.75)]),
    ("`easgd_step_`, 20", "easgd", "easgd_step_", [("limit", 0.75)]),
]

_OTHERS: list[tuple[str, str, str, str, str, float | None]] = [
    *(
        ("`reference_apply_`, 8 updates, zeroing, 72", "apply", "N = 8", "reference_apply_", *rest)
        for rest in (
            ("limit", 0.75),
            ("8 (_foreach_add_ + _foreach_zero_)", None),
            ("8 _foreach_add_", 1.5),
        )
    ),
    *(
        ("the same, `zero=False`, 40", "apply", "N = 8", "reference_apply_, zero=False", *rest)
        for rest in (("limit", 0.75), ("8 _foreach_add_", 1.5))
    ),
    *(
        (f"`elastic_round_`, N = {n}", "round", f"N = {n}", "elastic_round_", *rest)
        for n, bar in ((2, 1.3), (4, 1.25), (8, 1.2))
        for rest in (
            ("limit", 0.75),
            (f"{n} adamw, {n} apply (no pulls)", bar),
            (f"{n} adamw, 1 apply (no pulls)", None),
            (f"{n} adamw, 1 apply, {n} pull", None),
        )
    ),
    ("400 tensors, `elastic_adamw_`", "lists", "elastic_adamw_, 400 x *0", "list", "one arena", 0.91),
    ("400 tensors, `elastic_pull_`", "lists", "elastic_pull_, 400 x *0", "list", "one arena", 0.91),
    ("400 x 4,096, `elastic_adamw_`", "lists", "elastic_adamw_, 400 x 4096", "list", "one arena", 0.91),
    ("400 x 4,096, `elastic_pull_`", "lists", "elastic_pull_, 400 x 4096", "list", "one arena", 0.91),
    *(
        (f"`pack`, a {what} buffer", "pack", "* buffer of float32", row, *rest)
        for what, row, beside in (
            ("kept", "pack, a kept buffer", "_foreach_copy_ into a kept buffer"),
            ("new", "pack", "torch.cat"),
        )
        for rest in (("limit", 0.75), (beside, None))
    ),
    *(
        ("`unpack_`", "unpack", "* buffer of float32", "unpack_", *rest)
        for rest in (("limit", 0.75), ("_foreach_copy_", None))
    ),
    ("`pack` to bfloat16, a kept buffer", "pack", "* bfloat16", "pack, a kept buffer", "limit", 0.75),
    ("`unpack_` from bfloat16", "unpack", "* bfloat16", "unpack_", "limit", 0.75),
]


def operators(record: Record) -> str:
    sizes, rows = _by_size(record), []
    for label, question, row, columns in _OPERATORS:
        for beside, bar in columns:
            cells = [
                _beside(sections, question, case, row, beside, bar)
                for sections in sizes
                for case in ("one*", "61*")
            ]
            rows.append((label, _shown(beside), bar or "", *cells))
            label = ""
    elements = [f"{sections[0]['elements'] / 1e6:.0f} M" for sections in sizes]
    cases = " | ".join(f"{size}, {case}:" for size in elements for case in ("one", "61"))
    return table(f"operator, bytes per element | compared with | bar: | {cases}", rows)


def more_operators(record: Record) -> str:
    sizes, rows, last = _by_size(record), [], ""
    for label, question, case, row, beside, bar in _OTHERS:
        cells = [_beside(sections, question, case, row, beside, bar) for sections in sizes]
        rows.append(("" if label == last else label, _shown(beside), bar or "", *cells))
        last = label
    cases = " | ".join(f"{sections[0]['elements'] / 1e6:.0f} M:" for sections in sizes)
    return table(f"operator, bytes per element | compared with | bar: | {cases}", rows)


def _by_size(record: Record) -> list[list[Record]]:
    """Return the record's sections for each number of elements; a size begins with its limit."""
    sizes: list[list[Record]] = []
    for section in record["sections"]:
        if section["question"] == "limit":
            sizes.append([])
        sizes[-1].append(section)
    return sizes


def _beside(
    sections: list[Record], question: str, case: str, row: str, beside: str, bar: float | None
) -> str:
    """Return a row's time, its share of the limit, or how many times longer another row took."""
    pattern = re.compile(re.escape(case).replace(r"\*", ".*"))
    section = next(s for s in sections if s["question"] == question and pattern.fullmatch(s["case"]))
    rows = {r["name"]: r for r in section["rows"]}
    if beside == "milliseconds":
        return f"{rows[row]['median_ms']:.1f}"
    if beside == "limit":
        return against(rows[row]["fraction_of_limit"], bar)
    own = rows[row]
    return against(own["ratios"].get(beside, rows[beside]["median_ms"] / own["median_ms"]), bar)


def _shown(beside: str) -> str:
    if beside in ("milliseconds", "limit"):
        return {"milliseconds": "milliseconds", "limit": "fraction of `mul_`"}[beside]
    return re.sub(r"(\w*_\w+|torch\.\w+)", r"`\1`", beside)
