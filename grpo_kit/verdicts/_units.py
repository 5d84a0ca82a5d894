"""Units: what dimension a unit has, and how many of the base unit it is, exactly.

The table is units.csv; its dimensions are products, such as mass*length*time^-2. Temperatures are no multiples of each
other, so each is a dimension of its own; so are months beside days. A unit that is not in the table is a counted thing
("apples"): again a dimension of its own.
"""

from __future__ import annotations

import csv
import re
from collections import Counter
from dataclasses import dataclass
from fractions import Fraction
from functools import lru_cache
from itertools import product
from pathlib import Path

from grpo_kit.verdicts._sentences import number_in_words

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
_SINGLE = {
    "people": "person",
    "children": "child",
    "men": "man",
    "women": "woman",
    "mice": "mouse",
}
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
_FACTOR = re.compile(
    r"(?P<name>.*?[^\d\s^{}+-])\s*(?:(?:\^\s*\{?|(?=[23]$))(?P<power>-?\d)\}?)?$"
)


@dataclass(frozen=True)
class Unit:
    """dimensions: ((name, power), ...), sorted. factor: how many base units."""

    dimensions: tuple[tuple[str, int], ...]
    factor: Fraction = Fraction(1)

    def times(self, unit: Unit, power: int = 1) -> Unit:
        """This unit times another one to the power."""
        powers = Counter(dict(self.dimensions))
        for name, count in unit.dimensions:
            powers[name] += power * count
        dimensions = sorted((name, count) for name, count in powers.items() if count)
        return Unit(tuple(dimensions), self.factor * unit.factor**power)


_NONE = Unit(())


def _table() -> dict[str, tuple[Unit, ...]]:
    """The meanings of each name; most have one."""
    meanings: dict[str, tuple[Unit, ...]] = {}
    lines = Path(__file__).with_name("units.csv").read_text(encoding="utf-8").splitlines()
    for row in csv.DictReader(lines):
        dimensions = []
        for part in row["dimension"].split("*"):
            dimension, _, power = part.partition("^")
            dimensions.append((dimension, int(power or 1)))
        unit = Unit(tuple(sorted(dimensions)), Fraction(row["factor"]))
        for name in row["names"].split(";"):
            meanings[name] = (*meanings.get(name, ()), unit)
    return meanings


_NAMES = _table()


@lru_cache(4096)
def read_unit(text: str, *, count: Fraction | None = None) -> tuple[Unit, ...]:
    """What the text may mean as a unit, one meaning or several ("pounds"); () if it is none.

    count: how many of it; a counted thing is in the plural, but for 1.

    >>> read_unit("cm^2")[0].factor, read_unit("km/h")[0].dimensions, read_unit("wrong")
    (Fraction(1, 10000), (('length', 1), ('time', -1)), ())
    """
    text = re.sub(
        r"\\frac\s*\{([^{}]*)\}\s*\{([^{}]*)\}", r"\1/\2", re.sub(r"\s+", " ", text)
    ).strip()
    text = re.sub(r"\s*(\\(?:Omega|mu))\s*", r"\1", re.sub(r"\s+\^(?!\\)", "^", text))
    if text not in _NAMES:
        text = AFTER.sub("", text)
    top, *divisors = _PER.split(text)
    units = _product(top, count)
    for divisor in divisors:
        units = _products(units, _product(divisor, Fraction(1)), -1)
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
    first, _, name = text.partition(" ")
    power = _POWERS_BEFORE.get(first.lower())
    if not (name and power):
        name, _, last = text.rpartition(" ")
        power = _POWERS_BEHIND.get(last)
    if name and power:
        units = tuple(filter(_is_measure, _product(name, count)))
        return _products((_NONE,), units, power)
    factor = _FACTOR.match(text)
    if factor and factor["power"] and factor["name"].strip() in _NAMES:
        return _products((_NONE,), _NAMES[factor["name"].strip()], int(factor["power"]))
    return _side_by_side(text) or _thing(text, count)


def _side_by_side(text: str) -> tuple[Unit, ...]:
    """Several known units: N m, kilowatt-hours."""
    parts = re.split(r"\s*(?:\\cdot|\\times|\*|(?<=[a-z])-(?=[a-z]))\s*|\s+", text)
    if len(parts) < 2 or not all(map(_FACTOR.match, parts)):
        return ()
    units: tuple[Unit, ...] = (_NONE,)
    for part in parts:
        meanings = _product(part, None)
        if not any(map(_is_measure, meanings)):
            return ()
        units = _products(units, meanings)
    return units


def _products(
    units: tuple[Unit, ...], factors: tuple[Unit, ...], power: int = 1
) -> tuple[Unit, ...]:
    """Each meaning of a unit times each meaning of a factor to the power."""
    return tuple(unit.times(factor, power) for unit, factor in product(units, factors))


def _is_measure(unit: Unit) -> bool:
    return not any(name.startswith("of ") for name, _ in unit.dimensions)


def _thing(text: str, count: Fraction | None) -> tuple[Unit, ...]:
    """A counted thing: one to four words, none of which says more than what is counted."""
    words = re.split(r"[ -]", text.lower())
    if len(words) > 4:
        return ()
    for word in words:
        if not re.fullmatch(r"[^\W\d_]{2,}(?:'[a-z]+)?", word):
            return ()
        if number_in_words(word.removesuffix("es").removesuffix("s")) is not None:
            return ()
    if words[0] in ("more", "fewer", "extra") and len(words) > 1:
        words = words[1:]
    if not _NO_THINGS.isdisjoint(words):
        return ()
    if "of" in words[1:-1]:
        words = words[: words.index("of")]
    noun = words[-1]
    is_plural = (
        noun.endswith("s") and not noun.endswith(("ss", "us", "is"))
    ) or noun in _IRREGULAR
    if not is_plural and count not in (1, -1, None):
        return ()
    return (Unit(((f"of {_singular(words)}", 1),)),)


def says_more(text: str) -> bool:
    """Whether a word of the text takes something back or hedges; see _NO_THINGS.

    >>> says_more("is wrong"), says_more("red apples")
    (True, False)
    """
    return any(word in _NO_THINGS for word in re.findall(r"[\w']+", text.lower()))


def _singular(words: list[str]) -> str:
    noun = _SINGLE.get(words[-1], words[-1])
    for plural, singular in _PLURALS:
        if re.search(plural, noun):
            noun = re.sub(plural, singular, noun)
            break
    return " ".join([*words[:-1], noun])


def same_dimension(unit: Unit, second: Unit) -> bool:
    """Whether both measure the same; of counted things, whether one names the other more closely ("red apples")."""
    match unit.dimensions, second.dimensions:
        case (((thing, 1),), ((other_thing, 1),)) if thing.startswith(
            "of "
        ) and other_thing.startswith("of "):
            thing, other_thing = thing.removeprefix("of"), other_thing.removeprefix("of")
            return thing.endswith(other_thing) or other_thing.endswith(thing)
    return unit.dimensions == second.dimensions
