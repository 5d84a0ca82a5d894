"""A recipe's whole run: what notebook 05 does, without the notebook, and from wherever it was stopped."""

from __future__ import annotations

import json
import os
import shutil
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from peft import PeftModel

from grpo_kit.cuda import own_device
from grpo_kit.evaluation.accuracy import Evaluation, evaluate
from grpo_kit.evaluation.comparison import Comparison, compare
from grpo_kit.evaluation.readiness import readiness
from grpo_kit.loop.checkpoint import newest_whole
from grpo_kit.loop.processes import Processes
from grpo_kit.models import is_adapter, load_policy
from grpo_kit.recipe import remembered
from grpo_kit.record.files import (
    KEPT,
    REDONE,
    RUN,
    RunFolderError,
    has_metrics,
    holds_run,
    next_run_folder,
    read_metrics,
    write_whole,
)
from grpo_kit.record.lines import COMPLETIONS_LINES, METRICS_LINES
from grpo_kit.record.run_lock import alone
from grpo_kit.watch.run_card import model_card

MODEL, BEFORE, AFTER, RESULTS = "model", "before.json", "after.json", "results.json"
_LOOKED_AT = 32  # questions that readiness asks


@dataclass(frozen=True, repr=False)
class Outcome:
    """What a run came to. Made by Recipe.run; in the other processes of several its evaluations are None.

    folder: the run's. before, after: of the held-out rows, greedily. comparison: the two side by side.
    """

    folder: Path
    before: Evaluation | None = field(default=None)
    after: Evaluation | None = field(default=None)

    @property
    def comparison(self) -> Comparison:
        """Base beside tuned, with a paired test."""
        return compare(self.before, self.after)

    @property
    def model(self) -> Path:
        """The trained model's folder, for load_policy."""
        return self.folder / MODEL

    def _repr_html_(self) -> str:
        return self.comparison._repr_html_() if self.before is not None else f"kept in {self.folder}"

    def __repr__(self) -> str:
        found = f"{self.comparison!r}\n" if self.before is not None else ""
        return f"{found}kept in {self.folder}"


