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
from grpo_kit.evaluation.generate_and_score import Decoding, answer
from grpo_kit.loop.batch import Batch
from grpo_kit.loop.config import Config
from grpo_kit.loop.processes import Stopped
from grpo_kit.loop.protocols import Hook
from grpo_kit.models._model_facts import hardware
from grpo_kit.models.loading import load_policy
from grpo_kit.more.lab._arm import Arm, digest, fingerprint, prompt_fingerprint
from grpo_kit.record._digests import checkpoints, newest_whole
from grpo_kit.record._lines import read_json
from grpo_kit.record.files import holds_run, read_completions, read_metrics, write_whole
from grpo_kit.trainer.grpo_trainer import GRPOTrainer
from grpo_kit.watch._flags import Flag
from grpo_kit.watch.monitor import read_flags

RESULT = "result.json"
SETTINGS = "settings.json"
_SAMPLED_ROWS = 64  # rows in an evaluation at a temperature


class RunProgress(Hook):
    """Shows a run's progress and the time for all runs.

    seconds: of the steps that were done before this process.
    """

    def __init__(
        self,
        line: ProgressLine,
        label: str,
        runs_done: int,
        runs: int,
    ) -> None:
        self.line, self.label = line, label
        self.runs_done, self.runs = runs_done, runs
        self.seconds = 0.0
        self._show(0, 1)

    def begin(self, trainer: GRPOTrainer) -> None:
        """Keep the checkpoint's seconds."""
        self.seconds = trainer.seconds

    def after_step(
        self,
        trainer: GRPOTrainer,
        row: dict[str, Any],
        batch: Batch,
    ) -> None:
        """Show the step."""
        self._show(trainer.step, trainer.config.steps)

    def _show(self, step: int, steps: int) -> None:
        label = self.label
        if step:
            label += f", step {step} of {steps}"
        self.line.say(
            label, (self.runs_done + step / steps) / self.runs, end=f"{self.runs} runs"
        )


def run(
    arm: Arm,
    seed: int,
    folder: Path,
    *,
    before: Evaluation,
    progress: RunProgress,
    on_flag: Callable[[Flag], None],
) -> dict[str, Any]:
    """Train and evaluate; returns the contents of result.json. A run that is in folder continues from its checkpoint.

    on_flag: called with a red flag, unless the arm has another.
    Raises Stopped after the stop button, once the trainer has saved.
    """
    config, task = replace(arm.config, seed=seed), arm.task
    set_seed(seed)
    model, tokenizer = load_policy(
        config.model,
        tuning=config.tuning,
        dtype=config.dtype,
        seed=seed,
        quiet=True,
    )
    start = time.perf_counter()
    # also before loading a checkpoint: a reference model comes from it
    if arm.prepare is not None:
        arm.prepare(model, tokenizer, task, seed)
    prepared = time.perf_counter()
    folder.mkdir(parents=True, exist_ok=True)
    write_json(folder / SETTINGS, fingerprint(arm))
    _train(arm, config, model, tokenizer, folder, progress, on_flag)
    trained = time.perf_counter()
    result = {
        "settings": fingerprint(arm),
        "seed": seed,
        **_tuned(arm, model, tokenizer, config),
        "before": asdict(before.strict),
        "before_formatted": before.formatted and before.formatted.value,
        "constant": before.constant,
        "train_rows": digest(task.train),
        "max_completion_tokens": task.max_completion_tokens,
        **_amounts(folder),
        "prepare_seconds": round(prepared - start, 1),
        "train_seconds": round(trained - prepared + progress.seconds, 1),
        "evaluate_seconds": round(time.perf_counter() - trained, 1),
        "model": config.model,
        "hardware": hardware(),
        "date": date.today().isoformat(),
        "versions": {name: version(name) for name in ("torch", "transformers")},
    }
    write_json(folder / RESULT, result)
    if not config.save_steps:  # checkpoints by time, of gigabytes each
        for path in checkpoints(folder):
            shutil.rmtree(path, ignore_errors=True)
    del model
    gc.collect()
    return result


