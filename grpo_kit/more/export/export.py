"""kit.export: a trained model with its prompt in one folder, which is read back and compared."""

from __future__ import annotations

import json
import os
import shutil
from collections.abc import Sequence
from dataclasses import dataclass
from importlib.metadata import version
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

import torch
from safetensors import SafetensorError

from grpo_kit._support.argument_checks import (
    check_model,
    check_task,
    check_temperature,
    check_tokenizer,
    check_whole,
)
from grpo_kit._support.version import __version__
from grpo_kit.evaluation._as_trained import run_of, say_difference
from grpo_kit.loop.grpo import Loop
from grpo_kit.models._model_facts import close_rows, model_name
from grpo_kit.models._saved_adapters import BASE
from grpo_kit.more.export._export_folder import CARD, REPORT, files_of, finish, part_folder
from grpo_kit.more.export._gguf_writer import why_unread
from grpo_kit.more.export._template import (
    ExportError,
    Prompting,
    as_export_errors,
    check_questions,
    check_trained_prompts,
    with_serving_template,
)
from grpo_kit.more.export._write import bytes_needed, check_weights, write_files
from grpo_kit.more.export.model_card import curve, export_card, license_of, push_to_hub
from grpo_kit.more.export.verify import Proof, ProofError, prove
from grpo_kit.record._digests import file_digest
from grpo_kit.record.files import has_metrics, next_run_folder, run_settings
from grpo_kit.record.run_path import run_path

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

    from grpo_kit.tasks import Task

Format = Literal["merged", "adapter", "gguf"]
QUANTS = {"merged": ("f32", "f16", "bf16"), "gguf": ("f32", "f16", "bf16", "q8_0"), "adapter": ("f32",)}
_OPEN = {
    CARD,
    "Modelfile",
    "generation_config.json",
}  # people edit these, and the proof does not depend on them
_QUESTIONS = ("What is 2 + 2?", "Name a colour.", "Is this a question?")  # if there is no task


@dataclass(frozen=True)
class Exported:
    """The result of kit.export. file: a GGUF's, in the folder. proof: None with proof=False."""

    folder: Path
    format: str
    stored: str
    bytes: int
    proof: Proof | None
    notes: tuple[str, ...] = ()
    file: str | None = None

    def push_to_hub(self, repo: str, *, private: bool = True, dry_run: bool = False) -> str:
        """Upload the folder to the hub as repo, "owner/name"; returns the files. dry_run: nothing is sent.

        Raises ExportError for an export without a proof, and if the hub rejects it.
        """
        return push_to_hub(self.folder, repo, private=private, dry_run=dry_run)

    def __repr__(self) -> str:
        lines = [f"{self.format}, {self.stored}: {self.bytes / 1e6:,.0f} MB in {self.folder}", *self.notes]
        return "\n".join([*lines, str(self.proof) if self.proof else "not proved"])


