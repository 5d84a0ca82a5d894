"""A run's files on disk: its folder, its tables, and reading them back."""

from typing import TYPE_CHECKING

from grpo_kit._support.lazy import lazy

if TYPE_CHECKING:
    from grpo_kit.record.files import read_changes

__all__ = lazy(__name__)
