"""What the kit reaches into trl for, beyond the methods its trainer overrides; all of it named in the tests."""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
import trl.trainer.grpo_trainer as trl_grpo
import trl.trainer.utils as trl_utils
from peft import PeftModel

from grpo_kit.engine.cpu_lm_head import KeptHead, embed
from grpo_kit.models import base_model
from grpo_kit.rewards.scoring import totals
from grpo_kit.rollout.tree_attention import TreePlan

LOSS_STATE = ("entropy_coef", "_last_world_entropy", "_entropy_window_stats")  # what trl's loss changes
is_async_callable = trl_utils.is_async_callable


def is_function(reward: Any) -> bool:
    """No reward model, nor the name of one: trl calls it with lists."""
    return not isinstance(reward, (str, torch.nn.Module))


@contextmanager
def vllm_made_by(make: Callable[..., Any]) -> Iterator[None]:
    """trl's trainer made inside asks make(...) for its VLLMGeneration."""
    original = trl_grpo.VLLMGeneration
    trl_grpo.VLLMGeneration = make
    try:
        yield
    finally:
        trl_grpo.VLLMGeneration = original


@contextmanager
def reference_is_a_copy_of(model: Any) -> Iterator[None]:
    """trl reloads the reference from the config's path, which is wrong for a model changed in memory."""
    if not isinstance(model, torch.nn.Module) or isinstance(model, PeftModel):
        yield
        return
    original = trl_grpo.create_model_from_path

    def copy_instead(*args: Any, **kwargs: Any) -> Any:
        reference = copy.deepcopy(model)
        return reference.requires_grad_(False).eval()

    trl_grpo.create_model_from_path = copy_instead
    try:
        yield
    finally:
        trl_grpo.create_model_from_path = original


def fused_head(model: Any) -> Any:
    """The closure cell in which trl's fused LM head keeps its temperature."""
    forward = getattr(model, "_original_forward", None) or model.forward  # accelerate may have wrapped it
    function = forward.__func__
    return function.__closure__[function.__code__.co_freevars.index("temperature")]


@contextmanager
def _head() -> Iterator[None]:
    """On a CPU trl's head scores every position where only the labelled ones are needed, and computes logits twice."""
    triton, function = trl_utils._use_triton, trl_utils._ChunkedLogProbFunction
    trl_utils._use_triton = lambda device: True
    trl_utils._ChunkedLogProbFunction = KeptHead(function)
    try:
        yield
    finally:
        trl_utils._use_triton, trl_utils._ChunkedLogProbFunction = triton, function


def label_logprobs(
    trainer: Any,
    model: Any,
    input_ids: torch.Tensor,
    mask: Any,
    position_ids: torch.Tensor,
    labels: torch.Tensor,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Log-probabilities and entropies (1, L) of shifted labels, 0 where the label is -100.

    mask: a dense mask, a BlockMask, or a TreePlan.
    """
    embedding = base_model(model).get_input_embeddings()
    with trainer.accelerator.autocast(), _head():
        embedded = embed(embedding, input_ids)
        inputs = {"input_ids": input_ids} if embedded is None else {"inputs_embeds": embedded}
        masked = (
            {"tree": mask, "attention_mask": None} if isinstance(mask, TreePlan) else {"attention_mask": mask}
        )
        out = model(**inputs, **masked, position_ids=position_ids, shift_labels=labels, fused_lm_head=True)
    entropy = out.entropy if out.entropy is not None else torch.zeros_like(out.log_probs)
    return out.log_probs, entropy  # the reference has no entropy


def loss_mask(micro: dict[str, Any]) -> torch.Tensor:
    """Tokens of a micro-batch that its loss is about, (B, T)."""
    mask = micro["completion_mask"]
    return mask * micro["tool_mask"] if "tool_mask" in micro else mask


def add_high_entropy_masks(trainer: Any, job: Any) -> None:
    """trl's masks of an update's micro-batches into job.high_entropy; their thresholds are of all processes' tokens.

    They meet here once a micro-batch, also where one of them starts over for lack of memory. One alone needs none.
    """
    if trainer.top_entropy_quantile == 1.0 or not trainer.ranks.together:
        return
    for m in range(len(job.high_entropy), len(job.window)):
        micro = job.window[m]
        entropies = job.entropies[job.rows_in(m), : micro["completion_ids"].size(1)]
        threshold = 1 - trainer.top_entropy_quantile
        job.high_entropy[m] = trainer.get_high_entropy_mask(entropies, loss_mask(micro), threshold)


def without_total(parts: torch.Tensor, group_size: int) -> torch.Tensor:
    """trl's rewards (B*G, rewards), all NaN in the rows that have no total (see rewards.scoring.totals).

    trl leaves such rows out of the group's mean and spread and gives them no advantage; a row of which only some
    rewards are NaN it would add up as if those were 0.

    >>> without_total(torch.tensor([[1.0, 0.5], [1.0, torch.nan]]), 2)
    tensor([[1.0000, 0.5000],
            [   nan,    nan]])
    """
    if not parts.isnan().any():
        return parts
    groups = [row // group_size for row in range(len(parts))]
    made = totals(parts.T.tolist(), [1.0] * parts.size(1), groups)
    lost = torch.tensor([total is None for total in made], device=parts.device)
    return parts.masked_fill(lost[:, None], torch.nan)


@contextmanager
def metrics_set_aside(trainer: Any, *, keep: tuple[str, ...] = ()) -> Iterator[dict[str, list[float]]]:
    """What trl logs inside is taken out of its training metrics again; the dict that is yielded then holds it.

    keep: names that stay in.
    """
    metrics = trainer._metrics["train"]
    before = {name: len(values) for name, values in metrics.items()}
    added: dict[str, list[float]] = {}
    try:
        yield added
    finally:
        for name in [name for name in metrics if name not in keep]:
            values = metrics[name]
            added[name] = values[before.get(name, 0) :]
            del values[before.get(name, 0) :]


def remove_notebook_table(trainer: Any) -> None:
    """transformers' own table of a notebook, beside which the kit's chart would stand a second time."""
    try:
        from transformers.utils.notebook import NotebookProgressCallback
    except ImportError:  # no IPython: transformers did not add it
        return
    trainer.remove_callback(NotebookProgressCallback)


def follow_epochs(sampler: Any) -> Any:
    """trl's sampler draws each epoch's order from where the last epoch stopped; a resumed run must stand there too."""

    def set_epoch(epoch: int) -> None:
        if sampler.shuffle and sampler.seed is not None:
            sampler.generator.manual_seed(sampler.seed)
            for _ in range(epoch):
                torch.randperm(sampler.num_samples, generator=sampler.generator)

    sampler.set_epoch = set_epoch  # accelerate calls it as an epoch begins
    return sampler
