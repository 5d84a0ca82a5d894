"""Writes a model and its tokenizer as one GGUF file, for llama.cpp, Ollama and others.

Tables say which families, and what differs between transformers and llama.cpp. Whatever llama.cpp would compute
otherwise is refused: other rotary positions, a setting that it takes for granted, a tokenizer that it does not know.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
from transformers import PreTrainedModel, PreTrainedTokenizerBase
from transformers.modeling_gguf_pytorch_utils import GGUF_SUPPORTED_ARCHITECTURES
from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

from grpo_kit.models._model_facts import end_ids
from grpo_kit.more.export._gguf_tokens import splitting_of, write_tokens
from grpo_kit.more.export._template import ExportError

FILE_TYPES = {
    "f32": "ALL_F32",
    "f16": "MOSTLY_F16",
    "bf16": "MOSTLY_BF16",
    "q8_0": "MOSTLY_Q8_0",
}
# transformers' name of a family: llama.cpp's name of what computes it.
_FAMILIES = {
    "llama": "llama", "mistral": "llama", "ministral": "llama", "qwen2": "qwen2", "qwen3": "qwen3",
    "qwen3_moe": "qwen3moe", "gemma2": "gemma2", "gemma3_text": "gemma3", "phi3": "phi3", "smollm3": "smollm3",
    "granite": "granite", "olmo2": "olmo2", "olmo3": "olmo2",
}  # fmt: skip
# llama.cpp rotates neighbours, transformers halves
_INTERLEAVED = {"llama", "granite", "smollm3"}
# whose windows llama.cpp knows; others get a context of one window
_WINDOWS = {"gemma2", "gemma3", "olmo2"}
_ROPE = {
    "default": set(_FAMILIES.values()),
    "llama3": {"llama", "granite"},
    "longrope": {"phi3"},
}
# A file's numbers by the configuration's names for them. Written where the configuration has them.
_WHOLE = {
    "block_count": "num_hidden_layers", "embedding_length": "hidden_size", "vocab_size": "vocab_size",
    "feed_forward_length": "intermediate_size", "attention.head_count": "num_attention_heads",
    "attention.head_count_kv": "num_key_value_heads", "expert_count": "num_experts",
    "expert_used_count": "num_experts_per_tok", "expert_feed_forward_length": "moe_intermediate_size",
}  # fmt: skip
_REAL = {
    "attention.layer_norm_rms_epsilon": "rms_norm_eps", "attn_logit_softcapping": "attn_logit_softcapping",
    "final_logit_softcapping": "final_logit_softcapping", "embedding_scale": "embedding_multiplier",
    "residual_scale": "residual_multiplier", "attention.scale": "attention_multiplier",
    "logit_scale": "logits_scaling",
}  # fmt: skip
# Experts' tensors hold gate and up in one: the ends of their names, and of those in the file.
_EXPERTS = {
    "gate_up_proj": (".experts.gate_proj.weight", ".experts.up_proj.weight"),
    "down_proj": (".experts.down_proj.weight",),
}


def write_gguf(
    path: Path,
    model: PreTrainedModel,
    tokenizer: PreTrainedTokenizerBase,
    quant: str,
    *,
    name: str,
    temperature: float | None = None,
    license: str | None = None,
) -> None:
    """Write the model, in float32 or a shorter float, with its tokenizer and its chat template.

    quant: f32, f16, bf16 or q8_0, for every matrix; vectors stay float32. q8_0 stores 32 numbers as 8 bits each and one
    float16 scale. temperature: llama.cpp's default for sampling, from the whole distribution.
    Raises ExportError for another architecture, settings that llama.cpp does not compute, and an unknown tokenizer.
    """
    import gguf

    config = model.config
    arch = _architecture(config)
    splitting = splitting_of(tokenizer)  # raises before anything is written
    writer = gguf.GGUFWriter(path, arch)
    writer.add_name(name)
    writer.add_file_type(gguf.LlamaFileType[FILE_TYPES[quant]])
    writer.add_quantization_version(2)
    rope_factors = _write_shape(writer, config, arch)
    if license:
        writer.add_license(license)
    if temperature is not None:
        writer.add_sampling_temp(temperature)
        writer.add_sampling_top_k(0)
        writer.add_sampling_top_p(1.0)
        writer.add_sampling_min_p(0.0)
    write_tokens(writer, tokenizer, splitting, config.vocab_size, end_ids(model, tokenizer))
    arch_number = {name: number for number, name in gguf.MODEL_ARCH_NAMES.items()}[arch]
    names = gguf.get_tensor_name_map(arch_number, config.num_hidden_layers)
    types = gguf.GGMLQuantizationType
    for tensor_name, factors in rope_factors.items():
        writer.add_tensor(f"{tensor_name}.weight", factors.numpy(), raw_dtype=types.F32)
    for key, tensor in _tensors(model, arch):
        numbers = tensor.cpu().numpy()
        tensor_name = names.get_name(key, (".weight", ".bias"))
        if tensor_name is None:
            raise ExportError(
                f"model has {key}, for which GGUF has no name; use format='merged'"
            )
        stored = types[quant.upper()]
        if numbers.ndim == 1 or ".ffn_gate_inp." in tensor_name:
            stored = types.F32
        elif stored == types.Q8_0 and numbers.shape[-1] % 32:
            stored = types.F16  # its blocks have 32 numbers
        writer.add_tensor(tensor_name, gguf.quants.quantize(numbers, stored), raw_dtype=stored)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


def why_unread(config: Any) -> str | None:
    """Why transformers, which reads an export back, reads no GGUF file of this model, or reads it otherwise."""
    arch, rope = _architecture(config), _rope(config)
    if not {arch, config.model_type} & set(GGUF_SUPPORTED_ARCHITECTURES):
        return f"transformers reads no GGUF of model_type={config.model_type!r}"
    if rope["rope_type"] != "default" or rope.get("partial_rotary_factor", 1.0) != 1:
        return f"transformers reads a GGUF without its rotary positions of type {rope['rope_type']!r}"
    return None


def _rope(config: Any) -> dict[str, Any]:
    """The rotary positions, of full attention where a window has others."""
    rope = config.rope_parameters
    return rope.get("full_attention", rope)


def _architecture(config: Any) -> str:
    """llama.cpp's name. Raises ExportError for what it does not compute as transformers does."""
    import gguf

    arch = _FAMILIES.get(config.model_type)
    if arch not in gguf.MODEL_ARCH_NAMES.values():
        raise ExportError(
            f"model_type={config.model_type!r}: format='gguf' knows {', '.join(sorted(_FAMILIES))}; use "
            "format='merged' and llama.cpp's own converter"
        )
    layers = config.num_hidden_layers
    scalar = _head(config)
    if (arch, layers) in {("gemma2", 46), ("gemma3", 62)}:  # llama.cpp's rule for Gemma's 27B
        scalar = config.hidden_size // config.num_attention_heads
    expected = {
        "hidden_act": ["silu"], "hidden_activation": ["gelu_pytorch_tanh"], "norm_topk_prob": [True],
        "use_bidirectional_attention": [False, None], "mlp_only_layers": [[]], "decoder_sparse_step": [1],
        "no_rope_layers": [[(i + 1) % 4 > 0 for i in range(layers)]],
        "query_pre_attn_scalar": [scalar], "attn_logit_softcapping": [None],
    }  # fmt: skip
    if arch == "gemma2":  # which has both
        for name, usual in (
            ("attn_logit_softcapping", 50.0),
            ("final_logit_softcapping", 30.0),
        ):
            expected[name] = [getattr(config, name) or usual]
    for name, values in expected.items():
        value = getattr(config, name, values[0])
        if value not in values:
            raise ExportError(
                f"{name}={value!r}: llama.cpp computes {config.model_type} with {values[0]!r} only"
            )
    ropes = config.rope_parameters
    for rope in ropes.values() if "full_attention" in ropes else [ropes]:
        if arch not in _ROPE.get(rope["rope_type"], ()):
            raise ExportError(
                f"rope_type={rope['rope_type']!r}: format='gguf' writes no such rotary positions of "
                f"{config.model_type}; use format='merged' and llama.cpp's own converter"
            )
    return arch


