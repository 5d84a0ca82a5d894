"""What a running trainer leaves behind: rows, completions and the live chart, in the kit's words."""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import pandas as pd
import torch
from transformers import TrainerCallback

from grpo_kit.optim.choose import OPTIMIZERS, share_that_moves
from grpo_kit.record.files import REDONE, RUN, RunFolderError, read_metrics, run_settings
from grpo_kit.record.run_folder import RunFolder
from grpo_kit.training.batch import Batch
from grpo_kit.training.config import config_of
from grpo_kit.training.rollouts import Rollouts
from grpo_kit.training.told import Told
from grpo_kit.watch.flags import Flag
from grpo_kit.watch.live import LiveChart
from grpo_kit.watch.monitor import Monitor, OnFlag

# trl's metric -> ours (DESIGN.md: one word per thing)
_NAMES = {
    "loss": "loss",
    "grad_norm": "grad_norm",
    "learning_rate": "learning_rate",
    "temperature": "temperature",
    "reward": "reward",
    "reward_std": "reward_std",
    "frac_reward_zero_std": "frac_reward_zero_std",
    "entropy": "entropy",
    "kl": "kl",
    "clip_ratio/region_mean": "clip_ratio",
    "completions/mean_length": "completion_length",
    "completions/clipped_ratio": "completion_cut_off",
    "num_tokens": "num_tokens",
    "step_time": "step_seconds",
}
_HELD_OUT = ("reward", "reward_std", "entropy", "completion_length", "completion_cut_off")  # of an evaluation
_OF_HELD_OUT = ("reward_low", "reward_high", "constant", "one_answer", "one_gold")  # see evaluation.held_out
_DROPPED = {"epoch", "total_flos"}
_KEEP_LOW_BITS = ("SplitAdamW8bit", "FlashAdamW")  # optimizers that keep what 16-bit weights round away


