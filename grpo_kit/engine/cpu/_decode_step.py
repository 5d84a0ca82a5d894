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
from grpo_kit.engine.cpu._layers import Norm, PlainLayers
from grpo_kit.engine.cpu._matmul import Projection, compiled


class CompiledStep:
    """One token of each row through all layers and the head; made anew for each batch, since it holds addresses.

    Each `pack` lays numbers out as one of _decode_step.c's structs: P an address, l a long, d a double.
    """

    def __init__(self, library: ctypes.CDLL, layers: PlainLayers) -> None:
        parts = layers.parts
        self._library, self._model = library, layers
        self._tensors = []  # tensors whose address is in C
        self._fits, self._rank = parts.dim % library.lanes == 0, 0
        fields = (field for layer in parts.layers for field in vars(layer).values())
        self._layers = b"".join(map(self._packed, fields))
        norm, head = self._packed(parts.last), self._packed(parts.head)
        inner = max(len(layer.gate.weight) for layer in parts.layers)
        sizes = len(parts.layers), parts.embeddings.size(1), inner, self._rank
        self._decoder = pack("4l", *sizes) + norm + head

    @classmethod
    def of(cls, layers: PlainLayers | None) -> CompiledStep | None:
        """None without a compiler, for numbers that fill no registers, and for weights that do not lie row by row."""
        if layers is None or (library := compiled()) is None:
            return None
        step = cls(library, layers)
        return step if step._fits else None

    def _address(self, tensor: Tensor | None) -> int:
        if tensor is None:
            return 0
        # a bfloat16 weight may be laid out for oneDNN
        if tensor.layout != torch.strided or not tensor.is_contiguous():
            self._fits = False
            return 0
        self._tensors.append(tensor)
        return tensor.data_ptr()

    def _linear(self, layer: Projection) -> bytes:
        weight = layer.weight if layer.rounded is None else layer.rounded
        lanes, down, up, rank = self._library.lanes, None, None, 0
        (n, k), bits = weight.shape, 8 * weight.element_size()
        self._fits &= k % (lanes * 32 // bits) == 0
        if layer.adapters:  # as one, of a rank that fills registers
            down = torch.cat([a for a, _, _ in layer.adapters])
            up = torch.cat([scaling * b for _, b, scaling in layer.adapters], dim=1)
            padding = -len(down) % lanes
            down, up = pad(down, (0, 0, 0, padding)), pad(up, (0, padding))
            rank = len(down)
            self._rank = max(self._rank, rank)
        addresses = map(self._address, (weight, layer.bias, down, up))
        return pack("4P4l", *addresses, n, k, rank, bits)

    def _packed(self, field: Norm | Projection | float | None) -> bytes:
        """A field of Layer, of which C has the same in the same order."""
        if isinstance(field, float):
            return pack("d", field)
        if isinstance(field, Projection):
            return self._linear(field)
        return pack("Pd", self._address(field and field.weight), field.eps if field else 0)

    def __call__(self, ids: Tensor, positions: Tensor, slots: KVCache) -> Tensor:
        """Logits (R, V) behind these tokens, long (R,), for which the slots were set; writes their keys and values."""
        state = self._model.parts.embeddings.index_select(0, ids)
        cos, sin = self._model.rotary(state, positions[None])
        rows = [
            pack("P4l", states.data_ptr(), *states.stride()[:4])
            for states in (slots.prefix, slots.suffix)
        ]
        rows.append(pack("2P", slots.prompt_of_row.data_ptr(), slots.prompt_lengths.data_ptr()))
        sizes = slots.rows, slots.suffix.size(3), self._model.groups, slots.suffix.size(5)
        rows.append(pack("6l", *sizes, slots.written, torch.get_num_threads()))
        logits = state.new_empty(len(state), len(self._model.parts.head.weight))
        addresses = (x.data_ptr() for x in (logits, state, cos, sin))
        self._library.step(*addresses, b"".join(rows), self._layers, self._decoder)
        return logits
