"""Let a model complete prompts, greedily or sampled, and leave it exactly as it was.

What prompts have in common is computed once: greedily their common beginning (system prompt and worked examples, most
of a short question's tokens), sampled each prompt for all of its samples; rows that have ended are dropped. Models
that the rollout engine does not know are left to transformers' generate, which does none of this.
Simplification: one device.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Collection, Iterator, Sequence
from contextlib import contextmanager
from itertools import groupby
from os.path import commonprefix
from typing import TYPE_CHECKING, NamedTuple

import torch
from transformers import DynamicCache, GenerationConfig

from grpo_kit.models import base_model
from grpo_kit.rollout.decode import Decoder
from grpo_kit.rollout.sampling import Sampler
from grpo_kit.rollout.support import unsupported
from grpo_kit.rollout.tape import Tape

if TYPE_CHECKING:
    from transformers import PreTrainedModel, PreTrainedTokenizerBase

_SHORTEST_PREFIX = 16  # common tokens from which a forward of their own pays


class Completion(NamedTuple):
    """text without special tokens; tokens written, the end included; cut_off at the limit?; ids of these tokens."""

    text: str
    tokens: int
    cut_off: bool
    ids: tuple[int, ...] = ()


def complete(
    model: PreTrainedModel,
    tokenizer: PreTrainedTokenizerBase,
    prompts: Sequence[str],
    *,
    max_completion_tokens: int,
    samples: int = 1,
    temperature: float = 0.0,
    batch_size: int = 32,
    seed: int = 0,
) -> list[Completion]:
    """The model's completions of rendered prompts, `samples` adjacent ones for each: B prompts give B * samples.

    temperature: 0 decodes greedily; above 0 samples from the model's whole distribution (no top-k, no top-p, no
    penalty, whatever the checkpoint asks for). Prompts are tokenized and completions ended as in TRL.
    batch_size: sequences decoded at once; a prompt's samples share a batch where they fit into one.
    seed: sample i of the result depends on (seed, i) and its prompt alone, not on batch_size; the draws are those of
    grpo_kit.rollout.RolloutEngine. (A model which the engine does not support is sampled by transformers' generate,
    batch by batch.)
    Runs in evaluation mode; the model's modes and settings and the random state are as before afterwards.
    Raises ValueError naming the argument for one text in place of a list, sizes below 1, a negative temperature,
    several greedy samples, an empty prompt and one that leaves no room in the model's context. FloatingPointError if
    sampled logits are not finite.

    >>> complete(model, tokenizer, [prompt], max_completion_tokens=8, samples=8, temperature=1.0)  # doctest: +SKIP
    """
    if isinstance(prompts, str):  # else every letter would be a prompt
        raise ValueError(f"prompts={prompts[:40]!r} is one text; give a list of them")
    sizes = {"samples": samples, "max_completion_tokens": max_completion_tokens, "batch_size": batch_size}
    for name, value in sizes.items():
        if value < 1:
            raise ValueError(f"{name}={value!r} must be at least 1")
    if not temperature >= 0:
        raise ValueError(f"temperature={temperature!r} must be 0 (greedy) or above")
    if temperature == 0 and samples > 1:
        raise ValueError(
            f"temperature=0 makes samples={samples} alike; use a temperature above 0, such as 1.0"
        )
    if not prompts:
        return []
    ids = tokenizer(list(prompts))["input_ids"]  # with the default special tokens
    check_room(model, ids, max_completion_tokens)
    ids = [prompt for prompt in ids for _ in range(samples)]  # (B * samples)
    how = (
        {"do_sample": True, "temperature": float(temperature), "top_k": 0}
        if temperature
        else {"do_sample": False}
    )
    ends = end_ids(model, tokenizer)
    config = GenerationConfig(
        max_new_tokens=max_completion_tokens,
        eos_token_id=ends,
        pad_token_id=tokenizer.pad_token_id if tokenizer.pad_token_id is not None else (ends or [0])[0],
        disable_compile=True,
        **how,
    )
    with _as_it_was(model, seed):
        if unsupported(model, config) is not None:
            written = _by_length(ids, batch_size, lambda prompts: _generate(model, prompts, config))
        elif temperature:
            written = _sample_all(model, ids, config, batch_size, seed)
        else:
            prefix = common_prefix(ids)
            cache = _compute(model, prefix) if prefix else None
            rests = [prompt[len(prefix) :] for prompt in ids]
            written = _by_length(
                rests, batch_size, lambda rests: _greedy(model, rests, ends, max_completion_tokens, cache)
            )
    made = []
    for tokens in written:
        tokens = up_to_end(tokens, ends)
        text = tokenizer.decode(tokens, skip_special_tokens=True)
        made.append(Completion(text, len(tokens), tokens[-1] not in ends, tuple(tokens)))
    return made


def common_prefix(prompts: Sequence[list[int]]) -> list[int]:
    """The tokens with which all prompts begin, at least one left to each; [] where it would not pay to share them.

    >>> common_prefix([[*range(20), 7], [*range(20), 8, 9]]) == list(range(20))
    True
    """
    # The common prefix of all is that of the smallest and the largest, which is what commonprefix looks at.
    length = min(len(commonprefix(prompts)), min(map(len, prompts)) - 1)
    return list(prompts[0][:length]) if len(prompts) > 1 and length >= _SHORTEST_PREFIX else []


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


def up_to_end(tokens: list[int], ends: Collection[int]) -> list[int]:
    """The tokens up to the first that ends a completion, itself included; all of them if none does.

    >>> up_to_end([5, 2, 2], {2})
    [5, 2]
    """
    length = next((i + 1 for i, token in enumerate(tokens) if token in ends), len(tokens))
    return tokens[:length]


def _by_length(
    prompts: list[list[int]], batch_size: int, decode: Callable[[list[list[int]]], list[list[int]]]
) -> list[list[int]]:
    """decode(batch) for batches of prompts of about one length, so with little padding; in the prompts' order."""
    order = sorted(range(len(prompts)), key=lambda i: -len(prompts[i]))
    made: dict[int, list[int]] = {}
    for first in range(0, len(order), batch_size):
        batch = order[first : first + batch_size]
        made.update(zip(batch, decode([prompts[i] for i in batch]), strict=True))
    return [made[i] for i in range(len(prompts))]