class _Run:
    """One process's part of a run."""

    def __init__(self, recipe: Any, folder: Path, processes: Processes, live: bool | None) -> None:
        self.recipe, self.folder, self.processes, self.live = recipe, folder, processes, live
        self.first, self.task = processes.is_main, recipe.make_task()

    def say(self, text: str) -> None:
        if self.first and self.live is not None:
            print(text, flush=True)

    def evaluated(self, name: str, model: Any, tokenizer: Any) -> Evaluation | None:
        """What the model scores; asked once, then read from the folder. The others wait for the first."""
        path = self.folder / name

        def make() -> None:
            if not path.is_file():
                size = self.recipe.cfg.eval_batch
                evaluate(model, tokenizer, self.task, batch_size=size).save(path)

        self.processes.from_main(make)
        return Evaluation.load(path) if self.first else None

    def look(self, model: Any, tokenizer: Any) -> None:
        """Is there anything to learn from? As in the notebook it is told, and decides nothing."""
        if not self.first or self.live is None:
            return
        size = self.recipe.cfg.group_size
        rows = self.task.train[: min(_LOOKED_AT, len(self.task.held_out))]
        heat = self.recipe.schedule(0.0) if self.recipe.schedule else self.recipe.cfg.temperature
        how = {"rows": rows, "samples": size, "group_size": size, "temperature": heat, "quiet": True}
        ready = readiness(model, tokenizer, self.task, **how)
        self.say(f"{'GO' if ready.verdict == 'ready' else 'CHANGE SOMETHING FIRST'}  {ready.reason}")

    def train(self, trainer: Any, *, resume: bool) -> None:
        """Train to the end, and keep the model, whole or not at all."""
        trainer.train(resume=resume)
        part = self.folder / f".{MODEL}"

        def keep() -> None:
            shutil.rmtree(part, ignore_errors=True)  # of a run that was killed here
            trainer.save_model(part)
            self._set_aside()
            os.replace(part, self.folder / MODEL)

        self.processes.from_main(keep)

    def room_for(self, model: Any) -> None:
        """Weights that could not be saved would be lost at the run's end; that is said before it."""
        adapters, free = isinstance(model, PeftModel), shutil.disk_usage(self.folder).free
        needed = sum(p.nbytes for p in model.parameters() if p.requires_grad or not adapters)
        if needed > free:
            raise RunFolderError(
                f"{self.folder}: {free / 1e9:.1f} GB are free on its disk, and the trained model needs "
                f"{needed / 1e9:.1f} GB; make room, or give a folder on another disk"
            )

    def _set_aside(self) -> None:
        """What a shorter run left, which went on: nothing is overwritten."""
        if not (self.folder / MODEL).is_dir():
            return
        steps = json.loads((self.folder / RESULTS).read_text())["steps"] if self._has(RESULTS) else "earlier"
        for name in (MODEL, AFTER, RESULTS):
            if self._has(name):
                stem, dot, kind = name.partition(".")
                os.replace(self.folder / name, self.folder / f"{stem}-{steps}{dot}{kind}")

    def _has(self, name: str) -> bool:
        return (self.folder / name).exists()

    def tell(self, before: Evaluation, after: Evaluation) -> None:
        """The card, and results.json as notebook 05 writes it."""
        recipe, cfg = self.recipe, self.recipe.cfg
        import resource  # a Windows has none

        rows = read_metrics(self.folder)
        peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 2**20
        if torch.cuda.is_available():
            peak = torch.cuda.max_memory_reserved() / 2**30
        results: dict[str, Any] = {"profile": cfg.preset, "model": cfg.model, "task": self.task.name}
        results |= {"tuning": recipe.tuning, "seed": cfg.seed, "n": before.n}
        steps = int(rows["step"].max())
        results |= {"steps": steps, "of_steps": max(steps, cfg.steps), "interrupted": False}
        results |= {"train_seconds": float(rows["seconds"].iloc[-1]), "peak_gib": peak}
        found = compare(before, after)
        results |= told_of(found)
        kept = self.folder / KEPT
        results["weights_of_step"] = json.loads(kept.read_text())["step"] if kept.is_file() else steps
        model_card(self.folder, found)
        write_whole(self.folder / RESULTS, json.dumps(results, indent=2).encode())


def run(
    recipe: Any, folder: str | os.PathLike | None, *, resume: bool, live: bool | None, **seams: Any
) -> Outcome:
    """See Recipe.run."""
    recipe.trackers()  # before anything is loaded: one may not be installed
    processes, task = Processes(recipe.cfg.prompts_per_step, own_device()), recipe.make_task()
    folder = processes.from_main(lambda: Path(folder or next_run_folder("runs", task.name)))
    with ExitStack() as stack:
        processes.from_main(lambda: stack.enter_context(_alone_in(folder)))
        processes.from_main(lambda: _begin(recipe, folder, task, resume=resume))
        return _whole(_Run(recipe, folder, processes, live), **seams)


def _whole(one: _Run, **seams: Any) -> Outcome:
    recipe, folder = one.recipe, one.folder
    done = one.processes.from_main(lambda: _steps_done(folder))
    trained = one.processes.from_main((folder / MODEL).is_dir) and done >= recipe.cfg.steps
    one.say(f"{recipe}\n{'Going on with' if done else 'Training into'} {folder}")
    base = recipe.policy(quiet=not one.first or one.live is None)
    trainer = (
        None
        if trained
        else recipe.trainer(folder, policy=base, live=one.live if one.first else None, **seams)
    )
    if not trained:
        one.processes.from_main(lambda: one.room_for(trainer.model))
        if not done:
            one.look(*base)
    before = one.evaluated(BEFORE, *base)
    if before is not None:
        one.say(f"Before: {before.sentence}")
    if trained:
        model, tokenizer = base if (folder / AFTER).is_file() else _load(folder / MODEL)
    else:
        one.train(trainer, resume=done > 0)
        model, tokenizer = trainer.model, base[1]
    after = one.evaluated(AFTER, model, tokenizer)
    if before is None or after is None:
        return Outcome(folder)
    one.tell(before, after)
    outcome = Outcome(folder, before, after)
    one.say(str(outcome.comparison))
    return outcome


