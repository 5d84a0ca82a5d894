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

from grpo_kit.engine._packing import FLEX_BLOCK, PackedBatch, PackedMasks, Row, make_chunks, pack_rows
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
        rows = rows_of(batch)

        def work(limit: int) -> Tensor:
            made = torch.zeros(len(rows), batch.width, dtype=torch.float32, device=self.memory.device)
            with self.memory.attention_of(model), torch.no_grad():
                for chunk in make_chunks(rows, limit):
                    part = [rows[i] for i in chunk]
                    made[chunk] = self._forward(model, part, batch.width, temperature)[0]
            return made

        return self.memory.run(work, rows)

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
        of_batch = rows_of(batch)
        rows = [of_batch[place] for place in places]
        self.memory.entropy_bonus = self.config.entropy_bonus > 0

        def work(limit: int) -> float:
            loss.start_over()
            total = 0.0
            with self.memory.attention_of(model):
                for chunk in make_chunks(rows, limit):
                    scores = self._forward(model, [rows[i] for i in chunk], batch.width, temperature)
                    share = loss([places[i] for i in chunk], *scores)
                    backward(share)
                    total += share.item()
            return total

        return self.memory.run(work, rows) if places else 0.0

    def _forward(
        self, model: Any, rows: Sequence[Row], width: int, temperature: float
    ) -> tuple[Tensor, Tensor]:
        """Log-probabilities and entropies of these rows' completions, both (len(rows), width)."""
        flex = self.memory.attention == "flex_attention"
        packed = pack_rows(list(rows), self.memory.device, multiple=FLEX_BLOCK if flex else 1)
        base = base_model(model)
        with autocast(self.config, self.memory.device):
            embedded = embed(base.get_input_embeddings(), packed.input_ids)
            inputs = {"input_ids": packed.input_ids} if embedded is None else {"inputs_embeds": embedded}
            mask = self._mask(base, packed)
            hidden = base.get_decoder()(
                **inputs, attention_mask=mask, position_ids=packed.position_ids, use_cache=False
            ).last_hidden_state[0]
            scored = (packed.labels[0] != -100).nonzero().squeeze(1)
            found = self._head(base, hidden[scored], packed.labels[0, scored], temperature)
        empty = [torch.zeros(len(hidden), dtype=values.dtype, device=values.device) for values in found]
        whole = [row.index_put((scored,), values)[None] for row, values in zip(empty, found, strict=True)]
        return tuple(packed.unpack(values, width) for values in whole)

    def _mask(self, base: Any, packed: PackedBatch) -> Any:
        """Who sees whom: a mask, or None where the kit's attention takes it from the config."""
        flex = self.memory.attention == "flex_attention"
        if self.memory.attention == TREE:
            base.config.handed_to_attention = TreePlan(packed.tree)
        elif self.memory.by_layer:
            base.config.handed_to_attention = PackedMasks(packed, self.memory.attention)
        else:
            return packed.block_mask() if flex else packed.dense_mask()

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

    made = [
        checkpoint(of_tile, tile, some, use_reentrant=False)
        for tile, some in zip(hidden.split(HEAD_TILE), labels.split(HEAD_TILE), strict=True)
    ]
    return tuple(torch.cat(values) for values in zip(*made, strict=True))


def rows_of(batch: Batch) -> list[Row]:
    """(prompt tokens, completion tokens) of each completion."""
    return [(tuple(p), list(c)) for p, c in zip(batch.prompt_ids, batch.completion_ids, strict=True)]
