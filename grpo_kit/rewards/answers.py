"""Answer rewards: is what stands between the answer tags right? Exactly, as a number, or as mathematics."""

from __future__ import annotations

import importlib.util
import re
import threading
import time
from collections.abc import Sequence
from fractions import Fraction
from typing import Any

from grpo_kit.rewards.response import column as get_column
from grpo_kit.rewards.response import gold_text, own_answer, pair_prefill

_NUMBER = re.compile(
    r"[-+]?\$?(?:[0-9]{1,3}(?:,[0-9]{3})+|[0-9]+|(?=\.[0-9]))(?:\.[0-9]*)?"
    r"(?:/[0-9]+|[eE][-+]?[0-9]{1,3})?"
)
_MAX_NUMBER = 64  # characters; longer digit strings take quadratic time to read, and no answer needs them
_MAX_MATH = 256
# sympy works out integer powers at once: 10^(10^10) needs gigabytes, and no signal can interrupt that.
_EXPLOSIVE = re.compile(
    r"(?:\^|\*\*)[\s{(+-]*[0-9]{4,}"  # a large exponent,
    r"|(?:\^|\*\*)[\s{(]*[0-9]+[\s]*(?:\^|\*\*|!)"  # a power in an exponent,
    r"|(?:\^|\*\*)\s*[{(][^{}()]*[0-9]\s*(?:\*|!|\\cdot|\\times)"  # a product in an exponent,
    r"|\)\s*(?:\^|\*\*)[\s{(]*[0-9]+[\s})]*\)\s*(?:\^|\*\*)"  # powers of powers,
    r"|[0-9]{4,}\s*\)*!|!\s*\)*!"  # large or repeated factorials
)
_WRAPPED = re.compile(r"\$|\\boxed|\\\(|\\\[")
_NAMED = re.compile(r"\\?[A-Za-z]\w*(?:\([a-z]\))?\s*=[^=]*")  # x = 5, f(x) = 5


class AnswerReward:
    """Base of the rewards that judge the text in the answer tags of prefill + completion.

    A subclass overrides `score`. columns: data set columns that it asks for, the gold first; `score` gets their values.
    Raises ValueError for an empty column or tag.

    >>> class Longer(AnswerReward):
    ...     def score(self, answer, gold):
    ...         return float(len(answer or "") > len(gold))
    >>> Longer("longer", "gold", tag="answer")(["<answer>82</answer>", "82"], gold=["5", "5"])
    [1.0, 0.0]
    """

    columns: tuple[str, ...] = ()
    takes_whole = False  # True allows tag=None, which judges the whole completion, without the prefill

    def __init__(self, name: str, *columns: str, tag: str | None) -> None:
        self.__name__, self.columns, self.tag = name, columns, tag
        self.column = columns[0] if columns else None
        if not all(columns) or not (tag or (tag is None and self.takes_whole)):
            raise ValueError(
                f"column={self.column!r}, tag={tag!r}: name the gold column, and the tag without brackets"
            )

    def __call__(
        self, completions: Sequence[Any], *, prefill: Sequence[str | None] | str | None = None, **columns: Any
    ) -> list[float | None]:
        pairs = pair_prefill(completions, prefill)
        cells = [get_column(columns, name, reward=self.__name__, rows=len(pairs)) for name in self.columns]
        return [
            self.score(text if self.tag is None else own_answer(text, start, self.tag), *values)
            for (text, start), *values in zip(pairs, *cells, strict=True)
        ]

    def __repr__(self) -> str:
        return f"{type(self).__name__}(column={self.column!r}, tag={self.tag!r})"

    def score(self, answer: str | None, *values: Any) -> float | None:
        """In [0, 1], None if it cannot judge. answer: None if there is none, or several, or the prefill holds it."""
        raise NotImplementedError


class ExactAnswer(AnswerReward):
    """1.0 if the answer is the gold, character for character (white space at both ends aside), else 0.0.

    column: data set column of the gold, a text or a number (2.0 reads "2"). tag: name of the answer tag.
    None if the gold is None, NaN or empty; a list of references, which has no one text, is a ValueError.
    No answer, two answers, or an answer that stands in the prefill give 0.0.

    >>> ExactAnswer()(["82</answer>", "82"], prefill="<answer>", answer=["82", "82"])
    [1.0, 0.0]
    """

    def __init__(self, *, column: str = "answer", tag: str = "answer") -> None:
        super().__init__("exact_answer", column, tag=tag)

    def score(self, answer: str | None, gold: Any) -> float | None:
        wanted = gold_text(gold)
        return None if wanted is None else float(answer == wanted)


class NumericAnswer(AnswerReward):
    """1.0 if the answer is one number within `tolerance` (absolute) of the gold, else 0.0.

    Reads 1,234.50, $5, -3, 3/4, a trailing full stop and percent sign; "3 or 4" is no number. None if the
    gold is not a number. Compares fractions, so 0.1 + 0.2 has no rounding to forgive.

    >>> NumericAnswer()(["<answer>$1,200.</answer>"], answer=["1200"])
    [1.0]
    """

    def __init__(self, *, tolerance: float = 0.0, column: str = "answer", tag: str = "answer") -> None:
        super().__init__("numeric_answer", column, tag=tag)
        if not 0 <= tolerance < float("inf"):
            raise ValueError(f"tolerance={tolerance!r} must be a finite number >= 0, such as 0.01")
        self.tolerance = tolerance

    def score(self, answer: str | None, gold: Any) -> float | None:
        wanted = as_number(gold)
        if wanted is None:
            return None
        given = as_number(answer)
        return float(given is not None and abs(given - wanted) <= Fraction(self.tolerance))


