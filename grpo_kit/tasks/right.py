"""When is an answer right? Where the rewards that judge it pay it in full, or as a task's own is_correct says.

Strictly, the completion itself is judged; leniently, what it seems to answer, put in the place of an answer.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Protocol

from grpo_kit.rewards.answers import AnswerReward
from grpo_kit.rewards.combine import FullPay, Verdicts, all_in_full, judges_answer, score_in_full
from grpo_kit.rewards.parts import all_parts, range_of
from grpo_kit.rewards.response import Reward, last_number
from grpo_kit.rewards.scoring import RewardError, Scores, score

_NONE: Mapping[str, list] = {}


class Judged(Protocol):
    """What is needed of a task."""

    train: list[dict]
    rewards: list[Reward]
    reward_weights: list[float]
    is_correct: Callable[[str, dict], bool]
    prefill: str
    answer_tag: str
    read_answer: Callable[[str, str], str | None] | None
    write_answer: Callable[[str, str], str] | None


class PaidInFull:
    """The is_correct of a task that was given none: does an answer earn all that its answer rewards can give?"""

    def __init__(self, task: Judged) -> None:
        self.task = task

    def __call__(self, text: str, row: dict) -> bool:
        return are_correct(self.task, [text], [row])[0]

    def __repr__(self) -> str:  # the laboratory tells settings apart by it
        return "paid in full"


def answer_rewards(task: Judged) -> list[Reward]:
    """The rewards whose full pay makes an answer right; [] where its text decides, or the task's own is_correct.

    Those that judge the answer (combine.judges_answer) and are paid; where none of them is, those of weight 0. Where no
    reward judges it, the text of the row's answer does; where no row has one either, all that is paid counts.
    """
    if not isinstance(task.is_correct, PaidInFull):
        return []
    weighted = list(zip(task.rewards, task.reward_weights, strict=True))
    judges = [(reward, weight) for reward, weight in weighted if judges_answer(reward)]
    if not judges and any(str(row["answer"]).strip() for row in task.train):
        return []
    counted = judges or weighted
    return [reward for reward, weight in counted if weight > 0] or [reward for reward, _ in counted]


def are_correct(
    task: Judged, texts: Sequence[str], rows: Sequence[dict], columns: Mapping[str, list] = _NONE
) -> list[bool]:
    """Is each answer text right for its row? Rewards are asked once for all, about completions that keep the format.

    columns: what rewards get besides the rows' columns, one entry an answer. What cannot be judged is not right.
    """
    if not isinstance(task.is_correct, PaidInFull):
        return [bool(task.is_correct(text, row)) for text, row in zip(texts, rows, strict=True)]
    if not answer_rewards(task):
        return [same_text(text, row) for text, row in zip(texts, rows, strict=True)]
    return [verdict is True for verdict in verdicts(task, rows, giving(task, texts), columns)]


def verdicts(
    task: Judged, rows: Sequence[dict], completions: Sequence[str], columns: Mapping[str, list] = _NONE
) -> Verdicts:
    """Do the answer rewards, of which there must be one, pay each completion in full? None: none can judge it."""
    if not completions:
        return []
    given = {**columns_of(rows), **columns, "prefill": [task.prefill] * len(completions)}
    full = full_pay(task, rows, given)
    judged = [
        score_in_full(reward, completions, given, full_pay=full).verdicts for reward in answer_rewards(task)
    ]
    return all_in_full(judged)


def is_own(reward: Reward) -> bool:
    """Is it a user's, which may give any number? The kit's, and those built on AnswerReward, pay 1.0 in full."""
    while isinstance(reward, functools.partial):
        reward = reward.func
    module = getattr(reward, "__module__", None) or type(reward).__module__
    return not isinstance(reward, AnswerReward) and not module.startswith("grpo_kit.")


def full_pay(task: Judged, rows: Sequence[dict], columns: Mapping[str, list]) -> FullPay:
    """Says what a user's reward without a stated range pays in full: what the row's own answer earns, at least 1.0.

    rows, columns: one entry a completion. Asked for completions of 1.0 and more alone, once a row: a reward may cost
    something. A row's answer that earns less than 1.0 does not lower the bar: of a reward that pays for the format too
    a wrong answer in that format earns as much as the bare answer.
    """
    known: dict[tuple[int, str, str], float] = task.__dict__.setdefault("_full_pay", {})

    def bars(one: Reward, scores: Scores) -> Sequence[float]:
        stated = range_of(one)
        if stated is not None or not is_own(one):
            return [stated[1] if stated else 1.0] * len(scores)
        keys = [(id(one), str(row["question"]), str(row.get("answer") or "").strip()) for row in rows]
        places = {
            key: place
            for place, (key, score) in enumerate(zip(keys, scores, strict=True))
            if score is not None and score > 1.0 and key[2] and key not in known
        }
        if places:
            picked = {name: [values[i] for i in places.values()] for name, values in columns.items()}
            golds = [key[2] for key in places]
            earned = [1.0] * len(golds)
            for texts in (giving(task, golds), golds):
                try:
                    paid = score(one, texts, **picked)
                except RewardError:  # made for completions of a model; 1.0 stays
                    continue
                earned = [max(e, p if p is not None else e) for e, p in zip(earned, paid, strict=True)]
            known.update(zip(places, earned, strict=True))
        return [known.get(key, 1.0) for key in keys]

    return bars


def leniently_right(
    task: Judged,
    rows: Sequence[dict],
    completions: Sequence[str],
    strict: Sequence[bool],
    columns: Mapping[str, list] = _NONE,
) -> list[bool]:
    """Right strictly, as the last number, or as the text from the last opening tag to a closing one or the line's end.

    columns: as for are_correct, one entry a completion. A task that reads its answers in its own way, or that no reward
    and no answer of its rows can judge, has no lenient reading.
    """
    judges = answer_rewards(task)
    if task.read_answer is not None or (judges and not any(map(judges_answer, judges))):
        return list(strict)
    read = [
        [] if right else [(id(row), text) for text in _read(task, completion)]
        for row, completion, right in zip(rows, completions, strict, strict=True)
    ]
    first = {key: place for place in reversed(range(len(read))) for key in read[place]}  # each is asked once
    more = {name: [values[place] for place in first.values()] for name, values in columns.items()}
    found = are_correct(task, [text for _, text in first], [rows[place] for place in first.values()], more)
    meant = {key for key, correct in zip(first, found, strict=True) if correct}
    return [right or not meant.isdisjoint(keys) for right, keys in zip(strict, read, strict=True)]


def _read(task: Judged, completion: str) -> list[str]:
    opening, closing = f"<{task.answer_tag}>", f"</{task.answer_tag}>"
    response = task.prefill + completion
    start = response.rfind(opening)
    # A prefill that goes on after the tag would lend its own words to the answer.
    own = start >= 0 and start + len(opening) >= len(task.prefill)
    open_block = response[start + len(opening) :].split(closing)[0].strip() if own else ""
    return [text for text in (open_block.split("\n")[0].strip(), last_number(completion)) if text]


def giving(task: Judged, texts: Sequence[str]) -> list[str]:
    """Completions that give these answers and keep the format, behind the task's prefill."""
    if task.read_answer is not None:
        write = task.write_answer or (lambda text, prefill: text)
        return [write(text, task.prefill) for text in texts]
    before, after, think = f"<{task.answer_tag}>", f"</{task.answer_tag}>", think_of(task.rewards)
    judges = [part for reward in task.rewards for part in (reward, *all_parts(reward)) if judges_answer(part)]
    if any(getattr(part, "tag", "") is None for part in judges):
        before = after = ""  # the whole completion is the answer
    elif before in task.prefill:
        before = ""
    elif think and f"</{think}>" not in task.prefill:
        opened = "" if f"<{think}>" in task.prefill else f"<{think}>\n"
        before = f"{opened}Reasoning.\n</{think}>\n{before}"
    return [before + text + after for text in texts]


def think_of(rewards: Sequence[Reward]) -> str | None:
    """The reasoning tag that a format among the rewards asks for."""
    parts = [part for reward in rewards for part in (reward, *all_parts(reward))]
    return next((part.think for part in parts if getattr(part, "think", None)), None)


def same_text(text: str, row: Mapping[str, Any]) -> bool:
    """Is it the text of the row's answer, white space at both ends aside? Never where the row has none."""
    return text.strip() == str(row["answer"]).strip() != ""


def columns_of(rows: Sequence[Mapping[str, Any]]) -> dict[str, list[Any]]:
    """The rows as columns; None where a row lacks one.

    >>> columns_of([{"a": 1}, {"a": 2, "b": 3}])
    {'a': [1, 2], 'b': [None, 3]}
    """
    names = dict.fromkeys(name for row in rows for name in row)
    return {name: [row.get(name) for row in rows] for name in names}
