"""PackedUpdate: the gradient of an update, with what the completions share computed once and nothing padded.

The losses divide by numbers of the whole update, so its completions may be computed in any parts. Here a part is one
row of tokens, the tree of their shared prefixes, as long as memory allows; completions without a gradient are left out.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.utils.checkpoint import checkpoint

from grpo_kit.engine._packing import FLEX_BLOCK, PackedMasks, Row, make_chunks, pack_rows
from grpo_kit.engine._supported_models import is_tested
from grpo_kit.engine._update_memory import UpdateMemory
from grpo_kit.engine.cpu._layers import head_of
from grpo_kit.engine.cpu._matmul import embed, head_logprobs, usable_head
from grpo_kit.engine.cpu._tree_attention import NAME as TREE
from grpo_kit.engine.cpu._tree_attention import TreePlan
from grpo_kit.engine.memory._activations import HEAD_TILE
from grpo_kit.loop.config import Config
from grpo_kit.loop.padded_update import autocast
from grpo_kit.loop.policy_loss import PolicyLoss
from grpo_kit.loop.step_batch import Batch
from grpo_kit.models._model_facts import base_model, token_rows


class PackedUpdate:
    """The update of one model, called as PaddedUpdate is. memory: how much at once, and what is done where it ends."""

    def __init__(self, model: Any, config: Config) -> None:
        self.config = config
        device = next(model.parameters()).device
        self.memory = UpdateMemory(model, device, compute_itemsize=None if config.autocast == "none" else 2)

    def logprobs(self, model: Any, batch: Batch, temperature: float) -> Tensor:
        """(N, T), without gradients: the log-probabilities of the completions' tokens, 0 behind their ends."""
        rows = as_rows(batch.prompt_ids, batch.completion_ids)

        def compute(limit: int) -> Tensor:
            logprobs = torch.zeros(len(rows), batch.width, dtype=torch.float32, device=self.memory.device)
            with self.memory.attention_of(model), torch.no_grad():
                for chunk in make_chunks(rows, limit):
                    chunk_rows = [rows[i] for i in chunk]
                    logprobs[chunk] = self._forward(model, chunk_rows, batch.width, temperature)[0]
            return logprobs

        return self.memory.run(compute, rows)

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
        batch_rows = as_rows(batch.prompt_ids, batch.completion_ids)
        rows = [batch_rows[place] for place in places]
        self.memory.entropy_bonus = self.config.entropy_bonus > 0

        def compute(limit: int) -> float:
            loss.start_over()
            total = 0.0
            with self.memory.attention_of(model):
                for chunk in make_chunks(rows, limit):
                    scores = self._forward(model, [rows[i] for i in chunk], batch.width, temperature)
                    share = loss([places[i] for i in chunk], *scores)
                    backward(share)
                    total += share.item()
            return total

        return self.memory.run(compute, rows) if places else 0.0

    def _forward(
        self, model: Any, rows: Sequence[Row], width: int, temperature: float
    ) -> tuple[Tensor, Tensor]:
        """Log-probabilities and entropies of these rows' completions, both (len(rows), width)."""
        flex = self.memory.attention == "flex_attention"
        packed = pack_rows(rows, self.memory.device, multiple=FLEX_BLOCK if flex else 1)
        base = base_model(model)
        mask = None  # who sees whom: a mask, or None where the kit's attention takes it from the config
        if self.memory.attention == TREE:
            base.config.handed_to_attention = TreePlan(packed.tree)
        elif self.memory.by_layer:
            base.config.handed_to_attention = PackedMasks(packed, self.memory.attention)
        else:
            mask = packed.block_mask() if flex else packed.dense_mask()
        with autocast(self.config, self.memory.device):
            inputs = {"input_ids": packed.input_ids}
            embedded = embed(base.get_input_embeddings(), packed.input_ids)
            if embedded is not None:
                inputs = {"inputs_embeds": embedded}
            outputs = base.get_decoder()(
                **inputs, attention_mask=mask, position_ids=packed.position_ids, use_cache=False
            )
            hidden = outputs.last_hidden_state[0]
            scored = (packed.labels[0] != -100).nonzero().squeeze(1)
            scores = self._head(base, hidden[scored], packed.labels[0, scored], temperature)
        padded = []
        for values in scores:
            zeros = torch.zeros(len(hidden), dtype=values.dtype, device=values.device)
            by_position = zeros.index_put((scored,), values)[None]
            padded.append(packed.unpack(by_position, width))
        return tuple(padded)

    def _head(self, base: Any, hidden: Tensor, labels: Tensor, temperature: float) -> tuple[Tensor, Tensor]:
        """Log-probabilities and entropies of the labels, (S,) each; logits are never there for all tokens at once."""
        head = base.get_output_embeddings()
        if is_tested(base) and usable_head(head, hidden):
            return head_logprobs(hidden, head.weight, labels, 1 / temperature, token_rows(base))
        return tiled_logprobs(
            head_of(base), hidden, labels, temperature, entropy_gradient=self.config.entropy_bonus > 0
        )


def tiled_logprobs(
    head: Any, hidden: Tensor, labels: Tensor, temperature: float, *, entropy_gradient: bool = False
) -> tuple[Tensor, Tensor]:
    """Log-probabilities and entropies of labels (S,) from hidden states (S, H), HEAD_TILE of them at a time.

    The backward pass computes each tile's logits again. entropy_gradient: whether entropies have one.
    """

    def of_tile(hidden: Tensor, labels: Tensor) -> tuple[Tensor, Tensor]:
        table = torch.log_softmax(head(hidden).float() / temperature, dim=-1)
        with torch.set_grad_enabled(torch.is_grad_enabled() and entropy_gradient):
            entropies = -(table.exp() * table).sum(-1)
        return table.gather(1, labels[:, None]).squeeze(1), entropies

    logprobs, entropies = [], []
    for tile in zip(hidden.split(HEAD_TILE), labels.split(HEAD_TILE), strict=True):
        tile_logprobs, tile_entropies = checkpoint(of_tile, *tile, use_reentrant=False)
        logprobs.append(tile_logprobs)
        entropies.append(tile_entropies)
    return torch.cat(logprobs), torch.cat(entropies)


def as_rows(prompt_ids: Sequence[Sequence[int]], completion_ids: Sequence[Sequence[int]]) -> list[Row]:
    """(prompt tokens, completion tokens) of each completion."""
    return [(tuple(p), list(c)) for p, c in zip(prompt_ids, completion_ids, strict=True)]