def _generate(model: PreTrainedModel, prompts: list[list[int]], config: GenerationConfig) -> list[list[int]]:
    """The new tokens of one batch by transformers' generate, padded at the end."""
    # Padded here and not by the tokenizer, whose padding side then needs no setting.
    ids, mask = left_pad(prompts, config.pad_token_id, next(model.parameters()).device)
    made = model.generate(input_ids=ids, attention_mask=mask, generation_config=config)
    return made[:, ids.size(1) :].tolist()


def _compute(model: PreTrainedModel, prefix: list[int]) -> DynamicCache:
    """Keys and values of the prefix, one row."""
    cache = DynamicCache(config=base_model(model).config)
    ids = torch.tensor([prefix], device=next(model.parameters()).device)
    base_model(model).get_decoder()(input_ids=ids, past_key_values=cache, use_cache=True)
    return cache


def _greedy(
    model: PreTrainedModel,
    rests: list[list[int]],
    ends: Collection[int],
    limit: int,
    prefix: DynamicCache | None,
) -> list[list[int]]:
    """The likeliest tokens behind prefix + rest of each row, up to its end; ended rows leave the batch."""
    base = base_model(model)
    ids, mask = left_pad(rests, 0, next(model.parameters()).device)
    cache = DynamicCache(config=base.config)
    if prefix is not None:  # laid out as prefix, padding, rest
        for place, layer in enumerate(prefix.layers):
            cache.update(*(x.expand(len(rests), -1, -1, -1) for x in (layer.keys, layer.values)), place)
        mask = torch.cat([mask.new_ones(len(rests), prefix.get_seq_length()), mask], dim=1)
    positions = (mask.cumsum(-1) - 1).clamp(min=0)[:, -ids.size(1) :]
    rows = list(range(len(rests)))
    written: list[list[int]] = [[] for _ in rests]
    for _ in range(limit):
        hidden = base.get_decoder()(
            input_ids=ids, attention_mask=mask, position_ids=positions, past_key_values=cache, use_cache=True
        ).last_hidden_state
        tokens = base.get_output_embeddings()(hidden[:, -1]).argmax(-1)  # (R,)
        said = tokens.tolist()
        for row, token in zip(rows, said, strict=True):
            written[row].append(token)
        live = [i for i, token in enumerate(said) if token not in ends]
        if not live:
            break
        if len(live) < len(rows):
            kept = torch.tensor(live, device=ids.device)
            cache.batch_select_indices(kept)
            mask, positions, tokens = mask[kept], positions[kept], tokens[kept]
            rows = [rows[i] for i in live]
        ids, positions = tokens[:, None], positions[:, -1:] + 1
        mask = torch.cat([mask, mask.new_ones(len(rows), 1)], dim=1)
    return written


