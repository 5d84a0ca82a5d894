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
from dataclasses import replace
from typing import Any, NamedTuple

import torch

from grpo_kit._support import cuda
from grpo_kit.engine.fast import EngineSample, OrPlainly, Seams, fast
from grpo_kit.loop.config import Config, StepNumbers
from grpo_kit.loop.generate import complete_prompts, generation_config
from grpo_kit.loop.padded_update import autocast
from grpo_kit.loop.step_batch import Batch
from grpo_kit.models._model_facts import context_length
from grpo_kit.models.token_lists import end_ids
from grpo_kit.more.episodes._turn_advantages import episode_measures, turn_advantages
from grpo_kit.more.episodes.environment import PART, VectorEnv
from grpo_kit.more.episodes.observation import Renderer
from grpo_kit.more.episodes.rollout_episodes import Episode, rollout_episodes
from grpo_kit.more.episodes.template_audit import audit_turns


class Written(NamedTuple):
    """The completions of a turn, one entry a prompt, the end token included.

    logprobs, entropies: one number a token, in nats, at the step's temperature; None where the writer has none.
    """

    completion_ids: list[list[int]]
    logprobs: list[list[float]] | None = None
    entropies: list[list[float]] | None = None


Write = Callable[[list[list[int]], list[int], int], Written]
"""write(prompts, episodes, turn): prompts by their tokens; episodes, the number of each one's; turn, counted from 1."""
Writer = Callable[[Any, Any, Config, StepNumbers], AbstractContextManager[Write]]


@contextmanager
def plain_turns(model: Any, tokenizer: Any, config: Config, numbers: StepNumbers) -> Iterator[Write]:
    """Turns by transformers' generate, each prompt computed from its first token. It plays any causal model."""

    yield lambda prompts, episodes, turn: _plainly(model, tokenizer, config, numbers, prompts, episodes)


class EngineTurns:
    """Turns by the engine of an EngineSample. On a CPU a turn goes on from the keys and values of the one before.

    A rollout begins without keys of an earlier one: it computes the same whatever was sampled before.
    may_fail: on a card that nobody has tried turns are written plainly from the engine's first failure on.
    """

    def __init__(self, sample: EngineSample, *, may_fail: bool = False) -> None:
        self.sample = sample
        self._turn = OrPlainly(self._by_engine, _plainly, "engine") if may_fail else self._by_engine

    @contextmanager
    def __call__(self, model: Any, tokenizer: Any, config: Config, numbers: StepNumbers) -> Iterator[Write]:
        """The rollout's write. Afterwards the engine gives its memory back, unless graphs may stay on a card."""
        read: list[Sequence[int]] = []
        written: list[list[int]] = []

        def write(prompts: list[list[int]], episodes: list[int], turn: int) -> Written:
            made = self._turn(model, tokenizer, config, numbers, prompts, episodes)
            read.extend(map(tuple, prompts))
            written.extend(made.completion_ids)
            return made

        stays, engine = False, self.sample.engine
        try:
            yield write
            # On a CPU the engine holds keys of every prompt by now, of weights that are about to change.
            cuda = next(model.parameters()).device.type == "cuda"
            stays = cuda and self.sample.may_stay(engine, read, written)
        finally:
            if not stays:
                engine.release()

    def _by_engine(self, model, tokenizer, config, numbers, prompts, episodes) -> Written:  # noqa: ANN001
        how = generation_config(tokenizer, end_ids(model, tokenizer), config, numbers)
        before = numbers.first * config.group_size  # other processes' episodes have draws of their own
        with autocast(config, next(model.parameters()).device):
            made = self.sample.engine.generate(
                prompts,
                how,
                seed=int(torch.randint(2**62, ())),
                rows=[before + i for i in episodes],
                keep=True,
            )
        return Written(made.completion_ids, made.policy_logprobs, made.entropies)


def _plainly(model, tokenizer, config, numbers, prompts, episodes) -> Written:  # noqa: ANN001
    return Written(complete_prompts(model, tokenizer, prompts, config, numbers))


class _Stage(NamedTuple):
    """What rollouts of one task share."""

    given: Any  # the EpisodeTask as the loop has it
    task: Any  # the same, with the completion length of the run
    world: VectorEnv
    renderer: Renderer


