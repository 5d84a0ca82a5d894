"""A grid with hints: walk to a door whose direction each turn states. The first lesson in several turns."""

from __future__ import annotations

import random
from collections.abc import Mapping
from typing import Any

from grpo_kit.more.episodes.episode_task import EpisodeTask, worked
from grpo_kit.more.episodes.observation import View

_GOAL = "Go through the door."
# Start and door of the worked episodes, which no row has; the second three for maps smaller than 4.
_SHOWN = (
    ([3, 1], [1, 2]),
    ([0, 3], [2, 2]),
    ([1, 0], [1, 2]),
)
_SMALL = (
    ([1, 0], [0, 1]),
    ([0, 0], [1, 1]),
    ([1, 1], [1, 0]),
)
MOVES = {
    "up": (-1, 0),
    "down": (1, 0),
    "left": (0, -1),
    "right": (0, 1),
}


class Grid:
    """A square of size x size fields. Row: size, start and door as [line, column]. Reward 1 at the door, else 0."""

    actions = tuple(MOVES)

    def reset(self, row: Mapping[str, Any]) -> str:
        """Stand at the start."""
        self.size = row["size"]
        self.place, self.door = list(row["start"]), list(row["door"])
        self.invalid = False
        return self._hint()

    def step(self, text: str) -> tuple[str, float, bool]:
        """One move; a wall leaves you where you are."""
        words = text.strip().lower().strip(".").split()
        if len(words) != 1 or words[0] not in MOVES:
            self.invalid = True
            return f"Say one of: {', '.join(MOVES)}. {self._hint()}", 0.0, False
        line, column = self.place
        line_change, column_change = MOVES[words[0]]
        place = [line + line_change, column + column_change]
        if min(place) < 0 or max(place) >= self.size:
            return f"There is a wall. {self._hint()}", 0.0, False
        self.place = place
        if self.place == self.door:
            return "You are through the door.", 1.0, True
        return self._hint(), 0.0, False

    def _hint(self) -> str:
        (line, column), (door_line, door_column) = self.place, self.door
        parts = []
        if door_line < line:
            parts.append("above you")
        if door_line > line:
            parts.append("below you")
        if door_column < column:
            parts.append("to your left")
        if door_column > column:
            parts.append("to your right")
        return f"The door is {' and '.join(parts)}."


def shortest(row: Mapping[str, Any], rng: random.Random) -> Any:
    """The policy that walks straight to the door."""

    def respond(observation: str) -> str:
        hint = observation.rpartition("The door")[2]
        moves = {"above": "up", "below": "down", "left": "left", "right": "right"}
        return next((move for word, move in moves.items() if word in hint), "up")

    return respond


def grid(
    n_train: int = 128,
    n_held_out: int = 64,
    *,
    size: int = 5,
    max_turns: int = 4,
    seed: int = 0,
) -> EpisodeTask:
    """Doors at most max_turns steps away; no pair of start and door is in both splits.

    Raises ValueError if there are fewer pairs than rows.
    """
    examples = _SHOWN if size > 3 else _SMALL
    fields = [[line, column] for line in range(size) for column in range(size)]
    pairs = []
    for start in fields:
        for door in fields:
            distance = abs(start[0] - door[0]) + abs(start[1] - door[1])
            if 0 < distance <= max_turns:
                pairs.append((start, door))
    random.Random(seed).shuffle(pairs)
    pairs = [pair for pair in pairs if pair not in examples]
    n_rows = n_train + n_held_out
    if n_rows > len(pairs):
        raise ValueError(
            f"n_train={n_train} and n_held_out={n_held_out} are more than the {len(pairs)} pairs of a grid of size="
            f"{size} with max_turns={max_turns}; take fewer rows or a larger grid"
        )

    def row(start: list[int], door: list[int]) -> dict[str, Any]:
        return {"question": _GOAL, "answer": "", "size": size, "start": start, "door": door}

    rows = [row(*pair) for pair in pairs[:n_rows]]
    return EpisodeTask(
        "grid",
        train=rows[n_held_out:],
        held_out=rows[:n_held_out],
        environment=Grid,
        view=View(
            actions=0,
            system="Answer with one word: up, down, left or right.",
            examples=tuple((_GOAL, worked(Grid(), shortest, row(*pair))) for pair in examples),
        ),
        max_turns=max_turns,
        max_completion_tokens=8,
        optimum=shortest,
        actions=Grid.actions,
    )
