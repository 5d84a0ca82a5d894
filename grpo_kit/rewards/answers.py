"""Answer rewards: is the text between the answer tags right? Compared as text, as a number, or by kind of answer.

grpo_kit.verdicts reads and compares the answers.
"""

from __future__ import annotations

from collections.abc import Sequence
from fractions import Fraction
from typing import TYPE_CHECKING, Any, Literal

from grpo_kit._support.argument_checks import (
    check_above_zero,
    check_choice,
    check_number,
    check_text,
    check_whole,
)
from grpo_kit.rewards.cheat_cases import Case, answer_cases
from grpo_kit.rewards.response import (
    ResponseReward,
    check_tag,
    gold_text,
    own_answer,
    pair_prefill,
    shown,
)
from grpo_kit.rewards.response import column as get_column

# The room of verdicts is imported by the first reward that judges an answer.
if TYPE_CHECKING:
    from grpo_kit.verdicts import Rules


class AnswerReward(ResponseReward):
    """Base of the rewards that judge the text in the answer tags of prefill + completion.

    A subclass overrides `score`. columns: data set columns it needs, the gold first; `score` receives their values,
    then the values of the `also` columns, None where the data set lacks one.
    Raises ValueError for an empty column or tag.

    >>> class Longer(AnswerReward):
    ...     def score(self, answer, gold):
    ...         return float(len(answer or "") > len(gold))
    >>> Longer("longer", "gold", tag="answer")(["<answer>82</answer>", "82"], gold=["5", "5"])
    [1.0, 0.0]
    """

    also: tuple[str, ...] = ()
    soft = False  # True: a partial score is no wrong answer; results lead with the mean reward
    # True allows tag=None, which judges the whole completion, without the prefill
    takes_whole = False

    def __init__(self, name: str, *columns: str, tag: str | None) -> None:
        self.__name__, self.columns, self.tag = name, columns, tag
        self.column = columns[0] if columns else None
        for column in columns:
            check_text("column", column, hint=", the name of the gold's column")
        if tag is not None or not self.takes_whole:
            check_tag("tag", tag)

    def __call__(
        self,
        completions: Sequence[Any],
        *,
        prefill: Sequence[str | None] | str | None = None,
        **columns: Any,
    ) -> list[float | None]:
        pairs = pair_prefill(completions, prefill)
        names = [*self.columns, *(name for name in self.also if name in columns)]
        values = [
            get_column(columns, name, reward=self.__name__, rows=len(pairs)) for name in names
        ]
        scores = []
        for (text, start), *row in zip(pairs, *values, strict=True):
            answer = text if self.tag is None else own_answer(text, start, self.tag)
            scores.append(self.score(answer, *row))
        return scores

    def score(self, answer: str | None, *values: Any) -> float | None:
        """A score in [0, 1]; None: cannot judge. answer: None if there is none, or several, or the prefill holds it."""
        raise NotImplementedError


class ExactAnswer(AnswerReward):
    """1.0 if the answer is the gold, character for character (white space at both ends aside), else 0.0.

    The same characters in another encoding are equal (NFC and NFD, CRLF and LF, zero-width marks). column: data set
    column of the gold, a text or a number (2.0 reads "2"). tag: name of the answer tag.
    None if the gold is None, NaN or empty. A list of references has no one text and raises ValueError.
    No answer, two answers, or an answer that stands in the prefill give 0.0.

    >>> ExactAnswer()(["82</answer>", "82"], prefill="<answer>", answer=["82", "82"])
    [1.0, 0.0]
    """

    def __init__(self, *, column: str = "answer", tag: str = "answer") -> None:
        super().__init__("exact_answer", column, tag=tag)

    def score(self, answer: str | None, gold: Any) -> float | None:
        from grpo_kit.verdicts._spelling import exact

        gold = gold_text(gold)
        if gold is None:
            return None
        return float(answer is not None and exact(answer) == exact(gold))


class _ReadAnswer(AnswerReward):
    """Reads answer and gold by kind (grpo_kit.verdicts) and compares them by the rules of the reward's arguments."""

    also = ("question",)
    numbers_only = False

    def __init__(self, name: str, rules: Rules, timeout: float, column: str, tag: str) -> None:
        super().__init__(name, column, tag=tag)
        check_above_zero("timeout", timeout, hint=" of seconds, such as 5")
        self.rules, self.timeout = rules, timeout

    def __repr__(self) -> str:
        return shown(self, vars(self) | vars(self.rules))

    def cheats(self, honest: Case) -> list[Case]:
        """Near misses of the gold: neighbours, hedges, a denial, an earlier draft, the question's own expression."""
        from grpo_kit.verdicts._neighbours import TRIED, excused, near_misses

        gold = gold_text(honest.columns.get(self.column))
        if gold is None:
            return []
        wrong = near_misses(gold, _text_or_none(honest.columns.get("question")))
        names = [name for name in TRIED if name in wrong and name not in excused(self.rules)]
        return answer_cases(honest, {name: wrong[name] for name in names}, tag=self.tag)

    def score(self, answer: str | None, gold: Any, question: Any = None) -> float | None:
        from grpo_kit.verdicts import verdict

        text = gold_text(gold)
        if text is None or isinstance(gold, bool):
            return None
        is_right = verdict(
            text,
            answer or "",
            rules=self.rules,
            question=_text_or_none(question),
            timeout=self.timeout,
            numbers_only=self.numbers_only,
        )
        return None if is_right is None else float(is_right)


