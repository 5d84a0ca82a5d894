"""Base beside tuned on the same rows: difference with its interval, a paired test, and samples picked by rule.

Longer than 300 lines because a comparison's numbers, the tables that show them and its results.json are read together.
"""

from __future__ import annotations

import json
import warnings
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pandas as pd

from grpo_kit._support.argument_checks import check_whole
from grpo_kit._support.cuda import peak_gib
from grpo_kit._support.display import BASE, CONSTANT, TUNED, new_figure
from grpo_kit.evaluation._constant import Constant, no_better_than
from grpo_kit.evaluation._shown import (
    ShownTable,
    in_columns,
    p_value,
    percent,
    shown,
    with_page,
)
from grpo_kit.evaluation.accuracy import is_reward
from grpo_kit.evaluation.intervals import Estimate, bootstrap_mean, mcnemar_p, share
from grpo_kit.record._lines import read_json, reading
from grpo_kit.record._run_folder import path_of
from grpo_kit.record.files import KEPT, RunFolderError, read_metrics, run_settings, write_whole
from grpo_kit.watch._completions import side_by_side

if TYPE_CHECKING:
    from matplotlib.figure import Figure

    from grpo_kit.evaluation.accuracy import Evaluation


@dataclass(frozen=True, repr=False)
class Comparison:
    """Two evaluations of the same rows. Made by compare().

    difference: measure -> tuned minus base, with a paired bootstrap's 95 % interval; for rewards, over the rows that
    can be judged in both. p: measure -> exact McNemar p-value, None for rewards.
    fixed, broken: rows wrong before and right after (strict), and rows right before and wrong after. If nothing is
    right or wrong: rows that earn more after, and less.
    leads: the measure that leads the sentence, "strict" or "reward" (see Evaluation.measure).
    """

    base: Evaluation
    tuned: Evaluation
    difference: dict[str, Estimate]
    p: dict[str, float | None]
    fixed: int
    broken: int

    @property
    def leads(self) -> str:
        """The measure that leads the sentence: "strict", or "reward" if either evaluation is measured by it."""
        return "reward" if "reward" in (self.base.measure, self.tuned.measure) else "strict"

    @property
    def constant(self) -> Constant | None:
        """The best constant of both evaluations, name and accuracy, or mean reward."""
        if self.leads == "strict":
            constants = self.base.constant, self.tuned.own_constant
        else:
            constants = self.base.constant_reward, self.tuned.constant_reward
        return max(filter(None, constants), key=lambda constant: constant[1], default=None)

    @property
    def no_better(self) -> str | None:
        """The start of the sentence if the tuned model is no better than the constant strategy; None if it is better.

        >>> comparison.no_better  # doctest: +SKIP
        "No better than answering 'billing' every time (45.0 %)"
        """
        verdict = no_better_than(self.constant, _estimates(self.tuned)[self.leads])
        if verdict is None:
            return None
        return f"{verdict} ({self._constant_value})"

    @property
    def _constant_value(self) -> str:
        value = self.constant[1]
        if self.leads == "strict":
            return percent(value)
        return f"{value:.3f}"

    @property
    def sentence(self) -> str:
        """The change in one line; the constant strategy comes first if the tuned model is no
        better.

        >>> comparison.sentence  # doctest: +SKIP
        '19.9 % -> 88.3 %, n = 256, +68.4 points [62.1, 74.2], p < 0.001; the best constant strategy has 27.3 %.'
        """
        name, constant = self.leads, self.constant
        change, no_better = self.difference[name], self.no_better
        before, after = _estimates(self.base)[name].value, _estimates(self.tuned)[name].value
        if name == "strict":
            p = p_value(self.p[name])
            if not p.startswith("<"):
                p = f"= {p}"
            gain = change.words(change=True)
            text = f"{percent(before)} -> {percent(after)}, n = {self.base.n}, {gain}, p {p}"
        else:
            gain = change.words(rate=False, change=True)
            text = f"mean reward {before:.3f} -> {after:.3f}, n = {change.n}, {gain}"
        if no_better:
            return f"{no_better}: {text}."
        if constant is None:
            return f"{text}."
        strategy = "strategy has" if name == "strict" else f"completion ({constant[0]}) earns"
        return f"{text}; the best constant {strategy} {self._constant_value}."

    def beside(self, null: Comparison) -> str:
        """The gain, and which part of it comes without the right reward, each from its own base and tuned model.

        null: the comparison of the same run with shuffled rewards (grpo_kit.lab.null). The measure is the one that
        leads: points of accuracy, or the mean reward.

        >>> comparison.beside(null_comparison)  # doctest: +SKIP
        '+66.8 points [60.5, 73.0], of which +3.1 points [-2.0, 8.2] come without the right reward'
        """
        gain, without = (
            each.difference[self.leads].words(self.leads == "strict", change=True)
            for each in (self, null)
        )
        return f"{gain}, of which {without} come without the right reward"

    def save(self, folder: str | Path) -> Path:
        """Write what a run came to into its folder, as results.json, which grpo-kit watch reads. Returns the path.

        before, after, best_constant: of the measure that leads, with its 95 % interval. n: rows. weights_of_step: the
        step whose weights were kept. peak_gib: of this process so far (cuda.peak_gib). Raises RunFolderError for a
        folder without a run.

        >>> comparison.save("runs/full")  # doctest: +SKIP
        """
        metrics, settings = read_metrics(folder), run_settings(folder)
        if settings is None or not len(metrics):
            raise RunFolderError(
                f"folder={str(folder)!r} holds no run that has trained; give a run's, like 'runs/full'"
            )
        measure = "accuracy" if self.leads == "strict" else "reward"
        steps = weights_of_step = int(metrics["step"].max())
        best = path_of(folder) / KEPT
        if best.is_file():
            weights_of_step = read_json(best)["step"]
        results = {
            "model": settings["model"],
            "task": settings["data"]["task"],
            "seed": settings["config"]["seed"],
            "n": self.base.n,
            "steps": steps,
            "measure": measure,
            "train_seconds": float(metrics["seconds"].iloc[-1]),
            "no_better": self.no_better,
            "sentence": self.sentence,
            "preset": settings["config"].get("preset"),
            "peak_gib": peak_gib(),
            "weights_of_step": weights_of_step,
        }
        for name, evaluation in (("before", self.base), ("after", self.tuned)):
            results[name] = {}
            if evaluation.strict is not None:
                results[name]["accuracy"] = evaluation.strict.value
            estimate = _estimates(evaluation)[self.leads]
            results[name] |= {
                measure: estimate.value,
                "low": estimate.low,
                "high": estimate.high,
            }
        if self.constant is not None:
            results["best_constant"] = dict(zip(("name", measure), self.constant, strict=True))
        path = path_of(folder) / "results.json"
        write_whole(path, json.dumps(results, indent=2).encode())
        return path

    def table(self) -> ShownTable:
        """One row a measure: base, tuned, difference, each with its interval (<name>_low, <name>_high), p and n; the
        constant strategy last.

        Shares are numbers in [0, 1]; a notebook and print() show the sentence, then percent and intervals in the cells.
        """
        rows, words = {}, {}
        base, tuned = _estimates(self.base), _estimates(self.tuned)
        for name, difference in self.difference.items():
            rate, p = name in self.base.rates, self.p[name]
            estimates = {"base": base[name], "tuned": tuned[name], "difference": difference}
            rows[name] = in_columns(estimates) | {"p": p, "n": difference.n}
            words[name] = {
                "base": base[name].words(rate),
                "tuned": tuned[name].words(rate),
                "difference": difference.words(rate, change=True),
                "p": p_value(p),
                "n": str(difference.n),
            }
        if self.constant is not None:
            name, value = self.constant
            rows[name] = {"base": value, "tuned": value, "n": self.base.n}
            words[name] = {
                "base": self._constant_value,
                "tuned": self._constant_value,
                "n": str(self.base.n),
            }
        table = pd.DataFrame.from_dict(rows, orient="index").rename_axis(self.base.task)
        return shown(table, self.sentence, words)

    def by(self, labels: Sequence[Any], name: str = "label") -> ShownTable:
        """Accuracy before and after, and n, of the rows of each label: one label a row, in the rows' order.

        Shows a shortcut: a model that reads the question is right at every label. Raises ValueError for another number
        of labels than rows, and where nothing is right or wrong.

        >>> comparison.by([len(row["numbers"]) for row in task.held_out])  # doctest: +SKIP
        """
        if len(labels) != self.base.n or "strict" not in self.base.rates:
            raise ValueError(
                f"labels: {len(labels)} for {self.base.n} rows measured by {', '.join(self.difference)}; give one "
                "a row, of a task whose answers are right or wrong"
            )
        right = pd.DataFrame(
            {"base": self.base.rows["strict"], "tuned": self.tuned.rows["strict"]}
        )
        rows, words = {}, {}
        for label, answers in right.groupby(pd.Series(list(labels))):
            n = len(answers)
            estimates = {column: share(int(answers[column].sum()), n) for column in answers}
            rows[label] = in_columns(estimates) | {"n": n}
            words[str(label)] = {
                column: estimate.words() for column, estimate in estimates.items()
            }
            words[str(label)]["n"] = str(n)
        table = pd.DataFrame.from_dict(rows, orient="index").rename_axis(name)
        return shown(table, f"Right, by {name}.", words)

    def _repr_html_(self) -> str:
        return self.table()._repr_html_()

    def __repr__(self) -> str:
        return f"{self.table()!r}\n{self._changed}."

    def plot(self) -> Figure:
        """Bars of base and tuned with their intervals: rates, or mean rewards if those lead. The best constant is a
        line, and part of the title if the tuned model is no better."""
        figure = new_figure(6.5, 3.6)
        axes = figure.add_subplot()
        by_rate = self.leads == "strict"
        names = [name for name in self.difference if by_rate == (name in self.base.rates)]
        for label, evaluation, colour, shift in (
            ("base", self.base, BASE, -0.2),
            ("tuned", self.tuned, TUNED, 0.2),
        ):
            all_estimates = _estimates(evaluation)
            estimates = [all_estimates[name] for name in names]
            errors = [
                [e.value - e.low for e in estimates],
                [e.high - e.value for e in estimates],
            ]
            x = [place + shift for place in range(len(names))]
            values = [e.value for e in estimates]
            axes.bar(x, values, width=0.36, yerr=errors, capsize=4, color=colour, label=label)
        if self.constant is not None:
            name, value = self.constant
            axes.axhline(value, color=CONSTANT, linestyle="--", linewidth=1.2, label=name)
        axes.set_xticks(range(len(names)), names)
        axes.set_ylabel("mean reward")
        if by_rate:
            axes.set_ylim(0, 1.02)
            axes.set_ylabel("share of prompts")
        title = f"{self.base.task}: {self.base.n} held-out prompts, 95 % intervals"
        no_better = self.no_better
        if no_better:
            title = f"{no_better}\n{title}"
        axes.set_title(title, fontsize=10)
        axes.legend(fontsize=8, frameon=False, loc="upper left", bbox_to_anchor=(1, 1))
        return figure

    @property
    def _names(self) -> tuple[str, str]:
        """The names of rows that are better after, and worse."""
        return ("fixed", "broken") if "strict" in self.p else ("more", "less")

    @property
    def _changed(self) -> str:
        better, worse = self._names
        return f"{self.fixed} {better}, {self.broken} {worse}"

    def examples(self, n: int = 3) -> ShownTable:
        """The first n rows that were fixed, then the first n that broke (strict); never picked by hand.

        If nothing is right or wrong: the first n rows that earn more, then those that earn less.

        Columns question, answer, base and tuned (the completions whole); a notebook shows base and tuned side by side,
        long ones behind a click.
        """
        check_whole("n", n)
        table = self.base.rows[["question", "answer"]].assign(
            base=self.base.rows["completion"], tuned=self.tuned.rows["completion"]
        )
        better, worse = self._names
        change = _change(self.base, self.tuned, "strict" if better == "fixed" else "reward")
        parts = {better: table[change > 0].head(n), worse: table[change < 0].head(n)}
        table = pd.concat(parts, names=["what"])
        sentence = f"{self._changed}; the first {n} of each."
        page, text = f'<p style="margin:0 0 6px">{sentence}</p>', sentence
        for (kind, place), row in table.iterrows():
            name = f"{kind}, row {place}"
            page += side_by_side(
                name,
                row["question"],
                row["answer"],
                {"base": row["base"], "tuned": row["tuned"]},
            )
            text += f"\n\n{name}: {row['question']}"
            for column in ("answer", "base", "tuned"):
                text += f"\n{column}: {row[column]}"
        return with_page(table, page, text)


