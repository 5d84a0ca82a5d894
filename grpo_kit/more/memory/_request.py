"""The arguments of a plan, and the plan itself: bytes of each moment of a step on one card."""

from __future__ import annotations

import functools
import math
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from transformers import AutoModelForCausalLM, PretrainedConfig

from grpo_kit.engine.memory._activations import ChunkMemory, update_budget
from grpo_kit.engine.memory._free import card_itemsize, decode_bytes
from grpo_kit.engine.optim.choose import OPTIMIZERS
from grpo_kit.loop.config import Preset
from grpo_kit.models._model_facts import config_of
from grpo_kit.more.memory._plan_table import COLOURS, GIB, MemoryPlan


class Counts(NamedTuple):
    """Parameters: of linear layers without the head; embedding and head; biases and norms; adapters on the first."""

    linear: int
    ends: int
    norms: int
    adapters: int

    @property
    def all(self) -> int:
        """Parameters of the model without adapters."""
        return self.linear + self.ends + self.norms


def count(config: PretrainedConfig, rank: int) -> Counts:
    """Parameters of a model of that config, with adapters of that rank on its linear layers; nothing is allocated."""
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(config)
    head, embedding = model.get_output_embeddings(), model.get_input_embeddings()
    layers = [m for m in model.modules() if isinstance(m, torch.nn.Linear) and m is not head]
    linear = sum(layer.weight.numel() for layer in layers)
    ends = sum({id(p): p.numel() for m in (head, embedding) for p in m.parameters()}.values())
    adapters = sum(rank * (layer.in_features + layer.out_features) for layer in layers)
    norms = model.num_parameters() - linear - ends
    return Counts(linear, ends, norms, adapters)


@functools.cache
def counted(name: str, rank: int) -> Counts:
    """count() of a model by name, once."""
    return count(config_of(name), rank)


# of a card's name: 24 GB cards report 22.0 (L4, A10G, with ECC) to 23.7 GiB (3090, 4090)
USABLE = 0.92
CONTEXT_GIB = 0.6  # CUDA context, cuBLAS and kernels: an estimate
FRAGMENTATION = 0.05  # of what is allocated: an estimate

# Bytes a parameter that exist only while the optimizer steps, of torch's foreach AdamW.
_FOREACH = 4.0
# Bytes in all: SCRATCH_BYTES of engine/optim/split_adamw.py, which needs bitsandbytes.
_SPLIT_SCRATCH = 9.0 * 2**24
_FOUR_BIT = 0.5 + 1 / 64 + 4 / (64 * 256)  # bytes a weight: nf4 with double quantisation


