"""Pairs decided beforehand: 407 by common sense, 4,883 by three readers who had not seen the code."""

import collections
import json
from pathlib import Path

import pytest

from grpo_kit.rewards import ExactAnswer, MathAnswer, NumericAnswer
from grpo_kit.verdicts import verdict

REALS = [r"\mathbb{R}", "ℝ", r"(-\infty, \infty)", "all real numbers", r"\text{All reals}", r"x \in \mathbb{R}",
         "every real number", "all real x", "x can be any real number", r"\{x \mid x \in \mathbb{R}\}"]  # fmt: skip
# (gold, right answers, wrong answers, question)
FAMILIES = {
    "one letter is a unit": [
        *((f"5 {u}", ["5", f"5 {u}", f"5{u}"], ["6", "5 km"], None) for u in "g h s t l L N J W V A K".split()),
        *((f"5 {u}", ["5", f"5 {u}"], ["6", "5 km", "25"], None) for u in ["m", "m²", "m^2", "m³", "m^{3}"]),
        (r"25\pi m^2", [r"25\pi"], [r"25\pi m"], None),
        ("8 m", ["8m"], ["8"], "Simplify 3m + 5m."),
        ("6 t", ["6t"], ["6"], "Write the distance in terms of t."),
        ("8 m", ["8"], [], "A wall of 3 m gets 5 m longer. How long is it now?"),
        ("5m", ["5 m"], ["5"], None),
        (r"\frac{1}{2} g t^2", [r"\frac{gt^2}{2}"], ["1/2"], None),
        ("2 m g", ["2mg"], ["2"], None),
        (r"2 \pi h", [r"2\pi h"], [r"2\pi"], None),
    ],
    "a function's letter is no factor": [
        ("f(a+b)", ["f(b+a)"], ["f(a)+f(b)", "fa+fb", "f(a)f(b)"], None),
        ("g(2x)", ["g(x+x)"], ["2g(x)", "g(x)^2"], None),
        (r"\varphi(mn)", [r"\phi(nm)"], [r"m\phi(n)"], None),
        ("F_n(2x)", ["F_n(x+x)"], ["2F_n(x)", "F_m(2x)"], None),
        ("f^{-1}(x)", ["f^{-1}(x)"], [r"\frac{1}{f(x)}", "f(x)^{-1}"], None),
        ("f(x)^2", ["f(x)f(x)"], ["f(x^2)", "f^2(x)"], None),
        ("f(g(x))", [r"(f \circ g)(x)", "(f∘g)(x)"], ["g(f(x))", "f(x)g(x)", "fg(x)"], None),
        ("f'(x)g(x)", ["g(x)f'(x)", "f^{(1)}(x)g(x)"], ["f(x)g'(x)"], None),
        (r"\operatorname{Var}(X+Y)", ["Var(Y+X)"], ["Var(X)+Var(Y)"], None),
        ("f(1)+f(0)=3", ["3 = f(0)+f(1)"], ["f(1)=3"], None),
        (r"\frac{h(a+b)}{2}", ["(a+b)h/2", r"\frac12 h(a+b)"], ["h(a+b)"], None),
        ("mg(h_1-h_2)", ["mgh_1-mgh_2"], ["mgh_1"], None),
        ("P_0(1+r)^t", [r"P_0 \cdot (1+r)^t"], ["P_0(1+rt)"], None),
        ("2a(b+c)", ["a(2b+2c)"], [], None),
        ("s(2t)", ["s(t+t)"], ["2s(t)"], None),
        ("12x^2", ["4x(3x)"], [], None),
        ("np(1-p)", ["np-np^2", "n(1-p)p"], ["np"], None),
    ],
    "the question's own work": [
        ("60", ["60", "12*5=60"], ["12*5*1", "60*1", "5*12", "x = 12*5", "6*10", "(12)(5)"], "What is 12 × 5?"),
        ("3", ["3"], [r"\log_2 8", "log_2(8)", r"\log_2 2^3"], r"Compute $\log_2 8$."),
        ("3", ["3"], [r"\log_2 8"], "What is the log base 2 of 8?"),
        ("5", ["5"], ["√25", "25^{1/2}"], "What is the square root of 25?"),
        ("6", ["6"], ["gcd(12, 18)"], r"Find $\gcd(12, 18)$."),
        ("343", ["343"], ["7^3", "7*7*7", r"7 \cdot 7^2"], "What is 7 cubed?"),
        ("3/4", ["3/4", "0.75"], ["6/8", r"\frac{6}{8} \cdot 1"], r"Reduce $\frac{6}{8}$."),
        ("23", ["23"], ["4*5+3", "3+20"], r"Evaluate \(3 + 4 \cdot 5\)."),
        ("60", ["60"], ["3*4*5", "5*(4*3)"], "There are 5 boxes with 3 rows of 4 eggs."),
        ("x^2-1", ["x^2-1"], ["(x+1)(x-1)"], "Expand (x-1)(x+1)."),
        ("0.5", ["1/2"], [], "Solve x + 1/2 = 1."),
        ("1024", ["2^{10}"], [], "How many subsets has a set of 10 things?"),
    ],
    "a list in square brackets": [
        ("1,2,3", ["[1, 2, 3]", "[3,2,1]"], ["[1,2]", "[1,2,4]", "[1,1,2,3]", "[1,2,3)"], None),
        (r"\{1,2,3\}", ["[1,2,3]", "{1,2,3}"], ["(1,2,3)", "[1,2,3,4]"], None),
        ("x=1,2,3", ["[1,2,3]"], ["[1,2]"], None),
        ("red, blue, green", ['["red", "blue", "green"]', "[green, red, blue]"], ["[red, blue]"], None),
        ("[1,2,3]", ["1, 2, 3"], ["3,2,1", "1,2"], None),
        ("1,2", [], ["[1,2]"], None),
        ("[1,2]", [], ["1,2", r"\{1,2\}"], None),
    ],
    "all real numbers": [
        *((gold, REALS, [r"\mathbb{Z}", "all positive real numbers", "no real number"], None) for gold in REALS),
        (r"\mathbb{Z}", ["all integers", "every integer n"], [r"\mathbb{R}", "integer"], None),
    ],
}  # fmt: skip
# (gold, right answers, wrong answers) of NumericAnswer
POWERS = [
    ("1000", ["10^3", "10^{3}", "10**3", "10³", r"1 \times 10^3"], ["10^4", "3^10", "10*3"]),
    ("0.001", ["10^{-3}", "10^-3"], ["10^3", "-10^3"]),
    ("-200000", ["-2×10^5", r"-2 \cdot 10^{5}", "-2*10**5", "-2e5"], ["2×10^5", "-2+10^5"]),
    ("10^6", ["1,000,000", "1 million"], ["60"]),
    ("16", ["16"], ["2^4", "20-4"]),
    ("5m", ["5", "5 m"], ["5 s"]),
]
HERE = Path(__file__).parent
SEEN = HERE.parents[1] / "benchmarks" / "verdicts" / "pairs.jsonl"
READERS = HERE / "pairs.jsonl"
REWARDS = {"MathAnswer": MathAnswer, "NumericAnswer": NumericAnswer, "ExactAnswer": ExactAnswer}
# Paid, though the readers did not want it: where we do not agree with them.
PAID = {
    ("42", "0b101010"): "another base of the same number, as 11 in base two is 3",
    ("42", "42 = 42"): "an equation that is true says its value",
}


