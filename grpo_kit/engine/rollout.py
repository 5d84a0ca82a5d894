"""Completions in the trainer's process, on the trainer's own weights: no second copy, nothing to keep in sync.

The common beginning of prompts is computed once; each prompt's keys and values are shared by its completions; all rows
decode in one batch; ended rows are dropped. On CUDA the decode step is a captured graph of transformers' own layers, so
adapters, biases, norms and quantised weights are the model's own; on a CPU plain float32 layers
are computed as functions of the same tensors.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass, replace
from itertools import groupby
from typing import TYPE_CHECKING, Any

import torch
from transformers import GenerationConfig, PreTrainedModel, PreTrainedTokenizerBase, StopStringCriteria

from grpo_kit._support import cuda
from grpo_kit._support.argument_checks import check_choice, check_model, check_whole
from grpo_kit.engine._decode import Decoder, OutputBuffer, Spent
from grpo_kit.engine._first_use import why_unproven
from grpo_kit.engine._supported_models import decode_by_modules, signature, unsupported
from grpo_kit.engine.card._graphs import AutocastCache
from grpo_kit.engine.cpu._layers import why_not_here
from grpo_kit.engine.memory._free import Backoff
from grpo_kit.engine.sampling import Processor, Sampler
from grpo_kit.models._model_facts import base_model, check_context, context_length

if TYPE_CHECKING:
    from peft import PeftModel


@dataclass(frozen=True)
class Rollouts:
    """Completions, one list a row (rows as in prompt_ids), each ending at its first stop token, included.

    logprobs: of each token under the distribution it was drawn from (penalty, processors, temperature, top-k, top-p,
    min-p applied; greedy: before temperature). policy_logprobs: log_softmax(logits / temperature), as a trainer
    scores. entropies: of softmax(logits / temperature), in nats. All computed in float32.
    seconds: {"prefill": s, "decode": s}. tokens: likewise, tokens that went through the model, padding included.
    """

    completion_ids: list[list[int]]
    logprobs: list[list[float]]
    policy_logprobs: list[list[float]]
    entropies: list[list[float]]
    seconds: dict[str, float]
    tokens: dict[str, int]


@dataclass(frozen=True)
class _Batch:
    """The arguments of one call of generate."""

    prompt_ids: list[list[int]]
    numbers: list[int]
    config: GenerationConfig
    tokenizer: PreTrainedTokenizerBase | None
    keep: bool


class RolloutEngine:
    """Generates with `model` (a transformers model, or a peft one with its adapters unmerged) in its present state.

    Nothing is allocated before the first rollout. Keys, values and graphs are then kept until `release`.
    bits: of the products of weights and tokens; 32: the weights' own, of any dtype; 16: bfloat16 over float32 weights
    on a CPU, see _layers.py. Raises ValueError where 16 cannot be.

    >>> engine = RolloutEngine(model)  # doctest: +SKIP
    >>> engine.generate([[1, 2, 3]] * 8, GenerationConfig(max_new_tokens=64, do_sample=True), seed=0)  # doctest: +SKIP
    """

    def __init__(self, model: PreTrainedModel | PeftModel, *, bits: int = 32) -> None:
        check_model(model)
        check_choice("bits", bits, (32, 16))
        self.model, self.bits = model, bits
        self._decoder, self._casts = self._new_decoder(), AutocastCache()
        self._most_rows: float = math.inf  # found by running out of memory
        self._backoff = Backoff()
        self._sorts = False  # for top-p, after its quick way missed tokens
        self._state: tuple | None = None  # of the model, in the last rollout
        self._supported: tuple | None = None  # the model's state, and settings that the engine does with it

    def _new_decoder(self) -> Decoder:
        base = base_model(self.model)
        on_cpu = base.get_input_embeddings().weight.device.type == "cpu"
        if self.bits == 16 and (why := why_not_here() if on_cpu else "the model is not on a CPU"):
            raise ValueError(f"bits=16: {why}; use 32")
        return Decoder(base, bucketed=not on_cpu, bits=self.bits)

    @staticmethod
    def unsupported(model: Any, generation_config: GenerationConfig) -> str | None:
        """None if the engine supports the call, else one sentence with the reason."""
        return unsupported(model, generation_config) or why_unproven(model, RolloutEngine)

    @torch.no_grad()
    def generate(
        self,
        prompt_ids: list[list[int]],
        generation_config: GenerationConfig,
        *,
        seed: int | None = None,
        rows: Sequence[int] | None = None,
        numbers: bool = True,
        processors: Sequence[Processor] = (),
        tokenizer: PreTrainedTokenizerBase | None = None,
        keep: bool = False,
    ) -> Rollouts:
        """One completion for each entry of prompt_ids, the completions of a prompt adjacent (groups may differ).

        generation_config: max_new_tokens, do_sample, temperature, top_k, top_p, min_p, repetition_penalty,
        eos_token_id, stop_strings. None means off; only a missing eos_token_id is taken from the checkpoint.
        seed: row i's draws depend on (seed, i) and its own text alone; None takes one number from torch's global
        generator. rows: ids of the entries of prompt_ids, for seed and processors; default 0, 1, ...
        numbers: False skips log-probabilities and entropies, which evaluation does not read: empty lists.
        processors: f(input_ids, scores, rows) -> scores, after the penalty and before the temperature;
        input_ids long (R, T) left-padded, scores float32 (R, V), rows long (R,) the index into prompt_ids.
        tokenizer: needed for stop_strings.
        keep: the next call's prompts continue these, like turns of episodes: on a CPU their keys and values stay.
        Out of memory: the rows are halved and the rollout continues, with the same result and a line to report it. The
        next calls halve them, too; after a while twice as many are tried again (Backoff).
        Layers in few kernels that fail on a card give way to the model's modules, with a line.
        Restores the model's modes, settings and weights in every case.
        Raises ValueError for unsupported settings, an empty prompt, and prompts too long for the context.
        """
        self._look_at_model(generation_config)
        limit = generation_config.max_new_tokens
        self.check(self.model, prompt_ids, limit)
        if generation_config.stop_strings and tokenizer is None:
            raise ValueError("stop_strings need tokenizer=, to know what each token reads like")
        if seed is None:
            seed = int(torch.randint(2**63 - 1, ()))
        sampler = Sampler.from_config(generation_config, seed, processors, numbers=numbers, sort=self._sorts)
        ids = list(range(len(prompt_ids)) if rows is None else rows)
        batch = _Batch(prompt_ids, ids, generation_config, tokenizer, keep)
        while True:
            with self._evaluating():
                try:
                    rollouts = self._rollout(batch, sampler)
                    return (
                        rollouts
                        if numbers
                        else replace(rollouts, logprobs=[], policy_logprobs=[], entropies=[])
                    )
                except torch.OutOfMemoryError:
                    raise
                except Exception as error:
                    if isinstance(error, FloatingPointError):
                        self._decoder.slots = None  # otherwise the next rollout would find a NaN in it
                    if not (self.in_few_kernels and cuda.may_fail(self._decoder.device)):
                        raise
                    decode_by_modules(self.model, f"{type(error).__name__}: {str(error)[:200]}")
            self.release()
            self._decoder = self._new_decoder()  # its graphs, too, may have failed

    @property
    def in_few_kernels(self) -> bool:
        """Are the model's layers computed by _fused_layers.py, or were they in the last rollout?"""
        return self._decoder.fused is not None

    def _rollout(self, batch: _Batch, sampler: Sampler) -> Rollouts:
        """All rows, in as many batches as memory needs. Raises FloatingPointError for numbers that are not finite."""
        spent = Spent({"prefill": 0.0, "decode": 0.0}, {"prefill": 0, "decode": 0})
        config = batch.config
        limit, pad_id, texts = config.max_new_tokens, config.pad_token_id, config.stop_strings
        ending = dict(
            stop_ids=self._stop_ids(config),
            stop_text=StopStringCriteria(batch.tokenizer, texts) if texts else None,
            pad_id=0 if pad_id is None else pad_id,
        )
        device = self._decoder.device
        result: dict[int, tuple] = {}
        waiting = [list(range(len(batch.prompt_ids)))]
        fewer = len(waiting[0]) > self._most_rows
        while waiting:
            part = waiting.pop(0)
            if len(part) > self._most_rows:
                waiting[:0] = halve(part, batch.prompt_ids)
                continue
            try:
                prompts = [batch.prompt_ids[r] for r in part]
                tape = OutputBuffer(prompts, limit, device=device, **ending)
                numbers = torch.tensor([batch.numbers[r] for r in part], device=device)
                more = self._decoder.run(prompts, numbers, tape, sampler, keep=batch.keep)
                if sampler.too_few():
                    self._sorts = True
                    waiting.insert(0, part)
                    continue
                result.update(zip(part, tape.read(), strict=True))
                for total, counts in zip(spent, more, strict=True):
                    total.update({phase: n + counts[phase] for phase, n in total.items()})
                continue
            except torch.OutOfMemoryError:
                if len(part) == 1:
                    raise
            # Outside the handler the error is gone, and with it the tensors of its frames.
            tape = None
            self.release()
            sampler.release()
            self._most_rows = len(part) - 1
            self._backoff.failed()
            waiting.insert(0, part)
            print(f"Rollout: {len(part)} rows do not fit in memory; going on with half of them at a time")
        if fewer and self._backoff.again():
            self._most_rows = 2 * self._most_rows + 1
        columns = zip(*(result[r] for r in range(len(batch.prompt_ids))), strict=True)
        rollouts = Rollouts(*map(list, columns), *spent)
        if not all(map(math.isfinite, (x for row in rollouts.policy_logprobs for x in row))):
            raise FloatingPointError(
                "the model's logits are not finite: its weights hold a NaN or overflowed"
            )
        return rollouts

    def release(self) -> None:
        """Release keys, values, graphs, casts and left-over memory."""
        self._decoder.release()
        self._casts.clear()
        if self._decoder.device.type == "cuda":
            torch.cuda.empty_cache()

    def nbytes(self) -> int:
        """Bytes kept between rollouts, on a card: keys and values, graphs, casts."""
        decoder = self._decoder
        slots = 0 if decoder.slots is None else decoder.slots.nbytes()
        fused = 0 if decoder.fused is None else decoder.fused.nbytes()
        return slots + decoder.graphs.nbytes() + fused + self._casts.nbytes()

    def capture_seconds(self) -> float:
        """What the graphs that are kept have taken to be made."""
        return self._decoder.graphs.seconds

    @staticmethod
    def check(model: Any, prompt_ids: list[list[int]], limit: int | None) -> None:
        """Raises ValueError for no or an empty prompt, and for one too long for the context with `limit` new tokens."""
        check_whole("max_new_tokens", limit)
        if not prompt_ids:
            raise ValueError("prompt_ids is empty; give at least one prompt")
        for i, prompt in enumerate(prompt_ids):
            if not len(prompt):
                raise ValueError(f"prompt_ids[{i}] is an empty prompt; every prompt needs at least one token")
        longest = max(range(len(prompt_ids)), key=lambda i: len(prompt_ids[i]))
        check_context(
            context_length(model), len(prompt_ids[longest]), limit, where=f"prompt_ids[{longest}]",
            length="max_new_tokens", mend="shorten one of the two",
        )  # fmt: skip

    def _stop_ids(self, generation_config: GenerationConfig) -> list[int]:
        ids = generation_config.eos_token_id
        if ids is None:
            ids = base_model(self.model).generation_config.eos_token_id
        return [] if ids is None else list(ids) if isinstance(ids, (list, tuple)) else [ids]

    def _look_at_model(self, generation_config: GenerationConfig) -> None:
        """Drop what was made over other weights. Raises ValueError for what the engine cannot do with this model."""
        base = base_model(self.model)
        state = signature(self.model)
        checkpoint = getattr(base, "generation_config", None)
        supported = state, vars(generation_config).copy(), checkpoint and vars(checkpoint).copy()
        if supported != self._supported:
            if why := self.unsupported(self.model, generation_config):
                raise ValueError(f"the rollout engine cannot do this: {why}")
            self._supported = supported
        if base.get_input_embeddings().weight.device != self._decoder.device:
            self._decoder = self._new_decoder()  # the model moved
        if state != self._state:
            self._decoder.graphs.clear()
            self._casts.clear()
            self._decoder.fused = None
            self._state = state

    @contextmanager
    def _evaluating(self) -> Iterator[None]:
        """Evaluation mode (no dropout); on a card with kept casts of the weights."""
        training = [m for m in self.model.modules() if m.training]
        self.model.eval()
        decoder = self._decoder
        try:
            with self._casts.instead_of_autocasts(decoder.device.type) if decoder.bucketed else nullcontext():
                yield
        finally:
            for module in training:
                module.training = True


def halve(rows: list[int], prompt_ids: Sequence[Sequence[int]]) -> list[list[int]]:
    """Two parts that hold whole prompts if there are several, else half of the one prompt's rows each.

    >>> halve([0, 1, 2, 3, 4], [[7], [7], [7], [8], [8]])
    [[0, 1, 2], [3, 4]]
    """
    groups = [list(g) for _, g in groupby(rows, key=lambda r: tuple(prompt_ids[r]))]
    if len(groups) == 1:
        return [rows[: len(rows) // 2], rows[len(rows) // 2 :]]
    middle = len(groups) // 2
    return [[r for g in part for r in g] for part in (groups[:middle], groups[middle:])]
