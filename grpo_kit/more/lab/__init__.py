"""A laboratory: the same training under several settings and seeds, compared with honest statistics."""

from typing import TYPE_CHECKING

from grpo_kit._support.lazy import lazy

if TYPE_CHECKING:
    from grpo_kit.more.lab.compare_arms import Lab, compare, load

__all__ = lazy(__name__)
