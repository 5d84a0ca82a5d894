"""Plays episodes: turn t of all unfinished ones in one decode. Each turn is kept with its exact tokens.

show_turns prints what a model would read, turn by turn, before anything is trained.
"""

from __future__ import annotations

import math
import random
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any, NamedTuple

from grpo_kit.engine.tree import common_length, tree_tokens
from grpo_kit.models._model_facts import check_context
from grpo_kit.more.episodes.environment import EpisodeError, VectorEnv
from grpo_kit.more.episodes.observation import Conversation, Renderer

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase


class Written(NamedTuple):
    """The completions of a turn, one entry a prompt, the end token included.

    logprobs, entropies: one number a token, in nats, at the step's temperature; None where the writer has none.
    """

    completion_ids: list[list[int]]
    logprobs: list[list[float]] | None = None
    entropies: list[list[float]] | None = None


Write = Callable[[list[list[int]], list[int], int], Written]
"""write(prompts, episodes, turn): prompts as token ids; episodes: the number of each prompt's; turn: counted from 1."""
_MEND = "show fewer actions or shorter observations"


@dataclass(frozen=True)
class Turn:
    """One prompt and its completion.

    prompt_ids, completion_ids: as sampled, the end token included; logprobs: one a completion token, None if unknown.
    observation: the text that the model read; completion: the text it wrote; result: the next observation.
    reward: of this turn. invalid: the action could not be read. cut_off: the completion reached the token limit.
    entropies: one a completion token, in nats; None if unknown.
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
    entropies: list[float] | None = None


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
        returns = [0.0]
        for turn in reversed(self.turns):
            returns.append(turn.reward + discount * returns[-1])
        return returns[:0:-1]


def rollout_episodes(
    task: Any,
    rows: Sequence[Mapping[str, Any]],
    renderer: Renderer,
    world: VectorEnv,
    write: Write,
    *,
    max_completion_tokens: int | None = None,
    context: float = math.inf,
    progress: Callable[[int, int], None] | None = None,
) -> list[Episode]:
    """One episode of an EpisodeTask a row, in parallel; ended episodes take no part in later turns.

    write: makes the completions of a turn. max_completion_tokens: of each turn; default the task's.
    context: the most tokens of a prompt with its completion. progress: called with (ended, all) after each turn.
    Raises EpisodeError for an environment that breaks its contract, and for a prompt that leaves no room.
    """
    limit = max_completion_tokens or task.max_completion_tokens
    view = renderer.view
    observations = dict(enumerate(world.reset(rows)))
    episodes = [Episode(row) for row in rows]
    conversations: dict[int, Conversation] = {}  # of the episodes that go on
    for i, observation in observations.items():
        with _as_episode_errors(world, i, 0):
            conversations[i] = renderer.first(rows[i]["question"], observation)
    for turn in range(1, task.max_turns + 1):
        numbers = _equal_prompts_adjacent(conversations)
        prompts = [conversations[i].ids for i in numbers]
        for i in numbers:
            with _as_episode_errors(world, i, turn):
                check_context(
                    context, len(conversations[i].ids), limit, where="the prompt", mend=_MEND
                )
        written = write(prompts, numbers, turn)
        texts = dict(zip(numbers, map(renderer.text_of, written.completion_ids), strict=True))
        actions = {i: view.said(view.prefill + text) for i, text in texts.items()}
        outcomes = world.step(actions, turn, last=turn == task.max_turns)
        logprobs = written.logprobs or [None] * len(numbers)
        entropies = written.entropies or [None] * len(numbers)
        for place, i in enumerate(numbers):
            ids, outcome = written.completion_ids[place], outcomes[i]
            finished = Turn(
                prompt_ids=list(conversations[i].ids),
                completion_ids=list(ids),
                logprobs=logprobs[place],
                observation=observations[i],
                completion=texts[i],
                result=outcome.observation,
                reward=outcome.reward,
                invalid=outcome.invalid,
                cut_off=renderer.cut_off(ids),
                entropies=entropies[place],
            )
            episodes[i].turns.append(finished)
            observations[i] = outcome.observation
            if outcome.done:
                episodes[i].done = True
                del conversations[i]
            elif turn < task.max_turns:
                with _as_episode_errors(world, i, turn):
                    renderer.next(conversations[i], ids, outcome.observation)
        if progress is not None:
            progress(len(episodes) - len(conversations), len(episodes))
        if not conversations:
            break
    return episodes


def _equal_prompts_adjacent(conversations: Mapping[int, Conversation]) -> list[int]:
    """The episodes' numbers, equal prompts at the place of the first: they are computed once."""
    prompts = {i: tuple(conversation.ids) for i, conversation in conversations.items()}
    first: dict[tuple[int, ...], int] = {}
    for i, prompt in prompts.items():
        first.setdefault(prompt, i)
    return sorted(prompts, key=lambda i: (first[prompts[i]], i))


