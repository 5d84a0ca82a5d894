"""The one loop: renders a task's prompts, completes them with the engine, and judges the completions.

evaluate, readiness, length_probe, sample and the laboratory read Answers. A task that is played otherwise brings its
own (`play`, see loop/protocols.py). Longer than 300 lines because generating and judging are one loop.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from contextlib import nullcontext
from dataclasses import dataclass
from functools import cached_property, partial
from pathlib import Path
from statistics import fmean
from typing import TYPE_CHECKING, Any

import pandas as pd
from transformers import GenerationConfig

from grpo_kit._support.argument_checks import check_task, check_whole, is_number, template_tokens
from grpo_kit._support.display import progress_line
from grpo_kit.engine import RolloutEngine
from grpo_kit.engine.complete import Completion, Progress, check_room, complete
from grpo_kit.engine.memory._decoding import UNKNOWN_ROWS, rows_at_once
from grpo_kit.engine.memory._free import free_bytes
from grpo_kit.evaluation._sample_cache import sample_chunks
from grpo_kit.loop.run_checks import check_tags
from grpo_kit.models.token_lists import end_ids
from grpo_kit.rewards._parts import (
    Reward,
    check_column_names,
    check_columns,
    columns_of,
    judges_answer,
    reward_names,
)
from grpo_kit.rewards.combine import Pay, Verdicts, all_in_full, score_in_full
from grpo_kit.rewards.scoring import Scores, totals, warn_off_scale
from grpo_kit.tasks._measure import Measure, has_accuracy, measure_of, reads_tag
from grpo_kit.tasks._right import PaidInFull, full_pay, leniently_right

if TYPE_CHECKING:
    from transformers import PreTrainedModel, PreTrainedTokenizerBase

    from grpo_kit.tasks import Task


@dataclass(frozen=True, repr=False)
class Answers:
    """Completions of a task's rows, `samples` adjacent ones a row, and their judgements by the task and its rewards.

    B rows give B * samples entries everywhere. A judgement is computed at its first use: code needs a sandbox, lengths
    need no judge. settings: everything that the completions depend on besides model, task and rows.
    """

    task: Task
    rows: list[dict]
    prompts: list[str]
    completions: list[Completion]
    samples: int
    settings: dict[str, Any]

    by_place = ("rows", "prompts", "completions")  # fields with an entry a row, or a completion

    @cached_property
    def asked(self) -> list[dict]:
        """The row of each completion."""
        return [row for row in self.rows for _ in range(self.samples)]

    @cached_property
    def texts(self) -> list[str]:
        """Each completion as text."""
        return [made.text for made in self.completions]

    @cached_property
    def verdicts(self) -> Verdicts:
        """Is the answer right (see Task.is_right)? None if no reward can judge it."""
        if judges := self.task.answer_rewards:
            return all_in_full([pay.verdicts for pay in self._asked(judges)])
        found = []
        with progress_line(f"{self.task.name}, answers judged") as progress:
            for row, text in zip(self.asked, self.texts, strict=True):
                progress(len(found), len(self.texts))
                found.append(self.task.is_right(row, text))
        return found

    @cached_property
    def right(self) -> list[bool]:
        """Is the answer right? False if it cannot be judged."""
        return [verdict is True for verdict in self.verdicts]

    @cached_property
    def lenient(self) -> list[bool]:
        """Right strictly, or by tasks._right.leniently_right."""
        return leniently_right(self.task, self.asked, self.texts, self.right, self._given)

    @cached_property
    def credit(self) -> Scores:
        """The mean score of each completion by the rewards that judge the answer.

        If no reward does: 1.0 if the task's own is_correct holds, else 0.0; without an is_correct the total.
        """
        own = not isinstance(self.task.is_correct, PaidInFull)
        judges = [one for one in self.task.rewards if judges_answer(one)] if own else self.task.answer_rewards
        if own and not judges:
            return [float(right) for right in self.right]
        judges = self._asked(judges)
        rows = zip(*(pay.credit for pay in judges), strict=True)
        given = [[one for one in row if one is not None] for row in rows] if judges else []
        return [round(fmean(row), 6) if row else None for row in given] if judges else self.rewards

    @cached_property
    def measure(self) -> Measure:
        """The measure of how good these answers are, see tasks._measure."""
        known = measure_of(self.task)
        return known or measure_of(self.task, self.verdicts, self.credit) or "accuracy"

    @cached_property
    def formatted(self) -> list[bool]:
        """Is there exactly one well-formed answer?"""
        return [self.task.answer_of(text) is not None for text in self.texts]

    @cached_property
    def parts(self) -> dict[str, Scores]:
        """Each reward's scores by its name, called as in training. Raises RewardError."""
        scores = [pay.scores for pay in self._asked(self.task.rewards)]
        return dict(zip(reward_names(self.task.rewards), scores, strict=True))

    @property
    def _given(self) -> dict[str, list[Any]]:
        """The columns for the rewards, besides the completions."""
        prompts = [prompt for prompt in self.prompts for _ in range(self.samples)]
        ids, prefill = [list(made.ids) for made in self.completions], [self.task.prefill] * len(self.texts)
        return {**columns_of(self.asked), "prompts": prompts, "completion_ids": ids, "prefill": prefill}

    def _asked(self, rewards: Sequence[Reward]) -> list[Pay]:
        """The pay by these rewards of the task; each reward is called once, however many readers there are."""
        known = self.__dict__.setdefault("_known", {})
        names = dict(zip(map(id, self.task.rewards), reward_names(self.task.rewards), strict=True))
        left_out = getattr(self.task.is_correct, "left_out", ())
        with progress_line(f"{self.task.name}, rewards of {len(self.texts)} completions"):
            for one in (one for one in rewards if id(one) not in known):
                how = {"full_pay": full_pay(self.task, self.asked, self._given), "left_out": left_out}
                pay = score_in_full(one, self.texts, self._given, name=names[id(one)], **how)
                known[id(one)] = pay
                warn_off_scale([one], {names[id(one)]: pay.scores})
        return [known[id(one)] for one in rewards]

    @cached_property
    def rewards(self) -> Scores:
        """Each completion's total, None if the rewards cannot judge it (see rewards.scoring.totals)."""
        groups = [i // self.samples for i in range(len(self.completions))]
        return totals(list(self.parts.values()), self.task.reward_weights, groups)

    def by_row(self, values: Sequence[Any]) -> list[list[Any]]:
        """Turns one value a completion into one list a row."""
        return [list(values[i : i + self.samples]) for i in range(0, len(values), self.samples)]

    @property
    def read(self) -> Sequence[float]:
        """The share of each completion that is readable: 0 or 1, as in formatted."""
        return self.formatted

    @property
    def readings(self) -> dict[str, list[bool]]:
        """The judgements whose shares evaluate reports: right and lenient if the task has them, formatted likewise."""
        judged = has_accuracy(self.task)
        found = {"strict": self.right, "lenient": self.lenient} if judged else {}
        return found | ({"formatted": self.formatted} if reads_tag(self.task) else {})

    def table(self) -> pd.DataFrame:
        """One row a completion: question, answer, completion, the readings, tokens, cut_off, rewards, any unjudged."""
        columns = {
            "question": [row["question"] for row in self.asked],
            "answer": [row.get("answer", "") for row in self.asked],
            "completion": self.texts,
            **self.readings,
            "tokens": [made.tokens for made in self.completions],
            "cut_off": [made.cut_off for made in self.completions],
        }
        unjudged = {}
        if "strict" in columns and None in self.verdicts:
            unjudged = {"unjudged": [one is None for one in self.verdicts]}
        return pd.DataFrame(columns | self.reward_columns() | unjudged)

    def reward_columns(self) -> dict[str, pd.Series]:
        """reward, the total, and reward/<name> of each reward, NaN where it cannot judge."""
        named = {"reward": self.rewards} | {f"reward/{name}": part for name, part in self.parts.items()}
        return {name: pd.Series(scores, dtype=float) for name, scores in named.items()}


@dataclass(frozen=True)
class Asked:
    """How a model is asked, see answer. settings: everything that the completions depend on besides model, task, rows.

    progress: called with (done, all).
    """

    settings: dict[str, Any]
    batch_size: int | None
    first: int
    folder: str | Path | None
    chunk: int
    progress: Progress

    def at_once(self, model: PreTrainedModel, prompts: Sequence[Sequence[int]]) -> int:
        """Sequences decoded at once: the batch_size, or as many as free memory holds, up to a bound."""
        if self.batch_size is not None:
            return self.batch_size
        limit, samples = self.settings["max_completion_tokens"], max(1, self.settings["samples"])
        sizes = {"prompt_tokens": max(map(len, prompts)), "completion_tokens": limit}
        free = free_bytes(next(model.parameters()).device)
        if RolloutEngine.unsupported(
            model, GenerationConfig()
        ):  # then transformers decodes: too many rows fail
            return min(UNKNOWN_ROWS, rows_at_once(model, free, **sizes))
        return rows_at_once(model, free, samples=samples, **sizes)


def answer(
    model: PreTrainedModel,
    tokenizer: PreTrainedTokenizerBase,
    task: Task,
    rows: Sequence[dict] | None = None,
    *,
    samples: int = 1,
    temperature: float = 0.0,
    sampling: Mapping[str, float] | None = None,
    max_completion_tokens: int | None = None,
    batch_size: int | None = None,
    seed: int = 0,
    folder: str | Path | None = None,
    chunk: int = 16,
    first: int = 0,
    progress: Progress | None = None,
) -> Answers:
    """Generate the model's answers to the rows (default: the task's held-out rows). The model is restored afterwards.

    samples: completions a row; temperature 0 is greedy. sampling: top_p and the like, see complete().
    max_completion_tokens: None means the task's.
    batch_size: sequences decoded at once; None: as many as free memory holds, up to a bound (decoding.rows_at_once).
    The completions do not depend on it, except for rounding.
    folder, chunk: save the completions in the folder, `chunk` prompts a file. Rows with a prompt that occurred before
    must have been left out.
    first: number of rows answered in earlier calls; the random draws continue after theirs, as in a single call.
    A progress line shows how far the work is if it takes more than a second; or progress is called with (done, all).
    Raises ValueError for empty rows, a column that a reward needs and the rows lack, and the errors of complete().
    """
    check_task(task)
    rows = check_rows(task.held_out if rows is None else rows)
    check_whole("seed", seed, 0)
    limit = task.max_completion_tokens if max_completion_tokens is None else max_completion_tokens
    how = dict(max_completion_tokens=limit, samples=samples, temperature=float(temperature), seed=seed)
    how |= {"sampling": dict(sampling)} if sampling else {}
    play = getattr(task, "play", partial(_complete, task))
    line = progress_line(f"{task.name}, completions") if progress is None else nullcontext(progress)
    with line as told:
        return play(model, tokenizer, rows, Asked(how, batch_size, first, folder, chunk, told))


def _complete(
    task: Task, model: PreTrainedModel, tokenizer: PreTrainedTokenizerBase, rows: Sequence[dict], asked: Asked
) -> Answers:
    """A plain task is played by completing each row's prompt."""
    _check_columns(task, rows)
    check_tags(task, template_tokens(tokenizer, end_ids(model, tokenizer)).values(), "ends a completion")
    prompts = task.render(tokenizer, rows)
    how, samples = asked.settings, asked.settings["samples"]
    asked.progress(0, len(prompts) * samples)
    run = {
        **how,
        "batch_size": asked.at_once(model, tokenizer(prompts)["input_ids"]),
        "progress": asked.progress,
    }
    if asked.folder is not None:
        made, how = sample_chunks(model, tokenizer, prompts, asked.folder, chunk=asked.chunk, **run)
    else:
        first = asked.first * samples
        numbers = range(first, first + len(prompts) * samples) if first else None
        made = complete(model, tokenizer, prompts, numbers=numbers, **run)
    return Answers(task, rows, prompts, made, samples, how)


def check_rows(rows: Any) -> list[Any]:
    """The rows as a list. Raises ValueError for a number, a text or one row, and where there is none."""
    if is_number(rows):
        raise ValueError(
            f"rows={rows!r} is a number; give the rows themselves, such as task.held_out[:{rows}]"
        )
    if isinstance(rows, str | Mapping) or not isinstance(rows, Iterable):
        raise ValueError(f"rows={rows!r:.100} must be a list of rows, such as task.held_out[:32]")
    rows = list(rows)
    if not rows:
        raise ValueError("rows is empty; give at least one row")
    return rows


def check_before(
    model: PreTrainedModel,
    tokenizer: PreTrainedTokenizerBase,
    task: Task,
    rows: Sequence[dict],
    max_completion_tokens: int | None = None,
) -> None:
    """Checks the rows as answer() does, before the first row is answered. Raises ValueError."""
    if not hasattr(task, "play"):
        limit = task.max_completion_tokens if max_completion_tokens is None else max_completion_tokens
        _check_columns(task, rows)
        check_room(model, tokenizer(task.render(tokenizer, rows))["input_ids"], limit)


def _check_columns(task: Task, rows: Sequence[dict]) -> None:
    check_column_names(dict.fromkeys(name for row in rows for name in row), "rows")
    check_columns(task.rewards, set.intersection(*map(set, rows)) | {"prefill"}, "rows")
