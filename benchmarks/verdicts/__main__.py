"""Verdicts beside a teacher's: python -m benchmarks.verdicts

Asks the kit and public math rewards every pair of pairs.jsonl, which a maths teacher's common
sense decided beforehand, and prints how many wrong answers each pays and how many right ones it refuses, with 95 %
Wilson intervals. Each judge starts with empty caches; a verdict is timed once, the median is over the pairs.

--golds   GSM8K's test set and MATH-500: each reference solution's own answer is paid, another problem's is not
--holes   a tiny policy trained with GRPO's advantages on questions where a hole pays, math-verify beside MathAnswer

Writes results/verdicts.json, verdicts_golds.json or verdicts_holes.json.
"""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

from benchmarks.result import RESULTS, command_line, origin, save
from benchmarks.verdicts import golds, holes
from benchmarks.verdicts.count import ask, count, lists, percent
from benchmarks.verdicts.judges import JUDGES, math_verify_latex, start_cold
from benchmarks.verdicts.pairs import Pair, load

GROUPS = {
    "MathAnswer's pairs": ("MathAnswer",),
    "pairs of NumericAnswer and ExactAnswer": ("NumericAnswer", "ExactAnswer"),
    "all pairs": ("MathAnswer", "NumericAnswer", "ExactAnswer"),
}


def every_judge() -> dict[str, Any]:
    """All judges on all pairs; prints a table for each group, and what the kit's own rewards got wrong."""
    pairs, verdicts = load(), {}
    # untimed: the parser's automaton is built as texts come, and kept
    ask(math_verify_latex, pairs)
    for judge in JUDGES:
        start_cold()
        ask(judge.ask, [Pair(0, "MathAnswer", "17", "18", 0, "imports, compiled patterns")])
        verdicts[judge.name] = ask(judge.ask, pairs)
    groups: dict[str, dict[str, Any]] = {}
    for group, rewards in GROUPS.items():
        print(
            f"\n{group}\n\n| judge | wrong ones paid | right ones refused | None | exceptions | microseconds, of CPU |"
        )
        print("|---|---|---|---|---|---|")
        groups[group] = {}
        for name, given in verdicts.items():
            found = groups[group][name] = count([v for v in given if v.pair.reward in rewards])
            cells = [
                percent(found["wrong ones paid"]),
                percent(found["right ones refused"]),
                found["None"],
            ]
            times = [
                f"{found[key]['median']:,.0f}"
                for key in ("microseconds", "microseconds of CPU")
            ]
            cells += [found["exceptions"], ", ".join(times)]
            print(f"| {' | '.join(map(str, [name, *cells]))} |")
    for heading, listed in lists(verdicts[JUDGES[0].name]).items():
        print(f"\n{JUDGES[0].name}: {heading}, {len(listed)}", *listed.values(), sep="\n  ")
    return {
        "pairs": "benchmarks/verdicts/pairs.jsonl, decided beforehand by a maths teacher's common sense",
        "judges": {judge.name: judge.rule for judge in JUDGES},
        **groups,
        "lists": {name: lists(given) for name, given in verdicts.items()},
    }


def main() -> None:
    """Measure, print, save."""
    parser = command_line(__doc__)
    which = parser.add_mutually_exclusive_group()
    which.add_argument(
        "--golds", action="store_true", help="reference solutions in place of pairs"
    )
    which.add_argument("--holes", action="store_true", help="a tiny policy in place of pairs")
    parser.add_argument(
        "--name",
        help="the result's file name (default verdicts, verdicts_golds, verdicts_holes)",
    )
    parser.add_argument("--results", type=Path, default=RESULTS)
    options = parser.parse_args()
    start_cold()
    load_before = os.getloadavg() if hasattr(os, "getloadavg") else None
    part = "golds" if options.golds else "holes" if options.holes else ""
    found = {"golds": golds.check_all, "holes": holes.compare, "": every_judge}[part]()
    command = "python -m benchmarks.verdicts" + (f" --{part}" if part else "")
    result = origin(command, "math-verify", "latex2sympy2-extended", "sympy", "trl")
    result |= {"load average before": load_before, **found}
    name = options.name or "_".join(["verdicts", *([part] if part else [])])
    print("\n", save(options.results, name, result), sep="")


if __name__ == "__main__":
    main()