class EpisodeSample:
    """Called as `generate` is: config.group_size episodes of each row, all at once, turn by turn.

    writer: who writes the completions of a turn, plain_turns or EngineTurns.
    config.credit: what a turn is credited with. "episode": the episode's advantage in its group (rewards summed).
    "return": what was earned from that turn on, against the other episodes' at that turn. "state": the episode's
    advantage, plus that of the return among turns of the group with the same prompt (GiGPO, arXiv:2505.10978).
    config.discount: of later rewards, a turn, in (0, 1]; for "return" and "state".
    Everything else is the task's (environment, view, max_turns, success, seconds) or the config's.
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
        self._check(task, config)
        stage = self._set_up(tokenizer, task, config)
        stage.renderer.ends = frozenset(end_ids(model, tokenizer))
        rows = [row for row in rows for _ in range(config.group_size)]  # (B * G), one an episode
        entropies: dict[tuple[int, int], list[float]] = {}  # by episode and turn
        with self.writer(model, tokenizer, config, numbers) as write:

            def complete(prompts: list[list[int]], who: list[int], turn: int) -> list[tuple[list[int], Any]]:
                ids, logprobs, nats = write(prompts, who, turn)
                entropies.update({(i, turn): e for i, e in zip(who, nats or (), strict=nats is not None)})
                return list(zip(ids, logprobs or [None] * len(ids), strict=True))

            episodes = rollout_episodes(
                stage.task, rows, stage.renderer, stage.world, complete, context=context_length(model)
            )
        credits = turn_advantages(
            episodes, config.group_size, credit=config.credit, discount=config.discount, scale=config.scale
        )
        batch = turns_of(episodes, config.group_size, task.view.prefill)
        batch.advantages = [advantage for line in credits for advantage in line]
        order = zip(batch.extra["episode"], batch.extra["turn"], strict=True)
        batch.entropies = [entropies[key] for key in order] if len(entropies) == len(batch) else None
        return batch

    def measures(self, batch: Batch, task: Any) -> dict[str, float]:
        """Numbers by episode for the step's line; see episode_measures."""
        return episode_measures(batch, success=task.success, chat=task.view.chat)

    def _check(self, task: Any, config: Config) -> None:
        if not hasattr(task, "world"):
            raise ValueError(
                f"task={task!r:.200} is a {type(task).__name__}; EpisodeSample plays an EpisodeTask"
            )
        if config.credit == "episode" and config.discount != 1:
            raise ValueError(
                f"discount={config.discount!r} is not used by credit='episode'; use credit='return' or 'state'"
            )
        if config.reward_weights not in (None, [1.0]):
            raise ValueError(
                f"reward_weights={config.reward_weights!r}: the environment's is the one reward, taken as it is; leave "
                "them out"
            )

    def _set_up(self, tokenizer: Any, task: Any, config: Config) -> _Stage:
        """World and renderer of the task, made once: an environment may be slow to make."""
        limit = config.max_completion_tokens or task.max_completion_tokens
        last = self._stage
        if last is None or last.given is not task or last.renderer.tokenizer is not tokenizer:
            _warn_of_dropped_thoughts(tokenizer, task)
            last = _Stage(task, task, task.world(), Renderer(tokenizer, task.view))
        if last.task.max_completion_tokens != limit:
            last = last._replace(task=replace(task, max_completion_tokens=limit))
        self._stage = last
        return last


def turns_of(episodes: Sequence[Episode], group_size: int, prefill: str = "") -> Batch:
    """The turns of finished episodes as a Batch, without advantages. Episodes of a group are adjacent."""
    flat = [(i, t, e, turn) for i, e in enumerate(episodes) for t, turn in enumerate(e.turns, start=1)]
    turns = [turn for *_, turn in flat]
    totals = [float(episode.total) for _, _, episode, _ in flat]
    logprobs = [turn.logprobs for turn in turns]
    return Batch(
        rows=[episode.row for _, _, episode, _ in flat],
        groups=[i // group_size for i, *_ in flat],
        prompt_ids=[turn.prompt_ids for turn in turns],
        completion_ids=[turn.completion_ids for turn in turns],
        completions=[turn.completion for turn in turns],
        cut_off=[turn.cut_off for turn in turns],
        sampler_logprobs=None if None in logprobs else logprobs,
        parts={PART: totals},
        rewards=list(totals),
        extra={
            "prefill": [prefill] * len(flat),
            "episode": [i for i, *_ in flat],
            "turn": [t for _, t, _, _ in flat],
            "observation": [turn.observation for turn in turns],
            "result": [turn.result for turn in turns],
            "turn_reward": [turn.reward for turn in turns],
            "invalid": [turn.invalid for turn in turns],
            "done": [episode.done and t == len(episode.turns) for _, t, episode, _ in flat],
        },
    )


def fast_episodes(model: Any, config: Config) -> Seams:
    """`fast` for tasks of several turns: the engine and the packed update, or the plain ones for an unknown model.

    >>> seams = fast_episodes(model, config)  # doctest: +SKIP
    >>> GRPOTrainer(model, task, config, sample=seams.sample, update=seams.update, ...)  # doctest: +SKIP
    """
    seams = fast(model, config)
    engine = getattr(seams.sample, "engine", None)  # an EngineSample's, on a card one that gives way
    may_fail = cuda.may_fail(next(model.parameters()).device)
    writer = plain_turns if engine is None else EngineTurns(seams.sample, may_fail=may_fail)
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
