"""What will fit on a card, or on each of several, from a model's config alone: nothing is loaded.

    print(plan_memory("gpu24"))
    print(plan_memory(profile("gpu24", model="Qwen/Qwen2.5-7B-Instruct"), 80, gpus=8, sharding="zero3"))

A step has three moments that may be the fullest: the rollout (keys and values), the update (activations) and the
optimizer's step. What one moment needs and another does not is not added up: keys and values are freed before the
update. Activations come from activations.py, which is checked against measurement; the reserve is an estimate.
What several cards divide, and what they need besides, stands in sharding.py with its sources.
"""

from __future__ import annotations

import math
from dataclasses import replace

from transformers import PretrainedConfig

from grpo_kit.memory.activations import checkpoint_bytes, chunk_bytes, head_bytes, layer_bytes, update_budget
from grpo_kit.memory.advice import advice
from grpo_kit.memory.plan_table import GIB, MemoryPlan
from grpo_kit.memory.request import USABLE, WITHOUT_BFLOAT16, Request
from grpo_kit.memory.shapes import config_of, count, counted
from grpo_kit.memory.sharding import DIVIDES_WEIGHTS, SHARDINGS
from grpo_kit.profiles import Profile
from grpo_kit.profiles import profile as profile_named

__all__ = ["MemoryPlan", "plan_memory"]
__all__ += ["checkpoint_bytes", "chunk_bytes", "head_bytes", "layer_bytes", "update_budget"]


def plan_memory(
    profile: Profile | str,
    gpu_gb: float | None = None,
    *,
    tuning: str = "full",
    prompt_tokens: int = 256,
    completion_tokens: int | None = None,
    config: PretrainedConfig | None = None,
    attention: str = "flex_attention",
    chunk_tokens: int | None = None,
    checkpointed_layers: int | None = None,
    rank: int = 16,
    gpus: int = 1,
    sharding: str = "ddp",
    sparing: bool = False,
) -> MemoryPlan:
    """What one GRPO step of the profile needs on a CUDA card, or on each of several, before anything is loaded.

    gpu_gb: what the card is sold as; 0.92 of it, in GiB, is usable (24 -> 22.1); None: 16 for t4, else 24. tuning:
    "full", "lora" or "qlora".
    prompt_tokens: of the longest prompt, prefill included; completions are taken at their maximum. Qwen's are 142 to
    256 on gsm8k, up to 700 on countdown with thoughts; from 256 to 1,024 gpu24's peaks move by less than 0.1 GiB.
    completion_tokens: such as task.max_completion_tokens. None: the profile's max_completion_tokens, else its task's,
    which is made for that.
    config: where a name cannot be looked up. attention: of the kit's update; "sdpa" keeps a dense mask in every layer.
    chunk_tokens, checkpointed_layers: fix how the kit's update is cut; None: as the trainer chooses from free memory.
    Compute runs in bfloat16 (autocast casts float32 weights), for t4, without it, in the weights' own dtype.

    gpus: cards, a process each, that share the profile's completions of a step evenly; memory is that of one of them.
    sharding: "ddp", each has all weights and runs the kit's own rollout and update; "zero2", "zero3" (DeepSpeed) and
    "fsdp" (FSDP2) divide weights, gradients or optimizer states and run TRL's, in the profile's micro_batch with its
    gradient_checkpointing. sparing: with zero3 `ds3_gather_for_generation=False`, with fsdp `sync_each_batch`: less
    memory, more traffic. TRL's rollout under zero3 gathers the whole model on every card otherwise.
    Unverified: CUDA kernels' workspaces and the allocator's fragmentation: the row `reserve`; nothing here has run on
    several cards. Raises ValueError for an unknown name, tuning, sharding or size, and for what does not go together.

    >>> plan = plan_memory("gpu24", tuning="lora")
    >>> plan.fits, plan.advice
    (True, [])
    >>> round(plan_memory("gpu24", gpus=4, sharding="zero2").parts["update"]["optimizer"] / 2**30, 1)
    2.2
    """
    cut = (chunk_tokens, checkpointed_layers)
    request = request_for(
        profile,
        gpu_gb,
        tuning=tuning,
        prompt_tokens=prompt_tokens,
        completion_tokens=completion_tokens,
        config=config,
        attention=attention,
        rank=rank,
        gpus=gpus,
        sharding=sharding,
        sparing=sparing,
        cut=cut,
    )
    plan = request.plan(*cut)
    return plan if plan.fits else replace(plan, advice=advice(request, plan, *cut))


