"""Stages 6 and 7 of a step: log-probabilities and entropies, packed where possible, and trl's loss of known ones."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from typing import Any

import torch
from trl import GRPOTrainer

from grpo_kit.engine.packing import why_not_packed
from grpo_kit.models import has_dropout
from grpo_kit.training.trl_internals import LOSS_STATE, metrics_set_aside
from grpo_kit.training.update import PackedUpdate


class Logprobs:
    """Log-probabilities and entropies for one trainer, packed where that can be done, and trl's loss of them.

    plain: packing failed on this machine (first_contact.py); all is trl's from then on. heard: a list that collects the
    log-probabilities which losses are computed from, detached; None: nobody listens.
    """

    def __init__(self, trainer: Any, *, pack: bool, skip_zero_advantage: bool) -> None:
        self.trainer, self.pack = trainer, pack
        self.update = PackedUpdate(trainer, self.loss, skip_zero_advantage=skip_zero_advantage)
        self._ready: tuple[torch.Tensor, torch.Tensor] | None = None
        self._said: set[str] = set()  # reasons not to pack
        self._window: list[dict[str, Any]] = []  # micro-batches of the current optimizer step
        self.high_entropy: torch.Tensor | None = (
            None  # the mask of the micro-batch whose loss is computed, if known
        )
        self.plain = False
        self.heard: list[torch.Tensor] | None = None

    def begin(self) -> None:
        """A run begins: no micro-batch of an earlier one stays."""
        self._window.clear()

    @contextmanager
    def old_ones_by_the_first_pass(self) -> Iterator[None]:
        """No pass of its own for them when one optimizer step sees the whole buffer before the weights move."""
        trainer, iterations = self.trainer, self.trainer.num_iterations
        covered = trainer.args.gradient_accumulation_steps % trainer.args.steps_per_generation == 0
        if covered and self.packs({}) and not has_dropout(trainer.model):
            trainer.num_iterations = 1
        try:
            yield
        finally:
            trainer.num_iterations = iterations

    def packs(self, inputs: dict[str, Any]) -> bool:
        """Can these inputs be computed packed? Why they cannot is said once."""
        if not self.pack or self.plain:
            return False
        why_not = self._why_not(inputs)
        if why_not is not None and why_not not in self._said:
            self._said.add(why_not)
            self.trainer.recorder.say(
                f"The packed update cannot do this run ({why_not}); log-probabilities and update are trl's own, each "
                "prompt computed once a completion."
            )
        return why_not is None

    def _why_not(self, inputs: dict[str, Any]) -> str | None:
        if self.trainer.ranks.sharded:
            return "its weights are sharded"
        if self.trainer.aux_loss_enabled:
            return "it has an auxiliary loss"
        images = ("pixel", "image", "num_images", "num_tiles", "token_type")
        return (
            "images" if any(key.startswith(images) for key in inputs) else why_not_packed(self.trainer.model)
        )

    def collects(self, inputs: dict[str, Any]) -> bool:
        """Do these micro-batches wait for the last one of their optimizer step?"""
        return self.plain or self.packs(inputs)

    def of(
        self,
        trl_logprobs: Callable[..., Any],
        model: Any,
        input_ids: torch.Tensor,
        attention_mask: torch.Tensor,
        logits_to_keep: int,
        *args: Any,
        **kwargs: Any,
    ) -> tuple:
        """What trl's _get_per_token_logps_and_entropies gives. trl_logprobs: trl's own way, for what is not packed."""
        if self._ready is not None:
            self._hear(self._ready[0])
            return *self._ready, None
        scoring = not torch.is_grad_enabled()  # old and reference log-probabilities: no dropout either
        training = model.training
        if scoring:
            model.eval()
        try:
            given = {k: v for k, v in kwargs.items() if v is not None}
            trl = partial(trl_logprobs, model)
            if scoring and self.packs(given):  # who differentiates them has trl's graph
                packed = partial(self.update.logprobs, model)
                rows = input_ids, attention_mask, logits_to_keep
                found = self.trainer.first_contact.scores(packed, trl, *rows)
                if found is not None:
                    return found[0], found[1] if kwargs.get("compute_entropy") else None, None
            found = trl(input_ids, attention_mask, logits_to_keep, *args, **kwargs)
            self._hear(found[0])
            return found
        finally:
            model.train(training)

    def collect(self, model: Any, inputs: dict[str, Any]) -> torch.Tensor:
        """The loss of an optimizer step at its last micro-batch, its gradients in place already; before that, 0."""
        self._window.append(inputs)
        loss = torch.zeros((), device=self.trainer.accelerator.device)
        if self.trainer.accelerator.sync_gradients:
            window, self._window = self._window, []
            loss = self.trainer.first_contact.step(model, window)
        return loss.requires_grad_()  # backward finds nothing below

    def plain_step(self, model: Any, window: list[dict[str, Any]]) -> torch.Tensor:
        """As update.step, but trl's way: each micro-batch forward and backward, each prompt once a completion."""
        trainer = self.trainer
        gradient_state = trainer.accelerator.gradient_state
        total = torch.zeros((), device=trainer.accelerator.device)
        listener, self.heard = self.heard, []
        try:
            for micro in window:
                gradient_state._set_sync_gradients(micro is window[-1])
                loss = GRPOTrainer.compute_loss(trainer, model, micro)
                trainer.accelerator.backward(loss)
                total += loss.detach()
                if self.update.reused:  # old ones of the later passes over the buffer
                    micro.setdefault("old_per_token_logps", self.heard[-1])
        finally:
            gradient_state._set_sync_gradients(True)
            if listener is not None:
                listener += self.heard
            self.heard = listener
        return total

    def _hear(self, logprobs: torch.Tensor) -> None:
        if self.heard is not None:
            self.heard.append(logprobs.detach())

    def loss(
        self,
        model: Any,
        micro: dict[str, Any],
        logprobs: torch.Tensor,
        entropies: torch.Tensor,
        *,
        log: bool = False,
        last: bool = True,
        high_entropy: torch.Tensor | None = None,
    ) -> torch.Tensor:
        """trl's loss of known log-probabilities of a micro-batch; its metrics and controllers move only if log.

        Of several processes each computes its own; with log the metrics are of all. high_entropy: trl's mask, if known.
        """
        trainer = self.trainer
        state = {name: getattr(trainer, name) for name in LOSS_STATE}
        gradient_state = trainer.accelerator.gradient_state
        sync = gradient_state.sync_gradients
        gradient_state._set_sync_gradients(last)
        self._ready, self.high_entropy = (logprobs, entropies), high_entropy
        try:
            if log:
                return trainer._compute_loss(model, micro)
            with metrics_set_aside(trainer), trainer.ranks.alone(trainer.accelerator):
                return trainer._compute_loss(model, micro)
        finally:
            self._ready = self.high_entropy = None
            gradient_state._set_sync_gradients(sync)
            if not log:
                vars(trainer).update(state)
