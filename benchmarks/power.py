"""The numbers behind kit.power, and its predictions on runs that it has not seen.

    python -m benchmarks.power          # reads the runs of benchmarks/results/advice_plan; trains nothing, a minute
    python -m benchmarks.power --table  # what is saved

An experiment is one claim of the advice: two settings with the same seeds and the same held-out rows. The constants of
more/lab/power.py are fitted on all of them. Its predictions are tested in two halves that share no run: fitted on
one, tried on the other, both ways. There n of an experiment's seeds are drawn 2,000 times, without replacement, n at
most half of them; the seeds' mean is moved to a known difference, and the kit's own interval says whether it is
found. (The mean of n of S seeds scatters less than that of n new ones: its distance from the mean of all is
widened by sqrt(S / (S - n)).) Also: moved to the difference that all its seeds have; code's experiments by the
constants of short answers; and by which step a run has most of its rise. Writes benchmarks/results/power.json.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from scipy.special import ndtri, stdtrit

from benchmarks.advice.plan import runs, tuned
from benchmarks.advice.plan.campaign import ASKED
from benchmarks.result import RESULTS, command_line, origin, write_result
from grpo_kit.more.lab.power import chance, least
from grpo_kit.more.lab.statistics import _errors

PATH = RESULTS / "power.json"
COUNTS, DIFFERENCES, DRAWS = (3, 5, 8, 10), (0.0, 0.05, 0.1, 0.15, 0.2), 2000
PARTS = (0.1, 0.3, 0.5, 0.7, 0.9)  # quantiles of the spread: the middles of fifths


@dataclass(frozen=True)
class Experiment:
    """change: arm less against, (S seeds, R rows) of -1, 0, 1."""

    arm: str
    against: str
    change: np.ndarray

    @property
    def kind(self) -> str:
        """Of its task: "code" or "answer", a short one."""
        return "code" if self.arm.startswith("code") else "answer"

    def parts(self) -> tuple[float, float, float]:
        """Variances: of seeds alone, of one seed on one row, of a row over all seeds; none below 0."""
        seeds, rows = self.change.shape
        by_seed, by_row = self.change.mean(axis=1), self.change.mean(axis=0)
        left = self.change - by_seed[:, None] - by_row + self.change.mean()
        noise = float((left**2).sum() / ((seeds - 1) * (rows - 1)))
        of_seeds, of_rows = (
            by_seed.var(ddof=1) - noise / rows,
            by_row.var(ddof=1) - noise / seeds,
        )
        return max(0.0, float(of_seeds)), noise, max(0.0, float(of_rows))


def experiments() -> list[Experiment]:
    """Of every pair of settings that the plan compares, with 5 shared seeds or more; none with an untrained model."""
    found, seen = [], set()
    for entry in ASKED:
        ready = tuned.settled(entry)
        pair = ready and tuple(sorted((ready.arm, ready.against)))
        if not ready or pair in seen or any("untrained" in arm for arm in pair):
            continue
        seen.add(pair)
        lab = runs.load([ready.arm, ready.against], ready.against)
        if (
            lab is None
            or ready.arm not in lab.arms
            or len(seeds := lab.seeds(ready.arm, ready.against)) < 5
        ):
            continue
        one, other = (
            np.array([lab.right[a, s] for s in seeds], float)
            for a in (ready.against, ready.arm)
        )
        if one.shape == other.shape:
            found.append(Experiment(ready.arm, ready.against, other - one))
    return found


def constants(some: Sequence[Experiment]) -> dict[str, Any]:
    """What kit.power takes from these: arguments of chance. An experiment's spread counts once a degree of freedom."""
    seeds, noise, rows = (
        np.array(part) for part in zip(*(e.parts() for e in some), strict=True)
    )
    # a spread of few seeds is hardly known
    known = np.repeat(np.sqrt(seeds), [len(e.change) - 1 for e in some])
    spreads = [round(float(one), 3) for one in np.quantile(known, PARTS)]
    return {
        "spreads": spreads,
        "noise": round(float(np.median(noise)), 3),
        "rows": round(float(np.median(rows)), 4),
    }


