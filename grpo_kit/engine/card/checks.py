"""check_card: does this machine compute by the fast ways what it computes by the plain ones? Asked once a machine.

The engine's log-probabilities and the packed update's gradients are compared with padded forwards of the model on four
short completions, the optimizer's steps with AdamW's. How far two right ways may be apart is measured too: the plain
way on the same rows, moved to other positions. Where that rounding alone would hide an error, the outcome says so.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from transformers import GenerationConfig

from grpo_kit.engine import RolloutEngine
from grpo_kit.engine._first_use import (
    GROUP,
    SHIFT,
    TOKENS,
    engine_findings,
    guarded,
    random_prompts,
    remembered,
)
from grpo_kit.engine._supported_models import unsupported
from grpo_kit.engine.optim.choose import choose_optimizer, new_optimizer
from grpo_kit.engine.packed_update import PackedUpdate, why_not_packed
from grpo_kit.loop.batch import Batch
from grpo_kit.loop.config import Config, StepNumbers
from grpo_kit.loop.padded_update import PaddedUpdate, autocast
from grpo_kit.loop.policy_loss import PolicyLoss
from grpo_kit.models._model_facts import evaluating, token_rows
from grpo_kit.models._precision import Finding, is_narrow, judged, relative

_WEIGHTS = 2**16  # of each tensor that the optimizer is tried on


def check_card(model: Any, config: Config | None = None) -> list[Finding]:
    """Compare the fast ways with the plain ones for this model, as it is now; its weights and modes stay.

    A part that cannot do this model at all is left out. Takes seconds.

    >>> [str(finding) for finding in check_card(model)]  # doctest: +SKIP
    ['engine: equal (off by 3e-06, at most 0.0001)', 'packed update: equal (off by 2e-06, at most 0.001)']
    """
    config = Config() if config is None else config
    findings = []
    with _as_it_was(model):
        batch = _random_batch(model)
        if unsupported(model, GenerationConfig()) is None:
            with autocast(config, next(model.parameters()).device):
                findings += engine_findings(model, RolloutEngine, batch.prompt_ids)
        if why_not_packed(model) is None:
            findings.append(guarded("packed update", lambda: _update(model, config, batch)))
        name = choose_optimizer(config.optimizer, model)
        if name != "adamw":
            findings.append(guarded("optimizer", lambda: _optimizer(model, name)))
    return findings


def checked(model: Any, config: Config, folder: Path | None = None) -> list[Finding]:
    """The findings of check_card, once for this card, these versions and this kind of model.

    folder: of the cache; default GRPO_KIT_CACHE. A cache that cannot be read or written is done without.
    """
    return remembered(
        lambda: check_card(model, config), model, [config.autocast, config.optimizer], folder
    )


def _update(model: Any, config: Config, batch: Batch) -> Finding:
    plain = Config(autocast=config.autocast, max_completion_tokens=TOKENS)
    numbers, device = StepNumbers(0, 0.0, 1.0, 0.0, 0.0), next(model.parameters()).device

    def gradient(update: Any) -> list[Tensor]:
        model.zero_grad(set_to_none=True)
        loss = PolicyLoss(batch, plain, numbers, device=device)
        update.gradients(model, batch, loss, 1.0, lambda share: share.backward())
        return [p.grad.float().cpu() for p in model.parameters() if p.grad is not None]

    expected = gradient(PaddedUpdate(plain))
    rounding = relative(gradient(PaddedUpdate(plain, shift=SHIFT)), expected)
    narrow = is_narrow(model, autocast=config.autocast != "none")
    error = relative(gradient(PackedUpdate(model, plain)), expected)
    return judged("packed update", error, rounding, narrow)


def _optimizer(model: Any, name: str) -> Finding:
    """Two steps beside AdamW's, with one drawn gradient, on copies of a matrix and a vector of the trained weights.

    The second step reads the moments that the first one stored.
    """
    trained = sorted((p for p in model.parameters() if p.requires_grad), key=lambda p: -p.ndim)
    generator = torch.Generator().manual_seed(0)
    copies, gradients = [], []
    for parameter in (trained[0], trained[-1]):
        weights = parameter.detach().flatten()[:_WEIGHTS]
        noise = torch.randn(len(weights), generator=generator, dtype=torch.float32)
        copies.append(nn.Parameter(weights.clone()))
        gradients.append((1e-3 * noise).to(weights))
    # Below this rate float32's own rounding of a weight is visible in the change.
    options = {"lr": 1e-4, "betas": (0.9, 0.999), "eps": 1e-8}
    optimizer = new_optimizer(name, _groups(copies), **options)
    master = getattr(optimizer, "master", None)
    if master is None:
        master = _in_float32
        for copy in copies:
            if copy.dtype != torch.float32:
                # its other bits cannot be read: on a weight of 0 a change keeps its own 8 bits
                copy.data.zero_()
    plain = [nn.Parameter(_in_float32(copy).clone()) for copy in copies]
    adamw = torch.optim.AdamW(_groups(plain), **options, foreach=False, fused=False)
    starts = [p.detach().clone() for p in plain]
    for _ in range(2):
        for copy, p, gradient in zip(copies, plain, gradients, strict=True):
            copy.grad, p.grad = gradient.to(copy.dtype, copy=True), gradient.float()
        optimizer.step()
        adamw.step()
    changes = [
        master(copy).double() - start for copy, start in zip(copies, starts, strict=True)
    ]
    expected = [p.detach().double() - start for p, start in zip(plain, starts, strict=True)]
    return judged("optimizer", relative(changes, expected), 0.0, narrow=False)


def _in_float32(parameter: Tensor) -> Tensor:
    return parameter.detach().float()


def _groups(parameters: Sequence[nn.Parameter]) -> list[dict]:
    """The matrix decays, the vector does not."""
    return [
        {"params": [p], "weight_decay": d} for p, d in zip(parameters, (0.1, 0.0), strict=True)
    ]


def _random_batch(model: Any) -> Batch:
    """Random completions of two groups of two prompts."""
    generator, prompts = torch.Generator().manual_seed(1), random_prompts(model)
    return Batch(
        rows=[{}] * len(prompts),
        groups=[i // GROUP for i in range(len(prompts))],
        prompt_ids=prompts,
        completion_ids=torch.randint(
            token_rows(model), (len(prompts), TOKENS), generator=generator
        ).tolist(),
        completions=[""] * len(prompts),
        cut_off=[True] * len(prompts),
        advantages=[1.0, -1.0] * (len(prompts) // 2),
    )


@contextmanager
def _as_it_was(model: Any) -> Iterator[None]:
    """No dropout and no gradients inside; modes and random numbers are as before afterwards."""
    device = next(model.parameters()).device
    with torch.random.fork_rng([device] if device.type == "cuda" else []), evaluating(model):
        try:
            yield
        finally:
            model.zero_grad(set_to_none=True)
