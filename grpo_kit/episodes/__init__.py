"""Several turns: environments, what the model reads each turn, worlds to begin with, mocks, adapters.

EpisodeTask keeps rows, environment and view together; kit.EpisodeTrainer trains on it, kit.evaluate and kit.readiness
play it. An environment is anything with reset(row) and step(text).
"""

from grpo_kit.episodes.adapters import for_trl, from_tools, from_trl
from grpo_kit.episodes.environment import Environment, EpisodeError
from grpo_kit.episodes.games import from_textarena
from grpo_kit.episodes.mock import Mock, recorded
from grpo_kit.episodes.play import Episode, Turn
from grpo_kit.episodes.task import EpisodeTask, worked
from grpo_kit.episodes.view import View, write_turn
from grpo_kit.episodes.worlds import calculator, grid, lookup, phone, shop

__all__ = [
    "EpisodeTask", "View", "Environment", "EpisodeError", "Episode", "Turn", "write_turn", "worked",
    "grid", "lookup", "calculator", "shop", "phone",
    "Mock", "recorded",
    "from_tools", "from_trl", "for_trl", "from_textarena",
]  # fmt: skip
