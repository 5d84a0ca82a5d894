"""How far a fast part may be from TRL's plain path: which rows, what is measured, and the limits with their reasons.

first_contact.py asks; nothing here knows of a trainer's state.
"""

from __future__ import annotations

import math
from collections.abc import Hashable, Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from typing import Any, NamedTuple

import torch
from torch.utils.checkpoint import checkpoint
from trl import GRPOTrainer

from grpo_kit.models import base_model

_PROMPTS, _EACH = 2, 2  # two groups, so that what rows share and what lies between groups are both seen
_ENTRIES = 2**14  # of each gradient, evenly spread: a wrong mask or temperature moves them all
_SLICE = (
    2**14
)  # entries of a weight that the optimizer is tried on; moments of fewer than 4,096 are not 8-bit
_MATRICES = 2


class Limits(NamedTuple):
    """The most that two right ways may differ by.

    logprobs: nats a token, the mean over the worst completion. gradient: norm of the difference by the norm of TRL's.
    """

    logprobs: float
    gradient: float

    def beside(self, logprobs: float, gradient: float = 0.0) -> Limits:
        """These, or more where rounding alone gives more: the same rows the plain way, moved to other positions.

        Rotary positions count differences only, so moved rows are the same in exact numbers. In bfloat16 an engine that
        is right was at most 1.7 times as far off as moved rows were, one whose mask is wrong 3.5 times and more.
        """
        return Limits(max(self.logprobs, _ROUNDING * logprobs), max(self.gradient, _ROUNDING * gradient))


SHIFT = 8  # positions that rows are moved by
_ROUNDING = 2.5
# Of SmolLM2-135M on a CPU (python -m benchmarks.first_contact --model smollm2-135m-instruct), in nats a token and as a
# share of the gradient's norm: float32 is 1e-5 and 1.5e-4 off, a wrong mask 0.1 to 0.5 and 0.9, a temperature of 1.25
# where it is 1 0.5 and 0.2. What is narrower goes by its own rounding; the floor is for a model that rounds alike.
_FLOAT32 = Limits(1e-4, 1e-3)
_NARROW = Limits(1e-2, 5e-2)


def limits(trainer: Any) -> Limits:
    """The least ones of the model's arithmetic: float32's where all of it is, else bfloat16's."""
    exact = all(p.dtype in (torch.float32, torch.float64) for p in trainer.model.parameters())
    rounded = "tf32" in (torch.backends.cuda.matmul.fp32_precision, torch.backends.fp32_precision)
    return _FLOAT32 if exact and not (trainer.args.bf16 or trainer.args.fp16 or rounded) else _NARROW


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


def plain_logprobs(
    trainer: Any, prompts: Sequence[list[int]], completions: Sequence[list[int]], shift: int = 0
) -> list[torch.Tensor]:
    """(T,) of each completion, by the plain model as TRL scores it: in padded rows, one at a time, no gradient.

    shift: more padding before all rows, which moves their positions.
    """
    before, after = (max(map(len, rows)) for rows in (prompts, completions))
    before += shift
    ids, mask = torch.zeros(2, len(prompts), before + after, dtype=torch.long)
    for row, (prompt, completion) in enumerate(zip(prompts, completions, strict=True)):
        place = slice(before - len(prompt), before + len(completion))
        ids[row, place], mask[row, place] = torch.tensor([*prompt, *completion]), 1
    device = trainer.accelerator.device
    with torch.no_grad():
        logprobs = GRPOTrainer._get_per_token_logps_and_entropies(
            trainer, trainer.model, ids.to(device), mask.to(device), after, batch_size=1
        )[0]
    return [row[: len(completion)] for row, completion in zip(logprobs, completions, strict=True)]


def with_signal(window: Sequence[dict[str, Any]]) -> list[dict[str, Any]]:
    """A few of the window's completions whose advantage is not 0, each a micro-batch of its own; [] where none is."""
    rows = [(m, i) for m, micro in enumerate(window) for i in range(len(micro["advantages"]))]
    per_row = lambda v: isinstance(v, torch.Tensor) and v.ndim > 0  # noqa: E731
    prompts, lengths = [], []
    for m, i in rows:
        micro = window[m]
        prompts.append(tuple(micro["prompt_ids"][i][micro["prompt_mask"][i].bool()].tolist()))
        counts = bool(micro["advantages"][i].ne(0).any())
        lengths.append(int(micro["completion_mask"][i].sum()) if counts else 0)
    chosen = [rows[r] for r in few(prompts, lengths)]
    return [{k: v[i : i + 1] if per_row(v) else v for k, v in window[m].items()} for m, i in chosen]


