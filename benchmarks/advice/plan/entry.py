"""What the plan says of a claim: asked by runs of its own, answered from runs that are there, or not asked."""

from __future__ import annotations

import re
from dataclasses import dataclass

from benchmarks.advice.plan.condition import Condition

SAYS = ("more", "less", "no less", "no more")
FIRST = 5
# seeds at most, by priority: what the hours allow; 4: long answers
MOST = {1: 30, 2: 30, 3: 30, 4: 10}
# Margins: of what is right of held-out rows at the end, and of means over a run.
HELD_OUT, OVER_THE_RUN = 0.1, 0.05


@dataclass(frozen=True)
class Asked:
    """One hypothesis about two arms, written down before they are run.

    name: for the command line. by: the pieces of advice, "C3" or "A2, B2". arm, against: names in arms.ARMS. outcome:
    "accuracy" (held out, greedy, paired by row too) or a column of Lab.runs, or "a - b" of two; the arm's less
    against's. says: what the hypothesis says of that difference; margin: the smallest that matters, in its unit.
    priority: 1 is run first. first, most: how many seeds, see rule.py; 0: as MOST says. unlike: what the arms differ in
    on purpose besides the setting, words of arms.unlike. counts_if: what must be so of the runs, or the row has no
    verdict. redone: what was wrong with the row of the first table, and what is done about it. replaces: that row, a
    text of claims.CLAIMS; it stands until this entry's first seeds are run.
    tuned: (arms to choose from for arm, for against): see tuned.py; arm and against are then names for the winners.
    """

    name: str
    by: str
    hypothesis: str
    arm: str
    against: str
    outcome: str
    says: str = "more"
    margin: float = 0.0
    priority: int = 2
    first: int = FIRST
    most: int = 0
    unlike: tuple[str, ...] = ()
    counts_if: Condition | None = None
    redone: str = ""
    replaces: str = ""
    tuned: tuple[tuple[str, ...], tuple[str, ...]] = ()

    def __post_init__(self) -> None:
        of_held_out = re.match(r"accuracy$|sampled_|pass@", self.outcome)
        object.__setattr__(self, "most", self.most or MOST[self.priority])
        object.__setattr__(
            self, "margin", self.margin or (HELD_OUT if of_held_out else OVER_THE_RUN)
        )

    @property
    def null(self) -> float:
        """The difference that the row's p is against."""
        return null_of(self.says, self.margin)


@dataclass(frozen=True)
class Answered:
    """A hypothesis that committed runs decide; data: where they are. claim: its row in claims.CLAIMS. said: a note."""

    name: str
    by: str
    hypothesis: str
    data: str
    claim: str
    said: str = ""


@dataclass(frozen=True)
class Elsewhere:
    """A hypothesis that another benchmark or a notebook asks; command adds the seeds that are missing.

    hours: of one core, estimated from the seconds that its earlier runs took. seeds: how many the command makes in all.
    claim: its row in claims.CLAIMS, "": none. runs, arm, against: where its runs are, if no claim says so: a key of
    elsewhere.FILES, and the two arms there.
    """

    name: str
    by: str
    hypothesis: str
    data: str
    command: str
    outcome: str
    says: str
    margin: float
    priority: int
    hours: float
    seeds: int
    claim: str = ""
    runs: str = ""
    arm: str = ""
    against: str = ""


@dataclass(frozen=True)
class NotAsked:
    """A piece of advice that this machine cannot ask, and why."""

    by: str
    why: str


def null_of(says: str, margin: float) -> float:
    """The difference that a p is against: 0, or the end of the margin that "no less" or "no more" stays within."""
    return {"no less": -margin, "no more": margin}.get(says, 0.0)


def verdict(says: str, margin: float, low: float, high: float) -> str:
    """What a 95 % interval of the difference makes of the hypothesis.

    "no difference larger than the margin" is said of more and less where the whole interval lies within the margin on
    either side, though it may leave 0 out: an effect that is sure and too small to matter does not make a claim hold.

    >>> verdict("more", 0.05, 0.01, 0.12), verdict("more", 0.05, -0.02, 0.04), verdict("no less", 0.05, -0.04, 0.2)
    ('holds', 'no difference larger than the margin', 'holds')
    """
    if says not in SAYS:
        raise ValueError(f"says={says!r} is not known; use one of {', '.join(SAYS)}")
    if says in ("less", "no more"):
        low, high = -high, -low
    if says in ("no less", "no more"):
        return "holds" if low > -margin else "does not" if high < 0 else "cannot tell"
    if -margin < low and high < margin:
        return "no difference larger than the margin"
    return "holds" if low > 0 else "does not" if high < margin else "cannot tell"
