"""GRPO in one loop that a student reads from top to bottom; every other room hangs on it.

grpo_config.py    Config: every number of a run, with its unit; StepNumbers: what they are at one step
step_batch.py     Batch: what flows through a step
seeds.py          the prompts and random numbers of a step, by (seed, step)
generate.py       generate: rows -> completions, by transformers' generate
score.py          completions -> rewards -> advantages
policy_loss.py    PolicyLoss: log-probabilities -> the loss, by grpo_kit.objectives
padded_update.py  PaddedUpdate: the gradient of a batch, by padded forwards
grpo.py           GRPOTrainer: the loop itself
checkpoint.py     saving a run after a step, and going on from there

This is the order in which data flows, and a good order to read them in.
"""

from typing import TYPE_CHECKING

from grpo_kit.lazy import lazy

if TYPE_CHECKING:
    from grpo_kit.loop.grpo import GRPOTrainer
    from grpo_kit.loop.grpo_config import Config
    from grpo_kit.loop.step_batch import Batch

__all__ = lazy(__name__)
