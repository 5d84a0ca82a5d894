"""EpisodeSample: the loop's `sample` for tasks of several turns. It plays episodes and gives a Batch of their turns.

A turn is an entry of the batch, with exactly the tokens that it was made of, the total reward of its episode, and its
own advantage. The loop does with turns what it does with completions: a loss that takes a mean over rows takes it over
turns (grpo, sapo, luspo; dr_grpo divides by turns x max_completion_tokens), one that divides by tokens by all tokens of
the step (dapo, cispo, vespo, bnpo). What turns share, such as a worked example, the packed update computes once.
"""

from __future__ import annotations

import warnings
from collections.abc import Sequence
from dataclasses import replace
from statistics import fmean, stdev
from typing import Any, NamedTuple

from grpo_kit._support import cuda
from grpo_kit.engine.fast import Seams, fast
from grpo_kit.engine.tree import common_length
from grpo_kit.loop.config import Config, StepNumbers
from grpo_kit.loop.step_batch import Batch
from grpo_kit.models._context import context_length
from grpo_kit.models.token_lists import end_ids
from grpo_kit.more.episodes._turn_advantages import turn_advantages
from grpo_kit.more.episodes._turn_writers import EngineTurns, Writer, plain_turns
from grpo_kit.more.episodes.environment import PART, VectorEnv
from grpo_kit.more.episodes.observation import Renderer
from grpo_kit.more.episodes.rollout_episodes import Episode, rollout_episodes
from grpo_kit.more.episodes.template_audit import audit_turns


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


# ---- the metrics of a step: each episode counts once, however many turns it took ----------------------------------

_SAME = 1e-9  # sums of equal rewards may differ in their last bits


def episode_measures(batch: Batch, *, success: float, chat: bool) -> dict[str, float]:
    """reward, reward/<part>, reward_std and frac_reward_zero_std over episodes, and episodes/*.

    episodes/turns: turns an episode. Shares of episodes: episodes/success, whose rewards sum to `success` at least;
    episodes/unfinished, which the turn limit ended. Shares of turns: episodes/invalid, episodes/cut_off. Shares of
    turns behind another: episodes/repeated, the same completion as in the turn before with the same result;
    with chat episodes/forked, whose prompt does not go on from the turn before. With chat episodes/reread: the mean
    share of a later prompt that was read before and is computed anew.
    batch: turns, as EpisodeSample makes them. An episode is known by its group and its number.
    """
    found: dict[tuple[int, int], list[int]] = {}
    for place, key in enumerate(zip(batch.groups, batch.extra["episode"], strict=True)):
        found.setdefault(key, []).append(place)
    totals = [batch.rewards[places[0]] for places in found.values()]
    groups: dict[int, list[float]] = {}
    for (group, _), total in zip(found, totals, strict=True):
        groups.setdefault(group, []).append(total)
    pairs = [pair for places in found.values() for pair in zip(places, places[1:], strict=False)]
    said = list(zip(batch.completions, batch.extra["result"], strict=True))
    made = {
        "reward": fmean(totals),
        **{
            f"reward/{name}": fmean(p[places[0]] for places in found.values())
            for name, p in batch.parts.items()
        },
        "reward_std": fmean(stdev(some) if len(some) > 1 else 0.0 for some in groups.values()),
        "frac_reward_zero_std": fmean(float(max(some) - min(some) < _SAME) for some in groups.values()),
        "episodes/turns": len(batch) / len(found),
        "episodes/success": fmean(float(total >= success) for total in totals),
        "episodes/unfinished": fmean(float(not batch.extra["done"][places[-1]]) for places in found.values()),
        "episodes/invalid": fmean(map(float, batch.extra["invalid"])),
        "episodes/cut_off": fmean(map(float, batch.cut_off)),
        "episodes/repeated": fmean([float(said[a] == said[b]) for a, b in pairs] or [0.0]),
    }
    if chat:
        made["episodes/forked"] = fmean([float(not _goes_on(batch, a, b)) for a, b in pairs] or [0.0])
        made["episodes/reread"] = fmean([_reread(batch, a, b) for a, b in pairs] or [0.0])
    return made


def _goes_on(batch: Batch, turn: int, later: int) -> bool:
    """Does the later prompt begin with the turn's tokens? The last of them may be the end."""
    so_far = [*batch.prompt_ids[turn], *batch.completion_ids[turn][:-1]]
    return batch.prompt_ids[later][: len(so_far)] == so_far


def _reread(batch: Batch, turn: int, later: int) -> float:
    """What the turn had read and the later prompt does not begin with, as a share of that prompt, at most 1."""
    before, prompt = batch.prompt_ids[turn], batch.prompt_ids[later]
    return min(1.0, (len(before) - common_length(before, prompt)) / len(prompt))
