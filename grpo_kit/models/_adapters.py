"""LoRA: new adapters on a model, saved ones on the model that they name, for further training or merged into it.

A saved adapter is loaded again: its base is the one that it names, or lies beside it, in the folder base/.
"""

from __future__ import annotations

import functools
import json
import os
import re
import warnings
from collections.abc import Callable, Mapping
from dataclasses import fields
from importlib import import_module
from pathlib import Path
from types import FunctionType, ModuleType
from typing import Any, Literal

import torch
from safetensors import SafetensorError
from torch import Tensor
from transformers import AutoConfig, AutoTokenizer, PreTrainedModel, PreTrainedTokenizerBase

from grpo_kit.models._gguf_reader import PolicyLoadError
from grpo_kit.models._model_facts import EMBEDDED, TINY, base_model, model_name, weights_digest
from grpo_kit.record._run_folder import path_of

Tuning = Literal["full", "lora", "qlora"]
_RENAMED = ".*is_gradient_checkpointing.*"  # a property of transformers that peft reads
Loaded = tuple[PreTrainedModel, PreTrainedTokenizerBase]


def base_of(folder: Path) -> str:
    """The name or path of the model that a saved adapter is for. Raises PolicyLoadError if it names none."""
    if (folder / BASE / "config.json").is_file():
        return str(folder / BASE)  # wherever the adapter has been moved to
    try:
        base = load_peft().PeftConfig.from_pretrained(folder).base_model_name_or_path
    except (OSError, ValueError, TypeError, KeyError) as error:
        raise PolicyLoadError(
            f"name_or_path={str(folder)!r}: its adapter_config.json cannot be read ({error})"
        ) from error
    if not base:
        raise PolicyLoadError(
            f"name_or_path={str(folder)!r} holds an adapter whose adapter_config.json names no base model; write its "
            "name or path there, as base_model_name_or_path"
        )
    return base


def add_adapters(
    model: PreTrainedModel, tuning: Tuning, overrides: Mapping[str, Any], seed: int
) -> PreTrainedModel:
    """Rank-16 adapters on all linear layers but the head, drawn from the seed alone; overrides: of peft.LoraConfig."""
    peft = load_peft()
    model = _ready(model, tuning)
    unknown = sorted(set(overrides) - {field.name for field in fields(peft.LoraConfig)})
    if unknown:
        mend = "; the rank is 'r'" if "rank" in unknown else "; check the spelling"
        raise ValueError(f"lora has {', '.join(unknown)}: no field of peft.LoraConfig{mend}")
    settings = {"task_type": "CAUSAL_LM", "r": 16, "lora_alpha": 32, "lora_dropout": 0.0}
    settings |= {"target_modules": "all-linear", **overrides}
    with torch.random.fork_rng(), warnings.catch_warnings():
        torch.manual_seed(seed)
        warnings.filterwarnings("ignore", _RENAMED, FutureWarning)
        try:
            adapted = peft.get_peft_model(model, peft.LoraConfig(**settings))
        except (TypeError, ValueError) as error:
            raise ValueError(f"lora={dict(overrides)!r} is refused by peft: {error}") from error
    _saves_without_asking(model.name_or_path)
    return adapted


def load_adapter(folder: Path, load_base: Callable[[str], Loaded], tuning: Tuning) -> Loaded:
    """A saved adapter on its base, ready to train on. The tokenizer is the one saved beside it, else the base's."""
    base = base_of(folder)
    model, tokenizer = load_base(base)
    tokenizer = _tokenizer_beside(folder, model) or tokenizer
    _saves_without_asking(base)
    return _with_adapter(_ready(model, tuning), folder, is_trainable=True), tokenizer


def load_merged(folder: Path, load_base: Callable[[str], Loaded]) -> Loaded:
    """A saved adapter added into the float32 weights that load_base loads: a whole model, no adapter left.

    In bfloat16 weights the sum would be rounded: most of a short run's change is smaller than their last bit.
    """
    model, tokenizer = load_base(base_of(folder))
    tokenizer = _tokenizer_beside(folder, model) or tokenizer
    adapted = _with_adapter(model, folder)
    try:
        if not hasattr(adapted, "merge_and_unload"):
            raise ValueError(f"its kind is {adapted.active_peft_config.peft_type.value}")
        if reason := on_both_ends(adapted):
            raise ValueError(reason)
        merged = adapted.merge_and_unload(safe_merge=True)
    except (ValueError, RuntimeError) as error:
        # of peft: an adapter with a bias, on layers without
        raise PolicyLoadError(
            f"name_or_path={str(folder)!r} holds an adapter that cannot be merged into weights: {error}; use "
            "tuning='lora'"
        ) from error
    # before 0.19 peft leaves it, the sign of a model with adapters
    if hasattr(merged, "peft_config"):
        del merged.peft_config
    merged.name_or_path = merged.config.name_or_path = os.fspath(folder)
    return merged.requires_grad_(True), tokenizer


