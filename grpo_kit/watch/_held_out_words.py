"""A run's held-out evaluations in words: the last one, compared with a constant answer, and a better earlier one."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import pandas as pd

ACCURACY, REWARD = "eval/accuracy", "eval/reward"
CONSTANT = "eval/constant"  # accuracy of the best constant strategy on the same rows
HOW_TO_KEEP = "keep='best' (--keep best) ends a run with the weights of its best evaluation."
_WORTH_SAYING = 0.05  # of the accuracy, or of the reward's range: smaller falls occur in every run


def value_of(row: Mapping[str, Any], name: str) -> float | None:
    """A measure of a row of metrics; None if it was not measured."""
    value = row.get(name)
    return None if value is None or value != value else float(value)


def held_out_words(row: Mapping[str, Any]) -> str | None:
    """The held-out measure of a row of metrics, the constant answer first if it is no better; None without a measure.

    >>> held_out_words({"step": 48, "eval/accuracy": 0.467, "eval/accuracy_low": 0.35, "eval/constant": 0.45})
    'no better than a constant answer (45%): held-out accuracy 47% (step 48)'
    >>> held_out_words({"step": 8, "eval/reward": 0.27}), held_out_words({"step": 9})
    ('held-out reward 0.27 (step 8)', None)
    """
    accuracy, reward = value_of(row, ACCURACY), value_of(row, REWARD)
    if accuracy is None:
        return None if reward is None else f"held-out reward {reward:.2f} (step {int(row['step'])})"
    said = f"held-out accuracy {accuracy:.0%} (step {int(row['step'])})"
    lead = f"no better than a constant answer ({row[CONSTANT]:.0%}): " if no_better(row) else ""
    return lead + said


def no_better(row: Mapping[str, Any]) -> bool:
    """Does the accuracy's interval reach down to the best constant strategy's accuracy? False before the first step."""
    low, constant = value_of(row, f"{ACCURACY}_low"), value_of(row, CONSTANT)
    return row["step"] > 0 and low is not None and constant is not None and 0 < constant and low <= constant


def leading(metrics: pd.DataFrame) -> str | None:
    """The column that ranks held-out evaluations: the reward if it was measured for that; None without evaluations."""
    found = [name for name in (REWARD, ACCURACY) if name in metrics and metrics[name].notna().any()]
    if REWARD in found and (ACCURACY not in found or f"{REWARD}_low" in metrics):
        return REWARD
    return ACCURACY if ACCURACY in found else None


def better_before(metrics: pd.DataFrame) -> str | None:
    """One sentence on a held-out evaluation that was better than the last; None if none was by 5 points or more.

    >>> table = pd.DataFrame({"step": [0, 16, 48], "eval/accuracy": [0.17, 0.63, 0.47]})
    >>> better_before(table)
    'Held-out accuracy was 63 % after step 16 and is 47 % after the last, 48.'
    """
    name = leading(metrics)
    if name is None:
        return None
    rows = metrics[metrics[name].notna()]
    best, last = rows.loc[rows[name].astype(float).idxmax()], rows.iloc[-1]
    unit = 1.0 if name == ACCURACY else max(1.0, float(rows[name].abs().max()))
    if not best[name] - last[name] >= _WORTH_SAYING * unit:
        return None
    words = (lambda v: f"{100 * v:.0f} %") if name == ACCURACY else (lambda v: f"{v:.2f}")
    when = f"after step {int(best['step'])}" if best["step"] > 0 else "before the first step"
    low = value_of(best, f"{name}_low")
    chance = "; the fall may be chance" if low is not None and last[name] >= low else ""
    what = name.removeprefix("eval/")
    return (
        f"Held-out {what} was {words(best[name])} {when} and is {words(last[name])} after the last, "
        f"{int(last['step'])}{chance}."
    )
