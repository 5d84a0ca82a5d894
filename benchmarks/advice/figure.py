"""The table of the advice as one picture: each row's effect with its interval, beside its margin."""

from __future__ import annotations

import textwrap
from typing import TYPE_CHECKING

import numpy as np
import pandas as pd

from benchmarks.advice.row import SO_FAR, UNMET, WITHDRAWN
from benchmarks.advice.table import effect_text
from grpo_kit._support.display import BASE, COLOURS, GREY, new_figure

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

_BLUE, _VERMILION, _GREEN = COLOURS[:3]
# verdict -> (colour, marker, whether the marker is filled): told apart in grey print too
STYLES = {
    "holds": (_GREEN, "o", True),
    "does not": (_VERMILION, "X", True),
    "no difference larger than the margin": (_BLUE, "D", True),
    "cannot tell": (GREY, "o", False),
    SO_FAR: (GREY, "|", True),
    UNMET: (GREY, "x", True),
    WITHDRAWN: (GREY, "x", True),
}
_WIDE = 8  # inches: as wide as a page, which makes the words of a wider figure smaller
_FARTHEST = 5.0  # margins; an interval that goes on ends in an arrow there


def draw_table(claims: pd.DataFrame) -> Figure:
    """One line a claim that has an effect, in the table's order; claims: the rows of table.table, or some of them.

    x: the effect in the direction that the claim names, in margins: 0, in the colour of a control, is what was compared
    with, and the pale band is within the margin. A claim of "no less" or "no more" has only to stay right of -1.
    Raises ValueError if no row has an effect.
    """
    rows = claims[(claims["seeds"] > 0) & claims["effect"].notna()]
    if rows.empty:
        raise ValueError(
            "claims has no row with an effect; run python -m benchmarks.advice first"
        )
    labels = [_label(row) for _, row in rows.iterrows()]
    heights = np.array([_lines(label) for label in labels])
    centres = np.cumsum(heights) - heights / 2
    figure = new_figure(_WIDE, 1.6 + 0.25 * heights.sum())
    axes = figure.add_subplot()
    axes.axvspan(-1, 1, color=BASE, alpha=0.18, linewidth=0)  # within the margin
    axes.axvline(0, color=BASE, linewidth=2)
    for centre, (_, row) in zip(centres, rows.iterrows(), strict=True):
        _draw_interval(axes, centre, row)
        _draw_effect(axes, centre, row)
    axes.set_yticks(centres, labels, fontsize=8.5)
    axes.set_ylim(heights.sum() + 0.1, -0.1)
    _set_scale(axes)
    _draw_legend(figure, axes, set(rows["verdict"]))
    return figure


def _label(row: pd.Series) -> str:
    """The claim's name and who says it, in lines of 32 characters; a star marks the first table."""
    star = " *" if row["kind"] == "first" else ""
    return textwrap.fill(f"{row['name']}{star} · {row['by']}", 32)


def _lines(label: str) -> float:
    """The height of a row, in lines of the figure: a small label needs less than a line for each of its own."""
    return max(1.0, 0.6 * (1 + label.count("\n")))


def _draw_interval(axes: Axes, centre: float, row: pd.Series) -> None:
    """The 95 % interval as a line, dotted where there is no verdict; an arrow at each end that lies outside."""
    colour = STYLES[row["verdict"]][0]
    no_verdict = row["verdict"] in (WITHDRAWN, SO_FAR, UNMET)
    _, low, high = scaled(row)
    axes.plot(
        [_within(low, _FARTHEST), _within(high, _FARTHEST)],
        [centre, centre],
        ":" if no_verdict else "-",
        color=colour,
        linewidth=1.8,
        solid_capstyle="butt",
    )
    if low < -_FARTHEST:
        axes.plot(-_FARTHEST, centre, "<", color=colour, markersize=5)
    if high > _FARTHEST:
        axes.plot(_FARTHEST, centre, ">", color=colour, markersize=5)


def _draw_effect(axes: Axes, centre: float, row: pd.Series) -> None:
    """The effect as the verdict's marker, and its numbers at the right of the axes."""
    effect, _, _ = scaled(row)
    beside_the_arrow = _FARTHEST - 0.35
    axes.plot(_within(effect, beside_the_arrow), centre, **_marker(row["verdict"]))
    axes.text(
        1.02,
        centre,
        effect_text(row),
        color=STYLES[row["verdict"]][0],
        va="center",
        fontsize=8,
        transform=axes.get_yaxis_transform(),
    )


def _within(value: float, farthest: float) -> float:
    return min(max(value, -farthest), farthest)


def scaled(row: pd.Series) -> tuple[float, float, float]:
    """(effect, low, high) in the claim's direction and in margins.

    >>> scaled(pd.Series({"effect": 2.0, "low": 1.0, "high": 4.0, "margin": 2.0, "says": "less"}))
    (-1.0, -2.0, -0.5)
    """
    effect, low, high = (
        float(row[name]) / float(row["margin"]) for name in ("effect", "low", "high")
    )
    if row["says"] in ("less", "no more"):
        return -effect, -high, -low
    return effect, low, high


def _marker(verdict: str) -> dict[str, object]:
    colour, marker, filled = STYLES[verdict]
    return {
        "marker": marker,
        "color": colour,
        "markersize": 6,
        "markerfacecolor": colour if filled else "white",
    }


def _set_scale(axes: Axes) -> None:
    """The scale of margins below, and no frame."""
    axes.set_xlim(-_FARTHEST * 1.04, _FARTHEST * 1.04)
    axes.set_xlabel(
        "effect in the claim's direction, 95 % interval, in margins\n(* of the first table)",
        fontsize=8.5,
    )
    axes.spines[["top", "right", "left"]].set_visible(False)
    axes.tick_params(axis="y", length=0)


def _draw_legend(figure: Figure, axes: Axes, verdicts: set[str]) -> None:
    """One entry for each of the verdicts, and one for the line at 0."""
    handles = []
    for verdict in STYLES:
        if verdict in verdicts:
            handles += axes.plot([], [], linewidth=1.8, label=verdict, **_marker(verdict))
    handles += axes.plot([], [], color=BASE, linewidth=2, label="what it is compared with")
    figure.legend(
        handles=handles,
        loc="outside upper left",
        ncols=3,
        fontsize=8.5,
        frameon=False,
    )
