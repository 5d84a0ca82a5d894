"""Tasks of several turns: environments, what the model reads each turn, recordings, and a small grid.

EpisodeTask keeps rows, environment and view together. kit.GRPOTrainer trains on it; kit.evaluate and kit.readiness
play it. An environment is anything with reset(row) and step(text).
"""

from typing import TYPE_CHECKING

from grpo_kit._support.lazy import lazy

if TYPE_CHECKING:
    from grpo_kit.more.code._literal_calls import call_from_text
    from grpo_kit.more.episodes.environment import Environment, EpisodeError
    from grpo_kit.more.episodes.episode_task import EpisodeTask, worked
    from grpo_kit.more.episodes.grid_world import grid
    from grpo_kit.more.episodes.observation import View, write_turn
    from grpo_kit.more.episodes.recorded_env import RecordedEnv, recorded
    from grpo_kit.more.episodes.rollout_episodes import Episode, Turn, show_turns
    from grpo_kit.more.episodes.template_audit import audit_turns

__all__ = lazy(__name__)