def _estimates(evaluation: Evaluation) -> dict[str, Estimate]:
    return evaluation.rates | evaluation.rewards


def _change(base: Evaluation, tuned: Evaluation, name: str) -> pd.Series:
    """Tuned minus base of a measure, row by row; NaN where one of them could not be judged."""
    return tuned.rows[name].astype(float) - base.rows[name].astype(float)


def compare(base: Evaluation, tuned: Evaluation) -> Comparison:
    """The change from base to tuned, row by row.

    Raises ValueError unless both have the same questions in the same order with the same greedy decoding, and if
    nothing is right or wrong and no row has a reward in both.
    """
    for name, evaluation in (("base", base), ("tuned", tuned)):
        if not hasattr(evaluation, "rates"):
            raise ValueError(
                f"{name}={evaluation!r:.100} is no Evaluation; kit.evaluate(model, tokenizer, task) makes one"
            )
    if (
        base.task != tuned.task
        or base.rows["question"].tolist() != tuned.rows["question"].tolist()
    ):
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
    for name in (*base.rates, *filter(is_reward, base.rows)):
        if name not in tuned.rows:
            continue
        change = _change(base, tuned, name).dropna()
        if change.empty:
            continue
        widest = max(1.0, change.abs().max())  # rewards may lie on any scale
        difference[name] = bootstrap_mean(change.tolist(), lowest=-widest, highest=widest)
        counts[name] = int((change > 0).sum()), int((change < 0).sum())
        p[name] = None
        if name in base.rates:
            p[name] = mcnemar_p(*counts[name])
    leading = "strict" if "strict" in counts else "reward"
    if leading not in counts:
        raise ValueError(
            f"task {base.task!r}: its rewards judge no row of both; there is nothing to compare"
        )
    return Comparison(base, tuned, difference, p, *counts[leading])


