"""Batch: what flows through a step of GRPO, from the rows of the task to the loss; and generate(), which makes one.

generate() samples by transformers' generate; it trains any causal model. The engine fills the same Batch faster.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, field, fields
from itertools import chain
from typing import Any

import torch
from torch.nn.functional import pad
from transformers import GenerationConfig

from grpo_kit._support.argument_checks import template_tokens
from grpo_kit.loop.config import Config, StepNumbers
from grpo_kit.models._model_facts import base_model, check_context, context_length, end_ids
from grpo_kit.models.token_lists import generate_rows, up_to_end


@dataclass
class Batch:
    """N completions, those of one prompt adjacent. Each stage of a step fills in its fields.

    By `sample`:  rows, the task's row of each completion; groups, the number of its prompt; prompt_ids, completion_ids
                  (with the end token); completions, the text; cut_off, whether it ended by its length.
                  Where the sampler knows them: sampler_logprobs and entropies, one number a token, in nats, at the
                  temperature of the step; old_logprobs, where weights older than today's sampled.
                  loss_mask: 1 at the tokens to train on, None for all. extra: more columns for the record.
    By `score`:   parts, the scores of each reward by name; rewards, the weighted totals. None: cannot judge.
    By `advantages`: advantages.
    By the update: ref_logprobs (N, T), of the reference model; old_logprobs (N, T), where rollouts are used twice.

    A sampler of episodes gives a turn each entry, and fills in parts, rewards and advantages itself.
    """

    rows: list[dict[str, Any]]
    groups: list[int]
    prompt_ids: list[list[int]]
    completion_ids: list[list[int]]
    completions: list[str]
    cut_off: list[bool]
    sampler_logprobs: list[list[float]] | None = None
    entropies: list[list[float]] | None = None
    old_logprobs: torch.Tensor | None = None
    loss_mask: list[list[int]] | None = None
    extra: dict[str, list[Any]] = field(default_factory=dict)
    parts: dict[str, list[float | None]] = field(default_factory=dict)
    rewards: list[float | None] = field(default_factory=list)
    advantages: list[float] = field(default_factory=list)
    ref_logprobs: torch.Tensor | None = None

    def __len__(self) -> int:
        return len(self.rows)

    @property
    def width(self) -> int:
        """T: tokens of the longest completion."""
        return max(map(len, self.completion_ids), default=0)

    @property
    def tokens(self) -> int:
        """Of all prompts and completions."""
        return sum(map(len, self.prompt_ids + self.completion_ids))

    def mask(self, device: Any = None) -> torch.Tensor:
        """(N, T): 1 at the tokens that are trained on, 0 behind a completion's end."""
        mask = self.loss_mask or [[1] * len(ids) for ids in self.completion_ids]
        return padded(mask, self.width, device)

    def select(self, places: Sequence[int]) -> Batch:
        """The batch of these completions, in this order. Tensors keep their width of the longest of these."""
        columns: dict[str, Any] = {}
        width = max((len(self.completion_ids[i]) for i in places), default=0)
        for name in _COLUMNS:
            column = getattr(self, name)
            if isinstance(column, dict):
                columns[name] = {
                    key: [values[i] for i in places] for key, values in column.items()
                }
            elif isinstance(column, torch.Tensor):
                columns[name] = column[list(places), :width]
            else:
                columns[name] = [column[i] for i in places] if column else column
        return Batch(**columns)

    def split(self, parts: int) -> list[Batch]:
        """The batch cut into so many parts of whole groups, as even as they can be."""
        if parts == 1:
            return [self]
        groups = list(dict.fromkeys(self.groups))
        size = math.ceil(len(groups) / parts)
        batches = []
        for start in range(0, len(groups), size):
            part = set(groups[start : start + size])
            batches.append(
                self.select([i for i, group in enumerate(self.groups) if group in part])
            )
        return batches

    @staticmethod
    def join(batches: Sequence[Batch]) -> Batch:
        """One batch of several, before the update: their groups keep their numbers."""
        if len(batches) == 1:
            return batches[0]
        return Batch(
            **{name: _joined([getattr(batch, name) for batch in batches]) for name in _COLUMNS}
        )


_COLUMNS = [field.name for field in fields(Batch)]


def _joined(columns: Sequence[Any]) -> Any:
    """One column of several batches' columns; None where one of them is."""
    first = columns[0]
    if isinstance(first, dict):
        return {name: _joined([column[name] for column in columns]) for name in first}
    if any(column is None for column in columns):
        return None
    if isinstance(first, torch.Tensor):
        width = max(column.size(1) for column in columns)
        return torch.cat([pad(column, (0, width - column.size(1))) for column in columns])
    return list(chain.from_iterable(columns))


