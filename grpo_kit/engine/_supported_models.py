"""What a model's layers see, whether tests know its kind, whether the engine supports it, and when it changed."""

from __future__ import annotations

import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any
from weakref import WeakKeyDictionary, WeakSet

import torch
from torch import nn
from torch.nn.modules import module as torch_module
from transformers import GenerationConfig, PreTrainedModel

from grpo_kit._support.argument_checks import check_whole
from grpo_kit._support.unsloth import replaced_layers
from grpo_kit.models._model_facts import (
    MODEL_TYPES,
    base_model,
    check_context,
    context_length,
    has_adapters,
)

# Their frequencies change as a sequence grows, so that cached keys would need another rotation.
_MOVING_ROPE = frozenset({"dynamic", "longrope"})
_ATTENTION_LAYERS = {"full_attention", "sliding_attention"}
_DTYPES = (torch.float32, torch.bfloat16, torch.float16)

_USED = frozenset(
    "max_new_tokens do_sample temperature top_k top_p min_p repetition_penalty "
    "eos_token_id pad_token_id bos_token_id stop_strings".split()
)
# These do not affect the choice of a token of a single, uncompiled sequence, or only generate's further results.
_WITHOUT_EFFECT = frozenset(
    "max_length early_stopping length_penalty renormalize_logits disable_compile compile_config "
    "transformers_version return_dict_in_generate output_scores output_logits output_attentions "
    "output_hidden_states num_assistant_tokens num_assistant_tokens_schedule assistant_confidence_threshold "
    "assistant_lookbehind target_lookbehind max_matching_ngram_size".split()
)
_OFF = {
    "use_cache": True,
    "num_beams": 1,
    "num_beam_groups": 1,
    "num_return_sequences": 1,
    "typical_p": 1.0,
    "encoder_repetition_penalty": 1.0,
    "guidance_scale": 1.0,
}


def is_tested(model: Any) -> bool:
    """Is it one of MODEL_TYPES, a class of transformers' own, all of whose layers see everything before them?"""
    base = base_model(model)
    if not type(base).__module__.startswith("transformers.models."):
        return False
    if (
        not type(base).__name__.endswith("ForCausalLM")
        or base.config.model_type not in MODEL_TYPES
    ):
        return False
    return set(layer_kinds(base)) == {"full_attention"}


def layer_kinds(model: Any) -> list[str]:
    """The kinds of its layers, as transformers names them; ["full_attention"] where the config names none."""
    return list(getattr(base_model(model).config, "layer_types", None) or ["full_attention"])


def window_of(model: Any) -> int | None:
    """Tokens that its layers with a sliding window see, None if it has none."""
    config = base_model(model).config
    kinds = getattr(config, "layer_types", None)
    slides = kinds is None or "sliding_attention" in kinds
    return getattr(config, "sliding_window", None) if slides else None


def signature(model: torch.nn.Module) -> tuple:
    """What graphs and kept keys depend on: the address and dtype of every weight and buffer, adapters, autocast.

    Values may change in place (an optimizer step): a graph reads them again. Addresses and kinds may not.
    """
    tensors = [*model.named_parameters(), *model.named_buffers()]
    peft = sys.modules.get("peft.tuners.tuners_utils")
    adapters = []
    if peft is not None:
        for layer in model.modules():
            if isinstance(layer, peft.BaseTunerLayer) and hasattr(layer, "scaling"):
                adapters.append(list(layer.active_adapters))
                adapters.append(layer.disable_adapters)
                adapters.append(list(layer.merged_adapters))
                adapters.append(dict(layer.scaling))
    device = next(model.parameters()).device.type
    autocast = torch.is_autocast_enabled(device) and torch.get_autocast_dtype(device)
    weights = [(name, t.data_ptr(), t.dtype, t.shape, t.device) for name, t in tensors]
    return weights, adapters, autocast, torch.get_float32_matmul_precision()


@contextmanager
def attention_named(base: PreTrainedModel, name: str) -> Iterator[None]:
    """Inside, the model's layers call the attention of this name; for a name of the kit transformers builds no mask."""
    previous = base.config._attn_implementation
    base.config._attn_implementation = name
    try:
        yield
    finally:
        base.config._attn_implementation = previous
        # Keys, or a mask, lie in the config: StableLM's layers hand no keywords on.
        vars(base.config).pop("handed_to_attention", None)


# ---- modules that do what their class says ---------------------------------------------------------------------------

_EVERY_MODULES = (torch_module._global_forward_hooks, torch_module._global_forward_pre_hooks)
# transformers' own: for gradients of checkpointed inputs, and for requested hidden states. Here neither applies. The
# kit's on a head: the rows that it closes are left out here (models/_model_facts.py).
_IDLE = {"make_inputs_require_grads", "output_capturing_hook", "no_probability"}


def is_plain(module: nn.Module) -> bool:
    """Does calling it only run its class's forward: no hooks, no forward of its own?"""
    hooks = [*module._forward_hooks.values(), *module._forward_pre_hooks.values()]
    for table in _EVERY_MODULES:
        hooks += table.values()
    names = {getattr(hook, "__name__", "") for hook in hooks}
    return "forward" not in vars(module) and names <= _IDLE