def results(root: str | Path) -> pd.DataFrame:
    """One row for each run under root that was evaluated (Comparison.save), by name, oldest first.

    preset, model, seed, n, steps; before and after as text with 95 % intervals (a mean reward where nothing is right
    or wrong); minutes of training; peak GiB (see cuda.peak_gib); None for what a results.json of your own leaves out.
    Empty where no run was evaluated. A results.json that cannot be read gives a RuntimeWarning and no row.

    >>> results("runs")  # doctest: +SKIP
    """
    rows = {}
    for path in sorted(
        path_of(root, "root").glob("*/results.json"), key=lambda path: path.stat().st_mtime
    ):
        try:
            with reading(path):
                saved = read_json(path)
                if {"before", "after"} <= saved.keys():
                    rows[path.parent.name] = _row(saved)
        except RunFolderError as error:
            warnings.warn(str(error), RuntimeWarning, stacklevel=2)
    return pd.DataFrame.from_dict(rows, orient="index").rename_axis("run")


def _row(saved: dict[str, Any]) -> dict[str, Any]:
    row = {name: saved.get(name) for name in ("preset", "model", "seed", "n", "steps")}
    for name in ("before", "after"):
        values = saved[name]
        measure = "accuracy" if "accuracy" in values else "reward"
        estimate = Estimate(values[measure], values["low"], values["high"], saved.get("n"))
        row[name] = estimate.words(rate=measure == "accuracy")
    for name, column, unit in (("train_seconds", "minutes", 60), ("peak_gib", "peak GiB", 1)):
        value = saved.get(name)
        row[column] = None if value is None else round(value / unit, 1)
    return row
