"""Base beside tuned on the same rows: difference with its interval, a paired test, and samples picked by rule."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import pandas as pd

from grpo_kit.evaluation.accuracy import is_reward
from grpo_kit.evaluation.intervals import Estimate, bootstrap_mean, mcnemar_p

if TYPE_CHECKING:
    from matplotlib.figure import Figure

    from grpo_kit.evaluation.accuracy import Evaluation

_MEASURES = ("strict", "lenient", "formatted")


@dataclass(frozen=True)
class Comparison:
    """Two evaluations of the same rows. Made by compare().

    difference: measure -> tuned minus base, with a paired bootstrap's 95 % interval; for rewards over the rows that
    both can be judged on. p: measure -> exact McNemar p-value, None for rewards.
    fixed, broken: rows wrong before and right after (strict), and the other way round.
    """

    base: Evaluation
    tuned: Evaluation
    difference: dict[str, Estimate]
    p: dict[str, float | None]
    fixed: int
    broken: int

    def table(self) -> pd.DataFrame:
        """One row a measure: base, tuned, difference, each with its interval, and p. The constant strategy last."""
        rows = {}
        for name, difference in self.difference.items():
            row = {}
            named = {"base": _of(self.base, name), "tuned": _of(self.tuned, name), "difference": difference}
            for who, e in named.items():
                row |= {who: e.value, f"{who}_low": e.low, f"{who}_high": e.high}
            rows[name] = row | {"p": self.p[name], "n": difference.n}
        if self.base.constant is not None:
            name, value = self.base.constant
            rows[name] = {"base": value, "tuned": value, "n": self.base.n}
        return pd.DataFrame.from_dict(rows, orient="index").rename_axis(self.base.task)

    def _repr_html_(self) -> str:
        return self.table().to_html(float_format="{:.3g}".format, na_rep="")

    def __str__(self) -> str:
        wide = max(map(len, self.difference))
        lines = [
            f"{name:{wide}}  {_said(self.base, name)} -> {_said(self.tuned, name)}"
            for name in self.difference
        ]
        lines.append(
            f"strict: {self.fixed} fixed, {self.broken} broken, p = {self.p['strict']:.2g} (McNemar, exact)"
        )
        if self.base.constant is not None:
            lines.append(
                f"best constant strategy, {self.base.constant[0]}: {100 * self.base.constant[1]:.1f} %"
            )
        return "\n".join(lines)

    def plot(self) -> Figure:
        """Bars of base and tuned with their intervals; the best constant strategy as a line."""
        from grpo_kit.display import new_figure

        figure = new_figure(6.5, 3.6)
        axes = figure.add_subplot()
        for place, (label, evaluation, colour) in enumerate(
            [("base", self.base, "#9aa5b1"), ("tuned", self.tuned, "#1f77b4")]
        ):
            estimates = [getattr(evaluation, name) for name in _MEASURES]
            errors = [[e.value - e.low for e in estimates], [e.high - e.value for e in estimates]]
            x = [i + 0.4 * (place - 0.5) for i in range(len(_MEASURES))]
            values = [e.value for e in estimates]
            axes.bar(x, values, width=0.36, yerr=errors, capsize=4, color=colour, label=label)
        if self.base.constant is not None:
            name, value = self.base.constant
            axes.axhline(value, color="#c44e52", linestyle="--", linewidth=1.2, label=name)
        axes.set_xticks(range(len(_MEASURES)), _MEASURES)
        axes.set_ylim(0, 1.02)
        axes.set_ylabel("share of prompts")
        axes.set_title(f"{self.base.task}: {self.base.n} held-out prompts, 95 % intervals", fontsize=10)
        axes.legend(fontsize=8, frameon=False, loc="upper left", bbox_to_anchor=(1, 1))
        return figure

    def examples(self, n: int = 3) -> pd.DataFrame:
        """The first n rows that were fixed, then the first n that broke (strict); no picking by hand."""
        if n < 1:
            raise ValueError(f"n={n!r} must be at least 1")
        before, after = self.base.rows, self.tuned.rows
        both = pd.DataFrame(
            {
                "question": before["question"],
                "answer": before["answer"],
                "base": before["completion"],
                "tuned": after["completion"],
            }
        )
        fixed, broken = ~before["strict"] & after["strict"], before["strict"] & ~after["strict"]
        parts = {"fixed": both[fixed].head(n), "broken": both[broken].head(n)}
        return (
            pd.concat([part.assign(what=what) for what, part in parts.items()])
            .set_index("what", append=True)
            .swaplevel()
        )


def _of(evaluation: Evaluation, name: str) -> Estimate:
    return getattr(evaluation, name) if name in _MEASURES else evaluation.rewards[name]


def _said(evaluation: Evaluation, name: str) -> str:
    """A rate in per cent; a mean reward, which is none, as a number."""
    e = _of(evaluation, name)
    return str(e) if name in _MEASURES else f"{e.value:.3f} [{e.low:.3f}, {e.high:.3f}] (n = {e.n})"


def compare(base: Evaluation, tuned: Evaluation) -> Comparison:
    """What changed from base to tuned, row by row.

    Raises ValueError unless both saw the same questions in the same order with the same greedy decoding.
    """
    if base.task != tuned.task or base.rows["question"].tolist() != tuned.rows["question"].tolist():
        raise ValueError(
            f"base has {base.n} rows of {base.task!r} and tuned {tuned.n} of {tuned.task!r}, not the same ones in the "
            "same order; evaluate both on the same rows"
        )
    limits = base.settings["max_completion_tokens"], tuned.settings["max_completion_tokens"]
    if limits[0] != limits[1]:
        raise ValueError(
            f"max_completion_tokens is {limits[0]} in base and {limits[1]} in tuned; decode both alike"
        )
    difference, p, counts = {}, {}, {}
    for name in _MEASURES:
        change = tuned.rows[name].astype(int) - base.rows[name].astype(int)
        difference[name] = bootstrap_mean(change.tolist(), lowest=-1.0)
        counts[name] = int((change > 0).sum()), int((change < 0).sum())
        p[name] = mcnemar_p(*counts[name])
    for name in filter(is_reward, base.rows):
        change = (tuned.rows[name] - base.rows[name]).dropna() if name in tuned.rows else ()
        if len(change):
            difference[name], p[name] = bootstrap_mean(change.tolist(), lowest=-1.0), None
    return Comparison(base, tuned, difference, p, *counts["strict"])
