"""GRPO in one loop that a student reads from top to bottom; every other room hangs on it.

The page "The loop" has its files in the order in which to read them, protocols.py first.
"""

from typing import TYPE_CHECKING

from grpo_kit._support.lazy import lazy

if TYPE_CHECKING:
    from grpo_kit.loop.batch import Batch
    from grpo_kit.loop.config import Config
    from grpo_kit.loop.grpo import Loop

__all__ = lazy(__name__)
