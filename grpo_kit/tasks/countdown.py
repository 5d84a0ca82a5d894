"""countdown: make a target out of the given numbers, each used exactly once, with + - * /."""

from __future__ import annotations

import ast
import itertools
import random
import re
from collections.abc import Sequence
from fractions import Fraction

from grpo_kit.rewards import SoftFormat
from grpo_kit.rewards.answers import AnswerReward
from grpo_kit.rewards.cases import Case, answer_cases
from grpo_kit.tasks.task import Strategy, Task, split_distinct

_OPERATORS = {ast.Add: "+", ast.Sub: "-", ast.Mult: "*", ast.Div: "/"}
_ALLOWED = re.compile(r"[0-9+\-*/() ]{1,100}")
_CALL = re.compile(r"[0-9)]\s*\(|\)\s*[0-9]")  # "3 (4)" parses as a call, and Python warns about it
_EXAMPLES = {
    2: ("Use 3 and 5, each exactly once, with + - * / to make 15.", "3 * 5"),
    3: ("Use 3, 5 and 2, each exactly once, with + - * / to make 16.", "(3 + 5) * 2"),
    4: ("Use 3, 5, 2 and 9, each exactly once, with + - * / to make 25.", "(3 + 5) * 2 + 9"),
}


def countdown(
    *,
    n_train: int = 512,
    n_held_out: int = 256,
    numbers: tuple[int, int] = (3, 4),
    highest: int = 50,
    partial_credit: bool = False,
    think: bool = False,
    seed: int = 0,
) -> Task:
    """Rows "Use 3, 5 and 2, each exactly once, with + - * / to make 16."; every row has a solution.

    numbers: fewest and most numbers in a question, within 2..4. highest: of the numbers, at least 10; targets
    lie in 1..2 * highest. partial_credit: give the answer reward its tiers (see CountdownAnswer).
    think: ask for reasoning in <think> tags first; the prefill then opens <think>, and 512 tokens are allowed
    in place of 24. Without it the prefill opens <answer>.
    Row columns: question, answer (one solution), numbers (list of int), target.
    Rewards: countdown answer (0.75), soft format (0.25). Constant strategies: every sequence of operators
    without brackets, on the numbers as given and largest first.

    >>> countdown(numbers=(2, 2)).train[0]["question"].startswith("Use ")
    True
    """
    low, high = numbers
    if not 2 <= low <= high <= 4:
        raise ValueError(f"numbers={numbers!r} must be (fewest, most) with 2 <= fewest <= most <= 4")
    if not 10 <= highest <= 999:
        raise ValueError(f"highest={highest!r} must lie in 10..999")
    rng = random.Random(f"countdown {seed}")

    def draw() -> dict:
        while True:
            drawn = rng.sample(range(1, highest + 1), rng.randint(low, high))
            solution = _random_expression(drawn, rng)
            target = evaluate(solution)
            if target is not None and target.denominator == 1 and 1 <= target <= 2 * highest:
                question = f"Use {_listed(drawn)}, each exactly once, with + - * / to make {target}."
                return {"question": question, "answer": solution, "numbers": drawn, "target": int(target)}

    train, held_out = split_distinct(
        draw,
        n_train,
        n_held_out,
        what=f"countdown with numbers={numbers!r}",
        avoid=[q for q, _ in _EXAMPLES.values()],
    )
    shown = [_EXAMPLES[n] for n in range(low, high + 1)]
    system = "Answer in <answer> tags with one expression."
    return Task(
        name="countdown",
        train=train,
        held_out=held_out,
        rewards=[
            CountdownAnswer(partial_credit=partial_credit),
            SoftFormat(think="think" if think else None),
        ],
        reward_weights=[0.75, 0.25],
        is_correct=lambda text, row: _tiers(text, row["numbers"], row["target"]) == 3,
        strategies=_strategies(high),
        system=f"Think in <think> tags, then: {system[0].lower()}{system[1:]}" if think else system,
        prefill="<think>\n" if think else "<answer>",
        examples=tuple((question, _response(text, think)) for question, text in shown),
        max_completion_tokens=512 if think else 24,
    )


