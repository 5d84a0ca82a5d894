"""Texts as words, for the overlap and repetition rewards."""

from __future__ import annotations

import re
import unicodedata
from collections.abc import Sequence

# Chinese and Japanese write no spaces: each of their characters counts as a word, as in sacrebleu's "zh".
_UNSPACED = "\u3040-\u30ff\u3400-\u4dbf\u4e00-\u9fff\uf900-\ufaff"
WORD = re.compile(rf"[{_UNSPACED}]|[^\W_{_UNSPACED}]+")


def normalize(text: str) -> str:
    """NFKC, single spaces, no white space or full stop at the ends.

    >>> normalize(" carbon  dioxide (CO₂).")
    'carbon dioxide (CO2)'
    """
    return " ".join(unicodedata.normalize("NFKC", text).split()).strip(" .")


def words(text: str) -> list[str]:
    """Runs of letters and digits, lower case; a Chinese or Japanese character is a word by itself.

    >>> words("Na+ ions: 水 and β-carotene")
    ['na', 'ions', '水', 'and', 'β', 'carotene']
    """
    return WORD.findall(text.lower())


def ngrams(pieces: Sequence[str], n: int) -> list[tuple[str, ...]]:
    """All runs of n adjacent pieces, in order; none if there are fewer pieces."""
    return list(zip(*(pieces[i:] for i in range(n)), strict=False))


def common_subsequence(a: Sequence[str], b: Sequence[str]) -> int:
    """Length of the longest common subsequence, one bit per element (Hyyrö 2004).

    >>> common_subsequence("the cat sat".split(), "the dog sat down".split())
    2
    """
    a, b = (a, b) if len(a) <= len(b) else (b, a)
    places: dict[str, int] = {}
    for place, piece in enumerate(a):
        places[piece] = places.get(piece, 0) | 1 << place
    full = (1 << len(a)) - 1
    row = full  # a zero bit: the subsequence grows here
    for piece in b:
        matches = row & places.get(piece, 0)
        row = ((row + matches) | (row - matches)) & full
    return len(a) - row.bit_count()
