"""Plays episodes: turn t of all unfinished ones in one decode. Each turn is kept with its exact tokens."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

from grpo_kit.models._model_facts import check_context
from grpo_kit.more.episodes.environment import EpisodeError, VectorEnv
from grpo_kit.more.episodes.observation import Conversation, Renderer
from grpo_kit.prompts import PromptError

# (prompts, their episodes, turn from 1) -> for each prompt its completion and, if known, log-probabilities
Complete = Callable[[list[list[int]], list[int], int], list[tuple[list[int], list[float] | None]]]


@dataclass(frozen=True)
class Turn:
    """One prompt and its completion.

    prompt_ids, completion_ids: as sampled, the end token included; logprobs: one a completion token, None if unknown.
    observation: the text that the model read; completion: the text it wrote; result: the next observation.
    reward: of this turn. invalid: the action could not be read. cut_off: the completion reached the token limit.
    """

    prompt_ids: list[int]
    completion_ids: list[int]
    logprobs: list[float] | None
    observation: str
    completion: str
    result: str
    reward: float
    invalid: bool
    cut_off: bool


@dataclass
class Episode:
    """The turns from a reset to the end. done: the environment ended it; otherwise it reached max_turns."""

    row: Mapping[str, Any]
    turns: list[Turn] = field(default_factory=list)
    done: bool = False

    @property
    def total(self) -> float:
        """The sum of its rewards."""
        return sum(turn.reward for turn in self.turns)

    def returns(self, discount: float = 1.0) -> list[float]:
        """The return of each turn: the rewards from it on, each later turn's multiplied by discount once more.

        >>> Episode({}, [Turn([], [], None, "", "", "", r, False, False) for r in (0, 0, 1)]).returns(0.5)
        [0.25, 0.5, 1.0]
        """
        found, after = [], 0.0
        for turn in reversed(self.turns):
            after = turn.reward + discount * after
            found.append(after)
        return found[::-1]


def rollout_episodes(
    task: Any,
    rows: Sequence[Mapping[str, Any]],
    renderer: Renderer,
    world: VectorEnv,
    complete: Complete,
    *,
    context: float = math.inf,
    progress: Callable[[int, int], None] | None = None,
) -> list[Episode]:
    """One episode of an EpisodeTask a row, in parallel; ended episodes take no part in later turns.

    context: the most tokens of a prompt with its completion. progress: called with (ended, all) after each turn.
    Raises EpisodeError for an environment that breaks its contract, and for a prompt that leaves no room.
    """
    observations = dict(enumerate(world.reset(rows)))
    episodes = [Episode(row) for row in rows]
    talks: dict[int, Conversation] = {}
    for i in observations:
        with _named(world, i, 0):
            talks[i] = renderer.first(rows[i]["question"], observations[i])
    for turn in range(1, task.max_turns + 1):
        # Equal prompts are adjacent, at the place of the first: they are computed once.
        first: dict[tuple[int, ...], int] = {}
        for i in talks:
            first.setdefault(tuple(talks[i].ids), i)
        living = sorted(talks, key=lambda i: (first[tuple(talks[i].ids)], i))
        prompts = [talks[i].ids for i in living]
        for i, prompt in zip(living, prompts, strict=True):
            try:
                check_context(
                    context, len(prompt), task.max_completion_tokens, where=f"{world.where(i, turn)}: the prompt",
                    mend="show fewer actions or shorter observations",
                )  # fmt: skip
            except ValueError as error:
                raise EpisodeError(str(error)) from None
        made = dict(zip(living, complete(prompts, living, turn), strict=True))
        texts = {i: renderer.text_of(made[i][0]) for i in made}
        said = {i: renderer.view.said(renderer.view.prefill + texts[i]) for i in living}
        outcomes = world.step(said, turn, last=turn == task.max_turns)
        for i in sorted(living):
            ids, logprobs = made[i]
            outcome = outcomes[i]
            episodes[i].turns.append(
                Turn(
                    list(talks[i].ids), list(ids), logprobs, observations[i], texts[i], outcome.observation,
                    outcome.reward, outcome.invalid, renderer.cut_off(ids),
                )
            )  # fmt: skip
            if outcome.done:
                episodes[i].done = True
                del talks[i]
            else:
                observations[i] = outcome.observation
                if turn < task.max_turns:
                    with _named(world, i, turn):
                        renderer.next(talks[i], ids, outcome.observation)
        if progress is not None:
            progress(len(episodes) - len(talks), len(episodes))
        if not talks:
            break
    return episodes


@contextmanager
def _named(world: VectorEnv, i: int, turn: int) -> Iterator[None]:
    """Turns a PromptError about an observation into an EpisodeError with its row and turn."""
    try:
        yield
    except PromptError as error:
        raise EpisodeError(f"{world.where(i, turn)}: {error}") from error
