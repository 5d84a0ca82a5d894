"""Score a batch of completions with each prompt computed once per group, and nothing padded.

TRL scores B*G rows of prompt + completion, so a prompt's tokens are computed G times, forward and backward.
Here a group is a prompt's body, then its completions one after the other, under a mask in which a completion
sees its prompt and itself only. Log-probabilities and gradients are the same up to rounding.

Two layouts: a group a row under a dense mask (SDPA, any device), or all groups in one row under a block mask
(FlexAttention, CUDA). Text-only decoders with full causal attention.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from peft import PeftModel
from torch.nn.attention.flex_attention import BlockMask, create_block_mask

from grpo_kit.models import MODEL_TYPES, base_model

_ATTENTIONS = ("sdpa", "eager", "flex_attention", "flash_attention_2")
FLEX_BLOCK = 128  # FlexAttention's block; a row's length is padded to a multiple of it

Row = tuple[tuple[int, ...], list[int]]  # prompt tokens, completion tokens


@dataclass(frozen=True)
class PackedBatch:
    """Groups as rows (P rows, L positions, R completions of at most C tokens).

    input_ids, position_ids, labels: long (P, L), labels already shifted, -100 where nothing is scored.
    group, segment: long (P, L); segment 0 is a prompt's body, 1.. its completions, -1 padding.
    row, start, length: long (R,), where each completion's scores lie.
    """

    input_ids: torch.Tensor
    position_ids: torch.Tensor
    labels: torch.Tensor
    group: torch.Tensor
    segment: torch.Tensor
    row: torch.Tensor
    start: torch.Tensor
    length: torch.Tensor

    def dense_mask(self) -> torch.Tensor:
        """bool (P, 1, L, L), True where a query (row) may see a key (column)."""
        order = torch.arange(self.segment.size(1), device=self.segment.device)
        query, key = self.segment[:, :, None], self.segment[:, None, :]
        sees = (self.group[:, :, None] == self.group[:, None, :]) & ((key == 0) | (key == query))
        return (sees & (order[:, None] >= order))[:, None]

    def block_mask(self) -> BlockMask:
        """The same mask for FlexAttention, which skips blocks that no query sees."""
        group, segment = self.group, self.segment

        def sees(b: torch.Tensor, h: torch.Tensor, q: torch.Tensor, k: torch.Tensor) -> torch.Tensor:
            inside = (segment[b, k] == 0) | (segment[b, k] == segment[b, q])
            return (group[b, q] == group[b, k]) & inside & (q >= k)

        rows, length = segment.shape
        return create_block_mask(sees, rows, None, length, length, device=str(segment.device))

    def unpack(self, scores: torch.Tensor, width: int) -> torch.Tensor:
        """float (P, L) -> (R, width), zeros past each completion's end; differentiable."""
        offset = torch.arange(width, device=scores.device)
        inside = offset < self.length[:, None]  # (R, width)
        column = (self.start[:, None] + offset).clamp(max=scores.size(1) - 1)
        return scores[self.row[:, None], column] * inside


def why_not_packed(trainer: Any, inputs: dict[str, Any]) -> str | None:
    """None if these inputs can be computed packed, else one sentence that says why not.

    Text only, a known decoder, no auxiliary loss, one process and all of its weights here.
    """
    model, config = trainer.model, base_model(trainer.model).config
    if trainer.accelerator.num_processes > 1:
        return "several processes"
    if trainer.is_deepspeed_enabled or trainer.is_fsdp_enabled:
        return "its weights are sharded"
    if isinstance(model, PeftModel) and model.active_peft_config.is_prompt_learning:
        return f"{model.active_peft_config.peft_type.value} adapters add virtual tokens"
    if config.model_type not in MODEL_TYPES:
        return f"model_type {config.model_type!r} is not one of {', '.join(MODEL_TYPES)}"
    if config._attn_implementation not in _ATTENTIONS:
        return f"attention {config._attn_implementation!r} is not one of {', '.join(_ATTENTIONS)}"
    if any(kind != "full_attention" for kind in getattr(config, "layer_types", None) or []):
        return "some of its layers see a sliding window only"
    if trainer.aux_loss_enabled:
        return "it has an auxiliary loss"
    images = ("pixel", "image", "num_images", "num_tiles", "token_type")
    return "images" if any(key.startswith(images) for key in inputs) else None


