"""The table of the advice as one picture: each claim's effect with its interval, on one scale."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pandas as pd

from grpo_kit.display import new_figure

if TYPE_CHECKING:
    from matplotlib.figure import Figure

COLOURS = {"holds": "#2a7f3f", "does not": "#c44e52", "cannot tell": "#8c8c8c", "withdrawn": "#c0c0c0"}
_WIDEST = 6.0  # in units of what matters; longer bars end in an arrow


def draw_table(made: pd.DataFrame) -> Figure:
    """One line a claim that was run, in the table's order; what table.table gives.

    x: the effect in the direction that the claim names, divided by the smallest difference that matters (5 points of
    accuracy, ...): 0 is no difference, 1 is one that matters. The dashed line at -1 is what "no less" must stay above.
    A withdrawn row is pale and dotted, its name too.
    Raises ValueError if no row has an effect.
    """
    rows = made[made["seeds"] > 0].reset_index(drop=True)
    if not len(rows):
        raise ValueError("made has no row with an effect; run python -m benchmarks.advice first")
    figure = new_figure(9.5, 1.1 + 0.27 * len(rows))
    axes = figure.add_subplot()
    for place, row in rows.iterrows():
        value, low, high = scaled(row)
        word = next((word for word in COLOURS if row["verdict"].endswith(word)), "cannot tell")
        seen = [min(max(end, -_WIDEST), _WIDEST) for end in (low, high)]
        style = ":" if word == "withdrawn" else "-"
        axes.plot(seen, [place, place], style, color=COLOURS[word], linewidth=2.2, solid_capstyle="butt")
        for end, marker, beyond in ((-_WIDEST, "<", low < -_WIDEST), (_WIDEST, ">", high > _WIDEST)):
            if beyond:
                axes.plot([end], [place], marker, color=COLOURS[word], markersize=5)
        if abs(value) <= _WIDEST:
            axes.plot([value], [place], "o", color=COLOURS[word], markersize=5.5)
        axes.text(
            1.02,
            place,
            row["verdict"],
            color=COLOURS["cannot tell"] if word == "withdrawn" else COLOURS[word],
            style="italic" if word == "withdrawn" else "normal",
            va="center",
            fontsize=8.5,
            transform=axes.get_yaxis_transform(),
        )
    axes.axvline(0, color="black", linewidth=0.8)
    for side in (-1, 1):
        axes.axvline(side, color="#999999", linewidth=0.8, linestyle="--")
    axes.set_yticks(range(len(rows)), rows["claim"], fontsize=8.5)
    for label, word in zip(axes.get_yticklabels(), rows["verdict"], strict=True):
        label.set_color(COLOURS["cannot tell"] if word == "withdrawn" else "black")
    axes.set_ylim(len(rows) - 0.4, -0.6)
    axes.set_xlim(-_WIDEST * 1.04, _WIDEST * 1.04)
    axes.set_xlabel(
        "effect in the claim's direction, 95 % interval; 1 = the smallest difference that matters",
        fontsize=8.5,
    )
    axes.spines[["top", "right", "left"]].set_visible(False)
    axes.tick_params(axis="y", length=0)
    return figure


def scaled(row: pd.Series) -> tuple[float, float, float]:
    """(effect, low, high) in the claim's direction and in units of what matters.

    >>> scaled(pd.Series({"effect": 2.0, "low": 1.0, "high": 4.0, "matters": 2.0, "says": "less"}))
    (-1.0, -2.0, -0.5)
    """
    value, low, high = (float(row[name]) / float(row["matters"]) for name in ("effect", "low", "high"))
    return (-value, -high, -low) if row["says"] == "less" else (value, low, high)
