"""The one loop: renders a task's prompts, completes them with the engine, and judges the completions.

evaluate, readiness, length_probe, sample and the laboratory read Answers. A task that is played otherwise brings its
own (`play`, see loop/protocols.py). Longer than 300 lines because generating and judging are one loop.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from contextlib import nullcontext
from dataclasses import asdict, dataclass
from functools import cached_property, partial
from pathlib import Path
from statistics import fmean
from typing import TYPE_CHECKING, Any

import pandas as pd
from transformers import GenerationConfig

from grpo_kit._support.argument_checks import (
    check_task,
    check_whole,
    is_number,
    template_tokens,
)
from grpo_kit._support.display import progress_line
from grpo_kit.engine import RolloutEngine
from grpo_kit.engine.complete import Completion, Progress, check_room, complete
from grpo_kit.engine.memory._free import UNKNOWN_ROWS, free_bytes, rows_at_once
from grpo_kit.evaluation._sample_cache import sample_chunks
from grpo_kit.loop.run_checks import check_tags
from grpo_kit.models._model_facts import end_ids
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
        return [completion.text for completion in self.completions]

    @cached_property
    def verdicts(self) -> Verdicts:
        """Is the answer right (see Task.is_right)? None if no reward can judge it."""
        judges = self.task.answer_rewards
        if judges:
            return all_in_full([pay.verdicts for pay in self._pays(judges)])
        verdicts = []
        with progress_line(f"{self.task.name}, answers judged") as progress:
            for row, text in zip(self.asked, self.texts, strict=True):
                progress(len(verdicts), len(self.texts))
                verdicts.append(self.task.is_right(row, text))
        return verdicts

    @cached_property
    def right(self) -> list[bool]:
        """Is the answer right? False if it cannot be judged."""
        return [verdict is True for verdict in self.verdicts]

    @cached_property
    def lenient(self) -> list[bool]:
        """Right strictly, or by tasks._right.leniently_right."""
        return leniently_right(self.task, self.asked, self.texts, self.right, self.columns)

    @cached_property
    def credit(self) -> Scores:
        """The mean score of each completion by the rewards that judge the answer.

        If no reward does: 1.0 if the task's own is_correct holds, else 0.0; without an is_correct the total.
        """
        if isinstance(self.task.is_correct, PaidInFull):
            judges = self.task.answer_rewards
            if not judges:
                return self.rewards
        else:
            judges = [reward for reward in self.task.rewards if judges_answer(reward)]
            if not judges:
                return [float(right) for right in self.right]
        credit = []
        for scores in zip(*(pay.credit for pay in self._pays(judges)), strict=True):
            judged = [score for score in scores if score is not None]
            credit.append(round(fmean(judged), 6) if judged else None)
        return credit

    @cached_property
    def measure(self) -> Measure:
        """The measure of how good these answers are, see tasks._measure."""
        measure = measure_of(self.task) or measure_of(self.task, self.verdicts, self.credit)
        return measure or "accuracy"

    @cached_property
    def formatted(self) -> list[bool]:
        """Is there exactly one well-formed answer?"""
        return [self.task.answer_of(text) is not None for text in self.texts]

    @cached_property
    def parts(self) -> dict[str, Scores]:
        """Each reward's scores by its name, called as in training. Raises RewardError."""
        scores = [pay.scores for pay in self._pays(self.task.rewards)]
        return dict(zip(reward_names(self.task.rewards), scores, strict=True))

    @cached_property
    def columns(self) -> dict[str, list[Any]]:
        """The columns for the rewards, besides the completions, one entry a completion."""
        columns = columns_of(self.asked)
        columns["prompts"] = [prompt for prompt in self.prompts for _ in range(self.samples)]
        columns["completion_ids"] = [list(completion.ids) for completion in self.completions]
        columns["prefill"] = [self.task.prefill] * len(self.completions)
        return columns

    @cached_property
    def _pay_by_id(self) -> dict[int, Pay]:
        return {}

    def _pays(self, rewards: Sequence[Reward]) -> list[Pay]:
        """The pay by these rewards of the task; each reward is called once, however many readers there are."""
        task, pays = self.task, self._pay_by_id
        names = dict(zip(map(id, task.rewards), reward_names(task.rewards), strict=True))
        with progress_line(f"{task.name}, rewards of {len(self.texts)} completions"):
            for reward in rewards:
                if id(reward) in pays:
                    continue
                name = names[id(reward)]
                pay = score_in_full(
                    reward,
                    self.texts,
                    self.columns,
                    name=name,
                    full_pay=full_pay(task, self.asked, self.columns),
                    left_out=getattr(task.is_correct, "left_out", ()),
                )
                pays[id(reward)] = pay
                warn_off_scale([reward], {name: pay.scores})
        return [pays[id(reward)] for reward in rewards]

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
        readings = {}
        if has_accuracy(self.task):
            readings |= {"strict": self.right, "lenient": self.lenient}
        if reads_tag(self.task):
            readings["formatted"] = self.formatted
        return readings

    def table(self) -> pd.DataFrame:
        """One row a completion: question, answer, completion, the readings, tokens, cut_off, rewards, any unjudged."""
        columns = {
            "question": [row["question"] for row in self.asked],
            "answer": [row.get("answer", "") for row in self.asked],
            "completion": self.texts,
            **self.readings,
            "tokens": [completion.tokens for completion in self.completions],
            "cut_off": [completion.cut_off for completion in self.completions],
            **self.reward_columns(),
        }
        if "strict" in columns and None in self.verdicts:
            columns["unjudged"] = [verdict is None for verdict in self.verdicts]
        return pd.DataFrame(columns)

    def reward_columns(self) -> dict[str, pd.Series]:
        """reward, the total, and reward/<name> of each reward, NaN where it cannot judge."""
        columns = {"reward": pd.Series(self.rewards, dtype=float)}
        for name, scores in self.parts.items():
            columns[f"reward/{name}"] = pd.Series(scores, dtype=float)
        return columns


