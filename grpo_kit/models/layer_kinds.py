"""What a model's layers see, and whether the kit's tests know a model of its kind."""

from __future__ import annotations

from typing import Any

from grpo_kit.models.model_facts import MODEL_TYPES, base_model


def is_tested(model: Any) -> bool:
    """Is it one of MODEL_TYPES, a class of transformers' own, all of whose layers see everything before them?"""
    base = base_model(model)
    own = type(base).__module__.startswith("transformers.models.") and type(base).__name__.endswith(
        "ForCausalLM"
    )
    return own and base.config.model_type in MODEL_TYPES and set(layer_kinds(base)) == {"full_attention"}


def layer_kinds(model: Any) -> list[str]:
    """The kinds of its layers, as transformers names them; ["full_attention"] where the config names none."""
    return list(getattr(base_model(model).config, "layer_types", None) or ["full_attention"])


def window_of(model: Any) -> int | None:
    """Tokens that its layers with a sliding window see, None if it has none."""
    config = base_model(model).config
    kinds = getattr(config, "layer_types", None)
    slides = kinds is None or "sliding_attention" in kinds
    return getattr(config, "sliding_window", None) if slides else None
