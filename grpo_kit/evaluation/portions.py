"""Answers a task's rows in growing portions, until the portions are enough or the time is over.

A row's completions are drawn by its position, so the first n rows are the same in any portions, except for rounding:
of 480 completions of SmolLM2-135M in four portions 479 were equal (float32, CPU, seed 0, 2026-11-26). For a model
that the rollout engine does not support, transformers draws batch by batch: its completions depend on the portions.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Any

from grpo_kit.display import progress_line
from grpo_kit.evaluation.generate_and_score import Answers, Played, answer, check_before

if TYPE_CHECKING:
    from transformers import PreTrainedModel, PreTrainedTokenizerBase

    from grpo_kit.episodes.episode_task import EpisodeTask
    from grpo_kit.tasks import Task

# The first rows show how long one row takes. Each later portion doubles the rows, within the time.
_FIRST, _SECOND = 2, 8
_JUDGED = ("verdicts", "right", "lenient", "formatted", "read", "credit", "rewards")


def check_seconds(seconds: float | None) -> None:
    """Raises ValueError, naming the argument, unless seconds is None or a number above 0 (math.inf is allowed)."""
    number = isinstance(seconds, (int, float)) and not isinstance(seconds, bool)
    if seconds is not None and not (number and seconds > 0):
        raise ValueError(
            f"seconds={seconds!r} must be a number above 0, such as 300; math.inf looks until the verdict is sure, "
            "None at all rows"
        )


def answer_in_portions(
    model: PreTrainedModel,
    tokenizer: PreTrainedTokenizerBase,
    task: Task | EpisodeTask,
    rows: Sequence[dict],
    look: Callable[[Answers], tuple[str, bool]],
    *,
    seconds: float | None,
    samples: int,
    max_completion_tokens: int | None,
    **how: Any,
) -> tuple[Answers, float | None]:
    """The answers of the first rows, all B or fewer, and the seconds for all rows if the time was over first.

    look: called with the answers so far after each portion; returns the findings in words, and whether that is enough.
    seconds: the limit, judging included. The first portion, and a portion slower than those
    before it, may exceed it. None: all rows in one portion. how: temperature, batch_size, seed of answer().
    Raises the ValueErrors of answer(), for any of the rows, before the first is answered.
    """
    began, parts, done, known = time.monotonic(), [], 0, ""
    how |= {"samples": samples, "max_completion_tokens": max_completion_tokens}
    if rows and seconds is not None:
        check_before(model, tokenizer, task, rows, max_completion_tokens)
    with progress_line(f"{task.name}, readiness") as line:

        def tell(made: int, of: int = 0) -> None:
            asked, spent = done + made // samples, time.monotonic() - began
            share = max(asked / len(rows), min(1.0, spent / (seconds or math.inf)))
            line.say(
                f"{asked} of {len(rows)} questions{known}", share, end=f"{asked} of {len(rows)} questions"
            )

        while True:
            goal = len(rows)
            if seconds is not None:
                goal = min(goal, max(_SECOND, 2 * done) if done else _FIRST)
            spent = time.monotonic() - began
            if done and (seconds - spent) * done < (goal - done) * spent:  # too many for the time
                goal = done + int((seconds - spent) * done / spent)
                if goal <= done:
                    return parts[0], spent * len(rows) / done
            part = answer(model, tokenizer, task, rows[done:goal], first=done, progress=tell, **how)
            parts, done = [joined([*parts, part])], goal
            words, enough = look(parts[0])
            known = f", so far {words}"
            tell(0)
            if done >= len(rows) or enough:
                return parts[0], None


def joined(parts: Sequence[Answers]) -> Answers:
    """Joins answers of one task; judgements that all parts already have are kept."""
    for part in parts:
        for name in ("rewards", "credit", "readings", "measure"):  # these are judged a completion at a time
            getattr(part, name)
    first, *others = parts
    if not others:
        return first
    names = ["rows", "prompts", "completions", *["episodes"] * isinstance(first, Played)]
    whole = replace(first, **{name: [one for part in parts for one in getattr(part, name)] for name in names})
    for name in _JUDGED:
        if all(name in part.__dict__ for part in parts):  # already computed, so kept
            whole.__dict__[name] = [one for part in parts for one in part.__dict__[name]]
    return whole
