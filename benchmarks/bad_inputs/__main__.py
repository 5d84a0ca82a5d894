"""Hundreds of bad inputs at every public door of the kit: is each refused in words that mend it, or taken rightly?

    python -m benchmarks.bad_inputs                    # all cases, minutes on one core
    python -m benchmarks.bad_inputs --only Config      # of one door; no result is saved

A line of cases.txt is an expression, then what must become of it: `=> words; words`, a ValueError whose message has all
of these words (the argument, its value, what would do), or `=> True`, a value that is right. Each case ends as one of
- refused: a ValueError with these words;
- right: the value was right;
- unclear: a ValueError without some of these words;
- raw: any other exception;
- silent: nothing was said and the result is wrong.
The result names every case that is not refused or right: benchmarks/results/bad_inputs.json.
"""

from __future__ import annotations

import sys
from collections import Counter

from benchmarks.bad_inputs.campaign import FINE, campaign, cases
from benchmarks.result import RESULTS, command_line, origin, save


def main() -> None:
    parser = command_line(__doc__)
    parser.add_argument("--only", help="the cases of this door alone")
    parser.add_argument("--every", type=int, default=1, help="one case of so many alone")
    options = parser.parse_args()
    chosen = [one for one in cases() if options.only in (None, one.door)][:: options.every]
    found = campaign(chosen, said=True)
    counts = Counter(one["outcome"] for one in found)
    print(len(found), dict(counts))
    if options.only or options.every > 1:
        return
    doors = list(dict.fromkeys(one.door for one in chosen))
    result = origin(
        "python -m benchmarks.bad_inputs " + " ".join(sys.argv[1:]),
        "torch",
        "transformers",
        "trl",
    )
    result |= {
        "n": len(found), "outcomes": dict(counts),
        "by_door": {d: dict(Counter(one["outcome"] for one in found if one["door"] == d)) for d in doors},
        "wrong": [one for one in found if one["outcome"] not in FINE],
    }  # fmt: skip
    print(save(RESULTS, "bad_inputs", result))


if __name__ == "__main__":
    main()
