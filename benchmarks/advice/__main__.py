"""The advice, measured: runs of every claim, then one table.

    python -m benchmarks.advice --table          # the table again, from the runs that are there; trains nothing
    python -m benchmarks.advice --plan           # the plan: hypotheses, arms, margins, hours, and what is done of it
    python -m benchmarks.advice --claim prefill            # what its rule wants next, until the row is done
    python -m benchmarks.advice --claim prefill --seeds 5  # of seeds 0 to 4 the runs that are missing
    python -m benchmarks.advice --campaign                 # what all rules want next, until all rows are done
    python -m benchmarks.advice --campaign --priority 1 2  # of the claims of these priorities
    python -m benchmarks.advice                  # the first campaign: what of it is missing (a night on 2 cores)
    python -m benchmarks.advice --only main      # one family of its arms; several processes may share the work

The table is benchmarks/results/advice.md, its picture advice.png; README.md and docs/results.md say its counts.
The plan (benchmarks/advice/plan, PLAN.md) keeps one JSON a run in benchmarks/results/advice_plan/. --claim and
--campaign may be stopped at any time; the run that they were at is made again. Several processes may share a campaign.
Runs of the first campaign go to runs/advice/<arm>/seed-<n>/; what the table and figures need of them (metrics,
result.json, groups.csv) is copied to benchmarks/results/advice/.
"""

from __future__ import annotations

import re
import shutil
from filecmp import cmp

import pandas as pd

from benchmarks.advice import table as advice_table
from benchmarks.advice.arms import BASE, FAMILIES
from benchmarks.advice.figure import draw_table
from benchmarks.advice.plan import campaign
from benchmarks.advice.plan.shown import plan_text
from benchmarks.advice.row import of_asked, say
from benchmarks.result import ROOT, command_line
from grpo_kit import lab, read_completions
from grpo_kit.display import to_png

RUNS = ROOT / "runs" / "advice"
RESULTS = ROOT / "benchmarks" / "results" / "advice"
PLAN = ROOT / "benchmarks" / "advice" / "plan" / "PLAN.md"
PAGES = (ROOT / "README.md", ROOT / "docs" / "results.md")
_MARKED = re.compile("(<!-- advice -->).*?(<!-- end of advice -->)", re.S)


def collect() -> None:
    """Copy what is small of every finished run that is not there yet."""
    for result in sorted(RUNS.glob("*/seed-*/result.json")):
        target = RESULTS / result.parent.relative_to(RUNS)
        if (target / "groups.csv").exists() and cmp(result, target / "result.json", shallow=False):
            continue
        target.mkdir(parents=True, exist_ok=True)
        for file in (result, *result.parent.glob("metrics.*")):
            shutil.copyfile(file, target / file.name)
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


def show_plan(*, write: bool) -> None:
    """Print the plan with its state, or write it without to PLAN.md."""
    if write:
        PLAN.write_text(plan_text(state=False), encoding="utf-8")
    print(PLAN if write else plan_text())


def run_claim(name: str, seeds: list[int] | None) -> None:
    """Run what is missing of a claim, by its rule or of the first so many seeds, and say how it stands."""
    if seeds is not None and (len(seeds) != 1 or seeds[0] < 1):
        raise SystemExit(f"--seeds {seeds}: with --claim give one number, how many seeds (0 to n - 1)")
    entry = campaign.entry_of(name)
    for line in campaign.carry_out(entry, seeds[0] if seeds else None):
        print(line, flush=True)
    print(say(of_asked(entry)))


def run_campaign(priorities: list[int]) -> None:
    """Run what is missing of all claims of these priorities, and name the runs that failed."""
    failed = []
    for line in campaign.carry_out_all(priorities):
        print(line, flush=True)
        failed += [line] if ": failed: " in line else []
    if failed:
        raise SystemExit("\n".join([f"{len(failed)} runs failed:", *failed]))


def say_counts(page: str, counts: str) -> str:
    """The page with the table's counts between its two marks.

    >>> say_counts("<!-- advice -->x<!-- end of advice -->", "Of 2 rows")
    '<!-- advice -->Of 2 rows<!-- end of advice -->'
    """
    return _MARKED.sub(lambda marks: f"{marks[1]}{counts}{marks[2]}", page)


def write_table() -> None:
    """The table, its picture, and its counts where they are said."""
    made = advice_table.table(RESULTS)
    advice_table.write(made, RESULTS, RESULTS.with_suffix(".md"))
    RESULTS.with_suffix(".png").write_bytes(to_png(draw_table(made)))
    for page in PAGES:
        said = say_counts(page.read_text(encoding="utf-8"), advice_table.counts_text(made))
        page.write_text(said, encoding="utf-8")


def main() -> None:
    """Run, collect, and write the table."""
    parser = command_line(__doc__)
    parser.add_argument("--table", action="store_true", help="train nothing")
    parser.add_argument(
        "--seeds", type=int, nargs="+", help="which (default 0 1 2 3 4); with --claim how many"
    )
    parser.add_argument("--only", nargs="+", default=list(FAMILIES), choices=list(FAMILIES))
    parser.add_argument("--plan", action="store_true", help="print the plan, its hours and its state")
    parser.add_argument("--write", action="store_true", help="with --plan: write PLAN.md, without the state")
    parser.add_argument("--claim", metavar="NAME", help="run what is missing of one claim of the plan")
    parser.add_argument("--campaign", action="store_true", help="run what is missing of all claims")
    parser.add_argument(
        "--priority", type=int, nargs="+", default=[1, 2, 3, 4], choices=[1, 2, 3, 4], help="with --campaign"
    )
    options = parser.parse_args()
    if options.plan:
        show_plan(write=options.write)
        return
    if options.campaign:
        run_campaign(options.priority)
        return
    if options.claim:
        run_claim(options.claim, options.seeds)
        return
    if not options.table:
        for seed in options.seeds or [0, 1, 2, 3, 4]:  # seed by seed, so that a table half done is fair
            for family in options.only:
                lab.compare(FAMILIES[family], [seed], "cpu", folder=RUNS, **BASE)
    collect()
    write_table()


if __name__ == "__main__":
    main()
