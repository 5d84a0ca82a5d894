"""What first_contact.py computes a second time, TRL's plain way, and how gradients and weights are compared.

first_contact.py asks; nothing here knows of a trainer's state.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from typing import Any

import torch
from torch.utils.checkpoint import checkpoint
from trl import GRPOTrainer

from grpo_kit.models import base_model
from grpo_kit.rollout.compare_logprobs import SHIFT, few

_ENTRIES = 2**14  # of each gradient, evenly spread: a wrong mask or temperature moves them all
_SLICE = (
    2**14
)  # entries of a weight that the optimizer is tried on; moments of fewer than 4,096 are not 8-bit
_MATRICES = 2


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
