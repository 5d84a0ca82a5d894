"""Accuracy on held-out rows, strict and lenient, with intervals; base beside tuned with a paired test."""

from __future__ import annotations

import json
import os
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field, replace
from statistics import fmean
from typing import TYPE_CHECKING, Any

import pandas as pd

from grpo_kit._support.argument_checks import (
    check_model,
    check_task,
    check_temperature,
    check_tokenizer,
    check_whole,
    is_whole,
)
from grpo_kit.evaluation._as_trained import SAMPLING, say_difference, trained_sampling
from grpo_kit.evaluation._constant import Constant, constant_reward, own_constant
from grpo_kit.evaluation._shown import ShownTable, estimates_table, percent, shown
from grpo_kit.evaluation.generate_and_score import Answers, answer, check_rows
from grpo_kit.evaluation.intervals import Estimate, bootstrap_mean, mean_reward, pass_at_k, wilson_interval
from grpo_kit.loop.config import Config
from grpo_kit.record._lines import read_json, reading
from grpo_kit.record.kept_results import write_where_asked
from grpo_kit.tasks._measure import Measure, has_accuracy

if TYPE_CHECKING:
    from transformers import PreTrainedModel, PreTrainedTokenizerBase

    from grpo_kit.tasks import Task

_RATES = ("strict", "lenient", "formatted")


