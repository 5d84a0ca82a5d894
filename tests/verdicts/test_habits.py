"""Kind by kind: one value in two habits of writing is right, another value in any habit is wrong."""

from fractions import Fraction

import pytest
from hypothesis import assume, given, settings
from hypothesis import strategies as st

from grpo_kit.verdicts import verdict

WHOLE = st.integers(-99_999, 99_999)
SMALL = st.integers(1, 12)
ARABIC = str.maketrans("0123456789", "٠١٢٣٤٥٦٧٨٩")
WIDE = str.maketrans("0123456789", "０１２３４５６７８９")
WORDS = st.sampled_from(
    "even odd Monday Tuesday ellipse hyperbola east west Paris London yes no true false listen silent".split()
)


def grouped(n, sign):
    return f"{n:,}".replace(",", sign)


NUMBER = [
    str,
    "{:,}".format,
    lambda n: grouped(n, " "),
    lambda n: grouped(n, "\u202f"),
    lambda n: grouped(n, "'"),
    lambda n: grouped(n, "{,}"),
    lambda n: grouped(n, r"\,"),
    lambda n: f"**{n}**",
    lambda n: f"`{n}`",
    lambda n: f"${n}$",
    lambda n: rf"\boxed{{{n}}}",
    lambda n: rf"\( {n} \)",
    lambda n: rf"\text{{{n}}}",
    lambda n: f"{n}.",
    lambda n: f"{n}.00",
    lambda n: f"{n}\u200b",
    lambda n: f"\u00a0{n} ",
    lambda n: str(n).replace("-", "\u2212"),
    lambda n: str(n).replace("-", "\u2013"),
    lambda n: str(n).translate(ARABIC),
    lambda n: str(n).translate(WIDE),
    lambda n: f"x = {n}",
    lambda n: f"The answer is {n}.",
    lambda n: f"**Answer:** {n}",
    lambda n: f"{n}e0",
]
FRACTION = [
    lambda f: f"{f.numerator}/{f.denominator}",
    lambda f: f"{f.numerator} / {f.denominator}",
    lambda f: f"{2 * f.numerator}/{2 * f.denominator}",
    lambda f: rf"\frac{{{f.numerator}}}{{{f.denominator}}}",
    lambda f: rf"\dfrac{{{f.numerator}}}{{{f.denominator}}}",
    lambda f: rf"$\tfrac {{{f.numerator}}} {{{f.denominator}}}$",
    lambda f: f"{f.numerator}\u2044{f.denominator}",
    lambda f: f"{f.numerator}\u00f7{f.denominator}",
    lambda f: mixed(f, " {}/{}"),
    lambda f: mixed(f, r"\frac{{{}}}{{{}}}"),
]
PERCENT = [
    lambda n: f"{n}%",
    lambda n: f"{n} %",
    lambda n: rf"{n}\%",
    lambda n: f"{n} percent",
    lambda n: f"{n}.0 per cent",
    lambda n: f"{n}\uff05",
]
MONEY = [
    lambda n: f"${n}",
    lambda n: f"$ {n}",
    lambda n: f"{n}$",
    lambda n: rf"\${n}",
    lambda n: f"${n:,}.00",
    lambda n: f"{n} dollars",
    lambda n: f"{n} USD",
    lambda n: f"USD {n}",
    lambda n: f"{n * 100} cents",
    lambda n: f"US${n}",
]
LENGTH = [
    lambda n: f"{n} m",
    lambda n: f"{n} metres",
    lambda n: f"{n} meters",
    lambda n: rf"{n}\text{{ m}}",
    lambda n: rf"{n}\,\mathrm{{m}}",
    lambda n: f"{n * 100} cm",
    lambda n: f"{n * 1000} millimeters",
    lambda n: f"{n}.0 m.",
]
SPEED = [
    lambda n: f"{n} km/h",
    lambda n: f"{n} kilometers per hour",
    lambda n: rf"{n}\text{{ km/h}}",
    lambda n: f"{n} kph",
    lambda n: f"{n * 1000} m/h",
]
AREA = [
    lambda n: f"{n} cm^2",
    lambda n: f"{n} cm\u00b2",
    lambda n: rf"{n}\text{{ cm}}^2",
    lambda n: f"{n} square centimeters",
    lambda n: f"{n} sq cm",
    lambda n: f"{n * 100} mm^2",
]
COUNT = [
    lambda n: f"{n} eggs",
    lambda n: rf"{n} \text{{ eggs}}",
    lambda n: f"{n}.0 eggs",
    lambda n: f"**{n} eggs**",
    lambda n: f"{n} Eggs",
]
DEGREES = [
    lambda n: rf"{n}^\circ",
    lambda n: rf"{n}^{{\circ}}",
    lambda n: f"{n}\u00b0",
    lambda n: f"{n} degrees",
    lambda n: f"{n} deg",
]
RATIO = [
    lambda p: f"{p[0]}:{p[1]}",
    lambda p: f"{p[0]} : {p[1]}",
    lambda p: f"{p[0]} to {p[1]}",
    lambda p: f"{30 * p[0]}:{30 * p[1]}",
]
CLOCK = [
    lambda t: f"{t[0]}:{t[1]:02d}",
    lambda t: f"{t[0]:02d}:{t[1]:02d}",
    lambda t: f"{(t[0] - 1) % 12 + 1}:{t[1]:02d} {'am' if t[0] < 12 else 'pm'}",
    lambda t: f"{(t[0] - 1) % 12 + 1}:{t[1]:02d} {'a.m.' if t[0] < 12 else 'p.m.'}",
]
MONTHS = "January February March April May June July August September October November December".split()
DATE = [
    lambda d: f"{d[2]} {MONTHS[d[1] - 1]} {d[0]}",
    lambda d: f"{MONTHS[d[1] - 1]} {d[2]}, {d[0]}",
    lambda d: f"{MONTHS[d[1] - 1][:3]} {d[2]}, {d[0]}",
    lambda d: f"{d[0]}-{d[1]:02d}-{d[2]:02d}",
    lambda d: f"{d[2]}th of {MONTHS[d[1] - 1]}, {d[0]}",
]
TUPLE = [
    lambda v: f"({', '.join(map(str, v))})",
    lambda v: f"({','.join(map(str, v))})",
    lambda v: rf"\left( {' , '.join(map(str, v))} \right)",
    lambda v: rf"\langle {', '.join(map(str, v))} \rangle",
    lambda v: f"({', '.join(f'{n}.0' for n in v)})",
]
SET = [
    lambda v: rf"\{{{', '.join(map(str, v))}\}}",
    lambda v: rf"\{{{','.join(map(str, sorted(v)))}\}}",
    lambda v: f"{{{', '.join(map(str, reversed(v)))}}}",
    lambda v: rf"\left\{{ {', '.join(map(str, v))} \right\}}",
]
LIST = [
    lambda v: ", ".join(map(str, v)),
    lambda v: ", ".join(map(str, reversed(v))),
    lambda v: "; ".join(map(str, v)),
    lambda v: " and ".join(map(str, v)),
    lambda v: ", ".join(f"x = {n}" for n in v),
    lambda v: "x = " + ", ".join(map(str, v)),
]
INTERVAL = [
    lambda v: f"[{v[0]}, {v[1]})",
    lambda v: rf"\left[{v[0]}, {v[1]}\right)",
    lambda v: f"{v[0]} <= x < {v[1]}",
    lambda v: rf"{v[0]} \leq x < {v[1]}",
    lambda v: f"{v[1]} > x \u2265 {v[0]}",
    lambda v: rf"x \in [{v[0]}, {v[1]})",
    lambda v: rf"x \ge {v[0]} \text{{ and }} x < {v[1]}",
]
POLYNOMIAL = [
    lambda v: f"{v[0]}x^2 + {v[1]}x + {v[2]}",
    lambda v: f"{v[2]} + {v[1]}*x + {v[0]}*x**2",
    lambda v: rf"{v[0]} \cdot x^{{2}} + {v[1]} \cdot x + {v[2]}",
    lambda v: f"x({v[0]}x + {v[1]}) + {v[2]}",
    lambda v: f"{v[0]}x\u00b2 + {v[1]}x + {v[2]}",
]
LINE = [
    lambda v: f"y = {v[0]}x + {v[1]}",
    lambda v: f"y={v[1]}+{v[0]}*x",
    lambda v: f"{v[0]}x - y + {v[1]} = 0",
    lambda v: f"{v[0]}x + {v[1]} = y",
    lambda v: f"{2 * v[0]}x - 2y = {-2 * v[1]}",
]
SURD = [
    lambda v: rf"{v[0]}\sqrt{{{v[1]}}}",
    lambda v: f"{v[0]}\u221a{v[1]}",
    lambda v: f"{v[0]}*sqrt({v[1]})",
    lambda v: rf"\sqrt{{{v[0] ** 2 * v[1]}}}",
    lambda v: rf"\frac{{{v[0] * v[1]}}}{{\sqrt{{{v[1]}}}}}",
    lambda v: f"{v[0]} * {v[1]}^(1/2)",
]
COMPLEX = [
    lambda v: f"{v[0]} + {v[1]}i",
    lambda v: f"{v[1]}i + {v[0]}",
    lambda v: rf"{v[0]} + {v[1]} \cdot i",
    lambda v: f"{v[0]}+{v[1]}*i",
]
MATRIX = [
    lambda v: rf"\begin{{pmatrix}} {v[0]} & {v[1]} \\ {v[2]} & {v[3]} \end{{pmatrix}}",
    lambda v: rf"\begin{{bmatrix}}{v[0]}&{v[1]}\\{v[2]}&{v[3]}\end{{bmatrix}}",
    lambda v: f"[[{v[0]}, {v[1]}], [{v[2]}, {v[3]}]]",
]
CHOICE = [
    lambda c: c,
    lambda c: f"({c})",
    lambda c: rf"\text{{({c})}}",
    lambda c: f"{c}.",
    lambda c: f"**{c}**",
    lambda c: f"({c}) 25",
    lambda c: f"Option {c}",
]
WORD = [
    str,
    str.capitalize,
    lambda w: f"**{w}**",
    lambda w: rf"\text{{{w}}}",
    lambda w: f"{w}.",
    lambda w: f"The answer is {w}.",
    lambda w: f'"{w}"',
]


