"""VllmSample: the completions of a step by vLLM, in this process or as a server, with the trainer's weights.

Sampler and trainer score the same tokens. With the same weights they differ by rounding, and by about as much as they
did at the first rollout; a weight that a load did not reach shows as more. That is asked of every rollout, before it is
trained on. Sequences end where the trainer says.

Left out: 4-bit bases, which every sum would round anew; several processes (grpo_kit.more.bridges.to_trl).
"""

from __future__ import annotations

import time
from collections.abc import Hashable, Iterator, Sequence
from contextlib import contextmanager
from importlib.util import find_spec
from typing import Any

import torch
import torch.distributed as dist
from peft import PeftModel
from peft.tuners.tuners_utils import BaseTunerLayer

from grpo_kit.engine.cpu._kv_prefill import weight_version
from grpo_kit.loop.batch import Batch, as_batch, padded, prompts_of_groups
from grpo_kit.loop.config import Config, StepNumbers
from grpo_kit.loop.padded_update import PaddedUpdate
from grpo_kit.models._model_facts import base_model, end_ids
from grpo_kit.more.bridges._vllm_engines import InThisProcess, Server
from grpo_kit.more.episodes._episode_sample import Write, Written

# Nats a token, the mean over a rollout. The floor of 16-bit samplers is the red flag "sampler gap"'s.
_FLOOR = {True: 2e-3, False: 0.05}  # by: both in float32
_TIMES_THE_FIRST = 5
_FIRST = 4  # floors that the first rollout may be apart


class SamplerNotInStep(RuntimeError):
    """The sampler's weights are not the trainer's; nothing was trained on what it wrote."""