def halves(some: Sequence[Experiment]) -> tuple[list[Experiment], list[Experiment]]:
    """Two halves of about the same size, that have no setting in common and so no run."""
    groups: list[set[str]] = []
    for one in some:
        pair = {one.arm, one.against}
        joined = [group for group in groups if group & pair]
        groups = [group for group in groups if not group & pair] + [pair.union(*joined)]
    parts = sorted(
        ([e for e in some if e.arm in group] for group in groups),
        key=lambda p: (-len(p), p[0].arm),
    )
    made: tuple[list[Experiment], list[Experiment]] = ([], [])
    for part in parts:
        min(made, key=len).extend(part)
    return made


def found_by_draws(
    one: Experiment, n: int, difference: float, rng: np.random.Generator
) -> float:
    """The share of draws of n seeds whose interval lies above 0, were the difference this one."""
    seeds = len(one.change)
    whole, wide = one.change.mean(), np.sqrt(seeds / (seeds - n))
    hits = 0
    for _ in range(DRAWS):
        drawn = one.change[rng.choice(seeds, n, replace=False)]
        mean = difference + (drawn.mean() - whole) * wide
        of_seeds, of_rows = _errors(drawn)
        hits += mean > np.hypot(stdtrit(n - 1, 0.975) * of_seeds, ndtri(0.975) * of_rows)
    return hits / DRAWS


def tried(
    fitted: dict[str, Any], some: Sequence[Experiment], rng: np.random.Generator
) -> list[dict[str, Any]]:
    """Predictions beside what comes, of every experiment, number of seeds and difference (None: its own)."""
    rows = []
    for one in some:
        seeds, questions = one.change.shape
        for n in (n for n in COUNTS if 2 * n <= seeds):
            for difference in (*DIFFERENCES, None):
                d = abs(float(one.change.mean())) if difference is None else difference
                rows.append({
                    "arm": one.arm, "against": one.against, "seeds": n, "of": seeds, "questions": questions,
                    "difference": difference, "own": d, "predicted": chance(d, n, questions, **fitted),
                    "came": found_by_draws(one, n, d, rng),
                })  # fmt: skip
    return rows


def summed(rows: Sequence[dict[str, Any]]) -> list[dict[str, Any]]:
    """By seeds and difference: the mean prediction, the mean of what came, its lowest and highest experiment."""
    made = []
    keys = sorted(
        {(r["seeds"], -1 if r["difference"] is None else r["difference"]) for r in rows}
    )
    for seeds, difference in keys:
        own = [
            r
            for r in rows
            if r["seeds"] == seeds
            and (r["difference"], -1)[r["difference"] is None] == difference
        ]
        came = [r["came"] for r in own]
        made.append({
            "seeds": seeds, "difference": None if difference < 0 else difference, "experiments": len(own),
            "predicted": float(np.mean([r["predicted"] for r in own])), "came": float(np.mean(came)),
            "lowest": min(came), "highest": max(came),
        })  # fmt: skip
    return made


