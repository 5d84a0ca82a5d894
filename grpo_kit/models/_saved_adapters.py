"""Writes adapters so that they are loaded again: with their base where its name does not give it."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from transformers import AutoConfig, PreTrainedModel

from grpo_kit.models._model_facts import EMBEDDED, TINY, base_model, model_name, weights_digest
from grpo_kit.record.run_path import path_of

BASE = "base"  # a folder beside an adapter, with the model that it is for
_LOADED = "_grpo_kit_loaded"  # a base's own mark: what _look_of_base sees of it as its name gives it


def is_adapter(name: str | Path) -> bool:
    """Whether a folder holds a saved adapter."""
    return (path_of(name) / "adapter_config.json").is_file()


def mark_loaded(model: PreTrainedModel) -> None:
    """Note on a model what its weights are as its name gives them, for save_adapter."""
    setattr(base_model(model), _LOADED, _look_of_base(model))


def has_named_base(model: Any, *, plain: bool = False) -> bool:
    """Are the weights under the adapters those that the base's name gives?

    False for a base that was made in memory, resized or trained since. plain: the name must be one that transformers
    opens without the kit: a folder or the hub's.
    """
    base, name = base_model(model), model_name(model)
    if plain and (name in (EMBEDDED, TINY) or is_adapter(name) or Path(name).is_file()):
        return False
    as_loaded = getattr(base, _LOADED, None)
    if as_loaded is not None:
        return as_loaded == _look_of_base(model)
    if not getattr(base.config, "name_or_path", ""):
        return False
    try:  # loaded by transformers: where the name was read from
        named = AutoConfig.from_pretrained(name, local_files_only=True)
    except (OSError, ValueError):
        return False
    return named.get_text_config().vocab_size == base.config.get_text_config().vocab_size


def save_adapter(model: Any, tokenizer: Any, part: Path, target: Path, *, plain: bool = False) -> str:
    """Write the active adapter into `part`, which is renamed to `target`; returns its base's name or path.

    A base that its name does not give (has_named_base) is written too, with the tokenizer. plain: see there.
    Raises ValueError for several active adapters, since each is for the sum of those before it, and where a base that
    had to be written is in 4 bits.
    """
    names = list(model.active_adapters)
    if len(names) != 1:
        raise ValueError(
            f"model has the active adapters {names}, and a saved one is loaded alone; merge them into the weights"
        )
    (name,) = names
    model.save_pretrained(part, selected_adapters=names)
    if name != "default":  # peft saves that into its own folder
        for path in (part / name).iterdir():
            path.replace(part / path.name)
        (part / name).rmdir()
    base = model_name(model)
    if not has_named_base(model, plain=plain):
        if getattr(base_model(model), "is_quantized", False):
            raise ValueError(f"model has adapters on {base!r} in 4 bits, and such a base is not written")
        base_model(model).save_pretrained(part / BASE, state_dict=weights_of_base(model))
        tokenizer.save_pretrained(part / BASE)
        base = str((target / BASE).absolute())
    elif Path(base).exists():
        base = str(Path(base).absolute())
    file = part / "adapter_config.json"
    config = json.loads(file.read_text(encoding="utf-8")) | {"base_model_name_or_path": base}
    file.write_text(json.dumps(config, indent=2), encoding="utf-8")
    return base


def weights_of_base(model: Any) -> dict[str, Tensor]:
    """The base's own state, as if it had no adapter; 4-bit weights as the numbers they represent."""
    base, state = base_model(model), {}
    for name, tensor in base.state_dict().items():
        if not _is_the_bases(model, name) or name.endswith((".absmax", ".quant_map")):
            continue
        state[re.sub(r"(\.base_layer)+\.", ".", name).replace(".original_module.", ".")] = tensor.detach()
    for name, module in base.named_modules():
        weight = getattr(module, "weight", None)
        if getattr(weight, "quant_state", None) is not None:
            from bitsandbytes.functional import dequantize_4bit

            if weight.quant_state.absmax.dim() == 2:  # bitsandbytes' state_dict(), after an answer on a CPU
                weight.quant_state.absmax = weight.quant_state.absmax.T.float().flatten()
            numbers = dequantize_4bit(weight.data, weight.quant_state)
            state[f"{name.removesuffix('.base_layer')}.weight"] = numbers.detach()
    return state


def _look_of_base(model: Any) -> tuple[list[torch.Size], str]:
    """Shapes of the weights under the adapters, and their digest."""
    parameters = base_model(model).named_parameters()
    weights = [p for name, p in parameters if _is_the_bases(model, name)]
    return [p.shape for p in weights], weights_digest(p for p in weights if p.is_floating_point())


def _is_the_bases(model: Any, name: str) -> bool:
    prefix = getattr(getattr(model, "base_model", None), "prefix", "lora_")  # of the adapter's kind
    return not any(part in name for part in (prefix, ".modules_to_save.", ".quant_state."))
