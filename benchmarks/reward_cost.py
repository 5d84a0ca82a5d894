"""What each reward costs a completion: python -m benchmarks.reward_cost

One completion a call, each different, so that no cache helps; the median over all. "usual" is a completion of about
200 tokens: reasoning, then the answer in its tags, right in every other one. "long" has 10 kB of reasoning; where the
whole completion is compared with a text of 60 words, it is 10 kB of that. Rewards that run programs in the sandbox
are listed apart, and not measured where nothing can isolate them; in a batch, several programs run at once.
Writes results/reward_cost.json. Outside the sandbox 2 ms is the most a reward may cost; math answers may cost more.
"""

from __future__ import annotations

import json
import os
import platform
import random
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

from benchmarks.answer_kinds import KINDS
from benchmarks.result import RESULTS, command_line, origin, save, spread
from grpo_kit.more.code.code_rewards import CodeFormat
from grpo_kit.more.episodes.tool_calls import (
    CallAccuracy,
    CallEfficiency,
    CallShape,
    CallValidity,
)
from grpo_kit.more.tasks.bleu_rouge import Bleu, Rouge
from grpo_kit.more.tasks.interval_scheduling import ScheduleShare
from grpo_kit.rewards import ExactAnswer, MathAnswer, NumericAnswer, SoftFormat, WeightedSum
from grpo_kit.rewards.combine import Clipped, Gated
from grpo_kit.rewards.form import Language, Repetition, RightSize
from grpo_kit.tasks.countdown import CountdownAnswer

LIMIT_US = 2000
WARM_UP = 3  # imports, compiled patterns
MAY_EXCEED = ("math_answer",)
WORDS = (
    "the answer of this problem is found step by step first we look at what cell energy wall makes plants and water "
    "then because light therefore so membrane oxygen carbon two three numbers sum total each other question asks"
).split()
TERMS = "sodium chloride potassium iodide cell membrane wall nucleus protein enzyme water vapour plant light".split()

# (random, right?) -> answer text, columns
Make = Callable[[random.Random, bool], tuple[str, dict[str, Any]]]


class Entry(NamedTuple):
    reward: Any
    make: Make
    # "": the answer brings its own tag; None: the reward reads the reasoning, there is no answer
    tag: str | None = "answer"
    name: str | None = None


def _terms(rng: random.Random, right: bool) -> tuple[str, dict[str, Any]]:
    gold = rng.sample(TERMS, 6)
    return " ".join(gold if right else rng.sample(TERMS, 6)), {"answer": " ".join(gold)}


def _sentence(rng: random.Random, right: bool) -> tuple[str, dict[str, Any]]:
    return "", {"answer": " ".join(rng.choices(WORDS, k=60))}


def _number(rng: random.Random, right: bool) -> tuple[str, dict[str, Any]]:
    gold = rng.randrange(10**6)
    return f"{gold if right else gold + 1:,}", {"answer": f"{gold:,}"}


def _formula(rng: random.Random, right: bool) -> tuple[str, dict[str, Any]]:
    a, b = rng.randrange(2, 99), rng.randrange(2, 99)
    answer = rf"\frac{{{b} + {a} x}}{{{a}}}" if right else rf"\sqrt{{{a}}} + x^{{{b}}}"
    return answer, {"answer": f"x + {b}/{a}"}


def _countdown(rng: random.Random, right: bool) -> tuple[str, dict[str, Any]]:
    a, b, c = rng.sample(range(1, 50), 3)
    return f"({a} + {b}) * {c}", {"numbers": [a, b, c], "target": (a + b) * c + (not right)}


def _calls(rng: random.Random, right: bool) -> tuple[str, dict[str, Any]]:
    gold = [
        f"{rng.choice(('add', 'mul'))}({rng.randrange(99)}, {rng.randrange(99)})"
        for _ in range(6)
    ]
    return "; ".join(gold if right else gold[::-1]), {"calls": gold}


def _schedule(rng: random.Random, right: bool) -> tuple[str, dict[str, Any]]:
    starts = sorted(rng.sample(range(8, 20), 6))
    return rng.choice(("A C", "B D", "A B")), {
        "events": [[s, s + rng.choice((1, 2)), rng.choice((1, 2))] for s in starts]
    }


def _nothing(rng: random.Random, right: bool) -> tuple[str, dict[str, Any]]:
    return str(rng.randrange(10**6)), {}


def _program(rng: random.Random, right: bool) -> tuple[str, dict[str, Any]]:
    k = rng.randrange(10**6)
    factor = k if right else k + 1
    code = f"def f(n):\n    total = 0\n    for i in range(n):\n        total += i * {factor}\n    return total"
    tests = [[[n], sum(i * k for i in range(n))] for n in (0, 1, 5, 20)]
    return f"```python\n{code}\n```", {"tests": json.dumps(tests), "entry_point": "f"}


