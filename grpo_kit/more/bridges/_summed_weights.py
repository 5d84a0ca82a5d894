"""A model's weights as another engine loads them, one after the other: adapters added up, the base untouched."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
from peft import PeftModel
from peft.tuners.tuners_utils import BaseTunerLayer


def summed_weights(model: Any) -> Iterator[tuple[str, torch.Tensor]]:
    """Name and tensor of each weight, by the names of the model without adapters; tied ones once.

    Adapters are added up in float32 on a copy, a layer at a time: merging into the base and taking them out again would
    round it each time.
    """
    if not isinstance(model, PeftModel):
        yield from ((name, p.data) for name, p in model.named_parameters())
        return
    whole: dict[int, torch.Tensor] = {}
    adapted = {
        id(weight): layer
        for layer in model.modules()
        if isinstance(layer, BaseTunerLayer)
        for weight in layer.get_base_layer().parameters()
    }
    for name, weight in model.named_parameters():
        if model.prefix in name or "original_module" in name:
            continue
        name = name.removeprefix("base_model.model.").replace(".base_layer", "")
        layer = adapted.get(id(weight))
        if layer is not None and id(weight) not in whole:
            whole = _added_up(layer)  # of one layer at a time
        yield name.replace("modules_to_save.default.", ""), whole.get(id(weight), weight.data)


def _added_up(layer: BaseTunerLayer) -> dict[int, torch.Tensor]:
    """The base layer's weights with its active adapters, in float32, by id; the layer stays bit for bit."""
    base = layer.get_base_layer()
    kept = [(weight, weight.data) for weight in base.parameters()]
    for weight, data in kept:
        weight.data = data.float().clone() if data.dtype == torch.float32 else data.float()
    try:
        layer.merge()
        return {id(weight): weight.data for weight, _ in kept}
    finally:
        layer.merged_adapters.clear()
        for weight, data in kept:
            weight.data = data
