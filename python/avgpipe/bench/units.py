"""Numbers with units, as they are written on the command line."""

from __future__ import annotations

import math
import re

BYTES = {"B": 1.0, "KiB": 2.0**10, "MiB": 2.0**20, "GiB": 2.0**30, "kB": 1e3, "MB": 1e6, "GB": 1e9}


def number_with_unit(text: str, units: dict[str, float], default: str) -> float | None:
    """What "1MiB" or "4096" says, in the unit that is 1; None for what is no finite number with such a unit."""
    match = re.fullmatch(r"([0-9.]+(?:e[0-9]+)?)\s*([A-Za-z]*)", text.strip())
    if match is None or (match[2] or default) not in units:
        return None
    try:
        value = float(match[1]) * units[match[2] or default]
    except ValueError:
        return None
    return value if math.isfinite(value) else None


def parse_bytes(option: str, text: str) -> int:
    """Bytes, as in "1MiB", "64KiB" or "4096"; ValueError, which names the option, for anything else."""
    value = number_with_unit(text, BYTES, "B")
    if value is None or value != int(value):
        raise ValueError(f"{option} {text}: write a size as 1MiB, 64KiB or 4096")
    return int(value)


def spell_bytes(size: int) -> str:
    """1 KiB, 256 KiB, 4 MiB; else the bytes."""
    for unit in ("GiB", "MiB", "KiB"):
        if size and size % int(BYTES[unit]) == 0:
            return f"{size // int(BYTES[unit])} {unit}"
    return f"{size} B"
