"""PaddedUpdate: the gradient of an update, plainly: padded rows through the whole model. It trains any causal model.

Where a model does not hide padding, rows of equal length go through it together.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import pad

from grpo_kit.loop.batch import Batch, padded
from grpo_kit.loop.config import Config
from grpo_kit.loop.policy_loss import PolicyLoss
from grpo_kit.loop.processes import autocast
from grpo_kit.models._model_facts import CHECKPOINTING, base_model, is_checkpointing
from grpo_kit.models.token_lists import left_pad, logits_of, rows_together


class PaddedUpdate:
    """Log-probabilities and gradients of a Batch. `micro_batch` completions at a time, half of it where memory ends.

    shift: positions that all rows are moved by, with padding; the numbers are the same up to rounding.
    """

    def __init__(self, config: Config, *, shift: int = 0) -> None:
        self.config, self._shift = config, shift
        self.micro_batch = config.micro_batch

    def logprobs(self, model: Any, batch: Batch, temperature: float) -> Tensor:
        """(N, T), without gradients: the log-probabilities of the completions' tokens, 0 behind their ends."""
        with torch.no_grad():
            return self._in_parts(
                lambda places: self._forward(model, batch, places, temperature)[0],
                range(len(batch)),
                torch.cat,
            )

    def gradients(
        self,
        model: Any,
        batch: Batch,
        loss: PolicyLoss,
        temperature: float,
        backward: Callable[[Tensor], None],
    ) -> float:
        """The update's loss; its gradient is added into each parameter's .grad by `backward`."""
        places = loss.needed()
        if not places:
            return 0.0

        def loss_of(part: Sequence[int]) -> float:
            share = loss(part, *self._forward(model, batch, part, temperature))
            backward(share)
            return share.item()

        def start_over() -> None:
            model.zero_grad(set_to_none=True)
            loss.start_over()

        with checkpointing(model, self.config):
            return self._in_parts(loss_of, places, sum, start_over)

    def _in_parts(
        self,
        work: Callable[[Sequence[int]], Any],
        places: Sequence[int],
        join: Callable[[list[Any]], Any],
        start_over: Callable[[], None] = lambda: None,
    ) -> Any:
        """join of work(part) over all parts; out of memory, everything starts over with parts half as large."""
        while True:
            size = self.micro_batch
            try:
                return join([work(places[i : i + size]) for i in range(0, len(places), size)])
            except torch.OutOfMemoryError:
                if size == 1:
                    raise
            start_over()
            self.micro_batch = size // 2
            if torch.cuda.is_available():
                torch.cuda.empty_cache()
            print(
                f"Out of memory with {size} completions at once: the update starts over with {size // 2}"
            )

    def _forward(
        self, model: Any, batch: Batch, places: Sequence[int], temperature: float
    ) -> tuple[Tensor, Tensor]:
        """Log-probabilities and entropies of these completions' tokens, both (len(places), T)."""
        parts = rows_together(model, [batch.prompt_ids[place] for place in places])
        computed = [
            self._padded(model, batch, [places[n] for n in part], temperature) for part in parts
        ]
        logprobs, entropies = (torch.cat(tensors) for tensors in zip(*computed, strict=True))
        order = torch.tensor(sum(parts, [])).argsort().to(logprobs.device)
        return logprobs[order], entropies[order]

    def _padded(
        self, model: Any, batch: Batch, places: Sequence[int], temperature: float
    ) -> tuple[Tensor, Tensor]:
        device, width = next(model.parameters()).device, batch.width
        completions = [batch.completion_ids[place] for place in places]
        prompt_ids, prompt_mask = left_pad(
            [batch.prompt_ids[place] for place in places], 0, device
        )
        completion_ids = padded(completions, width, device)
        completion_mask = padded([[1] * len(ids) for ids in completions], width, device)
        ids = pad(torch.cat([prompt_ids, completion_ids], 1), (self._shift, 0))
        mask = pad(torch.cat([prompt_mask, completion_mask], 1), (self._shift, 0))
        with autocast(self.config, device):
            logits = logits_of(model, ids, mask, width + 1, self._shift)
        table = torch.log_softmax(logits[:, :-1].float() / temperature, dim=-1)  # (n, T, V)
        logprobs = table.gather(-1, completion_ids[:, :, None]).squeeze(-1)
        with torch.set_grad_enabled(torch.is_grad_enabled() and self.config.entropy_bonus > 0):
            entropies = -(table.exp() * table).sum(-1)
        return logprobs * completion_mask, entropies * completion_mask


@contextmanager
def checkpointing(model: Any, config: Config) -> Iterator[None]:
    """Inside, layers compute their activations again in the backward pass, where config.gradient_checkpointing says so.

    Less memory, about a third more time, the same gradient.
    """
    base = base_model(model)
    if not config.gradient_checkpointing or is_checkpointing(base):
        yield
        return
    getattr(base, f"{CHECKPOINTING}_enable")({"use_reentrant": False})
    try:
        yield
    finally:
        getattr(base, f"{CHECKPOINTING}_disable")()
