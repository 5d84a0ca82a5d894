"""The logged rows of a run of anybody, under the record's names; the runs of a file that holds several.

Logs of TRL, notebooks with stored outputs, tables, TensorBoard's events.
"""

from __future__ import annotations

import ast
import csv
import html
import json
import math
import re
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

import pandas as pd

_NAMES = {  # TRL's, what its loggers and notebooks make of them, verl's and OpenRLHF's: the record's
    "training loss": "loss",
    "completions/mean_length": "completion_length",
    "completions/clipped_ratio": "completion_cut_off",
    "clip_ratio/region_mean": "clip_ratio",
    "sampling/sampling_logp_difference/mean": "rollout/logprob_gap",
    "global_step": "step",
    "_step": "step",
    "training/global_step": "step",
    "actor/pg_loss": "loss",
    "actor/grad_norm": "grad_norm",
    "actor/lr": "learning_rate",
    "actor/entropy": "entropy",
    "actor/entropy_loss": "entropy",
    "actor/kl_loss": "kl",
    "actor/pg_clipfrac": "clip_ratio",
    "critic/score/mean": "reward",
    "response_length/mean": "completion_length",
    "response_length/clip_ratio": "completion_cut_off",
    "policy_loss": "loss",
    "actor_lr": "learning_rate",
    "ppo_clip_ratio": "clip_ratio",
    "response_length": "completion_length",
}
_HELD_OUT = (
    "eval/",
    "eval_",
    "val/",
    "val_",
    "test/",
    "test_",
)  # what loggers put in front of a held-out measure
_RUNS = ("run", "run_id", "run_name", "run name", "name", "experiment")  # columns that say whose row it is
_EXTREMES = ("__min", "__max")  # of a smoothed column, in W&B's exports
# A log without the share that was cut off shows it where the mean length is the log's longest in 5 steps: then all of
# these completions took as many tokens. Short answers may do so by themselves.
_AT_MOST, _LONG = 5, 64


class LogError(ValueError):
    """A file or folder that holds no log of a run, and what would do."""


def runs_of(path: Path) -> dict[str, pd.DataFrame]:
    """The runs of a file or a folder by name, as tables of table_of, in their order; only those with steps of a run.

    A run is told from the next by a column that names it, by W&B's names in front of the columns, by its folder, or
    where the steps, else the epochs, begin anew. A run that was resumed repeats some steps and is one.
    """
    rows_of: dict[str, list[dict[str, Any]]] = {}
    ends: dict[
        str, dict[str, tuple[float, float]]
    ] = {}  # of each name: first and last step and epoch of its last run
    numbers: dict[str, int] = {}
    for row in _rows(path):
        for name, values in _by_run(row).items():
            unit = "step" if "step" in values else "epoch"
            at, known = _number(values.get(unit)), ends.setdefault(name, {})
            first, last = known.get(unit, (at, at))
            if at is not None and at <= first and at < last:
                numbers[name] = numbers.get(name, 1) + 1
                known.clear()
                first = at
            if at is not None:
                known[unit] = first, at
            number = f"run {numbers.get(name, 1)}"
            whole_name = f"{name}, {number}" if name and name in numbers else name or number
            rows_of.setdefault(whole_name, []).append(values)
    tables = {name: table_of(rows) for name, rows in rows_of.items()}
    return {
        name: table
        for name, table in tables.items()
        if {*table} & {"reward", "reward_std", "kl", "grad_norm"}
    }


def _by_run(row: dict[str, Any]) -> dict[str, dict[str, Any]]:
    """A logged row's values by the record's names, for each run that it has values of."""
    label = next((str(row[name]) for name in row if str(name).lower() in _RUNS and row[name]), "")
    runs: dict[str, dict[str, Any]] = {}
    for name, value in row.items():
        prefix = str(name).rpartition(" - ")[0]
        if value not in ("", None) and not str(name).lower().endswith(_EXTREMES):
            runs.setdefault(prefix, {})[_name(name)] = value
    shared = runs.pop("", {})
    return {name or label: shared | values for name, values in runs.items()} or {label: shared}


def table_of(rows: Iterable[dict[str, Any]]) -> pd.DataFrame:
    """Logged rows as one table by the record's names, a row a step; rows without a step are numbered in their order.

    >>> table_of([{"train/rewards/right/mean": 0.5, "train/global_step": 3}]).to_dict("records")
    [{'step': 3, 'reward/right': 0.5}]
    """
    steps: dict[int, dict[str, float]] = {}
    for number, row in enumerate(rows, 1):
        named = {_name(name): value for name, value in row.items()}
        step = _number(named.pop("step", None))
        values = {name: found for name, value in named.items() if (found := _number(value)) is not None}
        if values:
            known = steps.setdefault(number if step is None else int(step), {})
            known |= {
                name: value for name, value in values.items() if not math.isnan(value) or name not in known
            }
    table = pd.DataFrame([{"step": step} | steps[step] for step in sorted(steps)])
    if (
        "reward_std" in table and "frac_reward_zero_std" not in table
    ):  # of all groups, or not known to be of any
        table["frac_reward_zero_std"] = (table["reward_std"].abs() < 1e-9).astype(float)
    if "completion_length" in table and "completion_cut_off" not in table:
        longest = table["completion_length"].max()
        at_most, shorter = (table["completion_length"] == longest), (table["completion_length"] < longest)
        # A mean that is so often the longest is the limit; one that never changes may be a habit.
        if longest >= _LONG and longest % 1 == 0 and at_most.sum() >= _AT_MOST and shorter.any():
            table["completion_cut_off"] = at_most.astype(float)
    return table


