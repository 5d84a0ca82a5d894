"""Let a model complete prompts, greedily or sampled, and restore it afterwards.

The rollout engine does the work: the common beginning of all prompts is computed once, each prompt once for all of its
samples; ended rows are dropped; if memory runs out it continues with half the rows. Models that the engine does
not support use transformers' generate, which does none of this.
Simplification: one device.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from itertools import groupby
from typing import TYPE_CHECKING, NamedTuple

import torch
from transformers import GenerationConfig

from grpo_kit._support import cuda
from grpo_kit._support.argument_checks import check_temperature, check_whole, template_tokens
from grpo_kit.engine._first_use import has_finite_logits
from grpo_kit.engine._supported_models import check_room, engine_failed
from grpo_kit.engine.rollout import RolloutEngine
from grpo_kit.models._model_facts import base_model, close_rows, end_ids, evaluating
from grpo_kit.models.token_lists import generate_rows, up_to_end

if TYPE_CHECKING:
    from transformers import PreTrainedModel, PreTrainedTokenizerBase

Progress = Callable[[int, int], None]


class Completion(NamedTuple):
    """text without template_tokens; tokens: number of them, the end included; cut_off at the limit?; ids of these."""

    text: str
    tokens: int
    cut_off: bool
    ids: tuple[int, ...] = ()


def complete(
    model: PreTrainedModel,
    tokenizer: PreTrainedTokenizerBase,
    prompts: Sequence[str] | Sequence[Sequence[int]],
    *,
    max_completion_tokens: int,
    samples: int = 1,
    temperature: float = 0.0,
    sampling: Mapping[str, float] | None = None,
    batch_size: int = 64,
    seed: int = 0,
    numbers: Sequence[int] | None = None,
    engine: RolloutEngine | None = None,
    progress: Progress | None = None,
) -> list[Completion]:
    """The model's completions of rendered prompts, `samples` adjacent ones for each: B prompts give B * samples.

    temperature: 0 decodes greedily; above 0 samples from the model's whole distribution (no top-k, no top-p, no
    penalty, whatever the checkpoint sets), but for what sampling has of top_p, top_k, min_p and
    repetition_penalty. Prompts are tokenized and completions ended as in TRL.
    batch_size: sequences decoded at once; a prompt's samples share a batch if they fit into one.
    seed: sample i of the result depends on (seed, i) and its prompt alone, not on batch_size; the draws are those of
    grpo_kit.engine.RolloutEngine. (A model that the engine does not support is sampled by transformers' generate,
    batch by batch.)
    prompts: texts, or the tokens of each. numbers: ids of the rows for the draws, default 0, 1, ...
    engine: one made for this model, which keeps these prompts' keys, so that the next call's prompts can continue them.
    progress: called with (completions done, completions in all) after each batch.
    Runs in evaluation mode; the model's modes and settings and the random state are restored afterwards.
    Raises ValueError naming the argument for one text in place of a list, sizes below 1, a negative temperature,
    several greedy samples, an empty prompt and one that leaves no room in the model's context. FloatingPointError if
    logits are not finite.

    >>> complete(model, tokenizer, [prompt], max_completion_tokens=8, samples=8, temperature=1.0)  # doctest: +SKIP
    """
    if isinstance(prompts, str):  # otherwise every letter would be a prompt
        raise ValueError(f"prompts={prompts[:40]!r} is one text; give a list of them")
    check_whole("samples", samples)
    check_whole("max_completion_tokens", max_completion_tokens)
    check_whole("batch_size", batch_size)
    temperature = check_temperature(temperature, greedy=True)
    if temperature == 0 and samples > 1:
        raise ValueError(
            f"temperature=0 makes samples={samples} alike; use a temperature above 0, such as 1.0"
        )
    if not prompts:
        return []
    close_rows(model, tokenizer)
    if isinstance(prompts[0], str):
        ids = tokenizer(list(prompts))["input_ids"]  # with the default special tokens
    else:
        ids = [list(prompt) for prompt in prompts]
    check_room(model, ids, max_completion_tokens)
    ids = [prompt for prompt in ids for _ in range(samples)]  # (B * samples)
    numbers = range(len(ids)) if numbers is None else numbers
    ends = end_ids(model, tokenizer)
    config = _generation_config(
        tokenizer, ends, max_completion_tokens, temperature, sampling or {}
    )
    completion_ids: dict[int, list[int]] = {}
    # transformers' draws depend on the batch alone: separate calls must not share them.
    with _plain_settings(model, seed + min(numbers)):
        decode = _decoder(model, config, seed, engine)
        for rows in _batches(ids, batch_size):
            batch_ids = decode([ids[row] for row in rows], [numbers[row] for row in rows])
            completion_ids.update(zip(rows, batch_ids, strict=True))
            if progress is not None:
                progress(len(completion_ids), len(ids))
    hidden = template_tokens(tokenizer, ends)
    completions = []
    for row in range(len(ids)):
        tokens = up_to_end(completion_ids[row], ends)
        visible_ids = [token for token in tokens if token not in hidden]
        text = tokenizer.decode(visible_ids, skip_special_tokens=False)
        completions.append(Completion(text, len(tokens), tokens[-1] not in ends, tuple(tokens)))
    return completions


def _generation_config(
    tokenizer: PreTrainedTokenizerBase,
    ends: list[int],
    max_completion_tokens: int,
    temperature: float,
    sampling: Mapping[str, float],
) -> GenerationConfig:
    pad_id = tokenizer.pad_token_id
    if pad_id is None:
        pad_id = (ends or [0])[0]
    sampling_settings = {}
    if temperature:
        sampling_settings = {"temperature": float(temperature), "top_k": 0, **sampling}
    return GenerationConfig(
        max_new_tokens=max_completion_tokens,
        eos_token_id=ends,
        pad_token_id=pad_id,
        disable_compile=True,
        do_sample=bool(temperature),
        **sampling_settings,
    )


def _decoder(
    model: PreTrainedModel, config: GenerationConfig, seed: int, engine: RolloutEngine | None
) -> Callable[..., list[list[int]]]:
    """f(prompts, their row numbers) -> the completion tokens of each."""
    keep = engine is not None
    if engine is None and not RolloutEngine.unsupported(model, config):
        engine = RolloutEngine(model)

    def decode(prompts: list[list[int]], rows: list[int]) -> list[list[int]]:
        if engine is None or RolloutEngine.unsupported(model, config):
            return generate_rows(model, prompts, config)
        try:
            rollouts = engine.generate(
                prompts, config, rows=rows, seed=seed, numbers=False, keep=keep
            )
            return rollouts.completion_ids
        except torch.OutOfMemoryError:
            raise
        except Exception as error:
            if not _is_the_engines(error, model, prompts):
                raise
            reason = f"{type(error).__name__}: {error}"
        engine_failed(model, reason)
        warnings.warn(
            f"The rollout engine failed on this machine ({reason}); completions come from transformers' generate from "
            "now on: slower, other random numbers. Please paste this and `python -m grpo_kit doctor` into an issue "
            "of grpo_kit.",
            stacklevel=2,
        )
        return generate_rows(model, prompts, config)

    return decode


def _is_the_engines(error: Exception, model: PreTrainedModel, prompts: list[list[int]]) -> bool:
    """Did the engine fail on a card that it was not tested on, rather than a model whose logits are NaN anyway?"""
    if not cuda.may_fail(next(model.parameters()).device):
        return False
    return not isinstance(error, FloatingPointError) or has_finite_logits(
        model, min(prompts, key=len)
    )


def _batches(prompts: Sequence[list[int]], batch_size: int) -> list[list[int]]:
    """Rows in batches of prompts of about one length, the longest first, so that memory runs out at once or never."""
    order = sorted(range(len(prompts)), key=lambda row: (-len(prompts[row]), prompts[row]))
    batches = row_batches([prompts[row] for row in order], batch_size)
    return [[order[place] for place in batch] for batch in batches]


def row_batches(prompts: Sequence[Sequence[int]], batch_size: int) -> list[list[int]]:
    """Rows 0..B-1 in order, at most batch_size together; equal neighbours are split only if they exceed it.

    >>> row_batches([[7], [7], [8], [8], [9], [9]], 5), row_batches([[7], [7], [7]], 2)
    ([[0, 1, 2, 3], [4, 5]], [[0, 1], [2]])
    """
    batches: list[list[int]] = []
    for _, group in groupby(range(len(prompts)), key=lambda row: prompts[row]):
        rows = list(group)
        for first in range(0, len(rows), batch_size):
            part = rows[first : first + batch_size]
            if batches and len(batches[-1]) + len(part) <= batch_size:
                batches[-1] += part
            else:
                batches.append(part)
    return batches


@contextmanager
def _plain_settings(model: PreTrainedModel, seed: int) -> Iterator[None]:
    """Evaluation mode, plain decoding and a seed inside; modes, settings and random state restored."""
    base = base_model(model)
    settings = base.generation_config
    device = next(model.parameters()).device
    fork = torch.random.fork_rng([device] if device.type == "cuda" else [])
    with fork, torch.no_grad(), evaluating(model):
        torch.manual_seed(seed)
        # Otherwise a checkpoint's settings (Qwen2.5: top_k 20, repetition_penalty 1.1) replace those left open here.
        base.generation_config = GenerationConfig()
        try:
            yield
        finally:
            base.generation_config = settings
