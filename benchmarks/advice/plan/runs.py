"""The plan's runs on disk: one JSON a run, keyed by its configuration; read back as a Lab.

benchmarks/results/advice_plan/<arm>/seed-<n>-<key>.json, written whole or not at all. The key is a hash of all that the
run was made of (lab.arm.fingerprint: numbers, rows, prompt, rewards by name) and arms.REVISION, so that a result
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

from benchmarks.advice.plan.arms import ARMS, PRESET, REVISION, resolved
from benchmarks.result import RESULTS, ROOT, as_text, six_digits
from grpo_kit.more import lab
from grpo_kit.more.lab._arm import digest, fingerprint
from grpo_kit.more.lab._run import RESULT
from grpo_kit.record.files import RunFolderError, write_whole

FOLDER = RESULTS / "advice_plan"
RUNS = ROOT / "runs" / "advice_plan"
_SECONDS = ["prepare_seconds", "train_seconds", "evaluate_seconds"]
_CURVE = ("step", "reward", "entropy", "completion_length", "frac_reward_zero_std", "grad_norm")

# today's key -> the recorded one, which counted the numbers of then: a profile's, num_iterations, loss_type, ...
RECORDED = {
    "03dad6ef2ef9": "dfa42234b9b7",
    "055dcba94a2c": "d574a08b5666",
    "06364585428e": "f1021ab3e302",
    "077106d1c8ff": "87c70fe5acfe",
    "07839f284034": "91e10d55e355",
    "091a4e1517ec": "967bbd02ce36",
    "11730aef30de": "42d18898858c",
    "15a27be615ac": "82f5d1a68127",
    "19ac5dbbc8c7": "2bddd9387398",
    "1d33575d2d85": "e7ff6991abea",
    "1e15520d1b9f": "b1571e75402d",
    "23caff4c19d3": "dab5eeb44fa3",
    "25ca1d8cb375": "835930855781",
    "26bf004764f5": "4a175756426a",
    "2db576588365": "73679252dac6",
    "2f0f251b7132": "4bb69205fd2e",
    "30e085e05e1b": "c22555621f0a",
    "36e136b0f3ee": "4846d87b3a7f",
    "38e50f855185": "e1ebb8e7c893",
    "3ecb32079443": "0d357e376d93",
    "3f33a8166eb8": "7f172025ea4b",
    "42ada8237241": "552dfe9fd19f",
    "44069447d16d": "739a06adc568",
    "4798802fb0f5": "d2c5af23fd2b",
    "4aa6923f0736": "991c663926d1",
    "4b8d03d6c38e": "81f01dc6a5d3",
    "4f321f2705f5": "be0a2a8aac33",
    "518ed77e5921": "5e696fa12ea3",
    "5518fac34197": "15848010d4d2",
    "5686c68a7b3b": "1f249c9b994a",
    "5774006b244e": "5abbb8cd1808",
    "5a2fba7259ce": "8e059dd60938",
    "66fd1b372c14": "13399034686a",
    "710358375104": "fb4077addd1c",
    "7308ac5b586d": "b58c04dbf348",
    "74f3c4bee16a": "db90e8334d65",
    "76a6f234060b": "cdcee82ad2db",
    "76e0d024f6bb": "2596ca6726aa",
    "79281f07fedc": "10c3399dedd0",
    "87977abaced1": "e6f638b973af",
    "8cd9e346a99c": "7b819bbfc189",
    "94b42ead163a": "891845682b35",
    "9dc147a85864": "e1b126d62fed",
    "a1dba7dcacd7": "30b221392d77",
    "a59995b1e762": "5b757363f00e",
    "a821987a5eb5": "f302f7ce3533",
    "a8e7f4a331c7": "d7e5b3f0931a",
    "ab71e62666e8": "eaf290dcb9b7",
    "b27bd03213f4": "cf33b909c51d",
    "c1a92b74384d": "110cdc342e23",
    "c30724565072": "1caf8c79b1c5",
    "ca394589d49c": "7f3400d59c2c",
    "ce440db93f3f": "08abf2de730b",
    "d332ba0dc7a2": "81dd710e4ea0",
    "d6f27830291d": "3ef1cfacf3f7",
    "ddec9fe45f2d": "ed8395f7aef2",
    "df3241ce3f01": "3bb58eb8f306",
    "e38d117ff2fa": "6033618287b9",
    "eb21b1a34f25": "d28862a571cd",
    "ecf77e3071f8": "feb8eaee0d81",
    "fef7948c6070": "d7ff3dfc7012",
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
    # its own folder: an unfinished run of other settings is not gone on with
    name = f"{arm} {settings_key(arm)}"
    try:
        found = lab.compare_arms({name: ARMS[arm]}, [seed], PRESET, folder=RUNS, quiet=True)
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
            path = path_of(arm, seed)
            row, right[arm, seed], curve = _read(path, path.stat().st_mtime_ns, arm, seed)
            rows.append(row)
            curves.append(curve)
    there = [arm for arm in arms if any(row["arm"] == arm for row in rows)]
    if against not in there:
        return None
    table = pd.DataFrame(rows)
    # a number that no run has is a number still
    never = [name for name in table if table[name].isna().all()]
    table = table.astype(dict.fromkeys(never, float))
    return lab.Lab(there, table, right, pd.concat(curves, ignore_index=True), against)


@cache
def _read(
    path: Path, changed: int, arm: str, seed: int
) -> tuple[dict[str, Any], list[int], pd.DataFrame]:
    """Outcomes, right answers and curve of a run: many rows of the table ask for it, and nobody changes them."""
    saved = json.loads(path.read_text(encoding="utf-8"))
    curve = pd.DataFrame(saved["curve"]).assign(arm=arm, seed=seed)
    return (
        {"arm": arm, "seed": seed, **saved["outcomes"]},
        [int(c) for c in saved["right"]],
        curve,
    )


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
