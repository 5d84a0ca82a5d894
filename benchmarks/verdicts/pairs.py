"""The pairs: a gold, an answer, and whether a teacher would call it right."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any, NamedTuple

PAIRS = Path(__file__).with_name("pairs.jsonl")


class Pair(NamedTuple):
    """One line of pairs.jsonl. right: 1, 0, or None where nobody can judge, because the gold is none."""

    line: int
    reward: str  # the class of the kit that the pair is meant for
    gold: Any
    answer: str
    right: int | None
    why: str

    def __str__(self) -> str:
        """As it is shown: "4 5" for "9".

        >>> str(Pair(1, "MathAnswer", "9", "4 5", 0, ""))
        '"4 5" for "9"'
        """
        return f"{json.dumps(self.answer, ensure_ascii=False)} for {json.dumps(self.gold, ensure_ascii=False)}"


def load(path: Path = PAIRS) -> list[Pair]:
    """All pairs in the order of the file, lines counted from 1."""
    lines = path.read_text(encoding="utf-8").splitlines()
    return [Pair(place, **json.loads(line)) for place, line in enumerate(lines, 1)]
