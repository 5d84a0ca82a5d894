"""Results of the advice's plan as its runs leave them, without the runs."""

import json

from benchmarks.advice.plan import arms, runs, shown

_SAME = {
    "steps": 2,
    "completions": 8,
    "tokens": 9.0,
    "n": 8,
    "max_completion_tokens": 6,
    "train_rows": "rows",
}


def forget():
    """What is kept of the arms' settings."""
    for cached in (arms.resolved, runs.settings_key, shown.hours):
        cached.cache_clear()


def write(arm, seed, *, curve=None, right="01010101", **outcomes):
    """A run's result. curve: columns by step."""
    row = (
        _SAME
        | {"kl_last": None, "model": "m", "hardware": "h", "train_seconds": 360.0}
        | outcomes
    )
    path = runs.path_of(arm, seed)
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(
        json.dumps({"outcomes": row, "right": right, "curve": curve or {"step": [1, 2]}})
    )
