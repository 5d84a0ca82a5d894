"""The plan's runs on disk: one JSON a run, keyed by its configuration; read back as a Lab.

benchmarks/results/advice_plan/<arm>/seed-<n>-<key>.json, written whole or not at all. The key is a hash of all that the
run was made of (lab.settings.fingerprint: numbers, rows, prompt, rewards by name) and arms.REVISION, so that a result
of other settings is never taken for this one's. Run folders go to runs/advice_plan and may be deleted.

The recorded runs were made by the trainer before the loop, whose first steps and final accuracy the loop has too
(benchmarks.oracle). RECORDED has the keys of arms whose settings it called by other names.
"""

from __future__ import annotations

import json
from functools import cache
from pathlib import Path
from typing import Any

import pandas as pd

from benchmarks.advice.plan.arms import ARMS, REVISION, resolved
from benchmarks.result import RESULTS, ROOT, as_text, six_digits
from grpo_kit import lab
from grpo_kit.lab.run import RESULT
from grpo_kit.lab.settings import as_json, digest, fingerprint
from grpo_kit.record.files import RunFolderError, write_whole

FOLDER = RESULTS / "advice_plan"
RUNS = ROOT / "runs" / "advice_plan"
_SECONDS = ["prepare_seconds", "train_seconds", "evaluate_seconds"]
_CURVE = ("step", "reward", "entropy", "completion_length", "frac_reward_zero_std", "grad_norm")

# today's key -> the recorded one: num_iterations, loss_type, ..., or a trainer of its own
RECORDED = {
    "59bcf47d9841": "8e059dd60938",  # no warmup
    "252d1bf4c626": "eaf290dcb9b7",  # rewards -1 to 1
    "48a2103d86d6": "82f5d1a68127",  # bf16 sampler
    "c7a6d1bf88e2": "991c663926d1",  # bf16 sampler, recomputed
    "b6f18908210d": "81dd710e4ea0",  # rare
    "22995ab13a02": "ed8395f7aef2",  # rare, positives x 4
    "32dde1565177": "5b757363f00e",  # rare, positives only
    "2436cde256a2": "4bb69205fd2e",  # rare, resampled
    "6586eb39d656": "e1b126d62fed",  # 2 iterations
    "a1b28bb3fa8d": "15848010d4d2",  # sync 1
    "a54b267ff32e": "7f172025ea4b",  # sync 5
    "7a832b610183": "dab5eeb44fa3",  # sync 10
    "e481b1157047": "91e10d55e355",  # sync 10, no weights
    "c2f34d1451d9": "d574a08b5666",  # newest first
    "0a982bfe59f5": "feb8eaee0d81",  # oldest first, as young
    "a02db6c904f8": "7f3400d59c2c",  # code, GRPO
    "c6a30800cf68": "08abf2de730b",  # code, Dr. GRPO
    "86d24f177d5f": "2bc42be37629",  # code, tokens
    "c7ef942e7e85": "105dec690a45",  # code, sequences
}


@cache
def settings_key(arm: str) -> str:
    """Twelve digits that tell the arm's configuration from any other."""
    return digest([REVISION, fingerprint(resolved(arm))])[:12]


def key_of(arm: str) -> str:
    """The same, as names of results have it: where there are recorded runs of this configuration, theirs."""
    return RECORDED.get(settings_key(arm), settings_key(arm))


def path_of(arm: str, seed: int) -> Path:
    """Where the run's result is, or will be."""
    return FOLDER / arm / f"seed-{seed}-{key_of(arm)}.json"


def done(arm: str) -> list[int]:
    """The seeds that have a result of this very configuration."""
    found = (FOLDER / arm).glob(f"seed-*-{key_of(arm)}.json")
    return sorted(int(path.name.split("-")[1]) for path in found)


def run(arm: str, seed: int) -> bool:
    """Train and write the result, unless it is there; False where another process is at it."""
    target = path_of(arm, seed)
    if target.exists():
        return True
    name = f"{arm} {settings_key(arm)}"  # its own folder: an unfinished run of other settings is not gone on with
    try:
        found = lab.compare({name: ARMS[arm]}, [seed], folder=RUNS, quiet=True)
    except RunFolderError:
        return False
    if seed not in found.seeds(name):
        return False
    target.parent.mkdir(parents=True, exist_ok=True)
    write_whole(target, as_text(six_digits(_result(arm, seed, found, name))).encode())
    return True


def load(arms: list[str], against: str, *, below: int | None = None) -> lab.Lab | None:
    """These arms' results as a laboratory, of seeds below that number; None while none of against's is there."""
    rows, right, curves = [], {}, []
    for arm in arms:
        for seed in done(arm):
            if below is not None and seed >= below:
                continue
            saved = json.loads(path_of(arm, seed).read_text(encoding="utf-8"))
            rows.append({"arm": arm, "seed": seed, **saved["outcomes"]})
            right[arm, seed] = [int(c) for c in saved["right"]]
            curves.append(pd.DataFrame(saved["curve"]).assign(arm=arm, seed=seed))
    there = [arm for arm in arms if any(row["arm"] == arm for row in rows)]
    if against not in there:
        return None
    table = pd.DataFrame(rows)
    never = [name for name in table if table[name].isna().all()]  # a number that no run has is a number still
    table = table.astype(dict.fromkeys(never, float))
    return lab.Lab(there, table, right, pd.concat(curves, ignore_index=True), against)


def hours(table: pd.DataFrame) -> float:
    """That these runs took: what was prepared, trained and evaluated."""
    return float(table.reindex(columns=_SECONDS).astype(float).sum().sum()) / 3600


def _result(arm: str, seed: int, found: lab.Lab, name: str) -> dict[str, Any]:
    row = found.runs[(found.runs["arm"] == name) & (found.runs["seed"] == seed)].iloc[0]
    curve = found.curves[(found.curves["arm"] == name) & (found.curves["seed"] == seed)]
    columns = [c for c in curve if c in _CURVE or c.startswith("reward/")]
    made = json.loads((RUNS / name / f"seed-{seed}" / RESULT).read_text(encoding="utf-8"))
    return {
        "arm": arm,
        "seed": seed,
        "key": key_of(arm),
        "command": "python -m benchmarks.advice --claim NAME",
        "settings": as_json(ARMS[arm]),
        "fingerprint": fingerprint(resolved(arm)),
        "versions": made["versions"],
        "outcomes": {k: _plain(v) for k, v in row.items() if k not in ("arm", "seed")},
        "right": "".join(map(str, found.right[name, seed])),
        "curve": {c: [_plain(v) for v in curve[c]] for c in columns},
    }


def _plain(value: Any) -> Any:
    """As JSON has it: no numpy, and null where there is no number."""
    value = value.item() if hasattr(value, "item") else value
    return None if isinstance(value, float) and value != value else value
