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


def check_picture(path: str | os.PathLike[str]) -> None:
    """Refuse a ``--plot`` that is no picture or cannot be written, before minutes of measuring; ValueError."""
    option, folder = f"--plot {os.fspath(path)}", Path(path).absolute().parent
    check_format(option, path)
    if not folder.is_dir():
        raise ValueError(f"{option}: {folder} is no folder, make it first")
    if Path(path).is_dir() or not os.access(path if Path(path).exists() else folder, os.W_OK):
        raise ValueError(f"{option}: cannot be written, name a file in a folder that you may write to")


def write_figure(figure: Figure, path: str | os.PathLike[str], *, dpi: int) -> None:
    """In the format of the suffix, atomically."""
    buffer = io.BytesIO()
    figure.savefig(buffer, format=_suffix(path), dpi=dpi)
    write_atomically(path, buffer.getvalue())


def _suffix(path: str | os.PathLike[str]) -> str:
    return Path(path).suffix[1:].lower() or "png"