class Recorder(TrainerCallback):
    """Writes the run folder, feeds the live chart of one trainer and watches for red flags.

    Of several processes the main one alone does so. As a callback it comes before those of trackers that transformers
    tells (report_to), which then see what metrics.csv sees.
    live: see GRPOTrainer. on_flag: see Monitor. trackers: names of those that the kit tells.
    """

    def __init__(
        self, trainer: Any, *, live: bool | None, on_flag: OnFlag, trackers: Sequence[str] = ()
    ) -> None:
        self.trainer = trainer
        self._writes = trainer.accelerator.is_main_process
        self.folder: RunFolder | None = None
        self.stopped_by: Flag | None = None
        self._chart = None if live is None else LiveChart(pictures=live)
        self._monitor = Monitor(on_flag)
        self._row: dict[str, Any] = {}  # of the last step
        self._measured: dict[str, float] = {}  # what the kit adds to it
        self._once: dict[str, Any] = {}  # for the first row only
        self._sampled = False  # completions that no row has measured yet
        self._completions: pd.DataFrame | None = None
        self._config: dict[str, Any] = {}
        self._rollouts = Rollouts(trainer.text_tokenizer)
        self._begin = self._seconds_before = 0.0
        self._told = Told(trainer, list(trackers), self.say)

    def open(self, *, resume: bool) -> dict[str, Any] | None:
        """Open args.output_dir; returns the settings (run.json) of the run that is there, None of a new one.

        Raises RunFolderError if it holds a run and resume is False; also
        while a disk is still too full for the rows that it held back when the last run stopped.
        """
        trainer = self.trainer
        self.stopped_by = None
        path = Path(trainer.args.output_dir)
        begun = run_settings(path)
        if not self._writes:
            return begun
        if self.folder is not None and not self._flush():
            raise RunFolderError(
                f"{self.folder.path} cannot be written, and rows of the last run still wait in memory; free some "
                "space, then call train() again."
            )
        config = config_of(trainer)
        self.folder = RunFolder.open(trainer.args.output_dir, config=config, resume=resume)
        self._config = config
        self._completions, self._sampled, self._row = None, False, {}
        self._rollouts = Rollouts(trainer.text_tokenizer)
        self._begin = time.monotonic()
        return begun

    def begin(self) -> None:
        """The first step is about to start; what is there of steps that are done again moves aside."""
        if not self._writes:
            return
        folder, step = self.folder, self.trainer.state.global_step
        if folder.go_on_from(step):
            self.say(
                f"Steps after {step} are done again; what was there of them is in {folder.path / REDONE}."
            )
        rows = read_metrics(folder.path).to_dict("records")
        self._seconds_before = rows[-1]["seconds"] if rows else 0.0  # of the steps before a stop
        self._monitor.begin(folder.path, self._config, rows)
        share = _share_that_moves(self.trainer)
        self._once = {} if share is None else {"update/share_that_moves": share}
        self._told.begin(Path(folder.path), self._config)
        if self._chart is not None:
            self._chart.start(self.trainer.state.max_steps, self.trainer.args.output_dir)

    def on_log(self, args: Any, state: Any, control: Any, logs: dict[str, Any], **kwargs: Any) -> None:
        """A training step is done: its row, and into logs and log_history what trl does not know of it.

        That is what was measured of its completions (diversity/..., script/..., scale/..., groups/equal_rewards,
        frac_cancelled_groups), update/share_that_moves, and flags/<name> = 1 for a red flag that it raised.
        """
        if self._writes and "loss" in logs and self.trainer.model.training:
            self.step(logs)
            more = {name: value for name, value in self._measured.items() if name not in logs}
            logs.update(more)
            state.log_history[-1].update(more)

    def step(self, logs: Mapping[str, float | None]) -> None:
        """One training step done: a row, and the chart if it is due."""
        state = self.trainer.state
        row: dict[str, float | None] = {
            "step": state.global_step,
            "progress": state.global_step / max(state.max_steps, 1),
            "seconds": self._seconds(),
        }
        for key, value in logs.items():
            if key in _NAMES:
                row[_NAMES[key]] = value
            elif key.startswith("rewards/") and key.endswith("/mean"):
                row["reward/" + key.removeprefix("rewards/").removesuffix("/mean")] = value
            elif key not in _DROPPED:
                row[key] = value
        self._measured = (self._monitor.measure(self._completions) if self._sampled else {}) | self._once
        self._row = {**self._measured, **row}  # what the run logs itself goes first
        self._once, self._sampled = {}, False
        self.folder.write_step(self._row)
        if self._chart is not None:
            self._chart.update([self._row], self._completions)
        flags = self._watch()
        self._measured |= {f"flags/{flag.name.replace(' ', '_')}": 1.0 for flag in flags}
        self._told.row(self._row, flags)

    def evaluation(self, logs: Mapping[str, float | None]) -> None:
        """Held-out measures after a step: its row is written again, with eval/...; of two rows readers take the last.

        eval/reward, eval/reward/<part>, eval/completion_length and the like; before the first step, row 0.
        """
        if self.folder is None:  # evaluate() outside train()
            return
        step = self.trainer.state.global_step
        if self._row.get("step") != step:
            if step:
                return  # eval_on_start of a resumed run: the row of its step is another evaluation's
            self._row = {"step": 0, "progress": 0.0, "seconds": self._seconds()}
        for key, value in logs.items():
            name = key.removeprefix("eval_")
            if _NAMES.get(name) in _HELD_OUT:
                self._row["eval/" + _NAMES[name]] = value
            elif name.startswith("accuracy") or name in _OF_HELD_OUT:
                self._row["eval/" + name] = value
            elif name.startswith("rewards/") and name.endswith("/mean"):
                self._row["eval/reward/" + name.removeprefix("rewards/").removesuffix("/mean")] = value
        self.folder.write_step(self._row)
        if self._chart is not None:
            self._chart.replace(self._row)
        self._told.evaluation(self._row, self._watch())

    def take_up_row(self) -> None:
        """The last step's row, as it is on disk: an evaluation is made up."""
        if not self._writes:
            return
        rows = read_metrics(self.folder.path)
        for row in rows[rows["step"] == self.trainer.state.global_step].to_dict("records"):
            self._row = {name: value for name, value in row.items() if value == value and value is not None}

    def _seconds(self) -> float:
        """Of training since the run began: what came before a stop counts, a pause does not."""
        paused = self.trainer.requests.paused_seconds
        return self._seconds_before + time.monotonic() - self._begin - paused

    def changed(self, step: int, text: str) -> None:
        """A change took effect with this step, or was refused."""
        self._told.change(text)
        if self._chart is not None and self.folder is not None:
            self._chart.change(step, text)
        else:
            self.say(f"From step {step}: {text}")

    def weights_changed(self, weights: list[float]) -> None:
        """The red flags go by the rewards' weights."""
        self._config = self._config | {"reward_weights": weights}
        self._monitor.take_up(self._config)

    def status(self, text: str) -> None:
        """What the run is doing just now."""
        if self._writes and self._chart is not None:
            self._chart.say(text)
        else:
            self.say(text)

    def progress(self, text: str) -> None:
        """How far an evaluation inside the run is; for those who see the chart."""
        if self._writes and self._chart is not None:
            self._chart.progress(text)

    def show_again(self) -> None:
        """The chart of a run that is done, where its cell is run once more."""
        if self._writes and self._chart is not None:
            self._chart.start(self.trainer.state.max_steps, self.trainer.args.output_dir)
            self._chart.finish()

    def _watch(self) -> list[Flag]:
        flags = self._monitor.step(self._row)
        for flag in flags:
            if self._chart is not None:
                self._chart.flag(flag)
            elif not callable(self._monitor.on_flag):
                self.say(f"Red flag: {flag}")
        if flags and self._monitor.on_flag == "stop":
            self.stopped_by = flags[0]
        return flags

    def completions(self, batch: Batch) -> None:
        """The rollouts just scored; written at once, so that a crash in the update does not lose them."""
        table = self._rollouts.table(batch)
        if self._writes:
            self._completions, self._sampled = pd.DataFrame(table), True
            self.folder.write_completions(table)
            self._told.completions(table)

    def say(self, message: str) -> None:
        """A line for the person who watches."""
        if self._writes:
            print(message, flush=True)

    def close(self, *, failed: bool = False) -> bool:
        """The last picture; no step leaves no trace. False: a full disk holds rows back, for the next train().

        failed: an error ended the run.
        """
        self._told.end(failed=failed)
        if self.folder is None:
            return True
        if self._chart is not None:
            self._chart.finish()
        if not self._flush():
            self.say(
                f"{self.folder.path} cannot be written; free some space, and train() writes the rest first."
            )
            return False
        if not _discard_if_nothing_happened(Path(self.folder.path)):
            self.trainer.create_model_card()
        self.folder = None
        return True

    def _flush(self) -> bool:
        return all([self.folder.flush(), self._monitor.flush(), self.trainer.changes.flush()])


def _discard_if_nothing_happened(path: Path) -> bool:
    """Whether there was nothing to keep. Else a run that failed before its first rollout would block its own name."""
    written = any((path / "completions.parquet").glob("*")) or (path / "metrics.csv").exists()
    if written or any(path.glob("checkpoint-*")):
        return False
    (path / RUN).unlink(missing_ok=True)
    if (path / "completions.parquet").is_dir():
        (path / "completions.parquet").rmdir()
    if not any(path.iterdir()):
        path.rmdir()
    return True


def _share_that_moves(trainer: Any) -> float | None:
    """Of 16-bit weights under an optimizer that has nothing but them; None where no update can be rounded away."""
    if trainer.ranks.sharded:  # no process has them all
        return None
    rate = trainer.args.learning_rate
    narrow = [p for p in trainer.model.parameters() if p.requires_grad and p.dtype.itemsize == 2]
    own = OPTIMIZERS.get(trainer.optimizer_name or "")
    optimizer = getattr(trainer.optimizer, "optimizer", trainer.optimizer)
    kept = own is not None and own.weights != torch.float32 or type(optimizer).__name__ in _KEEP_LOW_BITS
    return None if kept or not narrow or not rate else share_that_moves(narrow, rate)
