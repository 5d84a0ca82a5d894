"""kit.export: a trained model with its prompt in one folder, which is read back and compared."""

from __future__ import annotations

import json
import os
import shutil
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from importlib.metadata import version
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

import torch
from safetensors import SafetensorError

from grpo_kit._support import __version__
from grpo_kit._support.argument_checks import (
    check_model,
    check_task,
    check_temperature,
    check_tokenizer,
    check_whole,
)
from grpo_kit.evaluation._as_trained import run_of, say_difference
from grpo_kit.loop.grpo import Loop
from grpo_kit.models._model_facts import close_rows, model_name
from grpo_kit.more.export._export_folder import (
    CARD,
    REPORT,
    files_of,
    finish,
    part_folder,
    size_of,
)
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
from grpo_kit.more.export.model_card import license_of, push_to_hub, write_card
from grpo_kit.more.export.verify import Proof, ProofError, prove
from grpo_kit.record._digests import file_digest
from grpo_kit.record._run_folder import run_path
from grpo_kit.record.files import has_metrics, next_run_folder, run_settings

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

    from grpo_kit.tasks import Task

Format = Literal["merged", "adapter", "gguf"]
QUANTS = {
    "merged": ("f32", "f16", "bf16"),
    "gguf": ("f32", "f16", "bf16", "q8_0"),
    "adapter": ("f32",),
}
# People edit these, and the proof does not depend on them.
_EDITED = {CARD, "Modelfile", "generation_config.json"}
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
        size = f"{self.format}, {self.stored}: {self.bytes / 1e6:,.0f} MB in {self.folder}"
        return "\n".join([size, *self.notes, str(self.proof or "not proved")])


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
    Prints a line as each slow part begins, and where the folder is.
    Raises ExportError (a ValueError) for a folder that is not empty, any process but the first of several, a full disk,
    weights that are not finite, a model that the format cannot hold, a chat template that cannot render the training's
    prompt, and an export that differs from the trained model or could not be read back: it stays, with its report, in a
    folder "<folder>-refused". A folder under its own name is complete.

    >>> kit.export(trainer, tokenizer, "exports/largest", task=task, format="gguf", quant="q8_0")  # doctest: +SKIP
    """
    trainer = None
    if isinstance(model, Loop):
        trainer, model = model, model.model
    stored = _checked_format(model, tokenizer, task, format, quant, proof)
    close_rows(model, tokenizer)
    target = _new_folder(folder)
    run = _run_folder(run, trainer) or run_of(model)
    prompting = Prompting.of(task)
    if trainer is not None:
        check_trained_prompts(trainer.task, tokenizer, prompting, task)
    sampling = _sampling(trainer, task, temperature, max_completion_tokens)
    temperature, tokens = sampling["temperature"], sampling["max_completion_tokens"]
    say_difference(
        model, task, caller="export", temperature=temperature, tokens=tokens, run=run
    )
    served = with_serving_template(tokenizer, prompting)
    rows = _rows(task, rows)
    questions = _questions(task, rows)
    check_questions(tokenizer, served, prompting, questions)
    check_weights(model)
    base = ((run and run_settings(run)) or {}).get("model") or model_name(model)
    part = part_folder(target, f"{format}, {stored}", bytes_needed(model, format, stored))
    with _whole_or_nothing(part, folder):
        terms = license_of(base)
        file, notes = write_files(
            part, model, served, prompting, format, stored, target, sampling, terms
        )
        exported = Exported(target, format, stored, size_of(part), None, tuple(notes), file)
        objections: Sequence[str] = ()
        if proof:
            exported, objections = _proved(
                exported, model, tokenizer, part, prompting, questions, tokens, task, rows
            )
        about = {"base": base, "run": run, "comparison": comparison}
        write_card(part, exported, question=questions[0], license=license or terms, **about)
        _report(part, exported, base, prompting, sampling, objections)
        if objections:
            target = next_run_folder(target.parent, f"{target.name}-refused")
        finish(part, target)
    print(f"export: done, in {target}", flush=True)
    if objections:
        raise _refusal(exported, objections, target)
    return exported


def _proved(
    exported: Exported, model: Any, tokenizer: Any, part: Path, *asked: Any
) -> tuple[Exported, Sequence[str]]:
    """The export with its proof, and what speaks against it. asked: as prove() takes it."""
    try:
        result = prove(model, tokenizer, part, exported, *asked)
    except ProofError as error:
        return exported, [str(error)]
    return replace(exported, proof=result), result.objections


def _checked_format(
    model: Any, tokenizer: Any, task: Any, format: str, quant: str | None, proof: bool
) -> str:
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
        if task is not None:
            check_task(task)
    if format not in QUANTS:
        raise ExportError(f"format={format!r} is not known; use {', '.join(map(repr, QUANTS))}")
    stored = quant or ("f32" if format == "adapter" else "f16")
    if stored not in QUANTS[format]:
        raise ExportError(
            f"quant={quant!r} is none of format={format!r}'s: {', '.join(QUANTS[format])}"
        )
    if format == "adapter" and not hasattr(model, "peft_config"):
        raise ExportError(
            "format='adapter': the model has none, all its weights were trained; use format='merged'"
        )
    if proof and format == "gguf" and (reason := why_unread(model.config)):
        raise ExportError(
            f"{reason}, so the export cannot be compared; proof=False writes it uncompared"
        )
    return stored


def _new_folder(folder: str | os.PathLike) -> Path:
    with as_export_errors():
        target = run_path(folder)
    if target.exists() and (not target.is_dir() or any(target.iterdir())):
        raise ExportError(f"folder={str(folder)!r} is there and not empty; give a new one")
    return target


def _run_folder(run: str | os.PathLike | None, trainer: Loop | None) -> Path | None:
    """The run folder, the trainer's where none is given; a trainer's holds no run before its first step."""
    if not run:
        return trainer and trainer.folder
    with as_export_errors():
        path = run_path(run, "run")
    if (
        run_settings(path) is None
        and not has_metrics(path)
        and (trainer is None or path != trainer.folder)
    ):
        raise ExportError(
            f"run={os.fspath(run)!r} holds no run; give a run's folder, or leave it out"
        )
    return path


def _sampling(
    trainer: Loop | None, task: Any, temperature: float | None, tokens: int | None
) -> dict[str, Any]:
    """Temperature and length for serving: as given, else the trainer's last temperature and the task's length."""
    with as_export_errors():
        if temperature is not None:
            check_temperature(temperature, greedy=True)
        if tokens is not None:
            check_whole("max_completion_tokens", tokens)
    if task is not None:
        tokens = tokens or task.max_completion_tokens
    if trainer is not None:
        tokens = tokens or trainer.config.max_completion_tokens
    if temperature is None:
        temperature = (
            trainer.config.at(max(trainer.step - 1, 0)).temperature if trainer else 1.0
        )
    return {"temperature": temperature, "max_completion_tokens": tokens or 256}


@contextmanager
def _whole_or_nothing(part: Path, folder: str | os.PathLike) -> Iterator[None]:
    """Removes part where the block fails. Raises a disk's error as an ExportError."""
    try:
        yield
    except BaseException as error:
        shutil.rmtree(part, ignore_errors=True)
        # The tokenizer's writer raises disk errors as a plain Exception.
        if isinstance(error, OSError | SafetensorError) or "(os error " in str(error):
            raise ExportError(
                f"folder={str(folder)!r} was not written: {error}; nothing is left of it"
            ) from error
        raise


