"""The logged rows of a run of anybody, under the record's names; the runs of a file that holds several.

Logs of TRL, notebooks with stored outputs, tables, TensorBoard's events.
"""

import ast
import csv
import html
import json
import math
import re
from collections.abc import Iterable, Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any

import pandas as pd

# TRL's, what its loggers and notebooks make of them, verl's and OpenRLHF's: the record's
_NAMES = {
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
# What loggers put in front of a held-out measure.
_HELD_OUT = re.compile(r"(eval|val|test)[/_]", re.I)
# what else is no log of a run has none of
_OF_A_RUN = {"reward", "reward_std", "kl", "grad_norm"}
# columns that say whose row it is
_RUNS = ("run", "run_id", "run_name", "run name", "name", "experiment")
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
    # name -> unit -> first and last of its last run
    spans: dict[str, dict[str, tuple[float, float]]] = {}
    numbers: dict[str, int] = {}  # name -> how many runs so far
    for row in _rows(path):
        for name, values in _by_run(row).items():
            numbers.setdefault(name, 1)
            unit = "step" if "step" in values else "epoch"
            place = _number(values.get(unit))
            if place is not None:
                span = spans.setdefault(name, {})
                first, last = span.get(unit, (place, place))
                if place <= first and place < last:  # it begins anew
                    numbers[name] += 1
                    span.clear()
                    first = place
                span[unit] = first, place
            rows_of.setdefault(_run_name(name, numbers[name]), []).append(values)
    tables = {name: table_of(rows) for name, rows in rows_of.items()}
    return {name: table for name, table in tables.items() if not _OF_A_RUN.isdisjoint(table)}


def _run_name(name: str, number: int) -> str:
    """What a log's run is called. name: its own, or ""; number: of the runs under that name."""
    if not name:
        return f"run {number}"
    if number == 1:
        return name
    return f"{name}, run {number}"


def _by_run(row: dict[str, Any]) -> dict[str, dict[str, Any]]:
    """A logged row's values by the record's names, for each run that it has values of."""
    labels = [str(row[name]) for name in row if str(name).lower() in _RUNS and row[name]]
    label = labels[0] if labels else ""
    runs: dict[str, dict[str, Any]] = {}
    for name, value in row.items():
        run = str(name).rpartition(" - ")[0]
        if value not in ("", None) and not str(name).lower().endswith(_EXTREMES):
            runs.setdefault(run, {})[_name(name)] = value
    shared = runs.pop("", {})
    if not runs:
        return {label: shared}
    return {name: shared | values for name, values in runs.items()}


def table_of(rows: Iterable[dict[str, Any]]) -> pd.DataFrame:
    """Logged rows as one table by the record's names, a row a step; rows without a step are numbered in their order.

    >>> table_of([{"train/rewards/right/mean": 0.5, "train/global_step": 3}]).to_dict("records")
    [{'step': 3, 'reward/right': 0.5}]
    """
    steps: dict[int, dict[str, float]] = {}
    for number, row in enumerate(rows, 1):
        values = {_name(name): _number(value) for name, value in row.items()}
        step = values.pop("step", None)
        values = {name: value for name, value in values.items() if value is not None}
        if not values:
            continue
        logged = steps.setdefault(number if step is None else int(step), {})
        for name, value in values.items():
            if name not in logged or not math.isnan(value):
                logged[name] = value
    table = pd.DataFrame([{"step": step} | steps[step] for step in sorted(steps)])
    # A spread is of all groups, or not known to be of any.
    if "reward_std" in table and "frac_reward_zero_std" not in table:
        table["frac_reward_zero_std"] = (table["reward_std"].abs() < 1e-9).astype(float)
    if "completion_length" in table and "completion_cut_off" not in table:
        length = table["completion_length"]
        longest = length.max()
        is_longest = length == longest
        is_shorter = length < longest
        # A mean that is so often the longest is the limit; one that never changes may be a habit.
        is_tokens = longest >= _LONG and longest % 1 == 0
        if is_tokens and is_longest.sum() >= _AT_MOST and is_shorter.any():
            table["completion_cut_off"] = is_longest.astype(float)
    return table


def _name(name: Any) -> str:
    """The record's name of a column.

    >>> [_name(column) for column in ("rewards / right", "run-7 - train/kl", "train/rewards/right/mean")]
    ['reward/right', 'kl', 'reward/right']
    """
    column = str(name).rpartition(" - ")[2].strip()
    text = re.sub(r"\s*/\s*", "/", column).removeprefix("train/")
    held_out = _HELD_OUT.match(text)
    if held_out:
        return f"eval/{_name(text[held_out.end() :])}"
    if text.startswith("rewards/") and not text.endswith("/std"):
        return "reward/" + text.removeprefix("rewards/").removesuffix("/mean")
    if not text.startswith("rewards/"):
        text = text.lower()
    return _NAMES.get(text, text)


def _number(value: Any) -> float | None:
    """The value as a number; None if it is none."""
    if isinstance(value, bool):
        return None
    try:
        return float(str(value).replace(",", ""))
    except ValueError:
        return None


def _rows(path: Path) -> Iterator[dict[str, Any]]:
    """The logged rows of a file or a folder."""
    if path.is_dir():
        states = sorted(
            path.glob("**/trainer_state.json"), key=lambda state: state.stat().st_mtime
        )
        newest: dict[str, tuple[Path, list]] = {}
        # checkpoints of one run begin alike, and the last of them has all rows
        for state in reversed(states):
            history = list(_rows(state))
            newest.setdefault(repr(history[:1]), (state, history))
        for state, history in reversed(newest.values()):
            run = str(state.parent.relative_to(path))
            for row in history:
                yield {"run": run} | row
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
        log = json.loads(text)
    except (ValueError, RecursionError):
        log = _of_json_lines(text)
    if isinstance(log, dict):
        log = log.get("log_history", log.get("data", [log]))
    if not isinstance(log, list):
        return []
    return [row for row in log if isinstance(row, dict)]


def _of_json_lines(text: str) -> list[Any]:
    """The value of each line that is JSON."""
    values = []
    for line in text.splitlines():
        with suppress(ValueError, RecursionError):
            values.append(json.loads(line))
    return values


def _of_printed(text: str) -> Iterator[dict[str, Any]]:
    """Lines that hold a dict of numbers, as transformers prints them, with or without quotes around the numbers."""
    for line in re.findall(r"\{[^{}]*'[^{}]*\}", text):
        try:
            row = ast.literal_eval(re.sub(r"(?<!['\w])-?\b(nan|inf)\b(?!')", r"'\1'", line))
        except (ValueError, SyntaxError):
            continue
        if isinstance(row, dict) and ("reward" in row or "loss" in row):
            yield row


def _of_output(output: dict[str, Any]) -> Iterator[dict[str, Any]]:
    """A cell's output: the table that transformers shows in a notebook, or printed lines."""
    yield from _of_printed("".join(output.get("text", "")))
    page = "".join(output.get("data", {}).get("text/html", ""))
    if "<th" not in page or "reward" not in page:
        return
    heads = _cells(page, "th")
    for row in re.findall(r"<tr[^>]*>(.*?)</tr>", page, re.S):
        cells = _cells(row, "td")
        if len(cells) == len(heads):
            yield dict(zip(heads, cells, strict=True))


def _cells(page: str, tag: str) -> list[str]:
    """The texts of a page's cells. tag: th or td."""
    cells = re.findall(rf"<{tag}[^>]*>(.*?)</{tag}>", page, re.S)
    return [html.unescape(re.sub(r"<[^>]+>", "", cell)).strip() for cell in cells]


def _of_tensorboard(folder: Path) -> Iterator[dict[str, Any]]:
    runs = sorted({path.parent for path in folder.glob("**/events.out.tfevents.*")})
    if not runs:
        return
    try:
        from tensorboard.backend.event_processing.event_accumulator import EventAccumulator
    except ImportError as error:
        raise LogError(
            "TensorBoard's events need tensorboard: pip install tensorboard"
        ) from error
    for run in runs:
        events = EventAccumulator(str(run), {"scalars": 0}).Reload()
        steps: dict[int, dict[str, float]] = {}
        for tag in events.Tags()["scalars"]:
            for scalar in events.Scalars(tag):
                steps.setdefault(scalar.step, {})[tag] = scalar.value
        name = str(run.relative_to(folder))
        for step in sorted(steps):
            yield {"run": name, "step": step} | steps[step]
