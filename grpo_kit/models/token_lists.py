"""Lists of token ids through a model: which of them in one batch, padded in front, and cut behind their end.

Padding is harmless where a model hides it. That is measured, once for each model: a padded row beside the row alone.
"""

from __future__ import annotations

import inspect
from collections.abc import Collection, Sequence
from typing import TYPE_CHECKING, Any
from weakref import WeakKeyDictionary

import torch

from grpo_kit.models._model_facts import base_model, context_length, evaluating

if TYPE_CHECKING:
    from transformers import GenerationConfig, PreTrainedModel, PreTrainedTokenizerBase

_LONGEST = 32  # tokens of the row beside which a third as many are padded
_SMALL = 2**16  # numbers of a weight whose gradient is compared
# What padding may change, by size: of log-probabilities and of the gradient, in float32 and in fewer bits.
_MOST = ((1e-5, 1e-2), (1e-3, 5e-2))


def end_ids(model: PreTrainedModel, tokenizer: PreTrainedTokenizerBase) -> list[int]:
    """Every token that ends a completion: the tokenizer's and all that the model declares."""
    declared = base_model(model).generation_config.eos_token_id
    declared = [] if declared is None else [declared] if isinstance(declared, int) else list(declared)
    return [end for end in dict.fromkeys([tokenizer.eos_token_id, *declared]) if end is not None]


def left_pad(
    prompts: Sequence[Sequence[int]], pad: int, device: torch.device
) -> tuple[torch.Tensor, torch.Tensor]:
    """Token ids and attention mask, both long (B, T), padded in front to the longest prompt.

    >>> left_pad([[5, 6], [7]], 0, torch.device("cpu"))[0].tolist()
    [[5, 6], [0, 7]]
    """
    width = max(map(len, prompts))
    ids = torch.tensor([[pad] * (width - len(p)) + list(p) for p in prompts], device=device)
    mask = torch.tensor([[0] * (width - len(p)) + [1] * len(p) for p in prompts], device=device)
    return ids, mask


_unhidden: WeakKeyDictionary[torch.nn.Module, dict[bool, str | None]] = WeakKeyDictionary()


def why_not_padded(model: torch.nn.Module, *, gradient: bool = False) -> str | None:
    """None if the model hides padding, else how far a padded row is from the same row alone.

    gradient: compare the gradient of the model's small weights too; RecurrentGemma's log-probabilities alone are right.
    The first call of a model takes three short passes.
    """
    answers = _unhidden.setdefault(model, {})
    if gradient not in answers:
        alone, beside, padded = _three_times(model, gradient)
        narrow = any(p.dtype not in (torch.float32, torch.float64) for p in model.parameters())
        answers[gradient] = None
        for part, name in enumerate(("log-probabilities", "gradient")[: 1 + gradient]):
            size = alone[part].norm()
            apart, rounding = ((other[part] - alone[part]).norm() / size for other in (padded, beside))
            if not apart <= max(_MOST[part][narrow], 4 * rounding):
                answers[gradient] = f"padding changes a row's {name} by {apart:.2g} of their size"
    return answers[gradient]


def _three_times(model: torch.nn.Module, gradient: bool) -> list[tuple[torch.Tensor, torch.Tensor]]:
    """A short row's log-probabilities and their gradient: alone, beside the same row, padded beside a longer one."""
    device, draw = next(model.parameters()).device, torch.Generator().manual_seed(0)
    tables = [each.num_embeddings for each in model.modules() if isinstance(each, torch.nn.Embedding)]
    length = int(min(_LONGEST, context_length(model)))
    long, short = (
        torch.randint(min(tables, default=2), (n,), generator=draw).tolist() for n in (length, length // 3)
    )
    trained = [p for p in model.parameters() if p.requires_grad]
    small = [p for p in trained if p.numel() <= _SMALL] or trained
    found = []
    with evaluating(model), torch.set_grad_enabled(gradient):
        for batch in ([short], [short, short], [long, short]):
            logits = logits_of(model, *left_pad(batch, 0, device), len(short))
            scores = logits[-1].double().log_softmax(-1)
            parts = torch.autograd.grad(scores.mean(), small, allow_unused=True) if gradient else ()
            slopes = [part.double().flatten() for part in parts if part is not None]
            found.append((scores.detach(), torch.cat(slopes) if slopes else scores.detach()))
    return found


def rows_together(model: torch.nn.Module, rows: Sequence[Sequence[int]]) -> list[list[int]]:
    """The places of rows that go through the model in one batch: all, or, where it hides no padding, of one length."""
    lengths = [len(row) for row in rows]
    if len({*lengths}) == 1 or why_not_padded(model, gradient=torch.is_grad_enabled()) is None:
        return [[*range(len(rows))]]
    return [[i for i, n in enumerate(lengths) if n == length] for length in dict.fromkeys(lengths)]


def logits_of(
    model: torch.nn.Module, ids: torch.Tensor, mask: torch.Tensor, last: int, shift: int = 0
) -> torch.Tensor:
    """(n, last, V): the logits of the last tokens, by a forward pass that is given what it takes.

    ids, mask: (n, T), 0 in the mask at padding. shift: positions that all rows are moved by.
    """
    given = {"use_cache": False, "logits_to_keep": last}
    if shift or not mask[:, 0].all():
        # Padding takes no positions: where they are absolute (GPT-2), it would move the others.
        positions = (mask.cumsum(1) - 1).clamp(min=0) + shift
        given |= {"attention_mask": mask, "position_ids": positions}
    return model(input_ids=ids, **_taken(model, given)).logits[:, -last:]


def _taken(model: torch.nn.Module, given: dict[str, Any]) -> dict[str, Any]:
    """What the model's forward takes of it, by its signature."""
    takes = inspect.signature(base_model(model).forward).parameters
    others = any(parameter.kind is parameter.VAR_KEYWORD for parameter in takes.values())
    return {
        name: value for name, value in given.items() if name in takes or others and name != "position_ids"
    }


def generate_rows(
    model: PreTrainedModel, prompts: Sequence[Sequence[int]], how: GenerationConfig
) -> list[list[int]]:
    """The tokens that transformers' generate writes behind each prompt, padded behind the end."""
    written: dict[int, list[int]] = {}
    for places in rows_together(model, prompts):
        # Padded here and not by the tokenizer, whose padding side then needs no setting.
        ids, mask = left_pad([prompts[i] for i in places], how.pad_token_id, next(model.parameters()).device)
        made = model.generate(input_ids=ids, generation_config=how, **_taken(model, {"attention_mask": mask}))
        written |= zip(places, made[:, ids.size(1) :].tolist(), strict=True)
    return [written[place] for place in range(len(prompts))]


def up_to_end(tokens: list[int], ends: Collection[int]) -> list[int]:
    """The tokens up to and including the first that ends a completion; all of them if none does.

    >>> up_to_end([5, 2, 2], {2})
    [5, 2]
    """
    length = next((i + 1 for i, token in enumerate(tokens) if token in ends), len(tokens))
    return tokens[:length]
