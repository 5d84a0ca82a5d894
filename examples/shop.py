"""A small shop: search, look at an item, go back if the size is wrong, buy. WebShop's moves, mocked.

    python -m grpo_kit train examples/shop.py:shop --preset smoke

trains a tiny random model for two steps, to see that it runs; leave --preset out for what fits this machine. In
Python, in the repository's folder: `from examples.shop import shop`, then `shop()` is a task.
For models of 0.5B or more.
"""

from __future__ import annotations

import random
import re
from collections.abc import Mapping
from typing import Any

from grpo_kit.more.episodes import EpisodeTask, View, worked

KINDS = ("cup", "lamp", "bag", "hat", "box", "bowl", "clock", "chair")
COLOURS = ("red", "blue", "green", "white", "black", "yellow")
SIZES = ("small", "medium", "large")
SHELF = 4  # items of a kind
# Places of the right item and of the other one of its colour: back and to the second, none, back and to the second.
_WORKED = ((3, 1), (0, 2), (2, 0))


class Shop:
    """Row: kind, colour, size wanted; shelves {kind: [[colour, size], ...]}. Reward 1 for the right item, else 0.

    An action that the menu does not offer is invalid, and changes nothing.
    """

    actions = ("search {kind}", *(f"open {n}" for n in range(1, SHELF + 1)), "back", "buy")

    def reset(self, row: Mapping[str, Any]) -> str:
        """Before any search."""
        self.wanted, self.shelves = [row["colour"], row["size"]], row["shelves"]
        self.wanted_kind, self.kind, self.opened, self.invalid = row["kind"], None, None, False
        return f"The shop has: {', '.join(self.shelves)}. {self._menu()}"

    def step(self, text: str) -> tuple[str, float, bool]:
        """search KIND; open N of the results, which shows its size; back to the results; buy, which ends it."""
        verb, _, what = text.strip().lower().removesuffix(".").partition(" ")
        found = self.kind is not None and self.opened is None
        if verb == "search" and what in self.shelves:
            self.kind, self.opened = what, None
            return self._found(), 0.0, False
        if verb == "open" and found and re.fullmatch(f"[1-{SHELF}]", what):
            colour, size = self.opened = self.shelves[self.kind][int(what) - 1]
            return f"The {colour} {self.kind} is {size}. {self._menu()}", 0.0, False
        if verb == "back" and not what and self.opened:
            self.opened = None
            return self._found(), 0.0, False
        if verb == "buy" and not what and self.opened:
            right = self.kind == self.wanted_kind and list(self.opened) == self.wanted
            return ("Right." if right else "Wrong."), float(right), True
        self.invalid = True
        return f"That cannot be done here. {self._menu()}", 0.0, False

    def _found(self) -> str:
        things = [
            f"{n} {colour} {self.kind}"
            for n, (colour, _) in enumerate(self.shelves[self.kind], 1)
        ]
        return f"{', '.join(things)}. {self._menu()}"

    def _menu(self) -> str:
        if self.opened:
            return "You can: buy, back, search KIND."
        return "You can: open N, search KIND." if self.kind else "You can: search KIND."


def buyer(row: Mapping[str, Any], rng: random.Random) -> Any:
    """The policy that opens items of the right colour, one after another, until the size is right too."""
    tried: list[str] = []

    def respond(observation: str) -> str:
        if " is " in observation:
            return "buy" if f" is {row['size']}." in observation else "back"
        numbers = re.findall(rf"(\d) {row['colour']} {row['kind']}", observation)
        if not numbers:
            return f"search {row['kind']}"
        tried.append(next(number for number in numbers if number not in tried))
        return f"open {tried[-1]}"

    return respond


def shop(
    n_train: int = 256, n_held_out: int = 64, *, max_turns: int = 6, seed: int = 0
) -> EpisodeTask:
    """Two items have the wanted colour, one of them also the size: the first one that looks right is so half the time.

    The right one is at each of the four places equally often.
    Raises ValueError for fewer than 5 turns, the length of the way over the wrong item, and for a split without rows.
    """
    if not isinstance(max_turns, int) or max_turns < 5:
        raise ValueError(
            f"max_turns={max_turns!r} leaves no turns to go back and buy; give at least 5"
        )
    rng, rows = random.Random(seed), []
    for place in range(len(_WORKED) + n_held_out + n_train):
        right = place % SHELF
        other = rng.choice([n for n in range(SHELF) if n != right])
        rows.append(_row(rng, *(_WORKED[place] if place < len(_WORKED) else (right, other))))
    shown, rows = rows[: len(_WORKED)], rows[len(_WORKED) :]
    return EpisodeTask(
        "shop",
        train=rows[n_held_out:],
        held_out=rows[:n_held_out],
        environment=Shop,
        view=View(
            chat=True,
            repeat_goal=False,
            system="Answer with one action: search KIND, open N, back or buy.",
            examples=tuple((row["question"], worked(Shop(), buyer, row)) for row in shown),
        ),
        max_turns=max_turns,
        max_completion_tokens=12,
        optimum=buyer,
        actions=Shop.actions,
    )


def _row(rng: random.Random, right: int, other: int) -> dict[str, Any]:
    """right, other: places on the shelf of the two items of the right colour."""
    kinds = rng.sample(KINDS, 3)
    (colour, *colours), (size, wrong) = rng.sample(COLOURS, 3), rng.sample(SIZES, 2)
    shelves = {
        kind: [[rng.choice(COLOURS), rng.choice(SIZES)] for _ in range(SHELF)] for kind in kinds
    }
    kind = rng.choice(kinds)
    shelf = [[rng.choice(colours), rng.choice(SIZES)] for _ in range(SHELF)]
    shelf[right], shelf[other] = [colour, size], [colour, wrong]
    return {
        "question": f"Buy a {size} {colour} {kind}.",
        "answer": f"{size} {colour} {kind}",
        "kind": kind,
        "colour": colour,
        "size": size,
        "shelves": {**shelves, kind: shelf},
    }
