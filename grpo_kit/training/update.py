"""One optimizer step, in chunks of packed completions sized by memory: TRL's loss and gradient, less work.

TRL's loss sums over completions; its normalisers are constants of the step. So the step's completions may be
regrouped: what they share is computed once, as many tokens at once as memory allows. Completions
whose advantage is zero are left out where they add exactly nothing. Losses that need all completions of a micro-batch
at once (an entropy bonus, the high-entropy token mask) are differentiated by the log-probabilities first, then by the
weights.
Longer than 300 lines because a step, its chunks and its metrics share one job.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from trl import GRPOTrainer

from grpo_kit.engine.packing import FLEX_BLOCK, Row, make_chunks, pack_rows, rows_of
from grpo_kit.engine.update_memory import UpdateMemory
from grpo_kit.models import has_dropout
from grpo_kit.rollout.tree_attention import NAME as TREE
from grpo_kit.training.restore import get_random_state, set_random_state
from grpo_kit.training.trl_internals import add_high_entropy_masks, label_logprobs, loss_mask

MicroBatch = dict[str, Any]


class PackedUpdate:
    """Scores and gradients of packed completions, for one trainer.

    loss(model, micro_batch, logprobs, entropies, log=False, last=True): trl's loss of known ones.
    skip_zero_advantage: leave out completions whose advantage is 0, where that is exact.
    memory: how much at once. skipped: share of the last step's completions that were left out.
    """

    def __init__(
        self, trainer: GRPOTrainer, loss: Callable[..., torch.Tensor], *, skip_zero_advantage: bool
    ) -> None:
        self.trainer, self.loss = trainer, loss
        self._label_logprobs = partial(label_logprobs, trainer)
        self.skip_zero_advantage = skip_zero_advantage
        self.memory = UpdateMemory(
            trainer.model,
            trainer.accelerator.device,
            compute_itemsize=2 if trainer.args.bf16 or trainer.args.fp16 else None,
        )
        self.skipped = 0.0

    # ---- what can be left out ---------------------------------------------------------------------------------

    def _needs_whole_micro_batches(self) -> bool:
        return self.trainer.top_entropy_quantile < 1.0 or self.trainer._entropy_bonus_enabled

    def _may_skip(self) -> bool:
        return self.skip_zero_advantage and self.trainer.beta == 0.0 and not self._needs_whole_micro_batches()

    # ---- log-probabilities ------------------------------------------------------------------------------------

    def logprobs(self, model: Any, input_ids: torch.Tensor, attention_mask: torch.Tensor, width: int):
        """Log-probabilities and entropies (R, width) of the last `width` columns, without gradients, by chunks."""
        rows = rows_of(input_ids, attention_mask, width)
        return self.memory.run(lambda limit: self._logprobs_of_chunks(model, rows, width, limit), rows)

    def _logprobs_of_chunks(self, model: Any, rows: list[Row], width: int, limit: int):
        device = self.trainer.accelerator.device
        logprobs = torch.zeros(len(rows), width, device=device)
        entropies = torch.zeros(len(rows), width, device=device)
        with self.memory.attention_of(model), torch.no_grad():
            for chunk in make_chunks(rows, limit):
                logprobs[chunk], entropies[chunk] = self._forward(model, [rows[i] for i in chunk], width)
        return logprobs, entropies

    def _forward(self, model: Any, rows: list[Row], width: int):
        attention = self.memory.attention
        multiple = FLEX_BLOCK if attention == "flex_attention" else 1
        packed = pack_rows(rows, self.trainer.accelerator.device, multiple=multiple)
        masks = {"flex_attention": packed.block_mask, TREE: packed.plan}
        mask = masks.get(attention, packed.dense_mask)()
        logprobs, entropies = self._label_logprobs(
            model, packed.input_ids, mask, packed.position_ids, packed.labels
        )
        return packed.unpack(logprobs, width), packed.unpack(entropies, width)

    # ---- the step ---------------------------------------------------------------------------------------------

    def step(self, model: Any, window: list[MicroBatch]) -> torch.Tensor:
        """Gradients of one optimizer step's micro-batches into .grad; returns TRL's loss (a scalar, no graph)."""
        loss, job = self.gradients(model, window)
        self.report(job)
        return loss

    def gradients(self, model: Any, window: list[MicroBatch]) -> tuple[torch.Tensor, _Job]:
        """As step, without its metrics, which `report` adds up; of several processes each is for itself here."""
        rows, where = [], []  # where: (micro-batch, its row)
        for m, micro in enumerate(window):
            ids = torch.cat([micro["prompt_ids"], micro["completion_ids"]], dim=1)
            mask = torch.cat([micro["prompt_mask"], micro["completion_mask"]], dim=1)
            rows += rows_of(ids, mask, micro["completion_ids"].size(1))
            where += [(m, i) for i in range(len(ids))]
        keep = list(range(len(rows)))
        if self._may_skip():
            advantages = [a for micro in window for a in _any_nonzero(micro["advantages"])]
            keep = [i for i, counts in enumerate(advantages) if counts]
        self.skipped = 1 - len(keep) / len(rows)
        job = _Job(model, window, rows, where, keep)
        run = self._two_passes if self._needs_whole_micro_batches() else self._one_pass
        loss = self.memory.run(lambda limit: run(job, limit), [rows[i] for i in keep])
        if not keep:  # TRL's gradient is then zero, not missing: momentum and weight decay act
            for parameter in model.parameters():
                parameter.grad = torch.zeros_like(parameter) if parameter.requires_grad else None
        return loss, job

    def _one_pass(self, job: _Job, limit: int) -> torch.Tensor:
        """Each chunk forward and backward at once, its share of the loss by TRL's own code."""
        total = torch.zeros((), device=self.trainer.accelerator.device)
        with self.memory.attention_of(job.model):
            for chunk in job.chunks(limit):
                logprobs, entropies = self._forward(job.model, [job.rows[i] for i in chunk], job.width)
                job.store(chunk, logprobs, entropies)
                loss = sum(
                    self._share_of_loss(job, chunk, members, logprobs, entropies)
                    for members in self._parts(job, chunk)
                )
                self.trainer.accelerator.backward(loss)
                total += loss.detach()
        return total

    def _parts(self, job: _Job, chunk: list[int]) -> list[list[int]]:
        """Positions in the chunk that one call of TRL's loss may take: one normaliser, one width.

        bnpo divides by the micro-batch's tokens, so its micro-batches stay apart; else those of a buffer go together.
        """
        parts: dict[Any, list[int]] = {}
        for position, i in enumerate(chunk):
            m = job.where[i][0]
            bnpo = self.trainer.loss_type == "bnpo"
            parts.setdefault(m if bnpo else id(job.window[m]["num_items_in_batch"]), []).append(position)
        return list(parts.values())

    def _share_of_loss(
        self, job: _Job, chunk: list[int], members: list[int], logprobs: torch.Tensor, entropies: Any
    ):
        """TRL's loss of some rows of a micro-batch, as the share it has in the whole micro-batch's."""
        trainer, rows = self.trainer, [chunk[p] for p in members]
        micro = job.window[job.where[rows[0]][0]]
        part = job.take(rows)
        width = part["completion_ids"].size(1)
        loss = self.loss(job.model, part, logprobs[members, :width], entropies[members, :width])
        if trainer.loss_type == "bnpo":
            return loss * loss_mask(part).sum().clamp(min=1.0) / loss_mask(micro).sum().clamp(min=1.0)
        if trainer.loss_type in ("grpo", "sapo", "luspo", "dr_grpo"):  # means over rows
            return loss * len(rows) / len(micro["advantages"])
        return loss  # divided by a constant of the step

    def _two_passes(self, job: _Job, limit: int) -> torch.Tensor:
        """Known ones without a graph, TRL's loss differentiated by them, then the chunks again with those gradients."""
        state = get_random_state()
        with self.memory.attention_of(job.model):
            chunks = job.chunks(limit)
            with torch.no_grad():
                for chunk in chunks:
                    job.store(chunk, *self._forward(job.model, [job.rows[i] for i in chunk], job.width))
            add_high_entropy_masks(self.trainer, job)
            with torch.enable_grad():
                known = job.logprobs.clone().requires_grad_(), job.entropies.clone().requires_grad_()
                total = sum(self._loss_of_micro_batch(job, m, *known) for m in range(len(job.window)))
                by_logprobs, by_entropies = torch.autograd.grad(total, known, allow_unused=True)
            set_random_state(state)  # LoRA dropout draws the same masks again
            for chunk in chunks:
                logprobs, entropies = self._forward(job.model, [job.rows[i] for i in chunk], job.width)
                proxy = (logprobs * by_logprobs[chunk]).sum()
                if by_entropies is not None:
                    proxy = proxy + (entropies * by_entropies[chunk]).sum()
                self.trainer.accelerator.backward(proxy)
        return total.detach()

    def _loss_of_micro_batch(
        self, job: _Job, m: int, logprobs: torch.Tensor, entropies: torch.Tensor
    ) -> torch.Tensor:
        rows = job.rows_in(m)
        width = job.window[m]["completion_ids"].size(1)
        known = {"high_entropy": job.high_entropy.get(m)}
        return self.loss(job.model, job.window[m], logprobs[rows, :width], entropies[rows, :width], **known)

    def _keep_old(self, job: _Job) -> None:
        """This pass's log-probabilities are the old ones of the later passes over the buffer."""
        for m, micro in enumerate(job.window):
            width = micro["completion_ids"].size(1)
            micro.setdefault("old_per_token_logps", job.logprobs[job.rows_in(m), :width].clone())

    def report(self, job: _Job) -> None:
        """TRL's own metrics of the step, of all processes, and how far sampler and trainer are apart."""
        gap, tokens = 0.0, 0.0
        self._score_silent(job)
        for m, micro in enumerate(job.window):
            rows = job.rows_in(m)
            width = micro["completion_ids"].size(1)
            sampled, mask = micro.get("sampling_per_token_logps"), loss_mask(micro).bool()
            scored = torch.tensor([i in job.kept for i in rows], device=mask.device)
            logprobs, entropies = job.logprobs[rows, :width], job.entropies[rows, :width]
            if sampled is not None:
                before = micro.get("old_per_token_logps", logprobs)
                inside = mask & scored[:, None] & ~sampled.isnan()
                gap += (before - sampled)[inside].abs().sum().item()
                tokens += inside.sum().item()
            entropy, logged = micro.get("sampling_per_token_entropies"), micro
            if entropy is not None and sampled is not None:  # skipped rows: as they were sampled
                logprobs = torch.where(scored[:, None], logprobs, micro.get("old_per_token_logps", sampled))
                entropies = torch.where(scored[:, None], entropies, entropy)
            elif not scored.all():
                logged = {**micro, "completion_mask": micro["completion_mask"] * scored[:, None]}
            with torch.no_grad():
                last = m == len(job.window) - 1
                self.loss(job.model, logged, logprobs, entropies, log=True, last=last)
        metrics = self.trainer._metrics["train"]
        if self.trainer.ranks.together:
            gap, tokens, self.skipped = self.trainer.ranks.sum(gap, tokens, self.skipped)
            self.skipped /= self.trainer.ranks.count  # each has as many rows
        metrics["update/skipped"].append(self.skipped)
        if tokens:
            metrics["rollout/logprob_gap"].append(gap / tokens)
        if self.reused:
            self._keep_old(job)

    def _score_silent(self, job: _Job) -> None:
        """Score micro-batches that were skipped whole, where no sampler gave entropies: else the step's would be 0."""
        silent = [
            i
            for m, micro in enumerate(job.window)
            if micro.get("sampling_per_token_entropies") is None and not job.kept & {*job.rows_in(m)}
            for i in job.rows_in(m)
        ]
        if silent:
            rows = [job.rows[i] for i in silent]
            score = lambda limit: self._logprobs_of_chunks(job.model, rows, job.width, limit)  # noqa: E731
            job.store(silent, *self.memory.run(score, rows))
            job.kept |= {*silent}

    @property
    def reused(self) -> bool:
        """Do later passes over the buffer need this one's log-probabilities?"""
        return self.trainer.num_iterations > 1 and not has_dropout(self.trainer.model)


