"""countdown: make a target out of the given numbers, each used exactly once, with + - * /.

Longer than 300 lines because its worked examples, which models copy, stand beside what checks them.
"""

from __future__ import annotations

import ast
import itertools
import operator
import random
import re
from collections.abc import Sequence
from fractions import Fraction
from functools import partial
from typing import Any

from grpo_kit._support.argument_checks import check_choice, check_whole, is_whole
from grpo_kit.rewards import SoftFormat
from grpo_kit.rewards.answers import AnswerReward
from grpo_kit.rewards.cheat_cases import Case, answer_cases
from grpo_kit.rewards.response import python_value
from grpo_kit.tasks.rows import check_range, split_distinct
from grpo_kit.tasks.task import Strategy, Task, with_answer_tag
from grpo_kit.verdicts._spelling import plain

# then other operators: with 4 numbers up to 50, 1 product in 7,000 is at most 100
_TRIES = 4000
_BY_SIGN = {"+": operator.add, "-": operator.sub, "*": operator.mul, "/": operator.truediv}
_BY_NODE = {
    ast.Add: operator.add,
    ast.Sub: operator.sub,
    ast.Mult: operator.mul,
    ast.Div: operator.truediv,
}
_ALLOWED = re.compile(r"[0-9+\-*/() ]{1,100}")
_NUMBER = re.compile(r"-?[0-9]+(?:\.[0-9]+)?")
# "3 (4)" parses as a call, and Python warns about it
_CALL = re.compile(r"[0-9)]\s*\(|\)\s*[0-9]")
_EXAMPLES = {
    2: ("Use 3 and 5, each exactly once, with + - * / to make 15.", "3 * 5"),
    3: ("Use 3, 5 and 2, each exactly once, with + - * / to make 16.", "(3 + 5) * 2"),
    4: ("Use 3, 5, 2 and 9, each exactly once, with + - * / to make 25.", "(3 + 5) * 2 + 9"),
}
# Shown where the model is to think: two searches of each count, as (numbers, target, tries, answer). Each fails before
# it succeeds, because a model copies what it sees: examples with the answer at once teach guessing (docs/results.md has
# the base rates). The longer search comes last: 83 % of groups then have a signal, 71 % otherwise (24 prompts; it may
# be chance).
_SEARCHES = (
    {
        2: ((7, 30), 23, ("7 + 30 = 37", "7 - 30 = -23", "30 - 7 = 23"), "30 - 7"),
        3: (
            (3, 5, 2),
            16,
            ("3 + 5 = 8, 8 + 2 = 10", "3 + 5 = 8, 8 - 2 = 6", "3 + 5 = 8, 8 * 2 = 16"),
            "(3 + 5) * 2",
        ),
        4: (
            (3, 5, 2, 9),
            25,
            (
                "3 + 5 = 8, 8 + 2 = 10, 10 + 9 = 19",
                "3 + 5 = 8, 8 * 2 = 16, 16 - 9 = 7",
                "3 + 5 = 8, 8 * 2 = 16, 16 + 9 = 25",
            ),
            "(3 + 5) * 2 + 9",
        ),
    },
    {
        2: (
            (48, 4),
            12,
            ("48 + 4 = 52", "48 - 4 = 44", "48 * 4 = 192", "48 / 4 = 12"),
            "48 / 4",
        ),
        3: (
            (40, 11, 6),
            35,
            (
                "40 + 11 = 51, 51 + 6 = 57",
                "40 + 11 = 51, 51 - 6 = 45",
                "40 - 11 = 29, 29 - 6 = 23",
                "40 - 11 = 29, 29 + 6 = 35",
            ),
            "40 - 11 + 6",
        ),
        4: (
            (12, 30, 4, 7),
            20,
            (
                "12 + 30 = 42, 42 + 4 = 46, 46 + 7 = 53",
                "12 + 30 = 42, 42 - 4 = 38, 38 - 7 = 31",
                "30 - 12 = 18, 18 - 4 = 14, 14 + 7 = 21",
                "12 / 4 = 3, 30 - 3 = 27, 27 - 7 = 20",
            ),
            "30 - 12 / 4 - 7",
        ),
    },
)


