"""How a completion is written, whatever it answers: its format, its length, repetition, and its script."""

from __future__ import annotations

import functools
import re
import unicodedata
from collections import Counter
from collections.abc import Collection, Sequence
from typing import TYPE_CHECKING, Any, Literal

from grpo_kit._support.argument_checks import check_choice, check_number
from grpo_kit.rewards.response import (
    ResponseReward,
    check_tag,
    is_blank,
    own_answer,
    pair_prefill,
)
from grpo_kit.rewards.response import column as get_column

# Scripts without spaces: each character, with the signs on it, counts as a word, as in sacrebleu's "zh".
_UNSPACED = (
    "\u3040-\u30ff\u3400-\u4dbf\u4e00-\u9fff\uf900-\ufaff"  # Chinese, Japanese
    "\u0e00-\u0eff\u1000-\u109f\u1780-\u17ff"  # Thai, Lao, Burmese, Khmer
)
# Vowel signs, tones and accents: of the word that they stand in. `re` has no class for them.
_SIGNS = "".join(
    chr(code) for code in range(0x300, 0x1F000) if unicodedata.category(chr(code))[0] == "M"
)
WORD = re.compile(
    rf"[{_UNSPACED}][{_SIGNS}]*|[^\W_{_UNSPACED}](?:[^\W_{_UNSPACED}]|[{_SIGNS}])*"
)


def words(text: str) -> list[str]:
    """Runs of letters, digits and their signs, lower case; a Chinese or Thai character is a word by itself.

    >>> words("Na+ ions: 水 and β-carotene"), words("की कि")
    (['na', 'ions', '水', 'and', 'β', 'carotene'], ['की', 'कि'])
    """
    return WORD.findall(text.lower())


def ngrams(pieces: Sequence[str], n: int) -> list[tuple[str, ...]]:
    """All runs of n adjacent pieces, in order; none if there are fewer pieces."""
    return list(zip(*(pieces[i:] for i in range(n)), strict=False))


if TYPE_CHECKING:
    from grpo_kit.rewards.cheat_cases import Case

_LONGEST_WORD = 30  # letters; anything longer is text without spaces
_PIECE = re.compile(rf"{WORD.pattern}|[^\w\s]|_")
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
_GREEK = (
    r"\u0300-\u03ff\u1d26-\u1d2a\u1f00-\u1fff\u2126\u213c-\u213f\uab65\xb5\U0001d6a8-\U0001d7cb"
)
_GREEK_SYMBOLS = re.compile(rf"(?<![{_GREEK}])[{_GREEK}]{{1,3}}(?![{_GREEK}])")
_SAMPLES = {
    "han": "我们一步一步地思考这个问题，然后给出最后的答案。",
    "cyrillic": "Рассмотрим эту задачу по шагам и затем дадим окончательный ответ.",
    "latin": "Let us look at the problem step by step and then give the final answer.",
}