def request_for(
    profile: Profile | str,
    gpu_gb: float | None = None,
    *,
    tuning: str = "full",
    prompt_tokens: int = 256,
    completion_tokens: int | None = None,
    config: PretrainedConfig | None = None,
    attention: str = "flex_attention",
    rank: int = 16,
    gpus: int = 1,
    sharding: str = "ddp",
    sparing: bool = False,
    cut: tuple[int | None, int | None] = (None, None),
) -> Request:
    """What plan_memory was asked for, checked. cut: its chunk_tokens and checkpointed_layers."""
    cfg = profile_named(profile) if isinstance(profile, str) else profile
    if not isinstance(cfg, Profile):
        raise ValueError(f"profile={profile!r} must be a profile or its name, such as 'gpu24'")
    if tuning not in ("full", "lora", "qlora"):
        raise ValueError(f"tuning={tuning!r} is not known; use 'full', 'lora' or 'qlora'")
    if attention not in ("flex_attention", "sdpa"):
        raise ValueError(f"attention={attention!r} is not known; use 'flex_attention' or 'sdpa'")
    gpu_gb = WITHOUT_BFLOAT16.get(cfg.name, 24.0) if gpu_gb is None else gpu_gb
    if not (isinstance(gpu_gb, (int, float)) and math.isfinite(gpu_gb) and gpu_gb > 0):
        raise ValueError(f"gpu_gb={gpu_gb!r} must be a number above 0, e.g. 24")
    sizes = {"prompt_tokens": (prompt_tokens, 1), "rank": (rank, 1), "gpus": (gpus, 1)}
    chosen = (("completion_tokens", completion_tokens, 1), ("chunk_tokens", cut[0], 1))
    for name, value, least in (*chosen, ("checkpointed_layers", cut[1], 0)):
        sizes |= {name: (value, least)} if value is not None else {}
    for name, (value, least) in sizes.items():
        if isinstance(value, bool) or not isinstance(value, int) or value < least:
            raise ValueError(f"{name}={value!r} must be a whole number of at least {least}")
    _check_cards(cfg, gpus, sharding, sparing, tuning, cut)
    counts = counted(cfg.model, rank) if config is None else count(config, rank)
    config, usable = config or config_of(cfg.model), gpu_gb * USABLE * GIB
    tokens = tokens_of(cfg) if completion_tokens is None else completion_tokens
    return Request(
        cfg, config, tuning, prompt_tokens, tokens, attention, rank, usable, counts, gpus, sharding, sparing
    )


def tokens_of(cfg: Profile) -> int:
    """The longest completion of a run: the profile's number, else its task's, which is made if no argument names it."""
    named = cfg.max_completion_tokens or cfg.task_options.get("max_completion_tokens")
    return named or cfg.make_task().max_completion_tokens


def _check_cards(
    cfg: Profile, gpus: int, sharding: str, sparing: bool, tuning: str, cut: tuple[int | None, int | None]
) -> None:
    """Raises ValueError for what several cards cannot be asked together."""
    if sharding not in SHARDINGS:
        known = "; ".join(f"{name!r}: {what}" for name, what in SHARDINGS.items())
        raise ValueError(f"sharding={sharding!r} is not known; use {known}")
    if not isinstance(sparing, bool):
        raise ValueError(f"sparing={sparing!r} must be True or False")
    if gpus == 1 and sharding != "ddp":
        raise ValueError(
            f"sharding={sharding!r} divides among cards; give gpus of at least 2, or leave it out"
        )
    if cfg.completions_per_step % gpus:
        raise ValueError(
            f"gpus={gpus} cannot share {cfg.completions_per_step} completions a step evenly; use a divisor of it, or "
            "another prompts_per_step of the profile"
        )
    if sparing and sharding not in DIVIDES_WEIGHTS:
        raise ValueError(
            f"sparing=True is for sharding 'zero3' and 'fsdp'; {sharding!r} has nothing to spare"
        )
    if tuning == "qlora" and sharding != "ddp":
        raise ValueError(
            f"tuning='qlora' with sharding={sharding!r}: accelerate leaves 4-bit weights whole on every card; use "
            "sharding='ddp', or tuning='lora'"
        )
    if sharding != "ddp" and any(value is not None for value in cut):
        raise ValueError(
            f"chunk_tokens and checkpointed_layers cut the kit's update; with sharding={sharding!r} the update is "
            "TRL's: set micro_batch and gradient_checkpointing of the profile"
        )
