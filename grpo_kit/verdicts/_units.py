"""Units: what dimension a unit has, and how many of the base unit it is, exactly.

The table is units.csv; its dimensions are products, such as mass*length*time^-2. Temperatures are no multiples of each
other, so each is a dimension of its own; so are months beside days. A unit that is not in the table is a counted thing
("apples"): again a dimension of its own.
"""

from __future__ import annotations

import csv
import re
from dataclasses import dataclass
from fractions import Fraction
from functools import lru_cache
from pathlib import Path

from grpo_kit.verdicts._sentences import number_in_words

_MADE_OF = {  # names of products of units
    "mph": "miles/hour", "kph": "km/h", "kmph": "km/h", "kmh": "km/h", "fps": "feet/second", "mpg": "miles/gallon",
    "cc": "cm^3", "acre": "4840 yd^2", "acres": "4840 yd^2", "ha": "10000 m^2", "hectare": "10000 m^2",
    "hectares": "10000 m^2", "rpm": "revolutions/minute", "bpm": "beats/minute", "Mbps": "Mb/s",
    "Gbps": "Gb/s", "sqft": "feet^2", "sqm": "m^2",
}  # fmt: skip
# Words that make of a number something else, or take it back: none of them counts a thing.
_NO_THINGS = frozenset(
    "no not nor or and is are was were be been isn't aren't wasn't than less fewer least most more about around "
    "approximately approx roughly almost nearly over under minus plus times divided by to from between but if maybe "
    "perhaps possibly probably wrong incorrect false true right correct never neither either with without point half "
    "halves third thirds quarter quarters fourths fifth fifths sixths sevenths eighth eighths ninths tenth tenths "
    "hundredth hundredths thousandth thousandths squared cubed factorial negative positive power root mod modulo base "
    "hundreds thousands millions billions tens dozens th st nd rd am pm cannot can't unknown oder und ou et o y e i x "
    "isnt nope yes ok versus vs instead except unless percent percentage digits digit zeros zeroes places "
    "nots nils non anti pro millones milliards millionen milliarden tausend mil mille milliard millón "
    "myriad pairs couples scores trios packs nickels dimes pennies quarters imaginary "
    "this that these those it its as so does doesn't do don't exceeds "
    "exceed equals equal".split()
)
_SINGLE = {"people": "person", "children": "child", "men": "man", "women": "woman", "mice": "mouse"}
_PLURALS = (("(?<=..)ies$", "y"), ("(?<=..)(ch|sh|x|ss)es$", r"\1"), ("(?<=..)(?<!s)s$", ""))
_IRREGULAR = frozenset(
    "people children men women feet teeth mice geese sheep fish deer oxen dice data series species aircraft offspring "
    "cattle money rice water sugar flour milk juice sand paint gas gasoline".split()
)
AFTER = re.compile(
    r" (?:left|left over|remaining|in total|in all|total|altogether|each|apiece|old|long|tall|high|wide|deep|away|"
    r"extra|more|later|earlier|longer|taller|older|younger)$"
)
_PER = re.compile(r"\s*(?:/|\bper\b|\b(?:an?|each|every)\b(?=\s+[a-z]))\s*")
_POWERS_BEFORE = {"square": 2, "sq": 2, "sq.": 2, "cubic": 3, "cu": 3, "cu.": 3}
_POWERS_BEHIND = {"squared": 2, "cubed": 3}
_FACTOR = re.compile(r"(?P<name>.*?[^\d\s^{}+-])\s*(?:\^\s*\{?(?P<power>-?\d)\}?|(?P<glued>[23]))?$")


@dataclass(frozen=True)
class Unit:
    """dimensions: ((name, power), ...), sorted. factor: how many base units."""

    dimensions: tuple[tuple[str, int], ...]
    factor: Fraction = Fraction(1)

    def times(self, other: Unit, power: int = 1) -> Unit:
        """This unit times the other one to the power."""
        powers = dict(self.dimensions)
        for name, count in other.dimensions:
            powers[name] = powers.get(name, 0) + power * count
        dimensions = sorted((name, count) for name, count in powers.items() if count)
        return Unit(tuple(dimensions), self.factor * other.factor**power)


_NONE = Unit(())


def _table() -> dict[str, tuple[Unit, ...]]:
    """The meanings of each name; most have one."""
    named: dict[str, tuple[Unit, ...]] = {}
    for row in csv.DictReader(Path(__file__).with_name("units.csv").read_text(encoding="utf-8").splitlines()):
        unit = Unit((), Fraction(row["factor"]))
        for part in row["dimension"].split("*"):
            name, _, power = part.partition("^")
            unit = unit.times(Unit(((name, int(power or 1)),)))
        for name in row["names"].split(";"):
            named[name] = (*named.get(name, ()), unit)
    return named


_NAMES = _table()


