"""Compares the engine's log-probabilities with the plain model's: the rows, the difference, and its limits."""

from __future__ import annotations

import math
from collections.abc import Hashable, Sequence
from typing import Any, NamedTuple

import torch

from grpo_kit.models.token_lists import left_pad, logits_of

_PROMPTS, _EACH = 2, 2  # two groups, to check both rows that share a prompt and rows that do not


class _Limits(NamedTuple):
    """The most that two correct ways may differ by.

    logprobs: nats a token, the mean over the worst completion. gradient: norm of the difference over the norm of TRL's.
    """

    logprobs: float
    gradient: float


SHIFT = 8  # positions that rows are moved by
# SmolLM2-135M on a CPU (python -m benchmarks.check_card --model smollm2-135m-instruct), in nats a token and as a
# share of the gradient's norm: float32 is 1e-5 and 1.5e-4 off, a wrong mask 0.1 to 0.5 and 0.9, a temperature of 1.25
# instead of 1 0.5 and 0.2. Narrower dtypes use their own rounding; the floor is for a model whose rows round alike.
_FLOAT32 = _Limits(1e-4, 1e-3)
_NARROW = _Limits(1e-2, 5e-2)


def limits(model: torch.nn.Module, *, autocast: bool = False) -> _Limits:
    """The lowest limits of the model's arithmetic: float32's if all of it is float32, else bfloat16's."""
    exact = all(p.dtype in (torch.float32, torch.float64) for p in model.parameters())
    if hasattr(torch.backends, "fp32_precision"):
        rounded = "tf32" in (torch.backends.cuda.matmul.fp32_precision, torch.backends.fp32_precision)
    else:  # torch 2.8
        rounded = torch.backends.cuda.matmul.allow_tf32
    return _FLOAT32 if exact and not (autocast or rounded) else _NARROW


def few(prompts: Sequence[Hashable], lengths: Sequence[int]) -> list[int]:
    """Indices of at most two completions of at most two prompts each, the longest first; empty ones are left out.

    >>> few(["a", "a", "a", "b", "c"], [1, 5, 2, 0, 3])
    [1, 4, 2]
    """
    chosen: dict[Hashable, list[int]] = {}
    for i in sorted(range(len(lengths)), key=lambda i: -lengths[i]):
        members = chosen.get(prompts[i], [])
        room = len(members) < _EACH if members else len(chosen) < _PROMPTS
        if lengths[i] and room:
            chosen[prompts[i]] = [*members, i]
    return sorted((i for members in chosen.values() for i in members), key=lambda i: -lengths[i])


def gap(found: Sequence[torch.Tensor], wanted: Sequence[torch.Tensor]) -> float:
    """Mean absolute difference in nats a token of the worst completion; infinite for a NaN. One (T,) a completion."""
    apart = [
        (a.double().cpu() - b.double().cpu()).abs().mean().item() for a, b in zip(found, wanted, strict=True)
    ]
    return max((d if math.isfinite(d) else math.inf for d in apart), default=0.0)


@torch.no_grad()
def compared(model: Any, prompts: Sequence[list[int]], rollouts: Any) -> tuple[float, float, float]:
    """Nats a token: how far the engine is from the plain model on a few rows, how far moved rows are, the limit.

    rollouts: the engine's, sampled at temperature 1.
    """
    completions = rollouts.completion_ids
    rows = few(list(map(tuple, prompts)), list(map(len, completions)))
    plain = [_plain(model, prompts[i], completions[i]) for i in rows]
    moved = [_plain(model, prompts[i], completions[i], SHIFT) for i in rows]
    engines = [torch.tensor(rollouts.policy_logprobs[i], dtype=torch.float64) for i in rows]
    narrow = torch.is_autocast_enabled(next(model.parameters()).device.type)
    return gap(engines, plain), gap(moved, plain), limits(model, autocast=narrow).logprobs


def _plain(model: Any, prompt: list[int], completion: list[int], shift: int = 0) -> torch.Tensor:
    """(T,) of one completion, by the model's own forward pass. shift: positions that the row is moved by."""
    ids, mask = left_pad([[*prompt, *completion]], 0, next(model.parameters()).device)
    scores = logits_of(model, ids, mask, len(completion) + 1, shift)[0, :-1].float().log_softmax(-1)  # (T, V)
    return scores.gather(-1, ids[0, -len(completion) :, None])[:, 0]
