"""Writes the files of an export into its folder: weights, tokenizer with its chat template, sampling, Modelfile."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from transformers import GenerationConfig

from grpo_kit.models._model_facts import token_rows
from grpo_kit.models._saved_adapters import BASE, has_named_base, save_adapter
from grpo_kit.models.token_lists import end_ids
from grpo_kit.more.export._gguf_writer import write_gguf
from grpo_kit.more.export._ollama import modelfile
from grpo_kit.more.export._template import ExportError, Prompting
from grpo_kit.more.export._weights import STORED, share_moved, stored_as, whole_model
from grpo_kit.more.export.model_card import license_of

_BYTES = {"f32": 4, "f16": 2, "bf16": 2, "q8_0": 34 / 32}
_BESIDE = 50 * 10**6  # bytes of tokenizer and config


def bytes_needed(model: Any, format: str, stored: str) -> int:
    """Bytes of disk, at most."""
    adapter_alone = format == "adapter" and has_named_base(model, plain=True)
    numbers = sum(p.numel() for p in model.parameters() if p.requires_grad or not adapter_alone)
    return int(numbers * _BYTES[stored]) + _BESIDE


def write_files(
    part: Path, model: Any, served: Any, prompting: Prompting, format: str, stored: str, target: Path,
    sampling: dict[str, Any], base: str,
) -> tuple[str | None, list[str]]:  # fmt: skip
    """Write into `part`, to be renamed to `target`. Returns the name of the GGUF file, if any, and notes to print."""
    ends, notes = end_ids(model, served), []
    temperature, tokens = sampling["temperature"], sampling["max_completion_tokens"]
    settings = GenerationConfig(
        do_sample=temperature > 0, temperature=temperature or None, top_p=1.0 if temperature else None,
        top_k=0 if temperature else None, max_new_tokens=tokens, eos_token_id=ends, pad_token_id=served.pad_token_id,
        bos_token_id=served.bos_token_id,
    )  # fmt: skip
    if format == "adapter":
        try:
            named = save_adapter(model, served, part, target, plain=True)
        except ValueError as error:
            raise ExportError(f"{error}; or use format='merged'") from error
        beside = " with it, in base/" * (part / BASE).is_dir()
        notes.append(f"the adapter is for {named!r}, from where its base is loaded again{beside}")
    else:
        whole = whole_model(model)
        if stored == "bf16" and (moved := share_moved(model, whole, STORED["bf16"])) is not None:
            notes.append(
                f"bfloat16: {moved:.1%} of the weights that the adapter changes are other numbers than before"
            )
        if (rows := token_rows(model)) < token_rows(whole):  # whoever serves it must not sample the others
            whole.resize_token_embeddings(rows)
        if format == "gguf":
            file = f"{target.name}-{stored}.gguf"
            write_gguf(
                part / file,
                whole,
                served,
                stored,
                name=target.name,
                temperature=temperature,
                license=license_of(base),
            )
            try:
                text = modelfile(served, prompting, file, temperature=temperature, tokens=tokens, ends=ends)
                (part / "Modelfile").write_text(text, encoding="utf-8")
            except ExportError as error:
                notes.append(f"no Modelfile for Ollama: {error}")
            return file, notes
        whole = stored_as(whole, stored)
        whole.generation_config = settings
        whole.save_pretrained(part)
    served.save_pretrained(part)
    settings.save_pretrained(part)
    return None, notes