class SoftFormat(ResponseReward):
    """How much of <think>...</think><answer>...</answer> the response (prefill + completion) has, in [0, 1].

    | piece                                                        | with think | think=None |
    |---|---|---|
    | each tag, if it appears exactly once                         | 1/8 (x 4)  | 1/4 (x 2)  |
    | order: all tags once, in order, an answer and a thought      | 1/4        | 1/4        |
    | nothing visible after the closing answer tag                 | 1/4        | 1/4        |

    A repeated tag earns nothing, so spam does not pay. Blank text (white space, zero-width characters, &nbsp;: see
    response.is_blank) is no answer and no thought, nor is the prefill's text alone. Punctuation is an answer but
    no thought. A thought that the prefill closes, such as Qwen3's empty one, is
    not asked for. All steps are exact in binary. Never None. Needs no column but the optional `prefill`.

    >>> SoftFormat()(["<think>a</think><answer>1</answer>", "<answer>1</answer>", ""])
    [1.0, 0.5, 0.0]
    >>> SoftFormat(think=None)(["82</answer>", "82"], prefill=["<answer>", "<answer>"])
    [1.0, 0.25]
    """

    def __init__(self, *, think: str | None = "think", answer: str = "answer") -> None:
        check_tag("answer", answer)
        if think is not None:
            check_tag("think", think)
        if think == answer:
            raise ValueError(
                f"think={think!r}, answer={answer!r}: use two different names, or think=None"
            )
        self.think, self.answer = think, answer
        self.__name__ = "soft_format"
        names = [name for name in (think, answer) if name is not None]
        self._tags = [tag for name in names for tag in (f"<{name}>", f"</{name}>")]

    def _score(self, completion: str, prefill: str) -> float:
        response = prefill + completion
        once = [response.count(tag) == 1 for tag in self._tags]
        score = sum(once) / (2 * len(self._tags))
        places = [response.find(tag) for tag in self._tags]
        in_order = all(once) and places == sorted(places)
        has_answer = own_answer(completion, prefill, self.answer) is not None
        has_thought = True  # one that the prefill closes is not asked for
        if self.think is not None and f"</{self.think}>" not in prefill:
            has_thought = not is_blank(
                own_answer(completion, prefill, self.think) or "", words=True
            )
        if in_order and has_answer and has_thought:
            score += 0.25
        if once[-1] and is_blank(response.rpartition(self._tags[-1])[2]):
            score += 0.25
        return score


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
        self,
        expected: int,
        limit: int,
        *,
        unit: Literal["tokens", "characters"],
        shortest: int = 0,
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
        sequences: Sequence[Any] = texts
        if self.unit == "tokens":
            if completion_ids is None:
                raise ValueError(
                    "right_size with unit='tokens' needs completion_ids, which trainers pass; elsewhere "
                    "give them, or use unit='characters'"
                )
            ids = {"completion_ids": completion_ids}
            sequences = get_column(ids, "completion_ids", reward="right_size", rows=len(texts))
        pairs = zip(texts, sequences, strict=True)
        return [self._rate(len(sequence)) if text.strip() else 0.0 for text, sequence in pairs]

    def cheats(self, honest: Case) -> list[Case]:
        """Filler of the expected length and of ten times the limit; no cases for tokens, since a case has text only."""
        if self.unit == "tokens":
            return []
        sizes = {
            "filler of the right length": self.expected,
            "filler without end": 10 * self.limit,
        }
        return [
            honest.cheat(name, ("well so " * size)[:size], "format")
            for name, size in sizes.items()
        ]

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
        runs = ngrams(_pieces(text), self.n)
        if not runs:
            return float(bool(text.strip()))
        return len(set(runs)) / len(runs)


def _pieces(text: str) -> list[str]:
    pieces: list[str] = []
    for word in _PIECE.findall(text.lower()):
        if len(word) > _LONGEST_WORD:
            pieces += word  # letter by letter
        else:
            pieces.append(word)
    return pieces


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
        sample = next(text for script, text in _SAMPLES.items() if script not in self._expected)
        return [
            honest.cheat("another script", sample * 3, "format"),
            honest.cheat(
                "another script before the answer", sample + honest.completion, "always"
            ),
        ]

    def _score(self, text: str, prefill: str) -> float:
        return script_share(text, self._expected) if text.strip() else 0.0


def script_share(text: str, scripts: Collection[str]) -> float:
    """Share of the text's letters that are of these scripts, as Language counts them; 1.0 without a letter."""
    # What is not ASCII stays: it is text, a comment or an evasion.
    text = _NEUTRAL.sub(lambda neutral: _ASCII.sub(" ", neutral[0]), text)
    if "greek" not in scripts:
        text = _GREEK_SYMBOLS.sub(" ", text)
    counts = Counter(map(script_of, text))
    del counts[""]
    if not counts.total():
        return 1.0
    return sum(counts[script] for script in scripts) / counts.total()


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
