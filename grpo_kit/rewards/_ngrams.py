"""Texts as words, for the overlap and repetition rewards."""

from __future__ import annotations

import re
import unicodedata
from collections.abc import Sequence

# Scripts without spaces: each character, with the signs on it, counts as a word, as in sacrebleu's "zh".
_UNSPACED = (
    "\u3040-\u30ff\u3400-\u4dbf\u4e00-\u9fff\uf900-\ufaff"  # Chinese, Japanese
    "\u0e00-\u0eff\u1000-\u109f\u1780-\u17ff"  # Thai, Lao, Burmese, Khmer
)
# Vowel signs, tones and accents: of the word that they stand in. `re` has no class for them.
_SIGNS = "".join(chr(code) for code in range(0x300, 0x1F000) if unicodedata.category(chr(code))[0] == "M")
WORD = re.compile(rf"[{_UNSPACED}][{_SIGNS}]*|[^\W_{_UNSPACED}](?:[^\W_{_UNSPACED}]|[{_SIGNS}])*")
# Short vowels of Arabic and Hebrew, and Arabic's stretched line, which most texts leave out (as pyarabic strips them).
POINTS = re.compile(
    "[\u0591-\u05bd\u05bf\u05c1\u05c2\u05c4\u05c5\u05c7\u0640\u064b-\u0652\u0670\u06d6-\u06dc\u06df-\u06e8]"
)
_UNSEEN = re.compile("[\u00ad\u200b-\u200f\u2060\ufeff]")
# Other scripts' marks as their ASCII kin, which sacrebleu's tokenizers split off.
_MARKS = {".": "。।॥۔။។።", ",": "、،၊፣", ";": "؛፤", "?": "؟፧", '"': "“”„‟«»「」『』", "'": "‘’‚‛"}
_PLAIN = {ord(mark): plain for plain, marks in _MARKS.items() for mark in marks}


def normalize(text: str) -> str:
    """NFKC, other scripts' punctuation as ASCII's, single spaces, no white space or full stop at the ends.

    >>> normalize(" carbon  dioxide (CO₂)."), normalize("“你好。”")
    ('carbon dioxide (CO2)', '"你好."')
    """
    text = unicodedata.normalize("NFKC", _UNSEEN.sub("", text)).translate(_PLAIN)
    return " ".join(text.split()).strip(" .")


def unpointed(texts: Sequence[str]) -> list[str]:
    """The texts without the short vowels of Arabic and Hebrew, unless each of them is written with some.

    >>> unpointed(["كَتَبَ", "كتب"]) == ["كتب", "كتب"]
    True
    """
    pointed = [bool(POINTS.search(text)) for text in texts]
    return [POINTS.sub("", text) for text in texts] if any(pointed) and not all(pointed) else list(texts)


def words(text: str) -> list[str]:
    """Runs of letters, digits and their signs, lower case; a Chinese or Thai character is a word by itself.

    >>> words("Na+ ions: 水 and β-carotene"), words("की कि")
    (['na', 'ions', '水', 'and', 'β', 'carotene'], ['की', 'कि'])
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