def _sample_all(
    model: PreTrainedModel, ids: list[list[int]], config: GenerationConfig, batch_size: int, seed: int
) -> list[list[int]]:
    """Sampled tokens of every row, a prompt's rows adjacent, computed once for those that share a batch."""
    base = base_model(model)
    device = base.get_input_embeddings().weight.device
    # The engine's parts and not the engine, whose row numbers would begin anew with every batch.
    decoder = Decoder(base, bucketed=device.type != "cpu")
    sampler = Sampler.from_config(config, seed)
    made: list[list[int]] = []
    for rows in row_batches(ids, batch_size):
        prompts = [ids[r] for r in rows]
        tape = Tape(
            prompts,
            config.max_new_tokens,
            stop_ids=config.eos_token_id,
            stop_text=None,
            pad_id=config.pad_token_id,
            device=device,
        )
        decoder.run(prompts, torch.tensor(rows, device=device), tape, sampler, config.max_new_tokens)
        for tokens, _, logprobs, _ in tape.read():
            if not all(map(math.isfinite, logprobs)):
                raise FloatingPointError(
                    "the model's logits are not finite: its weights hold a NaN or overflowed"
                )
            made.append(tokens)
    return made


def row_batches(prompts: Sequence[Sequence[int]], batch_size: int) -> list[list[int]]:
    """Rows 0..B-1 in order, at most batch_size together; equal neighbours are parted only where they are more.

    >>> row_batches([[7], [7], [8], [8], [9], [9]], 5), row_batches([[7], [7], [7]], 2)
    ([[0, 1, 2, 3], [4, 5]], [[0, 1], [2]])
    """
    batches: list[list[int]] = [[]]
    for _, same in groupby(range(len(prompts)), key=lambda r: prompts[r]):
        group = list(same)
        for first in range(0, len(group), batch_size):
            part = group[first : first + batch_size]
            if len(batches[-1]) + len(part) > batch_size:
                batches.append([])
            batches[-1] += part
    return [batch for batch in batches if batch]


def end_ids(model: PreTrainedModel, tokenizer: PreTrainedTokenizerBase) -> list[int]:
    """Every token that ends a completion: the tokenizer's and all that the model declares."""
    declared = base_model(model).generation_config.eos_token_id
    declared = [] if declared is None else [declared] if isinstance(declared, int) else list(declared)
    return [end for end in dict.fromkeys([tokenizer.eos_token_id, *declared]) if end is not None]


@contextmanager
def _as_it_was(model: PreTrainedModel, seed: int) -> Iterator[None]:
    """Evaluation mode, plain decoding and a seed inside; modes, settings and random state put back."""
    base = base_model(model)
    modes = [(module, module.training) for module in model.modules()]
    settings = base.generation_config
    device = next(model.parameters()).device
    with torch.random.fork_rng([device] if device.type == "cuda" else []), torch.no_grad():
        torch.manual_seed(seed)
        model.eval()
        # Else what a checkpoint brings along (Qwen2.5: top_k 20, repetition_penalty 1.1) fills what we leave open.
        base.generation_config = GenerationConfig()
        try:
            yield
        finally:
            base.generation_config = settings
            for module, training in modes:
                module.training = training


def check_room(model: PreTrainedModel, ids: Sequence[Sequence[int]], limit: int) -> None:
    """Raises ValueError for prompts without tokens, or with too many to write `limit` more into the model's context."""
    context = getattr(model.config.get_text_config(), "max_position_embeddings", None)
    for place, prompt in enumerate(ids):
        if not prompt:
            raise ValueError(f"prompts[{place}] has no tokens; every prompt needs at least one")
        if context and len(prompt) + limit > context:
            raise ValueError(
                f"prompts[{place}] has {len(prompt)} tokens, which with max_completion_tokens={limit} exceeds the "
                f"model's context of {context}; drop it or lower max_completion_tokens"
            )
