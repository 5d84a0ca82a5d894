"""Did the reward do it? The same run without a signal: each group's rewards are shuffled among its completions."""

from __future__ import annotations

import random
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any

from grpo_kit.loop.batch import Batch
from grpo_kit.loop.config import Config, StepNumbers
from grpo_kit.loop.protocols import Sampler, optional
from grpo_kit.loop.score import score


def null(arm: Mapping[str, Any] | None = None) -> dict[str, Any]:
    """The arm with shuffled rewards: the same prompts, seeds, steps and rewards, of which none says what was right.

    What such a run gains, the right reward did not bring. Random rewards have lifted a Qwen by 21 points on MATH-500
    (arXiv:2506.10947), where the training questions may have been known (arXiv:2507.10532).
    Runs that sample again until groups have a signal (dynamic_sampling) do so by the true rewards.

    >>> compare_arms({"trained": {}, "null": null()}, [0, 1, 2], folder="runs/null")  # doctest: +SKIP
    """
    changes = dict(arm or {})
    own_sample = changes.get("sample")
    changes["sample"] = (
        _ShuffledRewards if own_sample is None else partial(_shuffle_behind, sample=own_sample)
    )
    return changes


def _shuffle_behind(inner: Sampler, sample: Callable[[Sampler], Sampler]) -> _ShuffledRewards:
    """Shuffled rewards of the sampler that an arm brings, which is made from the trainer's own."""
    return _ShuffledRewards(sample(inner))


class _ShuffledRewards:
    """A trainer's `sample` whose groups keep their rewards, but not who earned which; `null` gives it to an arm.

    inner: the sampler that makes the completions. None: the one that the trainer would take by itself.
    The order is drawn by the seed and the step, so a resumed run draws the same. Parts of the reward stay as they were
    earned, in the record too.
    """

    def __init__(self, inner: Sampler | None = None) -> None:
        self.inner = inner
        self._reported: dict[str, float] = {}  # by log_metric, in the last call

    def __getattr__(self, name: str) -> Any:
        """All else is the inner sampler's: bits, phases, state."""
        return getattr(vars(self).get("inner"), name)

    def around(self, fast: Sampler) -> _ShuffledRewards:
        """The same by the sampler that the trainer would take by itself, where none was given."""
        return _ShuffledRewards(self.inner or fast)

    def __call__(
        self,
        model: Any,
        tokenizer: Any,
        task: Any,
        rows: Sequence[dict],
        config: Config,
        numbers: StepNumbers,
    ) -> Batch:
        batch = self.inner(model, tokenizer, task, rows, config, numbers)
        if batch.advantages:
            raise ValueError(
                "sample: a sampler that brings advantages, as of episodes, has no rewards to shuffle"
            )
        weights = config.reward_weights or task.reward_weights
        self._reported = score(batch, task, weights, tokenizer)
        batch.rewards = _shuffled_within(
            batch.rewards, batch.groups, f"null {config.seed} {numbers.step}"
        )
        return batch

    def measures(self, batch: Batch, task: Any) -> dict[str, float]:
        """What the rewards reported in this step, and the inner sampler's numbers."""
        return self._reported | optional(self.inner, "measures", {}, batch, task)


def _shuffled_within(rewards: Sequence[Any], groups: Sequence[int], seed: str) -> list[Any]:
    """The rewards, each group's among its completions in an order drawn by the seed.

    >>> sorted(_shuffled_within([1, 2, 3, 9, 8], [0, 0, 0, 1, 1], "seed")[:3])
    [1, 2, 3]
    """
    draw = random.Random(seed)
    shuffled = list(rewards)
    for group in dict.fromkeys(groups):
        places = [place for place, other in enumerate(groups) if other == group]
        sources = draw.sample(places, len(places))
        for place, source in zip(places, sources, strict=True):
            shuffled[place] = rewards[source]
    return shuffled
