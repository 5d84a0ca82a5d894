"""The turns of a rollout's episodes as rows for trl, and what is measured of them."""

from __future__ import annotations

from statistics import fmean
from typing import TYPE_CHECKING, Any

from grpo_kit.rollout.tree import common_length

if TYPE_CHECKING:
    from grpo_kit.episodes.rollout_episodes import Episode


class Turns:
    """The turns of a rollout's episodes as rows for trl, in order, filled up to a multiple of `parts`.

    rows: one dict a turn; the last `fillers` of them only fill up. size: episodes of a group.
    """

    def __init__(
        self, episodes: list[Episode], rows: list[dict[str, Any]], size: int, parts: int, decode: Any
    ) -> None:
        self.episodes, self.size = episodes, size
        self.made = [turn for episode in episodes for turn in episode.turns]
        self.rows = [
            {
                "prompt": decode(turn.prompt_ids),
                "prefill": row.get("prefill", ""),
                "question": row.get("question"),
                "answer": row.get("answer"),
                "completion": turn.completion,
                "total": episode.total,
                "group": i // size,
                "episode": i,
                "turn": t,
                "observation": turn.observation,
                "result": turn.result,
                "turn_reward": turn.reward,
                "invalid": turn.invalid,
                "done": episode.done and t == len(episode.turns),
            }
            for i, (row, episode) in enumerate(zip(rows, episodes, strict=True))
            for t, turn in enumerate(episode.turns, start=1)
        ]
        self.fillers = -len(self.made) % parts
        self.made += self.made[-1:] * self.fillers
        self.rows += self.rows[-1:] * self.fillers

    def measured(self, success: float, *, chat: bool) -> dict[str, float]:
        """What the chart and the red flags go by, by name."""
        turns = [turn for episode in self.episodes for turn in episode.turns]
        pairs = [pair for e in self.episodes for pair in zip(e.turns, e.turns[1:], strict=False)]
        share = lambda held: fmean(map(bool, held)) if held else 0.0  # noqa: E731
        n = len(self.episodes)
        return {
            "turns": len(turns) / n,
            "success": sum(e.total >= success for e in self.episodes) / n,
            "unfinished": sum(not e.done for e in self.episodes) / n,
            "invalid": share([turn.invalid for turn in turns]),
            "cut_off": share([turn.cut_off for turn in turns]),
            "repeated": share([(a.completion, a.result) == (b.completion, b.result) for a, b in pairs]),
        } | (
            {
                "forked": share([not _goes_on(a, b) for a, b in pairs]),
                "reread": fmean([_reread(a, b) for a, b in pairs]) if pairs else 0.0,
            }
            if chat
            else {}
        )


def _goes_on(turn: Any, later: Any) -> bool:
    """Does the later prompt begin with the turn's tokens? The last of them may be the end."""
    so_far = [*turn.prompt_ids, *turn.completion_ids[:-1]]
    return later.prompt_ids[: len(so_far)] == so_far


def _reread(turn: Any, later: Any) -> float:
    """What the turn had read and the later prompt does not begin with, as a share of that prompt, at most 1."""
    lost = len(turn.prompt_ids) - common_length(turn.prompt_ids, later.prompt_ids)
    return min(1.0, lost / len(later.prompt_ids))
