"""Score a batch of completions with each prompt computed once per group.

TRL scores B*G rows of prompt + completion, so a prompt's tokens are computed G times, forward and backward.
Here a group is one row: the prompt's body, then its completions one after the other, under a mask in which a
completion sees its prompt and itself only. Log-probabilities and gradients are the same up to rounding.

Simplification: a dense boolean mask (P, 1, L, L), which suits short sequences; text-only decoder models.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch

# Decoders whose attention is fully causal and takes a ready 4-D mask.
SUPPORTED_MODEL_TYPES = frozenset({"llama", "qwen2", "qwen3"})


@dataclass(frozen=True)
class PackedBatch:
    """Groups as rows (P groups, L positions, R = B*G completions of at most C tokens).

    input_ids, position_ids, labels: long (P, L), labels already shifted, -100 where nothing is scored.
    attention_mask: bool (P, 1, L, L), True where a query (row) may see a key (column).
    row, start, length: long (R,), where each completion's scores lie.
    """

    input_ids: torch.Tensor
    position_ids: torch.Tensor
    labels: torch.Tensor
    attention_mask: torch.Tensor
    row: torch.Tensor
    start: torch.Tensor
    length: torch.Tensor

    def unpack(self, scores: torch.Tensor, width: int) -> torch.Tensor:
        """float (P, L) -> (R, width), zeros past each completion's end; differentiable."""
        offset = torch.arange(width, device=scores.device)
        inside = offset < self.length[:, None]  # (R, width)
        column = (self.start[:, None] + offset).clamp(max=scores.size(1) - 1)
        return scores[self.row[:, None], column] * inside


def pack_groups(input_ids: torch.Tensor, attention_mask: torch.Tensor, completion_width: int) -> PackedBatch:
    """Pack left-padded prompts + right-padded completions, rows of one prompt in any order.

    input_ids, attention_mask: long (R, T); the last completion_width columns hold the completions.
    A completion's segment begins with a copy of the prompt's last token, whose output scores its first token.

    >>> ids = torch.tensor([[5, 6, 7, 8], [5, 6, 9, 9]])
    >>> pack_groups(ids, torch.ones_like(ids), 2).input_ids.tolist()
    [[5, 6, 7, 6, 9]]
    """
    device = input_ids.device
    ids, mask = input_ids.tolist(), attention_mask.bool().tolist()
    split = len(ids[0]) - completion_width
    groups: dict[tuple[int, ...], list[int]] = {}
    completions = []
    for r, (tokens, keep) in enumerate(zip(ids, mask, strict=True)):
        prompt = tuple(t for t, k in zip(tokens[:split], keep[:split], strict=True) if k)
        completions.append([t for t, k in zip(tokens[split:], keep[split:], strict=True) if k])
        groups.setdefault(prompt, []).append(r)

    rows, positions, labels, segments = [], [], [], []
    row, start = [0] * len(ids), [0] * len(ids)
    for g, (prompt, members) in enumerate(groups.items()):
        body = len(prompt) - 1
        tokens, position, label, segment = list(prompt[:-1]), list(range(body)), [-100] * body, [0] * body
        for number, r in enumerate(members, start=1):
            completion = completions[r]
            row[r], start[r] = g, len(tokens)
            if completion:
                tokens += [prompt[-1], *completion[:-1]]
                position += range(body, body + len(completion))
                label += completion
                segment += [number] * len(completion)
        rows.append(tokens), positions.append(position), labels.append(label), segments.append(segment)

    length = max(map(len, rows))
    pad = lambda lists, value: torch.tensor([x + [value] * (length - len(x)) for x in lists], device=device)  # noqa: E731
    segment = pad(segments, -1)  # (P, L): 0 prompt body, 1.. completions, -1 padding
    order = torch.arange(length, device=device)
    sees = (segment[:, None, :] == 0) | (segment[:, None, :] == segment[:, :, None])  # (P, query, key)
    sees &= order[None, :, None] >= order[None, None, :]
    return PackedBatch(
        input_ids=pad(rows, 0),
        position_ids=pad(positions, 0),
        labels=pad(labels, -100),
        attention_mask=sees[:, None],
        row=torch.tensor(row, device=device),
        start=torch.tensor(start, device=device),
        length=torch.tensor([len(c) for c in completions], device=device),
    )
