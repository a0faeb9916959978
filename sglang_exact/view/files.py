# SPDX-License-Identifier: Apache-2.0
"""What all plots share: matplotlib if it is there, drawn without a screen."""

from __future__ import annotations

import importlib.util
from pathlib import Path
from typing import Any

FORMATS = (".png", ".svg", ".pdf")
# Okabe and Ito (2008): eight colours that colour-blind readers can tell apart.
COLOURS = (
    "#0072B2",
    "#D55E00",
    "#009E73",
    "#CC79A7",
    "#E69F00",
    "#56B4E9",
    "#000000",
    "#F0E442",
)
MISSING = (
    "found no matplotlib; expected it for the plot; fix: pip install matplotlib, or "
    "sglang-exact[bench]; the numbers are kept without it"
)


class NoPlot(RuntimeError):
    """A plot cannot be drawn; the numbers are not affected."""


def available() -> bool:
    """Whether matplotlib is installed; it is not imported here."""
    return importlib.util.find_spec("matplotlib") is not None


def figure(width: float = 8.0, height: float = 4.5) -> tuple[Any, Any]:
    """A figure and its one pair of axes, sizes in inches.

    Raises NoPlot without matplotlib.
    """
    if not available():
        raise NoPlot(MISSING)
    from matplotlib.figure import Figure

    # Figure alone, without pyplot: no global state, no display.
    drawn = Figure(figsize=(width, height), layout="constrained")
    return drawn, drawn.subplots()


def write(drawn: Any, path: Path) -> None:
    """Write a figure as the file's suffix says.

    Raises NoPlot for another suffix, OSError if it cannot be written.
    """
    if path.suffix.lower() not in FORMATS:
        raise NoPlot(
            f"found the plot file {path.name}; expected a name ending in "
            f"{', '.join(FORMATS)}"
        )
    path.parent.mkdir(parents=True, exist_ok=True)
    # Without a date the same numbers give the same file.
    date = {".png": {}, ".svg": {"Date": None}, ".pdf": {"CreationDate": None}}
    drawn.savefig(path, dpi=150, metadata=date[path.suffix.lower()])
