"""Episodes in evaluation: played, and judged by what their environment paid."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from statistics import fmean
from typing import Any

import pandas as pd

from grpo_kit.engine import RolloutEngine
from grpo_kit.engine.complete import Completion, complete
from grpo_kit.evaluation.generate_and_score import Answers, Request
from grpo_kit.models._model_facts import context_length, end_ids
from grpo_kit.more.episodes.observation import Renderer
from grpo_kit.more.episodes.rollout_episodes import Episode, Written, rollout_episodes
from grpo_kit.rewards.combine import Verdicts
from grpo_kit.rewards.scoring import Scores


@dataclass(frozen=True, repr=False)
class Played(Answers):
    """Episodes of an EpisodeTask's rows. right: did the episode succeed? formatted: was every action valid?

    A completion's text is the episode as a conversation; its tokens are those of all turns. There is no lenient
    reading: the environment decides what succeeds.
    """

    episodes: list[Episode]

    by_place = (*Answers.by_place, "episodes")

    @property
    def credit(self) -> Scores:
        return self.rewards

    @cached_property
    def verdicts(self) -> Verdicts:
        return [episode.total >= self.task.success for episode in self.episodes]

    @cached_property
    def formatted(self) -> list[bool]:
        return [share == 1.0 for share in self.read]

    @cached_property
    def read(self) -> list[float]:
        """The share of each episode's actions that were valid."""
        return [fmean(not turn.invalid for turn in episode.turns) for episode in self.episodes]

    @property
    def readings(self) -> dict[str, list[bool]]:
        return {"strict": self.right, "formatted": self.formatted}

    @cached_property
    def parts(self) -> dict[str, Scores]:
        return {
            part: [episode.total for episode in self.episodes] for part in self.task.paid_parts
        }

    @cached_property
    def rewards(self) -> Scores:
        return [episode.total for episode in self.episodes]

    def table(self) -> pd.DataFrame:
        """One row an episode: as Answers.table, with turns and done."""
        turns = [len(episode.turns) for episode in self.episodes]
        ends = [episode.done for episode in self.episodes]
        return super().table().assign(turns=turns, done=ends)


def play(
    task: Any,
    model: Any,
    tokenizer: Any,
    rows: Sequence[dict],
    asked: Request,
) -> Played:
    """Episodes of each row of an EpisodeTask, in parallel."""
    if asked.folder is not None:
        raise ValueError(
            f"folder={str(asked.folder)!r}: completions of task {task.name!r} are not kept, they are turns"
        )
    settings = asked.settings
    samples = settings["samples"]
    first = asked.first * samples
    renderer = Renderer(tokenizer, task.view, end_ids(model, tokenizer))
    engine = RolloutEngine(model)
    sampling = {
        name: settings[name]
        for name in ("temperature", "sampling", "max_completion_tokens")
        if name in settings
    }

    def write(prompts: list[list[int]], numbers: list[int], turn: int) -> Written:
        completions = complete(
            model,
            tokenizer,
            prompts,
            numbers=[first + number for number in numbers],
            engine=engine,
            seed=settings["seed"] + turn,
            batch_size=asked.at_once(model, prompts),
            **sampling,
        )
        return Written([list(completion.ids) for completion in completions])

    episode_rows = [row for row in rows for _ in range(samples)]
    asked.progress(0, len(episode_rows))
    episodes = rollout_episodes(
        task,
        episode_rows,
        renderer,
        task.world(),
        write,
        max_completion_tokens=settings["max_completion_tokens"],
        context=context_length(model),
        progress=asked.progress,
    )
    completions = []
    for episode in episodes:
        tokens = sum(len(turn.completion_ids) for turn in episode.turns)
        cut_off = any(turn.cut_off for turn in episode.turns)
        completions.append(Completion(conversation(episode), tokens, cut_off))
    prompts = [tokenizer.decode(episode.turns[0].prompt_ids) for episode in episodes[::samples]]
    return Played(
        task,
        list(rows),
        prompts,
        completions,
        samples,
        settings,
        episodes,
    )


def conversation(episode: Episode) -> str:
    """An episode as text: the observations, the completions, and the environment's last observation.

    >>> conversation(Episode({}, []))
    ''
    """
    lines = []
    for turn in episode.turns:
        lines += [turn.observation, f"> {turn.completion.strip()}"]
    if episode.turns:
        lines.append(episode.turns[-1].result)
    return "\n".join(lines)
