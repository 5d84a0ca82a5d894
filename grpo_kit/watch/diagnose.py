"""The red flags on a run of anybody: logs of TRL, notebooks with stored outputs, tables, TensorBoard's events.

A log is brought under the record's names (`_NAMES`) and asked by the same flags as a run of the kit. What a flag reads
and the log lacks is said.
"""

from __future__ import annotations

import ast
import csv
import html
import json
import math
import os
import re
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pandas as pd

from grpo_kit.record.files import has_metrics, read_metrics, run_settings
from grpo_kit.watch.flags import Flag
from grpo_kit.watch.monitor import red_flags

_NAMES = {  # TRL's, and what its loggers and notebooks make of them: the record's
    "training loss": "loss",
    "completions/mean_length": "completion_length",
    "completions/clipped_ratio": "completion_cut_off",
    "clip_ratio/region_mean": "clip_ratio",
    "sampling/sampling_logp_difference/mean": "rollout/logprob_gap",
    "global_step": "step",
    "_step": "step",
}
_NEEDS = {  # flag: the columns that it reads, any of a tuple
    "KL spike": ["kl"],
    "gradient spike": ["grad_norm"],
    "cancelling parts": ["frac_cancelled_groups"],
    "hacking": ["reward", "a held-out measure or a part of weight 0"],
    "length explosion": ["completion_length"],
    "cut off": ["completion_cut_off"],
    "language switch": ["the completions"],
    "sampler gap": ["rollout/logprob_gap"],
    "stale rollouts": ["clip_ratio"],
    "part never paid": ["reward/..."],
    "entropy collapse": ["entropy", "reward"],
    "mode collapse": ["the completions"],
    "sparse reward": ["frac_reward_zero_std", "reward"],
    "one answer": ["the answers to held-out questions"],
}
_FIFTH = 5  # the first and the last fifth of the steps are compared
# A log without the share that was cut off shows it where the mean length is the log's longest in 5 steps: then all of
# these completions took as many tokens. Short answers may do so by themselves.
_AT_MOST, _LONG = 5, 64


class LogError(ValueError):
    """A file or folder that holds no log of a run, and what would do."""


@dataclass(frozen=True, repr=False)
class Diagnosis:
    """What a log says of its run. Made by diagnose().

    source: where it was read. metrics: one row a step, by the record's names. flags: the red flags, first step first.
    untold: flag -> the columns that it needs and the log lacks.
    """

    source: str
    metrics: pd.DataFrame
    flags: list[Flag]
    untold: dict[str, list[str]]

    @property
    def sentence(self) -> str:
        """Steps, the reward of the first and last fifth of them, and the share of steps without any signal."""
        rewards = self.metrics["reward"].dropna() if "reward" in self.metrics else pd.Series(dtype=float)
        said = f"{self.source}: {len(self.metrics)} logged steps"
        if len(rewards) >= 2 * _FIFTH:
            some = len(rewards) // _FIFTH
            first, last = rewards.iloc[:some].mean(), rewards.iloc[-some:].mean()
            parts = (rewards.iloc[:some], rewards.iloc[-some:])
            noise = 2 * math.hypot(*(part.std(ddof=1) / math.sqrt(some) for part in parts))
            change = (
                "within the noise of a step"
                if abs(last - first) <= noise
                else "up"
                if last > first
                else "DOWN"
            )
            said += f"; reward {first:.3g} in the first fifth, {last:.3g} in the last: {change}"
        if "reward_std" in self.metrics and len(spread := self.metrics["reward_std"].dropna()):
            said += f"; {(spread.abs() < 1e-9).mean():.0%} of steps without any spread of rewards"
        return f"{said}."

    def __repr__(self) -> str:
        lines = [self.sentence, *(f"- {flag}" for flag in self.flags)]
        if not self.flags:
            lines.append("No red flag of those that this log can show.")
        if self.untold:
            lines.append("Cannot be told from this log:")
            lines += [f"  {name} (needs {' and '.join(columns)})" for name, columns in self.untold.items()]
        return "\n".join(lines)

    def _repr_html_(self) -> str:
        flags = "".join(
            f"<li><b>{html.escape(f.brief)}</b><br>{html.escape(f.why)} First try: {html.escape(f.first)}</li>"
            for f in self.flags
        )
        lacks = html.escape(", ".join(self.untold) or "nothing")
        return f"<p>{html.escape(self.sentence)}</p><ul>{flags}</ul><p>Cannot be told from this log: {lacks}.</p>"