@dataclass(frozen=True)
class Evaluation:
    """The scores of a model on a task's rows. Made by evaluate().

    strict: right, that is, the rewards that judge the answer pay in full (Task.is_right). lenient: strict, or right if
    the text behind an unclosed tag, or the last number, is taken as the answer. What cannot be judged counts as wrong.
    formatted: exactly one well-formed answer in the tags. pass_at: k -> pass@k (strict, sampled).
    For episodes, strict: the episode succeeds; lenient: None; formatted: the episode has no invalid action.
    strict and lenient are None if nothing is right or wrong, formatted if no form is required (tasks._measure).
    constant: name and accuracy of the best answer given without reading the question, None if the task has none.
    measure: which measure leads the result, "accuracy" or "reward". With "reward", constant_reward is name and mean
    reward of the best completion given to every row, None if unknown. own_constant: the answer that the model gives to
    more than half of the rows, and its accuracy given to all; None if there is none.
    as_trained: accuracy, or mean reward, of completions sampled as in training; None where it was not asked for.
    rows: one row a prompt: question, answer, completion, strict, lenient, formatted, tokens, cut_off, reward (the
    total) and reward/<name> of each reward, n_right of `samples` if there were samples, and unjudged if an answer
    could not be judged. settings: how it was decoded.
    """

    task: str
    strict: Estimate | None
    lenient: Estimate | None
    formatted: Estimate | None
    constant: Constant | None
    pass_at: dict[int, Estimate]
    rows: pd.DataFrame = field(repr=False)
    settings: dict[str, Any]
    measure: Measure = "accuracy"
    constant_reward: Constant | None = None
    own_constant: Constant | None = None
    as_trained: Estimate | None = None

    @property
    def n(self) -> int:
        """Number of prompts."""
        return len(self.rows)

    @property
    def rates(self) -> dict[str, Estimate]:
        """strict, lenient and formatted, without those that are None."""
        named = {name: getattr(self, name) for name in _RATES}
        return {name: estimate for name, estimate in named.items() if estimate is not None}

    @property
    def rewards(self) -> dict[str, Estimate]:
        """Mean reward, and reward/<name> of each part, over the prompts that it can judge. Partial credit shows here.

        Empty for an evaluation saved without rewards.
        """
        columns = {name: self.rows[name].dropna() for name in self.rows if is_reward(name)}
        return {name: mean_reward(column.tolist()) for name, column in columns.items() if len(column)}

    @property
    def result(self) -> Estimate:
        """The estimate that leads the result: accuracy (strict), or the mean reward.

        Raises ValueError if the rewards can judge none of the rows.
        """
        if self.measure == "accuracy" and self.strict is not None:
            return self.strict
        if "reward" not in self.rewards:
            raise ValueError(f"task {self.task!r}: its rewards judge none of these {self.n} completions")
        return self.rewards["reward"]

    @property
    def best_constant(self) -> Constant | None:
        """The best constant strategy, in the unit of the result."""
        return self.constant if self.measure == "accuracy" else self.constant_reward

    @property
    def sentence(self) -> str:
        """The result in one line.

        >>> evaluation.sentence  # doctest: +SKIP
        '88.3 % right, n = 256; the best constant strategy has 27.3 %.'
        """
        if self.measure == "accuracy":
            said = f"{percent(self.result.value)} right, n = {self.n}"
            if "unjudged" in self.rows:
                said += f", {self.rows['unjudged'].sum()} of which could not be judged and count as wrong"
        elif "reward" in self.rewards:
            said = f"mean reward {self.result.words(rate=False)}, n = {self.result.n}"
        else:
            said = f"no reward judges any of these {self.n} completions"
        return f"{said}{self.beside}."

    @property
    def beside(self) -> str:
        """The value of the constant strategy, as the end of a sentence; "" if none is known."""
        if self.best_constant is None:
            return ""
        name, value = self.best_constant
        if self.measure == "accuracy":
            return f"; the best constant strategy has {percent(value)}"
        return f"; the best constant completion ({name}) earns {value:.3f}"

    def table(self) -> ShownTable:
        """One row a measure: value, low, high (95 %), n; the mean rewards; the best constant strategy last.

        Shares are numbers in [0, 1]; a notebook and print() show percent, after a sentence with the result.
        """
        sampled = {f"pass@{k}": e for k, e in self.pass_at.items()}
        if self.as_trained is not None:
            name = "as trained" if self.measure == "accuracy" else "reward, as trained"
            sampled[f"{name} (temperature {self.settings['temperature']:g})"] = self.as_trained
        estimates = self.rates | sampled | self.rewards
        words = {
            name: {"value, 95 % interval": e.words(rate=not is_reward(name)), "n": str(e.n)}
            for name, e in estimates.items()
        }
        constants = [self.constant, self.constant_reward]
        for constant in filter(None, constants):
            name, value = constant
            value = percent(value) if constant is self.constant else f"reward {value:.3f}"
            words[name] = {"value, 95 % interval": value, "n": str(self.n)}
        table = estimates_table(self.task, estimates, constants, self.n)
        return shown(table, self.sentence, words)

    def _repr_html_(self) -> str:
        return self.table()._repr_html_()

    def save(self, path: str | os.PathLike) -> None:
        """Write everything to one JSON file, atomically; Evaluation.load reads it."""
        data = asdict(replace(self, rows=None)) | {"rows": self.rows.to_dict("records")}
        write_where_asked(path, json.dumps(data, ensure_ascii=False, indent=1).encode())

    @classmethod
    def load(cls, path: str | os.PathLike) -> Evaluation:
        """Read a file of save()."""
        data = read_json(path)
        with reading(path):
            data |= {
                name: Estimate(**data[name]) if data.get(name) else None for name in (*_RATES, "as_trained")
            }
            data["pass_at"] = {int(k): Estimate(**estimate) for k, estimate in data["pass_at"].items()}
            for name in ("constant", "constant_reward", "own_constant"):
                data[name] = tuple(data[name]) if data.get(name) else None
            return cls(**{**data, "rows": pd.DataFrame(data["rows"])})


def is_reward(column: str) -> bool:
    """Does this column of Evaluation.rows hold the total or a part?"""
    return column == "reward" or column.startswith(("reward/", "reward, "))


