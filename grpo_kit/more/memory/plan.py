"""What fits on a card, computed from a model's config alone: nothing is loaded.

    print(plan_memory("gpu24"))

A step has three moments that may be its peak: the rollout (keys and values), the update (activations) and the
optimizer's step. Needs of different moments are not added up: keys and values are freed before the
update. Activations come from _activations.py, which is checked against measurement; the reserve is an estimate.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from typing import Any

from transformers import PretrainedConfig

from grpo_kit._support.argument_checks import check_above_zero, check_choice, check_whole
from grpo_kit.engine.memory._free import WITHOUT_BFLOAT16
from grpo_kit.loop.config import Config
from grpo_kit.models._model_facts import config_of
from grpo_kit.more.memory._plan_table import GIB, MemoryPlan
from grpo_kit.more.memory._request import (
    USABLE,
    Request,
    count,
    counted,
    has_reference,
    optimizer_of,
)
from grpo_kit.trainer.presets import preset

_SMALL = "Qwen/Qwen2.5-0.5B-Instruct"


def plan_memory(
    cfg: Config | str,
    gpu_gb: float | None = None,
    *,
    tuning: str | None = None,
    prompt_tokens: int = 256,
    completion_tokens: int | None = None,
    config: PretrainedConfig | None = None,
    attention: str | None = None,
    rank: int = 16,
) -> MemoryPlan:
    """The memory of one GRPO step of a config on a CUDA card, computed before anything is loaded.

    cfg: a Config that names a model, or a preset's name. tuning: "full", "lora" or "qlora"; None: the config's.
    gpu_gb: the card's nominal size; 0.92 of it, in GiB, is usable (24 -> 22.1); None: 16 for t4, else 24.
    prompt_tokens: of the longest prompt, prefill included; completions count at their maximum. Qwen's are 142 to
    256 on gsm8k, up to 700 on countdown with thoughts; from 256 to 1,024 gpu24's peaks move by less than 0.1 GiB.
    completion_tokens: such as task.max_completion_tokens. None: the config's max_completion_tokens, else its task's;
    the task is built for that if none of its arguments names them.
    config: if a name cannot be looked up. attention: of the kit's update; "sdpa" keeps a dense mask in every layer;
    None: "sdpa" for t4, below capability 8.0, else "flex_attention".
    The update is cut as the trainer cuts it by free memory. rank: of adapters.
    Compute runs in bfloat16 (autocast casts float32 weights), for t4, without it, in the weights' own dtype.
    Unverified: CUDA kernels' workspaces and the allocator's fragmentation: the row `reserve`.
    Raises ValueError for an unknown name, tuning or size.

    >>> plan = plan_memory("gpu24", tuning="lora")
    >>> plan.fits, plan.advice
    (True, [])
    """
    if not isinstance(cfg, Config | str):
        raise ValueError(
            f"cfg={cfg!r} must be a Config or the name of a preset, such as 'gpu24'"
        )
    cfg = preset(cfg, **({} if tuning is None else {"tuning": tuning}))
    if config is not None and not isinstance(config, PretrainedConfig):
        raise ValueError(
            f"config={config!r:.100} must be a transformers PretrainedConfig, such as model.config"
        )
    if config is None and cfg.model is None:
        raise ValueError(
            "model=None: the config names no model, so nothing can be counted; give it one"
        )
    attention = attention or ("sdpa" if cfg.preset in WITHOUT_BFLOAT16 else "flex_attention")
    check_choice("attention", attention, ("flex_attention", "sdpa"))
    gpu_gb = WITHOUT_BFLOAT16.get(cfg.preset, 24.0) if gpu_gb is None else gpu_gb
    check_above_zero("gpu_gb", gpu_gb, hint=", such as 24")
    check_whole("prompt_tokens", prompt_tokens)
    check_whole("rank", rank)
    if completion_tokens is not None:
        check_whole("completion_tokens", completion_tokens)
    counts = counted(cfg.model, rank) if config is None else count(config, rank)
    config = config or config_of(cfg.model)
    if completion_tokens is None:
        completion_tokens = cfg.max_completion_tokens or cfg.task_options.get(
            "max_completion_tokens"
        )
        completion_tokens = completion_tokens or cfg.make_task().max_completion_tokens
    usable = gpu_gb * USABLE * GIB
    request = Request(
        cfg, config, prompt_tokens, completion_tokens, attention, rank, usable, counts
    )
    plan = request.plan()
    return plan if plan.fits else replace(plan, advice=advice(request, plan))


def advice(request: Request, plan: MemoryPlan) -> list[str]:
    """Helpful changes, by how much each saves; each change alone, with the update cut as in the plan."""
    savings: list[tuple[float, str]] = []
    for name, change in _changes(request):
        layers = min(plan.checkpointed_layers, change.layers)
        saved = plan.peak_gib - change.plan(plan.chunk_tokens, layers).peak_gib
        if saved >= 0.05:
            fits = " and fits" if change.plan().fits else ""
            savings.append((saved, f"{name} saves {saved:.1f} GiB{fits}"))
    return [text for _, text in sorted(savings, reverse=True)]


def _changes(request: Request) -> Iterator[tuple[str, Request]]:
    """Each change that may save memory, in words, and the request with it."""
    cfg, full = request.cfg, request.full

    def with_config(**changes: Any) -> Request:
        return replace(request, cfg=replace(cfg, **changes))

    has_bfloat16 = cfg.preset not in WITHOUT_BFLOAT16
    split = with_config(optimizer="adamw-8bit-split", dtype="bfloat16")
    is_flash = (optimizer_of(cfg), cfg.dtype) == ("flash-adamw", "bfloat16")
    if full and has_bfloat16 and split != request and not is_flash:
        yield "optimizer='adamw-8bit-split' with bfloat16 weights", split
    if full and optimizer_of(cfg) == "adamw" and cfg.dtype != "bfloat16":
        yield "optimizer='adamw-8bit'", with_config(optimizer="adamw-8bit")
    if full and has_reference(cfg):
        yield "beta=0 (no reference model)", with_config(beta=0.0)
    for tuning in {"lora": ("qlora",), "qlora": ()}.get(cfg.tuning, ("lora", "qlora")):
        dtype = cfg.dtype if cfg.preset is None else preset(cfg.preset, tuning=tuning).dtype
        yield f"tuning={tuning!r}", with_config(tuning=tuning, dtype=dtype)
    if half := cfg.prompts_per_step // 2:
        yield f"prompts_per_step={half}", with_config(prompts_per_step=half)
    if half := request.completion_tokens // 2:
        yield f"max_completion_tokens={half}", replace(request, completion_tokens=half)
    if request.attention == "sdpa" and has_bfloat16:
        yield "attention='flex_attention'", replace(request, attention="flex_attention")
    small = with_config(model=_SMALL)
    counts = counted(_SMALL, request.rank)
    yield f"model={_SMALL!r}", replace(small, config=config_of(_SMALL), counts=counts)
