"""A grid with hints: walk to a door whose direction each turn states. The first lesson in several turns."""

from __future__ import annotations

import random
from collections.abc import Mapping
from typing import Any

from grpo_kit.more.episodes.episode_task import EpisodeTask, worked
from grpo_kit.more.episodes.observation import View

# Start and door of the worked episodes, which no row has; the second three for maps smaller than 4.
_SHOWN = (([3, 1], [1, 2]), ([0, 3], [2, 2]), ([1, 0], [1, 2]))
_SMALL = (([1, 0], [0, 1]), ([0, 0], [1, 1]), ([1, 1], [1, 0]))
MOVES = {"up": (-1, 0), "down": (1, 0), "left": (0, -1), "right": (0, 1)}


class Grid:
    """A square of size x size fields. Row: size, start and door as [line, column]. Reward 1 at the door, else 0."""

    actions = tuple(MOVES)

    def reset(self, row: Mapping[str, Any]) -> str:
        """Stand at the start."""
        self.size, self.place, self.door = row["size"], list(row["start"]), list(row["door"])
        self.invalid = False
        return self._hint()

    def step(self, text: str) -> tuple[str, float, bool]:
        """One move; a wall leaves you where you are."""
        words = text.strip().lower().strip(".").split()
        if len(words) != 1 or words[0] not in MOVES:
            self.invalid = True
            return f"Say one of: {', '.join(MOVES)}. {self._hint()}", 0.0, False
        moved = [x + d for x, d in zip(self.place, MOVES[words[0]], strict=True)]
        if not all(0 <= x < self.size for x in moved):
            return f"There is a wall. {self._hint()}", 0.0, False
        self.place = moved
        if self.place == self.door:
            return "You are through the door.", 1.0, True
        return self._hint(), 0.0, False

    def _hint(self) -> str:
        lines, columns = (d - p for d, p in zip(self.door, self.place, strict=True))
        parts = ["above you"] if lines < 0 else ["below you"] if lines > 0 else []
        parts += ["to your left"] if columns < 0 else ["to your right"] if columns > 0 else []
        return f"The door is {' and '.join(parts)}."


def shortest(row: Mapping[str, Any], rng: random.Random) -> Any:
    """The policy that walks straight to the door."""

    def respond(observation: str) -> str:
        for words, move in (("above", "up"), ("below", "down"), ("left", "left"), ("right", "right")):
            if words in observation.rsplit("The door", 1)[-1]:
                return move
        return "up"

    return respond


def grid(
    n_train: int = 128, n_held_out: int = 64, *, size: int = 5, max_turns: int = 4, seed: int = 0
) -> EpisodeTask:
    """Doors at most max_turns steps away; no pair of start and door is in both splits.

    Raises ValueError if there are fewer pairs than rows.
    """
    fields = [[line, column] for line in range(size) for column in range(size)]
    pairs = [(s, d) for s in fields for d in fields if 0 < abs(s[0] - d[0]) + abs(s[1] - d[1]) <= max_turns]
    shown = _SHOWN if size > 3 else _SMALL
    left = len([pair for pair in pairs if pair not in shown])
    if n_train + n_held_out > left:
        raise ValueError(
            f"n_train={n_train} and n_held_out={n_held_out} are more than the {left} pairs of a grid of size="
            f"{size} with max_turns={max_turns}; take fewer rows or a larger grid"
        )
    random.Random(seed).shuffle(pairs)
    pairs = [pair for pair in pairs if pair not in shown]
    rows = [
        {"question": "Go through the door.", "answer": "", "size": size, "start": s, "door": d}
        for s, d in pairs[: n_train + n_held_out]
    ]
    return EpisodeTask(
        "grid",
        train=rows[n_held_out:],
        held_out=rows[:n_held_out],
        environment=Grid,
        view=View(
            actions=0,
            system="Answer with one word: up, down, left or right.",
            examples=tuple(("Go through the door.", _walk(*pair, size)) for pair in shown),
        ),
        max_turns=max_turns,
        max_completion_tokens=8,
        optimum=shortest,
        actions=Grid.actions,
    )


def _walk(start: list[int], door: list[int], size: int) -> list[tuple[str, str]]:
    return worked(Grid(), shortest, {"size": size, "start": start, "door": door})
