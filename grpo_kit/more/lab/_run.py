"""One run of the laboratory: an arm and a seed -> a trained and evaluated model -> a run folder with result.json."""

from __future__ import annotations

import gc
import json
import shutil
import time
from collections.abc import Callable, Mapping
from dataclasses import asdict, replace
from datetime import date
from importlib.metadata import version
from pathlib import Path
from typing import Any

import pandas as pd
from transformers import set_seed

from grpo_kit._support.display import ProgressLine
from grpo_kit.engine.fast import fast
from grpo_kit.evaluation.accuracy import Evaluation, evaluate
from grpo_kit.evaluation.generate_and_score import answer
from grpo_kit.loop.interrupts import Stopped
from grpo_kit.loop.protocols import Hook
from grpo_kit.loop.step_batch import Batch
from grpo_kit.models._model_facts import hardware
from grpo_kit.models.loading import load_policy
from grpo_kit.more.lab._arm import Arm, digest, fingerprint, prompt_fingerprint
from grpo_kit.record._digests import checkpoints, last_whole
from grpo_kit.record._lines import read_json
from grpo_kit.record.files import RunFolderError, holds_run, read_completions, read_metrics, write_whole
from grpo_kit.tasks import Task
from grpo_kit.trainer.grpo_trainer import GRPOTrainer
from grpo_kit.watch._flags import Flag
from grpo_kit.watch.monitor import read_flags

RESULT = "result.json"
SETTINGS = "settings.json"
_SAMPLED_ROWS = 64  # rows in an evaluation at a temperature


class _Steps(Hook):
    """Reports the training's progress; earlier: seconds of the steps that were done before this process."""

    def __init__(self, on_step: Callable[[int, int], None]) -> None:
        self.on_step, self.earlier = on_step, 0.0

    def begin(self, trainer: GRPOTrainer) -> None:
        """What the checkpoint says."""
        self.earlier = trainer.seconds

    def after_step(self, trainer: GRPOTrainer, row: dict[str, Any], batch: Batch) -> None:
        """One more."""
        self.on_step(trainer.step, trainer.config.steps)


def run(
    arm: Arm,
    seed: int,
    folder: Path,
    *,
    before: Evaluation,
    on_step: Callable[[int, int], None],
    on_flag: Callable[[Flag], None],
) -> dict[str, Any]:
    """Train and evaluate; returns the contents of result.json. A run that is in folder continues from its checkpoint.

    on_step: called with (steps done, steps in all) after each. on_flag: called with a red flag, unless the arm
    has another.
    Raises Stopped after the stop button, once the trainer has saved.
    """
    config, task = replace(arm.config, seed=seed), arm.task
    set_seed(seed)
    model, tokenizer = load_policy(
        config.model, tuning=config.tuning, dtype=config.dtype, seed=seed, quiet=True
    )
    start = time.perf_counter()
    if arm.prepare is not None:  # also before loading a checkpoint: a reference model comes from it
        arm.prepare(model, tokenizer, task, seed)
    prepared = time.perf_counter()
    folder.mkdir(parents=True, exist_ok=True)
    write_json(folder / SETTINGS, fingerprint(arm))
    steps, seams = _Steps(on_step), {}
    if arm.sample is not None:
        own = fast(model, config)
        seams = {"sample": arm.sample(own.sample), "update": own.update}
    trainer = GRPOTrainer(
        model, task, config, tokenizer=tokenizer, folder=folder, live=None, on_flag=arm.on_flag or on_flag,
        hooks=[steps], **seams,
    )  # fmt: skip
    try:
        trainer.train(resume=holds_run(folder))
    except Stopped:
        if not (arm.on_flag == "stop" and read_flags(folder)):
            raise
    del trainer
    trained = time.perf_counter()
    after = evaluate(model, tokenizer, task, batch_size=config.eval_batch)
    samples = arm.eval_samples
    counts = {str(t): _sampled(model, tokenizer, task, t, samples, seed) for t in arm.eval_temperatures}
    metrics, completions = read_metrics(folder), read_completions(folder)
    further = metrics.get("rollout/extra_completions", pd.Series())
    wrong = after.rows[~after.rows["strict"].astype(bool)]
    result = {
        "settings": fingerprint(arm),
        "seed": seed,
        "accuracy": asdict(after.strict),
        "right": "".join("1" if right else "0" for right in after.rows["strict"]),
        "formatted": after.formatted and after.formatted.value,
        "tokens_mean": float(after.rows["tokens"].mean()),
        "tokens_mean_wrong": float(wrong["tokens"].mean()) if len(wrong) else None,
        "sampled": {t: sum(right) / (samples * len(right)) for t, right in counts.items()},
        "sampled_right": counts,
        "eval_samples": samples,
        "before": asdict(before.strict),
        "before_formatted": before.formatted and before.formatted.value,
        "constant": list(before.constant) if before.constant else None,
        "train_rows": digest(task.train),
        "max_completion_tokens": task.max_completion_tokens,
        "steps": int(metrics["step"].max()) if len(metrics) else 0,
        "completions": len(completions) + int(further.sum()),  # all sampled ones, used or not
        "tokens": float(metrics["num_tokens"].max()) if len(metrics) else 0.0,
        "prepare_seconds": round(prepared - start, 1),
        "train_seconds": round(trained - prepared + steps.earlier, 1),
        "evaluate_seconds": round(time.perf_counter() - trained, 1),
        "model": config.model,
        "hardware": hardware(),
        "date": date.today().isoformat(),
        "versions": {name: version(name) for name in ("torch", "transformers")},
    }
    write_json(folder / RESULT, result)
    for path in () if config.save_steps else checkpoints(folder):  # by time, of gigabytes each
        shutil.rmtree(path, ignore_errors=True)
    del model
    gc.collect()
    return result


