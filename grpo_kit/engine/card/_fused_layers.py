"""The models' layers in few kernels, for a card: transformers' computation of one decoded token, half its launches.

A decoded token is some 60 small kernels a layer by transformers' modules; each waits for the one before it, so that
their number is what a step costs. Here queries and keys are rotated together, both parts of the attention share one
softmax, products add into the residual, and a layer's adapters read their input once. The weights are the model's own.
Small copies (biases, adapters in the dtype of the products) lie at fixed addresses for graphs, and are refreshed
before each rollout. Modules that are not plain (quantised, DoRA, merged, hooked) are called instead.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

import torch
from torch import Tensor
from torch.nn.functional import linear, rms_norm, silu
from transformers import PreTrainedModel

from grpo_kit.engine._supported_models import decoded_by_modules
from grpo_kit.engine.cpu._layers import Layer, Parts, read_parts
from grpo_kit.engine.cpu._matmul import Projection

if TYPE_CHECKING:
    from grpo_kit.engine._kv_cache import KVCache


class Copies:
    """Small tensors at fixed addresses that hold what the model's tensors hold, once refreshed."""

    def __init__(self, like: Tensor) -> None:
        self._like = like
        self._held: list[Tensor] = []
        self._kept: list[tuple[Tensor, Tensor, float]] = []  # a copy, what it is of, times what

    def new(self, *shape: int) -> Tensor:
        """Zeros of this shape, in the dtype of the products."""
        self._held.append(self._like.new_zeros(shape))
        return self._held[-1]

    def keep(self, to: Tensor, source: Tensor, scale: float = 1.0) -> None:
        """From the next refresh on, `to` is scale * source."""
        self._kept.append((to, source, scale))

    @torch.no_grad()
    def refresh(self) -> None:
        """Read the model's tensors again."""
        for to, source, scale in self._kept:
            torch.mul(source, scale, out=to)

    def nbytes(self) -> int:
        """Bytes held."""
        return sum(t.numel() * t.element_size() for t in self._held)


class Adapters:
    """LoRA on projections that read the same input: one product into all their ranks, one out for each output.

    outputs: for each output tensor, the projections whose results stand beside each other in it.
    """

    def __init__(self, outputs: Sequence[Sequence[Projection]], copies: Copies) -> None:
        ranks = [[sum(len(a) for a, _, _ in one.adapters) for one in part] for part in outputs]
        self._spans: list[tuple[int, int, Tensor]] = []  # of each output: its ranks, and the way out of them
        if not (total := sum(map(sum, ranks))):
            return
        self._into = copies.new(total, outputs[0][0].weight.size(1))
        begin = 0
        for part, widths in zip(outputs, ranks, strict=True):
            out = copies.new(sum(len(one.weight) for one in part), sum(widths))
            self._spans.append((begin, begin + sum(widths), out))
            row = column = 0
            for one in part:
                for a, b, scaling in one.adapters:
                    copies.keep(self._into[begin + column : begin + column + len(a)], a)
                    copies.keep(out[row : row + len(b), column : column + len(a)], b, scaling)
                    column += len(a)
                row += len(one.weight)
            begin += column

    def add(self, x: Tensor, *outputs: Tensor) -> None:
        """Add to each output (R, N) what its adapters make of x (R, K)."""
        if not self._spans:
            return
        inside = linear(x, self._into)
        for (begin, end, out), y in zip(self._spans, outputs, strict=True):
            if end > begin:
                y.addmm_(inside[:, begin:end], out.t())


class _Fused:
    """What one layer has besides the model's own tensors."""

    def __init__(self, layer: Layer, heads: tuple[int, int], dim: int, copies: Copies) -> None:
        self.of = layer
        query, key = layer.query, layer.key
        self.split, both = len(query.weight), len(query.weight) + len(key.weight)
        self.bias = self.norm = None
        if query.bias is not None:
            self.bias = copies.new(both)
            copies.keep(self.bias[: self.split], query.bias)
            copies.keep(self.bias[self.split :], key.bias)
        if layer.query_norm is not None:
            self.norm = copies.new(sum(heads), dim)
            copies.keep(self.norm[: heads[0]], layer.query_norm.weight.expand(heads[0], dim))
            copies.keep(self.norm[heads[0] :], layer.key_norm.weight.expand(heads[1], dim))
        self.attention = Adapters([[query, key], [layer.value]], copies)
        self.output = Adapters([[layer.output]], copies)
        self.mlp = Adapters([[layer.gate], [layer.up]], copies)
        self.down = Adapters([[layer.down]], copies)


