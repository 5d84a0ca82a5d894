"""Keep what was trained: weights, prompt and temperature in one folder that proves itself.

kit.export writes it, template.py puts the training's prompt into the chat template, weights.py adds adapters up,
gguf.py writes one file for llama.cpp and Ollama, proof.py reads it back in a fresh process.
"""

from __future__ import annotations

import json
import os
import shutil
from collections.abc import Sequence
from dataclasses import dataclass
from importlib.metadata import version
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

from transformers import GenerationConfig

from grpo_kit.episodes.task import EpisodeTask
from grpo_kit.exports.card import export_card, push
from grpo_kit.exports.gguf import write_gguf
from grpo_kit.exports.proof import Proof, prove
from grpo_kit.exports.template import (
    REPORT,
    ExportError,
    Prompting,
    check_questions,
    modelfile,
    with_serving_template,
)
from grpo_kit.exports.weights import STORED, is_adapted, share_moved, stored_as, whole_model
from grpo_kit.models import model_name
from grpo_kit.rollout.complete import end_ids

if TYPE_CHECKING:
    from transformers import PreTrainedModel, PreTrainedTokenizerBase

    from grpo_kit.tasks import Task

Format = Literal["merged", "adapter", "gguf"]
QUANTS = {"merged": ("f32", "f16", "bf16"), "gguf": ("f32", "f16", "bf16", "q8_0"), "adapter": ("f32",)}
CARD = "README.md"
_BYTES = {"f32": 4, "f16": 2, "bf16": 2, "q8_0": 34 / 32}
_BESIDE = 50 * 10**6  # bytes of tokenizer and config
_QUESTIONS = ("What is 2 + 2?", "Name a colour.", "Is this a question?")  # where there is no task


@dataclass(frozen=True)
class Exported:
    """What kit.export wrote. proof: None where it was not asked for."""

    folder: Path
    format: str
    stored: str
    bytes: int
    proof: Proof | None
    notes: tuple[str, ...] = ()

    def push_to_hub(self, repo: str, *, private: bool = True, dry_run: bool = False) -> str:
        """Put the folder on the hub as repo, "owner/name"; what went, file by file. dry_run: nothing is sent.

        Raises ExportError for an export that was not proved, and where the hub does not take it.
        """
        return push(self, repo, private=private, dry_run=dry_run)

    def __repr__(self) -> str:
        lines = [f"{self.format}, {self.stored}: {self.bytes / 1e6:,.0f} MB in {self.folder}", *self.notes]
        return "\n".join([*lines, str(self.proof) if self.proof else "not proved"])


def export(
    model: Any,
    tokenizer: PreTrainedTokenizerBase,
    folder: str | os.PathLike,
    *,
    task: Task | EpisodeTask | None = None,
    format: Format = "merged",
    quant: str | None = None,
    temperature: float = 1.0,
    max_completion_tokens: int | None = None,
    rows: Sequence[dict] | int = 64,
    proof: bool = True,
    run: str | os.PathLike | None = None,
    comparison: object | None = None,
    license: str | None = None,
) -> Exported:
    """Write the trained model with its prompt into a new folder, read it back in a fresh process, and compare.

    model: a trainer, or its model; it stays as it is. task: whose system text, worked examples and prefill go into the
    chat template, so that a question alone is asked as in training; None: the tokenizer's template as it is.
    format: "merged", a folder for transformers, vLLM and the like, LoRA added up in float32; "adapter", the adapter
    alone; "gguf", one file for llama.cpp and Ollama, with a Modelfile.
    quant: how weights are stored: "f32", "f16" (default), "bf16" and, of a GGUF, "q8_0". bfloat16 has 8 bits: it rounds
    away most of what a short run changed, and the note says how much is left. An adapter is float32.
    temperature: what serving samples at; that of the training. max_completion_tokens: None means the task's, else 256.
    rows: of the task's held-out rows, so many (or these) are answered by the export and by the model, greedily; of an
    EpisodeTask none are. proof=False writes and does not look.
    run: the run folder, for the model card README.md; of a trainer it is known. comparison: base beside tuned
    (kit.compare), for the card. license: of the base, as the hub names it, such as "apache-2.0".
    Raises ExportError (a ValueError) for a folder that is not empty, a full disk, what a format cannot hold, a chat
    template that cannot render the training's prompt, and an export that is not the trained model: that one is left,
    with its report, in a folder "<folder>-refused". A folder under its own name is whole.

    >>> kit.export(trainer, tokenizer, "exports/largest", task=task, format="gguf", quant="q8_0")  # doctest: +SKIP
    """
    if hasattr(model, "train_dataset"):  # a trainer
        model, run = model.model, run or model.args.output_dir
    stored = _checked(model, format, quant)
    target = Path(folder).expanduser()
    if target.exists() and (not target.is_dir() or any(target.iterdir())):
        raise ExportError(f"folder={str(folder)!r} is there and not empty; give a new one")
    prompting = Prompting.of(task)
    served = with_serving_template(tokenizer, prompting)
    chosen = _rows(task, rows)
    questions = [row["question"] for row in chosen] or list(_QUESTIONS)
    check_questions(tokenizer, served, prompting, questions)
    tokens = max_completion_tokens or (task.max_completion_tokens if task is not None else 256)
    part = _part(target, model, format, stored)
    try:
        file, notes = _write(part, model, served, prompting, format, stored, target.name, temperature, tokens)
        found = None
        if proof:
            judged = task if task is not None and not isinstance(task, EpisodeTask) else None
            found = prove(
                model, tokenizer, part, format=format, stored=stored, file=file, prompting=prompting,
                questions=questions, tokens=tokens, task=judged, rows=chosen if judged else (),
            )  # fmt: skip
        size = sum(path.stat().st_size for path in part.rglob("*") if path.is_file())
        made = Exported(target, format, stored, size, found, tuple(notes))
        sampling = {"temperature": temperature, "max_completion_tokens": tokens}
        _report(part, made, model, prompting, sampling)
        card = export_card(
            made, base=model_name(model), question=questions[0], file=file, run=Path(run) if run else None,
            comparison=comparison, license=license,
        )  # fmt: skip
        (part / CARD).write_text(card, encoding="utf-8")
    except OSError as error:
        shutil.rmtree(part, ignore_errors=True)
        raise ExportError(
            f"folder={str(folder)!r} was not written: {error}; nothing is left of it"
        ) from error
    except BaseException:
        shutil.rmtree(part, ignore_errors=True)
        raise
    if found is not None and found.objections:
        refused = _free_name(target.with_name(f"{target.name}-refused"))
        part.rename(refused)
        raise ExportError(
            f"the export is not the trained model: {'; '.join(found.objections)}. It lies in {refused}, with its report"
        )
    if target.is_dir():
        target.rmdir()
    part.rename(target)
    return made


