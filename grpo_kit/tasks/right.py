"""When is an answer right? If the rewards that judge it pay in full, or by the task's own is_correct.

The strict reading judges the completion itself. The lenient reading judges the text that it seems to answer with.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Protocol

from grpo_kit.rewards.answers import AnswerReward
from grpo_kit.rewards.combine import FullPay, Verdicts, all_in_full, score_in_full
from grpo_kit.rewards.parts import Reward, columns_of, judges_answer, range_of, with_parts
from grpo_kit.rewards.response import last_number
from grpo_kit.rewards.scoring import RewardError, Scores, score

_NONE: Mapping[str, list] = {}


class Judged(Protocol):
    """The attributes of a task that are needed here."""

    train: list[dict]
    rewards: list[Reward]
    reward_weights: list[float]
    is_correct: Callable[[str, dict], bool]
    prefill: str
    answer_tag: str
    read_answer: Callable[[str, str], str | None] | None
    write_answer: Callable[[str, str], str] | None


class PaidInFull:
    """The default is_correct of a task: does an answer earn everything that the answer rewards can give?"""

    def __init__(self, task: Judged) -> None:
        self.task = task

    def __call__(self, text: str, row: dict) -> bool:
        return are_correct(self.task, [text], [row])[0]

    def __repr__(self) -> str:  # the laboratory compares settings by it
        return "paid in full"


def answer_rewards(task: Judged) -> list[Reward]:
    """The rewards whose full pay makes an answer right; [] if the text or the task's own is_correct decides.

    First choice: rewards that judge the answer (combine.judges_answer) and have a weight; then those of weight 0.
    If no reward judges it, the text of the row's answer decides. If no row has one, every weighted reward counts.
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
    """Is each answer text right for its row? Calls the rewards once for all, on completions that keep the format.

    columns: further columns for the rewards, one entry an answer. An answer that cannot be judged is not right.
    """
    if not isinstance(task.is_correct, PaidInFull):
        return [bool(task.is_correct(text, row)) for text, row in zip(texts, rows, strict=True)]
    if not answer_rewards(task):
        return [same_text(text, row) for text, row in zip(texts, rows, strict=True)]
    return [verdict is True for verdict in verdicts(task, rows, giving(task, texts), columns)]


def verdicts(
    task: Judged, rows: Sequence[dict], completions: Sequence[str], columns: Mapping[str, list] = _NONE
) -> Verdicts:
    """Do the answer rewards (at least one) pay each completion in full? None: no reward can judge it."""
    if not completions:
        return []
    given = {**columns_of(rows), **columns, "prefill": [task.prefill] * len(completions)}
    full = full_pay(task, rows, given)
    judged = [
        score_in_full(reward, completions, given, full_pay=full).verdicts for reward in answer_rewards(task)
    ]
    return all_in_full(judged)


def is_own(reward: Reward) -> bool:
    """Is the reward a user's, on any scale? The kit's rewards, and subclasses of AnswerReward, pay 1.0 in full."""
    while isinstance(reward, functools.partial):
        reward = reward.func
    module = getattr(reward, "__module__", None) or type(reward).__module__
    return not isinstance(reward, AnswerReward) and not module.startswith("grpo_kit.")


def full_pay(task: Judged, rows: Sequence[dict], columns: Mapping[str, list]) -> FullPay:
    """The full pay of a user's reward without a stated range: the score of the row's own answer, at least 1.0.

    rows, columns: one entry a completion. Calls the reward only for completions of 1.0 and more, once a row: a call may
    cost something. A row's answer that earns less than 1.0 does not lower the bar: if a reward pays for format too, a
    wrong answer in that format earns as much as the bare answer.
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
                except RewardError:  # a reward made for completions of a model; 1.0 stays
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
    """Right strictly, or as the last number, or as the text from the last opening tag to a closing tag or line end.

    columns: as for are_correct, one entry a completion. There is no lenient reading for a task with a read_answer,
    nor where neither a reward nor an answer in the rows can judge.
    """
    judges = answer_rewards(task)
    if task.read_answer is not None or (judges and not any(map(judges_answer, judges))):
        return list(strict)
    read = [
        [] if right else [(id(row), text) for text in _read(task, completion)]
        for row, completion, right in zip(rows, completions, strict, strict=True)
    ]
    first = {key: place for place in reversed(range(len(read))) for key in read[place]}  # each is judged once
    more = {name: [values[place] for place in first.values()] for name, values in columns.items()}
    found = are_correct(task, [text for _, text in first], [rows[place] for place in first.values()], more)
    meant = {key for key, correct in zip(first, found, strict=True) if correct}
    return [right or not meant.isdisjoint(keys) for right, keys in zip(strict, read, strict=True)]


def _read(task: Judged, completion: str) -> list[str]:
    opening, closing = f"<{task.answer_tag}>", f"</{task.answer_tag}>"
    response = task.prefill + completion
    start = response.rfind(opening)
    # A prefill that goes on after the tag would add its own words to the answer.
    own = start >= 0 and start + len(opening) >= len(task.prefill)
    open_block = response[start + len(opening) :].split(closing)[0].strip() if own else ""
    return [text for text in (open_block.split("\n")[0].strip(), last_number(completion)) if text]


def giving(task: Judged, texts: Sequence[str]) -> list[str]:
    """Completions with these answers that keep the format, behind the task's prefill."""
    if task.read_answer is not None:
        write = task.write_answer or (lambda text, prefill: text)
        return [write(text, task.prefill) for text in texts]
    before, after, think = f"<{task.answer_tag}>", f"</{task.answer_tag}>", think_of(task.rewards)
    if any(getattr(part, "tag", "") is None for part in with_parts(task.rewards) if judges_answer(part)):
        before = after = ""  # the whole completion is the answer
    elif before in task.prefill:
        before = ""
    elif think and f"</{think}>" not in task.prefill:
        opened = "" if f"<{think}>" in task.prefill else f"<{think}>\n"
        before = f"{opened}Reasoning.\n</{think}>\n{before}"
    return [before + text + after for text in texts]


def think_of(rewards: Sequence[Reward]) -> str | None:
    """The reasoning tag of a format reward among the rewards; None without one."""
    return next((part.think for part in with_parts(rewards) if getattr(part, "think", None)), None)


def same_text(text: str, row: Mapping[str, Any]) -> bool:
    """Is it the text of the row's answer, white space at both ends aside? False if the row has no answer."""
    return text.strip() == str(row["answer"]).strip() != ""
