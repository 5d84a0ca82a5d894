"""Batch: what flows through a step, from the rows of the data set to the loss."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import torch

# from trl's name of a tensor to the Batch's
_FROM_TRL = {
    "prompt_ids": "prompt_ids",
    "prompt_mask": "prompt_mask",
    "completion_ids": "completion_ids",
    "completion_mask": "completion_mask",
    "tool_mask": "tool_mask",
    "sampling_per_token_logps": "sampler_logprobs",
    "old_per_token_logps": "old_logprobs",
    "ref_per_token_logps": "ref_logprobs",
    "advantages": "advantages",
}


@dataclass(frozen=True)
class StepSettings:
    """The numbers that a step goes by, fixed before its first completion is sampled.

    step: finished optimizer steps. training: False in an evaluation. temperature: of the sampler and of every score.
    group_size: completions of one prompt. reward_names, reward_weights: one each a reward, in order.
    """

    step: int
    training: bool
    temperature: float
    group_size: int
    reward_names: tuple[str, ...]
    reward_weights: tuple[float, ...]


@dataclass
class Batch:
    """The N completions of one rollout (N = prompts x group_size), a group's adjacent. Of episodes: N turns.

    A stage fills in what it makes, and every reader gets the Batch as an argument. The tensors and texts are those of
    this process; parts and rewards are those of all processes.

    rows: the data set's row of each completion. groups: the group of each completion, from 0; None: every group_size
    completions are one. fillers: rows at the end that only fill up a micro-batch; they are trained on with no weight
    and not recorded.
    prompt_ids, prompt_mask: (N, P), padded on the left. completion_ids, completion_mask: (N, T), padded on the right.
    tool_mask: (N, T), 0 where a tool wrote; None without tools.
    sampler_logprobs: (N, T), at the sampler's temperature. entropies: one list of nats a completion, a token each.
    completions: the text of each. extra: what rewards logged, by column.
    parts: (N, rewards), NaN where a reward cannot judge. rewards: the weighted totals, None where there is none.
    advantages: (N,). old_logprobs, ref_logprobs: (N, T), None where the loss needs none.
    """

    settings: StepSettings
    rows: list[dict[str, Any]]
    groups: list[int] | None = None
    fillers: int = 0
    prompt_ids: torch.Tensor | None = None
    prompt_mask: torch.Tensor | None = None
    completion_ids: torch.Tensor | None = None
    completion_mask: torch.Tensor | None = None
    tool_mask: torch.Tensor | None = None
    sampler_logprobs: torch.Tensor | None = None
    entropies: list[list[float]] | None = None
    completions: list[str] = field(default_factory=list)
    extra: dict[str, list[Any]] = field(default_factory=dict)
    parts: torch.Tensor | None = None
    rewards: list[float | None] = field(default_factory=list)
    advantages: torch.Tensor | None = None
    old_logprobs: torch.Tensor | None = None
    ref_logprobs: torch.Tensor | None = None

    def take(self, tensors: Mapping[str, torch.Tensor]) -> None:
        """Fill in the tensors that trl made, by trl's names. Others (images, counts) are trl's alone."""
        for name, own in _FROM_TRL.items():
            setattr(self, own, tensors.get(name))

    def groups_of(self, completions: int) -> list[int]:
        """The group of each of so many completions (those of all processes)."""
        if self.groups is not None:
            return self.groups
        return [i // self.settings.group_size for i in range(completions)]

    def loss_mask(self) -> torch.Tensor:
        """(N, T): 1 at the tokens that the model wrote and is trained on."""
        return self.completion_mask if self.tool_mask is None else self.completion_mask * self.tool_mask

    def padded_entropies(self) -> torch.Tensor | None:
        """(N, T), 0 behind a completion's end; None where the sampler gave none for these completions."""
        rows, width = self.entropies, self.completion_ids.size(1)
        if rows is None or len(rows) != len(self.completion_ids) or max(map(len, rows)) > width:
            return None
        padded = [row + [0.0] * (width - len(row)) for row in rows]
        return torch.tensor(padded, device=self.completion_ids.device)
