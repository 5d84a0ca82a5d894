"""How answers are put together from pieces: separators, relation signs, clocks, dates, numbers in words."""

from __future__ import annotations

import re
from collections.abc import Iterator
from fractions import Fraction

from grpo_kit.verdicts._formula_tokens import number_at

_RELATION = re.compile(r"\\(?:le|ge|ne|in)(?![A-Za-z])|[=<>]")
_SEPARATOR = re.compile(r"[,;]|(?<![^\W\d_])(?:and|or|oder|ou|und|et)(?![^\W\d_])")
_CONJUNCTIONS = {"oder": "or", "ou": "or", "und": "and", "et": "and"}
_OPENS = re.compile(r"\\(?:langle|lfloor|lceil|begin)(?![A-Za-z])|[(\[{]")
_CLOSES = re.compile(r"\\(?:rangle|rfloor|rceil|end)(?![A-Za-z])|[)\]}]")
_CLOCK = re.compile(
    r"(\d{1,2})(?::(\d\d)(?::(\d\d))?)?\s*(?:o'clock|Uhr)?\s*(?:([ap])\.?\s?m\.?)?", re.I
)
_HOURS = {"noon": (Fraction(720), "pm"), "midnight": (Fraction(0), "am")}
_MONTHS = {
    name: number
    for number, names in enumerate(
        "january jan januar janvier enero|february feb februar février febrero|march mar märz mars marzo|"
        "april apr avril abril|may mai mayo|june jun juni juin junio|july jul juli juillet julio|"
        "august aug août agosto|september sep sept septembre septiembre|october oct oktober octobre octubre|"
        "november nov novembre noviembre|december dec dezember décembre diciembre".split("|"),
        1,
    )
    for name in names.split()
}
_UNITS = {word: value for value, word in enumerate(
    "zero one two three four five six seven eight nine ten eleven twelve thirteen fourteen fifteen sixteen seventeen "
    "eighteen nineteen".split())}  # fmt: skip
_TENS = {word: 10 * value for value, word in enumerate(
    "twenty thirty forty fifty sixty seventy eighty ninety".split(), 2)}  # fmt: skip
_SCALES = {"thousand": 10**3, "million": 10**6, "billion": 10**9}


def pieces(text: str, *, comma: bool = False, brackets: bool = False) -> tuple[list[str], str]:
    """The parts between the separators outside all brackets, and which there were: ",", "or" or "and".

    comma: whether 1,5 is a number. brackets: whether the text stood in brackets, where 1,234 are two numbers.

    >>> pieces("1,234, 5 or (6, 7)"), pieces("1,234", brackets=True)
    ((['1,234', '5', '(6, 7)'], 'or'), (['1', '234'], ','))
    """
    parts: list[str] = []
    words: list[str] = []
    start = 0
    for separator in _outside_brackets(text, _SEPARATOR, comma=comma, brackets=brackets):
        part = text[start : separator.start()].strip()
        if separator[0].isalpha() or part or not words:
            parts.append(part)
            words.append(_CONJUNCTIONS.get(separator[0], separator[0]))
            start = separator.end()
    last = text[start:].strip()
    # "1, 2, and 3": nothing stands between the comma and the word
    parts = [*parts[:1], *filter(None, parts[1:]), last]
    return parts, next((word for word in words if word in ("or", "and")), ",")


def split_relations(text: str) -> tuple[list[str], list[str]]:
    """The sides and the relation signs between them, outside all brackets.

    >>> split_relations("1 < x < 2")
    (['1', 'x', '2'], ['<', '<'])
    """
    sides: list[str] = []
    signs: list[str] = []
    start = 0
    for sign in _outside_brackets(text, _RELATION):
        sides.append(text[start : sign.start()].strip())
        signs.append(sign[0])
        start = sign.end()
    return [*sides, text[start:].strip()], signs


def _outside_brackets(
    text: str, pattern: re.Pattern, *, comma: bool = False, brackets: bool = False
) -> Iterator[re.Match]:
    """Where the pattern stands in the text, outside all brackets and numbers."""
    place = depth = 0
    while place < len(text):
        before = text[:place][-1:]
        if text[place].isdecimal() and not (before.isalnum() or before in (".", "_")):
            place += len(number_at(text, place, comma=comma, brackets=brackets))
            continue
        sign = pattern.match(text, place)
        if sign and depth == 0:
            yield sign
        elif sign := _OPENS.match(text, place):
            depth += 1
        elif sign := _CLOSES.match(text, place):
            depth -= 1
        place = sign.end() if sign else place + 1