def _tokenizer_beside(folder: Path, model: PreTrainedModel) -> PreTrainedTokenizerBase | None:
    """The tokenizer saved with an adapter: it has the chat template and the tokens of the training."""
    if not (folder / "tokenizer_config.json").is_file():
        return None
    try:
        tokenizer = AutoTokenizer.from_pretrained(folder)
    except (OSError, ValueError) as error:
        raise PolicyLoadError(
            f"name_or_path={str(folder)!r}: its tokenizer cannot be read ({error})"
        ) from error
    rows = model.get_input_embeddings().weight.size(0)
    if len(tokenizer) > rows:
        raise PolicyLoadError(
            f"name_or_path={str(folder)!r}: its tokenizer has {len(tokenizer)} tokens and its base "
            f"{model.name_or_path!r} {rows} embeddings, since the model was resized before training; "
            "trainer.save_model(folder) saves such a base too"
        )
    return tokenizer


def on_both_ends(model: Any) -> str | None:
    """Why a model's adapters cannot be merged: one is on the embedding or the head, and both are one matrix.

    Merged into it, it would change the other end too.
    """
    base = base_model(model)
    ends = {"embedding": base.get_input_embeddings(), "head": base.get_output_embeddings()}
    matrices = {
        id(getattr(end, "base_layer", end).weight) for end in ends.values() if end is not None
    }
    adapted = [name for name, end in ends.items() if hasattr(end, "base_layer")]
    if not adapted or len(matrices) > 1:
        return None
    return f"since it is on the {adapted[0]}, which shares its matrix with the other end"


def _with_adapter(model: PreTrainedModel, folder: Path, **options: Any) -> Any:
    try:
        with warnings.catch_warnings():
            warnings.filterwarnings("ignore", _RENAMED, FutureWarning)
            return load_peft().PeftModel.from_pretrained(model, folder, **options)
    except (OSError, ValueError, RuntimeError, SafetensorError) as error:
        raise PolicyLoadError(
            f"name_or_path={str(folder)!r}: its adapter does not go onto {model.name_or_path!r} ({error})"
        ) from error


def _ready(model: PreTrainedModel, tuning: Tuning) -> PreTrainedModel:
    if tuning != "qlora":
        return model
    # The trainer turns checkpointing on itself, from its own settings.
    return load_peft().prepare_model_for_kbit_training(model, use_gradient_checkpointing=False)


def _saves_without_asking(base: str) -> None:
    """Stops peft's request to the hub for the base's config at each save, for local bases and the kit's own."""
    if base and ("/" not in base or Path(base).exists()):
        message = "(?s)(Unable to fetch remote file|Could not find a config file)"
        warnings.filterwarnings("ignore", f"{message}.*{re.escape(base)}", UserWarning)


def load_peft() -> ModuleType:
    """peft, imported in a third of the time: the functions of its bitsandbytes are compiled at their first call.

    torch.compile loads a second's worth of torch._inductor at its first mention, and bitsandbytes mentions it at
    import. It compiles only its 8-bit and 4-bit kernels on a CPU, which the kit does not use.
    """
    compile_now = torch.compile

    def compile_later(function: Any = None, **options: Any) -> Any:
        if not isinstance(function, FunctionType):  # a model, or a decorator with options
            return compile_now(function, **options)
        compiled = functools.cache(lambda: compile_now(function, **options))
        return functools.wraps(function)(lambda *args, **kwargs: compiled()(*args, **kwargs))

    torch.compile = compile_later
    try:
        import bitsandbytes  # noqa: F401
    except ImportError:  # the user of it raises the error
        pass
    finally:
        torch.compile = compile_now
    return import_module("peft")


BASE = "base"  # a folder beside an adapter, with the model that it is for
# a base's own mark: what _look_of_base sees of it as its name gives it
_LOADED = "_grpo_kit_loaded"


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


def save_adapter(
    model: Any, tokenizer: Any, part: Path, target: Path, *, plain: bool = False
) -> str:
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
            raise ValueError(
                f"model has adapters on {base!r} in 4 bits, and such a base is not written"
            )
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
        state[re.sub(r"(\.base_layer)+\.", ".", name).replace(".original_module.", ".")] = (
            tensor.detach()
        )
    for name, module in base.named_modules():
        weight = getattr(module, "weight", None)
        if getattr(weight, "quant_state", None) is not None:
            from bitsandbytes.functional import dequantize_4bit

            # bitsandbytes' state_dict(), after an answer on a CPU
            if weight.quant_state.absmax.dim() == 2:
                weight.quant_state.absmax = weight.quant_state.absmax.T.float().flatten()
            numbers = dequantize_4bit(weight.data, weight.quant_state)
            state[f"{name.removesuffix('.base_layer')}.weight"] = numbers.detach()
    return state


def _look_of_base(model: Any) -> tuple[list[torch.Size], str]:
    """Shapes of the weights under the adapters, and their digest."""
    parameters = base_model(model).named_parameters()
    weights = [p for name, p in parameters if _is_the_bases(model, name)]
    return [p.shape for p in weights], weights_digest(
        p for p in weights if p.is_floating_point()
    )


def _is_the_bases(model: Any, name: str) -> bool:
    # The prefix of this kind of adapter.
    prefix = getattr(getattr(model, "base_model", None), "prefix", "lora_")
    return not any(part in name for part in (prefix, ".modules_to_save.", ".quant_state."))
