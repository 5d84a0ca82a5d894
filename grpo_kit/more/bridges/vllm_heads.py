"""What a vLLM worker has to do on a CPU besides loading weights; `vllm serve --worker-extension-cls` takes InStep.

On a CPU vLLM multiplies by a packed copy of each matrix, which it packs again when that matrix is loaded. A tied head
is never loaded: its weight is the embedding's, which is, but its packed copy stays that of the weights from before.
On a card the head reads the embedding itself. Imports torch alone: it runs in the server.
"""

from __future__ import annotations

from typing import Any

import torch


class InStep:
    """Becomes a base of vLLM's worker: `collective_rpc("load_in_step", args=(folder,))`."""

    def load_in_step(self: Any, folder: str) -> None:
        """The safetensors of a folder, tied heads included; raises what vLLM raises."""
        self.reload_weights(weights_path=folder)
        pack_tied_heads(self.model_runner.get_model())


def pack_tied_heads(model: torch.nn.Module) -> None:
    """On a CPU, pack every head again whose weight is another layer's. model: vLLM's."""
    owner: dict[int, torch.nn.Module] = {}
    for layer in model.modules():
        weight = getattr(layer, "weight", None)
        if not isinstance(weight, torch.nn.Parameter) or weight.device.type != "cpu":
            continue
        if owner.setdefault(id(weight), layer) is not layer:
            layer.quant_method.process_weights_after_loading(layer)
