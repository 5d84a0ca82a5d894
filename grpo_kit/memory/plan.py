"""What will fit on the card, from a model's config alone: nothing is loaded.

    print(plan_memory("gpu24"))

A step has three moments that may be the fullest: the rollout (keys and values), the update (activations) and the
optimizer's step. What one moment needs and another does not is not added up: keys and values are freed before the
update. Activations come from activations.py, which is checked against measurement; the reserve is an estimate.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from typing import Any, NamedTuple

import torch
from transformers import AutoConfig, AutoModelForCausalLM, LlamaConfig, PretrainedConfig, Qwen2Config

from grpo_kit.memory.activations import checkpoint_bytes, chunk_bytes, head_bytes, layer_bytes, update_budget
from grpo_kit.memory.decoding import decode_bytes
from grpo_kit.memory.table import GIB, MemoryPlan
from grpo_kit.optim.choose import OPTIMIZERS
from grpo_kit.profiles import Profile
from grpo_kit.profiles import profile as profile_named

__all__ = ["MemoryPlan", "plan_memory"]
__all__ += ["checkpoint_bytes", "chunk_bytes", "head_bytes", "layer_bytes", "update_budget"]

USABLE = 0.92  # of a card's name: 24 GB cards report 22.0 (L4, A10G, with ECC) to 23.7 GiB (3090, 4090)
CONTEXT_GIB = 0.6  # CUDA context, cuBLAS and kernels: an estimate
FRAGMENTATION = 0.05  # of what is allocated: an estimate
_COMPUTE = 2  # bytes of bfloat16, in which a card computes
_WITHOUT_BFLOAT16 = {"t4": 16.0}  # GB; such a card computes in the weights' own dtype

# Bytes a parameter that exist only while the optimizer steps: torch's foreach AdamW, and the kit's in parts.
_FOREACH, _SPLIT_PARTS = 4.0, 0.3 * GIB
_FOUR_BIT = 0.5 + 1 / 64 + 4 / (64 * 256)  # bytes a weight: nf4 with double quantisation

PARTS = ("weights", "reference model", "cast weights", "optimizer", "gradients", "keys and values")
PARTS += ("logits and sampling", "activations", "head and backward", "optimizer's own")

_SIZES = ("hidden_size", "intermediate_size", "num_hidden_layers")
_SIZES += ("num_attention_heads", "num_key_value_heads")
# vocabulary, _SIZES; embeddings are tied
_SHAPES: dict[str, tuple[type[PretrainedConfig], int, tuple[int, ...]]] = {
    "Qwen/Qwen2.5-0.5B-Instruct": (Qwen2Config, 151936, (896, 4864, 24, 14, 2)),
    "Qwen/Qwen2.5-1.5B-Instruct": (Qwen2Config, 151936, (1536, 8960, 28, 12, 2)),
    "Qwen/Qwen2.5-3B-Instruct": (Qwen2Config, 151936, (2048, 11008, 36, 16, 2)),
    "smollm2-135m-instruct": (LlamaConfig, 49152, (576, 1536, 30, 9, 3)),
    "tiny-random": (LlamaConfig, 49152, (32, 64, 2, 4, 2)),
}


def plan_memory(
    profile: Profile | str,
    gpu_gb: float | None = None,
    *,
    tuning: str = "full",
    prompt_tokens: int = 256,
    config: PretrainedConfig | None = None,
    attention: str = "flex_attention",
    chunk_tokens: int | None = None,
    checkpointed_layers: int | None = None,
    rank: int = 16,
) -> MemoryPlan:
    """What one GRPO step of the profile needs on a CUDA card, before anything is loaded.

    gpu_gb: what the card is sold as; 0.92 of it, in GiB, is usable (24 -> 22.1); None: 16 for t4, else 24. tuning:
    "full", "lora" or "qlora".
    prompt_tokens: of the longest prompt, prefill included; completions are taken at their maximum. Qwen's are 142 to
    256 on gsm8k, up to 700 on countdown with thoughts; from 256 to 1,024 gpu24's peaks move by less than 0.1 GiB.
    config: where a name cannot be looked up. attention: of the update; "sdpa" keeps a dense mask in every layer.
    chunk_tokens, checkpointed_layers: fix how the update is cut; None: as the trainer chooses from free memory.
    Compute runs in bfloat16 (autocast casts float32 weights), for t4, without it, in the weights' own dtype.
    Unverified: CUDA kernels' workspaces and the allocator's fragmentation: the row `reserve`. Raises ValueError for an
    unknown name, tuning or size.

    >>> plan = plan_memory("gpu24", tuning="lora")
    >>> plan.fits, plan.advice
    (True, [])
    """
    cfg = profile_named(profile) if isinstance(profile, str) else profile
    if not isinstance(cfg, Profile):
        raise ValueError(f"profile={profile!r} must be a profile or its name, such as 'gpu24'")
    if tuning not in ("full", "lora", "qlora"):
        raise ValueError(f"tuning={tuning!r} is not known; use 'full', 'lora' or 'qlora'")
    if attention not in ("flex_attention", "sdpa"):
        raise ValueError(f"attention={attention!r} is not known; use 'flex_attention' or 'sdpa'")
    gpu_gb = _WITHOUT_BFLOAT16.get(cfg.name, 24.0) if gpu_gb is None else gpu_gb
    if not (isinstance(gpu_gb, (int, float)) and math.isfinite(gpu_gb) and gpu_gb > 0):
        raise ValueError(f"gpu_gb={gpu_gb!r} must be a number above 0, e.g. 24")
    sizes = {"prompt_tokens": (prompt_tokens, 1), "rank": (rank, 1)}
    sizes |= {"chunk_tokens": (chunk_tokens, 1)} if chunk_tokens is not None else {}
    sizes |= {"checkpointed_layers": (checkpointed_layers, 0)} if checkpointed_layers is not None else {}
    for name, (value, least) in sizes.items():
        if isinstance(value, bool) or not isinstance(value, int) or value < least:
            raise ValueError(f"{name}={value!r} must be a whole number of at least {least}")
    config = config or _config(cfg.model)
    usable, counts = gpu_gb * USABLE * GIB, _count(config, rank)
    request = _Request(cfg, config, tuning, prompt_tokens, attention, rank, usable, counts)
    plan = request.plan(*(cut := (chunk_tokens, checkpointed_layers)))
    return plan if plan.fits else replace(plan, advice=_advice(request, plan, *cut))


class _Counts(NamedTuple):
    """Parameters: of linear layers but the head; embedding and head; biases and norms; adapters on the first."""

    linear: int
    ends: int
    norms: int
    adapters: int


@dataclass(frozen=True)
class _Request:
    """What is asked for, in bytes and parameters."""

    cfg: Profile
    config: PretrainedConfig
    tuning: str
    prompt_tokens: int
    attention: str
    rank: int
    usable: float
    counts: _Counts

    @property
    def full(self) -> bool:
        return self.tuning == "full"

    @property
    def itemsize(self) -> int:
        """Bytes of a weight that is not in 4 bits."""
        return getattr(torch, self.cfg.dtype if self.full else self.cfg.lora_dtype).itemsize

    @property
    def compute(self) -> int:
        """Bytes of a number that the card computes with."""
        return self.itemsize if self.cfg.name in _WITHOUT_BFLOAT16 else _COMPUTE

    @property
    def group_tokens(self) -> int:
        """Packed tokens of one prompt and its completions."""
        return self.prompt_tokens - 1 + self.cfg.group_size * self.cfg.max_completion_tokens

    def plan(self, chunk_tokens: int | None = None, checkpointed_layers: int | None = None) -> MemoryPlan:
        """The plan without advice; None: as the trainer would cut the update."""
        cfg, itemsize, layers = self.cfg, self.itemsize, self.config.get_text_config().num_hidden_layers
        linear, ends, norms, adapters = self.counts
        residual = 4 if self.tuning == "qlora" else itemsize  # peft turns what is not 4-bit into float32
        weights = linear * (_FOUR_BIT if self.tuning == "qlora" else itemsize) + (ends + norms) * residual
        if self.full:
            state, during = _optimizer(cfg.optimizer, linear + ends + norms, itemsize)
            gradients = (linear + ends + norms) * itemsize
        else:  # adapters in float32, torch's AdamW
            state, during, gradients = 8 * adapters, 4 * adapters, 4 * adapters
        static = {
            "weights": weights + (0 if self.full else 4 * adapters),
            "reference model": weights if self.full and cfg.beta > 0 else 0.0,
            "optimizer": state,
        }
        cast = linear * self.compute if self.full and itemsize != self.compute else 0.0

        free = self.usable / (1 + FRAGMENTATION) - CONTEXT_GIB * GIB - sum(static.values()) - gradients
        tokens, checkpointed = update_budget(
            max(free, 0.0),
            self.config,
            residual,
            longest=self.prompt_tokens - 1 + cfg.max_completion_tokens,
            total=cfg.prompts_per_step * self.group_tokens,
            **self._chunk(),
        )
        tokens = min(chunk_tokens or tokens, cfg.prompts_per_step * self.group_tokens)
        checkpointed = checkpointed if checkpointed_layers is None else checkpointed_layers
        moments = {
            "rollout": static | self._rollout(cast),
            "update": static | self._update(tokens, checkpointed, residual, gradients, cast),
            "optimizer step": static | {"gradients": gradients, "optimizer's own": during},
        }
        parts = {m: {name: float(p.get(name, 0.0)) for name in PARTS} for m, p in moments.items()}
        for p in parts.values():
            p["reserve"] = CONTEXT_GIB * GIB + FRAGMENTATION * sum(p.values())
        saved = ((weights if self.full else 4 * adapters) + state) / GIB
        return MemoryPlan(self._title(), parts, self.usable / GIB, tokens, checkpointed, layers, saved, [])

    def _rollout(self, cast: float) -> dict[str, float]:
        cfg, config = self.cfg, self.config.get_text_config()
        sizes = {"prompt_tokens": self.prompt_tokens, "completion_tokens": cfg.max_completion_tokens}
        sizes |= {"rows": cfg.completions_per_step, "prompts": cfg.prompts_per_step}
        return {
            "cast weights": cast + config.vocab_size * config.hidden_size * self.compute if cast else 0.0,
            **decode_bytes(config, self.compute, **sizes),
        }

    def _chunk(self) -> dict[str, Any]:
        return {
            "trainable": "full" if self.full else "lora",
            "compute_itemsize": self.compute,
            "mask_keys": self.group_tokens if self.attention == "sdpa" else 0,
            "rank": self.rank,
        }

    def _update(
        self, tokens: int, checkpointed: int, residual: int, gradients: float, cast: float
    ) -> dict[str, float]:
        total = self.cfg.prompts_per_step * self.group_tokens
        scored = self.cfg.completions_per_step * self.cfg.max_completion_tokens
        peak = chunk_bytes(
            self.config,
            residual,
            tokens=tokens,
            scored_tokens=math.ceil(tokens * scored / total),
            checkpointed_layers=checkpointed,
            gradients=tokens < total,
            gradient_bytes=gradients,
            **self._chunk(),
        )
        shown_apart = min(cast, peak.working) if peak.moment == "forward" else 0.0
        return {
            "cast weights": shown_apart,
            "gradients": gradients if peak.gradients else 0.0,
            "activations": peak.kept,
            "head and backward": peak.working - shown_apart,
        }

    def _title(self) -> str:
        cfg = self.cfg
        adapters = f"{self.tuning} r{self.rank}, {cfg.lora_dtype}"
        how = f"full, {cfg.dtype}, {cfg.optimizer}" if self.full else adapters
        size = f"{cfg.prompts_per_step} x {cfg.group_size} x ({self.prompt_tokens} + {cfg.max_completion_tokens})"
        return f"{cfg.model}, {how}, {size} tokens"


def _advice(request: _Request, plan: MemoryPlan, tokens: int | None, checkpointed: int | None) -> list[str]:
    """What would help, by how much it saves; each change alone, the update cut as in the plan."""
    cfg, full = request.cfg, request.tuning == "full"
    ideas: list[tuple[str, _Request]] = []
    split = replace(cfg, optimizer="adamw-8bit-split", dtype="bfloat16") if full else cfg
    narrow = cfg.name not in _WITHOUT_BFLOAT16
    if narrow and split != cfg and (cfg.optimizer, cfg.dtype) != ("flash-adamw", "bfloat16"):
        ideas.append(("optimizer='adamw-8bit-split' with bfloat16 weights", replace(request, cfg=split)))
    if full and cfg.dtype == "float32" and cfg.optimizer == "adamw":
        ideas.append(("optimizer='adamw-8bit'", replace(request, cfg=replace(cfg, optimizer="adamw-8bit"))))
    if full and cfg.beta > 0:
        ideas.append(("beta=0 (no reference model)", replace(request, cfg=replace(cfg, beta=0.0))))
    for smaller in {"full": ("lora", "qlora"), "lora": ("qlora",)}.get(request.tuning, ()):
        ideas.append((f"tuning={smaller!r}", replace(request, tuning=smaller)))
    if half := cfg.prompts_per_step // 2:
        ideas.append((f"prompts_per_step={half}", replace(request, cfg=replace(cfg, prompts_per_step=half))))
    if half := cfg.max_completion_tokens // 2:
        shorter = replace(cfg, max_completion_tokens=half)
        ideas.append((f"max_completion_tokens={half}", replace(request, cfg=shorter)))
    if request.attention == "sdpa":
        ideas.append(("attention='flex_attention'", replace(request, attention="flex_attention")))
    name, shape = "Qwen/Qwen2.5-0.5B-Instruct", _config("Qwen/Qwen2.5-0.5B-Instruct")
    small = replace(request, cfg=replace(cfg, model=name), config=shape, counts=_count(shape, request.rank))
    ideas.append((f"model={name!r}", small))

    found: list[tuple[float, str]] = []
    for name, change in ideas:
        layers = min(plan.checkpointed_layers, change.config.get_text_config().num_hidden_layers)
        saved = plan.peak_gib - change.plan(plan.chunk_tokens, layers).peak_gib
        fits = change.plan(tokens, None if checkpointed is None else layers).fits
        found.append((saved, f"{name} saves {saved:.1f} GiB{' and fits' if fits else ''}"))
    if tokens is not None or checkpointed is not None:
        free = request.plan()
        saved = plan.peak_gib - free.peak_gib
        name = f"chunk_tokens={free.chunk_tokens} and {free.checkpointed_layers} checkpointed layers"
        found.append((saved, f"{name} saves {saved:.1f} GiB{' and fits' if free.fits else ''}"))
    return [text for saved, text in sorted(found, reverse=True) if saved >= 0.05]


def _count(config: PretrainedConfig, rank: int) -> _Counts:
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(config)
    head, embedding = model.get_output_embeddings(), model.get_input_embeddings()
    layers = [m for m in model.modules() if isinstance(m, torch.nn.Linear) and m is not head]
    linear = sum(layer.weight.numel() for layer in layers)
    ends = sum({id(p): p.numel() for m in (head, embedding) for p in m.parameters()}.values())
    adapters = sum(rank * (layer.in_features + layer.out_features) for layer in layers)
    return _Counts(linear, ends, model.num_parameters() - linear - ends, adapters)


def _optimizer(name: str, parameters: int, itemsize: int) -> tuple[float, float]:
    """Bytes of optimizer state, and bytes needed only while the optimizer steps."""
    during = {"adamw": _FOREACH * parameters, "adamw-8bit-split": _SPLIT_PARTS}
    return OPTIMIZERS[name].state_of(itemsize) * parameters, during.get(name, 0.0)


def _config(name: str) -> PretrainedConfig:
    if name in _SHAPES:
        kind, vocabulary, sizes = _SHAPES[name]
        return kind(vocab_size=vocabulary, tie_word_embeddings=True, **dict(zip(_SIZES, sizes, strict=True)))
    try:
        return AutoConfig.from_pretrained(name)
    except (OSError, ValueError) as error:
        raise ValueError(
            f"model={name!r}: its config could not be had ({type(error).__name__}); give config=, or one of "
            f"{', '.join(_SHAPES)}"
        ) from error