def mixed(f, part):
    whole, rest = divmod(abs(f), 1)
    if not whole or not rest:
        return f"{f.numerator}/{f.denominator}"
    return f"{'-' if f < 0 else ''}{whole}{part.format(rest.numerator, rest.denominator)}"


def several(count, values=WHOLE):
    return st.lists(values, min_size=count, max_size=count, unique=True)


FRACTIONS = st.fractions(-50, 50, max_denominator=60).filter(lambda f: f.denominator > 1)
KINDS = {
    "number": (WHOLE, NUMBER),
    "fraction": (FRACTIONS, FRACTION),
    "percent": (st.integers(1, 999), PERCENT),
    "money": (st.integers(1, 99_999), MONEY),
    "length": (st.integers(1, 999), LENGTH),
    "speed": (st.integers(1, 999), SPEED),
    "area": (st.integers(1, 999), AREA),
    "counted things": (st.integers(2, 999), COUNT),
    "degrees": (st.integers(1, 360), DEGREES),
    "ratio": (
        st.sampled_from([(a, b) for a in range(1, 10) for b in (3, 5, 7) if a % b and b % a]),
        RATIO,
    ),
    "clock": (st.tuples(st.integers(0, 23), st.integers(1, 59)), CLOCK),
    "date": (st.tuples(st.integers(1900, 2100), st.integers(1, 12), st.integers(4, 20)), DATE),
    "tuple": (several(3).map(tuple), TUPLE),
    "set": (several(3).map(tuple), SET),
    "list": (several(3, st.integers(-99, 99)).map(tuple), LIST),
    "interval": (several(2, st.integers(-99, 99)).map(sorted).map(tuple), INTERVAL),
    "expression": (
        st.tuples(st.integers(2, 99), st.integers(2, 99), st.integers(2, 99)),
        POLYNOMIAL,
    ),
    "equation": (st.tuples(st.integers(2, 99), st.integers(2, 99)), LINE),
    "surd": (st.tuples(st.integers(2, 30), st.sampled_from([2, 3, 5, 6, 7, 10, 11, 13])), SURD),
    "complex": (st.tuples(st.integers(1, 99), st.integers(2, 99)), COMPLEX),
    "matrix": (st.tuples(WHOLE, WHOLE, WHOLE, WHOLE), MATRIX),
    "choice": (st.sampled_from("ABCDE"), CHOICE),
    "word": (WORDS, WORD),
}


