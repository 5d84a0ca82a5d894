"""Crafted completions: an honest one, and cheats that must not earn as much."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, Literal, Protocol

from grpo_kit.rewards._parts import Reward, check_column_names, columns_of
from grpo_kit.rewards.response import answer_span
from grpo_kit.rewards.scoring import score_all

Tie = Literal["never", "format", "always"]


class RewardCheckError(ValueError):
    """A cheat earns as much as an honest answer. The message names the reward, the cheat and both scores."""


@dataclass(frozen=True)
class Case:
    """One crafted completion.

    tie: where the case may earn as much as the honest one: "never"; "format": in rewards that read no column (a
    format reward cannot know that the answer is wrong); "always". No case may outrank the honest one.
    columns: this row's data set columns. honest: this is the completion that the cheats are compared with.
    """

    name: str
    completion: str
    honest: bool = False
    tie: Tie = "never"
    prefill: str = ""
    columns: Mapping[str, Any] = field(default_factory=dict)

    def cheat(
        self, name: str, completion: str, tie: Tie = "never", *, prefill: str | None = None
    ) -> Case:
        """A cheat on the same row: another completion, by default behind the same prefill."""
        if prefill is None:
            prefill = self.prefill
        return replace(
            self, name=name, completion=completion, honest=False, tie=tie, prefill=prefill
        )


class TaskWithCases(Protocol):
    """The part of a task that check_rewards and audit need."""

    held_out: list[dict]
    rewards: list[Reward]
    reward_weights: list[float]
    answer_tag: str
    answers_are: str

    def cases_for(self, row: Mapping[str, Any], rewards: Sequence[Reward]) -> list[Case]:
        """The honest completions of a row, at least one with honest=True, and the cheats to try."""
        ...


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

    right, wrong: a right and a wrong answer text. think: the reasoning tag of the format, if any. What the prefill
    opens, by whatever tag, the honest completion closes; a thought that it closes is not thought again.
    Raises ValueError if the prefill closes the answer.

    >>> [case.completion for case in crafted_cases("82", "47", prefill="<answer>")][:3]
    ['82</answer>', '', '82']
    """
    if columns is None:
        columns = {"answer": right}
    tags = re.findall(r"<(/?\w+)>", prefill)
    if f"/{tag}" in tags:
        raise ValueError(
            f"prefill={prefill!r} closes <{tag}>, so that no completion has the answer; end it before"
        )
    unclosed = [
        name for name in tags if name[0] != "/" and tags.count(name) > tags.count(f"/{name}")
    ]
    body = "".join(f"Reasoning.\n</{name}>\n" for name in reversed(unclosed) if name != tag)
    if think and not {think, f"/{think}"} & {*tags} and tag not in unclosed:
        body += f"<{think}>\nReasoning.\n</{think}>\n"
    elif body and not prefill.endswith("\n"):
        body = f"\n{body}"
    opening, closing = f"<{tag}>", f"</{tag}>"
    if tag not in unclosed:
        body += opening
    wrong_body = f"{body}{wrong}{closing}"
    both_body = f"{body}{wrong}, {right}{closing}"
    body += f"{right}{closing}"
    empty_thought = f"<{think}></{think}>" if think else ""
    honest = Case("honest", body, honest=True, prefill=prefill, columns=columns)
    return [
        honest,
        honest.cheat("empty", ""),
        honest.cheat("truncated", body[: -len(closing)]),
        honest.cheat("tag spam", empty_thought + f"{opening}{closing}" * 8),
        honest.cheat("tag spam, right answer", f"{opening}{right}{closing}" * 8),
        honest.cheat("answer twice, right first", f"{body}{opening}{wrong}{closing}"),
        honest.cheat("answer twice, right last", f"{wrong_body}{opening}{right}{closing}"),
        honest.cheat("both answers in one block", both_body, "format"),
        honest.cheat("answer in the prefill", "", prefill=prefill + body),
        honest.cheat(
            "prefill said again",
            f"{prefill}{body}",
            "never" if opening in prefill else "always",
        ),
        honest.cheat("right answer, wrong format", f" The answer is {right}.", "always"),
        honest.cheat("wrong answer, right format", wrong_body, "format"),
    ]


def score_cases(
    rewards: Sequence[Reward], cases: Sequence[Case], names: Sequence[str]
) -> dict[str, list[float | None]]:
    """Every reward's scores of the cases, each with its own prefill and columns. Raises the errors of score()."""
    columns = columns_of([case.columns for case in cases])
    check_column_names({"prefill"} & columns.keys(), "cases")  # a Case has a prefill of its own
    columns["prefill"] = [case.prefill for case in cases]
    return score_all(rewards, [case.completion for case in cases], names, **columns)


def answer_cases(
    honest: Case, texts: Mapping[str, str], *, tag: str | None = "answer"
) -> list[Case]:
    """Cheats from the texts {name: text}: each replaces the honest completion's answer, and the rest stays.

    A reward's `cheats` returns such cases; a format reward may tie. tag: None replaces the whole completion. No cases
    where the model did not write the answer itself.

    >>> honest = Case("honest", "82</answer>", honest=True, prefill="<answer>")
    >>> [case.completion for case in answer_cases(honest, {"a list": "1, 82"})]
    ['1, 82</answer>']
    """
    prefix = suffix = ""
    if tag is not None:
        span = answer_span(honest.prefill + honest.completion, tag)
        if span is None or honest.prefill[span[0] :].strip():
            return []
        start, end = (place - len(honest.prefill) for place in span)
        prefix, suffix = honest.completion[: max(start, 0)], honest.completion[end:]
    return [
        honest.cheat(name, prefix + text + suffix, "format") for name, text in texts.items()
    ]