def countdown(
    *,
    n_train: int = 512,
    n_held_out: int = 256,
    numbers: tuple[int, int] = (3, 4),
    highest: int = 50,
    partial_credit: bool = False,
    think: bool = False,
    balanced: bool = False,
    seed: int = 0,
    max_completion_tokens: int | None = None,
    prefill: str | None = None,
    answer_tag: str = "answer",
) -> Task:
    """Rows "Use 3, 5 and 2, each exactly once, with + - * / to make 16."; every row has a solution.

    numbers: fewest and most numbers in a question, within 2..4. highest: the largest number, at least 10; targets
    lie in 1..2 * highest. partial_credit: the answer reward has tiers (see CountdownAnswer).
    think: the prompt requests reasoning in <think> tags first; the prefill opens <think>, and the examples fail before
    they succeed. Without think the prefill opens <answer>.
    prefill: the assistant's opening words; None: as above. Another where a chat template does not let that one through.
    answer_tag: name of the tag around answers, such as a plainer one that audit_tags suggests.
    max_completion_tokens: None means 24, and with think 64 times the most numbers.
    balanced: each operator is equally likely in a row's solution, until no new question with that operator
    is left (two numbers up to 50 make some 160 quotients; held-out rows are drawn first). Otherwise sums fill the rows,
    since most products exceed every target and most quotients are no whole numbers. One constant answer is then right
    far more often: on two numbers 56 % of the time, balanced 32 %. A small model settles for that answer.
    Row columns: question, answer (one solution), numbers (list of int), target.
    Rewards: countdown answer (0.75), soft format (0.25). Constant strategies: every sequence of operators
    without brackets, on the numbers as given and largest first.

    >>> countdown(numbers=(2, 2)).train[0]["question"].startswith("Use ")
    True
    """
    low, high = check_range("numbers", numbers, 2, 4)
    flags = {"think": think, "balanced": balanced, "partial_credit": partial_credit}
    for name, value in flags.items():
        check_choice(name, value, (True, False))
    check_whole("seed", seed, 0)
    if not is_whole(highest, 10) or highest > 999:
        raise ValueError(f"highest={highest!r} must lie in 10..999")
    counts = range(low, high + 1)
    if think:
        # One search of each count of numbers, then the second of each.
        examples = [_thinking(*searches[n]) for searches in _SEARCHES for n in counts]
        system = "Think in <think> tags, then: answer in <answer> tags with one expression."
        task_prefill, length, reasoning_tag = "<think>\n", 64 * high, "think"
    else:
        examples = [
            (question, f"<answer>{answer}</answer>")
            for question, answer in map(_EXAMPLES.get, counts)
        ]
        system = "Answer in <answer> tags with one expression."
        task_prefill, length, reasoning_tag = "<answer>", 24, None
    if prefill is None:
        prefill = task_prefill
    if max_completion_tokens is None:
        max_completion_tokens = length
    train, held_out = split_distinct(
        partial(_draw_row, random.Random(f"countdown {seed}"), low, high, highest, balanced),
        n_train,
        n_held_out,
        what=f"countdown with numbers={numbers!r}",
        avoid=[question for question, _ in (*_EXAMPLES.values(), *examples)],
    )
    task = Task(
        name="countdown",
        train=train,
        held_out=held_out,
        rewards=[
            CountdownAnswer(partial_credit=partial_credit),
            SoftFormat(think=reasoning_tag),
        ],
        reward_weights=[0.75, 0.25],
        strategies=_strategies(high),
        system=system,
        prefill=prefill,
        examples=tuple(examples),
        max_completion_tokens=max_completion_tokens,
    )
    return with_answer_tag(task, answer_tag)


