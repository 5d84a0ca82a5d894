"""What a run is made from: its task, preset, numbers and options, as a command line or command.json of a run says."""

from __future__ import annotations

import json
import os
from dataclasses import dataclass
from difflib import get_close_matches
from pathlib import Path
from typing import Any

from grpo_kit.literal_calls import value_from_text
from grpo_kit.loop.checkpoint import newest_whole
from grpo_kit.loop.grpo_config import FIELDS, Config, from_json
from grpo_kit.models.adapters import is_adapter
from grpo_kit.models.loading import load_policy
from grpo_kit.presets import preset as config_of
from grpo_kit.record.files import COMMAND, RunFolderError, holds_run, run_settings, write_whole
from grpo_kit.tasks import from_file
from grpo_kit.tasks.same_task import task_digest

# What a run does where nothing is asked.
OPTIONS = {
    "rank": None,
    "held_out_every": 8,
    "keep": "last",
    "on_flag": "warn",
    "report_to": [],
}


@dataclass
class Job:
    """A run's task, numbers and options. where: {"kit": name}, or {"file": path, "name": name in it}."""

    task: Any
    where: dict[str, str]
    config: Config
    options: dict[str, Any]

    @classmethod
    def asked(cls, task: str | None, preset: str | None, values: dict[str, Any], **options: Any) -> Job:
        """Of a new run. task: a name of the kit's tasks, FILE.py or FILE.py:NAME. values: see settings_of.

        Raises ValueError naming the argument that does not fit.
        """
        options = {name: value for name, value in options.items() if value is not None}
        values = values | {"tuning": options.pop("tuning")} if "tuning" in options else values
        options, file = OPTIONS | options, bool(task) and ".py" in task
        config = config_of(preset or "auto", **values | ({"task": task} if task and not file else {}))
        if not file:
            return cls(config.make_task(), {"kit": config.task}, config, options)
        path, _, name = task.partition(".py:")
        where = {"file": f"{path}.py" if name else path, "name": name or "task"}
        return cls(config.cut(from_file(where["file"], where["name"])), where, config, options)

    @classmethod
    def of_run(cls, folder: Path, *, task: str | None = None, preset: str | None = None) -> Job:
        """Of a run that is there. task, preset: where its folder does not say them, such as a notebook's.

        Raises ValueError where the task is not found, and for one that is not the run's.
        """
        if not (folder / COMMAND).is_file():
            settings = run_settings(folder) if holds_run(folder) else None
            if settings is None or "model" not in settings:
                raise RunFolderError(f"{folder} holds no run; give a run's folder, such as runs/largest")
            if task is None:
                raise ValueError(
                    f"{folder} was not made by grpo-kit train and does not say where its task is: give --task "
                    "my_task.py, or a name of the kit's tasks and --preset"
                )
            return cls.asked(task, preset, {"model": settings["model"]})
        kept = json.loads((folder / COMMAND).read_text(encoding="utf-8"))
        where, told = kept["task"], task is not None
        if not told and "file" in where:
            path = os.path.normpath(folder / where["file"])
            if not Path(path).is_file():
                raise ValueError(
                    f"the task of {folder} was made by {path}, which is not there: give --task my_task.py"
                )
            task = f"{path}:{where['name']}"
        values = {name: from_json(name, value, None) for name, value in kept["config"].items()}
        by_name = values.pop("task")
        job = cls.asked(task or by_name, values.pop("preset"), values, **kept["options"])
        if task_digest(job.task) != where["digest"]:
            raise RunFolderError(
                f"the task {job.task.name!r} is not the one that {folder} was begun with: its rows, prompt or rewards "
                "are others. Give the file as it was then by --task, or begin a new run"
            )
        return job

    def change(self, values: dict[str, Any], **options: Any) -> None:
        """Other numbers for a run that goes on. Raises ValueError for what a run keeps that was begun."""
        free = [name for name, each in FIELDS.items() if each.metadata["changes"]]
        self.options["on_flag"] = options.pop("on_flag") or self.options["on_flag"]
        fixed = [f"--{name.replace('_', '-')}" for name, value in options.items() if value is not None]
        if fixed := [*fixed, *(f"--set {name}" for name in values if name not in free)]:
            raise ValueError(
                f"{fixed[0]} is for a new run; what can change: --on-flag, and --set of {', '.join(free)}"
            )
        for name, value in values.items():
            setattr(self.config, name, value)

    def save(self, folder: Path) -> None:
        """Write command.json. A task's file below here is named from the folder, so that both may move together."""
        where, here = dict(self.where), Path.cwd()
        if "file" in where:
            path = Path(where["file"]).expanduser().resolve()
            near = path.is_relative_to(here) and folder.resolve().is_relative_to(here)
            where["file"] = os.path.relpath(path, folder.resolve()) if near else str(path)
        data = {
            "task": where | {"digest": task_digest(self.task)},
            "options": self.options,
            "config": self.config.values(),
        }
        write_whole(folder / COMMAND, (json.dumps(data, indent=2) + "\n").encode())

    def policy(self, trained: Path | None = None) -> tuple[Any, Any]:
        """Model and tokenizer: the base, with new adapters where some are trained, or what a run trained."""
        config, tuning, rank = self.config, self.config.tuning, self.options["rank"]
        if trained is not None:
            tuning = ("lora" if tuning == "full" else tuning) if is_adapter(str(trained)) else "full"
        return load_policy(
            trained or config.model, tuning=tuning, dtype=config.dtype, seed=config.seed, quiet=True,
            lora=None if trained or rank is None else {"r": rank, "lora_alpha": 2 * rank},
        )  # fmt: skip

    def __str__(self) -> str:
        c = self.config
        return (
            f"{c.model} on {self.task.name}, {c.tuning}, {c.steps} steps of {c.prompts_per_step} x {c.group_size} "
            f"completions, temperature {c.temperature!r}, seed {c.seed}; preset {c.preset} ({c.why('preset')})"
        )


def settings_of(texts: list[str]) -> dict[str, Any]:
    """The values of --set NAME=VALUE. Raises ValueError, with the nearest name, for what is no setting.

    >>> settings_of(["steps=24", "temperature=linear(1.2, 0.8)"])
    {'steps': 24, 'temperature': linear(1.2, 0.8)}
    """
    found, known = {}, [*FIELDS]
    for text in texts:
        name, there, value = text.partition("=")
        if not there:
            raise ValueError(f"--set {text}: write it as NAME=VALUE, such as steps=24")
        if name not in known:
            near = get_close_matches(name, known, 1, 0.0)[0]
            raise ValueError(f"--set {text}: kit.Config has no {name!r}; the nearest is {near!r}")
        try:
            found[name] = value_from_text(value)
        except ValueError:  # a name, or a schedule
            found[name] = from_json(name, value, None)
    return found


def model_in(folder: Path) -> tuple[Path, str]:
    """The place of a run's model, and what it is in words. Raises ValueError where there is none yet."""
    for name in ("model", "adapter"):
        if (folder / name).is_dir():
            return folder / name, "the trained model"
    if (checkpoint := newest_whole(folder)) is None:
        raise ValueError(
            f"{folder} has no model and no checkpoint yet; grpo-kit watch {folder} says how far it is"
        )
    return checkpoint, f"half trained: the checkpoint of step {checkpoint.name.rpartition('-')[2]}"
