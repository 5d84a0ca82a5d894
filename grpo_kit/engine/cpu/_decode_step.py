"""A decoding step on a CPU in C: a model's layers, and a step's rows, as _decode_step.c reads them.

Without a C compiler the same layers are called as plain functions of torch (_layers.py), which takes longer.
"""

from __future__ import annotations

import ctypes
from struct import pack

import torch
from torch import Tensor
from torch.nn.functional import pad

from grpo_kit.engine._kv_cache import KVCache
from grpo_kit.engine.cpu._layers import Layer, Norm, PlainLayers
from grpo_kit.engine.cpu._matmul import Projection, compiled


class CompiledStep:
    """One token of each row through all layers and the head. It holds addresses, so that changed weights are seen.

    Each `pack` lays numbers out as one of _decode_step.c's structs: P an address, l a long, d a double.
    """

    def __init__(self, library: ctypes.CDLL, layers: PlainLayers) -> None:
        parts = layers.parts
        self._library, self._model, self._kept = (
            library,
            layers,
            [],
        )  # tensors whose address is in C
        self._fits, self._rank = parts.dim % library.lanes == 0, 0
        self._layers = b"".join(map(self._layer, parts.layers))
        last, head = self._norm(parts.last), self._linear(parts.head)
        inner = max(len(layer.gate.weight) for layer in parts.layers)
        sizes = len(parts.layers), parts.embeddings.size(1), inner, self._rank
        self._decoder = pack("4l", *sizes) + last + head

    @classmethod
    def of(cls, layers: PlainLayers | None) -> CompiledStep | None:
        """None without a compiler, and where numbers do not fill the processor's registers."""
        library = compiled()
        if layers is None or library is None:
            return None
        step = cls(library, layers)
        return step if step._fits else None

    def _address(self, tensor: Tensor | None) -> int:
        if tensor is None:
            return 0
        # a bfloat16 weight may be laid out for oneDNN
        self._fits &= tensor.layout == torch.strided and tensor.is_contiguous()
        self._kept.append(tensor)
        return tensor.data_ptr()

    def _norm(self, norm: Norm | None) -> bytes:
        return pack("Pd", self._address(norm and norm.weight), norm.eps if norm else 0)

    def _linear(self, layer: Projection) -> bytes:
        weight, lanes, down, up, rank = (
            getattr(layer, "rounded", layer.weight),
            self._library.lanes,
            None,
            None,
            0,
        )
        (n, k), bits = weight.shape, 8 * weight.element_size()
        self._fits &= k % (lanes * 32 // bits) == 0
        if layer.adapters:  # as one, of a rank that fills registers
            down = torch.cat([a for a, _, _ in layer.adapters])
            up = torch.cat([scaling * b for _, b, scaling in layer.adapters], dim=1)
            room = -len(down) % lanes
            down, up = pad(down, (0, 0, 0, room)), pad(up, (0, room))
            rank = len(down)
            self._rank = max(self._rank, rank)
        addresses = map(self._address, (weight, layer.bias, down, up))
        return pack("4P4l", *addresses, n, k, rank, bits)

    def _layer(self, layer: Layer) -> bytes:
        norms = layer.before_attention, layer.before_mlp, layer.query_norm, layer.key_norm
        linears = (
            layer.query,
            layer.key,
            layer.value,
            layer.output,
            layer.gate,
            layer.up,
            layer.down,
        )
        parts = [*map(self._norm, norms), *map(self._linear, linears), pack("d", layer.scale)]
        return b"".join(parts)

    def __call__(self, ids: Tensor, positions: Tensor, slots: KVCache) -> Tensor:
        """Logits (R, V) behind these tokens, long (R,), for which the slots were set; writes their keys and values."""
        state = self._model.parts.embeddings.index_select(0, ids)
        cos, sin = (table.contiguous() for table in self._model.rotary(state, positions[None]))
        kept = (
            pack("P4l", x.data_ptr(), *x.stride()[:4]) for x in (slots.prefix, slots.suffix)
        )
        prompts = slots.prompt_of_row.data_ptr(), slots.prompt_lengths.data_ptr()
        _, _, _, heads, _, dim = slots.suffix.shape
        sizes = (
            slots.rows,
            heads,
            self._model.groups,
            dim,
            slots.written,
            torch.get_num_threads(),
        )
        rows = b"".join(kept) + pack("2P6l", *prompts, *sizes)
        logits = state.new_empty(len(state), len(self._model.parts.head.weight))
        addresses = (x.data_ptr() for x in (logits, state, cos, sin))
        self._library.step(*addresses, rows, self._layers, self._decoder)
        return logits