def _train(
    arm: Arm,
    config: Config,
    model: Any,
    tokenizer: Any,
    folder: Path,
    progress: RunProgress,
    on_flag: Callable[[Flag], None],
) -> None:
    seams = {}
    if arm.sample is not None:
        engine = fast(model, config)
        seams = {"sample": arm.sample(engine.sample), "update": engine.update}
    trainer = GRPOTrainer(
        model,
        arm.task,
        config,
        tokenizer=tokenizer,
        folder=folder,
        live=None,
        on_flag=arm.on_flag or on_flag,
        hooks=[progress],
        **seams,
    )
    try:
        trainer.train(resume=holds_run(folder))
    except Stopped:
        if not (arm.on_flag == "stop" and read_flags(folder)):
            raise


def _tuned(
    arm: Arm,
    model: Any,
    tokenizer: Any,
    config: Config,
) -> dict[str, Any]:
    """The tuned model's entries of result.json: on all held-out rows, then at each temperature."""
    evaluation = evaluate(model, tokenizer, arm.task, batch_size=config.eval_batch)
    rows, samples = evaluation.rows, arm.eval_samples
    right = rows["strict"].astype(bool)
    wrong_tokens = rows.loc[~right, "tokens"]
    rates, right_counts = {}, {}
    for temperature in arm.eval_temperatures:
        decoding = Decoding(samples, temperature, seed=config.seed)
        answers = answer(
            model, tokenizer, arm.task, arm.task.held_out[:_SAMPLED_ROWS], decoding
        )
        counts = [sum(row) for row in answers.by_row(answers.right)]
        right_counts[str(temperature)] = counts
        rates[str(temperature)] = sum(counts) / (samples * len(counts))
    return {
        "accuracy": asdict(evaluation.strict),
        "right": "".join(str(int(is_right)) for is_right in right),
        "formatted": evaluation.formatted and evaluation.formatted.value,
        "tokens_mean": float(rows["tokens"].mean()),
        "tokens_mean_wrong": float(wrong_tokens.mean()) if len(wrong_tokens) else None,
        "sampled": rates,
        "sampled_right": right_counts,
        "eval_samples": samples,
    }


def _amounts(folder: Path) -> dict[str, Any]:
    """Steps of the run; completions and tokens of all that were sampled, used or not."""
    metrics = read_metrics(folder)
    unused = metrics.get("rollout/extra_completions", pd.Series())
    return {
        "steps": int(metrics["step"].max()) if len(metrics) else 0,
        "completions": len(read_completions(folder)) + int(unused.sum()),
        "tokens": float(metrics["num_tokens"].max()) if len(metrics) else 0.0,
    }


def print_flag(
    line: ProgressLine,
    label: str,
    printed: set[tuple[str, str]],
    flag: Flag,
) -> None:
    """Print a run's red flag; reason and first remedy only if `printed` does not hold it yet."""
    text = str(flag)
    if (flag.why, flag.first) in printed:
        text = f"{flag.brief} (what to try: above)"
    printed.add((flag.why, flag.first))
    line.print(f"{label}: Red flag: {text}")


def before_training(arm: Arm, folder: Path) -> Evaluation:
    """The untrained model on the task's held-out rows; `folder` has one file for each model, prompt and rows."""
    path = folder / f"before-{prompt_fingerprint(arm)}.json"
    if path.exists():
        return Evaluation.load(path)
    config = arm.config
    tuning = "qlora" if config.tuning == "qlora" else "full"
    model, tokenizer = load_policy(config.model, tuning=tuning, dtype=config.dtype, quiet=True)
    evaluation = evaluate(model, tokenizer, arm.task, batch_size=config.eval_batch)
    evaluation.save(path)
    return evaluation


def set_aside(folder: Path, arm: Arm) -> Path | None:
    """Renames an unfinished run that cannot be continued, and returns the new name.

    A run can be continued from a complete checkpoint with the same settings, unless a red flag ended it
    (on_flag="stop": training further would not end there again).
    """
    if not holds_run(folder):
        return None
    settings = folder / SETTINGS
    same_settings = settings.exists() and read_json(settings) == fingerprint(arm)
    flagged = arm.on_flag == "stop" and read_flags(folder)
    if same_settings and not flagged and newest_whole(folder):
        return None
    number = 1
    while (target := folder.with_name(f"{folder.name}.unfinished-{number}")).exists():
        number += 1
    return folder.rename(target)


def write_json(path: Path, data: Mapping[str, Any]) -> None:
    """Writes the file atomically."""
    write_whole(path, (json.dumps(data, indent=1) + "\n").encode())
