"""Length and repetition: neither too long nor too short, and no endless repeats."""

from __future__ import annotations

import re
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, Literal

from grpo_kit._support.argument_checks import check_choice, check_number
from grpo_kit.rewards._ngrams import WORD, ngrams
from grpo_kit.rewards.response import ResponseReward, pair_prefill
from grpo_kit.rewards.response import column as get_column

if TYPE_CHECKING:
    from grpo_kit.rewards.cheat_cases import Case

_LONGEST_WORD = 30  # letters; anything longer is text without spaces
_PIECE = re.compile(rf"{WORD.pattern}|[^\w\s]|_")


class RightSize(ResponseReward):
    """1.0 for a completion of shortest to expected length, falling in a straight line to 0.0 at the limit.

    score = (limit - length) / (limit - expected) between expected and limit, 0 from the limit on; below shortest,
    length / shortest. A blank completion is 0. Never None.
    unit: "tokens" counts the completion's token ids, which TRL passes as `completion_ids` (EOS included);
    "characters" counts the text, whatever its source or script; 4 to 5 make a token of English. There is
    no default, because 256 tokens and 256 characters differ so much. The prefill does not count.
    limit is usually max_completion_tokens: a completion cut off there earns 0. With shortest=0 and tokens this is
    1 + DAPO's soft overlong punishment, L_max = limit, L_cache = limit - expected.
    Raises ValueError if unit is "tokens" and no completion_ids are given.
    Source: DAPO, arXiv:2503.14476, eq. 13.

    >>> RightSize(80, 100, unit="characters")(["x" * 80, "x" * 90, "x" * 100, "x" * 500, ""])
    [1.0, 0.5, 0.0, 0.0, 0.0]
    """

    only_a_part = True  # a part of a good answer; see check_rewards

    def __init__(
        self, expected: int, limit: int, *, unit: Literal["tokens", "characters"], shortest: int = 0
    ) -> None:
        for name, size in (("expected", expected), ("limit", limit), ("shortest", shortest)):
            check_number(name, size, 0)
        if not 0 <= shortest <= expected < limit or expected < 1:
            raise ValueError(
                f"shortest={shortest!r}, expected={expected!r}, limit={limit!r}: use 0 <= shortest <= expected "
                "< limit, with limit the maximum length of a completion, such as expected=192, limit=256"
            )
        check_choice("unit", unit, ("tokens", "characters"))
        self.expected, self.limit, self.unit, self.shortest = expected, limit, unit, shortest
        self.__name__ = "right_size"

    def __call__(
        self,
        completions: Sequence[Any],
        *,
        completion_ids: Sequence[Sequence[int]] | None = None,
        **columns: Any,
    ) -> list[float | None]:
        texts = [text for text, _ in pair_prefill(completions, None)]
        lengths = [len(text) for text in texts]
        if self.unit == "tokens":
            if completion_ids is None:
                raise ValueError(
                    "right_size with unit='tokens' needs completion_ids, which trainers pass; elsewhere "
                    "give them, or use unit='characters'"
                )
            ids = {"completion_ids": completion_ids}
            lengths = [
                len(row) for row in get_column(ids, "completion_ids", reward="right_size", rows=len(texts))
            ]
        return [
            self._rate(length) if text.strip() else 0.0 for length, text in zip(lengths, texts, strict=True)
        ]

    def cheats(self, honest: Case) -> list[Case]:
        """Filler of the expected length and of ten times the limit; no cases for tokens, since a case has text only."""
        if self.unit == "tokens":
            return []
        sizes = {"filler of the right length": self.expected, "filler without end": 10 * self.limit}
        return [honest.cheat(name, ("well so " * size)[:size], "format") for name, size in sizes.items()]

    def _rate(self, length: int) -> float:
        if length < self.shortest:
            return length / self.shortest
        return min(1.0, max(0.0, (self.limit - length) / (self.limit - self.expected)))


class Repetition(ResponseReward):
    """Share of distinct n-grams among the completion's n-grams of words, in [0, 1]: 1.0 if none is repeated.

    1 + the usual repetition penalty (with maximum -1), on words in any case and punctuation marks. Each Chinese or
    Japanese character is a word; a run of over 30 letters counts letter by letter. A text with fewer than n words
    repeats nothing: 1.0. A blank completion is 0.0. Never None. The prefill does not count.
    Longer texts repeat more anyway: compare texts of similar length.
    Source: arXiv:2502.03373, appendix C.2 (there on tokens).

    >>> Repetition(2)(["one two three four", "so so so so so"])
    [1.0, 0.25]
    """

    only_a_part = True  # a part of a good answer; see check_rewards

    def __init__(self, n: int = 3) -> None:
        if n not in range(1, 21):
            raise ValueError(f"n={n!r} must be from 1 to 20; 3 is usual")
        self.n = int(n)
        self.__name__ = "repetition"

    def cheats(self, honest: Case) -> list[Case]:
        """One endless phrase, and the honest completion five times."""
        return [
            honest.cheat("one phrase without end", "and so it goes on " * 50, "format"),
            honest.cheat("honest five times", honest.completion * 5, "format"),
        ]

    def _score(self, text: str, prefill: str) -> float:
        found = ngrams(_pieces(text), self.n)
        if not found:
            return float(bool(text.strip()))
        return len(set(found)) / len(found)


def _pieces(text: str) -> list[str]:
    found = _PIECE.findall(text.lower())
    if max(map(len, found), default=0) <= _LONGEST_WORD:
        return found
    return [piece for word in found for piece in ([word] if len(word) <= _LONGEST_WORD else word)]
