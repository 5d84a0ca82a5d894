"""Episodes in evaluation: played, and judged by what their environment paid."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from statistics import fmean
from typing import Any

import pandas as pd

from grpo_kit.engine import RolloutEngine
from grpo_kit.engine.complete import Completion, complete
from grpo_kit.evaluation.generate_and_score import Answers, Request
from grpo_kit.models._model_facts import context_length
from grpo_kit.models.token_lists import end_ids
from grpo_kit.more.episodes.observation import Renderer
from grpo_kit.more.episodes.rollout_episodes import Episode, rollout_episodes
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
        return {part: [episode.total for episode in self.episodes] for part in self.task.paid_parts}

    @cached_property
    def rewards(self) -> Scores:
        return [episode.total for episode in self.episodes]

    def table(self) -> pd.DataFrame:
        """One row an episode: as Answers.table, with turns and done."""
        more = {"turns": [len(e.turns) for e in self.episodes], "done": [e.done for e in self.episodes]}
        return super().table().assign(**more)


def play(task: Any, model: Any, tokenizer: Any, rows: Sequence[dict], asked: Request) -> Played:
    """Episodes of each row of an EpisodeTask, in parallel."""
    if asked.folder is not None:
        raise ValueError(
            f"folder={str(asked.folder)!r}: completions of task {task.name!r} are not kept, they are turns"
        )
    how, samples = asked.settings, asked.settings["samples"]
    first, limit = asked.first * samples, how["max_completion_tokens"]
    renderer = Renderer(tokenizer, task.view, end_ids(model, tokenizer))
    engine = RolloutEngine(model)
    settings = {
        name: how[name] for name in ("temperature", "sampling", "max_completion_tokens") if name in how
    }

    def write(prompts: list[list[int]], who: list[int], turn: int) -> list[tuple[list[int], None]]:
        made = complete(
            model, tokenizer, prompts, numbers=[first + i for i in who], engine=engine, seed=how["seed"] + turn,
            batch_size=asked.at_once(model, prompts), **settings,
        )  # fmt: skip
        return [(list(one.ids), None) for one in made]

    played_rows = [row for row in rows for _ in range(samples)]
    asked.progress(0, len(played_rows))
    episodes = rollout_episodes(
        replace(task, max_completion_tokens=limit), played_rows, renderer, task.world(), write,
        context=context_length(model), progress=asked.progress,
    )  # fmt: skip
    completions = [
        Completion(
            conversation(episode),
            sum(len(turn.completion_ids) for turn in episode.turns),
            any(turn.cut_off for turn in episode.turns),
        )
        for episode in episodes
    ]
    prompts = [tokenizer.decode(episodes[i].turns[0].prompt_ids) for i in range(0, len(episodes), samples)]
    return Played(task, list(rows), prompts, completions, samples, how, episodes)


def conversation(episode: Episode) -> str:
    """An episode as text: the observations, the completions, and the environment's last observation.

    >>> conversation(Episode({}, []))
    ''
    """
    lines = [line for turn in episode.turns for line in (turn.observation, f"> {turn.completion.strip()}")]
    return "\n".join([*lines, *[turn.result for turn in episode.turns[-1:]]])