def _draw_row(rng: random.Random, low: int, high: int, highest: int, balanced: bool) -> dict:
    """A row of low..high numbers up to the highest, with a solution."""
    while True:
        signs, tries = None, 1
        if balanced:
            # Keep the balanced operators while numbers are redrawn, so that no operator takes another's place.
            signs = [rng.choice("+-*/") for _ in range(rng.randint(low, high) - 1)]
            tries = _TRIES
        for _ in range(tries):
            count = len(signs) + 1 if signs else rng.randint(low, high)
            numbers = rng.sample(range(1, highest + 1), count)
            solution, value = _random_expression(numbers, rng, signs)
            if value is not None and value.denominator == 1 and 1 <= value <= 2 * highest:
                target = int(value)
                question = _question(numbers, target)
                return {
                    "question": question,
                    "answer": solution,
                    "numbers": numbers,
                    "target": target,
                }


class CountdownAnswer(AnswerReward):
    """1.0 if the answer is an expression that uses every number exactly once and makes the target, else 0.0.

    partial_credit=True: 0.25 for an expression of whole numbers and + - * /, 0.5 if it also uses each number
    exactly once, 1.0 if it makes the target too. Columns: numbers, target; also as texts ("3, 5, 2"), arrays and
    tensors. None where they hold no numbers, or not one target.

    >>> CountdownAnswer()(["<answer>(3 + 5) * 2</answer>"], numbers=[[3, 5, 2]], target=[16])
    [1.0]
    """

    def __init__(self, *, partial_credit: bool = False, tag: str = "answer") -> None:
        super().__init__("countdown_answer", "numbers", "target", tag=tag)
        self.partial_credit = partial_credit

    def score(self, answer: str | None, numbers: Any, target: Any) -> float | None:
        """1.0 or 0.0; with partial credit 0.0, 0.25, 0.5 or 1.0; None where the row has no numbers or no target."""
        row_numbers, targets = _numbers_in(numbers), _numbers_in(target)
        if not row_numbers or len(targets) != 1:
            return None
        credit = _credit(answer, row_numbers, targets[0])
        return credit if self.partial_credit else float(credit == 1.0)

    def cheats(self, honest: Case) -> list[Case]:
        """Ways to name the target without making it. Training found the first (notebook 02b shows that run)."""
        numbers = _numbers_in(honest.columns["numbers"])
        target = _numbers_in(honest.columns["target"])[0]
        added = " + ".join(map(str, numbers))
        texts = {
            "the target itself": f"{target}",
            "the target and nothing": f"{target} + {numbers[0]} - {numbers[0]}",
            "the numbers times 0": f"{target} + 0 * ({added})",
            "one number left out": " + ".join(map(str, numbers[:-1])),
            "an equation": f"{added} = {target}",
        }
        return answer_cases(honest, texts, tag=self.tag)


def evaluate(expression: str) -> Fraction | None:
    """The exact value of an expression of whole numbers, + - * / and brackets; None for anything else.

    Parsed with ast, never with eval. No powers, at most 100 characters; a division by zero gives None.

    >>> evaluate("(3 + 5) * 2"), evaluate("2 ** 3"), evaluate("1 / (2 - 2)")
    (Fraction(16, 1), None, None)
    """
    tree = _parse(expression)
    if tree is None:
        return None
    try:
        return _value(tree)
    except ZeroDivisionError:
        return None


def _parse(text: str) -> ast.expr | None:
    if len(text) > 200:
        return None
    # what stands around an answer is gone
    text = plain(text).replace(r"\times", "*").replace(r"\cdot", "*")
    if not _ALLOWED.fullmatch(text) or _CALL.search(text):
        return None
    try:
        tree = ast.parse(text, mode="eval").body
    except (SyntaxError, RecursionError, MemoryError):
        return None
    if _is_plain(tree):
        return tree
    return None


