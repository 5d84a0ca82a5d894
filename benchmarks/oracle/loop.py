"""The kit's own loop on the forced batch and the tiny runs, with the update that is named: no trl, no trainer of it."""

from __future__ import annotations

import tempfile
from collections import defaultdict
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch

from benchmarks.oracle.cases import LONGEST, TEMPERATURE, Case
from benchmarks.oracle.step_runs import EPSILON, EPSILON_HIGH, MAX_GRAD_NORM, STEPS, Run
from benchmarks.oracle.steps import Step, change, weights
from grpo_kit.engine.packed_update import PackedUpdate
from grpo_kit.loop import Batch, Config, Loop
from grpo_kit.loop.batch import as_batch
from grpo_kit.loop.config import StepNumbers
from grpo_kit.loop.padded_update import PaddedUpdate
from grpo_kit.loop.policy_loss import PolicyLoss
from grpo_kit.loop.protocols import Hook
from grpo_kit.models._model_facts import end_ids
from grpo_kit.more.episodes._episode_sample import EpisodeSample, Write, Writer, Written

MakeUpdate = Callable[[Config], Any]


def loop_loss(
    case: Case, make_update: MakeUpdate = PaddedUpdate
) -> tuple[float, dict[str, torch.Tensor]]:
    """Loss and gradient of the case by the loop's loss and an update.

    bnpo divides by the tokens of a micro-batch, which the loop does not have: there each part is an update of its own.
    """
    model, parts, settings = case.policy(), case.parts(), case.settings
    config = Config(
        loss=case.loss, level=case.level, epsilon=settings["epsilon"], epsilon_high=settings["epsilon_high"],
        max_completion_tokens=LONGEST, micro_batch=len(parts[0]["rewards"]),
        loss_options={
            name.removeprefix(f"{case.loss}_"): value
            for name, value in settings.items()
            if name.startswith(f"{case.loss}_")
        },
    )  # fmt: skip
    numbers = StepNumbers(0, 0.0, TEMPERATURE, 0.0, case.beta)
    whole = [case.batch()] if case.loss != "bnpo" else parts
    total = 0.0
    for part in whole:
        batch = _batch(part)
        loss = PolicyLoss(batch, config, numbers)
        backward = lambda share: (share / len(whole)).backward()  # noqa: E731
        total += make_update(config).gradients(model, batch, loss, TEMPERATURE, backward) / len(
            whole
        )
    return total, {n: p.grad for n, p in model.named_parameters() if p.grad is not None}


def _batch(part: dict[str, torch.Tensor]) -> Batch:
    lengths = (part["completion_ids"] != 0).sum(1).tolist()
    cut = lambda name: [row[:n].tolist() for row, n in zip(part[name], lengths, strict=True)]  # noqa: E731
    prompts = zip(part["prompt_ids"], part["prompt_mask"].bool(), strict=True)
    count, width = len(lengths), max(lengths)
    return Batch(
        rows=[{}] * count,
        groups=[0] * count,
        prompt_ids=[row[inside].tolist() for row, inside in prompts],
        completion_ids=cut("completion_ids"),
        completions=[""] * count,
        cut_off=[False] * count,
        loss_mask=cut("completion_mask"),
        advantages=part["advantages"].tolist(),
        old_logprobs=part["old_logprobs"][:, :width] if "old_logprobs" in part else None,
        ref_logprobs=part["ref_logprobs"][:, :width],
    )


class Packed:
    """A PackedUpdate that meets its model at the first call: a MakeUpdate."""

    def __init__(self, config: Config) -> None:
        self._config, self._inner = config, None

    def _of(self, model: Any) -> PackedUpdate:
        self._inner = self._inner or PackedUpdate(model, self._config)
        return self._inner

    def logprobs(self, model: Any, *args: Any) -> torch.Tensor:
        """As PackedUpdate.logprobs."""
        return self._of(model).logprobs(model, *args)

    def gradients(self, model: Any, *args: Any) -> float:
        """As PackedUpdate.gradients."""
        return self._of(model).gradients(model, *args)