def rows_of(input_ids: torch.Tensor, attention_mask: torch.Tensor, completion_width: int) -> list[Row]:
    """Left-padded prompts + right-padded completions (R, T) as token lists, without padding or masked tokens.

    The last completion_width columns hold the completions.
    """
    rows = []
    for ids, mask in zip(input_ids.tolist(), attention_mask.bool().tolist(), strict=True):
        kept = [
            [t for t, k in zip(ids[part], mask[part], strict=True) if k] for part in _split(completion_width)
        ]
        rows.append((tuple(kept[0]), kept[1]))
    return rows


def _split(width: int) -> tuple[slice, slice]:
    return (slice(None, -width), slice(-width, None)) if width else (slice(None), slice(0, 0))


def packed_tokens(prompt: Sequence[int], completions: Sequence[Sequence[int]]) -> int:
    """Positions a group takes: the prompt's body once, each completion's tokens."""
    return len(prompt) - 1 + sum(map(len, completions))


def make_chunks(rows: list[Row], max_tokens: int) -> list[list[int]]:
    """Indices of rows, cut into chunks of at most max_tokens packed positions, groups kept whole where they fit.

    Rows of one prompt belong together in any order. A row larger than max_tokens is a chunk of its own.

    >>> make_chunks([((5, 6), [7, 8]), ((4,), [1]), ((5, 6), [9])], max_tokens=4)
    [[0, 2], [1]]
    """
    groups: dict[tuple[int, ...], list[int]] = {}
    for i, (prompt, _) in enumerate(rows):
        groups.setdefault(prompt, []).append(i)
    pieces: list[tuple[int, list[int]]] = []  # (tokens, rows)
    for prompt, members in groups.items():
        members = sorted(members, key=lambda i: len(rows[i][1]), reverse=True)
        tokens = max_tokens + 1
        for i in members:
            if tokens + len(rows[i][1]) > max_tokens:
                pieces.append((tokens := packed_tokens(prompt, []), []))
            pieces[-1][1].append(i)
            tokens += len(rows[i][1])
            pieces[-1] = (tokens, pieces[-1][1])
    chunks, tokens = [], max_tokens + 1
    for size, members in sorted(pieces, key=lambda p: -p[0]):  # neighbours of like size pad least
        if tokens + size > max_tokens:
            chunks.append([])
            tokens = 0
        chunks[-1] += members
        tokens += size
    return [sorted(chunk) for chunk in chunks]


def pack_rows(rows: list[Row], device: torch.device, *, one_row: bool = False) -> PackedBatch:
    """Pack completions, those of one prompt in any order; one_row puts all groups into a single row.

    A completion's segment begins with a copy of the prompt's last token, whose output scores its first token.

    >>> pack_rows([((5, 6), [7, 8]), ((5, 6), [9, 9])], torch.device("cpu")).input_ids.tolist()
    [[5, 6, 7, 6, 9]]
    """
    groups: dict[tuple[int, ...], list[int]] = {}
    for r, (prompt, _) in enumerate(rows):
        groups.setdefault(prompt, []).append(r)
    columns: list[list[tuple[int, int, int, int, int]]] = []  # token, position, label, group, segment
    row, start = [0] * len(rows), [0] * len(rows)
    for g, (prompt, members) in enumerate(groups.items()):
        if not (one_row and columns):
            columns.append([])
        line, body = columns[-1], len(prompt) - 1
        line += [(token, position, -100, g, 0) for position, token in enumerate(prompt[:-1])]
        for number, r in enumerate(members, start=1):
            completion = rows[r][1]
            row[r], start[r] = len(columns) - 1, len(line)
            inputs = [prompt[-1], *completion[:-1]]
            line += [
                (token, body + i, label, g, number)
                for i, (token, label) in enumerate(zip(inputs, completion, strict=False))
            ]

    length = max(1, *map(len, columns)) if len(columns) > 1 else max(1, len(columns[0]))
    if one_row:
        length = -(-length // FLEX_BLOCK) * FLEX_BLOCK
    padding = (0, 0, -100, -1, -1)
    table = torch.tensor([line + [padding] * (length - len(line)) for line in columns], device=device)
    ids, positions, labels, group, segment = table.unbind(-1)  # each (P, L)
    return PackedBatch(
        input_ids=ids,
        position_ids=positions,
        labels=labels,
        group=group,
        segment=segment,
        row=torch.tensor(row, device=device),
        start=torch.tensor(start, device=device),
        length=torch.tensor([len(completion) for _, completion in rows], device=device),
    )