def _head(config: Any) -> int:
    return getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads


def _write_shape(writer: Any, config: Any, arch: str) -> dict[str, torch.Tensor]:
    """Writes the configuration; returns what llama.cpp divides the rotary frequencies by, by tensors' names."""
    for add, table in ((writer.add_uint32, _WHOLE), (writer.add_float32, _REAL)):
        for key, name in table.items():
            if (value := getattr(config, name, None)) is not None:
                add(f"{arch}.{key}", value)
    rope, window = _rope(config), getattr(config, "sliding_window", None)
    # the most that llama.cpp computes as transformers does
    context = config.max_position_embeddings
    rotated = int(_head(config) * rope.get("partial_rotary_factor", 1.0))
    writer.add_key_length(_head(config))
    writer.add_value_length(_head(config))
    writer.add_rope_dimension_count(rotated)
    writer.add_rope_freq_base(rope["rope_theta"])
    if window and arch in _WINDOWS:
        writer.add_sliding_window(window)
        pattern = [kind == "sliding_attention" for kind in config.layer_types]
        writer.add_array(f"{arch}.attention.sliding_window_pattern", pattern)
        base = config.rope_parameters.get("sliding_attention", rope)["rope_theta"]
        writer.add_float32(f"{arch}.rope.freq_base_swa", base)
    elif window:
        context = min(context, window)
    factors = {}
    kind = rope["rope_type"]
    if kind != "default":
        frequencies, scale = ROPE_INIT_FUNCTIONS[kind](config, torch.device("cpu"))
        plain = rope["rope_theta"] ** -(
            torch.arange(0, rotated, 2, dtype=torch.float32) / rotated
        )
        factors = {"rope_freqs": plain / frequencies}
    # llama.cpp takes the long ones for the whole of a context above the original one
    if kind == "longrope":
        factors = {
            f"rope_factors_{length}": torch.tensor(
                rope[f"{length}_factor"], dtype=torch.float32
            )
            for length in ("long", "short")
        }
        context = min(context, rope["original_max_position_embeddings"])
        writer.add_rope_scaling_orig_ctx_len(context)
        writer.add_rope_scaling_attn_factors(scale)
    writer.add_context_length(context)
    return factors


def _tensors(model: PreTrainedModel, arch: str) -> Iterator[tuple[str, torch.Tensor]]:
    """The weights as llama.cpp has them, in float32, by transformers' names."""
    config = model.config
    heads = {"q_proj": config.num_attention_heads, "k_proj": config.num_key_value_heads}
    for key, tensor in model.state_dict().items():
        part, tensor = key.split(".")[-2], tensor.float()
        # llama.cpp reads no tied head.
        if part == "lm_head" and config.tie_word_embeddings and arch != "olmo2":
            continue
        if arch in _INTERLEAVED and part in heads:
            tensor = tensor.unflatten(0, (heads[part], 2, -1)).transpose(1, 2).flatten(0, 2)
        if arch in ("gemma2", "gemma3") and part.endswith("norm"):
            tensor = 1 + tensor
        prefix, experts, end = key.rpartition(".experts.")
        if not experts:
            yield key, tensor
            continue
        names = _EXPERTS[end]
        for name, piece in zip(names, tensor.chunk(len(names), 1), strict=True):
            yield prefix + name, piece
