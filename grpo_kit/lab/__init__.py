"""A laboratory: the same training under several settings and seeds, compared with honest statistics."""

from grpo_kit.lab.laboratory import Lab, compare, load

__all__ = ["Lab", "compare", "load"]
