"""PackedUpdate: the gradient of an update, with what the completions share computed once and nothing padded.

The losses divide by numbers of the whole update, so its completions may be computed in any parts. Here a part is one
row of tokens, the tree of their shared prefixes (engine/tree.py), as long as memory allows, under a mask in which a
token sees what it continues. Completions without a gradient are left out. Three ways of attention: rectangles (CPU), a
block mask (FlexAttention, CUDA), a dense mask (SDPA, anywhere).
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.nn.attention.flex_attention import BlockMask
from torch.utils.checkpoint import checkpoint
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

from grpo_kit.engine._supported_models import is_tested, shared_problem
from grpo_kit.engine._update_memory import PACKED, UpdateMemory
from grpo_kit.engine.cpu._layers import head_of
from grpo_kit.engine.cpu._matmul import embed, head_logprobs, usable_head
from grpo_kit.engine.cpu._tree_attention import NAME as TREE
from grpo_kit.engine.cpu._tree_attention import TreePlan, dense_attention
from grpo_kit.engine.memory._activations import HEAD_TILE
from grpo_kit.engine.tree import PrefixTree, Row, as_rows, build_tree, make_chunks
from grpo_kit.loop.batch import Batch
from grpo_kit.loop.config import Config
from grpo_kit.loop.padded_update import autocast
from grpo_kit.loop.policy_loss import PolicyLoss
from grpo_kit.models._model_facts import base_model, token_rows

_ATTENTIONS = ("sdpa", "eager", "flex_attention", "flash_attention_2")
FLEX_BLOCK = 128  # FlexAttention's block; the row is padded to a multiple of it


@dataclass(frozen=True)
class PackedBatch:
    """R completions as one row of L positions: their tree of shared prefixes, then padding.

    input_ids, position_ids, labels: long (1, L), labels already shifted, -100 where nothing is scored.
    end: long (L,), who sees whom: the query at q sees the key at k if k <= q < end[k].
    places: long (R, C), where each completion's scores lie; length: long (R,), how many they are.
    """

    input_ids: Tensor
    position_ids: Tensor
    labels: Tensor
    end: Tensor
    places: Tensor
    length: Tensor
    tree: PrefixTree

    def dense_mask(self, window: int | None = None) -> Tensor:
        """bool (1, 1, L, L), True where a query (row) may see a key (column). window: tokens that a query sees."""
        order = torch.arange(len(self.end), device=self.end.device)
        sees = (order <= order[:, None]) & (order[:, None] < self.end)
        if window is not None:
            sees &= self.position_ids.mT - self.position_ids < window
        return sees[None, None]

    def block_mask(self, window: int | None = None) -> BlockMask:
        """The same mask for FlexAttention, which skips blocks that no query sees; of a length that blocks fill.

        From each block's ends: torch's create_block_mask would take 3 L^2 bytes, 0.8 GB for 16,384 positions.
        """
        end, place, length = self.end, self.position_ids[0], len(self.end)

        def sees(b: Tensor, h: Tensor, q: Tensor, k: Tensor) -> Tensor:
            continues = (k <= q) & (q < end[k])
            return continues if window is None else continues & (place[q] - place[k] < window)

        ends = end.view(-1, FLEX_BLOCK)
        block = torch.arange(length // FLEX_BLOCK, device=end.device)
        first_query = block[:, None] * FLEX_BLOCK  # of a block of queries
        earlier = block < block[:, None]  # blocks of keys in front of it
        full = earlier & (ends.amin(1) >= first_query + FLEX_BLOCK)
        partial = (earlier & (ends.amax(1) > first_query) & ~full) | (block == block[:, None])
        if window is not None:  # it may cut through any block
            partial |= full
            full = torch.zeros_like(full)

        def count_and_order(blocks: Tensor) -> tuple[Tensor, Tensor]:
            order = blocks.to(torch.int32).argsort(dim=-1, descending=True, stable=True)
            return blocks.sum(-1, dtype=torch.int32)[None, None], order.to(torch.int32)[
                None, None
            ]

        return BlockMask.from_kv_blocks(
            *count_and_order(partial),
            *count_and_order(full),
            BLOCK_SIZE=FLEX_BLOCK,
            mask_mod=sees,
            seq_lengths=(length, length),
        )

    def unpack(self, scores: Tensor, width: int) -> Tensor:
        """float (1, L) -> (R, width), zeros past each completion's end; differentiable."""
        mask = torch.arange(width, device=scores.device) < self.length[:, None]  # (R, width)
        places = torch.nn.functional.pad(self.places, (0, width - self.places.size(1)))
        return scores[0, places] * mask


def why_not_packed(model: Any) -> str | None:
    """None if this model can be computed packed, else one sentence that says why not."""
    config = base_model(model).config
    if config._attn_implementation not in _ATTENTIONS:
        return (
            f"attention {config._attn_implementation!r} is not one of {', '.join(_ATTENTIONS)}"
        )
    return shared_problem(model)


