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
    check_job,
    check_temperature,
    check_whole,
    is_whole,
)
from grpo_kit.evaluation._as_trained import say_difference, trained_sampling
from grpo_kit.evaluation._constant import Constant, constant_reward, own_constant
from grpo_kit.evaluation._shown import ShownTable, estimates_table, percent, shown
from grpo_kit.evaluation.generate_and_score import Answers, Decoding, answer, check_rows
from grpo_kit.evaluation.intervals import (
    Estimate,
    bootstrap_mean,
    mean_reward,
    pass_at_k,
    share,
)
from grpo_kit.loop.config import Config
from grpo_kit.record._lines import read_json, reading
from grpo_kit.record.files import write_where_asked
from grpo_kit.tasks._measure import Measure, has_accuracy

if TYPE_CHECKING:
    from transformers import PreTrainedModel, PreTrainedTokenizerBase

    from grpo_kit.tasks import Task


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
    print() shows the result in two lines, with intervals; table() has a row a measure.
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
        rates = {"strict": self.strict, "lenient": self.lenient, "formatted": self.formatted}
        return {name: estimate for name, estimate in rates.items() if estimate is not None}

    @property
    def rewards(self) -> dict[str, Estimate]:
        """Mean reward, and reward/<name> of each part, over the prompts that it can judge. Partial credit shows here.

        Empty for an evaluation saved without rewards.
        """
        columns = {name: self.rows[name].dropna() for name in filter(is_reward, self.rows)}
        return {
            name: mean_reward(column.tolist())
            for name, column in columns.items()
            if len(column)
        }

    @property
    def result(self) -> Estimate:
        """The estimate that leads the result: accuracy (strict), or the mean reward.

        Raises ValueError if the rewards can judge none of the rows.
        """
        if self.measure == "accuracy" and self.strict is not None:
            return self.strict
        if "reward" not in self.rewards:
            raise ValueError(
                f"task {self.task!r}: its rewards judge none of these {self.n} completions"
            )
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
            text = f"{percent(self.result.value)} right, n = {self.n}"
            if "unjudged" in self.rows:
                text += f", {self.rows['unjudged'].sum()} of which could not be judged and count as wrong"
        elif "reward" in self.rewards:
            text = f"mean reward {self.result.words(rate=False)}, n = {self.result.n}"
        else:
            text = f"no reward judges any of these {self.n} completions"
        if self.best_constant is None:
            return f"{text}."
        name, value = self.best_constant
        if self.measure == "accuracy":
            return f"{text}; the best constant strategy has {percent(value)}."
        return f"{text}; the best constant completion ({name}) earns {value:.3f}."

    def table(self) -> ShownTable:
        """One row a measure: value, low, high (95 %), n; the mean rewards; the best constant strategy last.

        Shares are numbers in [0, 1]; a notebook and print() show percent, after a sentence with the result.
        """
        estimates = self.rates | {f"pass@{k}": estimate for k, estimate in self.pass_at.items()}
        if self.as_trained is not None:
            name = "as trained" if self.measure == "accuracy" else "reward, as trained"
            estimates[f"{name} (temperature {self.settings['temperature']:g})"] = (
                self.as_trained
            )
        estimates |= self.rewards
        rows = {
            name: {
                "value, 95 % interval": estimate.words(rate=not is_reward(name)),
                "n": str(estimate.n),
            }
            for name, estimate in estimates.items()
        }
        if self.constant is not None:
            name, value = self.constant
            rows[name] = {"value, 95 % interval": percent(value), "n": str(self.n)}
        if self.constant_reward is not None:
            name, value = self.constant_reward
            rows[name] = {"value, 95 % interval": f"reward {value:.3f}", "n": str(self.n)}
        table = estimates_table(
            self.task, estimates, [self.constant, self.constant_reward], self.n
        )
        return shown(table, self.sentence, rows)

    def __str__(self) -> str:
        parts = [f"{name} {estimate.words()}" for name, estimate in self.rates.items()]
        if "reward" in self.rewards:
            parts.append(f"reward {self.rewards['reward'].words(rate=False)}")
        if self.measure == "accuracy" and self.constant is not None:
            parts.append(f"{self.constant[0]} {percent(self.constant[1])}")
        return f"{self.task}: {self.sentence}\n{', '.join(parts)}"

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
            for name in ("strict", "lenient", "formatted", "as_trained"):
                if data.get(name):
                    data[name] = Estimate(**data[name])
            for name in ("constant", "constant_reward", "own_constant"):
                if data.get(name):
                    data[name] = tuple(data[name])
            data["pass_at"] = {
                int(k): Estimate(**estimate) for k, estimate in data["pass_at"].items()
            }
            data["rows"] = pd.DataFrame(data["rows"])
            return cls(**data)


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
    check_job(model, tokenizer, task)
    rows = check_rows(task.held_out if rows is None else rows)
    check_whole("samples", samples, 0)
    if not isinstance(k, Sequence) or not all(is_whole(size, 1) for size in k):
        raise ValueError(f"k={k!r} must be a list of whole numbers, such as [{samples or 1}]")
    numbers = {"temperature": temperature}
    if sampling is not None:
        numbers = trained_sampling(model, sampling)
        if not samples:
            samples, k = 1, (1,)
    ks = sorted({size for size in k if size <= samples})
    if samples and not ks:
        raise ValueError(
            f"k={tuple(k)!r} has no number in 1..samples={samples}; ask for fewer or draw more samples"
        )
    if samples:
        check_temperature(numbers["temperature"])
    if max_completion_tokens is None:
        max_completion_tokens = task.max_completion_tokens

    decoding = Decoding(1, 0.0, max_completion_tokens, batch_size, seed)
    if sampling is None:
        say_difference(
            model, task, caller="evaluate", temperature=0.0, tokens=max_completion_tokens
        )
    greedy = answer(model, tokenizer, task, rows, decoding)
    if not samples:
        return evaluation_of(greedy)
    say_difference(
        model, task, caller="evaluate's samples", tokens=max_completion_tokens, **numbers
    )
    temperature = numbers.pop("temperature")
    decoding = replace(decoding, samples=samples, temperature=temperature, sampling=numbers)
    sampled = answer(model, tokenizer, task, rows, decoding)
    if sampling is None:
        return evaluation_of(greedy, sampled, ks)
    if samples == 1:
        ks = []
    evaluation = evaluation_of(greedy, sampled, ks)
    return replace(evaluation, as_trained=_mean_of_samples(sampled, evaluation.measure))