def _name(name: Any) -> str:
    """The record's name of a column.

    >>> [_name(one) for one in ("rewards / right", "run-7 - train/kl", "Training Loss", "train/rewards/right/mean")]
    ['reward/right', 'kl', 'loss', 'reward/right']
    """
    text = re.sub(r"\s*/\s*", "/", str(name).rpartition(" - ")[2].strip())
    text = text.removeprefix("train/")
    for start in _HELD_OUT:
        if text.lower().startswith(start):
            return f"eval/{_name(text[len(start) :])}"
    text = text if text.startswith("rewards/") else text.lower()
    if text.startswith("rewards/") and not text.endswith("/std"):
        return "reward/" + text.removeprefix("rewards/").removesuffix("/mean")
    return _NAMES.get(text, text)


def _number(value: Any) -> float | None:
    try:
        return (
            float(str(value).replace(",", "")) if not isinstance(value, bool) and str(value).strip() else None
        )
    except ValueError:
        return None


def _rows(path: Path) -> Iterator[dict[str, Any]]:
    """The logged rows of a file or a folder."""
    if path.is_dir():
        states = sorted(path.glob("**/trainer_state.json"), key=lambda one: one.stat().st_mtime)
        histories = {state: [*_rows(state)] for state in states}
        newest: dict[str, Path] = {}
        for state in reversed(
            states
        ):  # checkpoints of one run begin alike, and the last of them has all rows
            newest.setdefault(repr(histories[state][:1]), state)
        for state in reversed(newest.values()):
            yield from ({"run": str(state.parent.relative_to(path))} | row for row in histories[state])
        if not states:
            yield from _of_tensorboard(path)
    elif path.suffix == ".csv":
        with path.open(encoding="utf-8-sig", newline="") as file:
            yield from csv.DictReader(file)
    elif path.suffix == ".ipynb":
        for cell in json.loads(path.read_text(encoding="utf-8"))["cells"]:
            for output in cell.get("outputs", ()):
                yield from _of_output(output)
    else:
        text = path.read_text(encoding="utf-8-sig", errors="replace")
        yield from _of_json(text) or _of_printed(text)


def _of_json(text: str) -> list[dict[str, Any]]:
    """trainer_state.json's log_history, a list of rows, or one row a line; [] where it is none of these."""
    try:
        found = json.loads(text)
        found = found.get("log_history", found.get("data", [found])) if isinstance(found, dict) else found
    except (ValueError, RecursionError):
        found = []
        for line in text.splitlines():
            try:
                found.append(json.loads(line))
            except (ValueError, RecursionError):
                continue
    return [row for row in found if isinstance(row, dict)] if isinstance(found, list) else []


def _of_printed(text: str) -> Iterator[dict[str, Any]]:
    """Lines that hold a dict of numbers, as transformers prints them, with or without quotes around the numbers."""
    for line in re.findall(r"\{[^{}]*'[^{}]*\}", text):
        try:
            row = ast.literal_eval(re.sub(r"(?<!['\w])-?\b(nan|inf)\b(?!')", r"'\1'", line))
        except (ValueError, SyntaxError):
            continue
        if isinstance(row, dict) and ({"reward", "loss"} & {*row}):
            yield row


def _of_output(output: dict[str, Any]) -> Iterator[dict[str, Any]]:
    """A cell's output: the table that transformers shows in a notebook, or printed lines."""
    text = output.get("text", "")
    yield from _of_printed(text if isinstance(text, str) else "".join(text))
    page = output.get("data", {}).get("text/html", "")
    page = page if isinstance(page, str) else "".join(page)
    if "<th" not in page or "reward" not in page:
        return
    heads = [_plain(cell) for cell in re.findall(r"<th[^>]*>(.*?)</th>", page, re.S)]
    for row in re.findall(r"<tr[^>]*>(.*?)</tr>", page, re.S):
        cells = [_plain(cell) for cell in re.findall(r"<td[^>]*>(.*?)</td>", row, re.S)]
        if len(cells) == len(heads):
            yield dict(zip(heads, cells, strict=True))


def _plain(cell: str) -> str:
    return html.unescape(re.sub(r"<[^>]+>", "", cell)).strip()


def _of_tensorboard(folder: Path) -> Iterator[dict[str, Any]]:
    if not any(folder.glob("**/events.out.tfevents.*")):
        return
    try:
        from tensorboard.backend.event_processing.event_accumulator import EventAccumulator
    except ImportError as error:
        raise LogError("TensorBoard's events need tensorboard: pip install tensorboard") from error
    for place in sorted({path.parent for path in folder.glob("**/events.out.tfevents.*")}):
        events = EventAccumulator(str(place), {"scalars": 0}).Reload()
        steps: dict[int, dict[str, float]] = {}
        for tag in events.Tags()["scalars"]:
            for scalar in events.Scalars(tag):
                steps.setdefault(scalar.step, {})[tag] = scalar.value
        yield from (
            {"run": str(place.relative_to(folder)), "step": step} | steps[step] for step in sorted(steps)
        )