def check_installed(module: str, reward: AnswerReward) -> None:
    """Raises ImportError that says what to install, before any completion is made, where the module is missing."""
    if importlib.util.find_spec(module) is None:
        name, package = type(reward).__name__, module.replace("_", "-")
        raise ImportError(f'{name} needs the package {package}: run `pip install "grpo-kit[rewards]"`')


class MathAnswer(AnswerReward):
    """1.0 if math-verify finds the answer equal to the gold (LaTeX or plain: 1/2 = 0.5 = \\frac12), else 0.0.

    None if math-verify cannot read the gold. An answer math-verify cannot read, one that offers alternatives
    while the gold does not ("3, 4"), and one whose powers or factorials would not fit in memory give 0.0.
    timeout: seconds (whole) for reading one text or one comparison; running into it gives None. It works by
    SIGALRM, hence in the main thread only; elsewhere only the length limit and the refusal of huge powers bound
    the work.
    Raises ImportError where math-verify is not installed; it comes with the extra `rewards`.
    Source: github.com/huggingface/Math-Verify.

    >>> MathAnswer()(["<answer>\\\\frac{1}{2}</answer>", "<answer>0.4</answer>"], answer=["0.5", "0.5"])
    [1.0, 0.0]
    """

    def __init__(self, *, timeout: int = 5, column: str = "answer", tag: str = "answer") -> None:
        super().__init__("math_answer", column, tag=tag)
        if timeout < 1:
            raise ValueError(f"timeout={timeout!r} must be at least 1 second")
        self.timeout = int(timeout)
        check_installed("math_verify", self)

    def score(self, answer: str | None, gold: Any) -> float | None:
        from math_verify import verify

        wanted = "" if gold is None else str(gold).strip()
        parsed = self._parse(wanted)
        if not parsed:
            return None
        if answer is None or _offers_more(answer, wanted):
            return 0.0
        if answer == wanted:
            return 1.0
        start = time.monotonic()
        given = self._parse(answer)
        if given and verify(parsed, given, timeout_seconds=self._seconds()):
            return 1.0
        # math-verify swallows its own timeout and says False; a busy machine is no wrong answer.
        ran_out = self._seconds() is not None and time.monotonic() - start >= self.timeout
        return None if ran_out else 0.0

    def _parse(self, text: str) -> list[Any]:
        from math_verify import parse

        text = _bare(text)
        if not text or len(text) > _MAX_MATH or _EXPLOSIVE.search(text) or _WRAPPED.search(text):
            return []  # a wrapper inside the text: math-verify would take one piece and drop the rest
        # math-verify reads LaTeX only between dollars; without them it takes the last number it can find.
        found = parse(f"${text}$", parsing_timeout=self._seconds())
        return [] if all(isinstance(item, str) for item in found) else found  # text alone: nothing understood

    def _seconds(self) -> int | None:
        return self.timeout if threading.current_thread() is threading.main_thread() else None


def as_number(value: Any) -> Fraction | None:
    """The one number that the value is, exactly; None if it is no number.

    >>> as_number("$1,200.50"), as_number("3 or 4")
    (Fraction(2401, 2), None)
    """
    text = "" if value is None or isinstance(value, bool) else str(value).strip()
    text = text.removesuffix("%").rstrip().replace("\N{MINUS SIGN}", "-")
    if len(text) > _MAX_NUMBER or not _NUMBER.fullmatch(text):
        return None
    top, _, bottom = text.replace("$", "").replace(",", "").partition("/")
    if bottom and int(bottom) == 0:
        return None
    return Fraction(top.rstrip(".")) / int(bottom or 1)


def _bare(text: str) -> str:
    """The text without its outer $...$, \\(...\\), \\[...\\], \\boxed{...} and full stop."""
    text = text.strip().rstrip(".").rstrip()
    for opening, closing in (("$$", "$$"), ("$", "$"), ("\\(", "\\)"), ("\\[", "\\]"), ("\\boxed{", "}")):
        if len(text) > len(opening) and text.startswith(opening) and text.endswith(closing):
            text = text[len(opening) : -len(closing)].strip()
    return text


def _offers_more(answer: str, gold: str) -> bool:
    """Whether the answer lists alternatives, or equations other than "x = ...", that the gold does not have."""
    answer, gold = _bare(answer), _bare(gold)
    if "=" in answer and "=" not in gold and not _NAMED.fullmatch(answer):
        return True
    return _separators(answer) > _separators(gold)


def _separators(text: str) -> int:
    plain = re.sub(r"(?<=[0-9]),(?=[0-9]{3}(?![0-9]))|\\[,;]", "", text)  # thousands, LaTeX spaces
    return len(re.findall(r"[,;\n]|\bor\b|\band\b", plain))
