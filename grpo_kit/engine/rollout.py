"""Completions in the trainer's process, on the trainer's own weights: no second copy, nothing to keep in sync.

The common beginning of prompts is computed once; each prompt's keys and values are shared by its completions; all rows
decode in one batch; ended rows are dropped. On CUDA the decode step is a captured graph of transformers' own layers, so
adapters, biases, norms and quantised weights are the model's own; on a CPU plain float32 layers
are computed as functions of the same tensors.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Sequence
from contextlib import nullcontext
from dataclasses import dataclass, replace
from itertools import groupby
from typing import TYPE_CHECKING, Any

import torch
from transformers import (
    GenerationConfig,
    PreTrainedModel,
    PreTrainedTokenizerBase,
    StopStringCriteria,
)

from grpo_kit._support import cuda
from grpo_kit._support.argument_checks import check_choice, check_model
from grpo_kit.engine._decode import Decoder, OutputBuffer
from grpo_kit.engine._first_use import why_unproven
from grpo_kit.engine._supported_models import (
    check_room,
    decode_by_modules,
    signature,
    unsupported,
)
from grpo_kit.engine.card._graphs import AutocastCache
from grpo_kit.engine.cpu._layers import why_not_here
from grpo_kit.engine.memory._free import Backoff
from grpo_kit.engine.sampling import Processor, Sampler
from grpo_kit.models._model_facts import base_model, evaluating

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
        self._decoder = self._new_decoder()
        self._casts = AutocastCache()
        self._most_rows: float = math.inf  # less once memory ran out
        self._backoff = Backoff()
        self._sorts = False  # for top-p, after its quick way missed tokens
        self._state: tuple | None = None  # of the model, in the last rollout
        # the model's state, and settings that the engine does with it
        self._supported: tuple | None = None

    def _new_decoder(self) -> Decoder:
        base = base_model(self.model)
        on_cpu = base.get_input_embeddings().weight.device.type == "cpu"
        if self.bits == 16:
            problem = why_not_here() if on_cpu else "the model is not on a CPU"
            if problem:
                raise ValueError(f"bits=16: {problem}; use 32")
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
        if not prompt_ids:
            raise ValueError("prompt_ids is empty; give at least one prompt")
        check_room(
            self.model,
            prompt_ids,
            generation_config.max_new_tokens,
            name="prompt_ids",
            length="max_new_tokens",
            mend="shorten one of the two",
        )
        if generation_config.stop_strings and tokenizer is None:
            raise ValueError("stop_strings need tokenizer=, to know what each token reads like")
        if seed is None:
            seed = int(torch.randint(2**63 - 1, ()))
        sampler = Sampler.from_config(
            generation_config, seed, processors, numbers=numbers, sort=self._sorts
        )
        rows = range(len(prompt_ids)) if rows is None else rows
        ending = self._ending(generation_config, tokenizer)
        while True:
            casts = nullcontext()  # of the weights, kept on a card
            if self._decoder.bucketed:
                casts = self._casts.instead_of_autocasts(self._decoder.device.type)
            with evaluating(self.model), casts:
                try:
                    rollouts = self._rollout(prompt_ids, rows, sampler, ending, keep)
                    if not numbers:
                        rollouts = replace(
                            rollouts, logprobs=[], policy_logprobs=[], entropies=[]
                        )
                    return rollouts
                except torch.OutOfMemoryError:
                    raise
                except Exception as error:
                    if isinstance(error, FloatingPointError):
                        # otherwise the next rollout would find a NaN in it
                        self._decoder.slots = None
                    if not (self.in_few_kernels and cuda.may_fail(self._decoder.device)):
                        raise
                    decode_by_modules(self.model, f"{type(error).__name__}: {str(error)[:200]}")
            self.release()
            self._decoder = self._new_decoder()  # its graphs, too, may have failed

    @property
    def in_few_kernels(self) -> bool:
        """Are the model's layers computed by _fused_layers.py, or were they in the last rollout?"""
        return self._decoder.fused is not None

    def _ending(
        self, config: GenerationConfig, tokenizer: PreTrainedTokenizerBase | None
    ) -> dict[str, Any]:
        """What ends a completion, and what stands around it: arguments of OutputBuffer."""
        stop_ids = config.eos_token_id
        if stop_ids is None:
            stop_ids = base_model(self.model).generation_config.eos_token_id
        if stop_ids is None:
            stop_ids = []
        elif isinstance(stop_ids, int):
            stop_ids = [stop_ids]
        stop_text = None
        if config.stop_strings:
            stop_text = StopStringCriteria(tokenizer, config.stop_strings)
        return {
            "limit": config.max_new_tokens,
            "stop_ids": stop_ids,
            "stop_text": stop_text,
            "pad_id": config.pad_token_id or 0,
            "device": self._decoder.device,
        }

    def _rollout(
        self,
        prompt_ids: list[list[int]],
        rows: Sequence[int],
        sampler: Sampler,
        ending: dict[str, Any],
        keep: bool,
    ) -> Rollouts:
        """All rows, in as many batches as memory needs. Raises FloatingPointError for numbers that are not finite."""
        seconds, tokens = (
            Counter({"prefill": 0.0, "decode": 0.0}),
            Counter({"prefill": 0, "decode": 0}),
        )
        completions: dict[int, tuple] = {}
        waiting = [list(range(len(prompt_ids)))]
        is_limited = len(prompt_ids) > self._most_rows
        while waiting:
            part = waiting.pop(0)
            if len(part) > self._most_rows:
                waiting[:0] = halve(part, prompt_ids)
                continue
            try:
                prompts = [prompt_ids[i] for i in part]
                output = OutputBuffer(prompts, **ending)
                row_ids = torch.tensor([rows[i] for i in part], device=self._decoder.device)
                cost = self._decoder.run(prompts, row_ids, output, sampler, keep=keep)
                if sampler.too_few():
                    self._sorts = True
                    waiting.insert(0, part)
                    continue
                completions.update(zip(part, output.read(), strict=True))
                seconds.update(cost.seconds)
                tokens.update(cost.tokens)
                continue
            except torch.OutOfMemoryError:
                if len(part) == 1:
                    raise
            # Outside the handler the error is gone, and with it the tensors of its frames.
            output = None
            self.release()
            self._most_rows = len(part) - 1
            self._backoff.failed()
            waiting.insert(0, part)
            print(
                f"Rollout: {len(part)} rows do not fit in memory; going on with half of them at a time"
            )
        if is_limited and self._backoff.again():
            self._most_rows = 2 * self._most_rows + 1
        columns = map(list, zip(*(completions[i] for i in range(len(prompt_ids))), strict=True))
        rollouts = Rollouts(*columns, dict(seconds), dict(tokens))
        for logprobs in rollouts.policy_logprobs:
            if not all(map(math.isfinite, logprobs)):
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
        holders = (decoder.slots, decoder.fused, decoder.graphs, self._casts)
        return sum(holder.nbytes() for holder in holders if holder is not None)

    def capture_seconds(self) -> float:
        """What the graphs that are kept have taken to be made."""
        return self._decoder.graphs.seconds

    def _look_at_model(self, generation_config: GenerationConfig) -> None:
        """Drop what was made over other weights. Raises ValueError for what the engine cannot do with this model."""
        base = base_model(self.model)
        state = signature(self.model)
        checkpoint = getattr(base, "generation_config", None)
        settings = [
            dict(vars(config))
            for config in (generation_config, checkpoint)
            if config is not None
        ]
        if (state, settings) != self._supported:
            if problem := self.unsupported(self.model, generation_config):
                raise ValueError(f"the rollout engine cannot do this: {problem}")
            self._supported = state, settings
        if base.get_input_embeddings().weight.device != self._decoder.device:
            self._decoder = self._new_decoder()  # the model moved
        if state != self._state:
            self._decoder.graphs.clear()
            self._casts.clear()
            self._decoder.fused = None
            self._state = state


def halve(rows: list[int], prompt_ids: Sequence[Sequence[int]]) -> list[list[int]]:
    """Two parts that hold whole prompts if there are several, else half of the one prompt's rows each.

    >>> halve([0, 1, 2, 3, 4], [[7], [7], [7], [8], [8]])
    [[0, 1, 2], [3, 4]]
    """
    groups = [list(group) for _, group in groupby(rows, key=lambda row: tuple(prompt_ids[row]))]
    if len(groups) == 1:
        middle = len(rows) // 2
    else:
        middle = sum(map(len, groups[: len(groups) // 2]))
    return [rows[:middle], rows[middle:]]