def padded(rows: Sequence[Sequence[float]], width: int, device: Any = None) -> torch.Tensor:
    """(N, width): the rows, with zeros behind their ends; long, or float32 where they are no whole numbers.

    >>> padded([[1, 2], [3]], 2).tolist()
    [[1, 2], [3, 0]]
    """
    is_whole = all(isinstance(number, int) for row in rows for number in row[:1])
    lines = [[*row, *[0] * (width - len(row))] for row in rows]
    return torch.tensor(lines, dtype=torch.long if is_whole else torch.float32, device=device)


def generate(
    model: Any,
    tokenizer: Any,
    task: Any,
    rows: Sequence[dict],
    config: Config,
    numbers: StepNumbers,
) -> Batch:
    """group_size completions of each row's prompt, at the temperature of the step.

    rows: B of the task's. The model is in evaluation mode: no dropout. Its random
    numbers come from torch's global generator, which the loop seeds, and from numbers.first.
    Raises ValueError for a prompt that leaves no room for a completion.
    """
    prompt_ids = prompts_of_groups(model, tokenizer, task, rows, config)
    completion_ids = complete_prompts(model, tokenizer, prompt_ids, config, numbers)
    ends = end_ids(model, tokenizer)
    return as_batch(tokenizer, rows, config.group_size, prompt_ids, completion_ids, ends)


def complete_prompts(
    model: Any,
    tokenizer: Any,
    prompts: Sequence[Sequence[int]],
    config: Config,
    numbers: StepNumbers,
) -> list[list[int]]:
    """The tokens that the model writes behind each prompt, by transformers' generate; the end token included."""
    ends = end_ids(model, tokenizer)
    generation = generation_config(tokenizer, ends, config, numbers)
    # What a checkpoint brings along (Qwen2.5: top_k 20, repetition_penalty 1.1) would fill in what is left open.
    base = base_model(model)
    checkpoints_own, base.generation_config = base.generation_config, GenerationConfig()
    try:
        torch.manual_seed(int(torch.randint(2**62, ())) + numbers.first)
        with torch.no_grad():
            completion_ids = generate_rows(model, prompts, generation)
    finally:
        base.generation_config = checkpoints_own
    return [up_to_end(ids, ends) for ids in completion_ids]


def generation_config(
    tokenizer: Any, ends: Sequence[int], config: Config, numbers: StepNumbers
) -> GenerationConfig:
    """How a step samples: the model's distribution at the step's temperature, and nothing that a checkpoint adds."""
    pad = tokenizer.pad_token_id
    if pad is None:
        pad = ends[0] if ends else 0
    return GenerationConfig(
        max_new_tokens=config.max_completion_tokens,
        do_sample=True,
        temperature=numbers.temperature,
        top_p=config.top_p,
        top_k=config.top_k,
        min_p=config.min_p or None,
        repetition_penalty=config.repetition_penalty,
        eos_token_id=list(ends),
        pad_token_id=pad,
    )


def as_batch(
    tokenizer: Any,
    rows: Sequence[dict[str, Any]],
    group_size: int,
    prompt_ids: list[list[int]],
    completion_ids: list[list[int]],
    ends: Sequence[int],
    **columns: Any,
) -> Batch:
    """The Batch of completions that are known by their tokens. columns: other fields of Batch."""
    hidden_ids = template_tokens(tokenizer, ends)
    visible_ids = [
        [token for token in ids if token not in hidden_ids] for ids in completion_ids
    ]
    return Batch(
        rows=[row for row in rows for _ in range(group_size)],
        groups=[group for group in range(len(rows)) for _ in range(group_size)],
        prompt_ids=prompt_ids,
        completion_ids=completion_ids,
        completions=tokenizer.batch_decode(visible_ids, skip_special_tokens=False),
        cut_off=[not ids or ids[-1] not in ends for ids in completion_ids],
        **columns,
    )


def render(
    model: Any,
    tokenizer: Any,
    task: Any,
    rows: Sequence[dict[str, Any]],
    max_completion_tokens: int,
) -> list[list[int]]:
    """The tokens of each row's prompt. Raises ValueError for one without room for a completion."""
    prompts = tokenizer(task.render(tokenizer, rows))["input_ids"]
    limit, mend = context_length(model), "drop the row or lower max_completion_tokens"
    for row, ids in zip(rows, prompts, strict=True):
        prompt_name = f"the prompt of {row['question']!r:.200}"
        if not ids:
            raise ValueError(f"{prompt_name} has no tokens; give it at least one")
        check_context(limit, len(ids), max_completion_tokens, where=prompt_name, mend=mend)
    return [list(ids) for ids in prompts]


def prompts_of_groups(
    model: Any, tokenizer: Any, task: Any, rows: Sequence[dict[str, Any]], config: Config
) -> list[list[int]]:
    """(B * G) prompts: each row's, once for each completion of its group. Raises ValueError as render does."""
    prompts = render(model, tokenizer, task, rows, config.max_completion_tokens)
    return [ids for ids in prompts for _ in range(config.group_size)]
