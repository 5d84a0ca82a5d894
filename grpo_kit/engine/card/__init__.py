"""The fast ways that only a CUDA card takes, and their checks."""

from typing import TYPE_CHECKING

from grpo_kit._support.lazy import lazy

if TYPE_CHECKING:
    from grpo_kit.engine.card.checks import check_card

__all__ = lazy(__name__)