def entries() -> list[Entry]:
    """Every reward outside the sandbox. A new one is a line here."""
    soft = SoftFormat(think=None)
    return [
        Entry(ExactAnswer(), _number),
        Entry(NumericAnswer(), _number),
        Entry(MathAnswer(), _formula),
        *(
            Entry(MathAnswer(), make, name=f"math_answer, {kind}")
            for kind, make in KINDS.items()
        ),
        Entry(SoftFormat(), _nothing),
        Entry(Bleu(), _terms),
        Entry(Bleu(tag=None), _sentence, None, "bleu, whole completion"),
        Entry(Rouge("rouge1"), _terms),
        Entry(Rouge("rouge2"), _terms),
        Entry(Rouge(), _terms),
        Entry(Rouge(tag=None), _sentence, None, "rouge_l, whole completion"),
        Entry(RightSize(600, 800, unit="characters"), _nothing),
        Entry(Repetition(), _nothing),
        Entry(Language("latin"), _nothing),
        Entry(CountdownAnswer(), _countdown),
        Entry(CallValidity({"add": 2, "mul": 2}), _calls),
        Entry(CallAccuracy(), _calls),
        Entry(CallShape(), _calls),
        Entry(CallEfficiency(), _calls),
        Entry(ScheduleShare(), _schedule),
        Entry(WeightedSum({ExactAnswer(): 0.75, soft: 0.25}), _number),
        Entry(Gated(Bleu(), on=soft), _terms),
        Entry(Clipped(ExactAnswer()), _number),
        Entry(CodeFormat(), _program, ""),
    ]


def sandboxed() -> list[Entry]:
    """Rewards that run programs; [] where nothing isolates them."""
    from grpo_kit.more.code.code_rewards import CodeRuns, CodeTests
    from grpo_kit.more.code.sandbox import isolation

    return (
        [Entry(CodeRuns(), _program, ""), Entry(CodeTests(), _program, "")]
        if isolation()
        else []
    )


def completions(
    entry: Entry, n: int, *, characters: int, seed: int = 0
) -> list[tuple[str, dict[str, Any]]]:
    """n different completions with their columns; characters: of the reasoning before the answer."""
    rng = random.Random(seed)
    made = []
    for place in range(n):
        answer, columns = entry.make(rng, place % 2 == 0)
        text = ""
        while len(text) < characters:
            text += " ".join(rng.choices(WORDS, k=40)) + ".\n"
        text = text[:characters]
        if entry.tag is None:
            whole = text
        elif entry.tag:
            whole = f"<think>{text}</think>\n<{entry.tag}>{answer}</{entry.tag}>"
        else:
            whole = f"{text}\n{answer}"
        made.append((whole, columns))
    return made


def cost(reward: Any, made: list[tuple[str, dict[str, Any]]]) -> dict[str, float]:
    """Microseconds a completion: median and quartiles over calls of one each, without the WARM_UP first."""
    times = []
    for text, columns in made:
        given = {name: [value] for name, value in columns.items()}
        begin = time.perf_counter()
        reward([text], **given)
        times.append(1e6 * (time.perf_counter() - begin))
    return spread(times[WARM_UP:])


def measure(entry: Entry, n: int) -> dict[str, dict[str, float]]:
    """{"usual": microseconds, "long": microseconds} of one reward."""
    usual = completions(entry, n + WARM_UP, characters=750)
    long = completions(entry, n + WARM_UP, characters=10_000, seed=1)
    return {"usual": cost(entry.reward, usual), "long": cost(entry.reward, long)}


def main() -> None:
    """Measure, print a table, save; says which rewards miss the limit."""
    parser = command_line(__doc__)
    parser.add_argument(
        "--n", type=int, default=201, help="completions of each size (default 201)"
    )
    parser.add_argument("--results", type=Path, default=RESULTS)
    options = parser.parse_args()
    if options.n < 3:
        parser.error("--n must be at least 3")
    load = os.getloadavg() if hasattr(os, "getloadavg") else None

    print(f"microseconds a completion, median of {options.n}      usual        long")
    groups: dict[str, dict[str, Any]] = {"outside the sandbox": {}, "in the sandbox": {}}
    for group, listed in zip(groups, (entries(), sandboxed()), strict=True):
        n = options.n if group == "outside the sandbox" else max(3, options.n // 10)
        print(group if listed else f"{group}: nothing here can isolate programs; not measured")
        for entry in listed:
            name = entry.name or entry.reward.__name__
            groups[group][name] = result = measure(entry, n)
            print(
                f"  {name:40}{result['usual']['median']:12,.0f}{result['long']['median']:12,.0f}",
                flush=True,
            )
    missed = [
        f"{name} ({size})"
        for name, result in groups["outside the sandbox"].items()
        for size, times in result.items()
        if times["median"] > LIMIT_US
    ]
    unexpected = [name for name in missed if not name.startswith(MAY_EXCEED)]
    print(f"above {LIMIT_US / 1000:g} ms: {', '.join(missed) or 'none'}")
    result = origin(
        f"python -m benchmarks.reward_cost --n {options.n}", "math-verify", "sacrebleu"
    )
    result["versions"]["python"] = platform.python_version()
    result |= {
        "load average before": load,
        "n": {"outside the sandbox": options.n, "in the sandbox": max(3, options.n // 10)},
        "unit": "microseconds a completion",
        "usual": "750 characters of reasoning and the answer, about 200 tokens",
        "long": "10,000 characters of reasoning and the answer; a whole completion of 10,000 characters",
        "limit": LIMIT_US,
        "above the limit": missed,
        **groups,
    }
    print(save(options.results, "reward_cost", result))
    sys.exit(1 if any("(usual)" in name for name in unexpected) else 0)


if __name__ == "__main__":
    main()
