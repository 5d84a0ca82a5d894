"""The plan's arms: settings of grpo_kit.more.lab, by name, and what two of them differ in.

All on SmolLM2-135M-Instruct, full fine-tuning, at the main job's rate. FAST: 20 steps, while it learns, for outcomes
over the run; 64 held-out rows, which decide nothing. SETTLED: 30 steps and 256 held-out rows, for accuracy: of 128 rows
the rows' own noise alone would be as wide as five points.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from functools import cache, partial
from typing import Any

import torch

from benchmarks.advice.arms import cold_start, negative, old
from benchmarks.advice.plan import tasks
from grpo_kit import cosine, exponential, linear
from grpo_kit.loop import Config
from grpo_kit.loop.batch import Batch, padded
from grpo_kit.loop.config import StepNumbers
from grpo_kit.loop.protocols import Sampler
from grpo_kit.more.lab._arm import Arm, arm_of, digest
from grpo_kit.tasks import Task

# raise it when the code behind an arm changes: what ran before then counts no more
REVISION = 1
PRESET = "cpu"
FAST: dict[str, Any] = {"steps": 20, "learning_rate": 1e-5, "held_out": 64}
SETTLED = FAST | {"steps": 30, "held_out": 256}
SAMPLED = {"eval_temperatures": (1.0,)}
# in the recorded runs 1e-12, which is refused now
UNTRAINED = {"steps": 1, "learning_rate": 1e-8}
STALE = SETTLED | {"steps": 20}
RARE = FAST | {"task": tasks.RARE, "steps": 24}
NEVER = SETTLED | {"task": tasks.NEVER, "steps": 20}
CODE = FAST | {"task": tasks.CODE, "held_out": 28, "steps": 16}
CODE_SAMPLED = SAMPLED | {"eval_samples": 8}
TWICE = {"loss": "grpo", "epsilon_high": 0.28, "iterations": 2, "steps": 8}


class RoundedSample:
    """A sample by weights rounded to bfloat16, where those that are trained are not.

    recompute: True: old log-probabilities are the trainer's, so that the ratio is 1; False: the sampler's, so that
    rounding is taken for a step that the policy has made.
    """

    def __init__(self, inner: Sampler, *, recompute: bool = True) -> None:
        self.inner, self.recompute = inner, recompute

    def __call__(
        self,
        model: Any,
        tokenizer: Any,
        task: Task,
        rows: Sequence[dict[str, Any]],
        config: Config,
        numbers: StepNumbers,
    ) -> Batch:
        """As the inner sample."""
        with rounded(model):
            batch = self.inner(model, tokenizer, task, rows, config, numbers)
        if not self.recompute:
            batch.old_logprobs = padded(
                batch.sampler_logprobs, batch.width, next(model.parameters()).device
            )
        return batch


@contextmanager
def rounded(model: Any) -> Iterator[None]:
    """Its weights are rounded to bfloat16, in float32 still; its own come back."""
    own = [(p, p.detach().clone()) for p in model.parameters()]
    try:
        for p, _ in own:
            p.data.copy_(p.data.to(torch.bfloat16))
        yield
    finally:
        for p, kept in own:
            p.data.copy_(kept)


ARMS: dict[str, dict[str, Any]] = {
    "fast": FAST,
    "group of 2": FAST | {"prompts_per_step": 16, "group_size": 2},
    "group of 4": FAST | {"prompts_per_step": 8, "group_size": 4},
    "group of 16": FAST | {"prompts_per_step": 2, "group_size": 16},
    "4 x 16": FAST | {"group_size": 16},
    "no warmup": FAST | {"warmup": 0.0},
    "beta 0.04": FAST | {"beta": 0.04},
    "beta 0.001": FAST | {"beta": 0.001},
    "too fast": FAST | {"learning_rate": 1e-4},
    "too fast, beta 0.1": FAST | {"learning_rate": 1e-4, "beta": 0.1},
    "rewards -1 to 1": FAST | negative(tasks.LARGEST),
    "threshold": FAST | {"task": tasks.THRESHOLD},
    "smooth": FAST | {"task": tasks.SMOOTH},
    "prefill": FAST | {"task": tasks.PREFILLED_READ},
    "no prefill": FAST | {"task": tasks.BARE_READ},
    "soft": FAST | {"task": tasks.BARE},
    "binary": FAST | {"task": tasks.BINARY},
    "answer in think tags": FAST | {"task": tasks.TAGGED_THINK},
    "256 tokens": FAST | {"task": tasks.ROOMY},
    "paid for a mention": FAST | {"task": tasks.MENTION},
    "paid for the answer": FAST | {"task": tasks.ANSWER},
    "bf16 sampler": FAST | {"sample": partial(RoundedSample, recompute=False)},
    "bf16 sampler, recomputed": FAST | {"sample": partial(RoundedSample, recompute=True)},
    "rare": RARE,
    "rare, positives x 4": RARE | {"positive_weight": 4.0},
    "rare, positives only": RARE | {"negative_weight": 0.0},
    "rare, resampled": RARE | {"dynamic_sampling": 3},
    "settled": SETTLED | SAMPLED,
    "linear": SETTLED | {"temperature": linear(1.3, 0.7)},
    "cosine": SETTLED | {"temperature": cosine(1.3, 0.7)},
    "exponential": SETTLED | {"temperature": exponential(1.3, 0.7)},
    "temperature 0.4": SETTLED | {"temperature": 0.4},
    "temperature 0.7": SETTLED | SAMPLED | {"temperature": 0.7},
    "temperature 1.3": SETTLED | SAMPLED | {"temperature": 1.3},
    "top-p 0.9": SETTLED | {"top_p": 0.9},
    "2 iterations": SETTLED | {"iterations": 2, "steps": 15},
    "15 steps": SETTLED | {"steps": 15},
    "16 train rows": SETTLED | {"task_options": {"n_train": 16}},
    "64 train rows": SETTLED | {"task_options": {"n_train": 64}},
    "no prefill, settled": SETTLED | {"task": tasks.BARE},
    "SFT first, 22 steps": SETTLED | {"task": tasks.BARE, "prepare": cold_start, "steps": 22},
    "SFT first, 29 steps": SETTLED | {"task": tasks.BARE, "prepare": cold_start, "steps": 29},
    "never right": NEVER,
    "never right, untrained": NEVER | UNTRAINED,
    "sync 1": STALE | old(sync_every=1),
    "sync 5": STALE | old(sync_every=5),
    "sync 10": STALE | old(sync_every=10),
    "sync 10, no weights": STALE | old(sync_every=10, importance_weights=False),
    "newest first": SETTLED | old(buffer="newest", lead=5),
    "oldest first, as young": SETTLED | old(buffer="fifo", lead=1),
    **{f"full, {rate:g}": SETTLED | {"learning_rate": rate} for rate in (5e-6, 1e-5, 2e-5)},
    **{
        f"LoRA, {rate:g}": SETTLED | {"tuning": "lora", "learning_rate": rate}
        for rate in (1e-4, 2e-4, 4e-4)
    },
    "code": CODE | CODE_SAMPLED,
    "code, format only": CODE | CODE_SAMPLED | {"task": tasks.FORMAT_ONLY},
    "code, untrained": CODE | CODE_SAMPLED | UNTRAINED,
    "code, GRPO": CODE | {"loss": "grpo", "epsilon_high": 0.28},
    "code, Dr. GRPO": CODE
    | {"loss": "dr_grpo", "epsilon_high": 0.28, "scale": "group"},  # divided by the spread
    "code, tokens": CODE | TWICE,
    # clipped at 3e-4 and 4e-4, its own
    "code, GSPO": CODE | TWICE | {"loss": "gspo", "epsilon_high": None},
}


def unlike(one: Arm, other: Arm) -> tuple[str, ...]:
    """What two arms differ in that is not one setting: rows, steps, lengths, completions, held-out rows."""
    facts = {
        "train rows": lambda s: digest(s.task.train),
        "held-out rows": lambda s: digest(s.task.held_out),
        "steps": updates,
        "tokens at most": lambda s: s.task.max_completion_tokens,
        "completions": completions,
        "prepared": lambda s: s.prepare,
        "model": lambda s: (s.config.model, s.config.dtype),
    }
    return tuple(name for name, of in facts.items() if of(one) != of(other))


def completions(arm: Arm) -> int:
    """Rollouts of the whole run."""
    return arm.config.steps * arm.config.completions_per_step


def updates(arm: Arm) -> int:
    """Optimizer steps of the whole run, which the plan calls steps."""
    return arm.config.steps * arm.config.iterations


@cache
def resolved(arm: str) -> Arm:
    """The arm in full."""
    return arm_of(PRESET, ARMS[arm])
