"""The arguments of a plan, and the plan itself: bytes of each moment of a step on one card."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

import torch
from transformers import PretrainedConfig

from grpo_kit.engine.memory._activations import chunk_bytes, update_budget
from grpo_kit.engine.memory._decoding import decode_bytes
from grpo_kit.engine.memory._plan_table import GIB, MemoryPlan
from grpo_kit.engine.memory._shapes import Counts
from grpo_kit.engine.optim.choose import OPTIMIZERS
from grpo_kit.loop.config import Preset

USABLE = 0.92  # of a card's name: 24 GB cards report 22.0 (L4, A10G, with ECC) to 23.7 GiB (3090, 4090)
CONTEXT_GIB = 0.6  # CUDA context, cuBLAS and kernels: an estimate
FRAGMENTATION = 0.05  # of what is allocated: an estimate
COMPUTE = 2  # bytes of bfloat16, in which a card computes
WITHOUT_BFLOAT16 = {"t4": 16.0}  # GB; such a card computes in the weights' own dtype

# Bytes a parameter that exist only while the optimizer steps, of torch's foreach AdamW.
_FOREACH = 4.0
_SPLIT_SCRATCH = (
    9.0 * 2**24
)  # bytes in all: SCRATCH_BYTES of engine/optim/split_adamw.py, which needs bitsandbytes
_FOUR_BIT = 0.5 + 1 / 64 + 4 / (64 * 256)  # bytes a weight: nf4 with double quantisation

PARTS = ("weights", "reference model", "cast weights", "optimizer", "gradients", "keys and values")
PARTS += ("logits and sampling", "activations", "head and backward", "optimizer's own")


@dataclass(frozen=True)
class _States:
    """Bytes by part, without activations.

    always: at all times. gradients: of all trained weights. stepping: only during the optimizer's step.
    """

    always: dict[str, float]
    gradients: float
    stepping: float


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
    def compute(self) -> int:
        """Bytes of a number in the card's computations."""
        return self.itemsize if self.cfg.preset in WITHOUT_BFLOAT16 else COMPUTE

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

    def plan(self, chunk_tokens: int | None = None, checkpointed_layers: int | None = None) -> MemoryPlan:
        """The plan without advice; None: cut as the trainer would cut the update."""
        states = self._states()
        residual = 4 if self.four_bit else self.itemsize
        cast = self.counts.linear * self.compute if self.full and residual != self.compute else 0.0
        tokens, checkpointed = self._cut(states, residual, chunk_tokens, checkpointed_layers)
        static, gradients = states.always, {"gradients": states.gradients}
        moments = {
            "rollout": static | self._rollout(cast),
            "update": static | self._update(states, tokens, checkpointed, residual, cast),
            "optimizer step": static | {"optimizer's own": states.stepping} | gradients,
        }
        parts = {m: {name: float(p.get(name, 0.0)) for name in PARTS} for m, p in moments.items()}
        for p in parts.values():
            p["reserve"] = CONTEXT_GIB * GIB + FRAGMENTATION * sum(p.values())
        title, saved = self._title(), self._saved(states) / GIB
        return MemoryPlan(title, parts, self.usable / GIB, tokens, checkpointed, self.layers, saved, [])

    def _states(self) -> _States:
        cfg, counts = self.cfg, self.counts
        weights, adapters = self._weights(), counts.adapters
        if self.full:
            state, stepping = _optimizer(optimizer_of(cfg), counts.all, self.itemsize)
            gradients = float(counts.all * self.itemsize)
        else:  # adapters in float32, torch's AdamW
            state, stepping, gradients = 8.0 * adapters, 4.0 * adapters, 4.0 * adapters
        always = {
            "weights": weights + (0 if self.full else 4 * adapters),
            "reference model": weights if self.full and has_reference(cfg) else 0.0,
            "optimizer": state,
        }
        return _States(always, gradients, stepping)

    def _weights(self) -> float:
        """Bytes of the loaded model without adapters."""
        rest = 4 if self.four_bit else self.itemsize  # peft converts it to float32
        rest *= self.counts.ends + self.counts.norms
        return self.counts.linear * (_FOUR_BIT if self.four_bit else self.itemsize) + rest

    def _cut(
        self, states: _States, residual: int, chunk_tokens: int | None, checkpointed_layers: int | None
    ) -> tuple[int, int]:
        """Tokens that go forward and backward at once, and layers whose activations are computed again."""
        free = self.usable / (1 + FRAGMENTATION) - CONTEXT_GIB * GIB
        free -= sum(states.always.values()) + states.gradients
        tokens, checkpointed = update_budget(
            max(free, 0.0),
            self.config,
            residual,
            longest=self.prompt_tokens - 1 + self.completion_tokens,
            total=self.tokens,
            **self._chunk(),
        )
        tokens = min(chunk_tokens or tokens, self.tokens)
        return tokens, checkpointed if checkpointed_layers is None else checkpointed_layers

    def _rollout(self, cast: float) -> dict[str, float]:
        cfg, config = self.cfg, self.config.get_text_config()
        sizes = {"prompt_tokens": self.prompt_tokens, "completion_tokens": self.completion_tokens}
        sizes |= {"rows": cfg.completions_per_step, "prompts": cfg.prompts_per_step}
        off = {"top_p": 1.0, "top_k": 0, "min_p": 0.0, "repetition_penalty": 1.0}
        narrowed = [name for name, nothing in off.items() if getattr(cfg, name) != nothing]
        return {
            "cast weights": cast + config.vocab_size * config.hidden_size * self.compute if cast else 0.0,
            **decode_bytes(config, self.compute, narrowed_by=narrowed, **sizes),
        }

    def _chunk(self) -> dict[str, Any]:
        """The options of chunk_bytes; SDPA's dense mask is as wide as a group."""
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

    def _update(
        self, states: _States, tokens: int, checkpointed: int, residual: int, cast: float
    ) -> dict[str, float]:
        peak = chunk_bytes(
            self.config,
            residual,
            tokens=tokens,
            scored_tokens=math.ceil(tokens * self.scored / self.tokens),
            checkpointed_layers=checkpointed,
            gradients=tokens < self.tokens,
            gradient_bytes=states.gradients,
            **self._chunk(),
        )
        shown_apart = min(cast, peak.working) if peak.moment == "forward" else 0.0
        return {
            "cast weights": shown_apart,
            "activations": peak.kept,
            "head and backward": peak.working - shown_apart,
            "gradients": states.gradients if peak.gradients else 0.0,
        }

    def _saved(self, states: _States) -> float:
        """Bytes of a checkpoint: weights or adapters, and the optimizer's state."""
        trained = states.always["weights"] if self.full else 4 * self.counts.adapters
        return trained + states.always["optimizer"]

    def _title(self) -> str:
        cfg = self.cfg
        dtype = cfg.dtype or "float32"
        adapters = f"{cfg.tuning} r{self.rank}, {dtype}"
        how = f"full, {dtype}, {optimizer_of(cfg)}" if self.full else adapters
        size = (
            f"{cfg.prompts_per_step} x {cfg.group_size} x ({self.prompt_tokens} + {self.completion_tokens})"
        )
        return f"{cfg.model}, {how}, {size} tokens"


def has_reference(cfg: Preset) -> bool:
    """Whether a KL term needs the weights as they were at first."""
    return callable(cfg.beta) or cfg.beta > 0


def optimizer_of(cfg: Preset) -> str:
    """The optimizer of full tuning; where the config names none, what its weights need."""
    return cfg.optimizer or ("adamw-8bit-split" if cfg.dtype == "bfloat16" else "adamw")


def _optimizer(name: str, parameters: int, itemsize: int) -> tuple[float, float]:
    """Bytes of optimizer state, and bytes needed only while the optimizer steps."""
    during = {"adamw": _FOREACH * parameters, "adamw-8bit-split": _SPLIT_SCRATCH}
    return OPTIMIZERS[name].state_of(itemsize) * parameters, during.get(name, 0.0)