def is_plain_weight(tensor: torch.Tensor, dtype: torch.dtype = torch.float32) -> bool:
    """Is it a parameter of the plain class and of this dtype, not a quantised one that only claims to be?"""
    return type(tensor) is nn.Parameter and tensor.dtype == dtype


# ---- what failed here, and what is not supported ---------------------------------------------------------------------

_failed: WeakKeyDictionary[PreTrainedModel, str] = WeakKeyDictionary()


def engine_failed(model: Any, reason: str) -> None:
    """Record that the engine failed with this model on this machine; completions then use the plain way."""
    _failed[base_model(model)] = f"it failed here before: {reason}"


_by_modules: WeakSet[PreTrainedModel] = WeakSet()


def decode_by_modules(model: Any, reason: str) -> None:
    """Record, with a line, that decoding in few kernels failed here; the engine then calls the model's modules."""
    if base_model(model) in _by_modules:
        return
    _by_modules.add(base_model(model))
    print(
        f"Decoding in few kernels failed on this machine ({reason}); the model's modules decode from now on, slower. "
        "Please paste this and `python -m grpo_kit doctor` into an issue of grpo_kit.",
        flush=True,
    )


def decoded_by_modules(base: PreTrainedModel) -> bool:
    """Did decode_by_modules() record this one?"""
    return base in _by_modules


def unsupported(model: Any, generation_config: GenerationConfig) -> str | None:
    """None if the engine supports it, else one sentence with the reason."""
    return _model_problem(model) or _config_problem(model, generation_config)


def shared_problem(model: Any) -> str | None:
    """None if what rows share can be computed once for them, else one sentence that says why not.

    That takes keys and values as the only state, causal attention, and positions that mean the same in each row.
    """
    if has_adapters(model) and model.active_peft_config.is_prompt_learning:
        return f"{model.active_peft_config.peft_type.value} adapters add virtual tokens"
    base = base_model(model)
    if not isinstance(base, PreTrainedModel):
        return f"{type(base).__name__} is no transformers model"
    config = base.config
    if replaced := replaced_layers(model):
        return f"Unsloth replaced its {replaced}"
    if base.get_output_embeddings() is None:
        return f"{type(base).__name__} has no language-model head"
    if config.get_text_config() is not config:
        return "it reads more than text"
    if config.is_encoder_decoder or getattr(config, "add_cross_attention", False):
        return "it attends to an encoder"
    if other_kinds := sorted(set(layer_kinds(base)) - _ATTENTION_LAYERS):
        return f"its layers of kind {', '.join(other_kinds)} have another state than keys and values"
    if not getattr(config, "is_causal", True) or getattr(
        config, "use_bidirectional_attention", False
    ):
        return "its attention is not causal"
    if not getattr(config, "rope_parameters", None):
        return f"model_type {config.model_type!r} has no rotary positions"
    return None


def _model_problem(model: Any) -> str | None:
    base = base_model(model)
    if problem := shared_problem(model) or _failed.get(base):
        return problem
    rope = base.config.rope_parameters  # one for all layers, or one for each kind of them
    for parameters in [rope, *rope.values()]:
        rope_type = parameters.get("rope_type") if isinstance(parameters, dict) else None
        if rope_type in _MOVING_ROPE:
            return f"its rotary positions are of type {rope_type!r}, which change as a sequence grows"
    devices = {p.device for p in model.parameters()}
    if len(devices) > 1 or next(iter(devices)).type not in ("cpu", "cuda"):
        return f"its weights lie on {', '.join(sorted(map(str, devices)))}; it must be one CPU or one CUDA device"
    dtype = base.get_input_embeddings().weight.dtype
    if dtype not in _DTYPES:
        return f"weights of dtype {dtype} are not one of float32, bfloat16, float16"
    return None


def _config_problem(model: Any, generation_config: GenerationConfig) -> str | None:
    settings = vars(GenerationConfig()).keys() - _USED - _WITHOUT_EFFECT
    checkpoint = base_model(model).generation_config
    for owner, config in (
        ("generation_config", generation_config),
        ("the checkpoint's own", checkpoint),
    ):
        for name, value in vars(config).items():
            in_effect = name in settings and not name.startswith("_")
            if in_effect and value not in (None, False, _OFF.get(name)):
                return f"{owner} {name}={value!r} is not something the engine does"
    return None


def check_room(
    model: Any,
    ids: Sequence[Sequence[int]],
    limit: int,
    *,
    name: str = "prompts",
    length: str = "max_completion_tokens",
    mend: str = "drop it or lower max_completion_tokens",
) -> None:
    """Raises ValueError for an empty prompt, and for one too long for `limit` more tokens in the model's context.

    name, length: the caller's names of ids and limit; mend: the remedy of a prompt that is too long.
    """
    check_whole(length, limit)
    context = context_length(model)
    for place, prompt in enumerate(ids):
        if not len(prompt):
            raise ValueError(f"{name}[{place}] has no tokens; every prompt needs at least one")
        check_context(
            context, len(prompt), limit, where=f"{name}[{place}]", length=length, mend=mend
        )