def read_clock(text: str) -> tuple[Fraction, str | None] | None:
    """(minutes of the day, "am", "pm", "24 h" or None: either may be meant); None for no clock.

    Minutes take two digits, so 1:2 is a ratio.

    >>> read_clock("3:30 p.m."), read_clock("15:30"), read_clock("1:2")
    ((Fraction(930, 1), 'pm'), (Fraction(930, 1), '24 h'), None)
    """
    if text.lower() in _HOURS:
        return _HOURS[text.lower()]
    match = _CLOCK.fullmatch(text)
    if not match or not (match[2] or match[4] or re.search("clock|Uhr", text)):
        return None
    hour, minute, second = (int(digits or 0) for digits in match.groups()[:3])
    half = None
    if match[4]:
        half = f"{match[4].lower()}m"
        if not 1 <= hour <= 12:
            return None
        hour %= 12
        if half == "pm":
            hour += 12
    elif text.startswith("0") or hour > 12:
        half = "24 h"
    if minute > 59 or second > 59 or hour > 24:
        return None
    return Fraction(60 * hour + minute) + Fraction(second, 60), half


def read_date(text: str) -> tuple[int | None, int, int] | None:
    """(year, month, day); None for no date, and for digits alone of which either may be the month (2/5/2020).

    >>> read_date("5 May 2020"), read_date("2020-05-05"), read_date("2/5/2020"), read_date("25/12/2020")
    ((2020, 5, 5), (2020, 5, 5), None, (2020, 12, 25))
    """
    words = re.findall(r"[^\W\d_]+|\d+", re.sub(r"(?<=\d)(?:st|nd|rd|th)\b", "", text.lower()))
    words = [word for word in words if word not in ("of", "the", "de", "le", "del")]
    months = [_MONTHS[word] for word in words if word in _MONTHS]
    numbers = [int(word) for word in words if word.isdecimal()]
    dates: list[tuple[int | None, int, int]] = []
    if len(months) == 1 and len(numbers) in (1, 2) and len(words) == 1 + len(numbers):
        if re.search(r"[^\w\s,.]", text):
            return None
        day, year = (*numbers, None)[:2]
        dates = [(year, months[0], day)]
    elif re.fullmatch(r"\d{4}([-/.]\d{1,2}){2}", text):
        dates = [tuple(numbers)]
    elif re.fullmatch(r"(\d{1,2}[-/.]){2}\d{4}", text):
        first, second, year = numbers
        dates = [(year, second, first), (year, first, second)]
    dates = [date for date in dates if 1 <= date[1] <= 12 and 1 <= date[2] <= 31]
    is_dotted = text.count(".") == 2  # then the day comes first
    if len(set(dates)) == 1 or (dates and is_dotted):
        return dates[0]
    return None


def number_in_words(text: str) -> Fraction | None:
    """A number in English words, fractions too; None if it is none.

    >>> number_in_words("one hundred and twenty-five"), number_in_words("two and three quarters")
    (Fraction(125, 1), Fraction(11, 4))
    """
    words = text.lower().replace("-", " ").replace(",", " ").split()
    is_negative = words[:1] in (["minus"], ["negative"])
    words = words[is_negative:]
    if not words or len(words) > 20:
        return None
    *before, last = words
    part = _PARTS.get(last) or _PARTS.get(last.removesuffix("s"))
    if part:
        value = _fraction_in_words(before, part, plural=last.endswith("s"))
    else:
        value = _whole_in_words([word for word in words if word != "and"])
    if value is not None and is_negative:
        value = -value
    return None if value is None else Fraction(value)


_PARTS = {
    word: part
    for part, word in enumerate(
        "half third quarter fifth sixth seventh eighth ninth tenth".split(), 2
    )
}
_PARTS |= {"fourth": 4, "halves": 2}


def _fraction_in_words(words: list[str], part: int, *, plural: bool) -> Fraction | None:
    """So many parts, and a whole number before them: two and three (quarters)."""
    if not words:
        if part == 2 and not plural:
            return Fraction(1, 2)
        return None
    *before, count = words
    top = 1 if count in ("a", "an") else _whole_in_words([count])
    if top is None or not 0 < top < part or plural != (top > 1):
        return None
    if not before:
        return Fraction(top, part)
    *before, joint = before
    whole = _whole_in_words(before) if joint == "and" else None
    if whole is None:
        return None
    return whole + Fraction(top, part)


def _whole_in_words(words: list[str]) -> int | None:
    match words:
        case []:
            return None
        case ["a" | "an", "hundred" | "thousand" | "million" | "billion", *_]:
            words = ["one", *words[1:]]
    total, group, scale = 0, 0, 10**12
    state = "start"  # of the group: start, hundred, tens, units
    for word in words:
        unit = _UNITS.get(word)
        is_first = state in ("start", "hundred")
        if unit is not None and (is_first or (state == "tens" and 0 < unit < 10)):
            group, state = group + unit, "units"
        elif word in _TENS and is_first:
            group, state = group + _TENS[word], "tens"
        elif word == "hundred" and state == "units" and 0 < group < 20:  # twelve hundred
            group, state = group * 100, "hundred"
        elif group and _SCALES.get(word, scale) < scale:
            scale = _SCALES[word]
            total, group, state = total + group * scale, 0, "start"
        else:
            return None
    return total + group
