"""OffPolicyTrainer: rollouts as old as on a cluster, where sampler and trainer work side by side, on one device.

On a cluster the sampler's weights are copied from the trainer's every so many steps, and finished rollouts wait in a
buffer. Both make them stale: sampled by mu, trained on by pi. Here the same staleness is made on purpose, with all
else equal, to see what it costs. One process takes turns, so nothing gets faster; what a cluster would gain is
computed in benchmarks/utilisation.py.
"""

from __future__ import annotations

import random
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from grpo_kit.argument_checks import check_choice, check_whole
from grpo_kit.training.draw_rows import check_can_draw, draw_rows
from grpo_kit.training.trainer import GRPOTrainer
from grpo_kit.training.trl_internals import metrics_set_aside

STATE_FILE = "off_policy.pt"


@dataclass(frozen=True)
class _Waiting:
    """The rollouts of one step, scored: what the loss takes, the step of the weights that made them, their metrics."""

    inputs: dict[str, Any]
    weights_of: int
    temperature: float
    metrics: dict[str, list[float]]


class OffPolicyTrainer(GRPOTrainer):
    """GRPOTrainer whose rollouts are made by older weights.

    sync_every: steps between two copies of the policy to the sampler, >= 1: at step t it has the weights of step
    t // sync_every * sync_every. Costs one copy of the trained weights in memory.
    importance_weights: True: the clipped ratio is pi / mu, mu the older weights' probabilities at sampling time (at the
    temperature, before top-k and top-p, as pi's). False: the ratio is taken to be 1, as in a trainer that does not know
    its data is old.
    buffer: None, or batches of rollouts wait between sampler and trainer. The sampler is as fast as the trainer, but
    uneven (of every two steps both see one new batch, or one sees two and the other none, drawn from the seed), and
    starts `lead` batches early. "fifo" serves the oldest: a batch waits lead - 1 to lead + 1 steps. "newest" serves
    the newest, and goes back to older ones only in a step that sees no new one.
    lead: batches the sampler is ahead, >= 1 with a buffer. Cost: those left when training ends, lead - 1 to
    lead + 1 batches in the whole run. Their rows are drawn from train_dataset, which must be a Dataset.

    Metrics: rollout/age, the steps between the weights that made the batch and those it trains; rollout/buffered,
    batches left waiting. rollout/logprob_gap of an old batch says nothing of the sampler: with importance weights it is
    0, without them it is how far the policy has moved since. Reward, lengths and temperature in a row of metrics.csv
    are of the batch that was trained on; in completions.parquet `step` is the step in which a completion was made. A
    batch is scored at the temperature it was sampled at. Where the age is 0 the ratio is 1 by definition, as in
    GRPOTrainer.
    Resuming is exact: the sampler's weights and the buffer are kept in the checkpoint (off_policy.pt).
    Raises ValueError for rollouts other than the kit's, several processes, and more than one step a rollout
    (num_iterations > 1, or steps_per_generation unlike gradient_accumulation_steps).
    Sources: IMPALA (arXiv:1802.01561: policy lag, importance weights); asynchronous RLHF (arXiv:2410.18252: learning
    from rollouts some steps old); PPO (arXiv:1707.06347: the clipped ratio against the sampling policy).

    >>> OffPolicyTrainer(model, task, args, sync_every=10)  # doctest: +SKIP
    >>> OffPolicyTrainer(model, task, args, buffer="newest", lead=4)  # doctest: +SKIP
    """

    def __init__(
        self,
        *args: Any,
        sync_every: int = 1,
        importance_weights: bool = True,
        buffer: str | None = None,
        lead: int = 0,
        **options: Any,
    ) -> None:
        check_whole("sync_every", sync_every, hint=", the steps between two syncs")
        check_choice("buffer", buffer, (None, "fifo", "newest"))
        if not isinstance(lead, int) or (lead < 1 if buffer else lead != 0):
            raise ValueError(
                f"lead={lead!r} with buffer={buffer!r}: give a buffer and at least 1 batch, or neither"
            )
        super().__init__(*args, **options)
        self.sync_every, self.importance_weights = sync_every, importance_weights
        self.buffer, self.lead = buffer, lead
        self._refuse_unsupported()
        self._forget()

    def _refuse_unsupported(self) -> None:
        args = self.args
        if self.rollout != "kit" or self.rollout_func is not None:
            given = f"rollout={self.rollout!r}" if self.rollout != "kit" else "rollout_func"
            raise ValueError(f"{given}: only the kit's engine can sample with older weights; use 'kit'")
        if self.num_iterations > 1 or args.steps_per_generation != args.gradient_accumulation_steps:
            raise ValueError(
                f"num_iterations={self.num_iterations}, steps_per_generation={args.steps_per_generation}: here every "
                "optimizer step trains on one batch of rollouts; use num_iterations=1 and steps_per_generation="
                f"{args.gradient_accumulation_steps} (gradient_accumulation_steps)"
            )
        if self.accelerator.num_processes > 1 or self.is_deepspeed_enabled or self.is_fsdp_enabled:
            raise ValueError(
                f"{self.accelerator.num_processes} processes (or sharded weights): off-policy rollouts are made by "
                "one process that holds all weights; start one"
            )
        if self.buffer:
            check_can_draw(self.train_dataset, f"buffer={self.buffer!r}")

    # ---- the sampler's weights --------------------------------------------------------------------------------

    def _forget(self) -> None:
        self._sampler_weights: list[torch.Tensor] | None = None  # of the trained parameters, in their order
        # The policy's own, while the model has the sampler's.
        self._own_weights: list[tuple[torch.nn.Parameter, torch.Tensor]] = []
        self._synced_at = 0
        self._waiting: list[_Waiting] = []
        self._waiting_before: tuple[int, list[_Waiting]] = (-1, [])  # a step, and the buffer as it began

    def _trained(self) -> list[torch.nn.Parameter]:
        return [p for p in self.model.parameters() if p.requires_grad]

    def _sync(self, step: int) -> None:
        if self.sync_every == 1:  # the policy itself: nothing to copy
            self._synced_at = step
        elif step % self.sync_every == 0:
            trained = [p.detach() for p in self._trained()]
            if self._sampler_weights is None:
                self._sampler_weights = [torch.empty_like(t) for t in trained]
            for copy, tensor in zip(self._sampler_weights, trained, strict=True):
                copy.copy_(tensor)  # in place: captured graphs read these addresses
            self._synced_at = step

    @contextmanager
    def _with_sampler_weights(self) -> Iterator[None]:
        """The model samples with them; the policy's own come back, whatever happens."""
        self._own_weights = [(p, p.data) for p in self._trained()]
        try:
            for (parameter, _), tensor in zip(self._own_weights, self._sampler_weights, strict=True):
                parameter.data = tensor
            yield
        finally:
            self.session.guard.begin_finish_first()  # a second press must not find half of them
            self._put_back()
            self.session.guard.end_finish_first()

    def _put_back(self) -> None:
        for parameter, tensor in self._own_weights:
            parameter.data = tensor
        self._own_weights = []

    def _save_where_it_stopped(self, why: str) -> None:
        self.session.guard.begin_finish_first()
        self._put_back()  # where an interrupt came on the very way out of a rollout
        super()._save_where_it_stopped(why)

    def _generate_single_turn(self, *args: Any, **kwargs: Any) -> Any:
        old = self.model.training and self.sync_every > 1  # evaluation samples from the policy
        with self._with_sampler_weights() if old else nullcontext():
            return super()._generate_single_turn(*args, **kwargs)

    # ---- batches ----------------------------------------------------------------------------------------------

    def _generate_and_score_completions(self, inputs: list[dict[str, Any]]) -> dict[str, Any]:
        if not self.model.training:
            return super()._generate_and_score_completions(inputs)
        step = self.state.global_step
        self._sync(step)
        self._waiting_before = (step, list(self._waiting))
        for i in range(self._arrivals(step)):
            if i:  # beyond the rows that this step was given
                prompts, name = len(inputs) // self.num_generations, f"ahead {step} {i}"
                inputs = draw_rows(
                    self.train_dataset, prompts, self.num_generations, seed=self.args.seed, name=name
                )
            self._waiting.append(self._make(inputs))
        newest = max(range(len(self._waiting)), key=lambda i: (self._waiting[i].weights_of, i))
        return self._serve(self._waiting.pop(newest if self.buffer == "newest" else 0), step)

    def _arrivals(self, step: int) -> int:
        """Batches the sampler finishes in this step; two in any two steps, as many as are used up."""
        if self.buffer is None:
            return 1
        if step == 0:
            return self.lead + 1
        pair, second = divmod(step - 1, 2)
        return random.Random(f"arrivals {self.args.seed} {pair}").choice(((1, 1), (2, 0), (0, 2)))[second]

    def _make(self, inputs: list[dict[str, Any]]) -> _Waiting:
        """Sampled and scored; its metrics are taken out, to be logged when it is served."""
        with metrics_set_aside(self, keep=("num_tokens",)) as own:
            output = super()._generate_and_score_completions(inputs)
        if "sampling_per_token_logps" not in output:  # the engine declined this run at its first rollout
            raise ValueError(
                f"rollout={self.rollout!r}: the kit's engine cannot do this run (see the line above), and only it "
                "can sample with older weights"
            )
        return _Waiting(output, self._synced_at, self.temperature, own)

    def _serve(self, batch: _Waiting, step: int) -> dict[str, Any]:
        metrics = self._metrics["train"]
        for name, values in batch.metrics.items():
            metrics[name].extend(values)
        metrics["num_tokens"] = [self.state.num_input_tokens_seen]
        age = step - batch.weights_of
        metrics["rollout/age"].append(float(age))
        if self.buffer:
            metrics["rollout/buffered"].append(float(len(self._waiting)))
        self.temperatures.set(batch.temperature)
        inputs = dict(batch.inputs)
        if age and self.importance_weights:
            inputs["old_per_token_logps"] = inputs["sampling_per_token_logps"]
        return inputs

    # ---- checkpoints ------------------------------------------------------------------------------------------

    def own_options(self) -> dict[str, Any]:
        """As they were given; run.json keeps them."""
        return {**self._options(), "importance_weights": self.importance_weights}

    def _options(self) -> dict[str, Any]:
        """Those that what waits in a checkpoint depends on."""
        return {"sync_every": self.sync_every, "buffer": self.buffer, "lead": self.lead}

    def _write_own(self, folder: Path) -> None:
        step = self.state.global_step
        if self.sync_every > 1 or self.buffer:
            began, before = self._waiting_before
            state = {
                "options": self._options(),
                "synced_at": self._synced_at,
                # Where the next step syncs anyway they would be written for nothing.
                "weights": self._sampler_weights if step % self.sync_every else None,
                "waiting": [vars(b) for b in (before if began == step else self._waiting)],
            }
            torch.save(state, folder / STATE_FILE)

    def _load_optimizer_and_scheduler(self, checkpoint: str | None) -> None:
        super()._load_optimizer_and_scheduler(checkpoint)
        self._forget()
        if checkpoint is None or (self.sync_every == 1 and not self.buffer):
            return
        file = Path(checkpoint) / STATE_FILE
        if not file.is_file():
            raise ValueError(
                f"resume_from_checkpoint={checkpoint!r} has no {STATE_FILE}: another trainer wrote it, and how old its "
                "rollouts were is not known; resume with that trainer, or start from its weights anew"
            )
        state = torch.load(file, map_location=self.accelerator.device, weights_only=True)
        if state["options"] != self._options():
            raise ValueError(
                f"resume_from_checkpoint={checkpoint!r} was written with {state['options']}, this trainer has "
                f"{self._options()}; give it the same"
            )
        self._synced_at = state["synced_at"]
        self._sampler_weights = state["weights"]
        self._waiting = [_Waiting(**b) for b in state["waiting"]]