def diagnose(log: str | os.PathLike) -> Diagnosis:
    """The red flags of a run that anybody trained, from its log: what was seen, since which step, what to try.

    log: a run folder of the kit; a trainer_state.json of transformers, or a folder with one (a checkpoint, an output
    folder); a notebook with stored outputs; a text with TRL's printed lines; a CSV, JSON or JSON Lines table, such as
    W&B's and trackio's exports; a folder with TensorBoard's events.
    A flag lasts for some rows of the log: where every tenth step was logged it needs ten times the steps.
    Raises LogError for a log without steps.

    >>> kit.diagnose("outputs/checkpoint-500/trainer_state.json")  # doctest: +SKIP
    """
    path = Path(log).expanduser()
    if not path.exists():
        raise LogError(f"log={str(log)!r} does not exist; give a file or a folder")
    settings: dict[str, Any] = {}
    if path.is_dir() and has_metrics(path):
        metrics, settings = read_metrics(path), run_settings(path) or {}
    else:
        metrics = table_of(_rows(path))
    if metrics.empty or not {"reward", "reward_std", "kl", "grad_norm"} & {*metrics}:
        raise LogError(
            f"log={str(log)!r} holds no steps of a run with a reward; known are run folders, trainer_state.json, "
            "notebooks, printed TRL lines, CSV, JSON, JSON Lines and TensorBoard's events"
        )
    flags = red_flags(metrics, settings)
    if (
        not settings
    ):  # in such logs every part counts; their highest scores are not known, so other flags go by the sum
        parts = [str(name).removeprefix("reward/") for name in metrics if str(name).startswith("reward/")]
        weighed = red_flags(metrics, {"reward_parts": parts, "reward_weights": [1.0] * len(parts)})
        flags += [flag for flag in weighed if flag.name == "part never paid"]
        flags.sort(key=lambda flag: flag.step)
    untold = {}
    for name, needs in _NEEDS.items():
        lacks = [one for one in needs if not _has(metrics, one)]
        if lacks and name not in {flag.name for flag in flags}:
            untold[name] = lacks
    return Diagnosis(path.name, metrics, flags, untold)


def _has(metrics: pd.DataFrame, needed: str) -> bool:
    stands_for = {
        "reward/...": "reward/",
        "the completions": "diversity/",
        "the answers to held-out questions": "eval/one_answer",
        "a held-out measure or a part of weight 0": "eval/",
    }
    start = stands_for.get(needed)
    return needed in metrics if start is None else any(str(name).startswith(start) for name in metrics)


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
            steps.setdefault(number if step is None else int(step), {}).update(values)
    table = pd.DataFrame([{"step": step} | steps[step] for step in sorted(steps)])
    if (
        "reward_std" in table and "frac_reward_zero_std" not in table
    ):  # of all groups, or not known to be of any
        table["frac_reward_zero_std"] = (table["reward_std"].abs() < 1e-9).astype(float)
    if "completion_length" in table and "completion_cut_off" not in table:
        longest = table["completion_length"].max()
        at_most = table["completion_length"] == longest
        if longest >= _LONG and at_most.sum() >= _AT_MOST:
            table["completion_cut_off"] = at_most.astype(
                float
            )  # a mean that is so often the longest is the limit
    return table


def _name(name: Any) -> str:
    """The record's name of a column.

    >>> [_name(one) for one in ("rewards / right", "run-7 - train/kl", "Training Loss", "train/rewards/right/mean")]
    ['reward/right', 'kl', 'loss', 'reward/right']
    """
    text = re.sub(r"\s*/\s*", "/", str(name).rpartition(" - ")[2].strip())
    text = text.removeprefix("train/")
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
        if states:
            yield from _rows(states[-1])
        else:
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
            row = ast.literal_eval(re.sub(r"\b(nan|inf)\b", "None", line))
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
        for tag in events.Tags()["scalars"]:
            yield from ({"step": one.step, tag: one.value} for one in events.Scalars(tag))