@dataclass(frozen=True)
class Request:
    """A plan's arguments, in bytes and parameters. rank: of adapters."""

    cfg: Preset
    config: PretrainedConfig
    prompt_tokens: int
    completion_tokens: int
    attention: str
    rank: int
    usable: float
    counts: Counts

    @property
    def full(self) -> bool:
        return self.cfg.tuning in (None, "full")

    @property
    def four_bit(self) -> bool:
        return self.cfg.tuning == "qlora"

    @property
    def itemsize(self) -> int:
        """Bytes of a loaded weight that is not in 4 bits."""
        return getattr(torch, self.cfg.dtype or "float32").itemsize

    @property
    def residual(self) -> int:
        """Bytes of a number in the residual stream; peft converts what is not in 4 bits to float32."""
        return 4 if self.four_bit else self.itemsize

    @property
    def compute(self) -> int:
        """Bytes of a number in the card's computations."""
        return card_itemsize(self.cfg)

    @property
    def layers(self) -> int:
        return self.config.get_text_config().num_hidden_layers

    @property
    def scored(self) -> int:
        """Completion tokens of a step."""
        return self.cfg.completions_per_step * self.completion_tokens

    @property
    def tokens(self) -> int:
        """Positions that the update computes: it packs each prompt once."""
        return self.cfg.prompts_per_step * (self.prompt_tokens - 1) + self.scored

    @property
    def trained_bytes(self) -> int:
        """Bytes of the trained parameters, and of their gradients; adapters are float32."""
        return self.counts.all * self.itemsize if self.full else 4 * self.counts.adapters

    @property
    def cast_weights(self) -> float:
        """Bytes of the copies that autocast makes of trained weights."""
        if not self.full or self.residual == self.compute:
            return 0.0
        return self.counts.linear * self.compute

    def plan(
        self, chunk_tokens: int | None = None, checkpointed_layers: int | None = None
    ) -> MemoryPlan:
        """The plan without advice; None: cut as the trainer would cut the update."""
        state, stepping = self._optimizer()
        weights = self._weights()
        has_copy = self.full and has_reference(self.cfg)
        static = {
            "weights": weights if self.full else weights + self.trained_bytes,
            "reference model": weights if has_copy else 0.0,
            "optimizer": state,
        }
        tokens, checkpointed = self._cut(sum(static.values()) + self.trained_bytes)
        if chunk_tokens is not None:
            tokens = min(chunk_tokens, self.tokens)
        if checkpointed_layers is not None:
            checkpointed = checkpointed_layers
        moments = {
            "rollout": self._rollout(),
            "update": self._update(tokens, checkpointed),
            "optimizer step": {"optimizer's own": stepping, "gradients": self.trained_bytes},
        }
        parts = {}
        for moment, of_moment in moments.items():
            sizes = static | of_moment
            parts[moment] = {
                name: float(sizes.get(name, 0.0)) for name in COLOURS if name != "reserve"
            }
            parts[moment]["reserve"] = CONTEXT_GIB * GIB + FRAGMENTATION * sum(
                parts[moment].values()
            )
        checkpoint = state + (weights if self.full else self.trained_bytes)
        return MemoryPlan(
            self._title(),
            parts,
            self.usable / GIB,
            tokens,
            checkpointed,
            self.layers,
            checkpoint / GIB,
            [],
        )

    def _optimizer(self) -> tuple[float, float]:
        """Bytes of optimizer state, and bytes needed only while the optimizer steps; adapters have torch's AdamW."""
        name, parameters, itemsize = "adamw", self.counts.adapters, 4
        if self.full:
            name, parameters, itemsize = optimizer_of(self.cfg), self.counts.all, self.itemsize
        stepping = {"adamw": _FOREACH * parameters, "adamw-8bit-split": _SPLIT_SCRATCH}
        return OPTIMIZERS[name].state_of(itemsize) * parameters, stepping.get(name, 0.0)

    def _weights(self) -> float:
        """Bytes of the loaded model without adapters."""
        linear = self.counts.linear * (_FOUR_BIT if self.four_bit else self.itemsize)
        return linear + self.residual * (self.counts.ends + self.counts.norms)

    def _cut(self, allocated: float) -> tuple[int, int]:
        """Tokens that go forward and backward at once, and layers whose activations are computed again."""
        free = self.usable / (1 + FRAGMENTATION) - CONTEXT_GIB * GIB - allocated
        tokens, checkpointed = update_budget(
            max(free, 0.0),
            self.config,
            self.residual,
            longest=self.prompt_tokens - 1 + self.completion_tokens,
            total=self.tokens,
            **self._options(),
        )
        return min(tokens, self.tokens), checkpointed

    def _options(self) -> dict[str, Any]:
        """The options of ChunkMemory; SDPA's dense mask is as wide as a group."""
        group = self.prompt_tokens - 1 + self.cfg.group_size * self.completion_tokens
        return {
            "trainable": "full" if self.full else "lora",
            "compute_itemsize": self.compute,
            "mask_keys": group if self.attention == "sdpa" else 0,
            "rank": self.rank,
            "four_bit": self.four_bit,
            "fused_norms": True,
            "entropy_bonus": self.cfg.entropy_bonus > 0,
        }

    def _rollout(self) -> dict[str, float]:
        cfg, config = self.cfg, self.config.get_text_config()
        cast = self.cast_weights
        if cast:
            cast += config.vocab_size * config.hidden_size * self.compute
        defaults = {"top_p": 1.0, "top_k": 0, "min_p": 0.0, "repetition_penalty": 1.0}
        sizes = decode_bytes(
            config,
            self.compute,
            rows=cfg.completions_per_step,
            prompts=cfg.prompts_per_step,
            prompt_tokens=self.prompt_tokens,
            completion_tokens=self.completion_tokens,
            narrowed_by=[
                name for name, default in defaults.items() if getattr(cfg, name) != default
            ],
        )
        return {"cast weights": cast, **sizes}

    def _update(self, tokens: int, checkpointed: int) -> dict[str, float]:
        peak = ChunkMemory(self.config, self.residual, **self._options()).peak(
            tokens=tokens,
            scored_tokens=math.ceil(tokens * self.scored / self.tokens),
            checkpointed_layers=checkpointed,
            gradients=tokens < self.tokens,
            gradient_bytes=self.trained_bytes,
        )
        cast = min(self.cast_weights, peak.working) if peak.moment == "forward" else 0.0
        return {
            "cast weights": cast,
            "activations": peak.kept,
            "head and backward": peak.working - cast,
            "gradients": self.trained_bytes if peak.gradients else 0.0,
        }

    def _title(self) -> str:
        cfg = self.cfg
        dtype = cfg.dtype or "float32"
        tuning = f"{cfg.tuning} r{self.rank}, {dtype}"
        if self.full:
            tuning = f"full, {dtype}, {optimizer_of(cfg)}"
        tokens = f"({self.prompt_tokens} + {self.completion_tokens})"
        return f"{cfg.model}, {tuning}, {cfg.prompts_per_step} x {cfg.group_size} x {tokens} tokens"


def has_reference(cfg: Preset) -> bool:
    """Whether a KL term needs the weights as they were at first."""
    return callable(cfg.beta) or cfg.beta > 0


def optimizer_of(cfg: Preset) -> str:
    """The optimizer of full tuning; where the config names none, what its weights need."""
    return cfg.optimizer or ("adamw-8bit-split" if cfg.dtype == "bfloat16" else "adamw")
