"""OlderWeights: rollouts as old as on a cluster, where sampler and trainer work side by side, on one device.

On a cluster the sampler's weights are copied from the trainer's every so many steps, and finished rollouts wait in a
buffer. Both make rollouts stale: sampled by mu, trained on by pi. Here the same staleness is made on purpose, with all
else equal, to see what it costs. One process takes turns, so nothing gets faster; benchmarks/utilisation.py computes
what a cluster would gain.

    from examples.older_weights import OlderWeights
    trainer = kit.GRPOTrainer(model, task, config, tokenizer=tokenizer, sample=OlderWeights(sync_every=10))
"""

from __future__ import annotations

import random
from collections.abc import Iterator, Sequence
from contextlib import nullcontext
from dataclasses import KW_ONLY, dataclass, field, fields, replace
from typing import Any, Literal

import torch

from grpo_kit.loop.batch import Batch, generate, padded
from grpo_kit.loop.config import Config, StepNumbers
from grpo_kit.loop.padded_update import PaddedUpdate
from grpo_kit.loop.policy_loss import weights_of
from grpo_kit.loop.processes import rows_of_step
from grpo_kit.loop.protocols import optional


@dataclass
class OlderWeights:
    """The loop's `sample`, whose completions another `sample` makes with older weights.

    inner: the one that makes them. None: the one that the trainer would take by itself.
    sync_every: steps between two copies of the policy to the sampler, >= 1: at step t it has the weights of step
    t // sync_every * sync_every. Above 1 it costs one copy of the trained weights in memory.
    importance_weights: True: the clipped ratio is pi / mu, mu the older weights' probabilities (at the temperature they
    sampled at, before top-k and top-p, as pi's). False: the ratio is taken to be 1, as in a trainer that does not know
    its data is old. Where the age is 0 the ratio is 1, as without this class.
    buffer: None, or batches of rollouts wait between sampler and trainer. The sampler is as fast as the trainer, but
    uneven (of every two steps both see one new batch, or one sees two and the other none, drawn from the seed), and
    starts `lead` batches early. "fifo" serves the oldest: a batch waits lead - 1 to lead + 1 steps. "newest" serves
    the newest, and goes back to older ones only in a step that sees no new one.
    lead: batches the sampler is ahead, >= 1 with a buffer. Cost: those left when training ends, lead - 1 to
    lead + 1 batches in the whole run. Prompts beyond a step's own come from anywhere, as config.dynamic_sampling's do.

    A batch is scored, by today's reward weights, in the step that trains on it, and written there. Its `temperature` in
    the completions is the one that it was sampled at.
    Metrics: rollout/age, the steps between the weights that made the batch and those it trains; rollout/buffered,
    batches left waiting. Without importance weights, rollout/logprob_gap of an old batch is how far the policy has
    moved since.
    Raises ValueError for a lead without a buffer or the reverse, and, with a buffer, for config.dynamic_sampling and
    for several processes.
    Sources: IMPALA (arXiv:1802.01561: policy lag, importance weights); asynchronous RLHF (arXiv:2410.18252: learning
    from rollouts some steps old); PPO (arXiv:1707.06347: the clipped ratio against the sampling policy).

    >>> GRPOTrainer(model, task, config, tokenizer=tokenizer, sample=OlderWeights(sync_every=10))  # doctest: +SKIP
    >>> OlderWeights(buffer="newest", lead=4)
    OlderWeights(sync_every=1, buffer='newest', lead=4, importance_weights=True)
    """

    inner: Any = field(default=None, repr=False)
    _: KW_ONLY
    sync_every: int = 1
    buffer: Literal["fifo", "newest"] | None = None
    lead: int = 0
    importance_weights: bool = True

    def __post_init__(self) -> None:
        if type(self.sync_every) is not int or self.sync_every < 1:
            raise ValueError(
                f"sync_every={self.sync_every!r} must be a whole number of at least 1, the steps between two syncs"
            )
        if self.buffer not in (None, "fifo", "newest"):
            raise ValueError(
                f"buffer={self.buffer!r} is not known; use None, 'fifo' or 'newest'"
            )
        if not isinstance(self.lead, int) or (self.lead < 1 if self.buffer else self.lead != 0):
            raise ValueError(
                f"lead={self.lead!r} with buffer={self.buffer!r}: give a buffer and at least 1 batch, or neither"
            )
        # the sampler's, of what is trained, by name
        self._weights: dict[str, torch.Tensor] | None = None
        self._waiting: list[dict[str, Any]] = []  # as state() has them; none is ever changed
        self._step, self._age = -1, 0  # of the last call

    def __call__(
        self,
        model: Any,
        tokenizer: Any,
        task: Any,
        rows: Sequence[dict[str, Any]],
        config: Config,
        numbers: StepNumbers,
    ) -> Batch:
        """The batch that this step trains on, of these rows, or with a buffer of an earlier step's."""
        self._step = step = numbers.step
        if step == 0:  # a run begins
            self._weights, self._waiting = None, []
        self._sync(model, step)

        def make(rows: Sequence[dict[str, Any]]) -> Batch:
            """By the sampler's weights; the policy's own come back, whatever happens (a stop: see the loop)."""
            older = self.sync_every > 1
            with weights_of(dict(_trained(model)), self._weights) if older else nullcontext():
                made = (self.inner or generate)(model, tokenizer, task, rows, config, numbers)
                if (
                    made.sampler_logprobs is None
                    and self.importance_weights
                    and (self.buffer or older)
                ):
                    table = (
                        PaddedUpdate(config).logprobs(model, made, numbers.temperature).tolist()
                    )
                    lengths = map(len, made.completion_ids)
                    made.sampler_logprobs = [
                        line[:n] for line, n in zip(table, lengths, strict=True)
                    ]
            return made

        if self.buffer is None:
            batch, made_in = make(rows), step
        else:
            self._check(rows, config)
            for place in range(self._arrivals(config.seed, step)):
                made = make(rows_of_step(task.train, config, step, place))
                made.extra["temperature"] = [numbers.temperature] * len(made)
                kept = {
                    each.name: getattr(made, each.name)
                    for each in fields(Batch)
                    if each.name != "rows"
                }
                self._waiting.append({"step": step, "place": place, "batch": kept})
            served = self._waiting.pop(-1 if self.buffer == "newest" else 0)
            made_in, values = served["step"], served["batch"]
            own = rows_of_step(task.train, config, made_in, served["place"])
            rows_again = [own[group] for group in values["groups"]]
            batch = Batch(rows=rows_again, **values | {"extra": dict(values["extra"])})
        self._age = step - made_in // self.sync_every * self.sync_every
        if self._age and self.importance_weights:
            device = next(model.parameters()).device
            batch.old_logprobs = padded(batch.sampler_logprobs, batch.width, device)
        return batch

    def around(self, sample: Any) -> OlderWeights:
        """A fresh one by the sample that a trainer would take itself, for kit.GRPOTrainer; a given inner stays."""
        return replace(self, inner=self.inner or sample)

    def measures(self, batch: Batch, task: Any) -> dict[str, float]:
        """rollout/age and rollout/buffered of the last step, and what the inner sample measures."""
        found = optional(self.inner, "measures", {}, batch, task)
        found["rollout/age"] = float(self._age)
        return found | ({"rollout/buffered": float(len(self._waiting))} if self.buffer else {})

    # ---- from step to step --------------------------------------------------------------------------------------

    def state(self) -> dict[str, Any]:
        """What the next step depends on: the sampler's weights, where it does not sync anyway, and waiting batches."""
        syncs = (self._step + 1) % self.sync_every == 0
        return {
            "options": {
                each.name: getattr(self, each.name)
                for each in fields(self)
                if each.name != "inner"
            },
            "weights": None if syncs else self._weights,
            "waiting": list(self._waiting),
        }

    def load_state(self, state: dict[str, Any]) -> None:
        """Go on from a state. Raises ValueError where it was written with other options."""
        own = self.state()["options"]
        for name, value in state["options"].items():
            if value != own[name]:
                raise ValueError(
                    f"{name} was {value!r} and is {own[name]!r}; give OlderWeights the same"
                )
        self._weights, self._waiting = state["weights"], list(state["waiting"])

    def _sync(self, model: Any, step: int) -> None:
        if self.sync_every == 1:  # the policy itself: nothing to copy
            return
        if step % self.sync_every:
            if self._weights is None:
                raise ValueError(
                    f"step {step} samples with the weights of step {step // self.sync_every * self.sync_every}, which "
                    "are not here; begin a run with OlderWeights, or go on from a checkpoint of one"
                )
            return
        if self._weights is None:
            self._weights = {name: torch.empty_like(p) for name, p in _trained(model)}
        for name, p in _trained(model):
            # in place: captured graphs read these addresses
            self._weights[name].copy_(p.detach())

    def _arrivals(self, seed: int, step: int) -> int:
        """Batches the sampler finishes in this step; two in any two steps, as many as are used up."""
        if step == 0:
            return self.lead + 1
        pair, second = divmod(step - 1, 2)
        return random.Random(f"arrivals {seed} {pair}").choice(((1, 1), (2, 0), (0, 2)))[second]

    def _check(self, rows: Sequence[dict[str, Any]], config: Config) -> None:
        if config.dynamic_sampling:
            raise ValueError(
                f"dynamic_sampling={config.dynamic_sampling!r}: a buffer serves a step one batch; use "
                "dynamic_sampling=0, or buffer=None"
            )
        if len(rows) != config.prompts_per_step:
            raise ValueError(
                f"buffer={self.buffer!r}: waiting batches stay with one process, and this run has several; start one"
            )


def _trained(model: Any) -> Iterator[tuple[str, torch.nn.Parameter]]:
    return ((name, p) for name, p in model.named_parameters() if p.requires_grad)
