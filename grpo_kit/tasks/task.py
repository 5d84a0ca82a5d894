"""Task: data, prompt and rewards of one problem, kept together and checked when made.

Longer than 300 lines because a task and the scores of its constant strategies are read together.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from copy import copy
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any, Literal

import pandas as pd

from grpo_kit._support.argument_checks import check_choice, check_text, check_whole, is_number
from grpo_kit.prompts import build_dataset, build_prompt, check_parts
from grpo_kit.rewards._parts import Reward, answer_parts, check_column_names, columns_of
from grpo_kit.rewards.answers import AnswerReward
from grpo_kit.rewards.cheat_cases import Case, RewardCheckError, answer_cases, crafted_cases
from grpo_kit.rewards.form import SoftFormat
from grpo_kit.rewards.response import check_tag, own_answer
from grpo_kit.rewards.scoring import score_all, totals
from grpo_kit.tasks._right import (
    PaidInFull,
    are_correct,
    giving,
    same_text,
    think_of,
    verdicts,
)

if TYPE_CHECKING:
    from datasets import Dataset
    from transformers import PreTrainedTokenizerBase


Strategy = Callable[[dict], str | None]
_READ = 128  # train rows on which the best constant strategy is measured


@dataclass(frozen=True)
class Task:
    """Data, prompt and rewards of one problem.

    train, held_out: rows with at least "question" and "answer" (str) and the columns the rewards need;
    no question is in both.
    rewards: reward(completions, **columns) -> list of float in [0, 1] or None. reward_weights: sum to 1.
    is_correct: (answer text a person would write, row) -> right? Default None: an answer is right if the rewards that
    judge it pay in full (tasks._right.PaidInFull); the field then holds a function that calls them.
    strategies: answers given without reading the question ("always the first number"): row -> answer text,
    or None where it has none. A trained model must beat the best of them.
    examples: (question, full response) pairs shown in every prompt; never among the rows.
    max_completion_tokens: tokens the model may write.
    read_answer: (completion, prefill) -> answer text, None without one; default: the text in the answer tags. With one
    answers_are "programs", to be run or judged by their rewards alone, else "text".
    write_answer: with a read_answer, (answer text, prefill) -> a completion with that answer; default: the text alone.
    cases: row -> the honest completion and the cheats that check_rewards tries; default: crafted_cases(row["answer"]).
    cheats: (row, honest case) -> more cheats, such as those that training on this task has found.
    file: "path:name", where from_file found it, so that a run folder knows it again.
    Raises ValueError naming the field that does not fit.
    """

    name: str
    train: list[dict]
    held_out: list[dict]
    rewards: list[Reward]
    reward_weights: list[float]
    is_correct: Callable[[str, dict], bool] | None = None
    strategies: dict[str, Strategy] = field(default_factory=dict)
    system: str | None = None
    prefill: str = ""
    examples: tuple[tuple[str, str], ...] = ()
    max_completion_tokens: int = 16
    answer_tag: str = "answer"
    read_answer: Callable[[str, str], str | None] | None = None
    write_answer: Callable[[str, str], str] | None = None
    cases: Callable[[dict], list[Case]] | None = None
    cheats: Callable[[dict, Case], list[Case]] | None = None
    file: str | None = None
    paid_parts = ()  # none: its rewards pay; no field
    answers_are = property(lambda self: "programs" if self.read_answer else "text")

    def __post_init__(self) -> None:
        check_text("name", self.name, hint="; runs are named by it")
        if {"/", "\\", "\0"} & {*self.name}:
            raise ValueError(
                f"name={self.name!r} holds a '/', and runs/<name> is a folder's; leave it out"
            )
        check_parts(self.system, self.prefill, self.examples)
        check_tag("answer_tag", self.answer_tag)
        if not isinstance(self.strategies, Mapping):
            raise ValueError(
                f"strategies={self.strategies!r:.100} must be a dict: name -> function of a row"
            )
        if not (self.is_correct is None or callable(self.is_correct)):
            raise ValueError(
                f"correct={self.is_correct!r:.100} must be a function of (answer text, row), or None"
            )
        weights = self.reward_weights  # a NaN is refused below
        if not isinstance(weights, list | tuple) or not all(
            is_number(w) or w != w for w in weights
        ):
            raise ValueError(
                f"reward_weights={weights!r} must be a list of numbers, one a reward"
            )
        _check_rows(f"task {self.name!r}: train", self.train, self.rewards)
        _check_rows(f"task {self.name!r}: held_out", self.held_out, self.rewards)
        shared = {row["question"] for row in self.train} & {
            row["question"] for row in self.held_out
        }
        if shared:
            raise ValueError(
                f"task {self.name!r}: {len(shared)} questions are in train and held_out, such as "
                f"{min(shared)!r}; the model would be tested on what it trained on. Take them out of one; of from_rows "
                "leave held_out out, and every fifth row is held out"
            )
        example_questions = {question for question, _ in self.examples}
        if any(row["question"] in example_questions for row in [*self.train, *self.held_out]):
            raise ValueError(
                f"task {self.name!r}: an examples question is also a row; drop the row"
            )
        if not self.rewards or len(self.rewards) != len(weights):
            raise ValueError(
                f"task {self.name!r}: reward_weights={weights!r} for {len(self.rewards)} rewards; "
                "give one weight per reward, and at least one"
            )
        if min(weights) < 0 or not abs(sum(weights) - 1) <= 1e-9:  # NaN too
            raise ValueError(
                f"task {self.name!r}: reward_weights={weights!r} must be >= 0, sum 1"
            )
        check_whole("max_completion_tokens", self.max_completion_tokens)
        # It was another task's: replace() copies it.
        if self.is_correct is None or isinstance(self.is_correct, PaidInFull):
            object.__setattr__(self, "is_correct", PaidInFull(self, self.is_correct))

    def dataset(
        self, tokenizer: PreTrainedTokenizerBase, split: Literal["train", "held_out"] = "train"
    ) -> Dataset:
        """The split as TRL expects it: columns `prompt` (rendered, ends in the prefill), `prefill`, and the row's.

        A trainer builds this from its task. To train on a part, also pass `task.dataset(tokenizer).select(range(64))`.
        """
        check_choice("split", split, ("train", "held_out"))
        rows = getattr(self, split)
        return build_dataset(
            tokenizer, rows, system=self.system, prefill=self.prefill, examples=self.examples
        )

    def render(self, tokenizer: PreTrainedTokenizerBase, rows: Sequence[dict]) -> list[str]:
        """The rows' prompts as in training, each ending in the prefill."""
        return [
            build_prompt(
                tokenizer,
                row["question"],
                system=self.system,
                prefill=self.prefill,
                examples=self.examples,
            )
            for row in rows
        ]

    def answer_of(self, completion: str) -> str | None:
        """The answer in the completion, behind the task's prefill; None if there is none, or several."""
        if self.answers_are == "programs":
            return self.read_answer(completion, self.prefill)
        return own_answer(completion, self.prefill, self.answer_tag)

    @property
    def answer_rewards(self) -> list[Reward]:
        """The rewards whose full pay makes an answer right (see tasks._right); [] if is_correct is your own."""
        return getattr(self.is_correct, "rewards", [])

    def is_right(self, row: dict, completion: str) -> bool:
        """Do the answer rewards pay the completion in full? With your own is_correct: is its one answer right?"""
        if self.answer_rewards:
            return verdicts(self, [row], [completion]) == [True]
        answer = self.answer_of(completion)
        return answer is not None and bool(self.is_correct(answer, row))

    def score(self, row: Mapping[str, Any], completions: Sequence[str]) -> pd.DataFrame:
        """What the rewards make of completions to one row: response, each reward by its name, and reward, the total.

        Raises RewardError.

        >>> from grpo_kit.tasks import largest
        >>> task = largest()
        >>> task.score(task.train[0], ["72</answer>", "17</answer>"])["reward"].tolist()
        [1.0, 0.25]
        """
        columns = columns_of([{**row, "prefill": self.prefill}] * len(completions))
        parts = score_all(self.rewards, completions, **columns)
        table = pd.DataFrame(
            {"response": [self.prefill + text for text in completions], **parts}
        )
        table["reward"] = totals(
            list(parts.values()), self.reward_weights, [0] * len(completions)
        )
        return table

    def cases_for(self, row: Mapping[str, Any], rewards: Sequence[Reward]) -> list[Case]:
        """The cases that check_rewards tries on a row: the honest completion and the cheats, no two alike.

        They are self.cases(row), or crafted ones (prefill and answer tag; reasoning tags if a SoftFormat among the
        rewards requires them); then the question copied, alone and as the answer; then the additions of each reward's
        `cheats(honest)` and of self.cheats(row, honest).
        Raises ValueError where no case is honest, or the row's own answer does not count as correct; RewardCheckError
        where any answer does.
        """
        cases = list(self.cases(row)) if self.cases else self._crafted(row, rewards)
        honest = next((case for case in cases if case.honest), None)
        if honest is None:
            raise ValueError(
                f"task {self.name!r}: cases has no case with honest=True for {row['question']!r:.300}"
            )
        # A lenient reward pays for a copy of the question.
        cases += answer_cases(
            honest, {"the question as the answer": row["question"]}, tag=self.answer_tag
        )
        cases += answer_cases(honest, {"the question said again": row["question"]}, tag=None)
        for reward in rewards:
            if hasattr(reward, "cheats"):
                cases += reward.cheats(honest)
        if self.cheats:
            cases += self.cheats(row, honest)
        distinct = {}
        for case in cases:
            # a cheat equal to the honest text is none
            distinct.setdefault((case.prefill, case.completion), case)
        return list(distinct.values())

    def _crafted(self, row: Mapping[str, Any], rewards: Sequence[Reward]) -> list[Case]:
        right = str(row["answer"])
        # the check shows what the reward pays for it
        by_reward = isinstance(self.is_correct, PaidInFull)
        if not right or not (by_reward or self.is_correct(right, row)):
            raise ValueError(
                f"task {self.name!r}: the row's own answer {right!r} is not correct; give a list of Case"
            )
        think = think_of(rewards)
        answers = [str(train_row["answer"]) for train_row in self.train]
        for text in (*answers, f"{right}1", "0"):
            if not (same_text(text, row) or self.is_correct(text, row)):
                return crafted_cases(
                    right,
                    text,
                    prefill=self.prefill,
                    tag=self.answer_tag,
                    think=think,
                    columns=row,
                )
        raise RewardCheckError(
            f"task {self.name!r}: is_correct takes any answer for {row['question']!r:.300}"
        )

    def constant_accuracies(self, rows: Sequence[dict] | None = None) -> dict[str, float]:
        """Accuracy of every strategy on the rows (default held_out), best first; ties by name."""

        def right(answers: Sequence[str | None], rows: Sequence[dict]) -> list[bool]:
            pairs = [
                (text, row) for text, row in zip(answers, rows, strict=True) if text is not None
            ]
            verdicts = are_correct(self, [text for text, _ in pairs], [row for _, row in pairs])
            return verdicts + [False] * (len(rows) - len(pairs))

        return strategy_means(self, rows, right)

    def best_constant(self, rows: Sequence[dict] | None = None) -> tuple[str, float]:
        """Name and accuracy, in [0, 1], of the best constant strategy on the rows (default held_out).

        Raises ValueError if the task has no strategy.
        """
        if not self.strategies:
            raise ValueError(
                f"task {self.name!r} has no strategies; give at least the most frequent answer"
            )
        return next(iter(self.constant_accuracies(rows).items()))

    def best_constant_parts(self) -> dict[str, Any] | None:
        """Scores of the best constant strategy on the first 128 train rows; None if no strategy can be scored.

        {"strategy": its name, "parts": {answer part: mean score in [0, 1]}}. A part that is not the kit's is not
        called; the strategy's accuracy stands for it. The red flags of a run compare its scores with these.
        """
        rows = self.train[:_READ]
        if not self.strategies or self.answers_are == "programs":
            return None
        judges = []
        for reward in self.answer_rewards:
            judges += list(answer_parts([reward]).values()) or [reward]
        task = self
        if not all(isinstance(judge, AnswerReward) for judge in judges):
            # another's reward may be expensive to call
            task = replace(self, is_correct=same_text)
        name, accuracy = task.best_constant(rows)
        parts = {}
        for part, reward in answer_parts(self.rewards).items():
            parts[part] = accuracy
            if isinstance(reward, AnswerReward):
                parts[part] = _mean_score(reward, self.strategies[name], rows)
        return {"strategy": name, "parts": parts}

    def __repr__(self) -> str:
        return f"Task({self.name!r}, train={len(self.train)}, held_out={len(self.held_out)})"


