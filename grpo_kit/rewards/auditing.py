"""How often is a reward wrong? Measured on texts that are right, or wrong, by construction."""

from __future__ import annotations

import html
import operator
import random
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import pandas as pd

from grpo_kit._support.argument_checks import check_whole
from grpo_kit._support.display import wilson_interval
from grpo_kit.rewards._parts import (
    Reward,
    answer_parts,
    reaches_rewards,
    reward_names,
    with_parts,
)
from grpo_kit.rewards.cheat_cases import Case, TaskWithCases, answer_cases, score_cases
from grpo_kit.rewards.response import gold_text
from grpo_kit.verdicts._neighbours import equal_texts, excused, near_misses, why

_ROWS = 64  # rows of a task, by default
_PAYS = 1e-9


@dataclass(frozen=True, repr=False)
class Audit:
    """The scores of a reward on texts that are right and on texts that are wrong. Made by audit().

    reward: its name. golds: how many were tried. left_out: (gold, score) of the golds that were skipped, because the
    reward scores their own text 0.0 or cannot judge it (None).
    texts: one row per text: gold, text, name (the change to the gold: neighbours.csv), right (bool) and score, relative
    to the gold's own text, which scores 1; NaN where the reward cannot judge.
    """

    reward: str
    golds: int
    left_out: list[tuple[str, float | None]]
    texts: pd.DataFrame

    def table(self) -> pd.DataFrame:
        """One row per kind of error: rate, low, high (95 %, Wilson), wrong, n texts, and how many were not judged."""
        rows = {}
        for name, right in (
            ("right spellings refused", True),
            ("near misses paid in full", False),
        ):
            scores = self.texts.loc[self.texts["right"] == right, "score"]
            n = int(scores.count())
            wrong = int(((scores.dropna() >= 1 - _PAYS) != right).sum())
            rates = (None, None, None)
            if n:
                rates = (wrong / n, *wilson_interval(wrong, n))
            rows[name] = (*rates, wrong, n, len(scores) - n)
        columns = ["rate", "low", "high", "wrong", "n", "not judged"]
        table = pd.DataFrame.from_dict(rows, orient="index", columns=columns).rename_axis(
            self.reward
        )
        return table.astype({"rate": float, "low": float, "high": float})

    @property
    def worst(self) -> pd.DataFrame:
        """One example of each way to be wrong: near misses with full pay first, then by frequency.

        Columns: gold, text, score, name, why (the text is right, or wrong), times (wrong scores of texts of that name).
        """
        scored = self.texts.dropna(subset="score")
        wrong = scored[(scored["score"] >= 1 - _PAYS) != scored["right"]]
        times = wrong.groupby(["right", "name"])["text"].transform("size").astype(int)
        examples = wrong.assign(times=times, why=wrong["name"].map(why))
        examples = examples.sort_values(
            ["right", "times"], ascending=[True, False], kind="stable"
        )
        examples = examples.drop_duplicates(["right", "name"]).reset_index(drop=True)
        return examples[["gold", "text", "score", "name", "why", "times"]]

    @property
    def summary(self) -> str:
        """One sentence with both rates, and one with the golds that were left out."""
        rates = [
            f"{row.rate:.1%} of {row.n}".replace("%", " %") if row.n else "none of 0"
            for row in self.table().itertuples()
        ]
        summary = f"{self.reward} refuses {rates[0]} right spellings and pays {rates[1]} near misses in full"
        summary += f" ({self.golds} golds)."
        if self.left_out:
            gold, score = self.left_out[0]
            reason = "cannot judge" if score is None else "pays nothing for"
            summary += f" Left out are {len(self.left_out)} golds whose own text it {reason}, such as {gold!r:.60}."
        return summary

    def __repr__(self) -> str:
        parts = [self.summary, self.table().to_string(float_format="{:.4f}".format)]
        worst = self.worst.head(8)
        if len(worst):
            parts.append(worst.to_string())
        return "\n".join(parts)

    def _repr_html_(self) -> str:
        page = f"<p><b>{html.escape(self.summary)}</b></p>"
        page += self.table().to_html(float_format="{:.4f}".format, na_rep="")
        worst = self.worst.head(8)
        if len(worst):
            page += worst.to_html(float_format="{:g}".format)
        return page


