"""A laboratory: the same training under several settings and seeds, compared with honest statistics."""

from typing import TYPE_CHECKING

from grpo_kit._support.lazy import lazy

if TYPE_CHECKING:
    from grpo_kit.more.lab.compare_arms import Lab, compare_arms, load
    from grpo_kit.more.lab.figures import plot_pass_at_k
    from grpo_kit.more.lab.null import null
    from grpo_kit.more.lab.rounding import update_survival
    from grpo_kit.more.lab.what_changed import what_changed

# A name that stood here, and what it is called today: what an AttributeError says.
_MOVED = {"compare": "kit.lab.compare_arms"}

__all__ = lazy(__name__)
