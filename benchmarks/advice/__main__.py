"""The advice, measured: runs of every claim, then one table.

    python -m benchmarks.advice --table          # the table again, from the runs that are there; trains nothing
    python -m benchmarks.advice --plan           # the plan: hypotheses, arms, margins, hours, and what is done of it
    python -m benchmarks.advice --claim prefill            # what its rule wants next, until the row is done
    python -m benchmarks.advice --claim prefill --seeds 5  # of seeds 0 to 4 the runs that are missing
    python -m benchmarks.advice --campaign                 # what all rules want next, until all rows are done
    python -m benchmarks.advice --campaign --priority 1 2  # of the claims of these priorities

The table is benchmarks/results/advice.md, its picture advice.png; README.md and docs/results.md say its counts.
The plan (benchmarks/advice/plan, PLAN.md) keeps one JSON a run in benchmarks/results/advice_plan/. --claim and
--campaign may be stopped at any time; the run that they were at is made again. Several processes may share a campaign.
The first campaign is over: what the table and figures need of its runs is in benchmarks/results/advice/.
"""

from __future__ import annotations

import re

from benchmarks.advice import table as advice_table
from benchmarks.advice.figure import draw_table
from benchmarks.advice.plan import campaign
from benchmarks.advice.plan.shown import plan_text
from benchmarks.advice.row import of_asked, say
from benchmarks.result import ROOT, command_line
from grpo_kit._support.display import to_png

RESULTS = ROOT / "benchmarks" / "results" / "advice"
PLAN = ROOT / "benchmarks" / "advice" / "plan" / "PLAN.md"
PAGES = (ROOT / "README.md", ROOT / "docs" / "results.md")
_MARKED = re.compile("(<!-- advice -->).*?(<!-- end of advice -->)", re.S)


def show_plan(*, write: bool) -> None:
    """Print the plan with its state, or write it without to PLAN.md."""
    if write:
        PLAN.write_text(plan_text(state=False), encoding="utf-8")
    print(PLAN if write else plan_text())


def run_claim(name: str, seeds: int | None) -> None:
    """Run what is missing of a claim, by its rule or of the first so many seeds, and say how it stands."""
    if seeds is not None and seeds < 1:
        raise SystemExit(f"--seeds {seeds}: give how many seeds, 1 or more (0 to n - 1)")
    entry = campaign.entry_of(name)
    for line in campaign.carry_out(entry, seeds):
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
    """Run, show the plan, or write the table."""
    parser = command_line(__doc__)
    what = parser.add_mutually_exclusive_group(required=True)
    what.add_argument("--table", action="store_true", help="write the table; trains nothing")
    what.add_argument(
        "--plan", action="store_true", help="print the plan, its hours and its state"
    )
    what.add_argument(
        "--claim", metavar="NAME", help="run what is missing of one claim of the plan"
    )
    what.add_argument(
        "--campaign", action="store_true", help="run what is missing of all claims"
    )
    parser.add_argument(
        "--write", action="store_true", help="with --plan: write PLAN.md, without the state"
    )
    parser.add_argument(
        "--seeds", type=int, help="with --claim: how many, 0 to n - 1 (default: by its rule)"
    )
    parser.add_argument(
        "--priority",
        type=int,
        nargs="+",
        default=[1, 2, 3, 4],
        choices=[1, 2, 3, 4],
        help="with --campaign",
    )
    options = parser.parse_args()
    if options.plan:
        show_plan(write=options.write)
    elif options.campaign:
        run_campaign(options.priority)
    elif options.claim:
        run_claim(options.claim, options.seeds)
    else:
        write_table()


if __name__ == "__main__":
    main()
