"""The model in a run folder, and the recipe that made it: the start of evaluate, export and chat."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from grpo_kit.recipe import Recipe


@dataclass(frozen=True)
class Trained:
    """A run's folder, the place of its model in it, a description in words, and its recipe."""

    folder: Path
    model: Path
    what: str
    recipe: Recipe

    def load(self) -> tuple[Any, Any]:
        """The trained model and its tokenizer; for LoRA with its adapter on the base."""
        from grpo_kit.models import is_adapter, load_policy
        from grpo_kit.presets import preset

        cfg = self.recipe.cfg
        if is_adapter(str(self.model)):
            tuning = self.recipe.tuning if self.recipe.tuning != "full" else "lora"
            return load_policy(self.model, tuning=tuning, dtype=preset(cfg, tuning=tuning).dtype, quiet=True)
        return load_policy(self.model, dtype=cfg.dtype, quiet=True)

    def comparison(self) -> Any:
        """Base beside tuned as measured by the run itself; None if the run did not reach that point."""
        from grpo_kit.evaluation.accuracy import Evaluation
        from grpo_kit.evaluation.comparison import compare
        from grpo_kit.recipe.run_recipe import AFTER, BEFORE, MODEL

        paths = [self.folder / BEFORE, self.folder / AFTER]
        if self.model.name != MODEL or not all(path.is_file() for path in paths):
            return None
        return compare(*map(Evaluation.load, paths))


def is_run(where: str) -> bool:
    """Is it the folder of a run?"""
    from grpo_kit.recipe.remembered import FILE
    from grpo_kit.record.files import has_metrics

    folder = Path(where)
    return (folder / FILE).is_file() or has_metrics(folder)


def trained_in(where: str, *, task: str | None = None, profile: str | None = None) -> Trained:
    """The contents of a run folder. task, profile: for a run without a recipe, such as a notebook's.

    Raises ValueError for a folder without a model, and if the task is unknown or another one.
    """
    from grpo_kit.recipe import Recipe, remembered
    from grpo_kit.record.files import run_settings

    folder = Path(where)
    if (folder / remembered.FILE).is_file():
        recipe = Recipe.of(folder, **({"task": task} if task else {}))
        remembered.check_same(folder, recipe.make_task())
    elif (settings := run_settings(folder)) is not None and task is not None:
        recipe = Recipe(task, profile=profile or "auto", model=settings["model"])
    elif settings is not None:
        raise ValueError(
            f"{where} was not made by a recipe, and does not say its task: give --task, and --profile"
        )
    else:
        remembered.data_of(folder)
        raise ValueError(f"{where} holds no run")
    model, what = _model_in(folder)
    return Trained(folder, model, what, recipe)


def _model_in(folder: Path) -> tuple[Path, str]:
    from grpo_kit.loop.checkpoint import newest_whole

    for name in ("model", "adapter"):
        if (folder / name).is_dir():
            return folder / name, "the trained model"
    checkpoint = newest_whole(folder)
    saved = max((p.stat().st_mtime for p in folder.glob("*.safetensors")), default=0.0)
    if saved > (0.0 if checkpoint is None else checkpoint.stat().st_mtime):
        return folder, "the trained model"  # trainer.save_model(run folder), after the last checkpoint
    if checkpoint is None:
        raise ValueError(
            f"{folder} has neither a model nor a checkpoint yet; `grpo-kit watch {folder}` says how far it is"
        )
    return checkpoint, f"half trained: the checkpoint of step {checkpoint.name.rpartition('-')[2]}"