class _Job:
    """The rows of one optimizer step and what has been scored of them."""

    def __init__(
        self, model: Any, window: list[MicroBatch], rows: list[Row], where: list, keep: list[int]
    ) -> None:
        self.model, self.window, self.rows, self.where = model, window, rows, where
        self.keep, self.kept = keep, set(keep)
        self.high_entropy: dict[
            int, torch.Tensor
        ] = {}  # of each micro-batch, where trl leaves the other tokens out
        self.width = max(micro["completion_ids"].size(1) for micro in window)
        device = window[0]["completion_ids"].device
        self.logprobs = torch.zeros(len(rows), self.width, device=device)
        self.entropies = torch.zeros(len(rows), self.width, device=device)

    def rows_in(self, m: int) -> list[int]:
        """Indices of micro-batch m's rows."""
        return [i for i, (micro, _) in enumerate(self.where) if micro == m]

    def chunks(self, limit: int) -> list[list[int]]:
        kept = [self.rows[i] for i in self.keep]
        return [[self.keep[j] for j in chunk] for chunk in make_chunks(kept, limit)]

    def store(self, rows: list[int], logprobs: torch.Tensor, entropies: torch.Tensor) -> None:
        self.logprobs[rows], self.entropies[rows] = logprobs.detach().float(), entropies.detach().float()

    def take(self, rows: list[int]) -> MicroBatch:
        """The rows as one micro-batch; all are of one buffer, so widths agree."""
        parts: dict[int, list[int]] = {}
        for i in rows:
            parts.setdefault(self.where[i][0], []).append(self.where[i][1])
        micros = [
            {k: v[r] if _is_per_row(v) else v for k, v in self.window[m].items()} for m, r in parts.items()
        ]
        return {
            k: torch.cat([micro[k] for micro in micros]) if _is_per_row(v) else v
            for k, v in micros[0].items()
        }


def _is_per_row(value: Any) -> bool:
    return isinstance(value, torch.Tensor) and value.ndim > 0


def _any_nonzero(advantages: torch.Tensor) -> list[bool]:
    return advantages.reshape(len(advantages), -1).ne(0).any(1).tolist()  # (R,) or (R, T)
