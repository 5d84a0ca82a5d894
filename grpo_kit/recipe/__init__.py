"""A recipe: everything of a run named once, for the notebook, the command line and several processes.

sources.py reads the Python file that a recipe or a task stands in, remembered.py keeps a recipe in its run folder,
run_recipe.py does the whole run.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping, Sequence
from dataclasses import KW_ONLY, dataclass, field, replace
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any

from grpo_kit import trackers
from grpo_kit.argument_checks import check_choice, check_whole
from grpo_kit.episodes.episode_task import EpisodeTask
from grpo_kit.evaluation.held_out import HeldOut
from grpo_kit.hooks.standard import GRPOTrainer
from grpo_kit.loop.grpo_config import Config
from grpo_kit.models import load_policy
from grpo_kit.models.adapters import Tuning
from grpo_kit.presets import preset
from grpo_kit.recipe import remembered
from grpo_kit.recipe.run_recipe import Outcome, run
from grpo_kit.recipe.sources import Source, as_task, check_not_reading, home_of
from grpo_kit.record.control import in_a_file
from grpo_kit.schedules import schedule_from
from grpo_kit.tasks.same_task import task_digest

if TYPE_CHECKING:
    from grpo_kit.loop.hooks import Hook
    from grpo_kit.tasks import Task

Schedule = Callable[[float], float]


@dataclass(frozen=True)
class Recipe:
    """Everything of one run: what is trained, on what, and how.

    task: a name of the kit's tasks ("largest"), a Task or a function that makes one, or a Python file that defines
    `task` ("my_task.py", or "my_task.py:NAME"). None: the profile's.
    profile: its name, or one with numbers of your own: kit.preset("cpu", group_size=16). It is chosen when the recipe
    is made. model, steps, learning_rate (of whatever is tuned), seed: None means the profile's.
    tuning, lora: as load_policy takes them. temperature: a number, or a schedule of the kit's.
    held_out_every: steps between two looks at `held_out_rows` held-out rows while it trains; None: none.
    optimizer: as Config takes it. keep, on_flag: as GRPOTrainer takes them. report_to: a tracker's name, or several.
    config: the fields of Config that no preset sets, such as {"iterations": 2}.
    cfg: the Config with all of this in it.
    Raises ValueError naming what does not fit.

    >>> Recipe("largest", profile="cpu", temperature=kit.linear(1.2, 0.8)).run("runs/mine")  # doctest: +SKIP
    """

    task: Any = None
    _: KW_ONLY
    profile: str | Config = "auto"
    model: str | None = None
    tuning: Tuning = "full"
    lora: Mapping[str, Any] | None = None
    steps: int | None = None
    learning_rate: float | None = None
    temperature: float | str | Schedule | None = None
    seed: int | None = None
    held_out_every: int | None = 8
    held_out_rows: int = 64
    optimizer: str | None = None
    keep: str = "last"
    on_flag: str = "warn"
    report_to: str | Sequence[str] = "none"
    config: Mapping[str, Any] = field(default_factory=dict)
    source: Source | None = field(default=None, repr=False, compare=False)

    def __post_init__(self) -> None:
        check_choice("tuning", self.tuning, ("full", "lora", "qlora"))
        if self.lora and self.tuning == "full":
            raise ValueError(f"lora={dict(self.lora)!r} has no effect with tuning='full'; use tuning='lora'")
        check_choice("on_flag", self.on_flag, ("warn", "stop"))
        check_choice("keep", self.keep, ("last", "best"))
        if self.keep == "best" and self.held_out_every is None:
            raise ValueError(
                "keep='best', but held_out_every=None looks at no held-out rows while it trains; give the steps "
                "between two looks, such as held_out_every=8"
            )
        for name in ("held_out_every", "held_out_rows"):
            value = getattr(self, name)
            if value is not None:
                check_whole(name, value)
        for name in remembered.NUMBERS & self.config.keys():
            raise ValueError(
                f"config has {name}={self.config[name]!r}, which the profile has: profile=kit.preset(name, {name}=...)"
            )
        in_a_file(self.schedule)
        self.make_config()  # says what is wrong with a number
        for name in self._report_to:
            check_choice("report_to", name, trackers.TRACKERS)

    # ---- what it is -----------------------------------------------------------------------------------------------

    @cached_property
    def cfg(self) -> Config:
        """The preset, with the recipe's own numbers in it."""
        names = ("model", "tuning", "steps", "learning_rate", "seed", "optimizer")
        own = {name: getattr(self, name) for name in names} | {"task": self.task_name}
        own |= {"temperature": self.schedule or self.temperature}
        return preset(self.profile, **{n: v for n, v in own.items() if v is not None} | dict(self.config))

    @property
    def schedule(self) -> Schedule | None:
        """The temperature's schedule; None where it is a number."""
        if isinstance(self.temperature, str):
            return schedule_from(self.temperature)
        return self.temperature if callable(self.temperature) else None

    @property
    def task_name(self) -> str | None:
        """The name of the kit's task that it is on; None for one of your own, and where the profile says it."""
        own = self.source is not None or not isinstance(self.task, str) or ".py" in self.task
        return None if own else self.task

    def make_task(self) -> Task | EpisodeTask:
        """What is trained on; the same object each time."""
        return self._made

    @cached_property
    def _made(self) -> Task | EpisodeTask:
        if (source := self._file) is not None:
            where, value = f"`{source.name}` in {source.path}", source.value()
            return value.make_task() if isinstance(value, Recipe) else as_task(value, where)
        if self.task is None or isinstance(self.task, str):
            return self.cfg.make_task()
        return as_task(self.task() if callable(self.task) else self.task, "task")

    @cached_property
    def _file(self) -> Source | None:
        """The file that its task was said to stand in."""
        if self.source is None and isinstance(self.task, str) and self.task_name is None:
            return Source.of(self.task)
        return self.source

    def home(self) -> Source | None:
        """The Python file with its task, if there is one."""
        if self._file is not None or self.task is None or self.task_name is not None:
            return self._file
        found = home_of(self, self.task)
        if found is None:
            return None
        try:  # a file that is read without what stands around it may make nothing, or something else
            made = found.value()
            made = made.make_task() if isinstance(made, Recipe) else made
            return found if task_digest(made) == task_digest(self.make_task()) else None
        except (ValueError, AttributeError):
            return None

    @classmethod
    def of(cls, where: str | os.PathLike, **changed: Any) -> Recipe:
        """The recipe of a Python file that defines `recipe` or `task`, or of a run folder. changed: other values.

        Raises ValueError where there is none, and for a run whose task lived in memory alone and is not given.

        >>> Recipe.of("runs/mine", seed=1).run("runs/mine-again")  # doctest: +SKIP
        """
        if not Path(where).is_dir():
            source = Source.of(where)
            found = source.value()
            if not isinstance(found, Recipe):
                as_task(found, f"`{source.name}` in {source.path}")
                found = cls()
            if found.task_name is None and changed.get("task") is None:
                changed = {**changed, "task": found.task, "source": found._file or source}
            return replace(found, **changed)
        kept = remembered.data_of(Path(where))["task"]
        given = (
            remembered.read(Path(where))
            | ({"source": None} if changed.get("task") is not None else {})
            | changed
        )
        if not kept.get("kit") and given.get("source") is None and given.get("task") is None:
            raise ValueError(
                f"the task {kept['name']!r} of {where} lived in memory alone; give it, or a Python file that makes it: "
                "task='my_task.py'"
            )
        return cls(**given)

    # ---- what it does ---------------------------------------------------------------------------------------------

    def make_config(self) -> Config:
        """The numbers of the run, for a trainer; a new Config each time."""
        return preset(self.cfg)

    def trackers(self) -> list[Hook]:
        """The trackers that report_to names, as hooks. Raises ValueError for one that is not installed."""
        return [trackers.by_name(name) for name in self._report_to]

    @property
    def _report_to(self) -> list[str]:
        names = [self.report_to] if isinstance(self.report_to, str) else self.report_to
        return [name for name in names if name != "none"]

    def policy(self, *, quiet: bool = False) -> tuple[Any, Any]:
        """The model to train, and its tokenizer."""
        return load_policy(
            self.cfg.model,
            tuning=self.tuning,
            dtype=self.cfg.dtype,
            lora=self.lora,
            seed=self.cfg.seed,
            quiet=quiet,
        )

    def trainer(
        self,
        folder: str | os.PathLike,
        *,
        policy: tuple[Any, Any] | None = None,
        live: bool | None = True,
        sample: Any = None,
        update: Any = None,
    ) -> GRPOTrainer:
        """The trainer of this run.

        policy: model and tokenizer, as policy() gives them; None loads them. live, sample, update: see GRPOTrainer.
        """
        config, task, telling = self.make_config(), self.make_task(), self.trackers()
        model, tokenizer = policy or self.policy(quiet=live is None)
        held_out = None
        if self.held_out_every is not None:
            rows = min(self.held_out_rows, len(task.held_out))
            held_out = HeldOut(task, rows=rows, every=self.held_out_every)
        return GRPOTrainer(
            model, task, config, tokenizer=tokenizer, folder=folder, held_out=held_out, keep=self.keep, live=live,
            on_flag=self.on_flag, sample=sample, update=update, hooks=telling,
        )  # fmt: skip

    def run(
        self,
        folder: str | os.PathLike | None = None,
        *,
        resume: bool = False,
        live: bool | None = True,
        sample: Any = None,
        update: Any = None,
    ) -> Outcome:
        """The whole run, as notebook 05 has it: readiness, accuracy before, training, accuracy after, model and card.

        folder: None takes the next free one below runs/, named after the task. resume: go on with the run that is
        there, from where it stopped: before, while or after it trained. live, sample, update: see GRPOTrainer.
        Under several processes (torchrun) all train, the first evaluates, writes and prints.
        Raises Stopped (a KeyboardInterrupt) after the stop button or Ctrl-C and after a red flag with on_flag="stop",
        RunFolderError for a folder that holds a run, or none to resume, and what GRPOTrainer raises.
        """
        check_not_reading()
        return run(self, folder, resume=resume, live=live, sample=sample, update=update)

    def __str__(self) -> str:
        made = vars(self).get("_made")  # asked for, a task may take long to make
        own = made.name if made is not None else "its own task"
        task = self.task_name or (self.cfg.task if self.task is None and not self._file else own)
        heat = repr(self.schedule) if self.schedule else f"{self.cfg.temperature:g}"
        return (
            f"{self.cfg.model} on {task}, {self.tuning}, {self.cfg.steps} steps of {self.cfg.prompts_per_step} x "
            f"{self.cfg.group_size} completions, temperature {heat}, seed {self.cfg.seed}; profile {self.cfg.preset} "
            f"({self.cfg.reasons['preset'][1]})"
        )
