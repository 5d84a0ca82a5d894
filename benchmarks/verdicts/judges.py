"""Who is asked. A judge gives a pair's score in [0, 1], or None for "cannot judge"; whatever it raises is counted.

The public rewards are restated as the calls that they make of math-verify, with their own arguments; only what
surrounds them (reasoning, processes, logging) is left out. Each gets gold and answer in the form that it asks for.
"""

from __future__ import annotations

import logging
from collections.abc import Callable
from functools import cache
from typing import Any, NamedTuple

from latex2sympy2_extended import NormalizationConfig
from math_verify import LatexExtractionConfig, parse, verify

import grpo_kit.rewards
from benchmarks.verdicts.pairs import Pair

Ask = Callable[[Pair], float | None]


class Judge(NamedTuple):
    name: str
    ask: Ask
    rule: str  # what is asked, in a line


@cache
def _reward(name: str) -> Any:
    return getattr(grpo_kit.rewards, name)()


def kit(pair: Pair) -> float | None:
    """The reward of the kit that the pair is meant for, with its defaults."""
    return _reward(pair.reward)([f"<answer>{pair.answer}</answer>"], answer=[pair.gold])[0]


def math_verify_bare(pair: Pair) -> float | None:
    return float(verify(parse(str(pair.gold)), parse(pair.answer)))


def math_verify_latex(pair: Pair) -> float | None:
    return float(verify(parse(f"${pair.gold}$"), parse(f"\\boxed{{{pair.answer}}}")))


def trl(pair: Pair) -> float | None:
    from trl.rewards import accuracy_reward

    content = f"\\boxed{{{pair.answer}}}"
    return accuracy_reward([[{"role": "assistant", "content": content}]], [f"${pair.gold}$"])[0]


def open_r1(pair: Pair) -> float | None:
    """github.com/huggingface/open-r1, src/open_r1/rewards.py, accuracy_reward, at 1416fa0."""
    gold = parse(f"${pair.gold}$", extraction_mode="first_match")
    if not gold:
        return None
    how = NormalizationConfig(
        nits=False,
        malformed_operators=False,
        basic_latex=True,
        equations=True,
        boxed="all",
        units=True,
    )
    boxed_first = LatexExtractionConfig(
        normalization_config=how, boxed_match_priority=0, try_extract_without_anchor=False
    )
    given = parse(
        f"\\boxed{{{pair.answer}}}",
        extraction_config=[boxed_first],
        extraction_mode="first_match",
    )
    return float(verify(gold, given))


def verifiers(pair: Pair) -> float | None:
    """github.com/PrimeIntellect-ai/verifiers, verify_boxed_math_answer of 0.4.0; MathRubric before it did the same."""
    answer, gold = pair.answer.strip(), str(pair.gold).strip()
    if not answer or not gold:
        return 0.0
    boxed_gold, boxed = (
        parse(f"\\boxed{{{text}}}", parsing_timeout=5) for text in (gold, answer)
    )
    return float(verify(boxed_gold, boxed, timeout_seconds=5))


JUDGES = [
    Judge("grpo_kit", kit, "MathAnswer, NumericAnswer or ExactAnswer, as the pair says"),
    Judge("math-verify, bare text", math_verify_bare, "verify(parse(gold), parse(answer))"),
    Judge(
        "math-verify, LaTeX", math_verify_latex, r"verify(parse($gold$), parse(\boxed{answer}))"
    ),
    Judge(
        "TRL accuracy_reward", trl, r"\boxed{answer} as the completion, $gold$ as the solution"
    ),
    Judge(
        "open-r1 accuracy_reward",
        open_r1,
        r"\boxed{answer} as the completion, $gold$ as the solution",
    ),
    Judge("verifiers, boxed math", verifiers, r"\boxed{answer} beside \boxed{gold}"),
]


def start_cold() -> None:
    """Empty the caches of math-verify and sympy, so that no judge profits from another, and silence their logs."""
    from math_verify import parser
    from sympy.core.cache import clear_cache

    parser.parse_latex_cached.cache_clear()
    parser.parse_expr_cached.cache_clear()
    clear_cache()
    for library in ("math_verify", "latex2sympy2_extended"):
        logging.getLogger(library).setLevel(logging.CRITICAL)
