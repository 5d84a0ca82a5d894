"""Writes the files of an export into its folder: weights, tokenizer with its chat template, sampling, Modelfile.

Adapters are merged in float32 into the weights they were trained on. A freshly loaded base may differ from those by
now, and a 4-bit base never equals them. Merging in bfloat16 would round most of a short run's change away.
"""

from __future__ import annotations

import copy
import warnings
from pathlib import Path
from typing import Any

import torch
from transformers import AutoModelForCausalLM, GenerationConfig, PreTrainedModel

from grpo_kit.models._adapters import (
    BASE,
    has_named_base,
    on_both_ends,
    save_adapter,
    weights_of_base,
)
from grpo_kit.models._model_facts import base_model, end_ids, token_rows
from grpo_kit.more.export._gguf_writer import write_gguf
from grpo_kit.more.export._template import ExportError, Prompting, modelfile

_STORED = {"f32": torch.float32, "f16": torch.float16, "bf16": torch.bfloat16}
_BYTES = {"f32": 4, "f16": 2, "bf16": 2, "q8_0": 34 / 32}
_SMALL_FILES = 50 * 10**6  # bytes of tokenizer and config
_LARGEST_F16 = 65504.0


def bytes_needed(model: Any, format: str, stored: str) -> int:
    """Bytes of disk, at most."""
    adapter_alone = format == "adapter" and has_named_base(model, plain=True)
    numbers = sum(p.numel() for p in model.parameters() if p.requires_grad or not adapter_alone)
    return int(numbers * _BYTES[stored]) + _SMALL_FILES


def write_files(
    part: Path,
    model: Any,
    served: Any,
    prompting: Prompting,
    format: str,
    stored: str,
    target: Path,
    sampling: dict[str, Any],
    license: str | None,
) -> tuple[str | None, list[str]]:
    """Write into `part`, to be renamed to `target`. Returns the name of the GGUF file, if any, and notes to print.

    license: of the base, for a GGUF.
    """
    ends, notes = end_ids(model, served), []
    temperature, tokens = sampling["temperature"], sampling["max_completion_tokens"]
    config = GenerationConfig(
        do_sample=False,
        max_new_tokens=tokens,
        eos_token_id=ends,
        pad_token_id=served.pad_token_id,
        bos_token_id=served.bos_token_id,
    )
    if temperature > 0:
        config.update(do_sample=True, temperature=temperature, top_p=1.0, top_k=0)
    if format == "adapter":
        try:
            base = save_adapter(model, served, part, target, plain=True)
        except ValueError as error:
            raise ExportError(f"{error}; or use format='merged'") from error
        place = " with it, in base/" if (part / BASE).is_dir() else ""
        notes.append(f"the adapter is for {base!r}, from where its base is loaded again{place}")
    else:
        merged = whole_model(model)
        if (
            stored == "bf16"
            and (moved := share_moved(model, merged, torch.bfloat16)) is not None
        ):
            notes.append(
                f"bfloat16: {moved:.1%} of the weights that the adapter changes are other numbers than before"
            )
        # whoever serves it must not sample the others
        if token_rows(model) < token_rows(merged):
            merged.resize_token_embeddings(token_rows(model))
        if format == "gguf":
            file = f"{target.name}-{stored}.gguf"
            path = part / file
            notes += _write_gguf(
                path, merged, served, prompting, ends, stored, sampling, license
            )
            return file, notes
        merged = _stored_as(merged, stored)
        merged.generation_config = config
        merged.save_pretrained(part)
    served.save_pretrained(part)
    config.save_pretrained(part)
    return None, notes


def _write_gguf(
    path: Path,
    merged: Any,
    served: Any,
    prompting: Prompting,
    ends: list[int],
    stored: str,
    sampling: dict[str, Any],
    license: str | None,
) -> list[str]:
    """Write the file and its Modelfile beside it. Returns notes to print."""
    temperature, tokens = sampling["temperature"], sampling["max_completion_tokens"]
    name = path.stem.removesuffix(f"-{stored}")
    write_gguf(
        path, merged, served, stored, name=name, temperature=temperature, license=license
    )
    try:
        text = modelfile(
            served, prompting, path.name, temperature=temperature, tokens=tokens, ends=ends
        )
    except ExportError as error:
        return [f"no Modelfile for Ollama: {error}"]
    path.with_name("Modelfile").write_text(text, encoding="utf-8")
    return []


def check_weights(model: Any) -> None:
    """Raises ExportError for numbers that are not finite, and for weights spread over several processes."""
    for name, parameter in model.named_parameters():
        if type(parameter.data).__name__ == "DTensor" or not parameter.numel():
            raise ExportError(
                f"model has {name} spread over several processes; gather it with trainer.save_model(folder), load that "
                "with kit.load_policy, and export what it gives"
            )
        if parameter.is_floating_point() and not torch.isfinite(parameter).all():
            raise ExportError(
                f"model has numbers in {name} that are not finite: the training diverged; export an earlier checkpoint"
            )


