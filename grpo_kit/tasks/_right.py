"""When is an answer right? If the rewards that judge it pay in full, or by the task's own is_correct.

The strict reading judges the completion itself. The lenient reading judges the text that it seems to answer with.

Longer than 300 lines because the one rule of what is right, for all kinds of rewards, is seen in one place.
"""

from __future__ import annotations

import warnings
from collections.abc import Iterable, Mapping, Sequence
from contextlib import suppress
from typing import Any

from grpo_kit.rewards._parts import (
    Reward,
    bare_name,
    columns_of,
    judges_answer,
    range_of,
    unwrapped,
    with_parts,
)
from grpo_kit.rewards.answers import AnswerReward
from grpo_kit.rewards.combine import (
    Clipped,
    FullPay,
    Gated,
    Verdicts,
    WeightedSum,
    all_in_full,
    score_in_full,
)
from grpo_kit.rewards.response import last_number
from grpo_kit.rewards.scoring import RewardError, Scores, score

Columns = Mapping[str, Sequence[Any]]  # name -> one entry a completion
_NO_COLUMNS: Columns = {}
_OWN_ANSWERS = 8  # rows whose own answers are scored when a task is made
_SCORED = (
    "train",
    "rewards",
    "reward_weights",
    "prefill",
    "answer_tag",
    "read_answer",
    "write_answer",
)
# Where the rewards of others look for an answer, besides the task's own tags and the text alone.
_HABITS = (
    "<think>\nReasoning.\n</think>\n<answer>{}</answer>",
    "<reasoning>\nReasoning.\n</reasoning>\n<answer>\n{}\n</answer>\n",
    "\\boxed{{{}}}",
    "#### {}",
)


