"""The trainers that are compared. All train the same weights on the same work; what differs is said at each arm.

On CUDA `kit` has been run, TRL's arms have not to their end.
"""

from __future__ import annotations

import copy
import gc
import importlib.util
import tempfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch

from benchmarks.step.forcing import forced_tokens
from benchmarks.step.phases import Step, Watch
from benchmarks.step.setup import TINY_RATE, Setup
from grpo_kit.engine.fast import fast
from grpo_kit.engine.packed_update import PackedUpdate
from grpo_kit.loop import Batch, Config, Loop
from grpo_kit.loop.batch import generate
from grpo_kit.loop.padded_update import PaddedUpdate
from grpo_kit.loop.protocols import Hook
from grpo_kit.models.token_lists import why_not_padded


def cannot_run(arm: str) -> str | None:
    """Why the arm cannot run here, or None."""
    return (
        "trl is not installed"
        if arm in OF_TRL and importlib.util.find_spec("trl") is None
        else None
    )


def measure(arm: str, setup: Setup, say: Callable[[str], None] = lambda text: None) -> Step:
    """One step of a fresh trainer of that arm on a fresh copy of the weights. say: told of each part as it ends.

    Raises torch.cuda.OutOfMemoryError when it does not fit.
    """
    with tempfile.TemporaryDirectory() as folder:
        torch.manual_seed(setup.workload.seed)
        model = copy.deepcopy(setup.model).to("cuda" if setup.cuda else "cpu")
        trainer = ARMS[arm](setup, model, folder)
        if isinstance(trainer, Loop):
            step = measure_loop(trainer, setup, say)
        else:
            from benchmarks.step.trl_arms import measure_trl

            step = measure_trl(trainer, setup, say)
    del trainer, model
    release(setup.cuda)
    return step


def release(cuda: bool) -> None:
    """Give back what an arm has left behind, after it failed too."""
    gc.collect()
    if cuda:
        torch.cuda.empty_cache()


# ---- the kit's loop ----------------------------------------------------------------------------------------------


def kit(
    setup: Setup, model: Any, folder: str, *, engine: bool = True, packed: bool = True
) -> Loop:
    """The kit's loop. engine: its rollouts, else transformers' generate. packed: its update, else padded forwards.

    Completions of a group without a signal are left out of the update.
    """
    work = setup.workload
    rows = [
        {"question": prompt, "number": number, "flat": flat}
        for number, (prompt, flat) in enumerate(zip(work.prompts, work.flat, strict=True))
    ]
    task = SimpleNamespace(
        name="work", train=rows, held_out=[], rewards=[work], reward_weights=[1.0], prefill="", system=None,
        max_completion_tokens=work.max_completion, render=lambda tokenizer, rows: [r["question"] for r in rows],
        examples=(), answers_are="anything", answer_tag=None, paid_parts=(), file=None,
        best_constant_parts=lambda: None,
    )  # fmt: skip
    micro_batch, checkpointing = setup.tuned
    config = Config(
        steps=setup.warmup + 1, prompts_per_step=len(rows), group_size=work.group_size, learning_rate=TINY_RATE,
        warmup=0, optimizer="adamw", seed=work.seed, autocast="bfloat16" if setup.bf16 else "none",
        micro_batch=micro_batch, gradient_checkpointing=checkpointing,
    )  # fmt: skip
    seams = fast(model, config)
    sample = seams.sample if engine else generate
    # asked once a model, by the first step that pads: not a part of a step
    for gradient in (False, True):
        why_not_padded(model, gradient=gradient)

    def in_order(model: Any, tokenizer: Any, task: Any, _: Any, *more: Any) -> Batch:
        return sample(model, tokenizer, task, rows, *more)

    return Loop(
        model, task, config, tokenizer=setup.tokenizer, folder=Path(folder) / "run", sample=in_order,
        update=seams.update if packed else PaddedUpdate(config),
        hooks=getattr(seams, "hooks", ()),  # of an older kit
    )  # fmt: skip


def measure_loop(trainer: Loop, setup: Setup, say: Callable[[str], None]) -> Step:
    """The step of a fresh trainer that follows setup.warmup steps."""
    watch = LoopWatch(trainer, say=say)
    try:
        with heads(watch), forced_tokens(trainer.model, setup.workload, watch):
            trainer.train()
    finally:
        watch.count.close()
    return watch.step


class LoopWatch(Watch, Hook):
    """Measures the last step of a loop."""

    def __init__(self, trainer: Loop, **options: Any) -> None:
        super().__init__(trainer.model, cuda=trainer.device.type == "cuda", **options)
        (reward,) = trainer.task.rewards
        trainer.task.rewards = [self.timed(reward, "reward")]
        trainer.sample = self.sampling(trainer.sample)
        trainer.update.logprobs = self.timed(trainer.update.logprobs, "log-probs")
        trainer.update.gradients = self.timed(trainer.update.gradients, "forward-backward")
        inner = self.timed(trainer._optimizer_step, "optimizer")

        def optimizer_step(*args: Any) -> float:
            self.ended("forward-backward")
            return inner(*args)

        trainer._optimizer_step = optimizer_step
        trainer.hooks.insert(0, self)

    def before_step(self, trainer: Loop) -> None:
        """The last step is the one."""
        if trainer.step == trainer.config.steps - 1:
            self.measure()

    def after_step(self, trainer: Loop, row: dict[str, Any], batch: Batch) -> None:
        """It is written."""
        if trainer.step < trainer.config.steps:
            return
        self.step.completion_ids, (self.step.rewards,) = (
            batch.completion_ids,
            batch.parts.values(),
        )
        self.finish(loss=row["loss"], grad_norm=row["grad_norm"])


@contextmanager
def heads(watch: Watch) -> Iterator[None]:
    """Count what goes into the packed update's head inside."""
    inner = PackedUpdate._head

    def head(self: PackedUpdate, base: Any, hidden: torch.Tensor, *args: Any) -> Any:
        watch.count.head(len(hidden))
        return inner(self, base, hidden, *args)

    PackedUpdate._head = head
    try:
        yield
    finally:
        PackedUpdate._head = inner


def _of_trl(name: str) -> Callable[..., Any]:
    def make(setup: Setup, model: Any, folder: str) -> Any:
        from benchmarks.step import trl_arms

        return getattr(trl_arms, name)(setup, model, folder)

    return make


ARMS = {
    "trl-hf": _of_trl("trl_hf"),
    "trl-hf-tuned": _of_trl("trl_hf_tuned"),
    "kit": kit,
    "kit-before": kit,  # with the kit of another checkout
    "kit-rollout": partial(
        kit, packed=False
    ),  # what the engine alone brings; the update's micro-batch is trl's
    "kit-update": partial(kit, engine=False),  # what packing alone brings
}
OF_TRL = {"trl-hf", "trl-hf-tuned"}
