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
from grpo_kit import lab
from grpo_kit.lab.arm import digest, fingerprint
from grpo_kit.lab.run import RESULT
from grpo_kit.record.files import RunFolderError, write_whole

FOLDER = RESULTS / "advice_plan"
RUNS = ROOT / "runs" / "advice_plan"
_SECONDS = ["prepare_seconds", "train_seconds", "evaluate_seconds"]
_CURVE = ("step", "reward", "entropy", "completion_length", "frac_reward_zero_std", "grad_norm")

# today's key -> the recorded one, which counted the numbers of then: a profile's, num_iterations, loss_type, ...
RECORDED = {
    "f676e294f3ee": "d7e5b3f0931a",  # fast
    "2b7b5dd2aa15": "d2c5af23fd2b",  # group of 2
    "5054892029b2": "739a06adc568",  # group of 4
    "b8d2043c567c": "835930855781",  # group of 16
    "bbe63ee773ca": "db90e8334d65",  # 4 x 16
    "f55d69abcbd3": "8e059dd60938",  # no warmup
    "97eb8bde0fac": "3ef1cfacf3f7",  # beta 0.04
    "44773b1ddd9d": "2bddd9387398",  # beta 0.001
    "bc6e03ebee63": "81f01dc6a5d3",  # too fast
    "a6d4bab9db48": "13399034686a",  # too fast, beta 0.1
    "732efd75781a": "eaf290dcb9b7",  # rewards -1 to 1
    "c3102bf5f0f2": "6033618287b9",  # threshold
    "f79cf2f26259": "cf33b909c51d",  # smooth
    "fa2ac2caf2ff": "c22555621f0a",  # prefill
    "6273283c4d51": "30b221392d77",  # no prefill
    "e10339e6ed3d": "891845682b35",  # soft
    "59100e6c7b48": "d7ff3dfc7012",  # binary
    "fe7cee8baaf9": "2596ca6726aa",  # answer in think tags
    "edf8139ada42": "4846d87b3a7f",  # 256 tokens
    "815646448ca2": "b58c04dbf348",  # paid for a mention
    "edcb93436781": "cdcee82ad2db",  # paid for the answer
    "e88267a8ae98": "82f5d1a68127",  # bf16 sampler
    "2d23eb5cab85": "991c663926d1",  # bf16 sampler, recomputed
    "ad3f50d5f8de": "81dd710e4ea0",  # rare
    "0fe86c024da5": "ed8395f7aef2",  # rare, positives x 4
    "2ceb3f525a47": "5b757363f00e",  # rare, positives only
    "9d836f97973b": "4bb69205fd2e",  # rare, resampled
    "40e2af23071f": "e7ff6991abea",  # settled
    "c5ff8fb4034b": "7b819bbfc189",  # linear
    "eca559340ce6": "e1ebb8e7c893",  # cosine
    "4d97895b5b51": "d28862a571cd",  # exponential
    "f740ddbed507": "967bbd02ce36",  # temperature 0.4
    "87f2540b1914": "5abbb8cd1808",  # temperature 0.7
    "b017bc8f426c": "fb4077addd1c",  # temperature 1.3
    "c507ec8b67a9": "1f249c9b994a",  # top-p 0.9
    "94b93ac5aa5c": "e1b126d62fed",  # 2 iterations
    "4811c6af3b8e": "552dfe9fd19f",  # 15 steps
    "67804ee7611f": "e6f638b973af",  # 16 train rows
    "f2ed828c32d0": "42d18898858c",  # 64 train rows
    "b156c3a53374": "b1571e75402d",  # no prefill, settled
    "a47285626ad8": "4a175756426a",  # SFT first, 22 steps
    "93bb323c71e1": "10c3399dedd0",  # SFT first, 29 steps
    "4b4491904c91": "f1021ab3e302",  # never right
    "2b72c63e4098": "1caf8c79b1c5",  # never right, untrained
    "4ba6f8e88861": "15848010d4d2",  # sync 1
    "86a513680160": "7f172025ea4b",  # sync 5
    "5fe07232ecca": "dab5eeb44fa3",  # sync 10
    "bfa72125a7ce": "91e10d55e355",  # sync 10, no weights
    "ab416a0d048c": "d574a08b5666",  # newest first
    "d370d5939688": "feb8eaee0d81",  # oldest first, as young
    "6be9d2525d02": "5e696fa12ea3",  # full, 5e-06
    "4c96a410cb85": "f302f7ce3533",  # full, 1e-05
    "e31b4c9641bd": "73679252dac6",  # full, 2e-05
    "237ef2b74560": "110cdc342e23",  # LoRA, 0.0001
    "1851788e9b99": "87c70fe5acfe",  # LoRA, 0.0002
    "1923ad01cf7f": "3bb58eb8f306",  # LoRA, 0.0004
    "7d0bb8ab01d4": "0d357e376d93",  # code
    "929930c5701e": "dfa42234b9b7",  # code, format only
    "1763b123a16c": "be0a2a8aac33",  # code, untrained
    "335b79562c92": "7f3400d59c2c",  # code, GRPO
    "28726f9380b8": "08abf2de730b",  # code, Dr. GRPO
    "b315878d495c": "2bc42be37629",  # code, tokens
    "0b57303c94ab": "105dec690a45",  # code, sequences
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
        found = lab.compare({name: ARMS[arm]}, [seed], PRESET, folder=RUNS, quiet=True)
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
