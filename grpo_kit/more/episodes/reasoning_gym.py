"""Any reasoning-gym data set as a task, with its own scorer (github.com/open-thought/reasoning-gym).

One turn, or several tries at each question.
"""

from __future__ import annotations

import logging
import math
import random
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

from grpo_kit._support.argument_checks import check_whole
from grpo_kit.more.episodes.episode_task import EpisodeTask
from grpo_kit.more.episodes.observation import View
from grpo_kit.rewards import SoftFormat
from grpo_kit.rewards.answers import AnswerReward
from grpo_kit.rewards.response import own_answer
from grpo_kit.tasks.rows import distinct_rows
from grpo_kit.tasks.task import Task, most_frequent_answer, with_answer_tag

_LOG = logging.getLogger(__name__)
# Most data sets make row i from seed + i. Seeds this far apart share no row.
_APART = 10_000_000
_MOST_ROWS = 20_000  # word_ladder refuses more
# an answer with at least this score is right, in one turn and in several: scorers round
_RIGHT = 0.99


def from_reasoning_gym(
    name: str,
    *,
    n_train: int = 512,
    n_held_out: int = 256,
    seed: int = 0,
    prefill: str = "<answer>",
    system: str | None = "Answer in <answer> tags.",
    max_completion_tokens: int = 48,
    answer_tag: str = "answer",
    **config: Any,
) -> Task:
    """A task from the reasoning-gym data set `name`, such as "leg_counting"; config is passed to that data set.

    Train, held-out and the one worked example come from seeds that share no row; repeated questions are
    dropped. answer_tag: name of the tag around answers.
    Row columns: question, answer ("" where the data set has a scorer but no answer of its own; no example is shown
    then), entry (which row of which seed, for the scorer).
    Rewards: the data set's score_answer, partial credit kept (0.75), soft format (0.25). An answer is correct
    at a score of 0.99 or more. Constant strategy: the most frequent train answer.
    Raises ValueError for an unknown name or a config the data set refuses; ImportError if reasoning-gym is
    missing (an extra: `pip install "grpo_kit[reasoning-gym]"`).

    >>> from_reasoning_gym("leg_counting", n_train=4, n_held_out=2)
    Task('leg_counting', train=4, held_out=2)
    """
    if not 0 <= seed < 100:
        raise ValueError(f"seed={seed!r} must lie in 0..99, so that no two seeds share a row")
    # Some data sets make all rows at once, and the size decides which rows: make no more than needed.
    size = min(_MOST_ROWS, max(1000, 4 * n_train, 4 * n_held_out))
    reward = ReasoningGymScore(name, size=size, **config)
    example = _row(reward, (3 * seed + 2) * _APART, 0)

    def rows(
        part: int,
        count: int,
        argument: str,
        avoid: Iterable[str],
    ) -> list[dict]:
        candidates = (_row(reward, (3 * seed + part) * _APART, index) for index in range(size))
        what = f"{name!r} ({argument}={count})"
        return distinct_rows(lambda: next(candidates, None), count, what=what, avoid=avoid)

    held_out = rows(0, n_held_out, "n_held_out", [example["question"]])
    questions = [row["question"] for row in [example, *held_out]]
    train = rows(1, n_train, "n_train", questions)
    # Some data sets have a scorer but no answers: there is no example to show then.
    examples = ()
    if example["answer"]:
        examples = ((example["question"], f"<answer>{example['answer']}</answer>"),)
    task = Task(
        name=name,
        train=train,
        held_out=held_out,
        rewards=[reward, SoftFormat(think=None)],
        reward_weights=[0.75, 0.25],
        is_correct=lambda text, row: (reward.score(text, row["entry"]) or 0.0) >= _RIGHT,
        strategies=most_frequent_answer(train),
        system=system,
        prefill=prefill,
        examples=examples,
        max_completion_tokens=max_completion_tokens,
    )
    return with_answer_tag(task, answer_tag)


def from_reasoning_gym_tries(
    name: str,
    *,
    tries: int = 3,
    n_train: int = 256,
    n_held_out: int = 64,
    seed: int = 0,
    prefill: str = "<answer>",
    system: str | None = "Answer in <answer> tags.",
    max_completion_tokens: int = 48,
    **config: Any,
) -> EpisodeTask:
    """The data set of from_reasoning_gym as a task of several turns: each question may be answered `tries` times.

    A turn is a try. An answer with a score of 0.99 or more ends the episode with reward 1. Any other earns nothing,
    and the next turn states that it was wrong; the last try earns its score, in [0, 1]. A turn without a tagged answer,
    with two, or with one on which the scorer fails is invalid. It counts as a try with score 0.
    optimum: the data set's own answers, if any. actions: its four most frequent answers. With only two answers
    to choose from, two tries succeed without reading.
    Raises the errors of from_reasoning_gym, and ValueError for fewer than 1 try.

    >>> from_reasoning_gym_tries("leg_counting", n_train=4, n_held_out=2)
    EpisodeTask('leg_counting', train=4, held_out=2)
    """
    check_whole("tries", tries)
    once = from_reasoning_gym(
        name,
        n_train=n_train,
        n_held_out=n_held_out,
        seed=seed,
        prefill=prefill,
        system=system,
        **config,
    )
    reward = once.rewards[0]

    def completion_of(answer: str) -> str:
        return f"<answer>{answer}</answer>".removeprefix(prefill)

    def optimum(row: Mapping[str, Any], rng: random.Random) -> Callable[[str], str]:
        return lambda observation: completion_of(row["answer"])

    answers = Counter(row["answer"] for row in once.train)
    frequent = sorted(answers, key=lambda text: (-answers[text], text))[:4]
    actions = [completion_of(text) for text in frequent if text]
    return EpisodeTask(
        name,
        train=once.train,
        held_out=once.held_out,
        environment=lambda: Tries(reward, tries),
        view=View(
            chat=True,
            repeat_goal=False,
            system=system,
            prefill=prefill,
            examples=tuple(
                (question, [(question, answer)]) for question, answer in once.examples
            ),
            write=_only_said,
        ),
        max_turns=tries,
        max_completion_tokens=max_completion_tokens,
        optimum=optimum if all(answers) else None,
        actions=tuple(map(_with_doubled_braces, actions)),
    )


