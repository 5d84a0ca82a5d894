"""Base beside tuned on the same rows: difference with its interval, a paired test, and samples picked by rule.

Longer than 300 lines because a comparison's numbers and the tables that show them are read together.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pandas as pd

from grpo_kit._support.argument_checks import check_whole
from grpo_kit._support.cuda import peak_gib
from grpo_kit.evaluation._constant import Constant, compared
from grpo_kit.evaluation._shown import ShownTable, p_value, percent, shown, with_page
from grpo_kit.evaluation.accuracy import is_reward
from grpo_kit.evaluation.intervals import Estimate, bootstrap_mean, mcnemar_p, wilson_interval
from grpo_kit.record._lines import read_json
from grpo_kit.record.files import KEPT, RunFolderError, read_metrics, run_settings, write_whole
from grpo_kit.record.run_path import path_of
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
            known = self.base.constant, self.tuned.own_constant
        else:
            known = self.base.constant_reward, self.tuned.constant_reward
        return max((one for one in known if one is not None), key=lambda one: one[1], default=None)

    @property
    def no_better(self) -> str | None:
        """The start of the sentence if the tuned model is no better than the constant strategy; None if it is better.

        >>> comparison.no_better  # doctest: +SKIP
        "No better than answering 'billing' every time (45.0 %)"
        """
        said = compared(_of(self.tuned, self.leads), self.constant)
        return None if said is None else f"{said} ({self._of_constant})"

    @property
    def _of_constant(self) -> str:
        value = self.constant[1]
        return percent(value) if self.leads == "strict" else f"{value:.3f}"

    @property
    def sentence(self) -> str:
        """The change in one line; the constant strategy comes first if the tuned model is no
        better.

        >>> comparison.sentence  # doctest: +SKIP
        '19.9 % -> 88.3 %, n = 256, +68.4 points [62.1, 74.2], p < 0.001; the best constant strategy has 27.3 %.'
        """
        name, change = self.leads, self.difference[self.leads]
        before, after = (_of(one, name).value for one in (self.base, self.tuned))
        if name == "strict":
            p = p_value(self.p[name])
            said = (
                f"{percent(before)} -> {percent(after)}, n = {self.base.n}, {change.words(change=True)}, "
                f"p {p if p.startswith('<') else f'= {p}'}"
            )
        else:
            gain = change.words(rate=False, change=True)
            said = f"mean reward {before:.3f} -> {after:.3f}, n = {change.n}, {gain}"
        if lead := self.no_better:
            return f"{lead}: {said}."
        if self.constant is not None:
            what = "strategy has" if name == "strict" else f"completion ({self.constant[0]}) earns"
            said += f"; the best constant {what} {self._of_constant}"
        return f"{said}."

    def save(self, folder: str | Path) -> Path:
        """Write what a run came to into its folder, as results.json, which grpo-kit watch reads. Returns the path.

        before, after, best_constant: of the measure that leads, with its 95 % interval. n: rows. weights_of_step: the
        step whose weights were kept. peak_gib: of this process so far (cuda.peak_gib). Raises RunFolderError for a
        folder without a run.

        >>> comparison.save("runs/full")  # doctest: +SKIP
        """
        steps, settings = read_metrics(folder), run_settings(folder)
        if settings is None or not len(steps):
            raise RunFolderError(
                f"folder={str(folder)!r} holds no run that has trained; give a run's, like 'runs/full'"
            )
        measure, kept = "accuracy" if self.leads == "strict" else "reward", path_of(folder) / KEPT
        found = {
            "model": settings["model"],
            "task": settings["data"]["task"],
            "seed": settings["config"]["seed"],
        }
        found |= {"n": self.base.n, "steps": int(steps["step"].max()), "measure": measure}
        found |= {"train_seconds": float(steps["seconds"].iloc[-1]), "no_better": self.no_better}
        found |= {
            "sentence": self.sentence,
            "preset": settings["config"].get("preset"),
            "peak_gib": peak_gib(),
        }
        found["weights_of_step"] = read_json(kept)["step"] if kept.is_file() else found["steps"]
        for name, one in (("before", self.base), ("after", self.tuned)):
            e = _of(one, self.leads)
            accuracy = {} if one.strict is None else {"accuracy": one.strict.value}
            found[name] = accuracy | {measure: e.value, "low": e.low, "high": e.high}
        if self.constant is not None:
            found["best_constant"] = dict(zip(("name", measure), self.constant, strict=True))
        write_whole(path := path_of(folder) / "results.json", json.dumps(found, indent=2).encode())
        return path

    def table(self) -> ShownTable:
        """One row a measure: base, tuned, difference, each with its interval (<name>_low, <name>_high), p and n; the
        constant strategy last.

        Shares are numbers in [0, 1]; a notebook and print() show the sentence, then percent and intervals in the cells.
        """
        rows, words = {}, {}
        for name, difference in self.difference.items():
            named = {"base": _of(self.base, name), "tuned": _of(self.tuned, name), "difference": difference}
            rows[name], words[name], rate = {}, {}, name in self.base.rates
            for who, e in named.items():
                rows[name] |= {who: e.value, f"{who}_low": e.low, f"{who}_high": e.high}
                words[name][who] = e.words(rate, change=who == "difference")
            rows[name] |= {"p": self.p[name], "n": difference.n}
            words[name] |= {"p": p_value(self.p[name]), "n": str(difference.n)}
        if self.constant is not None:
            name, value = self.constant
            rows[name] = {"base": value, "tuned": value, "n": self.base.n}
            words[name] = {"base": self._of_constant, "tuned": self._of_constant, "n": str(self.base.n)}
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
        by, rows, words = pd.Series(list(labels), name=name), {}, {}
        for label, places in by.groupby(by).groups.items():
            rows[label], words[str(label)] = {}, {}
            for who, one in (("base", self.base), ("tuned", self.tuned)):
                right, n = int(one.rows["strict"].iloc[places].sum()), len(places)
                e = Estimate(right / n, *wilson_interval(right, n), n)
                rows[label] |= {who: e.value, f"{who}_low": e.low, f"{who}_high": e.high}
                words[str(label)][who] = e.words()
            rows[label]["n"], words[str(label)]["n"] = n, str(n)
        return shown(
            pd.DataFrame.from_dict(rows, orient="index").rename_axis(name), f"Right, by {name}.", words
        )

    def _repr_html_(self) -> str:
        return self.table()._repr_html_()

    def __repr__(self) -> str:
        return f"{self.table()!r}\n{self._changed}."

    def plot(self) -> Figure:
        """Bars of base and tuned with their intervals: rates, or mean rewards if those lead. The best constant is a
        line, and part of the title if the tuned model is no better."""
        from grpo_kit._support.display import BASE, CONSTANT, TUNED, new_figure

        figure = new_figure(6.5, 3.6)
        axes = figure.add_subplot()
        by_rate = self.leads == "strict"
        names = [name for name in self.difference if by_rate == (name in self.base.rates)]
        for place, (label, evaluation, colour) in enumerate(
            [("base", self.base, BASE), ("tuned", self.tuned, TUNED)]
        ):
            estimates = [_of(evaluation, name) for name in names]
            errors = [[e.value - e.low for e in estimates], [e.high - e.value for e in estimates]]
            x = [i + 0.4 * (place - 0.5) for i in range(len(estimates))]
            values = [e.value for e in estimates]
            axes.bar(x, values, width=0.36, yerr=errors, capsize=4, color=colour, label=label)
        if self.constant is not None:
            name, value = self.constant
            axes.axhline(value, color=CONSTANT, linestyle="--", linewidth=1.2, label=name)
        axes.set_xticks(range(len(names)), names)
        if by_rate:
            axes.set_ylim(0, 1.02)
        axes.set_ylabel("share of prompts" if by_rate else "mean reward")
        title = f"{self.base.task}: {self.base.n} held-out prompts, 95 % intervals"
        axes.set_title(f"{self.no_better}\n{title}" if self.no_better else title, fontsize=10)
        axes.legend(fontsize=8, frameon=False, loc="upper left", bbox_to_anchor=(1, 1))
        return figure

    @property
    def _names(self) -> tuple[str, str]:
        """What rows are called that are better after, and worse."""
        return ("fixed", "broken") if "strict" in self.p else ("more", "less")

    @property
    def _changed(self) -> str:
        return f"{self.fixed} {self._names[0]}, {self.broken} {self._names[1]}"

    def examples(self, n: int = 3) -> ShownTable:
        """The first n rows that were fixed, then the first n that broke (strict); never picked by hand.

        If nothing is right or wrong: the first n rows that earn more, then those that earn less.

        Columns question, answer, base and tuned (the completions whole); a notebook shows base and tuned side by side,
        long ones behind a click.
        """
        check_whole("n", n)
        before, after = self.base.rows, self.tuned.rows
        both = pd.DataFrame(
            {
                "question": before["question"],
                "answer": before["answer"],
                "base": before["completion"],
                "tuned": after["completion"],
            }
        )
        column = "strict" if "strict" in before else "reward"
        change, names = after[column].astype(float) - before[column].astype(float), self._names
        parts = {names[0]: both[change > 0].head(n), names[1]: both[change < 0].head(n)}
        table = (
            pd.concat([part.assign(what=what) for what, part in parts.items()])
            .set_index("what", append=True)
            .swaplevel()
        )
        sentence = f"{self._changed}; the first {n} of each."
        page, text = f'<p style="margin:0 0 6px">{sentence}</p>', sentence
        for (what, place), row in table.iterrows():
            name, both = f"{what}, row {place}", {who: row[who] for who in ("base", "tuned")}
            page += side_by_side(name, row["question"], row["answer"], both)
            words = {name: row["question"], "answer": row["answer"], **both}
            text += "\n" + "".join(f"\n{key}: {value}" for key, value in words.items())
        return with_page(table, page, text)


def _of(evaluation: Evaluation, name: str) -> Estimate:
    return (evaluation.rates | evaluation.rewards)[name]


def compare(base: Evaluation, tuned: Evaluation) -> Comparison:
    """The change from base to tuned, row by row.

    Raises ValueError unless both have the same questions in the same order with the same greedy decoding, and if
    nothing is right or wrong and no row has a reward in both.
    """
    for name, one in (("base", base), ("tuned", tuned)):
        if not hasattr(one, "rates"):
            raise ValueError(
                f"{name}={one!r:.100} is no Evaluation; kit.evaluate(model, tokenizer, task) makes one"
            )
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
    for name in base.rates:
        change = tuned.rows[name].astype(int) - base.rows[name].astype(int)
        difference[name] = bootstrap_mean(change.tolist(), lowest=-1.0)
        counts[name] = int((change > 0).sum()), int((change < 0).sum())
        p[name] = mcnemar_p(*counts[name])
    for name in filter(is_reward, base.rows):
        change = (tuned.rows[name] - base.rows[name]).dropna() if name in tuned.rows else ()
        if len(change):
            widest = max(1.0, *change.abs())  # rewards may lie on any scale
            mean = bootstrap_mean(change.tolist(), lowest=-widest, highest=widest)
            difference[name], p[name] = mean, None
            counts[name] = int((change > 0).sum()), int((change < 0).sum())
    leading = "strict" if "strict" in counts else "reward"
    if leading not in counts:
        raise ValueError(f"task {base.task!r}: its rewards judge no row of both; there is nothing to compare")
    return Comparison(base, tuned, difference, p, *counts[leading])
