"""The weights that were trained, as one plain model: adapters added up in float32 onto what they were trained on.

Onto what they were trained on, and not onto a base loaded anew: that may be another one by now, and a 4-bit base never
was the one that was trained. Merging in bfloat16 would round most of a short run's change away.
"""

from __future__ import annotations

import copy
import warnings
from typing import Any

import torch
from transformers import AutoModelForCausalLM, PreTrainedModel

from grpo_kit.exports.template import ExportError
from grpo_kit.models import base_model

STORED = {"f32": torch.float32, "f16": torch.float16, "bf16": torch.bfloat16}
_LARGEST_F16 = 65504.0


def is_adapted(model: Any) -> bool:
    """Does it carry adapters?"""
    return hasattr(model, "peft_config")


def whole_model(model: Any) -> PreTrainedModel:
    """A copy on the CPU without adapters, in float32 where there were any; the model itself stays as it is.

    Raises ExportError for adapters that cannot be merged.
    """
    if not is_adapted(model):
        made = _plain(model, {name: p.detach() for name, p in model.state_dict().items()})
        return made
    from peft import get_peft_model, get_peft_model_state_dict, set_peft_model_state_dict

    base, adapter = base_model(model), model.active_adapter
    config = copy.deepcopy(model.peft_config[adapter])
    if list(model.active_adapters) != [adapter] or not hasattr(model, "merge_and_unload"):
        raise ExportError(
            f"model has the adapters {list(model.active_adapters)} of kind {config.peft_type.value}, which are not "
            "merged here; make one LoRA adapter active, or use format='adapter'"
        )
    config.inference_mode = True
    bare = _plain(base, _without_adapters(base), dtype=torch.float32)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        adapted = get_peft_model(bare, config)
    state = {
        k: v.detach().float().cpu() for k, v in get_peft_model_state_dict(model, adapter_name=adapter).items()
    }
    missing = set_peft_model_state_dict(adapted, state).unexpected_keys
    if missing:
        raise ExportError(f"model has adapter weights that fit nowhere: {missing[:3]}")
    return adapted.merge_and_unload(safe_merge=True)


def share_moved(model: Any, merged: PreTrainedModel, dtype: torch.dtype) -> float | None:
    """Of the weights that adapters change, the share that is another number than the base's in dtype; None without."""
    if not is_adapted(model):
        return None
    base, moved, numbers = _without_adapters(base_model(model)), 0, 0
    after = merged.state_dict()
    for name in _adapted_names(base_model(model)):
        one, other = base[name].float().cpu().to(dtype), after[name].to(dtype)
        moved += int((one != other).sum())
        numbers += one.numel()
    return moved / numbers if numbers else None


def stored_as(model: PreTrainedModel, quant: str) -> PreTrainedModel:
    """The model in the dtype that it is to be stored in. Raises ExportError where float16 cannot hold a weight."""
    if quant == "f16":
        largest = max(float(p.detach().abs().max()) for p in model.parameters())
        if not largest <= _LARGEST_F16:
            raise ExportError(
                f"quant='f16' holds numbers up to {_LARGEST_F16:g} and the largest weight is {largest:g}; use 'f32'"
            )
    return model.to(STORED[quant])


def _plain(model: PreTrainedModel, state: dict[str, torch.Tensor], dtype: torch.dtype | None = None) -> Any:
    """A model of the same configuration on the CPU with this state."""
    config = copy.deepcopy(model.config)
    config.__dict__.pop("quantization_config", None)
    dtype = dtype or next(p.dtype for p in model.parameters())
    with torch.random.fork_rng(devices=[]):
        made = AutoModelForCausalLM.from_config(config, dtype=dtype)
    made.load_state_dict({name: tensor.cpu() for name, tensor in state.items()}, strict=False)
    made.generation_config = copy.deepcopy(model.generation_config)
    made.tie_weights()
    return made.eval()


def _without_adapters(base: PreTrainedModel) -> dict[str, torch.Tensor]:
    """The base's own state, as if no adapter were in it; 4-bit weights as the numbers that they stand for."""
    state = {}
    for name, tensor in base.state_dict().items():
        if "lora_" in name or ".quant_state." in name or name.endswith((".absmax", ".quant_map")):
            continue
        state[name.replace(".base_layer.", ".")] = tensor.detach()
    for name, module in base.named_modules():
        weight = getattr(module, "weight", None)
        if getattr(weight, "quant_state", None) is not None:
            from bitsandbytes.functional import dequantize_4bit

            numbers = dequantize_4bit(weight.data, weight.quant_state)
            state[f"{name.removesuffix('.base_layer')}.weight"] = numbers.detach()
    return state


def _adapted_names(base: PreTrainedModel) -> list[str]:
    from peft.tuners.tuners_utils import BaseTunerLayer

    return [f"{name}.weight" for name, module in base.named_modules() if isinstance(module, BaseTunerLayer)]
