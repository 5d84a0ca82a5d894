"""Turns as text, before training: the model's input turn by turn, and which part of it is new."""

from __future__ import annotations

import random
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Any

from grpo_kit.engine.tree import common_length, tree_tokens
from grpo_kit.more.episodes.episode_task import EpisodeTask
from grpo_kit.more.episodes.observation import Conversation, Renderer

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase


def show_turns(
    tokenizer: PreTrainedTokenizerBase,
    task: EpisodeTask,
    row: Mapping[str, Any] | None = None,
    *,
    responses: Sequence[str] | None = None,
) -> str:
    """Each turn's prompt of one episode, word for word, its number of tokens and how many the last prompt already had;
    then the cost of training on it in rows and tokens, for a chat also with the other choice of thoughts if it differs.

    row: default the first train row. responses: the answers (without the prefill); default: the actions of the task's
    optimum. The worked examples are shown once, in the first turn.
    Raises ValueError if the task has no optimum and no responses are given.

    >>> print(show_turns(tokenizer, episodes.grid()))  # doctest: +SKIP
    """
    row = task.train[0] if row is None else row
    if responses is None and task.optimum is None:
        raise ValueError(f"task {task.name!r} has no optimum; give responses=[...], one a turn")
    turns, end = _walked(tokenizer, task, row, responses)
    shown, before = [], []
    for number, (talk, answer, written) in enumerate(turns, start=1):
        known = common_length(before, talk.ids)
        # The last token is always computed again; the text is shown from its first difference.
        text = talk.text if number == 1 else tokenizer.decode(talk.ids[known:])
        goes_on = "" if number == 1 else f", {known} of them as before"
        shown.append(f"--- turn {number}: {len(talk.ids)} tokens{goes_on}\n{text}\n>>> {answer}")
        before = [*talk.ids, *written]
    cost = _cost(turns)
    if task.view.chat:
        other = "kept" if task.view.thoughts == "as served" else "as served"
        view = replace(task.view, thoughts=other)
        else_ = _cost(_walked(tokenizer, replace(task, view=view), row, responses)[0])
        cost = cost if else_ == cost else f"thoughts {task.view.thoughts}: {cost}; thoughts {other}: {else_}"
    return "\n".join([*shown, *end, f"--- {cost}"])


def _walked(
    tokenizer: PreTrainedTokenizerBase,
    task: EpisodeTask,
    row: Mapping[str, Any],
    responses: Sequence[str] | None,
) -> tuple[list[tuple[Conversation, str, list[int]]], list[str]]:
    """Each turn's prompt, answer and answer tokens; and a line about how the episode ended."""
    respond = _in_order(responses) if responses is not None else _optimum(task, row)
    renderer, world = Renderer(tokenizer, task.view), task.world()
    (observation,) = world.reset([row])
    talk = renderer.first(row["question"], observation)
    turns, earned = [], 0.0
    for turn in range(1, task.max_turns + 1):
        answer = respond(observation)
        if answer is None:
            break
        written = tokenizer(answer, add_special_tokens=False)["input_ids"] + [tokenizer.eos_token_id]
        turns.append((replace(talk), answer, written))
        said = {0: task.view.said(task.view.prefill + answer)}
        outcome = world.step(said, turn, last=turn == task.max_turns)[0]
        earned += outcome.reward
        if outcome.done:
            return turns, [f"--- {outcome.observation} reward {earned:g}"]
        observation = outcome.observation
        renderer.next(talk, written, observation)
    return turns, []


def _cost(turns: Sequence[tuple[Conversation, str, list[int]]]) -> str:
    """The cost of training on one such episode."""
    rows = [(talk.ids, written) for talk, _, written in turns]
    tokens = sum(len(prompt) + len(written) for prompt, written in rows)
    return f"{len(rows)} rows of {tokens:,} tokens in all; {tree_tokens(rows):,} are computed, what rows share once"


def _optimum(task: EpisodeTask, row: Mapping[str, Any]) -> Any:
    act = task.optimum(row, random.Random(0))
    return lambda observation: task.view.completion_saying(act(observation))


def _in_order(responses: Sequence[str]) -> Any:
    waiting = iter(responses)
    return lambda observation: next(waiting, None)