def _is_plain(node: ast.expr) -> bool:
    if isinstance(node, ast.BinOp):
        return type(node.op) in _BY_NODE and _is_plain(node.left) and _is_plain(node.right)
    return isinstance(node, ast.Constant) and type(node.value) is int


def _value(node: ast.expr) -> Fraction:
    if isinstance(node, ast.Constant):
        return Fraction(node.value)
    return _BY_NODE[type(node.op)](_value(node.left), _value(node.right))


def _numbers_in(column: Any) -> list[Fraction]:
    """The numbers of a column, a text of them too; [] where a value is no number."""
    numbers = python_value(column)
    if isinstance(numbers, str):
        numbers = _NUMBER.findall(numbers)
    if not isinstance(numbers, list | tuple):
        numbers = [numbers]
    try:
        return [Fraction(number) for number in numbers]
    except (TypeError, ValueError, OverflowError):  # no number; NaN; infinite
        return []


def _credit(answer: str | None, numbers: Sequence[Fraction], target: Fraction) -> float:
    """0.25 for an expression, 0.5 for one with each number exactly once, 1.0 for one that also makes the target."""
    tree = _parse(answer or "")
    if tree is None or isinstance(tree, ast.Constant):
        return 0.0
    operands = sorted(node.value for node in ast.walk(tree) if isinstance(node, ast.Constant))
    if operands != sorted(numbers):
        return 0.25
    return 1.0 if evaluate(answer) == target else 0.5


def _random_expression(
    numbers: Sequence[int], rng: random.Random, signs: Sequence[str] | None
) -> tuple[str, Fraction | None]:
    """Numbers in random order with random brackets, and the value (None: divides by 0). signs None: random signs."""
    parts = []
    for number in rng.sample(numbers, len(numbers)):
        parts.append((str(number), Fraction(number)))
    while len(parts) > 1:
        left, left_value = parts.pop(rng.randrange(len(parts)))
        right, right_value = parts.pop(rng.randrange(len(parts)))
        sign = signs[len(parts)] if signs else rng.choice("+-*/")  # parts: all but these two
        value = None
        if left_value is not None and right_value is not None and (sign != "/" or right_value):
            value = _BY_SIGN[sign](left_value, right_value)
        parts.append((f"({left} {sign} {right})", value))
    expression, value = parts[0]
    return expression[1:-1], value


def _strategies(most: int) -> dict[str, Strategy]:
    strategies = {}
    for signs in itertools.product("+-*/", repeat=most - 1):
        pattern = _joined("abcd", signs)
        strategies[f"always {pattern}"] = lambda row, signs=signs: _joined(
            row["numbers"], signs
        )
        strategies[f"always {pattern}, largest first"] = lambda row, signs=signs: _joined(
            sorted(row["numbers"], reverse=True), signs
        )
    return strategies


def _joined(values: Sequence[Any], signs: Sequence[str]) -> str:
    """The values with signs between them; the longer of the two is cut."""
    text = str(values[0])
    for sign, value in zip(signs, values[1:], strict=False):
        text += f" {sign} {value}"
    return text


def _thinking(
    numbers: Sequence[int], target: int, tries: Sequence[str], answer: str
) -> tuple[str, str]:
    """The question, and a response that thinks: each try, and why it fails."""
    thoughts = "<think>\n"
    for equations in tries:
        value = int(equations.rpartition("= ")[2])
        if value == target:
            verdict = "yes"
        else:
            verdict = "too large" if value > target else "too small"
        thoughts += f"{equations}, {verdict}.\n"
    return _question(numbers, target), f"{thoughts}</think>\n<answer>{answer}</answer>"


def _question(numbers: Sequence[int], target: int) -> str:
    listed = f"{', '.join(map(str, numbers[:-1]))} and {numbers[-1]}"
    return f"Use {listed}, each exactly once, with + - * / to make {target}."
