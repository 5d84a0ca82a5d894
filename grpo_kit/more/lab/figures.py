"""Figures: a laboratory's reward curves, accuracy, differences and cost; pass@k before and after training."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING

from grpo_kit._support.display import COLOURS, CONSTANT, GREY, colours_of, new_figure
from grpo_kit.watch._red_flag import range_of_rows

if TYPE_CHECKING:
    import pandas as pd
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

    from grpo_kit.evaluation.accuracy import Evaluation
    from grpo_kit.evaluation.readiness import Readiness


def draw_lab(
    summary: pd.DataFrame,
    runs: pd.DataFrame,
    curves: pd.DataFrame,
    *,
    against: str,
) -> Figure:
    """A Lab's tables as a picture.

    The arm to compare with is grey-blue in every laboratory. Curves: mean over seeds, band from the lowest to the
    highest seed. Dots: seeds; bars: 95 % intervals.
    """
    from matplotlib.ticker import MaxNLocator

    arms = list(summary.index)
    colours = colours_of(arms, base=against)
    heights = [2.4, max(1.6, 1.0 + 0.28 * len(arms))]
    # as wide as a page: its words are not made smaller there
    figure = new_figure(8, sum(heights))
    panels = figure.subplot_mosaic("llllllll;rrrdddcc", height_ratios=heights)
    _draw_curves(panels["l"], curves, colours)
    accuracy, difference, cost = panels["r"], panels["d"], panels["c"]
    for place, arm in enumerate(arms):
        row, colour = summary.loc[arm], colours[arm]
        arm_runs = runs[runs["arm"] == arm]
        _interval(accuracy, place, row[["accuracy", "low", "high"]], colour)
        accuracy.plot(
            arm_runs["accuracy"],
            [place] * len(arm_runs),
            ".",
            color=colour,
            alpha=0.55,
            markersize=5,
        )
        accuracy.plot(
            [arm_runs["before"].mean()],
            [place],
            "|",
            color=GREY,
            markersize=12,
        )
        if arm != against:
            _interval(difference, place, row[["difference", "d_low", "d_high"]], colour)
        cost.barh(place, row["tokens"] / 1000, color=colour, height=0.6)
    accuracy.axvline(
        runs["best_constant"].astype(float).max(), color=CONSTANT, linestyle="--", linewidth=1
    )
    accuracy.set_xlim(0, 1.02)
    difference.axvline(0, color=GREY, linewidth=0.8)
    difference.xaxis.set_major_locator(MaxNLocator(4))
    _label(accuracy, "held-out accuracy, greedy", "| before training   -- best constant answer")
    _label(difference, f"difference to {against}", "95 % intervals")
    _label(cost, "thousand tokens")
    for axes in (accuracy, difference, cost):
        axes.set_yticks(range(len(arms)), [""] * len(arms))
        axes.set_ylim(len(arms) - 0.4, -0.6)
    accuracy.set_yticklabels(arms)
    return figure


def _draw_curves(axes: Axes, curves: pd.DataFrame, colours: Mapping[str, str]) -> None:
    """The reward of each arm by step."""
    from matplotlib.ticker import MaxNLocator

    title = "reward in training"
    for number, (arm, colour) in enumerate(colours.items()):
        # Rollouts that are used again have no reward.
        rows = curves[(curves["arm"] == arm) & curves["reward"].notna()]
        rewards = rows.groupby("step")["reward"].agg(["mean", "min", "max"])
        style = ("-", "--", ":", "-.")[number // len(COLOURS) % 4]
        axes.plot(
            rewards["mean"],
            color=colour,
            linestyle=style,
            linewidth=1.8,
            label=arm,
        )
        if rows["seed"].nunique() > 1:
            title = "reward in training (band: seeds)"
            axes.fill_between(
                rewards.index,
                rewards["min"],
                rewards["max"],
                color=colour,
                alpha=0.10,
                linewidth=0,
            )
    low, high = range_of_rows(["reward"], curves)
    margin = 0.02 * (high - low)
    axes.set_ylim(low - margin, high + margin)
    axes.xaxis.set_major_locator(MaxNLocator(integer=True))
    if len(colours) <= 8:
        axes.legend(fontsize=8, frameon=False, loc="center left", bbox_to_anchor=(1, 0.5))
    _label(axes, title, "step")


def _label(axes: Axes, title: str, x_label: str = "") -> None:
    axes.set_title(title, loc="left", fontsize=9.5)
    axes.set_xlabel(x_label, fontsize=8, color=GREY)
    axes.spines[["top", "right"]].set_visible(False)
    axes.tick_params(labelsize=8, labelcolor=GREY)


def _interval(
    axes: Axes,
    place: int,
    estimate: pd.Series,
    colour: str,
) -> None:
    """estimate: value, low, high."""
    value, low, high = estimate
    axes.plot(
        [low, high],
        [place, place],
        color=colour,
        linewidth=2,
        solid_capstyle="butt",
    )
    axes.plot(
        [value],
        [place],
        "o",
        color=colour,
        markersize=5.5,
    )


def plot_pass_at_k(curves: Mapping[str, Evaluation | Readiness], *, title: str = "") -> Figure:
    """A line for each model with its 95 % band, k on a logarithmic axis; the best constant strategy dashed.

    curves: name -> an Evaluation with samples, a Readiness, or another object with pass_at. "before" and "base" get
    the base's colour.
    A trained curve that starts higher and meets the old one at large k means: training made existing answers
    likelier. A curve that stays above at every k means: the model solves new prompts. Neither follows if a blind guess
    is right within k tries, as on `largest` at 64: there the old curve ends near 1 with or without the skill.
    Source of the reading: Yue et al., Does Reinforcement Learning Really Incentivize Reasoning Capacity in LLMs Beyond
    the Base Model?, arXiv:2504.13837.
    Raises ValueError for no curves, or one without pass_at.

    >>> plot_pass_at_k({"before": before, "after": after})  # doctest: +SKIP
    """
    if not curves:
        raise ValueError("curves is empty; give at least one evaluation")
    figure = new_figure(6.5, 3.6)
    axes = figure.add_subplot()
    tried: set[int] = set()
    colours = colours_of(list(curves))
    for name, result in curves.items():
        if not result.pass_at:
            raise ValueError(f"curves[{name!r}] has no pass_at; evaluate it with samples")
        ks = sorted(result.pass_at)
        tried.update(ks)
        estimates = [result.pass_at[k] for k in ks]
        axes.plot(
            ks,
            [e.value for e in estimates],
            marker="o",
            markersize=4,
            color=colours[name],
            label=name,
        )
        axes.fill_between(
            ks,
            [e.low for e in estimates],
            [e.high for e in estimates],
            color=colours[name],
            alpha=0.15,
            linewidth=0,
        )
    constants = dict(
        result.constant for result in curves.values() if result.constant is not None
    )
    for name, value in constants.items():
        axes.axhline(
            value,
            color=CONSTANT,
            linestyle="--",
            linewidth=1.2,
            label=name,
        )
    axes.set_xscale("log", base=2)
    axes.set_xticks(sorted(tried), sorted(tried))
    axes.set(xlabel="k, samples a prompt", ylabel="pass@k", ylim=(0, 1.02), title=title)
    axes.legend(fontsize=8, frameon=False, loc="upper left", bbox_to_anchor=(1, 1))
    return figure