@lru_cache(4096)
def read_unit(text: str, *, count: Fraction | None = None) -> tuple[Unit, ...]:
    """What the text may mean as a unit, one meaning or several ("pounds"); () if it is none.

    count: how many of it; a counted thing is in the plural, but for 1.

    >>> read_unit("cm^2")[0].factor, read_unit("km/h")[0].dimensions, read_unit("wrong")
    (Fraction(1, 10000), (('length', 1), ('time', -1)), ())
    """
    text = re.sub(r"\\frac\s*\{([^{}]*)\}\s*\{([^{}]*)\}", r"\1/\2", re.sub(r"\s+", " ", text)).strip()
    text = re.sub(r"\s*(\\(?:Omega|mu))\s*", r"\1", re.sub(r"\s+\^(?!\\)", "^", text))
    after = AFTER.search(text)
    if after and text not in _NAMES:
        text = text[: after.start()]
    top, *below = _PER.split(text)
    units = _product(top, count)
    for part in below:
        units = _products(units, _product(part, Fraction(1)), -1)
    return units


def _product(text: str, count: Fraction | None) -> tuple[Unit, ...]:
    """A unit without a division: one, one with a power, several side by side, or a counted thing."""
    text = text.strip().strip("()").strip()
    if not text or len(text) > 60:
        return ()
    if text in _NAMES:
        return _NAMES[text]
    if len(text) > 3 and text.lower() in _NAMES:  # Watt, Cents
        return _NAMES[text.lower()]
    if text in _MADE_OF:
        number, _, name = _MADE_OF[text].rpartition(" ")
        return _products((Unit((), Fraction(number or 1)),), read_unit(name))
    first, _, behind = text.partition(" ")
    before, _, last = text.rpartition(" ")
    for word, name, powers in ((first.lower(), behind, _POWERS_BEFORE), (last, before, _POWERS_BEHIND)):
        if name and word in powers:
            units = tuple(filter(_known, _product(name, count)))
            return _products((_NONE,), units, powers[word])
    factor = _FACTOR.match(text)
    if factor and factor["name"].strip() in _NAMES:
        power = factor["power"] or factor["glued"]
        if power:
            return _products((_NONE,), _NAMES[factor["name"].strip()], int(power))
    return _side_by_side(text) or _thing(text, count)


def _side_by_side(text: str) -> tuple[Unit, ...]:
    """Several known units: N m, kilowatt-hours."""
    parts = re.split(r"\s*(?:\\cdot|\\times|\*|(?<=[a-z])-(?=[a-z]))\s*|\s+", text)
    if len(parts) < 2 or not all(map(_FACTOR.match, parts)):
        return ()
    units: tuple[Unit, ...] = (_NONE,)
    for part in parts:
        meanings = _product(part, None)
        if not any(map(_known, meanings)):
            return ()
        units = _products(units, meanings)
    return units


def _products(units: tuple[Unit, ...], others: tuple[Unit, ...], power: int = 1) -> tuple[Unit, ...]:
    """Each meaning of the one times each meaning of the other to the power."""
    return tuple(unit.times(other, power) for unit in units for other in others)


def _known(unit: Unit) -> bool:
    return not any(name.startswith("of ") for name, _ in unit.dimensions)


def _thing(text: str, count: Fraction | None) -> tuple[Unit, ...]:
    """A counted thing: one to four words, none of which says more than what is counted."""
    words = re.split(r"[ -]", text.lower())
    if any(number_in_words(word.removesuffix("es").removesuffix("s")) is not None for word in words):
        return ()
    if not 1 <= len(words) <= 4 or not all(re.fullmatch(r"[^\W\d_]{2,}(?:'[a-z]+)?", word) for word in words):
        return ()
    if words[0] in ("more", "fewer", "extra") and len(words) > 1:
        words = words[1:]
    head = words[: words.index("of")] if "of" in words[1:-1] else words
    if not head or any(word in _NO_THINGS for word in words):
        return ()
    last = head[-1]
    plural = (last.endswith("s") and not last.endswith(("ss", "us", "is"))) or last in _IRREGULAR
    if not plural and count not in (1, -1, None):
        return ()
    return (Unit(((f"of {_stem(head)}", 1),)),)


def says_more(text: str) -> bool:
    """Whether a word of the text takes something back or hedges; see _NO_THINGS.

    >>> says_more("is wrong"), says_more("red apples")
    (True, False)
    """
    return any(word in _NO_THINGS for word in re.findall(r"[\w']+", text.lower()))


def _stem(words: list[str]) -> str:
    last = _SINGLE.get(words[-1], words[-1])
    for plural, single in _PLURALS:
        stem = re.sub(plural, single, last)
        if stem != last:
            break
    return " ".join([*words[:-1], stem])


def same_dimension(one: Unit, other: Unit) -> bool:
    """Whether both measure the same; of counted things, whether one names the other more closely ("red apples")."""
    if one.dimensions == other.dimensions:
        return True
    if len(one.dimensions) != 1 or len(other.dimensions) != 1:
        return False
    (a, m), (b, n) = one.dimensions[0], other.dimensions[0]
    if m != n or not (a.startswith("of ") and b.startswith("of ")):
        return False
    return f" {a[3:]}".endswith(f" {b[3:]}") or f" {b[3:]}".endswith(f" {a[3:]}")
