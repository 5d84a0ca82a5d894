"""MathAnswer's rule as it was until 2026-11-26, kept to be measured beside the one that replaced it.

Whatever math-verify does not understand it leaves out, and compares the rest: that is how "4 5" was paid for 9.
Known holes are part of the record, so nothing here is to be mended.
"""

from __future__ import annotations

import re
import threading
import time
from typing import Any

from math_verify import parse, verify

_LONGEST = 256
_EXPLOSIVE = re.compile(
    r"(?:\^|\*\*)[\s{(+-]*[0-9]{4,}"
    r"|(?:\^|\*\*)[\s{(]*[0-9]+[\s]*(?:\^|\*\*|!)"
    r"|(?:\^|\*\*)\s*[{(][^{}()]*[0-9]\s*(?:\*|!|\\cdot|\\times)"
    r"|\)\s*(?:\^|\*\*)[\s{(]*[0-9]+[\s})]*\)\s*(?:\^|\*\*)"
    r"|[0-9]{4,}\s*\)*!|!\s*\)*!"
)
_WRAPPED = re.compile(r"\$|\\boxed|\\\(|\\\[")
_NAMED = re.compile(r"\\?[A-Za-z]\w*(?:\([a-z]\))?\s*=[^=]*")
_WRAPPERS = (("$$", "$$"), ("$", "$"), ("\\(", "\\)"), ("\\[", "\\]"), ("\\boxed{", "}"))


def old_score(answer: str | None, gold: Any, *, timeout: int = 5) -> float | None:
    """The verdict on one stripped answer text, None for no answer. timeout: seconds, in the main thread only.

    >>> old_score("4 5", "9"), old_score("4 5", "8")
    (1.0, 0.0)
    """
    wanted = "" if gold is None else str(gold).strip()
    seconds = timeout if threading.current_thread() is threading.main_thread() else None
    parsed = _parse(wanted, seconds)
    if not parsed:
        return None
    if answer is None or _offers_more(answer, wanted):
        return 0.0
    if answer == wanted:
        return 1.0
    start = time.monotonic()
    given = _parse(answer, seconds)
    if given and verify(parsed, given, timeout_seconds=seconds):
        return 1.0
    return None if seconds is not None and time.monotonic() - start >= timeout else 0.0


def _parse(text: str, seconds: int | None) -> list[Any]:
    text = _bare(text)
    if not text or len(text) > _LONGEST or _EXPLOSIVE.search(text) or _WRAPPED.search(text):
        return []
    found = parse(f"${text}$", parsing_timeout=seconds)
    return [] if all(isinstance(item, str) for item in found) else found


def _bare(text: str) -> str:
    text = text.strip().rstrip(".").rstrip()
    for opening, closing in _WRAPPERS:
        if len(text) > len(opening) and text.startswith(opening) and text.endswith(closing):
            text = text[len(opening) : -len(closing)].strip()
    return text


def _offers_more(answer: str, gold: str) -> bool:
    answer, gold = _bare(answer), _bare(gold)
    if "=" in answer and "=" not in gold and not _NAMED.fullmatch(answer):
        return True
    return _separators(answer) > _separators(gold)


def _separators(text: str) -> int:
    plain = re.sub(r"(?<=[0-9]),(?=[0-9]{3}(?![0-9]))|\\[,;]", "", text)
    return len(re.findall(r"[,;\n]|\bor\b|\band\b", plain))