class CountdownAnswer(AnswerReward):
    """1.0 if the answer is an expression that uses every number exactly once and makes the target, else 0.0.

    partial_credit=True: 0.25 for an expression of whole numbers and + - * /, 0.5 if it also uses each number
    exactly once, 1.0 if it makes the target too. Never None. Columns: numbers, target.

    >>> CountdownAnswer()(["<answer>(3 + 5) * 2</answer>"], numbers=[[3, 5, 2]], target=[16])
    [1.0]
    """

    def __init__(self, *, partial_credit: bool = False, tag: str = "answer") -> None:
        super().__init__("countdown_answer", "numbers", "target", tag=tag)
        self.partial_credit = partial_credit

    def score(self, answer: str | None, numbers: Sequence[int], target: int) -> float:
        """1.0 or 0.0; with partial credit 0.0, 0.25, 0.5 or 1.0."""
        steps = (0.0, 0.25, 0.5, 1.0) if self.partial_credit else (0.0, 0.0, 0.0, 1.0)
        return steps[_tiers(answer, numbers, target)]

    def cheats(self, honest: Case) -> list[Case]:
        """Ways to name the target without making it. The first was found by training (notebook 02)."""
        numbers, target = honest.columns["numbers"], honest.columns["target"]
        added = " + ".join(map(str, numbers))
        made = {
            "the target itself": f"{target}",
            "the target and nothing": f"{target} + {numbers[0]} - {numbers[0]}",
            "the numbers times 0": f"{target} + 0 * ({added})",
            "one number left out": " + ".join(map(str, numbers[:-1])),
            "an equation": f"{added} = {target}",
        }
        return answer_cases(honest, made, tag=self.tag)

    def __repr__(self) -> str:
        return f"CountdownAnswer(partial_credit={self.partial_credit!r}, tag={self.tag!r})"


def evaluate(expression: str) -> Fraction | None:
    """The exact value of an expression of whole numbers, + - * / and brackets; None for anything else.

    Works through ast, never eval. No powers, at most 100 characters; a division by zero gives None.

    >>> evaluate("(3 + 5) * 2"), evaluate("2 ** 3"), evaluate("1 / (2 - 2)")
    (Fraction(16, 1), None, None)
    """
    tree = _parse(expression)
    try:
        return None if tree is None else _value(tree)
    except ZeroDivisionError:
        return None


def _parse(text: str) -> ast.expr | None:
    text = text.strip().replace("×", "*").replace("÷", "/").replace("\N{MINUS SIGN}", "-")
    if not _ALLOWED.fullmatch(text) or _CALL.search(text):
        return None
    try:
        tree = ast.parse(text, mode="eval").body
    except (SyntaxError, RecursionError, MemoryError):
        return None
    return tree if _is_plain(tree) else None


def _is_plain(node: ast.expr) -> bool:
    if isinstance(node, ast.BinOp):
        return type(node.op) in _OPERATORS and _is_plain(node.left) and _is_plain(node.right)
    return isinstance(node, ast.Constant) and type(node.value) is int


def _value(node: ast.expr) -> Fraction:
    if isinstance(node, ast.Constant):
        return Fraction(node.value)
    left, right = _value(node.left), _value(node.right)
    match _OPERATORS[type(node.op)]:
        case "+":
            return left + right
        case "-":
            return left - right
        case "*":
            return left * right
        case _:
            return left / right


def _tiers(answer: str | None, numbers: Sequence[int], target: int) -> int:
    """0: no expression, 1: an expression, 2: with each number exactly once, 3: that makes the target."""
    tree = _parse(answer) if answer else None
    if tree is None or isinstance(tree, ast.Constant):
        return 0
    used = sorted(node.value for node in ast.walk(tree) if isinstance(node, ast.Constant))
    if used != sorted(numbers):
        return 1
    return 3 if evaluate(answer) == target else 2


def _random_expression(numbers: Sequence[int], rng: random.Random) -> str:
    parts = [str(number) for number in rng.sample(numbers, len(numbers))]
    while len(parts) > 1:
        left, right = (parts.pop(rng.randrange(len(parts))) for _ in range(2))
        parts.append(f"({left} {rng.choice('+-*/')} {right})")
    return parts[0][1:-1]


def _strategies(most: int) -> dict[str, Strategy]:
    def fill(signs: tuple[str, ...], descending: bool) -> Strategy:
        def answer(row: dict) -> str:
            drawn = sorted(row["numbers"], reverse=True) if descending else row["numbers"]
            rest = "".join(f" {sign} {number}" for sign, number in zip(signs, drawn[1:], strict=False))
            return f"{drawn[0]}{rest}"

        return answer

    made: dict[str, Strategy] = {}
    for signs in itertools.product("+-*/", repeat=most - 1):
        pattern = "a" + "".join(f" {sign} {letter}" for sign, letter in zip(signs, "bcd", strict=False))
        made[f"always {pattern}"] = fill(signs, False)
        made[f"always {pattern}, largest first"] = fill(signs, True)
    return made


def _response(solution: str, think: bool) -> str:
    answer = f"<answer>{solution}</answer>"
    return (
        f"<think>\nI try {solution}, which is {evaluate(solution)}.\n</think>\n{answer}" if think else answer
    )


def _listed(numbers: Sequence[int]) -> str:
    return f"{', '.join(map(str, numbers[:-1]))} and {numbers[-1]}"