def tell_steps(progress: ProgressLine, which: str, made: int, in_all: int) -> Callable[[int, int], None]:
    """f(step, steps), which shows the progress of a run, and the time for all runs."""

    def on_step(step: int, steps: int) -> None:
        where = f"{which}, step {step} of {steps}" if step else which
        progress.say(where, (made + step / steps) / in_all, end=f"{in_all} runs")

    on_step(0, 1)
    return on_step


def tell_flags(progress: ProgressLine, which: str, told: set[tuple[str, str]]) -> Callable[[Flag], None]:
    """f(flag), which prints a run's red flag; reason and first remedy only if `told` does not hold it yet."""

    def on_flag(flag: Flag) -> None:
        known = (flag.why, flag.first) in told
        told.add((flag.why, flag.first))
        progress.print(f"{which}: Red flag: {f'{flag.brief} (what to try: above)' if known else flag}")

    return on_flag


def before_training(arm: Arm, folder: Path) -> Evaluation:
    """The untrained model on the task's held-out rows; `folder` has one file for each model, prompt and rows."""
    path = folder / f"before-{prompt_fingerprint(arm)}.json"
    if path.exists():
        return Evaluation.load(path)
    config, tuning = arm.config, "qlora" if arm.config.tuning == "qlora" else "full"
    model, tokenizer = load_policy(config.model, tuning=tuning, dtype=config.dtype, quiet=True)
    found = evaluate(model, tokenizer, arm.task, batch_size=config.eval_batch)
    found.save(path)
    return found


def set_aside(folder: Path, arm: Arm) -> Path | None:
    """Renames an unfinished run that cannot be continued, and returns the new name.

    A run can be continued from a complete checkpoint with the same settings, unless a red flag ended it
    (on_flag="stop": training further would not end there again).
    """
    if not holds_run(folder):
        return None
    file = folder / SETTINGS
    same = file.exists() and read_json(file) == fingerprint(arm)
    flagged = arm.on_flag == "stop" and read_flags(folder)
    if same and not flagged and _has_whole_checkpoint(folder):
        return None
    number = 1
    while (target := folder.with_name(f"{folder.name}.unfinished-{number}")).exists():
        number += 1
    return folder.rename(target)


def write_json(path: Path, data: Mapping[str, Any]) -> None:
    """Writes the file atomically."""
    write_whole(path, (json.dumps(data, indent=1) + "\n").encode())


def _sampled(
    model: Any, tokenizer: Any, task: Task, temperature: float, samples: int, seed: int
) -> list[int]:
    """How many samples are right at a temperature, for each of the first held-out rows."""
    rows = task.held_out[:_SAMPLED_ROWS]
    made = answer(model, tokenizer, task, rows, samples=samples, temperature=temperature, seed=seed)
    return [sum(right) for right in made.by_row(made.right)]


def _has_whole_checkpoint(folder: Path) -> bool:
    try:
        return last_whole(folder).exists()
    except RunFolderError:
        return False
