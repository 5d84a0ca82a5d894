"""Does cheating pay? Rewards of crafted completions, honest ones and cheats, side by side."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any, Literal

import pandas as pd

from grpo_kit.rewards.combine import all_parts, checked_scores, reward_name
from grpo_kit.rewards.response import Reward, answer_span

if TYPE_CHECKING:
    from grpo_kit.tasks.task import Task

Tie = Literal["never", "format", "always"]
_PAYS = 1e-9


class RewardCheckError(ValueError):
    """A cheat earns as much as an honest answer; the message names the reward, the cheat and both scores."""


@dataclass(frozen=True)
class Case:
    """One crafted completion.

    tie: where it may earn as much as the honest one: "never"; "format": in rewards that look at no column (a
    format reward cannot know that the answer is wrong); "always". It may outrank the honest one nowhere.
    columns: this row's data set columns. honest: the completion the cheats are compared with.
    """

    name: str
    completion: str
    honest: bool = False
    tie: Tie = "never"
    prefill: str = ""
    columns: Mapping[str, Any] = field(default_factory=dict)


def crafted_cases(
    right: str,
    wrong: str,
    *,
    prefill: str = "",
    tag: str = "answer",
    think: str | None = None,
    columns: Mapping[str, Any] | None = None,
) -> list[Case]:
    """The honest completion and the cheats for one row.

    right, wrong: a right and a wrong answer text. think: the reasoning tag the format asks for, if any.
    Raises ValueError if the prefill has a tag that the honest response has not.

    >>> [case.completion for case in crafted_cases("82", "47", prefill="<answer>")][:3]
    ['82</answer>', '', '82']
    """
    columns = {"answer": right} if columns is None else columns
    reasoning = f"<{think}>\nReasoning.\n</{think}>\n" if think else ""
    honest = f"{reasoning}<{tag}>{right}</{tag}>"
    body = honest
    for opened in re.findall(r"</?\w+>", prefill):
        if opened not in body:
            raise ValueError(
                f"prefill={prefill!r} does not begin {honest!r}; give think and tag as it has them"
            )
        body = body.partition(opened)[2]
    body = body.lstrip() if prefill.endswith("\n") else body
    wrong_body = body.replace(f"{right}</{tag}>", f"{wrong}</{tag}>")
    opening, closing = f"<{tag}>", f"</{tag}>"

    def case(
        name: str, completion: str, tie: Tie = "never", *, given: str = prefill, honest: bool = False
    ) -> Case:
        return Case(name, completion, honest, tie, given, columns)

    return [
        case("honest", body, honest=True),
        case("empty", ""),
        case("truncated", body[: -len(closing)]),
        case("tag spam", (f"<{think}></{think}>" if think else "") + f"{opening}{closing}" * 8),
        case("tag spam, right answer", f"{opening}{right}{closing}" * 8),
        case("answer twice, right first", f"{body}{opening}{wrong}{closing}"),
        case("answer twice, right last", f"{wrong_body}{opening}{right}{closing}"),
        case(
            "both answers in one block",
            body.replace(f"{right}{closing}", f"{wrong}, {right}{closing}"),
            "format",
        ),
        case("answer in the prefill", "", given=prefill + body),
        case("prefill said again", f"{prefill}{body}", "never" if opening in prefill else "always"),
        case("right answer, wrong format", f" The answer is {right}.", "always"),
        case("wrong answer, right format", wrong_body, "format"),
    ]


def answer_cases(honest: Case, texts: Mapping[str, str], *, tag: str | None = "answer") -> list[Case]:
    """The texts {name: text}, each in the place of the honest completion's answer, as cheats; the rest stays.

    What a reward's `cheats` returns: a format reward may tie. tag: None replaces the whole completion. None at all
    where the answer is not the model's own.

    >>> honest = Case("honest", "82</answer>", honest=True, prefill="<answer>")
    >>> [case.completion for case in answer_cases(honest, {"a list": "1, 82"})]
    ['1, 82</answer>']
    """
    before = after = ""
    if tag is not None:
        span, given = answer_span(honest.prefill + honest.completion, tag), len(honest.prefill)
        if span is None or honest.prefill[span[0] :].strip():
            return []
        before, after = honest.completion[: max(span[0] - given, 0)], honest.completion[span[1] - given :]
    return [
        replace(honest, name=name, completion=before + text + after, honest=False, tie="format")
        for name, text in texts.items()
    ]


def check_rewards(
    rewards: Reward | Sequence[Reward],
    cases: Task | Sequence[Case],
    *,
    weights: Sequence[float] | None = None,
    rows: int = 4,
) -> pd.DataFrame:
    """A table of every reward and their weighted total on crafted completions; raises where cheating pays.

    cases: a task, whose first `rows` held-out rows are turned into cases: task.cases(row), or crafted ones (its
    prefill and answer tag; reasoning tags if a SoftFormat asks for them); then what each reward's
    `cheats(honest)` and task.cheats(row, honest) add. Or a list of Case with at least one honest one.
    weights: of the total; default the task's if they fit, else equal.
    A reward with `only_a_part = True` (length, repetition, ...) judges nothing by itself: beside others it is held to
    account in the total alone.
    Returns one row per case of the first task row (or of all given cases): case, response, <reward name> ...,
    total. Scores are in [0, 1], None where a reward cannot judge.
    Raises ValueError if the task's rows hold no answer that counts as correct, so that nothing can be crafted;
    RewardCheckError, with the table in its `.table`, if a cheat outranks the honest completion, or
    ties with it where it must not, in one reward or in the total; if an honest completion cannot be judged;
    if a reward breaks its contract.

    >>> from grpo_kit.rewards import ExactAnswer
    >>> check_rewards(ExactAnswer(), crafted_cases("82", "47", prefill="<answer>"))["total"].tolist()[:2]
    [1.0, 0.0]
    """
    rewards = [rewards] if callable(rewards) else list(rewards)
    if not rewards:
        raise ValueError("rewards is empty; give at least one reward")
    names = [reward_name(reward) for reward in rewards]
    twice = next((name for name in names if names.count(name) > 1), None)
    if twice is not None:
        raise ValueError(
            f"rewards has several named {twice!r}, of which one would hide the other; set __name__"
        )
    if rows < 1:
        raise ValueError(f"rows={rows!r} must be at least 1")
    if not isinstance(cases, Sequence):
        if weights is None and len(cases.reward_weights) == len(rewards):
            weights = cases.reward_weights
        groups = [_task_cases(cases, row, rewards) for row in cases.held_out[:rows]]
    else:
        groups = [list(cases)]
    weights = [1 / len(rewards)] * len(rewards) if weights is None else list(weights)
    if len(weights) != len(rewards):
        raise ValueError(f"weights={weights!r} for {len(rewards)} rewards; give one per reward")
    tables, faults = [], []
    for group in groups:
        table = _score(rewards, weights, group)
        tables.append(table)
        faults += _faults(rewards, group, table)
    if faults:
        error = RewardCheckError("Cheating pays:\n" + "\n".join(dict.fromkeys(faults)))
        error.table = pd.concat(tables, ignore_index=True)
        raise error
    return tables[0]


def _score(rewards: Sequence[Reward], weights: Sequence[float], cases: Sequence[Case]) -> pd.DataFrame:
    columns = {key: [case.columns.get(key) for case in cases] for case in cases for key in case.columns}
    table: dict[str, list] = {
        "case": [case.name for case in cases],
        "response": [case.prefill + case.completion for case in cases],
    }
    scores = []
    for reward in rewards:
        try:
            given = checked_scores(
                reward,
                [case.completion for case in cases],
                prefill=[case.prefill for case in cases],
                **columns,
            )
        except ValueError as error:
            raise RewardCheckError(f"{reward_name(reward)} breaks the reward contract: {error}") from error
        scores.append(given)
        table[reward_name(reward)] = given
    # As in TRL's sum: a reward that cannot judge a row adds nothing to it.
    table["total"] = [
        None
        if all(s is None for s in row)
        else sum(w * s for w, s in zip(weights, row, strict=True) if s is not None)
        for row in zip(*scores, strict=True)
    ]
    return pd.DataFrame(table)


def _faults(rewards: Sequence[Reward], cases: Sequence[Case], table: pd.DataFrame) -> list[str]:
    honest = [place for place, case in enumerate(cases) if case.honest]
    if not honest:
        raise ValueError(
            "cases holds no case with honest=True; the cheats need something to be compared with"
        )
    blind = {reward_name(reward): not _needs_answer(reward) for reward in rewards}
    blind["total"] = all(blind.values())
    judged = [reward_name(reward) for reward in rewards if not getattr(reward, "only_a_part", False)]
    faults = []
    for name in [*judged, "total"] if len(rewards) > 1 else list(blind)[:1]:
        scores = [None if pd.isna(score) else float(score) for score in table[name]]
        standards = [scores[place] for place in honest]
        if None in standards:
            if name == "total" or len(rewards) == 1:
                faults.append(f"- {name} cannot judge the honest completion {cases[honest[0]].completion!r}")
            continue
        for case, score in zip(cases, scores, strict=True):
            if case.honest or score is None:
                continue
            may_tie = case.tie == "always" or (case.tie == "format" and blind[name])
            low = min(standards)
            if score > low + _PAYS or (score > low - _PAYS and not may_tie):
                verb = "outranks" if score > low + _PAYS else "ties with"
                faults.append(
                    f"- {name}: {case.name!r} ({score:.3g}) {verb} the honest answer ({low:.3g}); "
                    f"response {case.prefill + case.completion!r:.90}"
                )
    return faults


def _needs_answer(reward: Reward) -> bool:
    return bool(getattr(reward, "columns", True))


def _task_cases(task: Task, row: Mapping[str, Any], rewards: Sequence[Reward]) -> list[Case]:
    made = list(task.cases(row)) if task.cases else _crafted_from(task, row, rewards)
    honest = next((case for case in made if case.honest), None)
    if honest is None:
        raise ValueError(
            f"task {task.name!r}: cases has no case with honest=True for {row['question']!r:.300}"
        )
    for reward in rewards:
        made += getattr(reward, "cheats", _no_cheats)(honest)
    made += task.cheats(row, honest) if task.cheats else []
    distinct: dict[tuple[str, str], Case] = {}
    for case in made:
        distinct.setdefault((case.prefill, case.completion), case)  # a cheat that comes out honest is none
    return list(distinct.values())


def _no_cheats(honest: Case) -> list[Case]:
    return []


def _crafted_from(task: Task, row: Mapping[str, Any], rewards: Sequence[Reward]) -> list[Case]:
    right = str(row["answer"])
    others = [str(other["answer"]) for other in task.train] + [f"{right}1", "0"]
    wrong = next((text for text in others if not task.is_correct(text, row)), None)
    if not right or not task.is_correct(right, row):
        raise ValueError(
            f"task {task.name!r}: the row's own answer {right!r} is not correct; give a list of Case"
        )
    if wrong is None:
        raise RewardCheckError(
            f"task {task.name!r}: is_correct takes any answer for {row['question']!r:.300}"
        )
    parts = [part for reward in rewards for part in [reward, *all_parts(reward)]]
    think = next((part.think for part in parts if getattr(part, "think", None)), None)
    return crafted_cases(right, wrong, prefill=task.prefill, tag=task.answer_tag, think=think, columns=row)