def _text_or_none(value: Any) -> str | None:
    return value if isinstance(value, str) else None


class NumericAnswer(_ReadAnswer):
    """1.0 if the answer is one number equal to the gold, else 0.0. Numbers are compared as fractions, so exactly.

    Reads numbers in the habits of the world (1,234.50 · 1 234 · 12,34,567 · 1.234,5), fractions and mixed numbers,
    3e8, 3 x 10^8, 10^3, $5, 18 dollars, 5 km, 50 %, eighteen, digits of all scripts. "3 or 4", "12 - 6" and "4 5" are
    no number. A percentage is its fraction: 50 % is 0.5, and matches a gold written as a part, never the gold 50.
    tolerance: absolute error that still counts as right. significant: number of the gold's digits that must be right.
    units: "optional" takes a number without the gold's unit, "required" does not; a wrong unit is always wrong.
    An answer copied from the column `question` with the work still to do gives 0.0, where that column exists.
    None if the gold is not a number. timeout: seconds for one verdict, in any thread; a slower verdict is None.

    >>> NumericAnswer()(["<answer>$1,200.</answer>", "<answer>4 5</answer>"], answer=["1200", "9"])
    [1.0, 0.0]
    >>> NumericAnswer(tolerance=0.01)
    NumericAnswer(tolerance=0.01)
    """

    numbers_only = True

    def __init__(
        self,
        *,
        tolerance: float | None = None,
        significant: int | None = None,
        units: Literal["optional", "required"] = "optional",
        timeout: float = 5,
        column: str = "answer",
        tag: str = "answer",
    ) -> None:
        rules = _rules(tolerance=tolerance, significant=significant, units=units)
        super().__init__("numeric_answer", rules, timeout, column, tag)


class MathAnswer(_ReadAnswer):
    """1.0 if the answer equals the gold by the rules of mathematics, else 0.0.

    Both are read whole, in LaTeX or plain: numbers, quantities with units, money, ratios, times, dates, lists, sets,
    tuples, intervals, expressions, equations, inequalities, matrices, choices (A to J), words (grpo_kit.verdicts).
    The gold's kind decides. An answer of another kind gives 0.0, and so does an answer with a part that cannot be read.
    Values are compared exactly (1/3 is not 0.333333), formulas for all values of their letters.
    units, tolerance, significant, timeout: as in NumericAnswer. case: whether capitals matter in words; they always
    matter in single letters and in golds of capitals alone.
    expressions: True accepts an answer that is still to be worked out (100 - 94 for 6), for tasks like countdown.
    False gives such an answer 0.0, and in any spelling what the column `question` asks for (12*5*1 for 12 x 5).
    None if the gold is empty. Also None if the gold cannot be read, unless the answer is the same text.

    >>> MathAnswer()(["<answer>\\\\frac{1}{2}</answer>", "<answer>0.4</answer>"], answer=["0.5", "0.5"])
    [1.0, 0.0]
    """

    def __init__(
        self,
        *,
        units: Literal["optional", "required"] = "optional",
        tolerance: float | None = None,
        significant: int | None = None,
        case: bool = False,
        expressions: bool = False,
        timeout: float = 5,
        column: str = "answer",
        tag: str = "answer",
    ) -> None:
        rules = _rules(
            units=units,
            tolerance=tolerance,
            significant=significant,
            case=case,
            expressions=expressions,
        )
        super().__init__("math_answer", rules, timeout, column, tag)


def _rules(
    *, units: str, tolerance: float | None, significant: int | None, **options: bool
) -> Rules:
    from grpo_kit.verdicts import Rules

    check_choice("units", units, ("optional", "required"))
    if tolerance is not None:
        check_number("tolerance", tolerance, 0, hint=", such as 0.01")
    if significant is not None:
        check_whole("significant", significant, hint=", the digits that count, such as 3")
    return Rules(units=units, tolerance=tolerance or None, significant=significant, **options)


def as_number(value: Any) -> Fraction | None:
    """The one number that the value is, exactly, without its unit; None if it is no number.

    >>> as_number("$1,200.50"), as_number("3 or 4")
    (Fraction(2401, 2), None)
    """
    from grpo_kit.verdicts import number

    if value is None or isinstance(value, bool):
        return None
    return number(str(value))
