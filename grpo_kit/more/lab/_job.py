"""What a run is made from, its task, numbers and options, as a command line or a run's run.json says it."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

from grpo_kit.loop.config import FIELDS, Preset, from_json
from grpo_kit.models._adapters import is_adapter
from grpo_kit.models.loading import load_policy
from grpo_kit.more.code._literal_calls import value_from_text
from grpo_kit.more.tasks.from_file import from_file
from grpo_kit.record._digests import checkpoints, file_digest, last_whole
from grpo_kit.record._lines import RUN
from grpo_kit.record.files import RunFolderError, run_settings
from grpo_kit.tasks._same_task import task_digest
from grpo_kit.trainer.presets import preset as config_of

# What the command line asks of a run besides its Config, and what it does where nothing is asked. run.json notes them.
OPTIONS = {
    "rank": None,
    "held_out_every": 8,
    "keep": "last",
    "on_flag": "warn",
    "report_to": [],
}


@dataclass
class Job:
    """A run's task, numbers and options."""

    task: Any
    config: Preset
    options: dict[str, Any]

    @classmethod
    def asked(cls, task: Any, values: dict[str, Any]) -> Job:
        """Of a new run. task: a name of the kit's tasks, FILE.py, FILE.py:NAME, or a Task; None: the preset's.

        values: fields of Preset, without "preset" what this machine can run, and some of OPTIONS.
        Raises ValueError naming the argument that does not fit.
        """
        options = {name: values.get(name, default) for name, default in OPTIONS.items()}
        fields = {name: value for name, value in values.items() if name not in OPTIONS}
        if isinstance(task, str) and ".py" not in task:
            fields["task"], task = task, None
        elif isinstance(task, str):
            task = from_file(task)
        config = config_of(fields.pop("preset", None) or "auto", **fields)
        task = config.make_task() if task is None else config.cut(task)
        return cls(task, config, options)

    @classmethod
    def of_run(
        cls, folder: Path, task: Any = None, changes: dict[str, Any] | None = None
    ) -> Job:
        """Of a run that is there, whoever began it. task: as in asked(). Without it run.json's, by name or by its file,
        which is run only where it has the SHA-256 of then, and lies in no run folder.

        changes: of a run that goes on, with {} too: fields that may change in a run, and on_flag. None: of one that
        does not, so that a schedule need not be read that is a function of its notebook.
        Raises ValueError where the task is not found, for one that is not the run's, and for what cannot change.
        """
        settings = run_settings(folder)
        if settings is None:
            raise RunFolderError(
                f"{folder} holds no run; give a run's folder, such as runs/largest"
            )
        values, task_settings = {}, settings["task"]
        for name, value in settings["config"].items():
            try:
                values[name] = from_json(name, value, None)
            except ValueError:
                if changes is not None:
                    raise
        values["model"] = values["model"] or settings["model"]
        file, task_name = str(task_settings["file"] or ""), values.pop("task")
        source = task or file or task_name
        if source is None:
            raise ValueError(
                f"the task of {folder} is nowhere in its run.json: give --task my_task.py"
            )
        if (
            not task
            and file
            and (reason := _why_not_run(file, folder, task_settings.get("sha256")))
        ):
            raise RunFolderError(
                f"the task of {folder} was made by {file}, {reason}: give --task my_task.py"
            )
        changes = changes or {}
        changeable = [name for name, field in FIELDS.items() if field.metadata["changes"]] + [
            "on_flag"
        ]
        fixed = [
            f"{name}={value!r}" for name, value in changes.items() if name not in changeable
        ]
        if fixed:
            raise ValueError(
                f"{', '.join(fixed)} is for a new run; what can change: {', '.join(changeable)}"
            )
        options = {name: value for name, value in settings["notes"].items() if name in OPTIONS}
        job = cls.asked(source, values | options | changes)
        if task_digest(job.task) != task_settings["digest"]:
            raise RunFolderError(
                f"the task {job.task.name!r} is not the one that {folder} was begun with: its rows, prompt or rewards "
                "are others. Give the file as it was then by --task, or begin a new run"
            )
        return job

    def policy(self, trained: Path | None = None) -> tuple[Any, Any]:
        """Model and tokenizer: the base, with new adapters where some are trained, or what a run trained."""
        config, rank = self.config, self.options["rank"]
        options = {"dtype": config.dtype, "seed": config.seed, "quiet": True}
        tuning = config.tuning or "full"
        if trained is None:
            lora = rank and {"r": rank, "lora_alpha": 2 * rank}
            return load_policy(config.model, tuning=tuning, lora=lora, **options)
        if not is_adapter(str(trained)):
            tuning = "full"
        elif tuning == "full":
            tuning = "lora"
        return load_policy(trained, tuning=tuning, **options)


def _why_not_run(file: str, folder: Path, digest: str | None) -> str | None:
    """Why the file is not run that a run folder names as its task's; None where it has the digest."""
    path = Path(file.rpartition(":")[0]).absolute()
    if any((parent / RUN).is_file() for parent in [*path.parents, *path.resolve().parents]):
        return "which lies in a run folder, where nothing is run"
    if not path.is_file():
        return "which is not there"
    return (
        None
        if file_digest(path) == digest
        else f"which is not the one that {folder} was begun with"
    )


def settings_of(texts: list[str] | None) -> dict[str, Any]:
    """The values of --set NAME=VALUE, if any. Raises ValueError for what is none, or no schedule.

    >>> settings_of(["steps=24", "temperature=linear(1.2, 0.8)"])
    {'steps': 24, 'temperature': linear(1.2, 0.8)}
    """
    values = {}
    for text in texts or ():
        name, sign, value = text.partition("=")
        if not name or not sign:
            raise ValueError(f"--set {text}: write it as NAME=VALUE, such as steps=24")
        try:
            values[name] = value_from_text(value)
        except ValueError:  # a name, or a schedule
            values[name] = from_json(name, value, None)
    return values


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
    return (
        checkpoint,
        f"half trained: the checkpoint of step {checkpoint.name.rpartition('-')[2]}",
    )