def rises() -> dict[str, dict[str, float]]:
    """Of each arm whose reward rises by 0.1 or more: the step by which it has 80 % of the rise, and how it begins."""
    found = {}
    for folder in sorted(runs.FOLDER.iterdir()):
        saved = [
            json.loads(path.read_text(encoding="utf-8"))
            for path in sorted(folder.glob("seed-*.json"))
        ]
        curves = [one["curve"] for one in saved]
        length = min(len(c["reward"]) for c in curves)
        reward, equal = (
            np.array(
                [[np.nan if v is None else v for v in c[name][:length]] for c in curves], float
            ).mean(axis=0)
            for name in ("reward", "frac_reward_zero_std")
        )
        low, high = reward[:2].mean(), reward[-max(3, length // 5) :].mean()
        if len(saved) < 5 or length < 10 or not high - low >= 0.1:
            continue
        smooth = [reward[max(0, i - 1) : i + 2].mean() for i in range(length)]
        by = next(
            (i + 1 for i, v in enumerate(smooth) if v >= low + 0.8 * (high - low)), length
        )
        prompts = saved[0]["fingerprint"]["profile.prompts_per_step"]
        signal = (1 - equal[:3].mean()) * prompts
        found[folder.name] = {
            "steps": by,
            "of": length,
            "signal": float(signal),
            "signals": float((1 - equal[:by]).sum() * prompts),
        }
    return found


def rise_tested(found: dict[str, dict[str, float]]) -> dict[str, float]:
    """Every other arm predicted from the rest: off by so many steps, by steps alone and by groups with a signal."""
    names = sorted(found)
    by_steps, by_signal = [], []
    for known, asked in ((names[::2], names[1::2]), (names[1::2], names[::2])):
        steps = np.median([found[n]["steps"] for n in known])
        signals = np.median([found[n]["signals"] for n in known])
        by_steps += [abs(found[n]["steps"] - steps) for n in asked]
        by_signal += [abs(found[n]["steps"] - signals / found[n]["signal"]) for n in asked]
    quartiles = np.quantile([one["steps"] for one in found.values()], [0.25, 0.5, 0.75])
    return {
        "arms": len(found), "q1": float(quartiles[0]), "median": float(quartiles[1]), "q3": float(quartiles[2]),
        "off_by_steps": float(np.median(by_steps)), "off_by_signal": float(np.median(by_signal)),
    }  # fmt: skip


def measured() -> dict[str, Any]:
    """All of it."""
    rng, every = np.random.default_rng(0), experiments()
    kinds = {kind: [e for e in every if e.kind == kind] for kind in ("answer", "code")}
    result: dict[str, Any] = origin("python -m benchmarks.power", "numpy", "scipy")
    result["experiments"] = [
        {
            "kind": e.kind,
            "arm": e.arm,
            "against": e.against,
            "seeds": len(e.change),
            "rows": e.change.shape[1],
        }
        | dict(zip(("seeds_variance", "noise", "rows_variance"), e.parts(), strict=True))
        for e in every
    ]
    result["constants"] = {kind: constants(some) for kind, some in kinds.items()}
    one, other = halves(kinds["answer"])
    fits = [constants(one), constants(other)]
    rows = tried(fits[0], other, rng) + tried(fits[1], one, rng)
    result["halves"] = [
        {
            "fitted_on": sorted({a for e in half for a in (e.arm, e.against)}),
            "experiments": len(half),
        }
        | fit
        for half, fit in zip((one, other), fits, strict=True)
    ]
    result["unseen"], result["by_experiment"] = summed(rows), rows
    result["code_by_answers"] = summed(tried(result["constants"]["answer"], kinds["code"], rng))
    arms = rises()
    result["rise"] = rise_tested(arms) | {"by_arm": arms}
    return result


def table(result: dict[str, Any]) -> str:
    """Predictions beside what came, in per cent."""
    lines = [
        "| seeds | difference | experiments | predicted | came | lowest, highest |",
        "|---" * 6 + "|",
    ]
    for r in result["unseen"]:
        what = "its own" if r["difference"] is None else f"{100 * r['difference']:g} points"
        numbers = " | ".join(f"{100 * r[key]:.0f} %" for key in ("predicted", "came"))
        span = f"{100 * r['lowest']:.0f}, {100 * r['highest']:.0f} %"
        lines.append(f"| {r['seeds']} | {what} | {r['experiments']} | {numbers} | {span} |")
    return "\n".join(lines)


def main() -> None:
    """Measure and save, or show."""
    parser = command_line(__doc__)
    parser.add_argument("--table", action="store_true", help="show what is saved")
    result = (
        json.loads(PATH.read_text(encoding="utf-8"))
        if parser.parse_args().table
        else measured()
    )
    write_result(PATH, result)
    print(table(result))
    for kind, fit in result["constants"].items():
        print(kind, fit, {n: round(least(n, 256, **fit), 3) for n in (3, 5, 8, 12, 20)})
    print({key: value for key, value in result["rise"].items() if key != "by_arm"})


if __name__ == "__main__":
    main()