def rows(path):
    return [json.loads(line) for line in path.read_text(encoding="utf-8").splitlines()]


def judged(row):
    reward = REWARDS[row["reward"]](**row.get("kwargs", {}))
    columns = {"answer": [row["gold"]]} | (
        {"question": [row["question"]]} if "question" in row else {}
    )
    return reward([f"<answer>{row['answer']}</answer>"], **columns)[0]


def test_the_first_pairs():
    wrong = [row for row in rows(SEEN) if row["right"] == 0 and judged(row) == 1.0]
    refused = [row for row in rows(SEEN) if row["right"] == 1 and judged(row) != 1.0]
    unknown = [row for row in rows(SEEN) if row["right"] is None and judged(row) is not None]
    assert (wrong, refused, unknown) == ([], [], [])


@pytest.mark.parametrize("kind", sorted({row["kind"] for row in rows(READERS)}))
def test_what_readers_decided(kind):
    """Nothing wrong is paid, but what is listed; of a kind at most one right answer in four is refused."""
    mine = [row for row in rows(READERS) if row["kind"] == kind]
    paid = [
        (row["gold"], row["answer"]) for row in mine if row["right"] == 0 and judged(row) == 1.0
    ]
    assert set(paid) <= set(PAID), set(paid) - set(PAID)
    right = [row for row in mine if row["right"] == 1]
    refused = [row for row in right if judged(row) != 1.0]
    assert len(refused) <= len(right) / 4, [(row["gold"], row["answer"]) for row in refused]


def test_what_readers_decided_in_all():
    found = collections.Counter((row["right"], judged(row)) for row in rows(READERS))
    right = sum(count for (wanted, _), count in found.items() if wanted == 1)
    assert found[1, 1.0] >= 0.93 * right
    assert found[None, None] == sum(
        count for (wanted, _), count in found.items() if wanted is None
    )


@pytest.mark.parametrize("family", FAMILIES)
def test_whole_families(family):
    paid, refused = [], []
    for gold, right, wrong, question in FAMILIES[family]:
        paid += [
            (gold, text)
            for text in wrong
            if verdict(gold, text, question=question) is not False
        ]
        refused += [
            (gold, text) for text in right if verdict(gold, text, question=question) is not True
        ]
    assert (paid, refused) == ([], [])


def test_a_power_of_ten_is_a_number():
    pairs = [(gold, text, True) for gold, right, _ in POWERS for text in right]
    pairs += [(gold, text, False) for gold, _, wrong in POWERS for text in wrong]
    assert [
        pair for pair in pairs if verdict(*pair[:2], numbers_only=True) is not pair[2]
    ] == []
    assert verdict("1000", "10^3", question="What is 10^3?", numbers_only=True) is False