def loop_steps(
    run: Run, forced: list[Step], make_update: MakeUpdate = PaddedUpdate
) -> list[Step]:
    """The run's steps with the recorded completions."""
    task, (model, tokenizer) = run.task(), run.policy()
    # a batch holds the task's own rows
    places = {id(row): place for place, row in enumerate(task.train)}
    ends = end_ids(model, tokenizer)
    config = Config(
        steps=STEPS, prompts_per_step=run.prompts_per_step, group_size=run.group_size, iterations=run.iterations,
        temperature=run.temperature, learning_rate=run.learning_rate, warmup=run.warmup, beta=run.beta, loss="dapo",
        epsilon=EPSILON, epsilon_high=EPSILON_HIGH, max_grad_norm=MAX_GRAD_NORM, seed=run.seed, optimizer="adamw",
        max_completion_tokens=task.max_completion_tokens,
    )  # fmt: skip
    made: list[Step] = []

    def recorded(
        model: Any, tokenizer: Any, task: Any, rows: Any, config: Config, numbers: StepNumbers
    ) -> Batch:
        step = forced[numbers.step]
        each = dict(
            zip(step["episodes"], step["rows"], strict=True)
        ).values()  # an episode's, or a completion's
        rows = [task.train[place] for place in list(each)[:: config.group_size]]
        given = model, tokenizer, task, rows, config, numbers
        batch = (
            EpisodeSample(recorded_turns(step))(*given)
            if run.episodes
            else completed(step, *given)
        )
        logprobs = make_update(config).logprobs(model, batch, numbers.temperature)
        batch.sampler_logprobs = [
            row[: len(ids)].tolist()
            for row, ids in zip(logprobs, batch.completion_ids, strict=True)
        ]
        return batch

    def completed(
        step: Step,
        model: Any,
        tokenizer: Any,
        task: Any,
        rows: Any,
        config: Config,
        numbers: StepNumbers,
    ) -> Batch:
        prompts = [list(tokenizer(text)["input_ids"]) for text in task.render(tokenizer, rows)]
        prompts = [ids for ids in prompts for _ in range(config.group_size)]
        return as_batch(
            tokenizer, rows, config.group_size, prompts, step["completion_ids"], ends
        )

    class Watch(Hook):
        def after_step(self, trainer: Loop, row: dict[str, Any], batch: Batch) -> None:
            made.append(
                {
                    "temperature": row["temperature"],
                    "rows": [places[id(one)] for one in batch.rows],
                    "episodes": batch.extra.get("episode", list(range(len(batch)))),
                    "prompt_ids": batch.prompt_ids,
                    "completion_ids": batch.completion_ids,
                    "sampler_logprobs": batch.sampler_logprobs,
                    "parts": batch.parts,
                    "rewards": batch.rewards,
                    "advantages": batch.advantages,
                    "updates": trainer.updates,
                }
            )
            trainer.updates = []

    with tempfile.TemporaryDirectory(prefix="oracle-") as folder:
        trainer = Watched(
            model, task, config, tokenizer=tokenizer, folder=Path(folder) / "run", sample=recorded,
            update=make_update(config), hooks=[Watch()],
        )  # fmt: skip
        trainer.watch(run)
        trainer.train()
    return made


def recorded_turns(step: Step) -> Writer:
    """A writer for EpisodeSample: each turn of each episode is written as it is on record."""
    turns: dict[int, list[list[int]]] = defaultdict(list)
    for episode, ids in zip(step["episodes"], step["completion_ids"], strict=True):
        turns[episode].append(ids)

    @contextmanager
    def writer(*_: Any) -> Iterator[Write]:
        yield lambda prompts, episodes, turn: Written([turns[i][turn - 1] for i in episodes])

    return writer


class Watched(Loop):
    """Keeps what each update of a step did."""

    def watch(self, run: Run) -> None:
        """Begin to keep them."""
        self.run, self.updates, self.start = run, [], weights(self.model)

    def _optimizer_step(self, numbers: StepNumbers) -> float:
        norm = super()._optimizer_step(numbers)
        rate, moved = self.optimizer.param_groups[0]["lr"], change(self.model, self.start)
        self.updates.append({"grad_norm": norm, "learning_rate": rate, "weights": moved})
        return norm

    def learn(self, batch: Batch, numbers: StepNumbers) -> dict[str, float]:
        """As the trainer's, with each update's loss."""
        gradients, losses = self.update.gradients, []

        def kept(*args: Any) -> float:
            losses.append(gradients(*args))
            return losses[-1]

        self.update.gradients = kept
        try:
            return super().learn(batch, numbers)
        finally:
            del self.update.gradients
            for update, loss in zip(self.updates, losses, strict=True):
                update["loss"] = loss