def evaluate(
    model: PreTrainedModel,
    tokenizer: PreTrainedTokenizerBase,
    task: Task,
    *,
    rows: Sequence[dict] | None = None,
    samples: int = 0,
    k: Sequence[int] = (1, 4, 8),
    temperature: float = 1.0,
    sampling: str | Config | None = None,
    max_completion_tokens: int | None = None,
    batch_size: int | None = None,
    seed: int = 0,
) -> Evaluation:
    """Greedy accuracy of the model on rows (default: the task's held-out rows), and its mean rewards, each with a 95 %
    interval.

    samples: completions a prompt at `temperature`, besides the greedy one, for pass@k of every k <= samples.
    sampling: "as trained": these (one, if samples is 0) are sampled as in the last step of the model's run, and their
    accuracy stands beside the greedy one. A Config: as that, for a base beside it. Where a model's run is known, a
    line names what differs from it: of the greedy completions, and of the samples.
    max_completion_tokens: None means the task's. batch_size: sequences generated at once; None: by free memory.
    seed: of the sampling only. The model's mode, random state and settings are restored afterwards.
    Rates have Wilson's interval; pass@k and rewards a bootstrap over prompts. A task on which nothing is right or wrong
    has no rates and no pass@k: see Evaluation.measure.
    Raises ValueError naming the argument for a model whose training is not known, empty rows, sizes below 1, a
    temperature of 0, no k <= samples, and a prompt that leaves no room in the model's context.

    >>> evaluate(model, tokenizer, largest(), samples=8).table()  # doctest: +SKIP
    """
    check_model(model)
    check_tokenizer(tokenizer)
    check_task(task)
    rows = check_rows(task.held_out if rows is None else rows)
    check_whole("samples", samples, 0)
    if not isinstance(k, Sequence) or not all(is_whole(size, 1) for size in k):
        raise ValueError(f"k={k!r} must be a list of whole numbers, such as [{samples or 1}]")
    numbers: dict[str, Any] = {"temperature": temperature}
    if sampling is not None:
        numbers = trained_sampling(model, sampling)
        temperature = numbers["temperature"]
        if not samples:
            samples, k = 1, (1,)
    ks = sorted({size for size in k if size <= samples})
    if samples and (not ks or ks[0] < 1):
        raise ValueError(
            f"k={tuple(k)!r} has no number in 1..samples={samples}; ask for fewer or draw more samples"
        )
    if samples:
        check_temperature(temperature)

    how = {"max_completion_tokens": max_completion_tokens, "batch_size": batch_size, "seed": seed}
    limit = task.max_completion_tokens if max_completion_tokens is None else max_completion_tokens
    if sampling is None:
        say_difference(model, task, what="evaluate", temperature=0.0, tokens=limit)
    greedy, sampled = answer(model, tokenizer, task, rows, **how), None
    if samples:
        more = {name: numbers.pop(name) for name in SAMPLING if name in numbers}
        say_difference(model, task, what="evaluate's samples", temperature=temperature, tokens=limit, **more)
        sampled = answer(model, tokenizer, task, rows, samples=samples, sampling=more, **numbers, **how)
    if sampling is None:
        return evaluation_of(greedy, sampled, ks)
    found = evaluation_of(greedy, sampled, ks if samples > 1 else ())
    if found.measure == "accuracy":
        means = [fmean(right) for right in sampled.by_row(sampled.right)]
        return replace(found, as_trained=bootstrap_mean(means))
    judged = [[x for x in row if x is not None] for row in sampled.by_row(sampled.rewards)]
    return replace(found, as_trained=mean_reward([fmean(row) for row in judged if row]))


def evaluation_of(greedy: Answers, sampled: Answers | None = None, ks: Sequence[int] = ()) -> Evaluation:
    """The Evaluation of greedy answers, with pass@k from sampled answers of the same rows; from any decoder."""
    table, task, n = greedy.table(), greedy.task, len(greedy.rows)
    if sampled is not None and has_accuracy(task):
        table["n_right"] = [sum(right) for right in sampled.by_row(sampled.right)]
    counts = {name: int(table[name].sum()) if name in table else None for name in _RATES}
    return Evaluation(
        task=task.name,
        **{
            name: None if count is None else Estimate(count / n, *wilson_interval(count, n), n)
            for name, count in counts.items()
        },
        constant=task.best_constant(greedy.rows) if task.strategies and has_accuracy(task) else None,
        measure=greedy.measure,
        constant_reward=constant_reward(greedy) if greedy.measure == "reward" else None,
        own_constant=own_constant(greedy) if greedy.measure == "accuracy" else None,
        pass_at={
            size: bootstrap_mean([pass_at_k(sampled.samples, c, size) for c in table["n_right"]])
            for size in (ks if has_accuracy(task) else ())
        },
        rows=table,
        settings={
            "decoding": "greedy",
            "max_completion_tokens": greedy.settings["max_completion_tokens"],
            "samples": sampled.samples if sampled else 0,
            "temperature": sampled.settings["temperature"] if sampled else None,
            "seed": sampled.settings["seed"] if sampled else None,
        },
    )
