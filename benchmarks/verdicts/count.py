"""Ask a judge every pair, and count."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

from math_verify.errors import TimeoutException

from benchmarks.result import spread
from benchmarks.verdicts.pairs import Pair
from grpo_kit.evaluation.intervals import wilson_interval


class Verdict(NamedTuple):
    pair: Pair
    score: float | None
    error: str  # "" where the judge raised nothing
    microseconds: float  # by the clock
    of_cpu: (
        # microseconds of this process, all threads: what others do on the machine hardly changes it
        float
    )

    @property
    def paid(self) -> bool:
        """Anything above zero is paid; None and an exception are not."""
        return self.score is not None and self.score > 0


def ask(judge: Callable[[Pair], float | None], pairs: Sequence[Pair]) -> list[Verdict]:
    """The judge's verdict on each pair. An exception is a verdict: not paid, and counted apart."""
    verdicts = []
    for pair in pairs:
        score, error, start, cpu = None, "", time.perf_counter(), time.process_time()
        try:
            score = judge(pair)
        except (Exception, TimeoutException) as raised:  # math-verify's own is no Exception
            error = f"{type(raised).__name__}: {raised}"
        took = (1e6 * (time.perf_counter() - start), 1e6 * (time.process_time() - cpu))
        verdicts.append(Verdict(pair, score, error, *took))
    return verdicts


def rate(count: int, n: int) -> dict[str, Any]:
    """count of n, with the 95 % Wilson interval; nothing but n where n is 0."""
    if n == 0:
        return {"count": 0, "n": 0}
    return {
        "count": count,
        "n": n,
        "rate": count / n,
        "interval": list(wilson_interval(count, n)),
    }


def count(verdicts: Sequence[Verdict]) -> dict[str, Any]:
    """What the verdicts come to. Refused: a right answer that earns nothing, be it 0, None or an exception."""
    wrong = [v for v in verdicts if v.pair.right == 0]
    right = [v for v in verdicts if v.pair.right == 1]
    no_gold = [v for v in verdicts if v.pair.right is None]
    return {
        "wrong ones paid": rate(sum(v.paid for v in wrong), len(wrong)),
        "right ones refused": rate(sum(not v.paid for v in right), len(right)),
        "judged without a gold": rate(sum(v.score is not None for v in no_gold), len(no_gold)),
        "None": sum(
            v.score is None and not v.error and v.pair.right is not None for v in verdicts
        ),
        "exceptions": sum(bool(v.error) for v in verdicts),
        "microseconds": spread([v.microseconds for v in verdicts]),
        "microseconds of CPU": spread([v.of_cpu for v in verdicts]),
    }


def lists(verdicts: Sequence[Verdict]) -> dict[str, dict[str, str]]:
    """The pairs behind the counts, {line of pairs.jsonl: pair}."""
    return {
        "wrong ones paid": {
            str(v.pair.line): str(v.pair) for v in verdicts if v.pair.right == 0 and v.paid
        },
        "right ones refused": {
            str(v.pair.line): f"{v.pair} ({'exception' if v.error else v.score})"
            for v in verdicts
            if v.pair.right == 1 and not v.paid
        },
        "exceptions": {str(v.pair.line): f"{v.pair}: {v.error}" for v in verdicts if v.error},
    }


def percent(found: dict[str, Any]) -> str:
    """A rate as a table shows it.

    >>> percent(rate(3, 12))
    '3 of 12, 25.0 % [8.9, 53.2]'
    """
    if not found["n"]:
        return "none"
    low, high = found["interval"]
    return f"{found['count']} of {found['n']}, {100 * found['rate']:.1f} % [{100 * low:.1f}, {100 * high:.1f}]"
