"""Today's trainer on the tiny runs: what one step samples, scores and does to the weights."""

from __future__ import annotations

import tempfile
from typing import Any

import torch
from transformers import TrainerCallback, set_seed
from trl import GRPOConfig

from benchmarks.oracle.step_runs import EPSILON, EPSILON_HIGH, MAX_GRAD_NORM, STEPS, Run
from benchmarks.oracle.steps import Step, change, weights
from grpo_kit import EpisodeTrainer, GRPOTrainer
from grpo_kit.models.renamed import NAME as CHECKPOINTING
from grpo_kit.rewards.scoring import totals


def todays_steps(run: Run, forced: list[Step] | None = None) -> list[Step]:
    """The run's steps, with completions that today's trainer samples. Raises ValueError for forced ones."""
    if forced is not None:
        raise ValueError(
            "forced: today's trainer samples its completions itself; use compare_steps(..., sampled=True)"
        )
    task, (model, tokenizer) = run.task(), run.policy()
    trainer_class = type("Watched", (_Watched, EpisodeTrainer if run.episodes else GRPOTrainer), {})
    data = {} if run.episodes else {"train_dataset": task.dataset(tokenizer)}
    with tempfile.TemporaryDirectory(prefix="oracle-") as folder:
        set_seed(run.seed)
        trainer = trainer_class(
            model,
            task if run.episodes else task.rewards,
            _arguments(run, task, folder),
            processing_class=tokenizer,
            warmup=0,
            temperature=run.temperature,
            live=None,
            **data,
        )
        trainer.watch(run, task)
        trainer.train()
    return trainer.steps


def _arguments(run: Run, task: Any, folder: str) -> GRPOConfig:
    return GRPOConfig(
        output_dir=folder, max_steps=STEPS * run.iterations, num_iterations=run.iterations, seed=run.seed,
        per_device_train_batch_size=run.prompts_per_step * run.group_size, num_generations=run.group_size,
        max_completion_length=task.max_completion_tokens, beta=run.beta, epsilon=EPSILON, epsilon_high=EPSILON_HIGH,
        loss_type="dapo", reward_weights=None if run.episodes else task.reward_weights,
        learning_rate=run.learning_rate, lr_scheduler_type="constant_with_warmup", warmup_steps=run.warmup,
        optim="adamw_torch", max_grad_norm=MAX_GRAD_NORM, save_strategy="no", logging_steps=1, report_to=[],
        bf16=False, use_cpu=True, disable_tqdm=True, **{CHECKPOINTING: False},
    )  # fmt: skip


class _Watched:
    """Keeps what each step of the trainer behind it in the class makes."""

    def watch(self, run: Run, task: Any) -> None:
        self.run, self.steps, self.losses = run, [], []
        self.places = {row["question"]: place for place, row in enumerate(task.train)}
        self.start = weights(self.model)
        self.add_callback(_Updates(self))

    def _fill(self, batch: Any, trl_does: Any) -> dict[str, Any]:
        rows = [row["row"] if self.run.episodes else self.places[row["question"]] for row in batch.rows]
        output = super()._fill(batch, trl_does)
        episodes = [row.get("episode", place) for place, row in enumerate(batch.rows)]
        groups = [episode // self.run.group_size for episode in episodes]
        lengths = output["completion_mask"].sum(1).tolist()
        starts = (output["prompt_mask"] == 0).sum(1).tolist()
        parts = [[None if p != p else p for p in part] for part in batch.parts.T.tolist()]
        self.steps.append(
            {
                "temperature": self.temperature,
                "rows": [rows[episode] for episode in episodes],
                "episodes": episodes,
                "prompt_ids": [ids[n:].tolist() for ids, n in zip(output["prompt_ids"], starts, strict=True)],
                "completion_ids": _cut(output["completion_ids"], lengths),
                "sampler_logprobs": _cut(output["sampling_per_token_logps"], lengths),
                "parts": dict(zip(self.reward_func_names, parts, strict=True)),
                "rewards": totals(parts, self.reward_weights.tolist(), groups),
                "advantages": output["advantages"].tolist(),
                "updates": [],
            }
        )
        return output

    def training_step(self, *args: Any, **kwargs: Any) -> torch.Tensor:
        loss = super().training_step(*args, **kwargs)
        self.losses.append(loss.item())
        return loss


def _cut(rows: torch.Tensor, lengths: list[int]) -> list[list]:
    return [row[:n].tolist() for row, n in zip(rows, lengths, strict=True)]


class _Updates(TrainerCallback):
    def __init__(self, trainer: Any) -> None:
        self.trainer = trainer

    def on_optimizer_step(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        """The optimizer has stepped; the schedule has not."""
        trainer = self.trainer
        update = {
            "loss": sum(trainer.losses),
            "learning_rate": kwargs["optimizer"].param_groups[0]["lr"],
            "weights": change(trainer.model, trainer.start),
        }
        trainer.losses.clear()
        trainer.steps[-1]["updates"].append(update)

    def on_log(self, args: Any, state: Any, control: Any, logs: dict[str, Any], **kwargs: Any) -> None:
        """The norm of the last update's gradient, before it was clipped."""
        if "grad_norm" in logs:
            self.trainer.steps[-1]["updates"][-1]["grad_norm"] = float(logs["grad_norm"])