def _mean_of_samples(sampled: Answers, measure: Measure) -> Estimate:
    """Accuracy, or mean reward, over prompts of which each counts by the mean of its samples."""
    if measure == "accuracy":
        return bootstrap_mean([fmean(right) for right in sampled.by_row(sampled.right)])
    judged = [
        [score for score in row if score is not None] for row in sampled.by_row(sampled.rewards)
    ]
    return mean_reward([fmean(row) for row in judged if row])


def evaluation_of(
    greedy: Answers, sampled: Answers | None = None, ks: Sequence[int] = ()
) -> Evaluation:
    """The Evaluation of greedy answers, with pass@k from sampled answers of the same rows; from any decoder."""
    rows, task = greedy.table(), greedy.task
    rates = {name: share(int(rows[name].sum()), len(rows)) for name in greedy.readings}
    settings = {
        "decoding": "greedy",
        "max_completion_tokens": greedy.settings["max_completion_tokens"],
        "samples": 0,
        "temperature": None,
        "seed": None,
    }
    constant, pass_at, optional = None, {}, {}
    if greedy.measure == "accuracy":
        optional["own_constant"] = own_constant(greedy)
    else:
        optional["constant_reward"] = constant_reward(greedy)
    if sampled is not None:
        settings |= {
            name: sampled.settings[name] for name in ("samples", "temperature", "seed")
        }
    if has_accuracy(task):
        if task.strategies:
            constant = task.best_constant(greedy.rows)
        if sampled is not None:
            rows["n_right"] = [sum(right) for right in sampled.by_row(sampled.right)]
        for k in ks:
            pass_at[k] = bootstrap_mean(
                [pass_at_k(sampled.samples, count, k) for count in rows["n_right"]]
            )
    return Evaluation(
        task=task.name,
        strict=rates.get("strict"),
        lenient=rates.get("lenient"),
        formatted=rates.get("formatted"),
        constant=constant,
        pass_at=pass_at,
        rows=rows,
        settings=settings,
        measure=greedy.measure,
        **optional,
    )
