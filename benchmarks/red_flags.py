"""How often the red flags miss a run that went wrong, and how often they are raised over one that did not.

    python -m benchmarks.red_flags                         # writes results/red_flags.md, seconds, trains nothing

Over all recorded runs: the fixtures, sorted by hand (tests/fixtures/flags), and the laboratory's runs, sorted by their
results: an arm whose held-out accuracy is at least 10 points below that of its family's first arm counts as worse.
A worse arm's run without a flag is a miss; another's with a flag is a false alarm. The fixtures are read twice, with
what their config.json says of the answer parts and the best constant strategy, and without. Failures that none of
these runs had are written into the healthy fixtures' numbers (`put_in`); results/red_flags_before.md is the command's
table with the flags as they were before these were known.
"""

from __future__ import annotations

import bisect
import functools
import json
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd

from benchmarks.advice.arms import FAMILIES
from benchmarks.result import RESULTS, ROOT, command_line
from grpo_kit.record.files import read_metrics, write_whole
from grpo_kit.watch.monitor import red_flags

FIXTURES = ROOT / "tests" / "fixtures" / "flags"
WORSE = 0.10  # of held-out accuracy, below the family's first arm


def fixtures() -> pd.DataFrame:
    """One row a fixture: kind, run, steps; expected, flags and blind, each {name: step}, blind without the task."""
    rows = []
    for path in sorted(FIXTURES.glob("*/*/metrics.csv")):
        folder, config = path.parent, json.loads((path.parent / "config.json").read_text())
        metrics, kind = read_metrics(folder), folder.parent.name
        expected = (
            json.loads((folder / "induced.json").read_text())["flags"]
            if kind == "induced"
            else {}
        )
        blind = {
            key: value
            for key, value in config.items()
            if key not in ("answer_parts", "best_constant")
        }
        row = {"kind": kind, "run": folder.name, "steps": len(metrics), "expected": expected}
        rows.append(row | {"flags": _raised(metrics, config), "blind": _raised(metrics, blind)})
    return pd.DataFrame(rows)


def laboratory() -> pd.DataFrame:
    """One row an arm: accuracy and that of its family's first arm, whether it is worse, its runs, those with flags."""
    table = pd.DataFrame(_runs())
    rows = []
    for family in FAMILIES.values():
        first = _FIRST.get(family[0], family[0])
        control = table.loc[table["arm"] == first, "accuracy"].mean()
        for arm in family:
            runs = table[table["arm"] == arm]
            found = runs["flags"].map(len) > 0
            names = sorted({name for flags in runs["flags"] for name in flags})
            row = {"arm": arm, "accuracy": runs["accuracy"].mean(), "control": control}
            rows.append(
                row
                | {"runs": len(runs), "flagged": int(found.sum()), "flags": ", ".join(names)}
            )
    made = pd.DataFrame(rows)
    made["worse"] = made["accuracy"] <= made["control"] - WORSE
    return made.sort_values(
        ["worse", "accuracy"], ascending=[False, True], kind="stable", ignore_index=True
    )


def put_in() -> pd.DataFrame:
    """One row a failure: the flag that should name it, the healthy runs with it, those in which it is named."""
    rows = []
    for failure, (flag, columns_of) in PUT_IN.items():
        named = runs = 0
        for path in sorted(FIXTURES.glob("healthy/*/metrics.csv")):
            metrics, config = (
                read_metrics(path.parent),
                json.loads((path.parent / "config.json").read_text()),
            )
            n = len(metrics)
            columns = {"learning_rate": np.full(n, 1e-5)} | columns_of(
                n, np.arange(n) >= n // 2
            )
            names = {
                found.name for found in red_flags(metrics.assign(**columns), config=config)
            }
            runs, named = runs + 1, named + (flag in names)
        rows.append({"failure": failure, "flag": flag, "runs": runs, "named": named})
    return pd.DataFrame(rows)


def _small_losses(n: int) -> np.ndarray:
    return np.random.default_rng(0).normal(0, 0.05, n)


