"""Lists of token ids through a model: which of them in one batch, padded in front, and cut behind their end.

Padding is harmless where a model hides it. That is measured, once for each model: a padded row beside the row alone.
"""

from __future__ import annotations

import inspect
from collections.abc import Collection, Sequence
from typing import TYPE_CHECKING, Any
from weakref import WeakKeyDictionary

import torch
from torch import Tensor, nn

from grpo_kit.models._model_facts import base_model, context_length, evaluating

if TYPE_CHECKING:
    from transformers import GenerationConfig, PreTrainedModel

_LONGEST = 32  # tokens of the row beside which a third as many are padded
_SMALL = 2**16  # numbers of a weight whose gradient is compared
# What padding may change, by size: of log-probabilities and of the gradient, in float32 and in fewer bits.
_LIMITS = {"log-probabilities": (1e-5, 1e-2), "gradient": (1e-3, 5e-2)}


def left_pad(
    prompts: Sequence[Sequence[int]], pad: int, device: torch.device
) -> tuple[Tensor, Tensor]:
    """Token ids and attention mask, both long (B, T), padded in front to the longest prompt.

    >>> left_pad([[5, 6], [7]], 0, torch.device("cpu"))[0].tolist()
    [[5, 6], [0, 7]]
    """
    width = max(map(len, prompts))
    ids = [[pad] * (width - len(prompt)) + list(prompt) for prompt in prompts]
    mask = [[0] * (width - len(prompt)) + [1] * len(prompt) for prompt in prompts]
    return torch.tensor(ids, device=device), torch.tensor(mask, device=device)


_reasons: WeakKeyDictionary[nn.Module, dict[bool, str | None]] = WeakKeyDictionary()


def why_not_padded(model: nn.Module, *, gradient: bool = False) -> str | None:
    """None if the model hides padding, else how far a padded row is from the same row alone.

    gradient: compare the gradient of the model's small weights too; RecurrentGemma's log-probabilities alone are right.
    The first call of a model takes three short passes.
    """
    reasons = _reasons.setdefault(model, {})
    if gradient not in reasons:
        narrow = any(p.dtype not in (torch.float32, torch.float64) for p in model.parameters())
        reasons[gradient] = None
        for name, (alone, in_pair, padded) in _three_times(model, gradient).items():
            size = alone.norm()
            change, rounding = (padded - alone).norm() / size, (in_pair - alone).norm() / size
            if not change <= max(_LIMITS[name][narrow], 4 * rounding):
                reasons[gradient] = (
                    f"padding changes a row's {name} by {change:.2g} of their size"
                )
    return reasons[gradient]


def _three_times(model: nn.Module, gradient: bool) -> dict[str, list[Tensor]]:
    """A short row's log-probabilities and their gradient: alone, beside the same row, padded beside a longer one."""
    device, generator = next(model.parameters()).device, torch.Generator().manual_seed(0)
    tables = [
        module.num_embeddings for module in model.modules() if isinstance(module, nn.Embedding)
    ]
    tokens = min(tables, default=2)
    length = int(min(_LONGEST, context_length(model)))
    longer = torch.randint(tokens, (length,), generator=generator).tolist()
    row = torch.randint(tokens, (length // 3,), generator=generator).tolist()
    trained = [p for p in model.parameters() if p.requires_grad]
    small = [p for p in trained if p.numel() <= _SMALL] or trained
    logprobs, gradients = [], []
    with evaluating(model), torch.set_grad_enabled(gradient):
        for batch in ([row], [row, row], [longer, row]):
            logits = logits_of(model, *left_pad(batch, 0, device), len(row))
            scores = logits[-1].double().log_softmax(-1)
            logprobs.append(scores.detach())
            if gradient:
                parts = torch.autograd.grad(scores.mean(), small, allow_unused=True)
                parts = [part.double().flatten() for part in parts if part is not None]
                gradients.append(torch.cat(parts) if parts else scores.detach())
    return (
        {"log-probabilities": logprobs, "gradient": gradients}
        if gradient
        else {"log-probabilities": logprobs}
    )


def rows_together(model: nn.Module, rows: Sequence[Sequence[int]]) -> list[list[int]]:
    """The places of rows that go through the model in one batch: all, or, where it hides no padding, of one length."""
    lengths = [len(row) for row in rows]
    if (
        len(set(lengths)) == 1
        or why_not_padded(model, gradient=torch.is_grad_enabled()) is None
    ):
        return [list(range(len(rows)))]
    return [
        [i for i, n in enumerate(lengths) if n == length] for length in dict.fromkeys(lengths)
    ]


def logits_of(model: nn.Module, ids: Tensor, mask: Tensor, last: int, shift: int = 0) -> Tensor:
    """(n, last, V): the logits of the last tokens, by a forward pass that is given what it takes.

    ids, mask: (n, T), 0 in the mask at padding. shift: positions that all rows are moved by.
    """
    options = {"use_cache": False, "logits_to_keep": last}
    if shift or not mask[:, 0].all():
        # Padding takes no positions: where they are absolute (GPT-2), it would move the others.
        positions = (mask.cumsum(1) - 1).clamp(min=0) + shift
        options |= {"attention_mask": mask, "position_ids": positions}
    return model(input_ids=ids, **_accepted(model, options)).logits[:, -last:]


def _accepted(model: nn.Module, options: dict[str, Any]) -> dict[str, Any]:
    """The options that the model's forward takes: models differ, and say so by their signature alone."""
    parameters = inspect.signature(base_model(model).forward).parameters
    names = set(parameters)
    if any(parameter.kind is parameter.VAR_KEYWORD for parameter in parameters.values()):
        names |= options.keys() - {"position_ids"}
    return {name: value for name, value in options.items() if name in names}


def generate_rows(
    model: PreTrainedModel, prompts: Sequence[Sequence[int]], config: GenerationConfig
) -> list[list[int]]:
    """The tokens that transformers' generate writes behind each prompt, padded behind the end."""
    device = next(model.parameters()).device
    completions: dict[int, list[int]] = {}
    for places in rows_together(model, prompts):
        # Padded here and not by the tokenizer, whose padding side then needs no setting.
        ids, mask = left_pad([prompts[i] for i in places], config.pad_token_id, device)
        options = _accepted(model, {"attention_mask": mask})
        tokens = model.generate(input_ids=ids, generation_config=config, **options)
        completions |= zip(places, tokens[:, ids.size(1) :].tolist(), strict=True)
    return [completions[place] for place in range(len(prompts))]


def up_to_end(tokens: list[int], ends: Collection[int]) -> list[int]:
    """The tokens up to and including the first that ends a completion; all of them if none does.

    >>> up_to_end([5, 2, 2], {2})
    [5, 2]
    """
    length = next((i + 1 for i, token in enumerate(tokens) if token in ends), len(tokens))
    return tokens[:length]