class VllmSample:
    """Called as `generate` is; vLLM starts, or is connected to, at the first call.

    server: the address of a vLLM server; None: vLLM in this process. through: a folder that the server sees too, for
    weights on their way; None: the system's for temporary files. server_seconds: how long it is waited for.
    engine: arguments of vllm.LLM, such as gpu_memory_utilization=0.3, max_model_len=1024 (prompt and completion),
    enable_sleep_mode=True, dtype="bfloat16" (else config.autocast's, else that of the weights).

    All weights are given to vLLM before a rollout, where they changed since the last one. Adapters are added up in
    float32; the model stays bit for bit. Each completion has a seed of its own, drawn from torch's generator. So a
    step's completions are a function of (weights, seed, step) as far as vLLM's arithmetic is.
    sampler_logprobs are vLLM's, unless top-p, top-k, min-p or a repetition penalty cut its distribution: then they are
    of what was left, and are left out of the batch.
    Metrics: rollout/sync_seconds, of the last load of weights; rollout/logprob_gap by the loop.
    turns: the same as a writer of turns, for episodes: EpisodeSample(VllmSample(...).turns).
    Raises ValueError where vLLM cannot be started or reached, for 4- and 8-bit bases and for several processes;
    SamplerNotInStep where vLLM's log-probabilities are further from the trainer's than rounding.

    >>> kit.GRPOTrainer(model, task, config, sample=VllmSample(gpu_memory_utilization=0.3), ...)  # doctest: +SKIP
    """

    def __init__(
        self,
        server: str | None = None,
        *,
        through: str | None = None,
        server_seconds: float = 240.0,
        **engine: Any,
    ) -> None:
        if server is not None and engine:
            raise ValueError(
                f"{', '.join(engine)}: arguments of a vLLM in this process; start the server with them"
            )
        if server is None and find_spec("vllm") is None:
            raise ValueError(
                'vllm is not installed; pip install "grpo-kit[vllm]", or leave sample out'
            )
        self.server, self.through, self.server_seconds = server, through, server_seconds
        self.engine_arguments = engine
        self.engine: InThisProcess | Server | None = None
        self.first_gap: float | None = None  # nats a token, at the first rollout
        self.sync_seconds = 0.0
        self._loaded: tuple | None = None  # the weights that vLLM has, by weight_version

    def __call__(
        self,
        model: Any,
        tokenizer: Any,
        task: Any,
        rows: Sequence[dict[str, Any]],
        config: Config,
        numbers: StepNumbers,
    ) -> Batch:
        """group_size completions of each row's prompt, with their log-probabilities."""
        prompts = prompts_of_groups(model, tokenizer, task, rows, config)
        with self.turns(model, tokenizer, config, numbers) as write:
            completions = write(prompts, [], 1)
        return as_batch(
            tokenizer,
            rows,
            config.group_size,
            prompts,
            completions.completion_ids,
            end_ids(model, tokenizer),
            sampler_logprobs=completions.logprobs,
        )

    def measures(self, batch: Batch, task: Any) -> dict[str, float]:
        """rollout/sync_seconds."""
        return {"rollout/sync_seconds": self.sync_seconds}

    @contextmanager
    def turns(
        self, model: Any, tokenizer: Any, config: Config, numbers: StepNumbers
    ) -> Iterator[Write]:
        """A writer of turns, as EpisodeSample takes one: vLLM has the trainer's weights inside."""
        self._set_up(model, tokenizer, config)
        self._load(model)
        sampling = {
            "temperature": numbers.temperature,
            "top_p": config.top_p,
            "top_k": config.top_k,
            "min_p": config.min_p,
            "repetition_penalty": config.repetition_penalty,
            "max_tokens": config.max_completion_tokens,
            "stop_token_ids": list(end_ids(model, tokenizer)),
            "ignore_eos": True,
            "logprobs": 0,
        }
        cuts = (
            config.top_p < 1
            or config.top_k > 0
            or config.min_p > 0
            or config.repetition_penalty != 1
        )

        def write(prompts: list[list[int]], episodes: list[int], turn: int) -> Written:
            seeds = torch.randint(2**31 - 1, (len(prompts),)).tolist()
            completions = self.engine.complete(prompts, sampling, seeds)
            ids = [completion_ids for completion_ids, _ in completions]
            logprobs = [completion_logprobs for _, completion_logprobs in completions]
            self._check_gap(model, prompts, ids, logprobs, config, numbers, slack=float(cuts))
            return Written(ids, None if cuts else logprobs)

        try:
            yield write
        finally:
            if self.engine_arguments.get("enable_sleep_mode"):
                self.engine.sleep()
                self._loaded = None  # it throws its weights away

    def _set_up(self, model: Any, tokenizer: Any, config: Config) -> None:
        if dist.is_available() and dist.is_initialized() and dist.get_world_size() > 1:
            raise ValueError(
                f"{dist.get_world_size()} processes: VllmSample is for one; grpo_kit.more.bridges.to_trl gives a "
                "trl.GRPOTrainer that shares a vLLM"
            )
        base = base_model(model)
        if getattr(base, "is_loaded_in_4bit", False) or getattr(
            base, "is_loaded_in_8bit", False
        ):
            raise ValueError(
                "vLLM needs the sum of base and adapters, and a 4-bit or 8-bit base would be rounded anew at each; "
                "leave sample out, for the kit's engine, or use tuning='lora'"
            )
        if self.engine is not None:
            return
        if self.server is not None:
            self.engine = Server(self.server, self.through, self.server_seconds)
        else:
            dtype = _dtype_of(base)
            if config.autocast != "none":
                dtype = getattr(torch, config.autocast)
            sequences = config.prompts_per_step * config.group_size
            self.engine = InThisProcess(
                model, tokenizer, dtype, sequences, self.engine_arguments
            )
        if not self._exact(model, config):
            print(
                f"vLLM samples in {str(self.engine.dtype).removeprefix('torch.')}: about 0.01 nats a token apart from "
                "the trainer by rounding. rollout/logprob_gap says how far; Config(importance_sampling_cap=2) weighs "
                "by it.",
                flush=True,
            )

    def _load(self, model: Any) -> None:
        # By their values: a fused optimizer is not seen in torch's counts of writes.
        version = weight_version(model)
        if version == self._loaded:
            return
        start = time.monotonic()
        self._loaded = None
        self.engine.load(_summed_weights(model))
        self._loaded, self.sync_seconds = version, time.monotonic() - start

    def _exact(self, model: Any, config: Config) -> bool:
        dtypes = {_dtype_of(base_model(model)), self.engine.dtype}
        return dtypes == {torch.float32} and config.autocast == "none"

    def _check_gap(
        self,
        model: Any,
        prompts: list[list[int]],
        ids: list[list[int]],
        logprobs: list[list[float]],
        config: Config,
        numbers: StepNumbers,
        slack: float,
    ) -> None:
        """Of some completions, vLLM's log-probabilities beside the trainer's.

        slack: nats that a cut distribution may be apart. Raises SamplerNotInStep where it is more than rounding.
        """
        indices = _few(list(map(tuple, prompts)), list(map(len, ids)))
        if not indices:
            return
        part = Batch(
            rows=[{}] * len(indices),
            groups=indices,
            prompt_ids=[prompts[i] for i in indices],
            completion_ids=[ids[i] for i in indices],
            completions=[""] * len(indices),
            cut_off=[False] * len(indices),
        )
        trainer_logprobs = PaddedUpdate(config).logprobs(model, part, numbers.temperature)
        device = trainer_logprobs.device
        vllm_logprobs = padded([logprobs[i] for i in indices], part.width, device)
        distances = (trainer_logprobs - vllm_logprobs).abs()
        gap = distances[part.mask(device).bool()].mean().item()
        floor = _FLOOR[self._exact(model, config)]
        if self.first_gap is None:
            limit, place = slack + _FIRST * floor, "at the first rollout"
        else:
            limit = slack + max(_TIMES_THE_FIRST * self.first_gap, floor)
            place = f"in step {numbers.step + 1}, {self.first_gap:.2g} at the first"
        if not gap <= limit:
            raise SamplerNotInStep(
                f"the sampler's weights are not the trainer's: its log-probabilities are {gap:.2g} nats a token away "
                f"{place}, where rounding makes at most {limit:.2g}. Nothing was trained on these completions. Leave "
                "sample out, for the kit's engine; for a server, see that it serves this model in the dtype that it "
                "was trained in"
            )
        if self.first_gap is None:
            self.first_gap = gap


