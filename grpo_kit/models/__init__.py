"""Models: load a policy, with or without adapters, and what the other rooms ask of a loaded model."""

from typing import TYPE_CHECKING

from grpo_kit._support.lazy import lazy

if TYPE_CHECKING:
    from grpo_kit.models._gguf_reader import PolicyLoadError
    from grpo_kit.models.loading import describe, load_policy

__all__ = lazy(__name__)