class FusedLayers:
    """One model's decoder and head for a decoded token of each row, over a KV cache of buckets."""

    def __init__(self, base: PreTrainedModel, parts: Parts) -> None:
        self._embeddings, self._rotary = parts.embeddings, base.get_decoder().rotary_emb
        self._last, self._head, self._dim = parts.last, parts.head, parts.dim
        first = parts.layers[0]
        self._heads = len(first.query.weight) // parts.dim, len(first.key.weight) // parts.dim
        self._scales = torch.ones(sum(self._heads), 1, dtype=torch.float32, device=parts.embeddings.device)
        self._scales[: self._heads[0]].fill_(first.scale)
        self._copies = Copies(parts.embeddings)
        self._layers = [_Fused(layer, self._heads, parts.dim, self._copies) for layer in parts.layers]

    @staticmethod
    def parts_of(base: PreTrainedModel) -> Parts | None:
        """What they are made of, or None if the model's modules must be called."""
        embeddings = base.get_input_embeddings().weight
        kind, dtype = embeddings.device.type, embeddings.dtype
        if torch.is_autocast_enabled(kind) and torch.get_autocast_dtype(kind) != dtype:
            return None  # the products' dtype is not the weights'
        if decoded_by_modules(base):
            return None
        parts = read_parts(base, dtype)
        if parts is None or parts.head.adapters or parts.head.bias is not None:
            return None
        alike = len({layer.settings() for layer in parts.layers}) == 1
        paired = all((layer.query.bias is None) == (layer.key.bias is None) for layer in parts.layers)
        return parts if alike and paired else None

    @property
    def groups(self) -> int:
        """Query heads to a key head."""
        return self._heads[0] // self._heads[1]

    def refresh(self) -> None:
        """Read the model's weights again: they may have been trained since."""
        self._copies.refresh()

    def nbytes(self) -> int:
        """Bytes of the copies."""
        return self._copies.nbytes()

    def logits(self, ids: Tensor, positions: Tensor, slots: KVCache, out: Tensor | None = None) -> Tensor:
        """Logits (R, V) behind one token of each row, in `out` if given; ids and positions long (R,). Writes the step's
        column."""
        with torch.autocast(ids.device.type, enabled=False):
            state = self._embeddings.index_select(0, ids)
            cos, sin = self._turns(positions)
            for number, layer in enumerate(self._layers):
                x = rms_norm(
                    state, state.shape[1:], layer.of.before_attention.weight, layer.of.before_attention.eps
                )
                both, value = self._rotated(layer, x, cos, sin)
                found = slots.attend_fused_rows(both, value, number)
                state.addmm_(found, layer.of.output.weight.t())
                if layer.of.output.bias is not None:
                    state.add_(layer.of.output.bias)
                layer.output.add(found, state)
                x = rms_norm(state, state.shape[1:], layer.of.before_mlp.weight, layer.of.before_mlp.eps)
                gate, up = (linear(x, one.weight, one.bias) for one in (layer.of.gate, layer.of.up))
                layer.mlp.add(x, gate, up)
                inside = silu(gate, inplace=True).mul_(up)
                state.addmm_(inside, layer.of.down.weight.t())
                if layer.of.down.bias is not None:
                    state.add_(layer.of.down.bias)
                layer.down.add(inside, state)
            last = rms_norm(state, state.shape[1:], self._last.weight, self._last.eps)
            return torch.mm(last, self._head.weight.t(), out=out)

    def _turns(self, positions: Tensor) -> tuple[Tensor, Tensor]:
        """Cosines and signed sines (R, heads, D) of queries, which are scaled by them too, and of keys."""
        half = self._dim // 2
        cos, sin = (x[0] for x in self._rotary(self._scales, positions[None]))  # float32 (R, D)
        turns = torch.stack([cos, torch.cat([-sin[:, :half], sin[:, half:]], dim=-1)])
        cos, sin = torch.mul(turns[:, :, None], self._scales).to(self._embeddings.dtype)
        return cos, sin

    def _rotated(self, layer: _Fused, x: Tensor, cos: Tensor, sin: Tensor) -> tuple[Tensor, Tensor]:
        """Queries and keys behind them, rotated, (R, heads, D); values (R, Hkv * D)."""
        both = x.new_empty(len(x), sum(self._heads) * self._dim)
        torch.mm(x, layer.of.query.weight.t(), out=both[:, : layer.split])
        torch.mm(x, layer.of.key.weight.t(), out=both[:, layer.split :])
        value = linear(x, layer.of.value.weight, layer.of.value.bias)
        if layer.bias is not None:
            both.add_(layer.bias)
        layer.attention.add(x, both, value)
        both = both.view(len(x), -1, self._dim)
        if layer.norm is not None:
            both = rms_norm(both, (self._dim,), None, layer.of.query_norm.eps).mul_(layer.norm)
        turned = both.unflatten(-1, (2, -1)).flip(-2).flatten(-2)
        return torch.mul(both, cos).addcmul_(turned, sin), value
