"""The table of the advice as one picture: each row's effect with its interval, beside its margin."""

from __future__ import annotations

import textwrap
from collections.abc import Sequence
from typing import TYPE_CHECKING

import numpy as np
import pandas as pd

from benchmarks.advice.row import SO_FAR, UNMET, WITHDRAWN
from benchmarks.advice.table import effect_text
from grpo_kit._support.display import BASE, COLOURS, GREY, new_figure
from grpo_kit.watch._red_flag import seen_range

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

    from grpo_kit.more.lab import Lab

_BLUE, _VERMILION, _GREEN = COLOURS[:3]
# verdict -> (colour, mark, whether the mark is filled): told apart in grey print too
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
_PANELS = 2  # beside one another
_LONG = 17  # characters of an arm's name, of which two and their seeds are wider than a panel
_WIDEST = 5.0  # margins; what is longer ends in an arrow


def draw_table(made: pd.DataFrame) -> Figure:
    """One line a row that has an effect, in the table's order; made: what table.table gives, or some of it.

    x: the effect in the direction that the claim names, in margins: 0, in the colour of a control, is what was compared
    with, and the pale band is within the margin. A claim of "no less" or "no more" has only to stay right of -1.
    Raises ValueError if no row has an effect.
    """
    rows = made[(made["seeds"] > 0) & made["effect"].notna()].reset_index(drop=True)
    if not len(rows):
        raise ValueError(
            "made has no row with an effect; run python -m benchmarks.advice first"
        )
    labels = [textwrap.fill(_label(row), 32) for _, row in rows.iterrows()]
    # of rows, in lines
    heights = np.array([max(1.0, 0.6 * (1 + label.count("\n"))) for label in labels])
    places = np.cumsum(heights) - heights / 2
    figure = new_figure(_WIDE, 1.6 + 0.25 * heights.sum())
    axes = figure.add_subplot()
    axes.axvspan(-1, 1, color=BASE, alpha=0.18, linewidth=0)
    axes.axvline(0, color=BASE, linewidth=2)
    for place, (_, row) in zip(places, rows.iterrows(), strict=True):
        _draw(axes, place, row)
    axes.set_yticks(places, labels, fontsize=8.5)
    axes.set_ylim(heights.sum() + 0.1, -0.1)
    axes.set_xlim(-_WIDEST * 1.04, _WIDEST * 1.04)
    axes.set_xlabel(
        "effect in the claim's direction, 95 % interval, in margins\n(* of the first table)",
        fontsize=8.5,
    )
    axes.spines[["top", "right", "left"]].set_visible(False)
    axes.tick_params(axis="y", length=0)
    shown = [word for word in STYLES if (rows["verdict"] == word).any()]
    handles = [axes.plot([], [], linewidth=1.8, label=word, **_mark(word))[0] for word in shown]
    handles.append(
        axes.plot([], [], color=BASE, linewidth=2, label="what it is compared with")[0]
    )
    figure.legend(
        handles=handles, loc="outside upper left", ncols=3, fontsize=8.5, frameon=False
    )
    return figure


