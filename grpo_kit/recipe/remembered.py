"""What a run folder keeps of its recipe, so that nobody has to say it again.

runs/<name>/recipe.json   every number of the recipe, and what its task is
            recipe.py     the Python file with the task, as it was when the run began
"""

from __future__ import annotations

import json
import os
import warnings
from pathlib import Path
from typing import Any

from grpo_kit.loop.grpo_config import FIELDS, as_json
from grpo_kit.presets import TABLE, preset
from grpo_kit.recipe.sources import Source
from grpo_kit.record.control import in_a_file
from grpo_kit.record.files import RunFolderError, holds_run, write_whole
from grpo_kit.tasks.same_task import task_digest

NUMBERS = {field for field, *_ in TABLE}  # what a preset sets
FILE, COPY = "recipe.json", "recipe.py"
# What a recipe says besides its task and its numbers.
PLAIN = (
    "tuning", "lora", "held_out_every", "held_out_rows", "optimizer", "keep", "on_flag", "report_to", "config",
)  # fmt: skip


def write(recipe: Any, folder: Path) -> None:
    """Keep a recipe in a run folder. Raises ValueError for a setting that no file can hold."""
    numbers = {name: as_json(getattr(recipe.cfg, name)) for name in sorted(NUMBERS)}
    task = recipe.make_task()
    source = recipe.home()
    data = {
        "task": {"name": task.name, "digest": task_digest(task)},
        "profile": recipe.cfg.preset,
        "numbers": numbers,
        "temperature": None if recipe.schedule is None else in_a_file(recipe.schedule),
        **{name: getattr(recipe, name) for name in PLAIN},
    }
    if source is not None:
        data["task"] |= {"file": _shown(source.path), "in_file": source.name}
    elif recipe.task is None or recipe.task_name:
        data["task"]["kit"] = recipe.cfg.task
    try:
        text = json.dumps(data, indent=2)
    except TypeError as error:
        raise ValueError(
            f"config={dict(recipe.config)!r} holds what no file can keep ({error}); use plain values"
        ) from error
    folder.mkdir(parents=True, exist_ok=True)
    if source is not None:
        write_whole(folder / COPY, source.text.encode())
    write_whole(folder / FILE, (text + "\n").encode())


def read(folder: Path) -> dict[str, Any]:
    """Recipe's arguments out of a run folder, `source` where its task is in the copy of a file.

    Without source and task["kit"] its task lived in memory. Raises RunFolderError where none is kept.
    """
    data = data_of(folder)
    numbers = {name: _tuples(value) for name, value in data["numbers"].items()}
    # Until version 0.3 a profile held a length that nobody had asked for; `follows` marks it. A task of the kit's was
    # made with that length, any other task had its own.
    if (follows := data.get("follows")) and numbers["max_completion_tokens"] == follows[2]:
        if not data["task"].get("kit"):
            numbers["max_completion_tokens"] = None
    for name in ("learning_rate", "dtype"):  # a profile held both kinds
        of_adapters = numbers.pop(f"lora_{name}", None)
        if of_adapters is not None and data["tuning"] != "full":
            numbers |= {name: of_adapters, "optimizer": None}
    if data["temperature"] is not None:
        del numbers["temperature"]
    cfg = preset(data["profile"], tuning=data["tuning"], **numbers)
    given = {"profile": cfg, "temperature": data["temperature"], **{name: data[name] for name in PLAIN}}
    given["config"] = _of_the_loop(folder, data)
    task = data["task"]
    if task.get("file"):
        copy = folder / COPY
        if not copy.is_file():
            raise RunFolderError(f"{copy}, the file with the run's task, is gone; put it back")
        text = copy.read_text(encoding="utf-8")
        given["source"] = Source(Path(task["file"]), task["in_file"], text)
    return given


def data_of(folder: Path) -> dict[str, Any]:
    """recipe.json. Raises RunFolderError, with words, where there is none."""
    path = folder / FILE
    if path.is_file():
        return json.loads(path.read_text(encoding="utf-8"))
    if not folder.is_dir():
        raise RunFolderError(f"{folder} is no folder; give a run's, such as runs/largest")
    what = "a run that no recipe made: say its task" if holds_run(folder) else "no run"
    raise RunFolderError(f"{folder} holds {what} (it has no {FILE})")


def check_same(folder: Path, task: Any) -> None:
    """Raises RunFolderError where a task is not the one that the run was begun with."""
    kept = data_of(folder)["task"]
    if task_digest(task) != kept["digest"]:
        how = f"the task {task.name!r} in {kept['file']}" if kept.get("file") else f"task {task.name!r}"
        raise RunFolderError(
            f"{how} is not what {folder} was begun with: its rows, prompt or rewards are others. Give the one that it "
            "was, or begin a new run"
        )


def _of_the_loop(folder: Path, data: dict[str, Any]) -> dict[str, Any]:
    """The config of the recipe; of an older run without what TRL's trainer alone took, which a warning names."""
    config = data["config"]
    if "options" not in data:
        return config
    kept = {name: value for name, value in config.items() if name in FIELDS and name not in NUMBERS}
    if left := {name: value for name, value in (config | data["options"]).items() if name not in kept}:
        warnings.warn(
            f"{folder} was trained by TRL's trainer, with {left!r}, which the recipe is read without; give the fields "
            "of kit.Config that do the same, or numbers of the profile",
            RuntimeWarning,
            stacklevel=4,
        )
    return kept


def _tuples(value: Any) -> Any:
    """As the profile had it: JSON knows lists alone."""
    if isinstance(value, dict):
        return {name: _tuples(one) for name, one in value.items()}
    return tuple(map(_tuples, value)) if isinstance(value, list) else value


def _shown(path: Path) -> str:
    """Relative to here where it lies below; a run folder that is passed on names no home."""
    inside = path.absolute().is_relative_to(Path.cwd())
    return os.path.relpath(path) if inside else str(path.absolute())
