"""EpisodeSample: the loop's `sample` for tasks of several turns. It plays episodes and gives a Batch of their turns.

A turn is an entry of the batch, with exactly the tokens that it was made of, the total reward of its episode, and its
own advantage. The loop does with turns what it does with completions: a loss that takes a mean over rows takes it over
turns (grpo, sapo, luspo; dr_grpo divides by turns x max_completion_tokens), one that divides by tokens by all tokens of
the step (dapo, cispo, vespo, bnpo). What turns share, such as a worked example, the packed update computes once.

A writer makes the completions of a turn: transformers' generate, or the kit's engine, which keeps what it has read.
A writer is a context manager around one rollout: writer(model, tokenizer, config, numbers) gives
write(prompts, episodes, turn) -> Written. EpisodeSample enters it once a rollout and calls write once a turn.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from itertools import chain
from typing import Any, NamedTuple

import torch

from grpo_kit._support import cuda
from grpo_kit.engine.fast import EngineSample, OrPlainly, Seams, fast
from grpo_kit.loop.batch import Batch, complete_prompts, generation_config
from grpo_kit.loop.config import Config, StepNumbers
from grpo_kit.loop.padded_update import autocast
from grpo_kit.models._model_facts import context_length, end_ids
from grpo_kit.more.episodes._turn_advantages import episode_measures, turn_advantages
from grpo_kit.more.episodes.environment import PART, VectorEnv
from grpo_kit.more.episodes.observation import Renderer
from grpo_kit.more.episodes.rollout_episodes import (
    Episode,
    Turn,
    Write,
    Written,
    rollout_episodes,
)
from grpo_kit.more.episodes.template_audit import audit_turns

Writer = Callable[[Any, Any, Config, StepNumbers], AbstractContextManager[Write]]


@contextmanager
def plain_turns(
    model: Any,
    tokenizer: Any,
    config: Config,
    numbers: StepNumbers,
) -> Iterator[Write]:
    """Turns by transformers' generate, each prompt computed from its first token. It plays any causal model."""
    yield lambda prompts, episodes, turn: _plain_turn(
        model, tokenizer, config, numbers, prompts, episodes
    )


class EngineTurns:
    """Turns by the engine of an EngineSample. On a CPU a turn goes on from the keys and values of the one before.

    A rollout begins without keys of an earlier one: it computes the same whatever was sampled before.
    may_fail: on a card that nobody has tried turns are written plainly from the engine's first failure on.
    """

    def __init__(self, sample: EngineSample, *, may_fail: bool = False) -> None:
        self.sample = sample
        self._turn = self._engine_turn
        if may_fail:
            self._turn = OrPlainly(self._engine_turn, _plain_turn, "engine")

    @contextmanager
    def __call__(
        self,
        model: Any,
        tokenizer: Any,
        config: Config,
        numbers: StepNumbers,
    ) -> Iterator[Write]:
        """The rollout's write. Afterwards the engine gives its memory back, unless graphs may stay on a card."""
        all_prompts: list[Sequence[int]] = []
        all_completions: list[list[int]] = []

        def write(prompts: list[list[int]], episodes: list[int], turn: int) -> Written:
            turn_outputs = self._turn(model, tokenizer, config, numbers, prompts, episodes)
            all_prompts.extend(map(tuple, prompts))
            all_completions.extend(turn_outputs.completion_ids)
            return turn_outputs

        stays, engine = False, self.sample.engine
        try:
            yield write
            # On a CPU the engine holds keys of every prompt by now, of weights that are about to change.
            on_card = next(model.parameters()).device.type == "cuda"
            stays = on_card and self.sample.may_stay(engine, all_prompts, all_completions)
        finally:
            if not stays:
                engine.release()

    def _engine_turn(self, model, tokenizer, config, numbers, prompts, episodes) -> Written:  # noqa: ANN001
        settings = generation_config(tokenizer, end_ids(model, tokenizer), config, numbers)
        # other processes' episodes have draws of their own
        first = numbers.first * config.group_size
        with autocast(config, next(model.parameters()).device):
            rollout = self.sample.engine.generate(
                prompts,
                settings,
                seed=int(torch.randint(2**62, ())),
                rows=[first + i for i in episodes],
                keep=True,
            )
        return Written(rollout.completion_ids, rollout.policy_logprobs, rollout.entropies)


def _plain_turn(model, tokenizer, config, numbers, prompts, episodes) -> Written:  # noqa: ANN001
    return Written(complete_prompts(model, tokenizer, prompts, config, numbers))


class _Stage(NamedTuple):
    """The environments and prompts of all rollouts of one task."""

    task: Any
    world: VectorEnv
    renderer: Renderer


