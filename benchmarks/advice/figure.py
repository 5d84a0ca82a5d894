"""The table of the advice as one picture: each row's effect with its interval, beside its margin."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

import pandas as pd

from benchmarks.advice.row import SO_FAR, UNMET, WITHDRAWN
from benchmarks.advice.table import effect_text
from grpo_kit.display import BASE, COLOURS, GREY, colours_of, new_figure

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

    from grpo_kit.lab import Lab

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
_PANELS = 4  # beside one another
_WIDEST = 5.0  # margins; what is longer ends in an arrow


def draw_table(made: pd.DataFrame) -> Figure:
    """One line a row that has an effect, in the table's order; made: what table.table gives, or some of it.

    x: the effect in the direction that the claim names, in margins: 0, in the colour of a control, is what was compared
    with, and the pale band is within the margin. A claim of "no less" or "no more" has only to stay right of -1.
    Raises ValueError if no row has an effect.
    """
    rows = made[(made["seeds"] > 0) & made["effect"].notna()].reset_index(drop=True)
    if not len(rows):
        raise ValueError("made has no row with an effect; run python -m benchmarks.advice first")
    figure = new_figure(11, 1.6 + 0.25 * len(rows))
    axes = figure.add_subplot()
    axes.axvspan(-1, 1, color=BASE, alpha=0.18, linewidth=0)
    axes.axvline(0, color=BASE, linewidth=2)
    for place, row in rows.iterrows():
        _draw(axes, place, row)
    axes.set_yticks(range(len(rows)), [_label(row) for _, row in rows.iterrows()], fontsize=8.5)
    axes.set_ylim(len(rows) - 0.4, -0.6)
    axes.set_xlim(-_WIDEST * 1.04, _WIDEST * 1.04)
    axes.set_xlabel(
        "effect in the claim's direction, 95 % interval, in margins\n(* of the first table)", fontsize=8.5
    )
    axes.spines[["top", "right", "left"]].set_visible(False)
    axes.tick_params(axis="y", length=0)
    shown = [word for word in STYLES if (rows["verdict"] == word).any()]
    handles = [axes.plot([], [], linewidth=1.8, label=word, **_mark(word))[0] for word in shown]
    handles.append(axes.plot([], [], color=BASE, linewidth=2, label="what it is compared with")[0])
    figure.legend(handles=handles, loc="outside upper left", ncols=4, fontsize=8.5, frameon=False)
    return figure


def draw_curves(labs: Sequence[tuple[str, Lab]]) -> Figure:
    """One panel a laboratory of row.labs_of: a reward by step, each arm's mean over its seeds, from the lowest to the
    highest of them as a band; what is compared with in the colour of a control.

    The reward: the outcome's own, where the outcome is one reward's mean, else what is paid.
    Raises ValueError if there is none.
    """
    if not labs:
        raise ValueError("labs is empty; give what row.labs_of finds, if it finds any")
    wide = min(len(labs), _PANELS)
    high = -(-len(labs) // wide)
    figure = new_figure(3.2 * max(wide, 2), 2.8 * high)
    panels = figure.subplots(high, wide, squeeze=False).flat
    for (outcome, found), axes in zip(labs, panels, strict=False):
        own = outcome.removesuffix("_mean")
        column = own if own in found.curves else "reward"
        for arm, colour in colours_of(found.arms, base=found.against).items():
            curve = found.curves[found.curves["arm"] == arm].dropna(subset=column)
            by_step = curve.groupby("step")[column]
            axes.plot(by_step.mean(), color=colour, linewidth=1.6, label=f"{arm} ({curve['seed'].nunique()})")
            axes.fill_between(by_step.mean().index, by_step.min(), by_step.max(), color=colour, alpha=0.12)
        axes.set_title(column, loc="left", fontsize=8.5)
        axes.set_xlabel("step", fontsize=8)
        axes.xaxis.get_major_locator().set_params(integer=True)
        axes.tick_params(labelsize=8)
        axes.legend(fontsize=7.5, frameon=False)
        axes.spines[["top", "right"]].set_visible(False)
    for axes in panels[len(labs) :]:
        axes.remove()
    return figure


def scaled(row: pd.Series) -> tuple[float, float, float]:
    """(effect, low, high) in the claim's direction and in margins.

    >>> scaled(pd.Series({"effect": 2.0, "low": 1.0, "high": 4.0, "margin": 2.0, "says": "less"}))
    (-1.0, -2.0, -0.5)
    """
    value, low, high = (float(row[name]) / float(row["margin"]) for name in ("effect", "low", "high"))
    return (-value, -high, -low) if row["says"] in ("less", "no more") else (value, low, high)


def _draw(axes: Axes, place: int, row: pd.Series) -> None:
    colour = STYLES[row["verdict"]][0]
    value, low, high = scaled(row)
    seen = [min(max(end, -_WIDEST), _WIDEST) for end in (low, high)]
    dotted = row["verdict"] in (WITHDRAWN, SO_FAR, UNMET)
    axes.plot(
        seen, [place, place], ":" if dotted else "-", color=colour, linewidth=1.8, solid_capstyle="butt"
    )
    for end, marker, beyond in ((-_WIDEST, "<", low < -_WIDEST), (_WIDEST, ">", high > _WIDEST)):
        if beyond:
            axes.plot([end], [place], marker, color=colour, markersize=5)
    inside = _WIDEST - 0.35  # beside the arrow
    axes.plot([min(max(value, -inside), inside)], [place], **_mark(row["verdict"]))
    side = axes.get_yaxis_transform()
    axes.text(1.02, place, effect_text(row), color=colour, va="center", fontsize=8, transform=side)


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
