"""Small worlds of text, pure Python and seeded; each has a perfect, a blind and a random policy."""

from grpo_kit.episodes.worlds.calculator import calculator
from grpo_kit.episodes.worlds.grid import grid
from grpo_kit.episodes.worlds.lookup import lookup
from grpo_kit.episodes.worlds.phone import phone
from grpo_kit.episodes.worlds.shop import shop

__all__ = ["calculator", "grid", "lookup", "phone", "shop"]