def moved(micros: Sequence[dict[str, Any]], shift: int = SHIFT) -> list[dict[str, Any]]:
    """The same rows behind more padding."""
    pad = lambda ids: torch.nn.functional.pad(ids, (shift, 0))  # noqa: E731
    return [{k: pad(v) if k in ("prompt_ids", "prompt_mask") else v for k, v in m.items()} for m in micros]


def slices(optimizer: torch.optim.Optimizer) -> list[tuple[torch.Tensor, torch.Tensor, dict[str, Any]]]:
    """(weights, gradient, group) where gradients are largest, of two matrices and a norm; [] while none says anything.

    1-d, at most 2**14 entries each. A gradient that is not finite says nothing either.
    """
    found: list[tuple[float, torch.Tensor, dict[str, Any]]] = []
    for group in optimizer.param_groups:
        found += [(p.grad.abs().max().item(), p, group) for p in group["params"] if p.grad is not None]
    if not all(math.isfinite(largest) for largest, _, _ in found):
        return []
    found = sorted((f for f in found if f[0] > 0), key=lambda f: -f[0])
    matrices = [f for f in found if f[1].ndim >= 2 and f[1].numel() >= 4096][:_MATRICES]
    chosen = [*matrices, *[f for f in found if f[1].ndim < 2][:1]] or found[:1]
    cut = []
    for _, p, group in chosen:
        flat = p.grad.flatten()
        start = int(flat.abs().argmax()) // _SLICE * _SLICE
        part = slice(max(0, min(start, p.numel() - _SLICE)), start + _SLICE)
        cut.append((p.detach().flatten()[part], flat[part], group))
    return cut


def gap(found: Sequence[torch.Tensor], wanted: Sequence[torch.Tensor]) -> float:
    """Mean absolute difference in nats a token of the worst completion; infinite for a NaN. One (T,) a completion."""
    apart = [
        (a.double().cpu() - b.double().cpu()).abs().mean().item() for a, b in zip(found, wanted, strict=True)
    ]
    return max((d if math.isfinite(d) else math.inf for d in apart), default=0.0)


def finite(tensors: Sequence[torch.Tensor]) -> bool:
    """Are all numbers in them finite?"""
    return all(bool(tensor.isfinite().all()) for tensor in tensors)


def relative(found: Sequence[torch.Tensor], wanted: Sequence[torch.Tensor]) -> float:
    """Norm of the difference of all tensors by the norm of those wanted; infinite for a NaN, or where there is none."""
    apart = sum((a.double() - b.double()).square().sum().item() for a, b in zip(found, wanted, strict=True))
    size = sum(b.double().square().sum().item() for b in wanted)
    error = math.sqrt(apart / size) if size else math.inf
    return error if math.isfinite(error) else math.inf


def gradients(model: torch.nn.Module) -> list[torch.Tensor]:
    """Of each trained parameter at most 2**14 entries of its gradient, evenly spread, on the CPU; zeros without one."""
    found = []
    for p in model.parameters():
        if p.requires_grad:
            g = torch.zeros(1, dtype=p.dtype).expand(p.numel()) if p.grad is None else p.grad.flatten()
            found.append(g[:: (p.numel() // _ENTRIES) | 1].float().cpu())  # an odd stride meets all columns
    return found


@contextmanager
def without_dropout(model: torch.nn.Module) -> Iterator[None]:
    """Modes stay, but nothing is dropped: packed and plain rows would drop different numbers."""
    shares = [(m, "p", m.p) for m in model.modules() if isinstance(m, torch.nn.Dropout)]
    shares += [(m, a, getattr(m, a)) for m in model.modules() for a in ["attention_dropout"] if hasattr(m, a)]
    for module, name, _ in shares:
        setattr(module, name, 0.0)
    try:
        yield
    finally:
        for module, name, share in shares:
            setattr(module, name, share)


def checkpoint_layers(model: torch.nn.Module, on: bool) -> None:
    """Whether every layer computes its activations again in the backward pass; the numbers stay."""
    for layer in base_model(model).model.layers:
        layer.gradient_checkpointing = on
        layer._gradient_checkpointing_func = partial(checkpoint, use_reentrant=False)
