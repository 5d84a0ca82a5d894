"""pass@k against k, before and after training."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING

from grpo_kit._support.display import CONSTANT, colours_of, new_figure

if TYPE_CHECKING:
    from matplotlib.figure import Figure

    from grpo_kit.evaluation.accuracy import Evaluation
    from grpo_kit.evaluation.readiness import Readiness


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
