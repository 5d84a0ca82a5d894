"""Words of self-reflection ("aha moments") in completions, counted as in the literature.

A word is a hint, no proof: models also write "wait" in stories, and most reflections change no answer
(arXiv:2503.20783 checks its keywords with a second model).
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence

import pandas as pd

_R1_ZERO = "Liu et al., arXiv:2503.20783, their keyword pool"
_PILOT = "Liu et al., There May Not be Aha Moment in R1-Zero-like Training, 2025"
_LASER = "Liu et al., arXiv:2505.15612, their self-reflection keywords"
_R1 = "DeepSeek-R1, arXiv:2501.12948, its aha moment"

# word -> (regular expression of its spellings, source of the count)
WORDS: dict[str, tuple[str, str]] = {
    "aha": ("aha", _R1),
    "wait": ("wait", _R1 + "; " + _LASER),
    "recheck": ("re-?check", _R1_ZERO),
    "rethink": ("re-?think", _R1_ZERO),
    "reassess": ("re-?assess", _R1_ZERO),
    "reevaluate": ("re-?evaluat(?:e|ion)", _R1_ZERO),
    "reexamine": ("re-?examine", _R1_ZERO),
    "reconsider": ("re-?consider", _R1_ZERO),
    "reanalyze": ("re-?analy[sz]e", _R1_ZERO),
    "double-check": ("double[- ]check", _R1_ZERO),
    "check again": ("check again", _R1_ZERO),
    "think again": ("think again", _R1_ZERO),
    "verify again": ("verify again", _R1_ZERO),
    "go over the steps": ("go over the steps", _R1_ZERO),
    "try again": ("try again", _PILOT),
    "retry": ("retry", _LASER),
    "alternatively": ("alternatively", _LASER),
    "however": ("however", _LASER),
}
# Everyday words: weak evidence alone, so the total leaves them out.
COMMON = ("however", "alternatively")
_PATTERNS = {
    word: re.compile(rf"\b(?:{spellings})\b", re.IGNORECASE) for word, (spellings, _) in WORDS.items()
}


def count_words(texts: Sequence[str]) -> dict[str, int]:
    """How many texts hold each of WORDS, whole words in any case; "any" counts those that hold one not in COMMON.

    >>> counts = count_words(["Wait, let me re-check.", "He waited. However, 5"])
    >>> {word: n for word, n in counts.items() if n}
    {'wait': 1, 'recheck': 1, 'however': 1, 'any': 1}
    """
    counts = dict.fromkeys([*WORDS, "any"], 0)
    for text in texts:
        words = {word for word, pattern in _PATTERNS.items() if pattern.search(text)}
        if not words <= set(COMMON):
            words.add("any")
        for word in words:
            counts[word] += 1
    return counts


def word_table(counts: Mapping[str, int], n: int) -> pd.DataFrame:
    """Words that occur, most frequent first: samples with the word, per 1000 samples, source; "any" last.

    counts: from count_words over n texts.
    """
    sources = {word: source for word, (_, source) in WORDS.items()}
    sources["any"] = f"any of these but {', '.join(COMMON)}"
    words = [word for word, count in counts.items() if count and word != "any"]
    words = [*sorted(words, key=counts.get, reverse=True), "any"]
    columns = {
        "samples": [counts[word] for word in words],
        "per 1000": [round(1000 * counts[word] / n, 1) for word in words],
        "source": [sources[word] for word in words],
    }
    return pd.DataFrame(columns, index=pd.Index(words, name="word"))