def _evaluated(n: int, late: np.ndarray, before: float, after: float) -> dict[str, np.ndarray]:
    """Held-out accuracy of 64 rows at every second step."""
    accuracy = np.where(np.arange(n) % 2 == 0, np.where(late, after, before), np.nan)
    width = 2 * np.sqrt(accuracy * (1 - accuracy) / 64)
    return {
        "eval/accuracy": accuracy, "eval/accuracy_low": accuracy - width, "eval/accuracy_high": accuracy + width,
    }  # fmt: skip


PUT_IN = {  # failure: the flag, and the columns of a run of n rows of which some are late
    "loss NaN": ("not finite", lambda n, late: {"loss": np.where(late, np.nan, _small_losses(n))}),
    "gradient NaN": ("not finite", lambda n, late: {"grad_norm": np.where(late, np.nan, 2.0)}),
    "loss infinite in one step": (
        "not finite", lambda n, late: {"loss": np.where(np.arange(n) == n // 2, np.inf, _small_losses(n))},
    ),
    "gradient 0 throughout": ("no update", lambda n, late: {"grad_norm": np.zeros(n)}),
    "learning rate 0 throughout": ("no update", lambda n, late: {"learning_rate": np.zeros(n)}),
    "entropy up to 3 nats": (
        "entropy explosion", lambda n, late: {"entropy": np.where(late, 3.0, np.linspace(0.5, 2.0, n))},
    ),
    "entropy 6 nats": ("entropy explosion", lambda n, late: {"entropy": np.full(n, 6.0)}),
    "held-out accuracy .7 to .1": ("held-out fall", lambda n, late: _evaluated(n, late, 0.7, 0.1)),
    "held-out accuracy .3 to .05": ("held-out fall", lambda n, late: _evaluated(n, late, 0.3, 0.05)),
    "KL creeping to 1.2": ("KL drift", lambda n, late: {"kl": np.linspace(0.01, 1.2, n)}),
    "loss 2.5 in one step": (
        "loss spike", lambda n, late: {"loss": np.where(np.arange(n) == n // 2, 2.5, _small_losses(n))},
    ),
    "60 % of tokens clipped": ("stale rollouts", lambda n, late: {"clip_ratio": np.where(late, 0.6, 0.0)}),
}  # fmt: skip
# this family's first arm is in another
_FIRST = {"binary, positives x 4": "no prefill, binary"}


def _runs() -> Iterator[dict[str, Any]]:
    for path in sorted((RESULTS / "advice").glob("*/seed-*/result.json")):
        result, metrics = json.loads(path.read_text()), read_metrics(path.parent)
        flags = [flag.name for flag in red_flags(metrics, config=_config(result, metrics))]
        yield {
            "arm": path.parent.parent.name,
            "accuracy": result["accuracy"]["value"],
            "flags": flags,
        }


def _config(result: Mapping[str, Any], metrics: pd.DataFrame) -> dict[str, Any]:
    """As config.json says it: the first part judges the answer, the other is the format; the task's weights."""
    parts = [
        name.removeprefix("reward/") for name in metrics if str(name).startswith("reward/")
    ]
    earned = {parts[0]: result["constant"][1]} if parts[0] == "exact_answer" else {}
    return {
        "reward_parts": parts,
        "reward_weights": [0.75, 0.25] if len(parts) > 1 else [1.0],
        "answer_parts": parts[:1],
        "best_constant": {"strategy": result["constant"][0], "parts": earned},
        "args": {"num_iterations": result["settings"].get("num_iterations", 1)},
    }


def _raised(metrics: pd.DataFrame, config: Mapping[str, Any]) -> dict[str, int]:
    """{flag: the step after which it was raised}. None is ever taken back, so halving finds the first look at each."""

    @functools.cache
    def looked(rows: int) -> list[str]:
        return [flag.name for flag in red_flags(metrics[:rows], config=config)]

    every = range(1, len(metrics) + 1)
    at = {
        name: bisect.bisect(every, False, key=lambda n: name in looked(n))
        for name in looked(len(every))
    }  # noqa: B023
    order = sorted(at, key=lambda name: (at[name], looked(every[at[name]]).index(name)))
    return {name: int(metrics["step"].iloc[at[name]]) for name in order}


def markdown(runs: pd.DataFrame, arms: pd.DataFrame, failures: pd.DataFrame) -> str:
    """The three tables and their counts."""
    induced, healthy = (runs[runs["kind"] == kind] for kind in ("induced", "healthy"))
    lines = [
        "# Red flags: misses and false alarms",
        "",
        "Command: `python -m benchmarks.red_flags`, which trains nothing. Runs: SmolLM2-135M-Instruct on CPUs.",
        "",
        "## Fixtures, sorted by hand",
        "",
        "The thresholds were set on these runs. Blind: without answer parts and best constant strategy in config.json.",
        "",
        f"- Of {len(induced)} runs that went wrong, {_caught(induced, 'flags')} raise all the flags that they should, "
        f"blind {_caught(induced, 'blind')}.",
        f"- Of {len(healthy)} healthy runs, {(healthy['flags'].map(len) > 0).sum()} raise a flag, "
        f"blind {(healthy['blind'].map(len) > 0).sum()}.",
        "",
        "| run | steps | raised, after step | blind |",
        "|---|---|---|---|",
    ]
    lines += [
        f"| {r.run} | {r.steps} | {_words(r.flags)} | {_words(r.blind)} |"
        for r in induced.itertuples()
    ]
    lines += [
        "",
        "## Failures written into the healthy fixtures",
        "",
        "From the middle of each run on, unless the row says otherwise.",
        "",
        "| failure | flag | runs | named |",
        "|---|---|---|---|",
    ]
    lines += [
        f"| {r.failure} | {r.flag} | {r.runs} | {r.named} |" for r in failures.itertuples()
    ]
    worse, other = arms[arms["worse"]], arms[~arms["worse"]]
    lines += [
        "",
        "## The laboratory's runs, sorted by their accuracy",
        "",
        f"Worse: at least {WORSE:.0%} of held-out accuracy below the family's first arm (in brackets). The limits of "
        "*stale rollouts* were set on these runs, the others were not.",
        "",
        f"- Of {worse['runs'].sum()} runs of worse arms {worse['runs'].sum() - worse['flagged'].sum()} raise no flag.",
        f"- Of {other['runs'].sum()} other runs {other['flagged'].sum()} raise one.",
        "",
        "| arm | accuracy | worse | runs | with a flag | flags |",
        "|---|---|---|---|---|---|",
    ]
    for r in arms[arms["worse"] | (arms["flagged"] > 0)].itertuples():
        sign = "yes" if r.worse else ""
        cells = [r.arm, f"{r.accuracy:.0%} ({r.control:.0%})", sign, r.runs, r.flagged, r.flags]
        lines.append("| " + " | ".join(map(str, cells)) + " |")
    quiet = other[other["flagged"] == 0]
    lines += [
        "",
        f"The other {len(quiet)} arms ({quiet['runs'].sum()} runs) are not worse and raise no flag.",
        "",
    ]
    return "\n".join(lines)


def _caught(runs: pd.DataFrame, column: str) -> int:
    return sum(
        set(expected) <= set(found)
        for expected, found in zip(runs["expected"], runs[column], strict=True)
    )


def _words(flags: Mapping[str, int]) -> str:
    return ", ".join(f"{name} {step}" for name, step in flags.items()) or "none"


def main() -> None:
    """Write the tables."""
    parser = command_line(__doc__)
    parser.add_argument("--results", type=Path, default=RESULTS)
    options = parser.parse_args()
    text = markdown(fixtures(), laboratory(), put_in())
    write_whole(options.results / "red_flags.md", text.encode())
    print(text)


if __name__ == "__main__":
    main()
