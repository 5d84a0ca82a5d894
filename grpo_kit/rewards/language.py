"""Is the completion in the expected script? A model that collapses often switches language first."""

from __future__ import annotations

import functools
import re
import unicodedata
from collections import Counter
from typing import TYPE_CHECKING

from grpo_kit.rewards.response import ResponseReward

if TYPE_CHECKING:
    from grpo_kit.rewards.cheat_cases import Case

SCRIPTS = (
    "arabic", "armenian", "bengali", "cyrillic", "devanagari", "ethiopic", "georgian", "greek", "gujarati", "gurmukhi",
    "han", "hangul", "hebrew", "kana", "kannada", "khmer", "lao", "latin", "malayalam", "myanmar", "sinhala", "tamil",
    "telugu", "thai", "tibetan",
)  # fmt: skip
_FIRST_WORD = {"cjk": "han", "hiragana": "kana", "katakana": "kana"}
# Text with ASCII letters in every language: tags, code, formulas, LaTeX commands.
_NEUTRAL = re.compile(
    r"</?[A-Za-z_]\w*>|```.*?```|`[^`\n]*`|\$\$[^$]*\$\$|\$[^$\n]*\$|\\[(\[](?:[^\\]|\\[^()\[\]])*+\\[)\]]|\\[A-Za-z]+",
    re.DOTALL,
)
_ASCII = re.compile(r"[ -~\s]+")
# Accents written apart, small capitals, and mathematical letters too.
_GREEK = r"\u0300-\u03ff\u1d26-\u1d2a\u1f00-\u1fff\u2126\u213c-\u213f\uab65\xb5\U0001d6a8-\U0001d7cb"
_GREEK_SYMBOLS = re.compile(rf"(?<![{_GREEK}])[{_GREEK}]{{1,3}}(?![{_GREEK}])")
_SAMPLES = {
    "han": "我们一步一步地思考这个问题，然后给出最后的答案。",
    "cyrillic": "Рассмотрим эту задачу по шагам и затем дадим окончательный ответ.",
    "latin": "Let us look at the problem step by step and then give the final answer.",
}


class Language(ResponseReward):
    """Share of the completion's letters that are of the expected script (or scripts), in [0, 1].

    scripts: names of SCRIPTS, such as "latin"; "kana", "han" for Japanese. Only letters count: no digits,
    punctuation, emoji or combining marks, and no ASCII letters inside tags, code, formulas and LaTeX commands.
    Where Greek is not expected, up to three Greek letters in a row are symbols (β-carotene, ΔH) and do not count. A
    Chinese character carries as much as about four Latin letters and counts as one.
    1.0 if there is no letter (the answer "82" is in no wrong language), 0.0 if the completion is blank. Never None.
    The reward tells scripts apart, not French from English. That is enough: a collapsing policy writes another script.
    Statistical detectors need longer texts than a completion, and models of 5 to 100 MB.

    >>> Language("latin")(["The answer is 4.", "答案是 four"])
    [1.0, 0.5714285714285714]
    """

    only_a_part = True  # a part of a good answer; see check_rewards

    def __init__(self, *scripts: str) -> None:
        unknown = [script for script in scripts if script not in SCRIPTS]
        if unknown or not scripts:
            raise ValueError(f"scripts={scripts!r}: name one or more of {', '.join(SCRIPTS)}")
        self.scripts = scripts
        self._expected = frozenset(scripts)
        self.__name__ = "language"

    def cheats(self, honest: Case) -> list[Case]:
        """Another script in place of the completion, and another script before it (the answer is then still right)."""
        other = next(text for script, text in _SAMPLES.items() if script not in self._expected)
        return [
            honest.cheat("another script", other * 3, "format"),
            honest.cheat("another script before the answer", other + honest.completion, "always"),
        ]

    def _score(self, text: str, prefill: str) -> float:
        if not text.strip():
            return 0.0
        counts: Counter[str] = Counter()
        # What is not ASCII stays: it is text, a comment or an evasion.
        text = _NEUTRAL.sub(lambda neutral: _ASCII.sub(" ", neutral[0]), text)
        if "greek" not in self._expected:
            text = _GREEK_SYMBOLS.sub(" ", text)
        for letter, times in Counter(text).items():
            counts[script_of(letter)] += times
        del counts[""]
        total = counts.total()
        return sum(counts[script] for script in self._expected) / total if total else 1.0


@functools.lru_cache(maxsize=2**16)
def script_of(letter: str) -> str:
    """The letter's script in lower case, by its Unicode name; "" if it is no letter.

    >>> script_of("ж"), script_of("水"), script_of("ア"), script_of("7")
    ('cyrillic', 'han', 'kana', '')
    """
    # Fullwidth and mathematical letters are read as the plain letter; № and ™ are signs.
    plain = unicodedata.normalize("NFKC", letter)[:1]
    kinds = unicodedata.category(letter), unicodedata.category(plain)
    if kinds[0] == "Lm" or not all(kind.startswith("L") for kind in kinds):
        return ""
    first = unicodedata.name(plain, "unknown").split()[0].lower()
    return _FIRST_WORD.get(first, first)
