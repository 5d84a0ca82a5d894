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


def draw_lab(summary: pd.DataFrame, runs: pd.DataFrame, curves: pd.DataFrame, *, against: str) -> Figure:
    """A Lab's tables as a picture.

    The arm to compare with is grey-blue in every laboratory. Curves: mean over seeds, band from the lowest to the
    highest seed. Dots: seeds; bars: 95 % intervals.
    """
    from matplotlib.ticker import MaxNLocator

    arms = list(summary.index)
    colour = colours_of(arms, base=against)
    heights = [2.4, max(1.6, 1.0 + 0.28 * len(arms))]
    figure = new_figure(8, sum(heights))  # as wide as a page: its words are not made smaller there
    panels = figure.subplot_mosaic("llllllll;rrrdddcc", height_ratios=heights)
    lines, right, change, cost = (panels[name] for name in "lrdc")
    for i, arm in enumerate(arms):
        own = curves[(curves["arm"] == arm) & curves["reward"].notna()]  # reused rollouts have none
        by_step = own.groupby("step")["reward"]
        steps = sorted(own["step"].unique())
        style = ("-", "--", ":", "-.")[i // len(COLOURS) % 4]
        lines.plot(steps, by_step.mean(), color=colour[arm], linestyle=style, linewidth=1.8, label=arm)
        if own["seed"].nunique() > 1:
            lines.fill_between(
                steps, by_step.min(), by_step.max(), color=colour[arm], alpha=0.10, linewidth=0
            )
        row = summary.loc[arm]
        own_runs = runs[runs["arm"] == arm]
        each = own_runs["accuracy"]
        _interval(right, i, row["accuracy"], row["low"], row["high"], colour[arm])
        right.plot(each, [i] * len(each), ".", color=colour[arm], alpha=0.55, markersize=5)
        right.plot([own_runs["before"].mean()], [i], "|", color=GREY, markersize=12)
        if arm != against:
            _interval(change, i, row["difference"], row["d_low"], row["d_high"], colour[arm])
        cost.barh(i, row["tokens"] / 1000, color=colour[arm], height=0.6)
    if len(constant := runs["best_constant"].dropna()):
        right.axvline(constant.max(), color=CONSTANT, linestyle="--", linewidth=1)
    change.axvline(0, color=GREY, linewidth=0.8)
    bands = " (band: seeds)" if lines.collections else ""
    lines.set_title(f"reward in training{bands}", loc="left", fontsize=9.5)
    lines.set_xlabel("step", fontsize=8, color=GREY)
    right.set_title("held-out accuracy, greedy", loc="left", fontsize=9.5)
    right.set_xlabel("| before training   -- best constant answer", fontsize=8, color=GREY)
    change.set_title(f"difference to {against}", loc="left", fontsize=9.5)
    change.set_xlabel("95 % intervals", fontsize=8, color=GREY)
    cost.set_title("thousand tokens", loc="left", fontsize=9.5)
    if len(arms) <= 8:
        lines.legend(fontsize=8, frameon=False, loc="center left", bbox_to_anchor=(1, 0.5))
    low, high = range_of_rows(["reward"], curves)
    lines.set_ylim(low - 0.02 * (high - low), high + 0.02 * (high - low))
    lines.xaxis.set_major_locator(MaxNLocator(integer=True))
    change.xaxis.set_major_locator(MaxNLocator(4))
    right.set_xlim(0, 1.02)
    for axes in (right, change, cost):
        axes.set_yticks(range(len(arms)), arms if axes is right else [""] * len(arms), fontsize=8)
        axes.set_ylim(len(arms) - 0.4, -0.6)
    for axes in (lines, right, change, cost):
        axes.spines[["top", "right"]].set_visible(False)
        axes.tick_params(labelsize=8, labelcolor=GREY)
    return figure


def _interval(axes: Axes, place: int, value: float, low: float, high: float, colour: str) -> None:
    axes.plot([low, high], [place, place], color=colour, linewidth=2, solid_capstyle="butt")
    axes.plot([value], [place], "o", color=colour, markersize=5.5)


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
    ks: set[int] = set()
    colours = colours_of(list(curves))
    for name, result in curves.items():
        if not result.pass_at:
            raise ValueError(f"curves[{name!r}] has no pass_at; evaluate it with samples")
        x, estimates = zip(*sorted(result.pass_at.items()), strict=True)
        ks.update(x)
        axes.plot(x, [e.value for e in estimates], marker="o", markersize=4, color=colours[name], label=name)
        low, high = [e.low for e in estimates], [e.high for e in estimates]
        axes.fill_between(x, low, high, color=colours[name], alpha=0.15, linewidth=0)
    constants = dict(result.constant for result in curves.values() if result.constant is not None)
    for name, value in constants.items():
        axes.axhline(value, color=CONSTANT, linestyle="--", linewidth=1.2, label=name)
    axes.set_xscale("log", base=2)
    axes.set_xticks(sorted(ks), [str(k) for k in sorted(ks)])
    axes.set(xlabel="k, samples a prompt", ylabel="pass@k", ylim=(0, 1.02), title=title)
    axes.legend(fontsize=8, frameon=False, loc="upper left", bbox_to_anchor=(1, 1))
    return figure