def _refusal(exported: Exported, objections: list[str], target: Path) -> ExportError:
    reason = "was not proved" if exported.proof is None else "is not the trained model"
    return ExportError(
        f"the export {reason}: {'; '.join(objections)}. It lies in {target}, with its report"
    )


def _rows(task: Any, rows: Sequence[dict] | int) -> list[dict]:
    if task is None:
        return []
    if isinstance(rows, int):
        if rows < 1:
            raise ExportError(
                f"rows={rows!r} must be at least 1; proof=False does not look at any"
            )
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
    exported: Exported,
    base: str,
    prompting: Prompting,
    sampling: dict[str, Any],
    objections: list[str],
) -> None:
    paths = [path for path in files_of(part) if path.name not in _EDITED]
    versions = {name: version(name) for name in ("torch", "transformers", "peft")}
    report = {
        "base": base,
        **{
            name: getattr(exported, name)
            for name in ("format", "stored", "file", "bytes", "notes")
        },
        "versions": {"grpo-kit": __version__, **versions},
        "prefill": prompting.prefill,
        "prompt_inside": prompting != Prompting(),
        "sampling": sampling,
        "proof": exported.proof and exported.proof.to_dict(),
        "objections": objections,
        "files": {path.relative_to(part).as_posix(): file_digest(path) for path in paths},
    }
    (part / REPORT).write_text(json.dumps(report, indent=2) + "\n", encoding="utf-8")
