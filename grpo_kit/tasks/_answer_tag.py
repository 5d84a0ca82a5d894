"""Another tag around the answers of a task of the kit's: in its system text, prefill, examples and rewards alike."""

from __future__ import annotations

from copy import copy
from dataclasses import replace

from grpo_kit.rewards._parts import Reward
from grpo_kit.rewards.format import SoftFormat
from grpo_kit.rewards.response import check_tag
from grpo_kit.tasks.task import Task


def with_answer_tag(task: Task, tag: str) -> Task:
    """The task, whose answers stand in <answer>, with its answers in <tag>. Raises ValueError for no name of a tag."""
    check_tag("answer_tag", tag)
    if tag == task.answer_tag:
        return task

    def said(text: str) -> str:
        return text.replace("<answer>", f"<{tag}>").replace("</answer>", f"</{tag}>")

    def paid(reward: Reward) -> Reward:
        if isinstance(reward, SoftFormat):
            return SoftFormat(think=reward.think, answer=tag)
        made = copy(reward)
        made.tag = tag
        return made

    return replace(
        task, answer_tag=tag, system=said(task.system or "") or None, prefill=said(task.prefill),
        examples=tuple((question, said(response)) for question, response in task.examples),
        rewards=[paid(reward) for reward in task.rewards],
    )  # fmt: skip