def pack_rows(rows: list[Row], device: torch.device, *, multiple: int = 1) -> PackedBatch:
    """Pack completions, in any order; the row of positions is padded to a multiple.

    A token that several completions continue differently is there once for each, since its output scores what follows.

    >>> pack_rows([((5, 6), [7, 8]), ((5, 6), [9, 9])], torch.device("cpu")).input_ids.tolist()
    [[5, 6, 7, 6, 9]]
    """
    scored = [i for i, (_, completion) in enumerate(rows) if completion]
    # nothing scored: one token to hang zeros on
    tree = build_tree([rows[i] for i in scored] or [((0,), ())])
    length = -(-len(tree) // multiple) * multiple
    table = torch.zeros(4, length, dtype=torch.long)
    table[2] = -100
    table[3] = torch.arange(1, length + 1)  # padding sees itself alone
    columns = (tree.input_ids, tree.positions, tree.labels, tree.end)
    table[:, : len(tree)] = torch.from_numpy(np.stack(columns))
    ids, positions, labels, end = table.to(device)
    lengths = [len(completion) for _, completion in rows]
    places = torch.zeros(len(rows), max([1, *lengths]), dtype=torch.long)
    if scored:
        for i, place in zip(scored, tree.places, strict=True):
            places[i, : lengths[i]] = torch.from_numpy(place[-lengths[i] :])
    return PackedBatch(
        ids[None],
        positions[None],
        labels[None],
        end,
        places.to(device),
        torch.tensor(lengths, device=device),
        tree,
    )


# Attention for models whose layers differ in window, soft cap and sinks: transformers hands these to the function of a
# layer. On a CPU engine/cpu/_tree_attention.py does it; this is for FlexAttention, and for a dense mask.


class PackedMasks:
    """The masks of one packed row, by window. attention: "flex_attention" or "sdpa"."""

    def __init__(self, packed: PackedBatch, attention: str) -> None:
        self.attention = attention
        self._make_mask = (
            packed.block_mask if attention == "flex_attention" else packed.dense_mask
        )
        self._masks: dict[int | None, Any] = {}

    def __getitem__(self, window: int | None) -> Any:
        if window not in self._masks:
            self._masks[window] = self._make_mask(window)
        return self._masks[window]


def _packed_forward(
    module: torch.nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    scaling: float,
    *,
    sliding_window: int | None = None,
    softcap: float | None = None,
    s_aux: Tensor | None = None,
    **kwargs: Any,
) -> tuple[Tensor, None]:
    """transformers calls this in each layer; the PackedMasks lie in the config."""
    masks = module.config.handed_to_attention
    mask = masks[sliding_window]
    if masks.attention == "flex_attention":
        kwargs |= {"softcap": softcap, "s_aux": s_aux}
    elif softcap is not None or s_aux is not None:
        return dense_attention(
            query, key, value, mask, scaling, softcap=softcap, sinks=s_aux
        ), None
    attention = ALL_ATTENTION_FUNCTIONS[masks.attention]
    return attention(module, query, key, value, mask, scaling=scaling, **kwargs)


ALL_ATTENTION_FUNCTIONS.register(PACKED, _packed_forward)


class PackedUpdate:
    """The update of one model, called as PaddedUpdate is. memory: how much at once, and what is done where it ends."""

    def __init__(self, model: Any, config: Config) -> None:
        self.config = config
        device = next(model.parameters()).device
        self.memory = UpdateMemory(
            model, device, compute_itemsize=None if config.autocast == "none" else 2
        )

    def logprobs(self, model: Any, batch: Batch, temperature: float) -> Tensor:
        """(N, T), without gradients: the log-probabilities of the completions' tokens, 0 behind their ends."""
        rows = as_rows(batch.prompt_ids, batch.completion_ids)

        def compute(limit: int) -> Tensor:
            logprobs = torch.zeros(
                len(rows), batch.width, dtype=torch.float32, device=self.memory.device
            )
            with self.memory.attention_of(model), torch.no_grad():
                for chunk in make_chunks(rows, limit):
                    chunk_rows = [rows[i] for i in chunk]
                    logprobs[chunk] = self._forward(
                        model, chunk_rows, batch.width, temperature
                    )[0]
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
                    scores = self._forward(
                        model, [rows[i] for i in chunk], batch.width, temperature
                    )
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
        # who sees whom: a mask, or None where the kit's attention takes it from the config
        mask = None
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

    def _head(
        self, base: Any, hidden: Tensor, labels: Tensor, temperature: float
    ) -> tuple[Tensor, Tensor]:
        """Log-probabilities and entropies of the labels, (S,) each; logits are never there for all tokens at once."""
        head = base.get_output_embeddings()
        if is_tested(base) and usable_head(head, hidden):
            return head_logprobs(hidden, head.weight, labels, 1 / temperature, token_rows(base))
        has_bonus = self.config.entropy_bonus > 0
        return tiled_logprobs(
            head_of(base), hidden, labels, temperature, entropy_gradient=has_bonus
        )


def tiled_logprobs(
    head: Any,
    hidden: Tensor,
    labels: Tensor,
    temperature: float,
    *,
    entropy_gradient: bool = False,
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