def _with_doubled_braces(text: str) -> str:
    return text.replace("{", "{{").replace("}", "}}")


def _only_said(goal: str, actions: Sequence[str], observation: str) -> str:
    """The observation alone: the first one is the question, which is the goal."""
    return observation


class Tries:
    """An environment: a question, and a number of tries at it. Row: question, entry."""

    def __init__(self, reward: ReasoningGymScore, tries: int) -> None:
        self.reward, self.tries, self.invalid = reward, tries, False

    def reset(self, row: Mapping[str, Any]) -> str:
        """The question."""
        self.entry, self.left, self.invalid = row["entry"], self.tries, False
        return row["question"]

    def step(self, text: str) -> tuple[str, float, bool]:
        """One try: the answer in the tags."""
        answer = own_answer(text, "", self.reward.tag)
        score = None if answer is None else self.reward.score(answer, self.entry)
        self.invalid = score is None
        score = score or 0.0
        self.left -= 1
        if score >= _RIGHT:
            return "Right.", 1.0, True
        message = "That is not right."
        if answer is None:
            message = f"Write one answer in <{self.reward.tag}> tags."
        if self.left == 0:
            return message, score, True
        return f"{message} Try again.", 0.0, False


class ReasoningGymScore(AnswerReward):
    """The score that a reasoning-gym data set gives the answer in the tags, clipped to [0, 1].

    0.0 unless the model wrote exactly one answer in the tags. None if the scorer fails on the text (logged
    once) or returns NaN: it could not judge. Column: entry, "<seed>:<index>" of the data set's row.
    size: rows of the data set; some data sets make other rows for another size.

    >>> reward = ReasoningGymScore("leg_counting")
    >>> reward(["<answer>no idea</answer>"], entry=["1:0"])
    [0.0]
    """

    def __init__(
        self,
        name: str,
        *,
        tag: str = "answer",
        size: int = 1000,
        **config: Any,
    ) -> None:
        super().__init__(f"{name}_score", "entry", tag=tag)
        self.name, self.size, self.config = name, size, config
        self._datasets: dict[int, Any] = {}
        self._complained = False
        self._dataset(0)

    def score(self, answer: str | None, entry: str) -> float | None:
        """The clipped score of one answer text for the row named by entry ("<seed>:<index>")."""
        if answer is None:
            return 0.0
        row = self.row(entry)
        try:
            score = float(self._dataset_of(entry).score_answer(answer, row))
        except Exception as error:  # noqa: BLE001  a third party's scorer on text it was not written for
            if not self._complained:
                _LOG.warning(
                    "%s could not score %r (%s); such answers count as None",
                    self.name,
                    answer,
                    error,
                )
                self._complained = True
            return None
        if math.isnan(score):
            return None
        return min(1.0, max(0.0, score))

    def row(self, entry: str) -> dict[str, Any]:
        """The data set's own row, with question, answer and metadata."""
        return self._dataset_of(entry)[int(entry.partition(":")[2])]

    def _dataset_of(self, entry: str) -> Any:
        seed, colon, index = str(entry).partition(":")
        if not (colon and seed.isdigit() and index.isdigit()):
            raise ValueError(
                f"entry={entry!r} must be '<seed>:<index>', as the task's rows have it"
            )
        return self._dataset(int(seed))

    def _dataset(self, seed: int) -> Any:
        if seed not in self._datasets:
            try:
                import reasoning_gym
            except ImportError as error:
                raise ImportError(
                    "from_reasoning_gym needs the package reasoning-gym: with a C compiler at hand, run "
                    '`pip install "grpo-kit[reasoning-gym]"`'
                ) from error
            from reasoning_gym.factory import DATASETS

            if self.name not in DATASETS:
                names = sorted(DATASETS)
                close = [name for name in names if self.name[:4] in name] or names
                raise ValueError(
                    f"name={self.name!r} is no reasoning-gym data set; there are {close}"
                )
            try:
                dataset = reasoning_gym.create_dataset(
                    self.name,
                    seed=seed,
                    size=self.size,
                    **self.config,
                )
            except (TypeError, AssertionError, ValueError) as error:
                raise ValueError(
                    f"config={self.config!r} does not fit {self.name!r}: {error}"
                ) from error
            self._datasets[seed] = dataset
        return self._datasets[seed]


def _row(reward: ReasoningGymScore, seed: int, index: int) -> dict:
    row = reward.row(f"{seed}:{index}")
    answer = "" if row["answer"] is None else str(row["answer"])
    return {"question": row["question"], "answer": answer, "entry": f"{seed}:{index}"}