def _mean_score(reward: AnswerReward, strategy: Strategy, rows: Sequence[dict]) -> float:
    """Mean score of a strategy's answers, over the rows that the reward can judge; 0.0 if there is none."""
    scores = [
        reward.score(strategy(row), *(row[column] for column in reward.columns)) for row in rows
    ]
    judged = [score for score in scores if score is not None]
    return sum(judged) / len(judged) if judged else 0.0


def strategy_means(
    task: Task,
    rows: Sequence[dict] | None,
    judge: Callable[[Sequence[str | None], Sequence[dict]], Iterable[float | None]],
) -> dict[str, float]:
    """For every strategy the mean of judge(its answers, rows) without None, best first; ties by name.

    rows: None for held_out. Raises ValueError if rows is empty.
    """
    if rows is None:
        rows = task.held_out
    if not rows:
        raise ValueError("rows is empty; give at least one row")
    means = {}
    for name, strategy in task.strategies.items():
        scores = judge(list(map(strategy, rows)), rows)
        judged = [score for score in scores if score is not None]
        if judged:
            means[name] = sum(judged) / len(judged)
    best_first = sorted(means, key=lambda name: (-means[name], name))
    return {name: means[name] for name in best_first}


def strategy_rewards(task: Task, rows: Sequence[dict] | None = None) -> dict[str, float]:
    """Mean weighted reward, in [0, 1], of every strategy on the rows (default held_out), best first; ties by name.

    The answer stands between the tags of a completion that keeps the format; without an answer they stay empty.
    Accuracy (Task.constant_accuracies) is how often a shortcut is right; this is how much reward it earns.
    Rows that the rewards cannot judge are left out.
    Raises ValueError if rows is empty, and for a task whose answers have no tags (code).

    >>> from grpo_kit.tasks import largest
    >>> strategy_rewards(largest())["always the last number"] > 0.25  # the format alone
    True
    """
    if task.answers_are == "programs":
        raise ValueError(f"task {task.name!r} has no answer tags to put a strategy's answer in")

    def rewards(answers: Sequence[str | None], rows: Sequence[dict]) -> list[float | None]:
        completions = giving(task, [text or "" for text in answers])
        columns = columns_of(rows) | {"prefill": [task.prefill] * len(rows)}
        parts = score_all(task.rewards, completions, **columns)
        return totals(list(parts.values()), task.reward_weights, range(len(rows)))

    return strategy_means(task, rows, rewards)