def _dtype_of(model: Any) -> torch.dtype:
    return next(p for p in model.parameters() if p.is_floating_point()).dtype


def _summed_weights(model: Any) -> Iterator[tuple[str, torch.Tensor]]:
    """Name and tensor of each weight, by the names of the model without adapters; tied ones once.

    Adapters are added up in float32 on a copy, a layer at a time: merging into the base and taking them out again would
    round it each time.
    """
    if not isinstance(model, PeftModel):
        yield from ((name, p.data) for name, p in model.named_parameters())
        return
    layer_weights: dict[int, torch.Tensor] = {}
    adapted = {}
    for layer in model.modules():
        if isinstance(layer, BaseTunerLayer):
            adapted |= {id(weight): layer for weight in layer.get_base_layer().parameters()}
    for name, weight in model.named_parameters():
        if model.prefix in name or "original_module" in name:
            continue
        name = name.removeprefix("base_model.model.").replace(".base_layer", "")
        layer = adapted.get(id(weight))
        if layer is not None and id(weight) not in layer_weights:
            layer_weights = _merged_weights(layer)  # of one layer at a time
        yield (
            name.replace("modules_to_save.default.", ""),
            layer_weights.get(id(weight), weight.data),
        )


def _merged_weights(layer: BaseTunerLayer) -> dict[int, torch.Tensor]:
    """The base layer's weights with its active adapters, in float32, by id; the layer stays bit for bit."""
    originals = [(weight, weight.data) for weight in layer.get_base_layer().parameters()]
    for weight, data in originals:
        weight.data = data.to(torch.float32, copy=True)
    try:
        layer.merge()
        return {id(weight): weight.data for weight, _ in originals}
    finally:
        layer.merged_adapters.clear()
        for weight, data in originals:
            weight.data = data


def _few(prompts: Sequence[Hashable], lengths: Sequence[int]) -> list[int]:
    """Indices of at most two completions of at most two prompts each, the longest first; empty ones are left out.

    >>> _few(["a", "a", "a", "b", "c"], [1, 5, 2, 0, 3])
    [1, 4, 2]
    """
    longest_first = sorted(range(len(lengths)), key=lambda i: -lengths[i])
    chosen: dict[Hashable, list[int]] = {}
    for i in longest_first:
        if lengths[i] and (prompts[i] in chosen or len(chosen) < 2):
            chosen.setdefault(prompts[i], []).append(i)
    indices = [i for members in chosen.values() for i in members[:2]]
    return [i for i in longest_first if i in indices]