def audit(
    task: TaskWithCases | Reward,
    rows: Sequence[Mapping[str, Any]] | None = None,
    *,
    column: str = "answer",
    tag: str | None = "answer",
    n: int = 12,
    seed: int = 0,
) -> Audit:
    """How often is this reward wrong? Counts right spellings of a gold that it refuses and near misses it pays in full.

    task: a task, whose rewards that judge the answer are audited; or one reward, the kit's or your own function.
    rows: dicts with the gold and every column that the reward needs, by any names. The gold is passed on as `answer`
    too where no column has that name; what no reward can be given (`prompt`, `completions`) is left out.
    None: the first 64 held-out rows of the task.
    column: the gold's column, text or number; "answer" for a task. tag: the answer tag of a reward's completions, None
    for completions that are the answer alone; a task has its own tag, prefill and reasoning.
    n: at most so many texts of either list for each gold; they are drawn with the seed.
    The gold's kind (number, fraction, money, unit, words, tuple, interval and so on) decides its two lists: texts that
    equal it by construction, and texts that do not (neighbours.csv has them, with reasons). A text is paid in full
    if it earns what the gold's own text earns, from every reward that judges the answer. A refusal or payment that the
    reward's arguments call for (expressions=True, units="required", tolerance=, case=True) is no error.
    The lists cover mathematics and words. A reward with another notion of equality (a set of calls, a schedule)
    refuses most spellings, and rightly.
    Raises ValueError for no rows, an n below 1, a missing column, and a task whose answers have no tags (code).

    >>> from grpo_kit.rewards import MathAnswer
    >>> print(audit(MathAnswer(), [{"answer": "5"}, {"answer": "1/2"}]).summary)
    math_answer refuses 0.0 % of 24 right spellings and pays 0.0 % of 24 near misses in full (2 golds).
    """
    check_whole("n", n, hint=": the texts of either list that a gold gets")
    is_task = hasattr(task, "cases_for")
    rewards = [task]
    if is_task:
        if task.answers_are == "programs":
            raise ValueError(
                f"{task!r} has no answer tags to put other texts in; audit a reward of its answers"
            )
        if rows is None:
            rows = task.held_out[:_ROWS]
        column, tag = "answer", task.answer_tag
        rewards = list(answer_parts(task.rewards).values())
    if not rows or not rewards:
        raise ValueError(
            f"rows={rows!r:.100}: give rows with a gold, and a reward that judges the answer"
        )
    skipped = set().union(
        *(excused(getattr(part, "rules", None)) for part in with_parts(rewards))
    )
    left_out: list[tuple[str, float | None]] = []
    trials: list[_Trial] = []
    for place, row in enumerate(rows):
        if column not in row:
            raise ValueError(
                f"row {place} has no column {column!r}; it has {sorted(map(str, row))}"
            )
        gold = gold_text(row[column])
        if gold is None:
            left_out.append((str(row[column]), None))
            continue
        if is_task:
            honest = next(case for case in task.cases_for(row, task.rewards) if case.honest)
        else:
            columns = {name: value for name, value in row.items() if reaches_rewards(name)}
            columns.setdefault("answer", row[column])
            completion = gold if tag is None else f"<{tag}>{gold}</{tag}>"
            honest = Case("honest", completion, honest=True, columns=columns)
        if not answer_cases(honest, {"": gold}, tag=tag):
            raise ValueError(
                f"{honest.completion!r:.200} has no <{tag}> answer of its own to put other texts in"
            )
        rng = random.Random(f"{seed} {place} {gold}")
        trials.append(_Trial(gold, honest))
        misses = near_misses(gold, str(row.get("question") or ""))
        for right, texts in ((True, equal_texts(gold)), (False, misses)):
            names = [name for name in texts if name not in skipped]
            sample = {name: texts[name] for name in rng.sample(names, min(n, len(names)))}
            for case in answer_cases(honest, sample, tag=tag):
                trials.append(_Trial(gold, case, sample[case.name], right))
    return _score_trials(rewards, trials, left_out)


class _Trial(NamedTuple):
    """A case of a gold: its own text, or another text that is right or wrong."""

    gold: str
    case: Case
    text: str = ""
    right: bool = True


def _score_trials(
    rewards: Sequence[Reward],
    trials: Sequence[_Trial],
    left_out: list[tuple[str, float | None]],
) -> Audit:
    """The texts with their scores, divided by those of the honest case, which comes first for each gold."""
    names = reward_names(rewards)
    parts = score_cases(rewards, [trial.case for trial in trials], names)
    golds = 0
    honest_scores: tuple[float, ...] = ()  # of the gold; () for one that is left out
    texts: list[tuple] = []
    for trial, scores in zip(trials, zip(*parts.values(), strict=True), strict=True):
        is_judged = None not in scores
        if trial.case.honest:
            honest_scores = ()
            if is_judged and min(scores) > 0:
                honest_scores = scores
                golds += 1
            else:
                left_out.append((trial.gold, 0.0 if is_judged else None))
        elif honest_scores:
            share = min(map(operator.truediv, scores, honest_scores)) if is_judged else None
            texts.append((trial.gold, trial.text, trial.case.name, trial.right, share))
    table = pd.DataFrame(texts, columns=["gold", "text", "name", "right", "score"])
    return Audit(
        " + ".join(names), golds, left_out, table.astype({"right": bool, "score": float})
    )