@contextmanager
def _as_episode_errors(world: VectorEnv, i: int, turn: int) -> Iterator[None]:
    """Turns a ValueError about a prompt into an EpisodeError with its row and turn."""
    try:
        yield
    except ValueError as error:
        raise EpisodeError(f"{world.where(i, turn)}: {error}") from error


# ---- turns as text --------------------------------------------------------------------------------------------------


def show_turns(
    tokenizer: PreTrainedTokenizerBase,
    task: Any,
    row: Mapping[str, Any] | None = None,
    *,
    responses: Sequence[str] | None = None,
) -> str:
    """Each turn's prompt of one episode, word for word, its number of tokens and how many the last prompt already had;
    then the cost of training on it in rows and tokens, for a chat also with the other choice of thoughts if it differs.

    task: an EpisodeTask. row: default the first train row. responses: the answers (without the prefill); default: the
    actions of the task's optimum. The worked examples are shown once, in the first turn.
    Raises ValueError if the task has no optimum and no responses are given.

    >>> print(show_turns(tokenizer, episodes.grid()))  # doctest: +SKIP
    """
    row = task.train[0] if row is None else row
    if responses is None and task.optimum is None:
        raise ValueError(f"task {task.name!r} has no optimum; give responses=[...], one a turn")
    episode = _answered(tokenizer, task, row, responses)
    blocks, tokens_before = [], []
    for number, turn in enumerate(episode.turns, start=1):
        head = f"--- turn {number}: {len(turn.prompt_ids)} tokens"
        if number == 1:
            text = Renderer(tokenizer, task.view).first(row["question"], turn.observation).text
        else:
            # The last token is always computed again; the text is shown from its first difference.
            n_known = common_length(tokens_before, turn.prompt_ids)
            head += f", {n_known} of them as before"
            text = tokenizer.decode(turn.prompt_ids[n_known:])
        blocks.append(f"{head}\n{text}\n>>> {turn.completion}")
        tokens_before = [*turn.prompt_ids, *turn.completion_ids]
    if episode.done:
        blocks.append(f"--- {episode.turns[-1].result} reward {episode.total:g}")
    cost = _training_cost(episode)
    if task.view.chat:
        thoughts = task.view.thoughts
        other_thoughts = {"as served": "kept", "kept": "as served"}[thoughts]
        other_task = replace(task, view=replace(task.view, thoughts=other_thoughts))
        other_cost = _training_cost(_answered(tokenizer, other_task, row, responses))
        if other_cost != cost:
            cost = f"thoughts {thoughts}: {cost}; thoughts {other_thoughts}: {other_cost}"
    return "\n".join([*blocks, f"--- {cost}"])


def _answered(
    tokenizer: PreTrainedTokenizerBase,
    task: Any,
    row: Mapping[str, Any],
    responses: Sequence[str] | None,
) -> Episode:
    """The row's episode with these responses, one a turn; None: those of the task's optimum."""
    view, world, renderer = task.view, task.world(), Renderer(tokenizer, task.view)
    if responses is None:
        act, max_turns = task.optimum(row, random.Random(0)), task.max_turns
    else:
        act, max_turns = None, min(task.max_turns, len(responses))
    (observation,) = world.reset([row])
    conversation = renderer.first(row["question"], observation)
    episode = Episode(row)
    for turn in range(1, max_turns + 1):
        if act:
            response = view.completion_saying(act(observation))
        else:
            response = responses[turn - 1]
        ids = tokenizer(response, add_special_tokens=False)["input_ids"] + [
            tokenizer.eos_token_id
        ]
        action = view.said(view.prefill + response)
        outcomes = world.step({0: action}, turn, last=turn == task.max_turns)
        result, reward, episode.done, invalid = outcomes[0]
        prompt_ids = list(conversation.ids)
        episode.turns.append(
            Turn(
                prompt_ids,
                ids,
                None,
                observation,
                response,
                result,
                reward,
                invalid,
                cut_off=False,
            )
        )
        if episode.done:
            break
        observation = result
        renderer.next(conversation, ids, observation)
    return episode


def _training_cost(episode: Episode) -> str:
    rows = [(turn.prompt_ids, turn.completion_ids) for turn in episode.turns]
    tokens = sum(len(prompt) + len(completion) for prompt, completion in rows)
    return f"{len(rows)} rows of {tokens:,} tokens in all; {tree_tokens(rows):,} are computed, what rows share once"
