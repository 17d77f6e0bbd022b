"""Figures of matplotlib as files. Without pyplot: no global state, no display."""

from __future__ import annotations

import io
import os
from pathlib import Path
from typing import TYPE_CHECKING

from avgpipe.files import write_atomically

if TYPE_CHECKING:
    from matplotlib.figure import Figure


def check_format(argument: str, path: str | os.PathLike[str]) -> None:
    """ValueError that begins with ``argument`` unless ``path`` ends like a picture (none at all means .png)."""
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    known = FigureCanvasAgg(Figure()).get_supported_filetypes()
    if _suffix(path) not in known:
        raise ValueError(f"{argument}: no picture format, end it in one of .{', .'.join(sorted(known))}")


def write_figure(figure: Figure, path: str | os.PathLike[str], *, dpi: int) -> None:
    """In the format of the suffix, atomically."""
    buffer = io.BytesIO()
    figure.savefig(buffer, format=_suffix(path), dpi=dpi)
    write_atomically(path, buffer.getvalue())


def _suffix(path: str | os.PathLike[str]) -> str:
    return Path(path).suffix[1:].lower() or "png"