def most_frequent_answer(train: Sequence[Mapping[str, Any]]) -> dict[str, Strategy]:
    """The strategy "always '5'", with the most frequent answer of the train rows (ties: the smallest text).

    {} if no row has an answer.

    >>> list(most_frequent_answer([{"answer": "5"}, {"answer": "7"}, {"answer": "5"}]))
    ["always '5'"]
    """
    answers = [str(row["answer"]) for row in train]
    counts = Counter(answer for answer in answers if answer.strip())
    if not counts:
        return {}
    answer = min(counts, key=lambda text: (-counts[text], text))
    return {f"always {answer!r}": lambda row: answer}


def _check_rows(split: str, rows: Sequence[dict], rewards: Sequence[Reward]) -> None:
    check_column_names(dict.fromkeys(name for row in rows for name in row), split)
    if not rows:
        raise ValueError(f"{split} is empty; give at least one row")
    columns = ["question", "answer"]
    for reward in rewards:
        columns += getattr(reward, "columns", ())
    for place, row in enumerate(rows):
        missing_columns = [name for name in dict.fromkeys(columns) if name not in row]
        if missing_columns:
            raise ValueError(
                f"{split} row {place} lacks the columns {missing_columns}, it has {sorted(row)}"
            )
        if not isinstance(row["question"], str) or not row["question"].strip():
            raise ValueError(
                f"{split} row {place} has the question {row['question']!r}; use text"
            )


def with_answer_tag(task: Task, tag: str) -> Task:
    """The task, whose answers stand in <answer>, with its answers in <tag>. Raises ValueError for no name of a tag."""
    check_tag("answer_tag", tag)
    if tag == task.answer_tag:
        return task

    def renamed(text: str) -> str:
        return text.replace("<answer>", f"<{tag}>").replace("</answer>", f"</{tag}>")

    rewards = []
    for reward in map(copy, task.rewards):
        if isinstance(reward, SoftFormat):
            reward = SoftFormat(think=reward.think, answer=tag)
        else:
            reward.tag = tag
        rewards.append(reward)
    return replace(
        task,
        answer_tag=tag,
        system=renamed(task.system or "") or None,
        prefill=renamed(task.prefill),
        examples=tuple((question, renamed(response)) for question, response in task.examples),
        rewards=rewards,
    )
