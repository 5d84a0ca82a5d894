"""Writes a Llama, Qwen2 or Qwen3 model and its tokenizer as one GGUF file, for llama.cpp, Ollama and others.

The tokenizer must split text as here: a splitting that llama.cpp has no name for is refused.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import torch
from transformers import PreTrainedModel, PreTrainedTokenizerBase

from grpo_kit.exports.template import ExportError

_QWEN2 = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}| ?[^\s\p{L}\p{N}]+[\r\n]*|"
    r"\s*[\r\n]+|\s+(?!\S)|\s+"
)
_LLAMA3 = _QWEN2.replace(r"\p{N}|", r"\p{N}{1,3}|", 1)
_BY_REGEX = {_QWEN2: "qwen2", _LLAMA3: "llama-bpe"}  # llama.cpp's names
FILE_TYPES = {"f32": "ALL_F32", "f16": "MOSTLY_F16", "bf16": "MOSTLY_BF16", "q8_0": "MOSTLY_Q8_0"}


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
    Raises ExportError for another architecture, scaled rotary positions, and a tokenizer unknown to llama.cpp.
    """
    import gguf

    config = model.config
    kinds = {"llama": gguf.MODEL_ARCH.LLAMA, "qwen2": gguf.MODEL_ARCH.QWEN2, "qwen3": gguf.MODEL_ARCH.QWEN3}
    if config.model_type not in kinds:
        raise ExportError(
            f"model_type={config.model_type!r}: format='gguf' knows {', '.join(kinds)}; use format='merged' and "
            "llama.cpp's own converter"
        )
    splitting = _splitting(tokenizer)  # raises before anything is written
    arch = kinds[config.model_type]
    writer = gguf.GGUFWriter(path, gguf.MODEL_ARCH_NAMES[arch])
    _write_shape(writer, config, name, gguf.LlamaFileType[FILE_TYPES[quant]])
    if license:
        writer.add_license(license)
    if temperature is not None:
        writer.add_sampling_temp(temperature)
        writer.add_sampling_top_k(0)
        writer.add_sampling_top_p(1.0)
        writer.add_sampling_min_p(0.0)
    _write_tokenizer(writer, tokenizer, splitting, config.vocab_size)
    names, kind = gguf.get_tensor_name_map(arch, config.num_hidden_layers), gguf.GGMLQuantizationType
    types = {"f32": kind.F32, "f16": kind.F16, "bf16": kind.BF16, "q8_0": kind.Q8_0}
    for key, tensor in model.state_dict().items():
        if key == "lm_head.weight" and config.tie_word_embeddings:
            continue
        if config.model_type == "llama" and key.endswith(("q_proj.weight", "k_proj.weight")):
            heads = config.num_attention_heads if "q_proj" in key else config.num_key_value_heads
            tensor = _interleaved(tensor, heads)
        numbers = tensor.float().cpu().numpy()
        stored = types[quant] if numbers.ndim > 1 else kind.F32
        if stored == kind.Q8_0 and numbers.shape[-1] % 32:
            stored = kind.F16  # its blocks have 32 numbers
        if (called := names.get_name(key, (".weight", ".bias"))) is None:
            raise ExportError(f"model has {key}, for which GGUF has no name; use format='merged'")
        writer.add_tensor(called, gguf.quants.quantize(numbers, stored), raw_dtype=stored)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


def _write_shape(writer: Any, config: Any, name: str, file_type: Any) -> None:
    rope = config.rope_parameters
    if rope.get("rope_type", "default") != "default":
        raise ExportError(
            f"rope_type={rope['rope_type']!r}: format='gguf' writes plain rotary positions only"
        )
    head = getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads
    writer.add_name(name)
    writer.add_file_type(file_type)
    writer.add_quantization_version(2)
    writer.add_block_count(config.num_hidden_layers)
    writer.add_context_length(config.max_position_embeddings)
    writer.add_embedding_length(config.hidden_size)
    writer.add_feed_forward_length(config.intermediate_size)
    writer.add_head_count(config.num_attention_heads)
    writer.add_head_count_kv(config.num_key_value_heads)
    writer.add_layer_norm_rms_eps(config.rms_norm_eps)
    writer.add_rope_freq_base(rope["rope_theta"])
    writer.add_rope_dimension_count(head)
    writer.add_vocab_size(config.vocab_size)
    if config.model_type == "qwen3":
        writer.add_key_length(head)
        writer.add_value_length(head)


def _write_tokenizer(writer: Any, tokenizer: Any, splitting: str, size: int) -> None:
    import gguf

    made = json.loads(tokenizer.backend_tokenizer.to_str())["model"]
    texts = {number: text for text, number in tokenizer.get_vocab().items()}
    added = tokenizer.added_tokens_decoder
    kind, tokens, kinds = gguf.TokenType, [], []
    for number in range(size):
        tokens.append(texts.get(number, f"[PAD{number}]"))
        special = kind.CONTROL if number in added and added[number].special else kind.USER_DEFINED
        kinds.append(special if number in added else kind.NORMAL if number in texts else kind.UNUSED)
    writer.add_tokenizer_model("gpt2")
    writer.add_tokenizer_pre(splitting)
    writer.add_token_list(tokens)
    writer.add_token_types(kinds)
    writer.add_token_merges([one if isinstance(one, str) else " ".join(one) for one in made["merges"]])
    for name in ("bos", "eos", "pad", "unk"):
        if (number := getattr(tokenizer, f"{name}_token_id")) is not None:
            getattr(writer, f"add_{name}_token_id")(number)
    writer.add_add_bos_token(tokenizer("a")["input_ids"][0] == tokenizer.bos_token_id)
    writer.add_add_space_prefix(False)
    writer.add_chat_template(tokenizer.get_chat_template())


def _splitting(tokenizer: PreTrainedTokenizerBase) -> str:
    """llama.cpp's name for how the tokenizer splits text before merges."""
    made = (
        json.loads(tokenizer.backend_tokenizer.to_str()) if tokenizer.is_fast else {"model": {"type": "slow"}}
    )
    if made["model"]["type"] != "BPE":
        raise ExportError(
            f"the tokenizer is a {made['model']['type']} one; format='gguf' writes byte-level BPE only"
        )
    pre = made["pre_tokenizer"] or {}
    parts = pre.get("pretokenizers", [pre])
    kinds = [part.get("type") for part in parts]
    if kinds == ["ByteLevel"] and parts[0]["use_regex"]:
        return "gpt-2"
    if kinds == ["Digits", "ByteLevel"] and parts[0]["individual_digits"] and parts[1]["use_regex"]:
        return "smollm"
    if kinds == ["Split", "ByteLevel"]:
        found = _BY_REGEX.get(parts[0]["pattern"].get("Regex"))
        if found:
            return found
    raise ExportError(
        f"the tokenizer splits text by {pre!r:.200}, for which llama.cpp's name is not known here; use format='merged' "
        "and llama.cpp's own converter"
    )


def _interleaved(weight: torch.Tensor, heads: int) -> torch.Tensor:
    """Rows of a head's two halves alternating: llama.cpp rotates neighbours, transformers halves."""
    rows, width = weight.shape
    return weight.reshape(heads, 2, rows // heads // 2, width).transpose(1, 2).reshape(rows, width)