def export(
    model: Any,
    tokenizer: PreTrainedTokenizerBase,
    folder: str | os.PathLike,
    *,
    task: Task | None = None,
    format: Format = "merged",
    quant: str | None = None,
    temperature: float | None = None,
    max_completion_tokens: int | None = None,
    rows: Sequence[dict] | int = 64,
    proof: bool = True,
    run: str | os.PathLike | None = None,
    comparison: object | None = None,
    license: str | None = None,
) -> Exported:
    """Write the trained model with its prompt into a new folder, read it back in a fresh process, and compare.

    model: a trainer, or its model; it is unchanged. task: its system text, worked examples and prefill go into the
    chat template, so that a question alone gets the training's prompt (several turns: the first turn's message); None:
    the tokenizer's template unchanged. If a trainer's own prompts differ from the task's, the task is refused.
    format: "merged", a folder for transformers, vLLM and the like, with LoRA merged in float32; "adapter", the adapter
    alone, with its base where that has no name by which peft finds it; "gguf", one file for llama.cpp and Ollama, with
    a Modelfile (the page on models lists the families; where transformers itself reads no such file, only with
    proof=False).
    quant: storage of weights: "f32", "f16" (default), "bf16" and, for a GGUF, "q8_0". bfloat16 has 8 bits: it rounds
    away most of a short run's change, and the note reports how much is left. An adapter is float32.
    temperature: for serving; None: the trainer's last, or 1 for a model. max_completion_tokens: None means the
    task's, else the trainer's, else 256.
    rows: number of the task's held-out rows (or the rows) that the export and the model answer greedily; for a
    task of several turns only the first is compared. proof=False writes without comparing.
    run: the run folder, for the model card README.md; a trainer and a model from a run know theirs. comparison: base
    beside tuned (kit.compare), for the card. license: of the base, by the hub's name, such as "apache-2.0".
    Raises ExportError (a ValueError) for a folder that is not empty, any process but the first of several, a full disk,
    weights that are not finite, a model that the format cannot hold, a chat template that cannot render the training's
    prompt, and an export that differs from the trained model or could not be read back: it stays, with its report, in a
    folder "<folder>-refused". A folder under its own name is complete.

    >>> kit.export(trainer, tokenizer, "exports/largest", task=task, format="gguf", quant="q8_0")  # doctest: +SKIP
    """
    trainer = model if isinstance(model, Loop) else None
    if trainer is not None:
        model, run = trainer.model, run or trainer.folder
    stored = _checked(model, tokenizer, format, quant)
    if proof and format == "gguf" and (why := why_unread(model.config)):
        raise ExportError(f"{why}, so the export cannot be compared; proof=False writes it uncompared")
    close_rows(model, tokenizer)
    given_run = run
    with as_export_errors():
        if task is not None:
            check_task(task)
        target = run_path(folder)
        run = run_path(run, "run") if run else None
        if temperature is not None:
            check_temperature(temperature, greedy=True)
        if max_completion_tokens is not None:
            check_whole("max_completion_tokens", max_completion_tokens)
    trainers_own = trainer is not None and run == trainer.folder  # which holds no run before its first step
    if run is not None and not trainers_own and run_settings(run) is None and not has_metrics(run):
        raise ExportError(f"run={os.fspath(given_run)!r} holds no run; give a run's folder, or leave it out")
    if target.exists() and (not target.is_dir() or any(target.iterdir())):
        raise ExportError(f"folder={str(folder)!r} is there and not empty; give a new one")
    prompting, tokens = Prompting.of(task), max_completion_tokens
    if trainer is not None:
        if temperature is None:
            temperature = trainer.config.at(max(trainer.step - 1, 0)).temperature
        if task is None:
            tokens = tokens or trainer.config.max_completion_tokens
        check_trained_prompts(trainer.task, tokenizer, prompting, task)
    sampling = {
        "temperature": 1.0 if temperature is None else temperature,
        "max_completion_tokens": tokens or (task.max_completion_tokens if task is not None else 256),
    }
    run = run or run_of(model)
    say_difference(
        model,
        task,
        caller="export",
        temperature=sampling["temperature"],
        tokens=sampling["max_completion_tokens"],
        run=run,
    )
    served = with_serving_template(tokenizer, prompting)
    chosen = _rows(task, rows)
    questions = _questions(task, chosen)
    check_questions(tokenizer, served, prompting, questions)
    check_weights(model)
    base = ((run and run_settings(run)) or {}).get("model") or model_name(model)
    part = part_folder(target, bytes_needed(model, format, stored))
    try:
        base_license = license_of(base)
        file, notes = write_files(
            part, model, served, prompting, format, stored, target, sampling, base_license
        )
        result, objections = None, []
        if proof:
            one_turn = task is not None and not hasattr(task, "play")
            try:
                result = prove(
                    model, tokenizer, part, format=format, stored=stored, file=file, prompting=prompting,
                    questions=questions, tokens=sampling["max_completion_tokens"], task=task if one_turn else None,
                    rows=chosen if one_turn else (),
                )  # fmt: skip
                objections = result.objections
            except ProofError as error:
                objections = [str(error)]
        size = sum(path.stat().st_size for path in files_of(part))
        made = Exported(target, format, stored, size, result, tuple(notes), file)
        drawn = run is not None and curve(run, part)
        card = export_card(
            made, base=base, beside=(part / BASE).is_dir(), question=questions[0], run=run, comparison=comparison,
            drawn=drawn, license=license or base_license,
        )  # fmt: skip
        (part / CARD).write_text(card, encoding="utf-8")
        _report(part, made, base, prompting, sampling, objections)
        if objections:
            target = next_run_folder(target.parent, f"{target.name}-refused")
        finish(part, target)
    except BaseException as error:
        shutil.rmtree(part, ignore_errors=True)
        # The tokenizer's writer raises disk errors as a plain Exception.
        if isinstance(error, OSError | SafetensorError) or "(os error " in str(error):
            raise ExportError(
                f"folder={str(folder)!r} was not written: {error}; nothing is left of it"
            ) from error
        raise
    if result is not None and objections:
        raise ExportError(
            f"the export is not the trained model: {'; '.join(objections)}. It lies in {target}, with its report"
        )
    if objections:
        raise ExportError(f"the export was not proved: {objections[0]}. It lies in {target}, with its report")
    return made


def _checked(model: Any, tokenizer: Any, format: str, quant: str | None) -> str:
    """How the weights are stored. Raises ExportError for arguments that do not go together."""
    if torch.distributed.is_initialized() and (rank := torch.distributed.get_rank()):
        raise ExportError(
            f"this is process {rank} of {torch.distributed.get_world_size()}, which would all write the same folder; "
            "export in the first alone: if trainer.processes.is_main"
        )
    if isinstance(model, str | os.PathLike):
        raise ExportError(
            f"model={os.fspath(model)!r} is a path; load it: model, tokenizer = kit.load_policy(...), "
            "with tuning='lora' where it is an adapter"
        )
    with as_export_errors():
        check_model(model)
        check_tokenizer(tokenizer)
    if format not in QUANTS:
        raise ExportError(f"format={format!r} is not known; use {', '.join(map(repr, QUANTS))}")
    stored = quant or ("f32" if format == "adapter" else "f16")
    if stored not in QUANTS[format]:
        raise ExportError(f"quant={quant!r} is none of format={format!r}'s: {', '.join(QUANTS[format])}")
    if format == "adapter" and not hasattr(model, "peft_config"):
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


def _questions(task: Any, rows: list[dict]) -> list[str]:
    """The user's first messages, as training wrote them."""
    if hasattr(task, "questions"):
        return task.questions(rows)
    return [row["question"] for row in rows] or list(_QUESTIONS)


def _report(
    part: Path,
    made: Exported,
    base: str,
    prompting: Prompting,
    sampling: dict[str, Any],
    objections: list[str],
) -> None:
    digests = {
        path.relative_to(part).as_posix(): file_digest(path)
        for path in files_of(part)
        if path.name not in _OPEN
    }
    data = {
        "base": base,
        "format": made.format,
        "stored": made.stored,
        "file": made.file,
        "bytes": made.bytes,
        "versions": {"grpo-kit": __version__}
        | {name: version(name) for name in ("torch", "transformers", "peft")},
        "notes": made.notes,
        "prefill": prompting.prefill,
        "prompt_inside": prompting != Prompting(),
        "sampling": sampling,
        "proof": made.proof and made.proof.to_dict(),
        "objections": objections,
        "files": digests,
    }
    (part / REPORT).write_text(json.dumps(data, indent=2) + "\n", encoding="utf-8")
