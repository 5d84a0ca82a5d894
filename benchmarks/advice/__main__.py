"""The advice, measured: every arm with every seed, then one table.

    python -m benchmarks.advice                  # trains what is missing (a night on 2 cores), then as below
    python -m benchmarks.advice --table          # the table again, from the run folders
    python -m benchmarks.advice --only main      # one family of arms; several processes may share the work

Runs go to runs/advice/<arm>/seed-<n>/. What the table and the figures need of them (metrics.csv, result.json,
groups.csv) is copied to benchmarks/results/advice/; the table itself is benchmarks/results/advice.md, its picture
advice.png.
"""

from __future__ import annotations

import shutil
from filecmp import cmp

import pandas as pd

from benchmarks.advice import table as advice_table
from benchmarks.advice.arms import BASE, FAMILIES
from benchmarks.advice.figure import draw_table
from benchmarks.result import ROOT, command_line
from grpo_kit import lab, read_completions
from grpo_kit.display import to_png

RUNS = ROOT / "runs" / "advice"
RESULTS = ROOT / "benchmarks" / "results" / "advice"


def collect() -> None:
    """Copy what is small of every finished run that is not there yet."""
    for result in sorted(RUNS.glob("*/seed-*/result.json")):
        target = RESULTS / result.parent.relative_to(RUNS)
        if (target / "groups.csv").exists() and cmp(result, target / "result.json", shallow=False):
            continue
        target.mkdir(parents=True, exist_ok=True)
        for name in ("result.json", "metrics.csv"):
            shutil.copyfile(result.parent / name, target / name)
        groups(read_completions(result.parent)).to_csv(
            target / "groups.csv", index=False, float_format="%.4g"
        )


def groups(completions: pd.DataFrame) -> pd.DataFrame:
    """One row a step: how unlike the completions of a group are, and how many groups have a signal.

    distinct: share of different texts in a group. signal: share of groups whose rewards differ.
    """
    # by prompt too: a step may sample several batches, each from group 0
    inside = completions.groupby(["step", "group", "prompt"])
    table = pd.DataFrame(
        {
            "distinct": inside["completion"].nunique() / inside.size(),
            "signal": (inside["reward"].max() - inside["reward"].min() > 1e-9).astype(float),
        }
    )
    return table.groupby("step").mean().reset_index()


def main() -> None:
    """Run, collect, and write the table."""
    parser = command_line(__doc__)
    parser.add_argument("--table", action="store_true", help="train nothing")
    parser.add_argument("--seeds", type=int, nargs="+", default=[0, 1, 2, 3, 4])
    parser.add_argument("--only", nargs="+", default=list(FAMILIES), choices=list(FAMILIES))
    options = parser.parse_args()
    if not options.table:
        for seed in options.seeds:  # seed by seed, so that a table half done is fair
            for family in options.only:
                lab.compare(FAMILIES[family], [seed], BASE, folder=RUNS)
    collect()
    advice_table.write(RESULTS, RESULTS.with_suffix(".md"))
    RESULTS.with_suffix(".png").write_bytes(to_png(draw_table(advice_table.table(RESULTS))))


if __name__ == "__main__":
    main()