class PaidInFull:
    """The default is_correct of a task: does an answer earn everything that the answer rewards can give?

    rewards: the task's rewards whose full pay makes an answer right. First choice: rewards that judge the answer
    (rewards._parts.judges_answer) and have a weight; then those of weight 0. If none is left, the text of the row's
    answer decides. If no row has one, every weighted reward counts.
    left_out: rewards, and parts of rewards, that judge the answer and cannot pay the rows' own answers in full. A
    warning named each when the task was made. judges: the innermost of the others.
    before: of the task that this one was made from; the rewards are called anew where they, or what they get, changed.
    """

    def __init__(self, task: Any, before: PaidInFull | None = None) -> None:
        if before is not None and all(
            getattr(task, n) is getattr(before.task, n) for n in _SCORED
        ):
            self.__dict__ |= before.__dict__ | {"task": task}  # known, and warned of
            return
        self.task = task
        for reward in task.rewards:
            bare_name(reward)  # refuses what is no reward
        pairs = zip(task.rewards, task.reward_weights, strict=True)
        weighted = [reward for reward, weight in pairs if weight > 0]
        judging = list(filter(judges_answer, weighted)) or list(
            filter(judges_answer, task.rewards)
        )
        answered = [row for row in task.train if str(row["answer"]).strip()]
        step = max(1, len(answered) // _OWN_ANSWERS)
        judges = [part for reward in judging for part in _innermost(reward)]
        unpaid = _not_payable(task, judges, answered[::step][:_OWN_ANSWERS])
        self.judges = [part for part in judges if part not in unpaid]
        self.left_out = [
            reward
            for reward in with_parts(judging)
            if all(part in unpaid for part in _innermost(reward))
        ]
        self.rewards = [reward for reward in judging if reward not in self.left_out]
        if not judging and not answered:
            self.rewards = weighted

    def __call__(self, text: str, row: dict) -> bool:
        return are_correct(self.task, [text], [row])[0]

    def __repr__(self) -> str:  # the laboratory compares settings by it
        return "paid in full"


def _innermost(reward: Reward) -> list[Reward]:
    """The parts of sums and gates that judge the answer, and of those their parts; else the reward itself."""
    if not isinstance(reward, WeightedSum | Gated):
        return [reward]
    innermost = []
    for part in filter(judges_answer, reward.parts):
        innermost += _innermost(part)
    return innermost


def _not_payable(task: Any, judges: Sequence[Reward], rows: Sequence[dict]) -> list[Reward]:
    """The judges that pay fewer than half of the rows' own answers in full, in every way to write them; warns of each.

    A judge that states its range is warned of, and counts all the same where no other judge pays these answers.
    """
    if not rows:
        return []
    golds = [str(row["answer"]).strip() for row in rows]
    writings = [giving(task, golds), golds]
    writings += [list(map(habit.format, golds)) for habit in _HABITS]
    columns = columns_of(rows) | {"prefill": [task.prefill] * len(rows)}
    columns["prompts"] = [row["question"] for row in rows]
    unpaid = []
    for judge in judges:
        if not (is_own(judge) or isinstance(judge, AnswerReward | Clipped)):
            continue  # the kit's, whose gold is a program or a state of a game
        full = full_score(judge)
        # most pay the first way: a call may cost something
        scores = _best_scores(judge, writings[:1], columns)
        if not scores or not _pays_half(scores, full):
            scores = _best_scores(judge, writings, columns)
        if _pays_half(scores, full):  # or it can score none of them
            continue
        unpaid.append(judge)
        name, most = bare_name(judge), max(scores)
        warnings.warn(
            f"task {task.name!r}: reward {name!r} needs a column of the row, so it judges answers. But it pays few of "
            f"the rows' own answers in full ({most:g} at most, {full:g} is full; such as {golds[0]!r:.50}). Accuracy "
            f"goes by the other rewards, or by the answer's text. If {most:g} is all that it pays, set {name}.range = "
            f"(lowest, {most:g}); or say what is right by correct=; a reward that is only watched has the weight 0",
            UserWarning,
            stacklevel=6,
        )
    if len(unpaid) == len(judges):
        return [judge for judge in unpaid if range_of(judge) is None]
    return unpaid


def full_score(reward: Reward) -> float:
    """The highest score of the range that a reward states, else 1.0."""
    low, high = range_of(reward) or (0.0, 1.0)
    return high


def _pays_half(scores: Sequence[float], full: float) -> bool:
    """Are at least half of the scores full pay?"""
    return 2 * sum(score >= full - 1e-6 for score in scores) >= len(scores)


def _best_scores(
    reward: Reward,
    writings: Sequence[Sequence[str]],
    columns: Columns,
    least: float | None = None,
) -> list[float]:
    """The highest score of each row over several ways to write its answer.

    least: the score of rows that the reward cannot judge; None: they are left out.
    """
    by_row = [[least] for _ in writings[0]]
    for texts in writings:
        with suppress(RewardError):  # a reward made for completions of a model
            for scores, score_of_text in zip(
                by_row, score(reward, texts, **columns), strict=True
            ):
                scores.append(score_of_text)
    judged = [[value for value in scores if value is not None] for scores in by_row]
    return [max(scores) for scores in judged if scores]


def are_correct(
    task: Any, texts: Sequence[str], rows: Sequence[dict], columns: Columns = _NO_COLUMNS
) -> list[bool]:
    """Is each answer text right for its row? Calls the rewards once for all, on completions that keep the format.

    columns: further columns for the rewards, one entry an answer. An answer that cannot be judged is not right.
    """
    if not isinstance(task.is_correct, PaidInFull):
        return [bool(task.is_correct(text, row)) for text, row in zip(texts, rows, strict=True)]
    if not task.is_correct.rewards:
        return [same_text(text, row) for text, row in zip(texts, rows, strict=True)]
    return [verdict is True for verdict in verdicts(task, rows, giving(task, texts), columns)]


def verdicts(
    task: Any, rows: Sequence[dict], completions: Sequence[str], columns: Columns = _NO_COLUMNS
) -> Verdicts:
    """Do the answer rewards (at least one) pay each completion in full? None: no reward can judge it."""
    if not completions:
        return []
    columns = {**columns_of(rows), **columns, "prefill": [task.prefill] * len(completions)}
    pays = [
        score_in_full(
            reward,
            completions,
            columns,
            full_pay=full_pay(task, rows, columns),
            left_out=task.is_correct.left_out,
        )
        for reward in task.is_correct.rewards
    ]
    return all_in_full([pay.verdicts for pay in pays])


def entries(columns: Columns, places: Iterable[int]) -> dict[str, list[Any]]:
    """The columns' entries at these places."""
    places = list(places)
    return {name: [values[place] for place in places] for name, values in columns.items()}


def is_own(reward: Reward) -> bool:
    """Is the reward a user's, on any scale? The kit's rewards, and subclasses of AnswerReward, pay 1.0 in full."""
    reward = unwrapped(reward)
    module = getattr(reward, "__module__", None) or type(reward).__module__
    return not isinstance(reward, AnswerReward) and not module.startswith("grpo_kit.")


def full_pay(task: Any, rows: Sequence[dict], columns: Columns) -> FullPay:
    """The full pay of a user's reward without a stated range: the score of the row's own answer, at least 1.0.

    rows, columns: one entry a completion. Calls the reward only for completions of 1.0 and more, once a row: a call may
    cost something. A row's answer that earns less than 1.0 does not lower the bar: if a reward pays for format too, a
    wrong answer in that format earns as much as the bare answer.
    """
    # (id of the reward, question, gold) -> score
    gold_scores = task.__dict__.setdefault("_full_pay", {})

    def bars(reward: Reward, scores: Scores) -> Sequence[float]:
        if range_of(reward) is not None or not is_own(reward):
            return [full_score(reward)] * len(scores)
        keys = []
        places = {}  # of rows whose gold may earn more than 1.0, by key
        for place, (row, value) in enumerate(zip(rows, scores, strict=True)):
            gold = str(row.get("answer") or "").strip()
            key = (id(reward), str(row["question"]), gold)
            keys.append(key)
            if value is not None and value > 1.0 and gold and key not in gold_scores:
                places[key] = place
        if places:
            golds = [gold for _, _, gold in places]
            gold_columns = entries(columns, places.values())
            best = _best_scores(reward, (giving(task, golds), golds), gold_columns, least=1.0)
            gold_scores.update(zip(places, best, strict=True))
        return [gold_scores.get(key, 1.0) for key in keys]

    return bars


def leniently_right(
    task: Any,
    rows: Sequence[dict],
    completions: Sequence[str],
    strict: Sequence[bool],
    columns: Columns = _NO_COLUMNS,
) -> list[bool]:
    """Right strictly, or as the last number, or as the text from the last opening tag to a closing tag or line end.

    columns: as for are_correct, one entry a completion. There is no lenient reading of programs, nor where
    neither a reward nor an answer in the rows can judge.
    """
    judges = task.answer_rewards
    if task.answers_are == "programs" or (judges and not any(map(judges_answer, judges))):
        return list(strict)
    keys_of = []
    places = {}  # (row, text) -> its first place: each is judged once
    for place, (row, completion, right) in enumerate(
        zip(rows, completions, strict, strict=True)
    ):
        keys = []
        if not right:
            keys = [(id(row), text) for text in _read(task, completion)]
        keys_of.append(keys)
        for key in keys:
            places.setdefault(key, place)
    texts = [text for _, text in places]
    text_rows = [rows[place] for place in places.values()]
    correct = are_correct(task, texts, text_rows, entries(columns, places.values()))
    right_keys = {key for key, right in zip(places, correct, strict=True) if right}
    return [
        right or not right_keys.isdisjoint(keys)
        for right, keys in zip(strict, keys_of, strict=True)
    ]


def _read(task: Any, completion: str) -> list[str]:
    """The texts that a completion seems to answer with."""
    opening, closing = f"<{task.answer_tag}>", f"</{task.answer_tag}>"
    response = task.prefill + completion
    start = response.rfind(opening)
    block, end = "", start + len(opening)
    # A prefill that goes on after the tag would add its own words to the answer.
    if start >= 0 and end >= len(task.prefill):
        block = response[end:].split(closing)[0].strip()
    return [text for text in (block.split("\n")[0].strip(), last_number(completion)) if text]


def giving(task: Any, texts: Sequence[str]) -> list[str]:
    """Completions with these answers that keep the format, behind the task's prefill."""
    if task.answers_are == "programs":
        write = task.write_answer or (lambda text, prefill: text)
        return [write(text, task.prefill) for text in texts]
    opening, closing = f"<{task.answer_tag}>", f"</{task.answer_tag}>"
    think = think_of(task.rewards)
    judges = filter(judges_answer, with_parts(task.rewards))
    if any(getattr(judge, "tag", "") is None for judge in judges):
        opening = closing = ""  # the whole completion is the answer
    elif opening in task.prefill:
        opening = ""
    elif think and f"</{think}>" not in task.prefill:
        opening = f"Reasoning.\n</{think}>\n{opening}"
        if f"<{think}>" not in task.prefill:
            opening = f"<{think}>\n{opening}"
    return [opening + text + closing for text in texts]


def think_of(rewards: Sequence[Reward]) -> str | None:
    """The reasoning tag of a format reward among the rewards; None without one."""
    return next(
        (part.think for part in with_parts(rewards) if getattr(part, "think", None)), None
    )


def same_text(text: str, row: Mapping[str, Any]) -> bool:
    """Is it the text of the row's answer, white space at both ends aside? False if the row has no answer."""
    return text.strip() == str(row["answer"]).strip() != ""
