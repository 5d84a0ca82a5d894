"""What a run is made from, its task, numbers and options, as a command line or a run's run.json says it."""

from __future__ import annotations

from contextlib import nullcontext, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from grpo_kit.literal_calls import value_from_text
from grpo_kit.loop.grpo_config import FIELDS, Config, check_fields, from_json
from grpo_kit.models.adapters import is_adapter
from grpo_kit.models.loading import load_policy
from grpo_kit.presets import preset as config_of
from grpo_kit.record.digests import checkpoints, last_whole
from grpo_kit.record.files import RunFolderError, run_settings
from grpo_kit.tasks import from_file
from grpo_kit.tasks.same_task import task_digest

# What the command line asks of a run besides its Config, and what it does where nothing is asked. run.json notes them.
OPTIONS = {"rank": None, "held_out_every": 8, "keep": "last", "on_flag": "warn", "report_to": []}


@dataclass
class Job:
    """A run's task, numbers and options."""

    task: Any
    config: Config
    options: dict[str, Any]

    @classmethod
    def asked(cls, task: Any, preset: str | None, values: dict[str, Any], **options: Any) -> Job:
        """Of a new run. task: a name of the kit's tasks, FILE.py, FILE.py:NAME, or a Task; None: the preset's.

        values: fields of Config. options: those of OPTIONS; None: its default.
        Raises ValueError naming the argument that does not fit.
        """
        options = OPTIONS | {name: value for name, value in options.items() if value is not None}
        if task is None or isinstance(task, str) and ".py" not in task:
            config = config_of(preset or "auto", **values | ({"task": task} if task else {}))
            return cls(config.make_task(), config, options)
        if isinstance(task, str):
            path, _, name = task.partition(".py:")
            task = from_file(f"{path}.py" if name else path, name or "task")
        config = config_of(preset or "auto", **values)
        return cls(config.cut(task), config, options)

    @classmethod
    def of_run(cls, folder: Path, task: Any = None, *, trains: bool = False) -> Job:
        """Of a run that is there, whoever began it. task: where run.json does not say it, or its file has gone; as in
        asked().

        trains: refuse a run whose schedule is a function of its notebook, which others need not read.
        Raises ValueError where the task is not found, and for one that is not the run's.
        """
        settings = run_settings(folder)
        if settings is None:
            raise RunFolderError(f"{folder} holds no run; give a run's folder, such as runs/largest")
        if "notes" not in settings:
            raise RunFolderError(
                f"{folder} holds a run of an older grpo_kit, which does not say its task; begin a new run, and if "
                f"it has a model, from that: --set model={folder / 'model'}"
            )
        values, known = {}, settings["task"]
        for name, value in settings["config"].items():
            with nullcontext() if trains else suppress(ValueError):
                values[name] = from_json(name, value, None)
        values["model"] = values["model"] or settings["model"]
        file, by_name = known["file"], values.pop("task")
        if task is None and file and not Path(file.rpartition(":")[0]).is_file():
            raise ValueError(
                f"the task of {folder} was made by {file}, which is not there: give --task my_task.py"
            )
        if (source := task or file or by_name) is None:
            raise ValueError(f"{folder} does not say where its task is: give --task my_task.py")
        options = {name: settings["notes"].get(name) for name in OPTIONS}
        job = cls.asked(source, values.pop("preset"), values, **options)
        if task_digest(job.task) != known["digest"]:
            raise RunFolderError(
                f"the task {job.task.name!r} is not the one that {folder} was begun with: its rows, prompt or rewards "
                "are others. Give the file as it was then by --task, or begin a new run"
            )
        return job

    def change(self, asked: dict[str, Any]) -> None:
        """Other numbers for a run that goes on. Raises ValueError for what a run keeps that was begun."""
        free = [name for name, each in FIELDS.items() if each.metadata["changes"]]
        for name, value in asked.items():
            if name in free:
                setattr(self.config, name, value)
            elif name == "on_flag":
                self.options[name] = value
            else:
                raise ValueError(
                    f"{name}={value!r} is for a new run; what can change: --on-flag, and --set of {', '.join(free)}"
                )

    def policy(self, trained: Path | None = None) -> tuple[Any, Any]:
        """Model and tokenizer: the base, with new adapters where some are trained, or what a run trained."""
        config, tuning, rank = self.config, self.config.tuning or "full", self.options["rank"]
        if trained is not None:
            tuning = ("lora" if tuning == "full" else tuning) if is_adapter(str(trained)) else "full"
        return load_policy(
            trained or config.model, tuning=tuning, dtype=config.dtype, seed=config.seed, quiet=True,
            lora=None if trained or rank is None else {"r": rank, "lora_alpha": 2 * rank},
        )  # fmt: skip


def settings_of(texts: list[str]) -> dict[str, Any]:
    """The values of --set NAME=VALUE. Raises ValueError, with the nearest name, for what is no setting.

    >>> settings_of(["steps=24", "temperature=linear(1.2, 0.8)"])
    {'steps': 24, 'temperature': linear(1.2, 0.8)}
    """
    found = {}
    for text in texts:
        name, there, value = text.partition("=")
        if not there or not name.strip():
            raise ValueError(f"--set {text}: write it as NAME=VALUE, such as steps=24")
        check_fields({name: value})
        try:
            found[name] = value_from_text(value)
        except ValueError:  # a name, or a schedule
            found[name] = from_json(name, value, None)
    return found


def model_in(folder: Path) -> tuple[Path, str]:
    """The place of a run's model, and what it is in words. A damaged checkpoint is passed over by name.

    Raises ValueError where there is none yet, or none that is whole.
    """
    for name in ("model", "adapter"):
        if (folder / name).is_dir():
            return folder / name, "the trained model"
    if not checkpoints(folder):
        raise ValueError(
            f"{folder} has no model and no checkpoint yet; grpo-kit watch {folder} says how far it is"
        )
    checkpoint = last_whole(folder)
    return checkpoint, f"half trained: the checkpoint of step {checkpoint.name.rpartition('-')[2]}"
