"""Look things up: who lives where, and what grows there. Cannot be solved without reading the observations.

    python -m grpo_kit train examples/lookup.py:lookup --preset smoke

trains a tiny random model for two steps, to see that it runs; leave --preset out for what fits this machine. In
Python, in the repository's folder: `from examples.lookup import lookup`, then `lookup()` is a task.
"""

from __future__ import annotations

import random
from collections.abc import Mapping
from typing import Any

from grpo_kit.more.episodes import EpisodeTask, View, worked

PEOPLE = ("Tom", "Anna", "Ben", "Clara", "David", "Emma", "Frank", "Grace")
TOWNS = ("Paris", "Rome", "Oslo", "Cairo", "Lima", "Tokyo", "Delhi", "Quebec")
FRUITS = ("apples", "pears", "plums", "figs", "grapes", "lemons", "cherries", "melons")


class Lookup:
    """Row: person, homes {person: town}, fruits {town: fruit}. Reward 1 for the right fruit, 0 for a wrong one."""

    actions = (
        "ask {person}",
        *(f"ask {name}" for name in PEOPLE), *(f"visit {town}" for town in TOWNS), *(f"say {f}" for f in FRUITS),
    )  # fmt: skip

    def reset(self, row: Mapping[str, Any]) -> str:
        """Begin with nothing known."""
        self.homes, self.fruits, self.person = row["homes"], row["fruits"], row["person"]
        self.invalid = False
        return "You can: ask a person, visit a town, say a fruit."

    def step(self, text: str) -> tuple[str, float, bool]:
        """ask NAME, visit TOWN or say FRUIT."""
        words = text.strip().strip(".").split()
        verb, what = (words[0].lower(), words[1]) if len(words) == 2 else ("", "")
        if verb == "ask" and what in self.homes:
            return f"{what} lives in {self.homes[what]}.", 0.0, False
        if verb == "visit" and what in self.fruits:
            return f"In {what} they grow {self.fruits[what]}.", 0.0, False
        if verb == "say" and what in FRUITS:
            right = what == self.fruits[self.homes[self.person]]
            return ("Right." if right else "Wrong."), float(right), True
        self.invalid = True
        return "Say: ask a person, visit a town, or say a fruit.", 0.0, False


def reader(row: Mapping[str, Any], rng: random.Random) -> Any:
    """The policy that asks, visits and says."""

    def respond(observation: str) -> str:
        words = observation.strip(".").split()
        if " lives in " in observation:
            return f"visit {words[-1]}"
        if " they grow " in observation:
            return f"say {words[-1]}"
        return f"ask {row['person']}"

    return respond


def lookup(
    n_train: int = 256,
    n_held_out: int = 64,
    *,
    people: int = 4,
    max_turns: int = 4,
    seed: int = 0,
) -> EpisodeTask:
    """Each row has homes and fruits of its own: nothing can be learned by heart."""
    rng = random.Random(seed)
    rows = [_row(rng, people) for _ in range(n_train + n_held_out)]
    shown = [_row(rng, people) for _ in range(3)]
    return EpisodeTask(
        "lookup",
        train=rows[n_held_out:],
        held_out=rows[:n_held_out],
        environment=Lookup,
        view=View(
            chat=True,
            repeat_goal=False,
            system="Answer with one action: ask a person, visit a town, or say a fruit.",
            examples=tuple((row["question"], worked(Lookup(), reader, row)) for row in shown),
        ),
        max_turns=max_turns,
        max_completion_tokens=12,
        optimum=reader,
        actions=Lookup.actions,
    )


def _row(rng: random.Random, people: int) -> dict[str, Any]:
    names, towns, fruits = (rng.sample(words, people) for words in (PEOPLE, TOWNS, FRUITS))
    person = rng.choice(names)
    homes, grown = dict(zip(names, towns, strict=True)), dict(zip(towns, fruits, strict=True))
    return {
        "question": f"Which fruit do they grow where {person} lives?",
        "answer": grown[homes[person]],
        "person": person,
        "homes": homes,
        "fruits": grown,
    }
