"""The runs behind rows of the table: a reward by step, a panel for each arm that others are compared with."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import TYPE_CHECKING

from grpo_kit._support.display import BASE, COLOURS, new_figure
from grpo_kit.watch._red_flag import seen_range

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

    from grpo_kit.more.lab import Lab

_WIDE = 8  # inches: as wide as a page, which makes the words of a wider figure smaller
_PANELS = 2  # beside one another
# characters of an arm's name: two longer ones, with their seeds, are wider than a panel
_LONG_NAME = 17


def draw_curves(labs: Sequence[tuple[str, Lab]]) -> Figure:
    """One panel a laboratory of row.labs_of: a reward by step, each arm's mean over its seeds, from the lowest to the
    highest of them as a band; what is compared with dashed, over the others, so that equal curves are both seen.

    The reward: the outcome's own, where the outcome is one reward's mean, else what is paid. An arm of one step, which
    is not trained, is a dot. An arm has one colour in all panels. Raises ValueError if there is none.
    """
    if not labs:
        raise ValueError("labs is empty; give what row.labs_of finds, if it finds any")
    panel_rows = math.ceil(len(labs) / _PANELS)
    legend_lines = max(math.ceil(len(lab.arms) / _legend_columns(lab)) for _, lab in labs)
    figure = new_figure(_WIDE, (2.7 + 0.2 * legend_lines) * panel_rows)
    panels = figure.subplots(panel_rows, min(len(labs), _PANELS), squeeze=False).flat
    colours = _colours(labs)
    for (outcome, lab), axes in zip(labs, panels, strict=False):
        reward = outcome.removesuffix("_mean")
        if reward not in lab.curves:
            reward = "reward"
        _draw_arms(axes, lab, reward, colours)
        _set_panel(axes, lab, reward)
    for axes in panels[len(labs) :]:
        axes.remove()
    return figure


def _legend_columns(lab: Lab) -> int:
    longest_name = max(map(len, lab.arms))
    return 1 if longest_name > _LONG_NAME else 2


def _draw_arms(axes: Axes, lab: Lab, reward: str, colours: dict[str, str]) -> None:
    """The curve of each arm; of what is compared with first, above the others."""
    _draw_arm(axes, lab, lab.against, reward, colours[lab.against], style="--", zorder=3)
    others = [arm for arm in lab.arms if arm != lab.against]
    for place, arm in enumerate(others):
        style = "-" if place % 2 == 0 else ":"
        _draw_arm(axes, lab, arm, reward, colours[arm], style=style, zorder=2)


def _draw_arm(
    axes: Axes,
    lab: Lab,
    arm: str,
    reward: str,
    colour: str,
    *,
    style: str,
    zorder: int,
) -> None:
    """The arm's mean over its seeds by step, and a band from the lowest to the highest of them."""
    curve = lab.curves[lab.curves["arm"] == arm].dropna(subset=reward)
    by_step = curve.groupby("step")[reward]
    mean = by_step.mean()
    axes.plot(
        mean,
        style if len(mean) > 1 else "o",
        color=colour,
        linewidth=2.2 if style == ":" else 1.8,
        zorder=zorder,
        label=f"{arm} ({curve['seed'].nunique()})",
    )
    axes.fill_between(
        mean.index,
        by_step.min(),
        by_step.max(),
        color=colour,
        alpha=0.24 / len(lab.arms),
        linewidth=0,
    )


def _set_panel(axes: Axes, lab: Lab, reward: str) -> None:
    """Title, scales and a legend below, over no curve."""
    low, high = seen_range(lab.curves[reward].min(), lab.curves[reward].max())
    room = 0.03 * (high - low)
    axes.set_ylim(low - room, high + room)
    axes.set_title(reward, loc="left", fontsize=9.5)
    axes.set_xlabel("step", fontsize=9)
    axes.xaxis.get_major_locator().set_params(integer=True)
    axes.tick_params(labelsize=9)
    axes.legend(
        loc="upper center",
        bbox_to_anchor=(0.5, -0.2),
        ncols=_legend_columns(lab),
        fontsize=9,
        frameon=False,
        handlelength=1.8,
        columnspacing=1.2,
    )
    axes.spines[["top", "right"]].set_visible(False)


def _colours(labs: Sequence[tuple[str, Lab]]) -> dict[str, str]:
    """One colour an arm, none twice in a panel: BASE for what is compared with, unless another beside it has that.

    An arm of several panels shares its colour with no arm of another panel, except BASE.
    """
    arms = [arm for _, lab in labs for arm in lab.arms]
    controls = {lab.against for _, lab in labs}
    in_several = {arm for arm in arms if arms.count(arm) > 1}
    # arms of several panels first: they have the fewest colours to choose from
    order = sorted(
        dict.fromkeys(arms), key=lambda arm: (arm not in in_several, arm not in controls)
    )
    colours: dict[str, str] = {}
    for arm in order:
        neighbours = {other for _, lab in labs if arm in lab.arms for other in lab.arms}
        beside_it = {colours.get(other) for other in neighbours}
        reserved = {colours.get(other) for other in in_several} - {BASE}
        choice = list(COLOURS[:-1])  # the last is a grey too
        if arm in controls:
            choice.insert(0, BASE)
        free = [colour for colour in choice if colour not in beside_it] or list(COLOURS)
        unreserved = [colour for colour in free if colour not in reserved]
        colours[arm] = (unreserved or free)[0]
    return colours
