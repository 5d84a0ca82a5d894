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
from grpo_kit.engine.cpu._layers import Layer, Norm, Parts, read_parts
from grpo_kit.engine.cpu._matmul import Projection

if TYPE_CHECKING:
    from grpo_kit.engine._kv_cache import KVCache


class Copies:
    """Small tensors at fixed addresses that hold what the model's tensors hold, once refreshed."""

    def __init__(self, like: Tensor) -> None:
        self._like = like
        self._tensors: list[Tensor] = []
        self._sources: list[tuple[Tensor, Tensor, float]] = []  # a copy, its source, the factor

    def new(self, *shape: int) -> Tensor:
        """Zeros of this shape, in the dtype of the products."""
        self._tensors.append(self._like.new_zeros(shape))
        return self._tensors[-1]

    def keep(self, copy: Tensor, source: Tensor, scale: float = 1.0) -> None:
        """From the next refresh on, `copy` is scale * source."""
        self._sources.append((copy, source, scale))

    @torch.no_grad()
    def refresh(self) -> None:
        """Read the model's tensors again."""
        for copy, source, scale in self._sources:
            torch.mul(source, scale, out=copy)

    def nbytes(self) -> int:
        """Bytes held."""
        return sum(tensor.nbytes for tensor in self._tensors)


class Adapters:
    """LoRA on projections that read the same input: one product into all their ranks, one out for each output.

    outputs: for each output tensor, the projections whose results stand beside each other in it.
    """

    def __init__(self, outputs: Sequence[Sequence[Projection]], copies: Copies) -> None:
        ranks = [sum(map(_rank, projections)) for projections in outputs]
        # of each output: its ranks, and the way out of them
        self._ups: list[tuple[slice, Tensor]] = []
        if not any(ranks):
            return
        self._down = copies.new(sum(ranks), outputs[0][0].weight.size(1))
        start = 0
        for projections, rank in zip(outputs, ranks, strict=True):
            up = copies.new(sum(len(projection.weight) for projection in projections), rank)
            self._ups.append((slice(start, start + rank), up))
            row = column = 0
            for projection in projections:
                for a, b, scaling in projection.adapters:
                    end = column + len(a)
                    copies.keep(self._down[start + column : start + end], a)
                    copies.keep(up[row : row + len(b), column:end], b, scaling)
                    column = end
                row += len(projection.weight)
            start += rank

    def add(self, x: Tensor, *outputs: Tensor) -> None:
        """Add to each output (R, N) the adapters' product with x (R, K)."""
        if not self._ups:
            return
        inner = linear(x, self._down)
        for (ranks, up), output in zip(self._ups, outputs, strict=True):
            if up.size(1):
                output.addmm_(inner[:, ranks], up.t())


def _rank(projection: Projection) -> int:
    return sum(len(a) for a, _, _ in projection.adapters)


class _Fused:
    """One layer, and what it has besides the model's own tensors."""

    def __init__(self, layer: Layer, heads: tuple[int, int], dim: int, copies: Copies) -> None:
        self.parts = layer
        query, key = layer.query, layer.key
        self.split = len(query.weight)
        self.bias = self.norm = None
        if query.bias is not None:
            self.bias = copies.new(self.split + len(key.weight))
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
        self._parts, self._rotary = parts, base.get_decoder().rotary_emb
        first = parts.layers[0]
        self._heads = len(first.query.weight) // parts.dim, len(first.key.weight) // parts.dim
        self._scales = torch.ones(
            sum(self._heads), 1, dtype=torch.float32, device=parts.embeddings.device
        )
        self._scales[: self._heads[0]].fill_(first.scale)
        self._copies = Copies(parts.embeddings)
        self._layers = [
            _Fused(layer, self._heads, parts.dim, self._copies) for layer in parts.layers
        ]

    @staticmethod
    def parts_of(base: PreTrainedModel) -> Parts | None:
        """The model's parts, or None if its modules must be called."""
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
        paired = all(
            (layer.query.bias is None) == (layer.key.bias is None) for layer in parts.layers
        )
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

    def logits(
        self, ids: Tensor, positions: Tensor, slots: KVCache, out: Tensor | None = None
    ) -> Tensor:
        """Logits (R, V) behind one token of each row, in `out` if given; ids and positions long (R,). Writes the step's
        column."""
        with torch.autocast(ids.device.type, enabled=False):
            state = self._parts.embeddings.index_select(0, ids)
            cos, sin = self._rotation(positions)
            for number, layer in enumerate(self._layers):
                parts = layer.parts
                x = _normed(state, parts.before_attention)
                queries_and_keys, value = self._rotated(layer, x, cos, sin)
                attention = slots.attend_fused_rows(queries_and_keys, value, number)
                _add_product(state, attention, parts.output, layer.output)
                x = _normed(state, parts.before_mlp)
                gate = linear(x, parts.gate.weight, parts.gate.bias)
                up = linear(x, parts.up.weight, parts.up.bias)
                layer.mlp.add(x, gate, up)
                _add_product(state, silu(gate, inplace=True).mul_(up), parts.down, layer.down)
            return torch.mm(
                _normed(state, self._parts.last), self._parts.head.weight.t(), out=out
            )

    def _rotation(self, positions: Tensor) -> tuple[Tensor, Tensor]:
        """Cosines and signed sines (R, heads, D) of queries, which are scaled by them too, and of keys."""
        half = self._parts.dim // 2
        # float32 (R, D)
        cos, sin = (table[0] for table in self._rotary(self._scales, positions[None]))
        tables = torch.stack([cos, torch.cat([-sin[:, :half], sin[:, half:]], dim=-1)])
        cos, sin = torch.mul(tables[:, :, None], self._scales).to(self._parts.embeddings.dtype)
        return cos, sin

    def _rotated(
        self, layer: _Fused, x: Tensor, cos: Tensor, sin: Tensor
    ) -> tuple[Tensor, Tensor]:
        """Queries and keys behind them, rotated, (R, heads, D); values (R, Hkv * D)."""
        parts, dim = layer.parts, self._parts.dim
        products = x.new_empty(len(x), sum(self._heads) * dim)
        torch.mm(x, parts.query.weight.t(), out=products[:, : layer.split])
        torch.mm(x, parts.key.weight.t(), out=products[:, layer.split :])
        value = linear(x, parts.value.weight, parts.value.bias)
        if layer.bias is not None:
            products.add_(layer.bias)
        layer.attention.add(x, products, value)
        heads = products.view(len(x), -1, dim)
        if layer.norm is not None:
            heads = rms_norm(heads, (dim,), None, parts.query_norm.eps).mul_(layer.norm)
        swapped = heads.unflatten(-1, (2, -1)).flip(-2).flatten(-2)
        return torch.mul(heads, cos).addcmul_(swapped, sin), value


def _normed(state: Tensor, norm: Norm) -> Tensor:
    return rms_norm(state, state.shape[1:], norm.weight, norm.eps)


def _add_product(state: Tensor, x: Tensor, projection: Projection, adapters: Adapters) -> None:
    """Add a projection of x, with its bias and adapters, to the residual stream."""
    state.addmm_(x, projection.weight.t())
    if projection.bias is not None:
        state.add_(projection.bias)
    adapters.add(x, state)
