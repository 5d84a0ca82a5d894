"""The model card of a run: model, data, reward, and results."""

import json
import math
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pandas as pd

from grpo_kit._support import __version__
from grpo_kit.record._lines import read_json
from grpo_kit.record._run_folder import path_of
from grpo_kit.record.files import KEPT, RunFolderError, read_metrics, run_settings, write_whole
from grpo_kit.watch._red_flag import ACCURACY, arguments_of
from grpo_kit.watch._run_state import (
    CONSTANT,
    RunState,
    better_before,
    change_line,
    leading,
    no_better,
)

_AVERAGED = 3  # steps at either end of the curve


def model_card(
    folder: str | Path, comparison: object | None = None, *, null: object | None = None
) -> Path:
    """Write README.md into a run folder, from its files; returns its path. A later call replaces the card.

    comparison: of base and tuned (grpo_kit.compare), printed as it prints. Without it the card has the run's own
    held-out accuracy, or states that none was measured. null: the comparison of the same run with shuffled rewards
    (grpo_kit.lab.null); the card then has the gain beside it (Comparison.beside).
    Raises RunFolderError (a ValueError) if the folder has no run.json, and ValueError for a null without a comparison.

    >>> model_card("runs/full", comparison, null=null_comparison)  # doctest: +SKIP
    """
    if null is not None:
        for name, value in (("comparison", comparison), ("null", null)):
            if not hasattr(value, "beside"):
                raise ValueError(
                    f"{name}={value!r:.100} is no comparison; kit.compare(base, tuned) makes one"
                )
        comparison = f"{comparison}\n{comparison.beside(null)}."
    target = path_of(folder) / "README.md"
    write_whole(target, card_text(folder, comparison).encode())
    return target


def card_text(
    folder: str | Path,
    comparison: object | None = None,
    *,
    base: str | None = None,
    license: str | None = None,
    library: str | None = None,
) -> str:
    """The text of model_card. license: of the base, for the head. library: that loads it; None: by kind of training.

    base: of a model that need not be of a run: where the folder holds none, the card is head, name and comparison.
    """
    path = path_of(folder)
    config = run_settings(path)
    if config is None and base is None:
        raise RunFolderError(
            f"folder={str(folder)!r} holds no run; give a run's folder, like 'runs/full'."
        )
    if config is None:
        sections = [_head(base, license, library), f"# {path.name}"]
        if comparison:
            sections.append(f"```\n{comparison}\n```")
        return "\n\n".join(sections) + "\n"
    metrics = read_metrics(path)
    if library is None:
        library = (
            "peft" if config["trainable_parameters"] < config["parameters"] else "transformers"
        )
    sections = [
        _head(config.get("model"), license, library),
        f"# {path.name}",
        f"Trained with GRPO by grpo_kit {__version__}.",
        _table(config, metrics),
        "## Reward while training",
        _curve(metrics),
        "## Before and after",
        _before_and_after(metrics, comparison, config),
    ]
    better = better_before(metrics)
    if (path / KEPT).is_file():
        best = read_json(path / KEPT, names={"value": int | float})
        sections.append(
            f"The weights are those of step {best['step']} of {best['of']}, the best held-out {best['by']} "
            f"({best['value']:.3f}); chosen among several evaluations, that number is a little too good."
        )
    elif better:
        sections.append(f"{better} The weights are the last step's.")
    run = RunState.read(path)
    changes = [change_line(change) for change in run.changes]
    for title, entries in (("Changed on the way", changes), ("Red flags", run.flags)):
        if entries:
            sections.append(f"## {title}")
            sections.append("\n".join(f"- {entry}" for entry in entries))
    return "\n\n".join(sections) + "\n"


def _head(base: str | None, license: str | None, library: str | None) -> str:
    fields = {
        "license": license,
        "base_model": base and json.dumps(base),
        "library_name": library,
    }
    lines = [f"{name}: {value}" for name, value in fields.items() if value]
    return "\n".join(["---", *lines, "tags: [grpo, grpo_kit]", "---"])


def _table(config: Mapping[str, Any], metrics: pd.DataFrame) -> str:
    args = arguments_of(config)
    rate = args["learning_rate"]
    if not isinstance(rate, str):
        rate = f"{rate:g}"
    data = [f"{name} {value}" for name, value in (config.get("data") or {}).items()]
    weights = zip(config["reward_parts"], config["reward_weights"], strict=False)
    share = config["trainable_parameters"] / config["parameters"]
    command = config.get("command")
    rows = {
        "base": config.get("model") or "a model made in memory",
        "trained before": config.get("starts_from"),
        "parameters": f"{config['parameters'] / 1e6:.1f} M, {share:.1%} of them trained",
        "data": ", ".join(data) or None,
        "reward": ", ".join(f"{name} x {weight:g}" for name, weight in weights),
        "steps": int(metrics["step"].max()) if len(metrics) else 0,
        "learning rate": f"{rate}, {args['lr_scheduler_type']}",
        "temperature": config.get("temperature_schedule") or args["temperature"],
        "beta": args["beta"],
        "optimizer": config["optimizer"],
        "seed": args.get("seed"),
        "device": config["device"],
        "command": f"`{command}`" if command else None,
    }
    lines = [f"| {name} | {value} |" for name, value in rows.items() if value is not None]
    return "\n".join(["| | |", "|---|---|", *lines])


def _curve(metrics: pd.DataFrame) -> str:
    if "reward" not in metrics:
        return "No step was done."
    trained = metrics[metrics["reward"].notna() & (metrics["step"] > 0)]
    if trained.empty:
        return "No step was done."
    count = min(_AVERAGED, len(trained))
    names = ["reward", *(name for name in trained if str(name).startswith("reward/"))]
    lines = [f"| | first {count} steps | last {count} steps |", "|---|---|---|"]
    for name in names:
        first = trained[name].head(count).mean()
        last = trained[name].tail(count).mean()
        lines.append(f"| {name} | {first:.3f} | {last:.3f} |")
    return "\n".join(lines)


def _before_and_after(
    metrics: pd.DataFrame, comparison: object | None, config: Mapping[str, Any]
) -> str:
    if comparison is not None:
        return f"```\n{comparison}\n```"
    name = leading(metrics)
    if name is None:
        return "Not measured in this folder."
    rows = metrics[metrics[name].notna()]
    unit = ""
    scale = 1
    digits = 3
    if name == ACCURACY:
        unit = " %"
        scale = 100
        digits = 1
    points = []
    for row in (rows.iloc[0], rows.iloc[-1]):
        point = f"step {int(row['step'])}: {scale * row[name]:.{digits}f}{unit}"
        low, high = (row.get(f"{name}{end}", math.nan) for end in ("_low", "_high"))
        if not math.isnan(low + high):
            point += f" [{scale * low:.{digits}f}, {scale * high:.{digits}f}]"
        points.append(point)
    lead = ""
    last = rows.iloc[-1]
    if name == ACCURACY and no_better(last):
        strategy = (config.get("best_constant") or {}).get("strategy", "a constant answer")
        lead = f"No better than {strategy} ({100 * last[CONSTANT]:.1f} %). "
    return f"{lead}Held-out {name.removeprefix('eval/')}, greedy, 95 % interval: {' -> '.join(points)}."