class EpisodeSample:
    """Called as `generate` is: config.group_size episodes of each row, all at once, turn by turn.

    writer: makes the completions of a turn, plain_turns or EngineTurns.
    Everything else is the task's (environment, view, max_turns, success, credit, seconds) or the config's.
    With config.dynamic_sampling, a group has a signal where any of its turns has an advantage. With scale="batch", the
    spread is that of all episodes of one rollout.

    A step's episodes are a function of (weights, config.seed, step): each turn's sampler is seeded from torch's
    generator, which the loop seeds, and an environment's randomness derives from its row (see Environment).
    Raises ValueError for what cannot be; EpisodeError, naming environment, row and turn, for an environment that raises
    or breaks its contract, and for a prompt that leaves no room for a completion.

    >>> GRPOTrainer(model, episodes.grid(), config, sample=EpisodeSample(), ...).train()  # doctest: +SKIP
    """

    phases = {
        VectorEnv.reset.__code__: "an environment's reset",
        VectorEnv.step.__code__: "an environment's step",
    }

    def __init__(self, writer: Writer = plain_turns) -> None:
        self.writer = writer
        self._stage: _Stage | None = None

    def __call__(
        self,
        model: Any,
        tokenizer: Any,
        task: Any,
        rows: Sequence[dict[str, Any]],
        config: Config,
        numbers: StepNumbers,
    ) -> Batch:
        """The turns of B x group_size episodes, in order: those of an episode adjacent, those of a row's episodes too.

        rewards: the sum of its episode's. extra: the columns prefill, episode (its number in this rollout), turn (from
        1), observation, result (the next observation), turn_reward, invalid, done (this turn ended the episode).
        """
        if not hasattr(task, "world"):
            raise ValueError(
                f"task={task!r:.200} is a {type(task).__name__}; EpisodeSample plays an EpisodeTask"
            )
        if config.reward_weights not in (None, [1.0]):
            raise ValueError(
                f"reward_weights={config.reward_weights!r}: the environment's is the one reward, taken as it is; leave "
                "them out"
            )
        stage = self._set_up(tokenizer, task)
        stage.renderer.ends = frozenset(end_ids(model, tokenizer))
        # (B * G), one an episode
        rows = [row for row in rows for _ in range(config.group_size)]
        with self.writer(model, tokenizer, config, numbers) as write:
            episodes = rollout_episodes(
                task,
                rows,
                stage.renderer,
                stage.world,
                write,
                max_completion_tokens=config.max_completion_tokens
                or task.max_completion_tokens,
                context=context_length(model),
            )
        advantages = turn_advantages(
            episodes,
            config.group_size,
            credit=task.credit,
            discount=task.discount,
            scale=config.scale,
        )
        batch = turns_of(episodes, config.group_size, task.view.prefill)
        batch.advantages = list(chain.from_iterable(advantages))
        return batch

    def measures(self, batch: Batch, task: Any) -> dict[str, float]:
        """Numbers by episode for the step's line; see episode_measures."""
        return episode_measures(batch, success=task.success, chat=task.view.chat)

    def _set_up(self, tokenizer: Any, task: Any) -> _Stage:
        """World and renderer of the task, made once: an environment may be slow to make."""
        stage = self._stage
        if stage is None or stage.task is not task or stage.renderer.tokenizer is not tokenizer:
            _warn_of_dropped_thoughts(tokenizer, task)
            self._stage = stage = _Stage(task, task.world(), Renderer(tokenizer, task.view))
        return stage


def turns_of(episodes: Sequence[Episode], group_size: int, prefill: str = "") -> Batch:
    """The turns of finished episodes as a Batch, without advantages. Episodes of a group are adjacent."""
    turns: list[Turn] = []
    owners: list[int] = []  # each turn's episode
    numbers: list[int] = []
    is_end: list[bool] = []
    for index, episode in enumerate(episodes):
        count = len(episode.turns)
        turns += episode.turns
        owners += [index] * count
        numbers += range(1, count + 1)
        is_end += [False] * (count - 1) + [episode.done]
    totals = [float(episodes[owner].total) for owner in owners]
    logprobs = [turn.logprobs for turn in turns]
    entropies = [turn.entropies for turn in turns]
    return Batch(
        rows=[episodes[owner].row for owner in owners],
        groups=[owner // group_size for owner in owners],
        prompt_ids=[turn.prompt_ids for turn in turns],
        completion_ids=[turn.completion_ids for turn in turns],
        completions=[turn.completion for turn in turns],
        cut_off=[turn.cut_off for turn in turns],
        sampler_logprobs=None if None in logprobs else logprobs,
        entropies=None if None in entropies else entropies,
        parts={PART: totals},
        rewards=list(totals),
        extra={
            "prefill": [prefill] * len(turns),
            "episode": owners,
            "turn": numbers,
            "observation": [turn.observation for turn in turns],
            "result": [turn.result for turn in turns],
            "turn_reward": [turn.reward for turn in turns],
            "invalid": [turn.invalid for turn in turns],
            "done": is_end,
        },
    )


def fast_episodes(model: Any, config: Config) -> Seams:
    """`fast` for tasks of several turns: the engine and the packed update, or the plain ones for an unknown model.

    >>> seams = fast_episodes(model, config)  # doctest: +SKIP
    >>> GRPOTrainer(model, task, config, sample=seams.sample, update=seams.update, ...)  # doctest: +SKIP
    """
    seams = fast(model, config)
    writer: Writer = plain_turns
    if hasattr(seams.sample, "engine"):  # an EngineSample, on a card one that gives way
        writer = EngineTurns(
            seams.sample, may_fail=cuda.may_fail(next(model.parameters()).device)
        )
    return seams._replace(sample=EpisodeSample(writer))


def _warn_of_dropped_thoughts(tokenizer: Any, task: Any) -> None:
    """Warns where training would read what the served model never does."""
    if task.view.thoughts != "kept":
        return
    if audit_turns(tokenizer).table.loc["a user turn", "in_text"] == "dropped":
        warnings.warn(
            "View(thoughts='kept'), but the chat template drops the thoughts of earlier turns: the served model will "
            "never read the prompts that this run trains on. thoughts='as served' trains on what is served; "
            "kit.episodes.audit_turns(tokenizer) says more.",
            stacklevel=4,
        )