@dataclass(frozen=True)
class Decoding:
    """How completions are drawn: `samples` a row at a temperature, 0 for greedy; sampling: as complete() takes it.

    max_completion_tokens: None means the task's.
    batch_size: sequences decoded at once; None: as many as free memory holds, up to a bound (rows_at_once). The
    completions do not depend on it, except for rounding.
    """

    samples: int = 1
    temperature: float = 0.0
    max_completion_tokens: int | None = None
    batch_size: int | None = None
    seed: int = 0
    sampling: Mapping[str, float] | None = None

    def settings(self, task: Task) -> dict[str, Any]:
        """Everything that the completions depend on besides model, task and rows. ValueError for a seed below 0."""
        check_whole("seed", self.seed, 0)
        settings = asdict(self) | {"temperature": float(self.temperature)}
        del settings["batch_size"]
        if self.max_completion_tokens is None:
            settings["max_completion_tokens"] = task.max_completion_tokens
        if not self.sampling:
            del settings["sampling"]
        return settings


GREEDY = Decoding()


@dataclass(frozen=True)
class Request:
    """What answer() asks of a task that is played. settings: Decoding.settings. progress: called with (done, all)."""

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
        free = free_bytes(next(model.parameters()).device)
        sizes = {
            "prompt_tokens": max(map(len, prompts)),
            "completion_tokens": self.settings["max_completion_tokens"],
        }
        if RolloutEngine.unsupported(model, GenerationConfig()):
            # transformers decodes, and fails on too many rows
            return min(UNKNOWN_ROWS, rows_at_once(model, free, **sizes))
        return rows_at_once(model, free, samples=max(1, self.settings["samples"]), **sizes)


def answer(
    model: PreTrainedModel,
    tokenizer: PreTrainedTokenizerBase,
    task: Task,
    rows: Sequence[dict] | None = None,
    decoding: Decoding = GREEDY,
    *,
    folder: str | Path | None = None,
    chunk: int = 16,
    first: int = 0,
    progress: Progress | None = None,
) -> Answers:
    """Generate the model's answers to the rows (default: the task's held-out rows). The model is restored afterwards.

    folder, chunk: save the completions in the folder, `chunk` prompts a file. Rows with a prompt that occurred before
    must have been left out.
    first: number of rows answered in earlier calls; the random draws continue after theirs, as in a single call.
    A progress line shows how far the work is if it takes more than a second; or progress is called with (done, all).
    Raises ValueError for empty rows, a column that a reward needs and the rows lack, and the errors of complete().
    """
    check_task(task)
    rows = check_rows(task.held_out if rows is None else rows)
    settings = decoding.settings(task)
    play = getattr(task, "play", partial(_complete, task))
    line = progress_line(f"{task.name}, completions")
    if progress is not None:
        line = nullcontext(progress)
    with line as report:
        return play(
            model,
            tokenizer,
            rows,
            Request(settings, decoding.batch_size, first, folder, chunk, report),
        )


def _complete(
    task: Task,
    model: PreTrainedModel,
    tokenizer: PreTrainedTokenizerBase,
    rows: Sequence[dict],
    request: Request,
) -> Answers:
    """A plain task is played by completing each row's prompt."""
    _check_columns(task, rows)
    check_tags(
        task,
        template_tokens(tokenizer, end_ids(model, tokenizer)).values(),
        "ends a completion",
    )
    prompts = task.render(tokenizer, rows)
    settings, progress = request.settings, request.progress
    samples = settings["samples"]
    progress(0, len(prompts) * samples)
    options = settings | {
        "batch_size": request.at_once(model, tokenizer(prompts)["input_ids"]),
        "progress": progress,
    }
    if request.folder is not None:
        completions, settings = sample_chunks(
            model, tokenizer, prompts, request.folder, chunk=request.chunk, **options
        )
    else:
        first = request.first * samples
        options["numbers"] = range(first, first + len(prompts) * samples)
        completions = complete(model, tokenizer, prompts, **options)
    return Answers(task, rows, prompts, completions, samples, settings)


def check_rows(rows: Any) -> list[Any]:
    """The rows as a list. Raises ValueError for a number, a text or one row, and where there is no row."""
    if isinstance(rows, str | Mapping) or not isinstance(rows, Iterable):
        n = rows if is_number(rows) else 32
        raise ValueError(
            f"rows={rows!r:.100} must be a list of rows, such as task.held_out[:{n}]"
        )
    rows = list(rows)
    if not rows:
        raise ValueError("rows is empty; give at least one row")
    return rows


def check_before(
    model: PreTrainedModel,
    tokenizer: PreTrainedTokenizerBase,
    task: Task,
    rows: Sequence[dict],
    max_completion_tokens: int,
) -> None:
    """Checks the rows as answer() does, before the first row is answered. Raises ValueError."""
    if not hasattr(task, "play"):
        _check_columns(task, rows)
        check_room(
            model, tokenizer(task.render(tokenizer, rows))["input_ids"], max_completion_tokens
        )


def _check_columns(task: Task, rows: Sequence[dict]) -> None:
    check_column_names(dict.fromkeys(name for row in rows for name in row), "rows")
    check_columns(task.rewards, set.intersection(*map(set, rows)) | {"prefill"}, "rows")
