"""Which runs the plan wants, and the loops that make them: of one claim, or of all."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import replace

from benchmarks.advice.plan import runs, tuned
from benchmarks.advice.plan.answered import ANSWERED, ELSEWHERE
from benchmarks.advice.plan.entry import Asked
from benchmarks.advice.plan.exploration import EXPLORATION
from benchmarks.advice.plan.reward import REWARD
from benchmarks.advice.plan.rule import next_seeds
from benchmarks.advice.plan.stability import STABILITY
from benchmarks.advice.plan.when import WHEN
from grpo_kit.more.lab import Lab

BY_THEME: list[Asked] = [*WHEN, *REWARD, *EXPLORATION, *STABILITY]
ASKED = sorted(BY_THEME, key=lambda entry: entry.priority)
Run = tuple[str, int]


def entry_of(name: str) -> Asked:
    """The claim of that name. Raises SystemExit naming what to do where it is none of the plan's own runs."""
    for entry in ASKED:
        if entry.name == name:
            return entry
    for other in ELSEWHERE:
        if other.name == name:
            raise SystemExit(f"{name} is asked by another command: {other.command}")
    for there in ANSWERED:
        if there.name == name:
            raise SystemExit(f"{name} is answered from {there.data}; it has no runs of its own")
    raise SystemExit(
        f"--claim {name!r} is not in the plan; use one of {', '.join(e.name for e in ASKED)}"
    )


def lab_of(entry: Asked) -> Lab | None:
    """The entry's runs that are there, its outcome among their columns; None before both arms have a run."""
    # not those it was tuned on
    found = runs.load([entry.arm, entry.against], entry.against, below=entry.most)
    if found is None or entry.arm not in found.arms:
        return None
    if " - " in entry.outcome:
        one, other = entry.outcome.split(" - ")
        found = replace(
            found,
            runs=found.runs.assign(**{entry.outcome: found.runs[one] - found.runs[other]}),
        )
    return found


def wanted(entry: Asked, count: int | None = None) -> list[Run]:
    """(arm, seed) to be run now, [] when the row is done: by the rule, or of the first count seeds those missing."""
    ready = tuned.settled(entry)
    if ready is None:
        return tuned.missing(entry)
    seeds = {arm: runs.done(arm) for arm in (ready.arm, ready.against)}
    chosen = range(count) if count is not None else next_seeds(ready, seeds, lab_of(ready))
    return [(arm, seed) for seed in chosen for arm, there in seeds.items() if seed not in there]


def largest(entry: Asked, seeds: int) -> list[Run]:
    """All runs that the entry has with so many seeds, done or not; of tuned arms the first stands for the winner."""
    sides = [side[0] for side in entry.tuned] or [entry.arm, entry.against]
    choice = [(arm, seed) for side in entry.tuned for arm in side for seed in tuned.SEEDS]
    return choice + [(arm, seed) for seed in range(seeds) for arm in sides]


def carry_out(entry: Asked, count: int | None = None) -> Iterator[str]:
    """Run what is missing, one line a run; by the rule until it says enough, or the first count seeds."""
    tried: set[Run] = set()
    while todo := [run for run in wanted(entry, count) if run not in tried]:
        for arm, seed in todo:
            tried.add((arm, seed))
            made = runs.run(arm, seed)
            yield f"{arm}, seed {seed}: {'done' if made else 'another process is at it'}"


def carry_out_all(priorities: Iterable[int]) -> Iterator[str]:
    """Run what the claims of these priorities are missing, one line a run, until others are at all that is left.

    The lowest seeds first, of all claims of a priority, so that a table half done is fair. A run that fails is named,
    and in this process not tried again.
    """
    failed: set[Run] = set()
    others: set[Run] = set()
    while (run := _first(priorities, failed | others)) is not None:
        arm, seed = run
        try:
            made = runs.run(arm, seed)
        except Exception as error:  # the others of some hundred runs are still worth making
            failed.add(run)
            yield f"{arm}, seed {seed}: failed: {type(error).__name__}: {error}"
            continue
        # What another process was at before a run of minutes may be done, or killed, after it.
        others = set() if made else others | {run}
        yield f"{arm}, seed {seed}: {'done' if made else 'another process is at it'}"


def _first(priorities: Iterable[int], but: set[Run]) -> Run | None:
    """The run to make now; seeds of a choice between rates count from 0, since the claim waits for them."""
    for priority in priorities:
        todo = [
            run for entry in of_priority(priority) for run in wanted(entry) if run not in but
        ]
        if todo:
            return min(todo, key=lambda run: run[1] % tuned.SEEDS[0])
    return None


def of_priority(priority: int) -> list[Asked]:
    """The claims to be asked then."""
    return [entry for entry in ASKED if entry.priority == priority]


def distinct(entries: Iterable[Asked], *, most: bool) -> set[Run]:
    """Each run of the entries once, with the first or the largest number of seeds."""
    return {run for e in entries for run in largest(e, e.most if most else e.first)}