def _begin(recipe: Any, folder: Path, task: Any, *, resume: bool) -> None:
    """Keep the recipe in a new run's folder, or see that it is the one that the folder was begun with."""
    if not resume:
        if holds_run(folder) or (folder / remembered.FILE).exists():
            raise RunFolderError(
                f"{folder} holds a run already, and no run is overwritten. The next free name is "
                f"{next_run_folder(folder.parent, folder.name)}; or go on with it: run(folder, resume=True), "
                f"grpo-kit train --resume {folder}"
            )
        remembered.write(recipe, folder)
        return
    kept = remembered.data_of(folder)
    remembered.check_same(folder, task)
    for name in ("tuning", "lora"):
        if (mine := getattr(recipe, name)) != kept[name]:
            raise RunFolderError(
                f"{name}={mine!r}, but {folder} was begun with {kept[name]!r}, which a run cannot change"
            )
    for name in ("model", "group_size", "prompts_per_step", "seed", "dtype"):
        if (mine := getattr(recipe.cfg, name)) != kept["numbers"][name]:
            raise RunFolderError(
                f"{name}={mine!r}, but {folder} was begun with {kept['numbers'][name]!r}, which a run cannot change"
            )
    if has_metrics(folder) and not (folder / METRICS_LINES).exists():
        raise RunFolderError(
            f"{folder} was trained by TRL's trainer, whose checkpoints the kit's cannot go on from; begin a new run "
            f"with its recipe: grpo-kit train {folder}"
        )
    done = _steps_done(folder)
    if done and newest_whole(folder, digests=False) is None:
        if not (folder / MODEL).is_dir():
            raise RunFolderError(
                f"{folder} has no checkpoint to go on from: it was killed before one was saved. Begin anew under "
                "another name"
            )
        if done < recipe.cfg.steps:
            raise RunFolderError(
                f"steps={recipe.cfg.steps}, but {folder} ended with step {done} and kept no checkpoint (save_steps) to "
                f"go on from; begin a new run from its weights: model={str(folder / MODEL)!r}"
            )
    if not done:
        _begin_over(folder)
    remembered.write(recipe, folder)


def _begin_over(folder: Path) -> None:
    """A run that was stopped inside its first step begins again; what it wrote is set aside."""
    for name in (RUN, METRICS_LINES, COMPLETIONS_LINES, "flags.jsonl"):
        if (folder / name).exists():
            (folder / REDONE).mkdir(exist_ok=True)
            os.replace(folder / name, next_run_folder(folder / REDONE, name))


def _steps_done(folder: Path) -> int:
    steps = read_metrics(folder)["step"]
    return int(steps.max()) if len(steps) else 0


@contextmanager
def _alone_in(folder: Path) -> Iterator[None]:
    """The folder is this run's; one in which nothing happened goes, so that its name is free."""
    made = not folder.exists()
    folder.mkdir(parents=True, exist_ok=True)
    try:
        with alone(folder):
            yield
    finally:
        own = {remembered.FILE, remembered.COPY}
        if made and folder.is_dir() and {path.name for path in folder.iterdir()} <= own:
            for name in own:
                (folder / name).unlink(missing_ok=True)
            folder.rmdir()


def _load(folder: Path) -> tuple[Any, Any]:
    return load_policy(folder, tuning="lora" if is_adapter(str(folder)) else "full", quiet=True)


def told_of(found: Comparison) -> dict[str, Any]:
    """What results.json says of a comparison: before, after and the best constant, with the measure's interval."""
    measure = "accuracy" if found.leads == "strict" else "reward"
    told: dict[str, Any] = {"measure": measure}
    for name, one in (("before", found.base), ("after", found.tuned)):
        e = (one.rates | one.rewards)[found.leads]
        accuracy = {} if one.strict is None else {"accuracy": one.strict.value}
        told[name] = accuracy | {measure: e.value, "low": e.low, "high": e.high}
    if found.constant is not None:
        told["best_constant"] = dict(zip(("name", measure), found.constant, strict=True))
    return told | {"no_better": found.no_better}