def _checked(model: Any, format: str, quant: str | None) -> str:
    """How the weights are stored. Raises ExportError for what does not go together."""
    if format not in QUANTS:
        raise ExportError(f"format={format!r} is not known; use {', '.join(map(repr, QUANTS))}")
    stored = quant or ("f32" if format == "adapter" else "f16")
    if stored not in QUANTS[format]:
        raise ExportError(f"quant={quant!r} is none of format={format!r}'s: {', '.join(QUANTS[format])}")
    if format == "adapter" and not is_adapted(model):
        raise ExportError(
            "format='adapter': the model has none, all its weights were trained; use format='merged'"
        )
    return stored


def _rows(task: Any, rows: Sequence[dict] | int) -> list[dict]:
    if task is None:
        return []
    if isinstance(rows, int):
        if rows < 1:
            raise ExportError(f"rows={rows!r} must be at least 1; proof=False does not look at any")
        return list(task.held_out[:rows])
    if not rows:
        raise ExportError("rows is empty; give at least one row")
    return list(rows)


def _part(target: Path, model: Any, format: str, stored: str) -> Path:
    """A hidden folder beside the target, on a disk with room. What a killed export left there is named so too."""
    target.parent.mkdir(parents=True, exist_ok=True)
    numbers = sum(p.numel() for p in model.parameters() if format != "adapter" or p.requires_grad)
    needed, free = int(numbers * _BYTES[stored]) + _BESIDE, shutil.disk_usage(target.parent).free
    if free < needed:
        raise ExportError(
            f"folder={str(target)!r} needs {needed / 1e9:.1f} GB of disk and {free / 1e9:.1f} GB are free; make "
            "room, or store fewer bits"
        )
    part = target.with_name(f".{target.name}-exporting-{os.getpid()}")
    shutil.rmtree(part, ignore_errors=True)
    part.mkdir()
    return part


def _write(
    part: Path, model: Any, served: Any, prompting: Prompting, format: str, stored: str, name: str,
    temperature: float, tokens: int,
) -> tuple[str | None, list[str]]:  # fmt: skip
    """The name of the GGUF file if there is one, and what is to be said."""
    ends, notes, file = end_ids(model, served), [], None
    settings = GenerationConfig(
        do_sample=temperature > 0, temperature=temperature or None, top_p=1.0 if temperature else None,
        top_k=0 if temperature else None, max_new_tokens=tokens, eos_token_id=ends, pad_token_id=served.pad_token_id,
        bos_token_id=served.bos_token_id,
    )  # fmt: skip
    if format == "adapter":
        model.save_pretrained(part)
        notes.append(f"the adapter is for {model_name(model)!r}, from where it is loaded again")
    else:
        whole = whole_model(model)
        if stored == "bf16" and (moved := share_moved(model, whole, STORED["bf16"])) is not None:
            notes.append(
                f"bfloat16: {moved:.1%} of the weights that the adapter changes are other numbers than before"
            )
        if format == "gguf":
            file = f"{name}-{stored}.gguf"
            write_gguf(part / file, whole, served, stored, name=name)
            text = modelfile(served, prompting, file, temperature=temperature, tokens=tokens)
            (part / "Modelfile").write_text(text, encoding="utf-8")
            return file, notes
        whole = stored_as(whole, stored)
        whole.generation_config = settings
        whole.save_pretrained(part)
    served.save_pretrained(part)
    settings.save_pretrained(part)
    return file, notes


def _report(
    part: Path, made: Exported, model: PreTrainedModel, prompting: Prompting, sampling: dict[str, Any]
) -> None:
    data = {
        "base": model_name(model),
        "format": made.format,
        "stored": made.stored,
        "bytes": made.bytes,
        "versions": {name: version(name) for name in ("grpo-kit", "torch", "transformers", "peft")},
        "notes": made.notes,
        "prefill": prompting.prefill,
        "prompt_inside": prompting != Prompting(),
        "sampling": sampling,
        "proof": made.proof and made.proof.to_dict(),
    }
    (part / REPORT).write_text(json.dumps(data, indent=2) + "\n", encoding="utf-8")


def _free_name(path: Path) -> Path:
    number, found = 1, path
    while found.exists():
        number, found = number + 1, path.with_name(f"{path.name}-{number + 1}")
    return found
