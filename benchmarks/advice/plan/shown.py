"""The plan as text: what is asked, by which runs, for how many hours."""

from __future__ import annotations

from collections.abc import Iterable
from functools import cache

from benchmarks.advice.plan import campaign, cost, runs, tuned
from benchmarks.advice.plan.answered import ANSWERED, ELSEWHERE, NOT_ASKED
from benchmarks.advice.plan.arms import resolved
from benchmarks.advice.plan.entry import Asked

_RULE = """\
Seeds are 0 to n - 1. The first are run, then one more at a time until the 95 % interval is narrower than the margin or
the largest number is reached; whether more are run depends on the interval's width alone, never on the estimate. An
effect is the arm's outcome less that of what it is compared with. A verdict goes by the interval: "more" and "less"
hold where all of it lies beyond 0, "no less" and "no more" where all of it lies on the right side of the margin; where
it lies within the margin on both sides, "more" and "less" are "no difference larger than the margin". Rows of accuracy
pair held-out rows too; the interval of other outcomes counts seeds alone. All rows are one family for Holm.
Margins: ten points of what is right of held-out rows in the end, five of a mean over the run, others by the row.
Added on 2026-11-25, before any run of sampling at 0.7, of groups of 4 and of rollouts used twice: sampling-at-0.7,
group-of-4 and iterations-smoother, since the first table cannot tell those and its rows would have stayed. The arm
with rewards in [-1, 1] was made in another way, before it had run: the trainer refuses such rewards now.
dpo-first was answered from notebook 10's three seeds at first; run again on today's rows these cannot tell, so it is
asked of eight. The largest numbers of priorities 1 and 2 were 10 and 8; once priority 1 had its 10, six of its nine
intervals were still wider than the margin, and such an interval need not decide. Before any row of priority 2 had its
first seeds both were made 20. Looking more often has a price: under this rule 95 % intervals hold the truth in at least
92 % of simulated cases, where it was 93 % to 10 seeds. Priority 3 had 6 at most; when four of its rows had them (two
cannot tell), a run of these was seen to take a minute and those of programs five. So the rows on programs became
priority 4, before any had run, and stay at 6, and all the rest of priority 3 may have 20, by the same rule.
With all rows at that end four of 67 could not tell (group-of-16, iterations-smoother, beta-rescues, which met its
condition only then, sequence-level-steadier), where three may. So the largest numbers became 30 and 10, before any such
run, for all rows alike: fourteen intervals were still wider than their margin, and of these ten belong to rows with a
verdict, which may lose it. The intervals' coverage stays at 92 %. It is the last time: what cannot be told then stays
so."""


@cache
def hours(arm: str) -> float:
    """Of one run."""
    return cost.seconds(resolved(arm)) / 3600


def hours_of(some: Iterable[campaign.Run]) -> float:
    """Of these runs, each on one core."""
    return sum(hours(arm) for arm, _ in some)


def plan_text(*, state: bool = True) -> str:
    """Markdown. state: with what is done and what is missing; without: what is committed before the runs."""
    lines = [
        "# The advice, measured again: the plan",
        "",
        _RULE,
        "",
        f"Hours are of one core: {cost.MEASURED}.",
    ]
    lines += ["Each run counts once, though several claims share it.", "", *_hours()]
    lines += ["", _taken()] if state else []
    lines += ["", "## Asked by runs of their own"]
    for entry in campaign.ASKED:
        lines += ["", *_asked(entry, state)]
    lines += ["", "## Asked by another command", ""]
    lines += [
        f"- **{e.name}** ({e.by}, priority {e.priority}, about {e.hours} h) {e.hypothesis} {e.outcome}, {e.says}, "
        f"margin {e.margin:g}. Data: {e.data}. `{e.command}`"
        for e in ELSEWHERE
    ]
    lines += ["", "## Answered from committed data", ""]
    for a in ANSWERED:
        said = f" {a.said[0].upper()}{a.said[1:]}." if a.said else ""
        lines.append(
            f"- **{a.name}** ({a.by}) {a.hypothesis} Data: {a.data}, row '{a.claim}'.{said}"
        )
    lines += ["", "## Not asked", ""]
    lines += [f"- **{n.by}** {n.why}." for n in NOT_ASKED]
    return "\n".join(lines) + "\n"


def _hours() -> list[str]:
    """A table by priority; a run that an earlier priority has made costs nothing."""
    lines = [
        "| priority | claims | runs, first seeds | hours | runs, at most | hours |",
        "|---" * 6 + "|",
    ]
    counted: set[campaign.Run] = set()
    for priority in (1, 2, 3, 4):
        entries = campaign.of_priority(priority)
        first, most = (campaign.distinct(entries, most=m) - counted for m in (False, True))
        counted |= campaign.distinct(entries, most=True)
        cells = (
            priority,
            len(entries),
            len(first),
            f"{hours_of(first):.1f}",
            len(most),
            f"{hours_of(most):.1f}",
        )
        lines.append(f"| {' | '.join(map(str, cells))} |")
    lines.append(
        f"| all | {len(campaign.ASKED)} | | | {len(counted)} | {hours_of(counted):.1f} |"
    )
    return [
        *lines,
        "",
        f"Other commands, below: {sum(e.hours for e in ELSEWHERE):.1f} hours more.",
    ]


def _taken() -> str:
    """What is done of all that may be asked, and its hours as they were and as they were expected."""
    arms = {arm for arm, _ in campaign.distinct(campaign.ASKED, most=True)}
    there = {arm: seeds for arm in sorted(arms) if (seeds := runs.done(arm))}
    made = [(arm, seed) for arm, seeds in there.items() for seed in seeds]
    took = sum(runs.hours(runs.load([arm], arm).runs) for arm in there)
    return f"Done: {len(made)} runs. They took {took:.1f} hours; expected of these were {hours_of(made):.1f}."


def _asked(entry: Asked, state: bool) -> list[str]:
    seeds = f"{entry.first} to {entry.most}" if entry.most > entry.first else f"{entry.first}"
    lines = [
        f"**{entry.name}** ({entry.by}, priority {entry.priority}) {entry.hypothesis}",
        f"- {entry.arm} / {entry.against}; {entry.outcome}, {entry.says}; margin {entry.margin:g}; seeds {seeds}",
    ]
    for side, name in zip(entry.tuned, (entry.arm, entry.against), strict=False):
        chosen_on = " and ".join(map(str, tuned.SEEDS))
        lines.append(f"- {name}: the highest mean of {', '.join(side)} over seeds {chosen_on}")
    if entry.unlike:
        lines.append(f"- unlike on purpose: {', '.join(entry.unlike)}")
    if entry.counts_if:
        lines.append(f"- counts only if {entry.counts_if}")
    if entry.redone:
        lines.append(f"- redone: {entry.redone}")
    if state:
        lines.append(f"- {_state(entry)}")
    return lines


def _state(entry: Asked) -> str:
    arms = {arm for arm, _ in campaign.largest(entry, entry.most)}
    there = {arm: runs.done(arm) for arm in sorted(arms)}
    said = "; ".join(f"{arm}: {_seeds(seeds)}" for arm, seeds in there.items())
    todo, most = (
        [(arm, seed) for arm, seed in campaign.largest(entry, n) if seed not in there[arm]]
        for n in (entry.first, entry.most)
    )
    return (
        f"done: {said}; missing {len(todo)} runs, {hours_of(todo):.1f} h; {len(most)} to the largest number, "
        f"{hours_of(most):.1f} h"
    )


def _seeds(done: list[int]) -> str:
    return "seeds " + " ".join(map(str, done)) if done else "none"
