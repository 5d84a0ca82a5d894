"""What a plan is asked for, and the plan itself: bytes of each moment of a step on one card."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

import torch
from transformers import PretrainedConfig

from grpo_kit.memory.activations import chunk_bytes, update_budget
from grpo_kit.memory.decoding import decode_bytes
from grpo_kit.memory.plan_table import GIB, MemoryPlan
from grpo_kit.memory.shapes import Counts
from grpo_kit.memory.sharding import DIVIDES_WEIGHTS, States, average_bytes, fsdp_states, zero_states
from grpo_kit.optim.choose import OPTIMIZERS
from grpo_kit.profiles import Profile

USABLE = 0.92  # of a card's name: 24 GB cards report 22.0 (L4, A10G, with ECC) to 23.7 GiB (3090, 4090)
CONTEXT_GIB = 0.6  # CUDA context, cuBLAS and kernels: an estimate
_COMMUNICATOR_GIB = 0.4  # NCCL's buffers and channels, where there are several cards: an estimate
FRAGMENTATION = 0.05  # of what is allocated: an estimate
COMPUTE = 2  # bytes of bfloat16, in which a card computes
WITHOUT_BFLOAT16 = {"t4": 16.0}  # GB; such a card computes in the weights' own dtype

# Bytes a parameter that exist only while the optimizer steps: torch's foreach AdamW, and the kit's in parts.
_FOREACH, _SPLIT_PARTS = 4.0, 0.3 * GIB
_FOUR_BIT = 0.5 + 1 / 64 + 4 / (64 * 256)  # bytes a weight: nf4 with double quantisation

PARTS = ("weights", "reference model", "gathered weights", "cast weights", "optimizer", "gradients")
PARTS += ("communication", "keys and values", "logits and sampling", "activations", "head and backward")
PARTS += ("optimizer's own",)


@dataclass(frozen=True)
class Request:
    """What is asked for, in bytes and parameters. rank: of adapters. gpus, sharding, sparing: see plan_memory."""

    cfg: Profile
    config: PretrainedConfig
    tuning: str
    prompt_tokens: int
    completion_tokens: int
    attention: str
    rank: int
    usable: float
    counts: Counts
    gpus: int = 1
    sharding: str = "ddp"
    sparing: bool = False

    @property
    def full(self) -> bool:
        return self.tuning == "full"

    @property
    def itemsize(self) -> int:
        """Bytes of a weight that is not in 4 bits, as it is loaded."""
        return getattr(torch, self.cfg.dtype if self.full else self.cfg.lora_dtype).itemsize

    @property
    def compute(self) -> int:
        """Bytes of a number that the card computes with."""
        return self.itemsize if self.cfg.name in WITHOUT_BFLOAT16 else COMPUTE

    @property
    def layers(self) -> int:
        return self.config.get_text_config().num_hidden_layers

    @property
    def trls_own(self) -> bool:
        """Whether rollouts and update are TRL's own: wherever something is sharded."""
        return self.sharding != "ddp"

    @property
    def rows(self) -> int:
        """Completions of a step on one card."""
        return self.cfg.completions_per_step // self.gpus

    @property
    def prompts(self) -> int:
        """Distinct prompts of a step on one card, each computed once; TRL's own path computes one a row."""
        return self.rows if self.trls_own else math.ceil(self.rows / self.cfg.group_size)

    @property
    def micro_batch(self) -> int:
        """Rows at a time under TRL's own update: as in Profile.grpo_config."""
        return max(n for n in range(1, min(self.cfg.micro_batch, self.rows) + 1) if self.rows % n == 0)

    @property
    def decode_weights(self) -> float:
        """Bytes of weights that every decode step reads: all but an embedding that is not the head too."""
        four_bit = _FOUR_BIT if self.tuning == "qlora" else self.compute
        ends = self.counts.matrix + self.counts.norms
        return self.counts.linear * four_bit + ends * (4 if self.tuning == "qlora" else self.compute)

    @property
    def tokens(self) -> int:
        """Positions that the update of one card computes; the kit's packs each prompt once."""
        if self.trls_own:
            return self.rows * (self.prompt_tokens + self.completion_tokens)
        return self.prompts * (self.prompt_tokens - 1) + self.rows * self.completion_tokens

    def plan(self, chunk_tokens: int | None = None, checkpointed_layers: int | None = None) -> MemoryPlan:
        """The plan without advice; None: as the trainer would cut the update."""
        states = self._states()
        residual = 4 if self.tuning == "qlora" else self.compute if self.trls_own else self.itemsize
        cast = self.counts.linear * self.compute if self.full and residual != self.compute else 0.0
        tokens, checkpointed = self._cut(states, residual, chunk_tokens, checkpointed_layers)
        static = states.always
        moments = {"rollout": static | self._rollout(cast) | states.sampling}
        if states.scoring and self.sharding == "fsdp":
            moments["reference"] = static | states.scoring
        moments["update"] = static | self._update(states, tokens, checkpointed, residual, cast)
        if states.averaging:
            moments["averaging"] = static | states.averaging | {"gradients": states.gradients}
        own = {"optimizer's own": states.stepping}
        own |= {"gradients": states.gradients} if states.gradients else {}
        moments["optimizer step"] = static | own
        parts = {m: {name: float(p.get(name, 0.0)) for name in PARTS} for m, p in moments.items()}
        for p in parts.values():
            p["reserve"] = self._context + FRAGMENTATION * sum(p.values())
        micro = self.micro_batch if self.trls_own else None
        title, saved = self._title(), self._saved(states) / GIB
        return MemoryPlan(
            title,
            parts,
            self.usable / GIB,
            tokens,
            checkpointed,
            self.layers,
            saved,
            [],
            micro,
            self._notes(),
        )

    @property
    def _context(self) -> float:
        return (CONTEXT_GIB + (_COMMUNICATOR_GIB if self.gpus > 1 else 0)) * GIB

    def _states(self) -> States:
        cfg, counts = self.cfg, self.counts
        reference = self.full and cfg.beta > 0
        if self.sharding in ("zero2", "zero3"):
            options = {"full": self.full, "reference": reference, "sparing": self.sparing}
            return zero_states(int(self.sharding[-1]), counts, self.gpus, self.compute, **options)
        if self.sharding == "fsdp":
            options = {"full": self.full, "reference": reference, "sparing": self.sparing}
            options["accumulates"] = self.micro_batch < self.rows
            return fsdp_states(counts, self.layers, self.gpus, self.itemsize, self.compute, **options)
        weights, itemsize, adapters = self._weights(), self.itemsize, counts.adapters
        if self.full:
            state, stepping = _optimizer(cfg.optimizer, counts.all, itemsize)
            gradients = float(counts.all * itemsize)
        else:  # adapters in float32, torch's AdamW
            state, stepping, gradients = 8.0 * adapters, 4.0 * adapters, 4.0 * adapters
        always = {
            "weights": weights + (0 if self.full else 4 * adapters),
            "reference model": weights if reference else 0.0,
            "optimizer": state,
        }
        bucket = average_bytes(counts, itemsize if self.full else 4, full=self.full)
        return States(
            always, gradients, stepping, averaging={"communication": bucket} if self.gpus > 1 else {}
        )

    def _weights(self) -> float:
        """Bytes of the model without adapters, as it is loaded on one card."""
        four_bit = self.tuning == "qlora"  # peft turns what is not 4-bit into float32
        rest = (self.counts.ends + self.counts.norms) * (4 if four_bit else self.itemsize)
        return self.counts.linear * (_FOUR_BIT if four_bit else self.itemsize) + rest

    def _cut(
        self, states: States, residual: int, chunk_tokens: int | None, checkpointed_layers: int | None
    ) -> tuple[int, int]:
        """Tokens that go forward and backward at once, and layers whose activations are computed again."""
        if self.trls_own:
            row = self.prompt_tokens + self.completion_tokens
            return self.micro_batch * row, self.layers if self.cfg.gradient_checkpointing else 0
        free = (
            self.usable / (1 + FRAGMENTATION) - self._context - sum(states.always.values()) - states.gradients
        )
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
        config = self.config.get_text_config()
        sizes = {"prompt_tokens": self.prompt_tokens, "completion_tokens": self.completion_tokens}
        sizes |= {"rows": self.rows, "prompts": self.prompts}
        return {
            "cast weights": cast + config.vocab_size * config.hidden_size * self.compute if cast else 0.0,
            **decode_bytes(config, self.compute, **sizes),
        }

    def _chunk(self) -> dict[str, Any]:
        """TRL's rows, padded, go through SDPA with a dense mask of a row; the kit's as `attention` says."""
        group = self.prompt_tokens - 1 + min(self.cfg.group_size, self.rows) * self.completion_tokens
        keys = self.prompt_tokens + self.completion_tokens if self.trls_own else group
        return {
            "trainable": "full" if self.full else "lora",
            "compute_itemsize": self.compute,
            "mask_keys": keys if self.trls_own or self.attention == "sdpa" else 0,
            "rank": self.rank,
            "four_bit": self.tuning == "qlora",
        }

    def _update(
        self, states: States, tokens: int, checkpointed: int, residual: int, cast: float
    ) -> dict[str, float]:
        scored = self.rows * self.completion_tokens
        peak = chunk_bytes(
            self.config,
            residual,
            tokens=tokens,
            scored_tokens=math.ceil(tokens * scored / self.tokens),
            checkpointed_layers=checkpointed,
            gradients=tokens < self.tokens or self.trls_own,
            gradient_bytes=states.gradients,
            **self._chunk(),
        )
        shown_apart = min(cast, peak.working) if peak.moment == "forward" else 0.0
        found = {
            "cast weights": shown_apart,
            "activations": peak.kept,
            "head and backward": peak.working - shown_apart,
            **states.backward,
        }
        # Sharded gradients are there as soon as one layer's has been reduced: none are left out.
        there = states.gradients if peak.gradients or self.trls_own else 0.0
        return found | ({"gradients": there} if states.gradients else {})

    def _saved(self, states: States) -> float:
        """Bytes of a checkpoint: weights or adapters, and the optimizer's state, of all cards."""
        shares = self.gpus if self.trls_own else 1
        if not self.full:
            return 4 * self.counts.adapters + states.always["optimizer"] * shares
        divided = self.sharding in DIVIDES_WEIGHTS
        return states.always["weights"] * (shares if divided else 1) + states.always["optimizer"] * shares

    def _title(self) -> str:
        cfg = self.cfg
        adapters = f"{self.tuning} r{self.rank}, {cfg.lora_dtype}"
        optimizer = "adamw" if self.trls_own else cfg.optimizer
        dtype = "float32" if self.sharding == "fsdp" else cfg.dtype
        how = f"full, {dtype}, {optimizer}" if self.full else adapters
        size = (
            f"{cfg.prompts_per_step} x {cfg.group_size} x ({self.prompt_tokens} + {self.completion_tokens})"
        )
        cards = (
            "" if self.gpus == 1 else f"; each of {self.gpus} cards, {self.sharding}, {self.rows} completions"
        )
        return f"{cfg.model}, {how}, {size} tokens{cards}"

    def _notes(self) -> list[str]:
        """What the plan takes for granted."""
        if not self.trls_own:
            return []
        notes = ["rollouts and update are TRL's own: no packed update, no shared prompts"]
        if self.sharding == "fsdp":
            notes.append(
                "sampling gathers every layer again for every token: see seconds before you choose it"
            )
        elif self.sharding == "zero3" and self.sparing:
            notes.append(
                "ds3_gather_for_generation=False: sampling gathers the weights again for every token"
            )
        if self.sharding == "fsdp" and self.sparing:
            notes.append(
                "accelerator_config={'gradient_accumulation_kwargs': {'sync_each_batch': True}}: gradients are reduced "
                "after every micro-batch"
            )
        return notes


def _optimizer(name: str, parameters: int, itemsize: int) -> tuple[float, float]:
    """Bytes of optimizer state, and bytes needed only while the optimizer steps."""
    during = {"adamw": _FOREACH * parameters, "adamw-8bit-split": _SPLIT_PARTS}
    return OPTIMIZERS[name].state_of(itemsize) * parameters, during.get(name, 0.0)
