"""Turns as text, before anything is trained: what the model would read, turn by turn, and what of it is new."""

from __future__ import annotations

import random
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

from grpo_kit.episodes.task import EpisodeTask
from grpo_kit.episodes.view import Renderer
from grpo_kit.rollout.tree import common_length

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase


def show_turns(
    tokenizer: PreTrainedTokenizerBase,
    task: EpisodeTask,
    row: Mapping[str, Any] | None = None,
    *,
    responses: Sequence[str] | None = None,
) -> str:
    """Each turn's prompt of one episode, word for word, how many tokens it has and how many the last one had already.

    row: default the first train row. responses: what is answered (without the prefill); default: what the task's
    optimum does. The worked examples are shown once, in the first turn.
    Raises ValueError where there is neither.

    >>> print(show_turns(tokenizer, worlds.grid()))  # doctest: +SKIP
    """
    row = task.train[0] if row is None else row
    if responses is None and task.optimum is None:
        raise ValueError(f"task {task.name!r} has no optimum; give responses=[...], one a turn")
    respond = task.optimum(row, random.Random(0)) if responses is None else _in_order(responses)
    renderer, world = Renderer(tokenizer, task.view), task.world()
    (observation,) = world.reset([row])
    talk = renderer.first(row["question"], observation)
    shown, before = [], []
    for turn in range(1, task.max_turns + 1):
        answer = respond(observation)
        if answer is None:
            break
        known = common_length(before, talk.ids)
        # The last token is always read anew; what differs is shown from where it differs.
        text = talk.text if turn == 1 else tokenizer.decode(talk.ids[known:])
        goes_on = "" if turn == 1 else f", {known} of them as before"
        shown.append(f"--- turn {turn}: {len(talk.ids)} tokens{goes_on}\n{text}\n>>> {answer}")
        outcome = world.step({0: task.view.prefill + answer}, turn)[0]
        if outcome.done:
            shown.append(f"--- {outcome.observation} reward {outcome.reward:g}")
            break
        written = tokenizer(answer, add_special_tokens=False)["input_ids"] + [tokenizer.eos_token_id]
        before = [*talk.ids, *written]
        observation = outcome.observation
        renderer.next(talk, written, observation)
    return "\n".join(shown)


def _in_order(responses: Sequence[str]) -> Any:
    waiting = iter(responses)
    return lambda observation: next(waiting, None)
