"""A recipe's whole run: what notebook 05 does, without the notebook, and from wherever it was stopped."""

from __future__ import annotations

import json
import os
import shutil
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from accelerate import PartialState
from accelerate.utils import broadcast_object_list

from grpo_kit.evaluation.accuracy import Evaluation, evaluate
from grpo_kit.evaluation.comparison import Comparison, compare
from grpo_kit.evaluation.readiness import readiness
from grpo_kit.loop.interrupts import Stopped
from grpo_kit.models import is_adapter, load_policy
from grpo_kit.recipe import remembered
from grpo_kit.record.files import KEPT, RunFolderError, holds_run, next_run_folder, read_metrics, write_whole
from grpo_kit.record.run_lock import alone
from grpo_kit.training.checkpoints import last_whole_checkpoint
from grpo_kit.training.checks import to_go_on
from grpo_kit.training.disk import weight_bytes
from grpo_kit.watch.held_out_words import HOW_TO_KEEP, better_before
from grpo_kit.watch.run_card import model_card

MODEL, BEFORE, AFTER, RESULTS = "model", "before.json", "after.json", "results.json"
_LOOKED_AT = 32  # questions that readiness asks


class StoppedByFlag(Stopped):
    """A red flag ended the run, where on_flag="stop"."""


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

    def __init__(self, recipe: Any, folder: Path, *, first: bool, live: bool | None) -> None:
        self.recipe, self.folder, self.first, self.live = recipe, folder, first, live
        self.task = recipe.make_task()
        self.state = PartialState()

    def say(self, text: str) -> None:
        if self.first and self.live is not None:
            print(text, flush=True)

    def evaluated(self, name: str, model: Any, tokenizer: Any) -> Evaluation | None:
        """What the model scores; asked once, then read from the folder. The others wait for the first."""
        made = None
        if self.first:
            path = self.folder / name
            if not path.is_file():
                size = self.recipe.cfg.eval_batch
                evaluate(model, tokenizer, self.task, batch_size=size).save(path)
            made = Evaluation.load(path)
        self.state.wait_for_everyone()
        return made

    def look(self, model: Any, tokenizer: Any) -> None:
        """Is there anything to learn from? As in the notebook it is told, and decides nothing."""
        if not self.first or self.live is None:
            return
        size = self.recipe.cfg.group_size
        rows = self.task.train[: min(_LOOKED_AT, len(self.task.held_out))]
        heat = self.recipe.schedule(0.0) if self.recipe.schedule else self.recipe.cfg.temperature
        ready = readiness(
            model,
            tokenizer,
            self.task,
            rows=rows,
            samples=size,
            group_size=size,
            temperature=heat,
            quiet=True,
        )
        self.say(f"{'GO' if ready.verdict == 'ready' else 'CHANGE SOMETHING FIRST'}  {ready.reason}")

    def trainer(self, policy: tuple[Any, Any], *, resume: bool) -> Any:
        """Made before anything is measured: what is wrong with its settings is said at once."""
        with to_go_on() if resume else nullcontext():
            return self.recipe.trainer(self.folder, policy=policy, live=self.live)

    def train(self, trainer: Any, tokenizer: Any, *, resume: bool) -> None:
        """Train to the end, and keep the model, whole or not at all."""
        trainer.train(resume_from_checkpoint=resume or None)
        if trainer.stopped_by is not None:
            step = trainer.state.global_step
            raise StoppedByFlag(f"Stopped after step {step} by a red flag, {trainer.stopped_by.name}.", step)
        part = self.folder / f".{MODEL}"
        trainer.save_model(str(part))
        if self.first:
            tokenizer.save_pretrained(part)
            self._set_aside()
            os.replace(part, self.folder / MODEL)
        self.state.wait_for_everyone()

    def room_for(self, model: Any) -> None:
        """Weights that could not be saved would be lost at the run's end; that is said before it."""
        needed, free = weight_bytes(model), shutil.disk_usage(self.folder).free
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
        results: dict[str, Any] = {"profile": cfg.name, "model": cfg.model, "task": self.task.name}
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


def run(recipe: Any, folder: str | os.PathLike | None, *, resume: bool, live: bool | None) -> Outcome:
    """See Recipe.run."""
    recipe.grpo_config(folder or "runs")  # joins the other processes, if there are any
    first = PartialState().is_main_process
    task = recipe.make_task()
    chosen = folder if folder is not None else next_run_folder("runs", task.name) if first else None
    folder = Path(broadcast_object_list([chosen])[0]) if PartialState().num_processes > 1 else Path(chosen)
    with _alone_in(folder, first=first):
        one = _Run(recipe, folder, first=first, live=live)
        begun = _begin(recipe, folder, task, resume=resume) if first else None
        one.state.wait_for_everyone()
        del begun
        return _whole(one)


def _whole(one: _Run) -> Outcome:
    recipe, folder = one.recipe, one.folder
    checkpoint = last_whole_checkpoint(folder, digests=False)  # train() reads it all
    trained = (folder / MODEL).is_dir() and _steps_done(folder) >= recipe.cfg.steps
    one.say(f"{recipe}\n{'Going on with' if checkpoint or trained else 'Training into'} {folder}")
    base = recipe.policy(quiet=not one.first or one.live is None)
    trainer = None if trained else one.trainer(base, resume=checkpoint is not None)
    if not trained:
        one.room_for(trainer.model)
        if checkpoint is None:
            one.look(*base)
    before = one.evaluated(BEFORE, *base)
    if before is not None:
        one.say(f"Before: {before.sentence}")
    if trained:
        model, tokenizer = base if (folder / AFTER).is_file() else _load(folder / MODEL)
    else:
        one.train(trainer, base[1], resume=checkpoint is not None)
        model, tokenizer = trainer.accelerator.unwrap_model(trainer.model), base[1]
    after = one.evaluated(AFTER, model, tokenizer)
    if before is None or after is None:
        return Outcome(folder)
    one.tell(before, after)
    outcome = Outcome(folder, before, after)
    one.say(str(outcome.comparison))
    if not (folder / KEPT).is_file() and (said := better_before(read_metrics(folder))):
        one.say(f"{said} {HOW_TO_KEEP}")
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
        shutil.rmtree(folder / f".{MODEL}", ignore_errors=True)
        remembered.write(recipe, folder, None)
        return
    kept = remembered.data_of(folder)
    if kept["made_by"]:
        raise RunFolderError(f"{folder} is trained by {kept['made_by']}; go on with that: --resume")
    remembered.check_same(folder, task)
    for name in ("tuning", "lora"):
        if (mine := getattr(recipe, name)) != kept[name]:
            raise RunFolderError(
                f"{name}={mine!r}, but {folder} was begun with {kept[name]!r}, which a run cannot change"
            )
    for name in ("model", "group_size", "prompts_per_step", "seed", "dtype", "lora_dtype"):
        if (mine := getattr(recipe.cfg, name)) != kept["numbers"][name]:
            raise RunFolderError(
                f"{name}={mine!r}, but {folder} was begun with {kept['numbers'][name]!r}, which a run cannot change"
            )
    done = _steps_done(folder)
    if holds_run(folder) and last_whole_checkpoint(folder, digests=False) is None:
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
    remembered.write(recipe, folder, None)


def _steps_done(folder: Path) -> int:
    steps = read_metrics(folder)["step"]
    return int(steps.max()) if len(steps) else 0


@contextmanager
def _alone_in(folder: Path, *, first: bool) -> Iterator[None]:
    """The folder is this run's; one in which nothing happened goes, so that its name is free."""
    if not first:
        yield
        return
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