def draw_curves(labs: Sequence[tuple[str, Lab]]) -> Figure:
    """One panel a laboratory of row.labs_of: a reward by step, each arm's mean over its seeds, from the lowest to the
    highest of them as a band; what is compared with dashed, over the others, so that equal curves are both seen.

    The reward: the outcome's own, where the outcome is one reward's mean, else what is paid. An arm of one step, which
    is not trained, is a dot. An arm has one colour in all panels. Raises ValueError if there is none.
    """
    if not labs:
        raise ValueError("labs is empty; give what row.labs_of finds, if it finds any")
    high = -(-len(labs) // _PANELS)
    # of the legends
    columns = [1 if max(map(len, found.arms)) > _LONG else 2 for _, found in labs]
    lines = max(-(-len(found.arms) // n) for n, (_, found) in zip(columns, labs, strict=True))
    figure = new_figure(_WIDE, (2.7 + 0.2 * lines) * high)
    panels = figure.subplots(high, min(len(labs), _PANELS), squeeze=False).flat
    colours = _colours(labs)
    for (outcome, found), ncols, axes in zip(labs, columns, panels, strict=False):
        own = outcome.removesuffix("_mean")
        column = own if own in found.curves else "reward"
        others = [arm for arm in found.arms if arm != found.against]
        for n, arm in enumerate([found.against, *others]):
            curve = found.curves[found.curves["arm"] == arm].dropna(subset=column)
            by_step = curve.groupby("step")[column]
            style, above = ("--", 3) if n == 0 else ("-:"[(n - 1) % 2], 2)
            if by_step.ngroups == 1:
                style = "o"
            label = f"{arm} ({curve['seed'].nunique()})"
            width = 2.2 if style == ":" else 1.8
            axes.plot(
                by_step.mean(),
                style,
                color=colours[arm],
                linewidth=width,
                zorder=above,
                label=label,
            )
            band = (by_step.mean().index, by_step.min(), by_step.max())
            axes.fill_between(
                *band, color=colours[arm], alpha=0.24 / len(found.arms), linewidth=0
            )
        low, top = seen_range(found.curves[column].min(), found.curves[column].max())
        axes.set_ylim(low - 0.03 * (top - low), top + 0.03 * (top - low))
        axes.set_title(column, loc="left", fontsize=9.5)
        axes.set_xlabel("step", fontsize=9)
        axes.xaxis.get_major_locator().set_params(integer=True)
        axes.tick_params(labelsize=9)
        # over no curve
        below = {"loc": "upper center", "bbox_to_anchor": (0.5, -0.2), "ncols": ncols}
        axes.legend(fontsize=9, frameon=False, handlelength=1.8, columnspacing=1.2, **below)
        axes.spines[["top", "right"]].set_visible(False)
    for axes in panels[len(labs) :]:
        axes.remove()
    return figure


def _colours(labs: Sequence[tuple[str, Lab]]) -> dict[str, str]:
    """One colour an arm, none twice in a panel: BASE for what is compared with, unless another beside it has that.

    An arm of several panels shares its colour with no arm of another panel, except BASE.
    """
    arms = [arm for _, found in labs for arm in found.arms]
    controls = {found.against for _, found in labs}
    shared = {arm for arm in arms if arms.count(arm) > 1}
    given: dict[str, str] = {}
    for arm in sorted(
        dict.fromkeys(arms), key=lambda arm: (arm not in shared, arm not in controls)
    ):
        beside = {
            given.get(other) for _, found in labs if arm in found.arms for other in found.arms
        }
        kept = {given.get(other) for other in shared} - {BASE}
        wanted = [BASE] * (arm in controls) + list(COLOURS[:-1])  # the last is a grey too
        free = [colour for colour in wanted if colour not in beside] or list(COLOURS)
        given[arm] = next((colour for colour in free if colour not in kept), free[0])
    return given


def scaled(row: pd.Series) -> tuple[float, float, float]:
    """(effect, low, high) in the claim's direction and in margins.

    >>> scaled(pd.Series({"effect": 2.0, "low": 1.0, "high": 4.0, "margin": 2.0, "says": "less"}))
    (-1.0, -2.0, -0.5)
    """
    value, low, high = (
        float(row[name]) / float(row["margin"]) for name in ("effect", "low", "high")
    )
    return (-value, -high, -low) if row["says"] in ("less", "no more") else (value, low, high)


def _draw(axes: Axes, place: int, row: pd.Series) -> None:
    colour = STYLES[row["verdict"]][0]
    value, low, high = scaled(row)
    seen = [min(max(end, -_WIDEST), _WIDEST) for end in (low, high)]
    dotted = row["verdict"] in (WITHDRAWN, SO_FAR, UNMET)
    axes.plot(
        seen,
        [place, place],
        ":" if dotted else "-",
        color=colour,
        linewidth=1.8,
        solid_capstyle="butt",
    )
    for end, marker, beyond in (
        (-_WIDEST, "<", low < -_WIDEST),
        (_WIDEST, ">", high > _WIDEST),
    ):
        if beyond:
            axes.plot([end], [place], marker, color=colour, markersize=5)
    inside = _WIDEST - 0.35  # beside the arrow
    axes.plot([min(max(value, -inside), inside)], [place], **_mark(row["verdict"]))
    side = axes.get_yaxis_transform()
    axes.text(
        1.02, place, effect_text(row), color=colour, va="center", fontsize=8, transform=side
    )


def _mark(verdict: str) -> dict[str, object]:
    colour, marker, filled = STYLES[verdict]
    return {
        "marker": marker,
        "color": colour,
        "markersize": 6,
        "markerfacecolor": colour if filled else "white",
    }


def _label(row: pd.Series) -> str:
    return f"{row['name']}{' *' if row['kind'] == 'first' else ''} · {row['by']}"
