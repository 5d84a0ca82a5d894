"""What a run is made from, its task, numbers and options, as a command line or a run's run.json says it."""

from __future__ import annotations

from contextlib import nullcontext, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from grpo_kit._support.literal_calls import value_from_text
from grpo_kit.loop.config import FIELDS, Preset, from_json
from grpo_kit.models._saved_adapters import is_adapter
from grpo_kit.models.loading import load_policy
from grpo_kit.record._digests import checkpoints, file_digest, last_whole
from grpo_kit.record._lines import RUN
from grpo_kit.record.files import RunFolderError, run_settings
from grpo_kit.tasks import from_file
from grpo_kit.tasks._same_task import task_digest
from grpo_kit.trainer.presets import preset as config_of

# What the command line asks of a run besides its Config, and what it does where nothing is asked. run.json notes them.
OPTIONS = {"rank": None, "held_out_every": 8, "keep": "last", "on_flag": "warn", "report_to": []}


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
        values = {name: value for name, value in values.items() if name not in OPTIONS}
        named = isinstance(task, str) and ".py" not in task
        values |= {"task": task} if named else {}
        config = config_of(values.pop("preset", None) or "auto", **values)
        if task is None or named:
            return cls(config.make_task(), config, options)
        return cls(config.cut(from_file(task) if isinstance(task, str) else task), config, options)

    @classmethod
    def of_run(cls, folder: Path, task: Any = None, changes: dict[str, Any] | None = None) -> Job:
        """Of a run that is there, whoever began it. task: as in asked(). Without it run.json's, by name or by its file,
        which is run only where it has the SHA-256 of then, and lies in no run folder.

        changes: of a run that goes on, with {} too: fields that may change in a run, and on_flag. None: of one that
        does not, so that a schedule need not be read that is a function of its notebook.
        Raises ValueError where the task is not found, for one that is not the run's, and for what cannot change.
        """
        settings = run_settings(folder)
        if settings is None:
            raise RunFolderError(f"{folder} holds no run; give a run's folder, such as runs/largest")
        values, known = {}, settings["task"]
        for name, value in settings["config"].items():
            with suppress(ValueError) if changes is None else nullcontext():
                values[name] = from_json(name, value, None)
        values["model"] = values["model"] or settings["model"]
        file, by_name = str(known["file"] or ""), values.pop("task")
        source = task or file or by_name
        if source is None:
            raise ValueError(f"the task of {folder} is nowhere in its run.json: give --task my_task.py")
        if not task and file and (why := _why_not_run(file, folder, known.get("sha256"))):
            raise RunFolderError(f"the task of {folder} was made by {file}, {why}: give --task my_task.py")
        free = [*(name for name, each in FIELDS.items() if each.metadata["changes"]), "on_flag"]
        if fixed := [f"{name}={value!r}" for name, value in (changes or {}).items() if name not in free]:
            raise ValueError(f"{', '.join(fixed)} is for a new run; what can change: {', '.join(free)}")
        noted = {name: value for name, value in settings["notes"].items() if name in OPTIONS}
        job = cls.asked(source, values | noted | (changes or {}))
        if task_digest(job.task) != known["digest"]:
            raise RunFolderError(
                f"the task {job.task.name!r} is not the one that {folder} was begun with: its rows, prompt or rewards "
                "are others. Give the file as it was then by --task, or begin a new run"
            )
        return job

    def policy(self, trained: Path | None = None) -> tuple[Any, Any]:
        """Model and tokenizer: the base, with new adapters where some are trained, or what a run trained."""
        config, rank = self.config, self.options["rank"]
        tuning, lora = config.tuning or "full", rank and {"r": rank, "lora_alpha": 2 * rank}
        if trained is not None:
            lora, adapters = None, "lora" if tuning == "full" else tuning
            tuning = adapters if is_adapter(str(trained)) else "full"
        return load_policy(
            trained or config.model, tuning=tuning, dtype=config.dtype, lora=lora, seed=config.seed, quiet=True,
        )  # fmt: skip


def _why_not_run(file: str, folder: Path, digest: str | None) -> str | None:
    """Why the file is not run that a run folder names as its task's; None where it has the digest."""
    path = Path(file.rpartition(":")[0]).absolute()
    if any((parent / RUN).is_file() for place in (path, path.resolve()) for parent in place.parents):
        return "which lies in a run folder, where nothing is run"
    if not path.is_file():
        return "which is not there"
    return None if file_digest(path) == digest else f"which is not the one that {folder} was begun with"


def settings_of(texts: list[str] | None) -> dict[str, Any]:
    """The values of --set NAME=VALUE, if any. Raises ValueError for what is none, or no schedule.

    >>> settings_of(["steps=24", "temperature=linear(1.2, 0.8)"])
    {'steps': 24, 'temperature': linear(1.2, 0.8)}
    """
    found = {}
    for text in texts or ():
        name, there, value = text.partition("=")
        if not name or not there:
            raise ValueError(f"--set {text}: write it as NAME=VALUE, such as steps=24")
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
