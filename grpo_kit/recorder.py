"""What a running trainer leaves behind: rows, completions and the live chart, in the kit's words."""

from __future__ import annotations

import time
from collections.abc import Mapping
from importlib.metadata import version
from pathlib import Path
from typing import Any

import pandas as pd
import torch

from grpo_kit.live import LiveChart
from grpo_kit.run_folder import RunFolder

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
_DROPPED = {"epoch", "total_flos"}


class Recorder:
    """Writes the run folder and feeds the live chart of one trainer.

    live: False records files only.
    """

    def __init__(self, trainer: Any, *, live: bool) -> None:
        self.trainer = trainer
        self.folder: RunFolder | None = None
        self._chart = LiveChart() if live else None
        self._completions: pd.DataFrame | None = None
        self._begin = 0.0

    def open(self, *, resume: bool) -> None:
        """Open args.output_dir; raises RunFolderError if it holds a run and resume is False."""
        trainer = self.trainer
        if self.folder is not None:  # a full disk held rows back when the last run stopped
            self.folder.flush()
        config = {
            "reward_parts": _parts(trainer),
            "reward_weights": trainer.reward_weights.tolist(),
            "temperature_schedule": repr(trainer._schedule) if trainer._schedule else None,
            "rollout": trainer.rollout,
            "optimizer": trainer._optimizer_name or getattr(trainer.args.optim, "value", trainer.args.optim),
            "model": getattr(trainer.model.config, "_name_or_path", "") or trainer.model.config.model_type,
            "parameters": sum(p.numel() for p in trainer.model.parameters()),
            "trainable_parameters": sum(p.numel() for p in trainer.model.parameters() if p.requires_grad),
            "device": torch.cuda.get_device_name() if torch.cuda.is_available() else "cpu",
            "versions": {
                name: version(name) for name in ("torch", "transformers", "trl", "peft", "datasets")
            },
            "args": trainer.args.to_dict(),
        }
        self.folder = RunFolder.open(trainer.args.output_dir, config=config, resume=resume)
        self._completions = None
        self._begin = time.monotonic()

    def begin(self) -> None:
        """The first step is about to start."""
        if self._chart is not None:
            self._chart.start(self.trainer.state.max_steps, self.trainer.args.output_dir)

    def step(self, logs: Mapping[str, float | None]) -> None:
        """One training step done: a row, and the chart if it is due."""
        state = self.trainer.state
        row: dict[str, float | None] = {
            "step": state.global_step,
            "progress": state.global_step / max(state.max_steps, 1),
            "seconds": time.monotonic() - self._begin,
        }
        for key, value in logs.items():
            if key in _NAMES:
                row[_NAMES[key]] = value
            elif key.startswith("rewards/") and key.endswith("/mean"):
                row["reward/" + key.removeprefix("rewards/").removesuffix("/mean")] = value
            elif key not in _DROPPED:
                row[key] = value
        self.folder.write_step(row)
        if self._chart is not None:
            self._chart.update([row], self._completions)

    def completions(self, inputs: list[dict[str, Any]]) -> None:
        """The rollouts just scored; written at once, so that a crash in the update does not lose them."""
        trainer, logs, n = self.trainer, self.trainer._logs, len(inputs)
        last = lambda values: list(values)[-n:]  # noqa: E731
        prompts = last(logs["prompt"])
        numbers: dict[str, int] = {}
        parts = {f"reward/{name}": last(logs["rewards"][name]) for name in trainer.reward_func_names}
        judged = pd.DataFrame(parts)
        total = (judged * trainer.reward_weights.tolist()).sum(axis=1, min_count=1)
        table = {
            "step": [trainer.state.global_step + 1] * n,
            "group": [numbers.setdefault(str(p), len(numbers)) for p in prompts],
            "prompt": [str(p) for p in prompts],
            "prefill": [row.get("prefill") or "" for row in inputs],
            "completion": [_text(c) for c in last(logs["completion"])],
            **parts,
            "reward": total.tolist(),
            "advantage": last(logs["advantages"]),
            "temperature": [trainer.temperature] * n,
            **{name: last(values) for name, values in logs["extra"].items() if len(values) >= n},
        }
        self._completions = pd.DataFrame(table)
        self.folder.write_completions(table)

    def say(self, message: str) -> None:
        """A line for the person who watches."""
        print(message, flush=True)

    def close(self) -> None:
        """The last picture; rows that a full disk holds back stay for the next train(); no step leaves no trace."""
        if self.folder is None:
            return
        if self._chart is not None:
            self._chart.finish()
        if not self.folder.flush():
            self.say(
                f"{self.folder.path} cannot be written; free some space, and train() writes the rest first."
            )
            return
        _discard_if_nothing_happened(Path(self.folder.path))
        self.folder = None


def _discard_if_nothing_happened(path: Path) -> None:
    """Else a run that failed before its first rollout would block its own name."""
    written = any((path / "completions.parquet").glob("*")) or (path / "metrics.csv").exists()
    if written or any(path.glob("checkpoint-*")):
        return
    (path / "config.json").unlink(missing_ok=True)
    (path / "completions.parquet").rmdir()
    if not any(path.iterdir()):
        path.rmdir()


def _parts(trainer: Any) -> list[str]:
    """Every reward by name, and the parts of those that are sums (WeightedSum reports them by `names`)."""
    sums = [getattr(r, "reward", r) for r in trainer.reward_funcs]
    inside = [name for reward in sums for name in getattr(reward, "names", [])]
    return list(dict.fromkeys([*trainer.reward_func_names, *inside]))


def _text(completion: Any) -> str:
    if isinstance(completion, str):
        return completion
    return "".join(str(message.get("content", "")) for message in completion)
