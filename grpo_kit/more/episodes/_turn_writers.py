"""Who writes the completions of a turn: transformers' generate, or the kit's engine, which keeps what it has read.

A writer is a context manager around one rollout: writer(model, tokenizer, config, numbers) gives
write(prompts, episodes, turn) -> Written. EpisodeSample enters it once a rollout and calls write once a turn.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from typing import Any, NamedTuple

import torch

from grpo_kit.engine.fast import EngineSample, OrPlainly
from grpo_kit.loop.config import Config, StepNumbers
from grpo_kit.loop.generate import complete_prompts, generation_config
from grpo_kit.loop.padded_update import autocast
from grpo_kit.models.token_lists import end_ids


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

    def write(prompts: list[list[int]], episodes: list[int], turn: int) -> Written:
        return Written(complete_prompts(model, tokenizer, prompts, config, numbers))

    yield write


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