def whole_model(model: Any) -> PreTrainedModel:
    """A copy on the CPU without adapters, in float32 if there were any; the model itself is unchanged.

    Merges the active adapters if there are several. Raises ExportError for adapters that cannot be merged.
    """
    if not hasattr(model, "peft_config"):
        return _without_adapters(model, model.state_dict())
    from peft import get_peft_model, get_peft_model_state_dict, set_peft_model_state_dict

    base, names = base_model(model), list(model.active_adapters)
    configs = {name: copy.deepcopy(model.peft_config[name]) for name in names}
    _check_mergeable(model, configs)
    merged = _without_adapters(base, weights_of_base(model), dtype=torch.float32)
    for name, config in configs.items():
        config.inference_mode = True
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            if name == names[0]:
                merged = get_peft_model(merged, config, adapter_name=name)
            else:
                merged.add_adapter(name, config)
            state = get_peft_model_state_dict(model, adapter_name=name)
        state = {key: tensor.detach().float().cpu() for key, tensor in state.items()}
        unknown_keys = set_peft_model_state_dict(
            merged, state, adapter_name=name
        ).unexpected_keys
        if unknown_keys:
            raise ExportError(f"model has adapter weights that fit nowhere: {unknown_keys[:3]}")
    try:
        return merged.merge_and_unload(safe_merge=True, adapter_names=names)
    except (ValueError, RuntimeError) as error:  # an adapter with a bias, on layers without
        raise ExportError(
            f"model has adapters that cannot be merged ({error}); use format='adapter'"
        ) from error


def _check_mergeable(model: Any, configs: dict[str, Any]) -> None:
    obstacle = _obstacle(model, list(configs.values()))
    if obstacle is not None:
        raise ExportError(
            f"model has the adapters {list(configs)}: {obstacle}; that is not merged here. Use format='adapter'"
        )


def _obstacle(model: Any, configs: list[Any]) -> str | None:
    """Why the adapters cannot be merged."""
    if not configs:
        return "no adapter is active"
    if not hasattr(model, "merge_and_unload"):
        return f"kind {', '.join({config.peft_type.value for config in configs})}"
    if len(configs) > 1 and any(getattr(config, "use_dora", False) for config in configs):
        return "several DoRA adapters, whose sum depends on their order"
    if any(getattr(config, "trainable_token_indices", None) for config in configs):
        return "single tokens of the embedding (trainable_token_indices)"
    return on_both_ends(model)


def share_moved(model: Any, merged: PreTrainedModel, dtype: torch.dtype) -> float | None:
    """The share of adapted weights whose number in dtype differs from the base's; None without adapters."""
    if not hasattr(model, "peft_config"):
        return None
    from peft.tuners.tuners_utils import BaseTunerLayer

    before, after = weights_of_base(model), merged.state_dict()
    moved, numbers = 0, 0
    for name, layer in base_model(model).named_modules():
        if isinstance(layer, BaseTunerLayer):  # experts have several, each under its own name
            name = f"{name.replace('.base_layer', '')}.{getattr(layer, 'parameter_name', 'weight')}"
            weight = before[name].float().cpu().to(dtype)
            moved += int((weight != after[name].to(dtype)).sum())
            numbers += weight.numel()
    return moved / numbers if numbers else None


def _stored_as(model: PreTrainedModel, quant: str) -> PreTrainedModel:
    """The model in the dtype for storage. Raises ExportError if float16 cannot hold a weight."""
    if quant == "f16":
        largest = max(float(p.detach().abs().max()) for p in model.parameters())
        if not largest <= _LARGEST_F16:
            raise ExportError(
                f"quant='f16' holds numbers up to {_LARGEST_F16:g} and the largest weight is {largest:g}; use 'f32'"
            )
    return model.to(_STORED[quant])


def _without_adapters(
    model: PreTrainedModel, state: dict[str, torch.Tensor], dtype: torch.dtype | None = None
) -> PreTrainedModel:
    """A model of the same configuration on the CPU with this state."""
    config = copy.deepcopy(model.config)
    config.__dict__.pop("quantization_config", None)
    dtype = dtype or next(model.parameters()).dtype
    with torch.random.fork_rng(devices=[]):
        plain = AutoModelForCausalLM.from_config(config, dtype=dtype)
    state = {name: tensor.detach().cpu() for name, tensor in state.items()}
    missing_keys = set(plain.load_state_dict(state, strict=False).missing_keys)
    if config.tie_word_embeddings:
        missing_keys.discard("lm_head.weight")
    if missing_keys:
        names = ", ".join(sorted(missing_keys)[:3])
        raise ExportError(f"model keeps {names} under another name, which is not known here")
    plain.generation_config = copy.deepcopy(model.generation_config)
    plain.tie_weights()
    return plain.eval()