@pytest.mark.parametrize("kind", KINDS)
def test_one_value_in_two_habits_is_right(kind):
    values, habits = KINDS[kind]

    @given(value=values, gold=st.sampled_from(habits), answer=st.sampled_from(habits))
    @settings(derandomize=True, database=None)
    def check(value, gold, answer):
        assert verdict(gold(value), answer(value)) is True, (gold(value), answer(value))

    check()


@pytest.mark.parametrize("kind", KINDS)
def test_another_value_in_any_habit_is_wrong(kind):
    values, habits = KINDS[kind]

    @given(
        value=values, other=values, gold=st.sampled_from(habits), answer=st.sampled_from(habits)
    )
    @settings(derandomize=True, database=None)
    def check(value, other, gold, answer):
        assume(value != other)
        assert verdict(gold(value), answer(other)) is False, (gold(value), answer(other))

    check()


def near(value, kind):
    """A value next to it."""
    if isinstance(value, int):
        return value + 1
    if isinstance(value, Fraction):
        return value + 1
    if kind == "clock":
        return (value[0], value[1] % 59 + 1)
    if kind == "date":
        return (value[0], value[1], value[2] + 1)
    return (*value[:-1], value[-1] + 1) if isinstance(value, tuple) else None


@pytest.mark.parametrize(
    "kind", [kind for kind in KINDS if kind not in ("choice", "word", "ratio", "surd")]
)
def test_the_next_value_is_wrong(kind):
    values, habits = KINDS[kind]

    @given(value=values, gold=st.sampled_from(habits), answer=st.sampled_from(habits))
    @settings(derandomize=True, database=None)
    def check(value, gold, answer):
        other = near(value, kind)
        assume(len(set(other)) == len(other) if kind in ("tuple", "set", "list") else True)
        assert verdict(gold(value), answer(other)) is False, (gold(value), answer(other))

    check()


@given(
    gold=st.sampled_from(
        [(kind, place) for kind, (_, habits) in KINDS.items() for place in range(len(habits))]
    ),
    answer=st.sampled_from(
        [(kind, place) for kind, (_, habits) in KINDS.items() for place in range(len(habits))]
    ),
    data=st.data(),
)
@settings(derandomize=True, database=None)
def test_an_answer_of_another_kind_is_wrong(gold, answer, data):
    """Of values that are told apart by their digits, so that no rule for units or percentages can apply."""
    numbers = {
        "number",
        "money",
        "length",
        "speed",
        "area",
        "counted things",
        "degrees",
        "percent",
    }
    assume(gold[0] != answer[0] and not {gold[0], answer[0]} <= numbers)
    one, other = (data.draw(KINDS[kind][0]) for kind, _ in (gold, answer))
    texts = KINDS[gold[0]][1][gold[1]](one), KINDS[answer[0]][1][answer[1]](other)
    assert verdict(*texts) is not True or KINDS[gold[0]][1][0](one) == KINDS[answer[0]][1][0](
        other
    ), texts
