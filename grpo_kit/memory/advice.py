"""Changes for a plan that does not fit, by how much memory each saves."""

from __future__ import annotations

from dataclasses import replace

from grpo_kit.memory.plan_table import MemoryPlan
from grpo_kit.memory.request import WITHOUT_BFLOAT16, Request, has_reference, optimizer_of
from grpo_kit.memory.shapes import config_of, count
from grpo_kit.presets import preset


def advice(request: Request, plan: MemoryPlan, tokens: int | None, checkpointed: int | None) -> list[str]:
    """Helpful changes, by how much each saves; each change alone, with the update cut as in the plan."""
    cfg, full = request.cfg, request.full
    ideas: list[tuple[str, Request]] = []
    split = replace(cfg, optimizer="adamw-8bit-split", dtype="bfloat16") if full else cfg
    narrow = cfg.preset not in WITHOUT_BFLOAT16
    if narrow and split != cfg and (optimizer_of(cfg), cfg.dtype) != ("flash-adamw", "bfloat16"):
        ideas.append(("optimizer='adamw-8bit-split' with bfloat16 weights", replace(request, cfg=split)))
    if full and optimizer_of(cfg) == "adamw" and cfg.dtype != "bfloat16":
        ideas.append(("optimizer='adamw-8bit'", replace(request, cfg=replace(cfg, optimizer="adamw-8bit"))))
    if full and has_reference(cfg):
        ideas.append(("beta=0 (no reference model)", replace(request, cfg=replace(cfg, beta=0.0))))
    for smaller in {"lora": ("qlora",), "qlora": ()}.get(cfg.tuning, ("lora", "qlora")):
        own = {} if cfg.preset is None else {"dtype": preset(cfg.preset, tuning=smaller).dtype}
        ideas.append((f"tuning={smaller!r}", replace(request, cfg=replace(cfg, tuning=smaller, **own))))
    if half := cfg.prompts_per_step // 2:
        ideas.append((f"prompts_per_step={half}", replace(request, cfg=replace(cfg, prompts_per_step=half))))
    if half := request.completion_tokens // 2:
        ideas.append((f"max_completion_tokens={half}", replace(request, completion_tokens=half)))
    if request.attention == "sdpa" and narrow:
        ideas.append(("attention='flex_attention'", replace(request, attention="flex_attention")))
    name, shape = "Qwen/Qwen2.5-0.5B-Instruct", config_of("Qwen/Qwen2.5-0.5B-Instruct")
    small = replace(request, cfg=replace(cfg, model=name), config=shape, counts=count(shape, request.rank))
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
