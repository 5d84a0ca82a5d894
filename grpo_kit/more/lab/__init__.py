"""A laboratory: the same training under several settings and seeds, compared with honest statistics."""

from typing import TYPE_CHECKING

from grpo_kit._support.lazy import lazy

if TYPE_CHECKING:
    from grpo_kit.more.lab.compare_arms import Lab, compare, load
    from grpo_kit.more.lab.figures import plot_pass_at_k
    from grpo_kit.more.lab.rounding import survival_plot, update_survival

__all__ = lazy(__name__)
