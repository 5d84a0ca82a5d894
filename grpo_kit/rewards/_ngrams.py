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


def words(text: str) -> list[str]:
    """Runs of letters, digits and their signs, lower case; a Chinese or Thai character is a word by itself.

    >>> words("Na+ ions: 水 and β-carotene"), words("की कि")
    (['na', 'ions', '水', 'and', 'β', 'carotene'], ['की', 'कि'])
    """
    return WORD.findall(text.lower())


def ngrams(pieces: Sequence[str], n: int) -> list[tuple[str, ...]]:
    """All runs of n adjacent pieces, in order; none if there are fewer pieces."""
    return list(zip(*(pieces[i:] for i in range(n)), strict=False))
