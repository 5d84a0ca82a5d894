"""Samples on disk, a chunk of prompts a file: each file complete or absent, and no sample drawn twice.

folder/samples.json   settings of the samples
       samples/       part-00000.json, part-00001.json, ...: a list of prompt, completion, ids, cut_off
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pandas as pd
import torch
from filelock import FileLock, Timeout

from grpo_kit._support.argument_checks import check_whole
from grpo_kit.engine.complete import Completion, Progress, check_room, complete
from grpo_kit.models._model_facts import base_model, end_ids
from grpo_kit.record._lines import read_json
from grpo_kit.record._run_folder import path_of
from grpo_kit.record.files import RunFolderError, write_whole
from grpo_kit.tasks._same_task import content_digest

if TYPE_CHECKING:
    from transformers import PreTrainedModel, PreTrainedTokenizerBase

_SETTINGS, _PARTS = "samples.json", "samples"


def sample_chunks(
    model: PreTrainedModel,
    tokenizer: PreTrainedTokenizerBase,
    prompts: Sequence[str],
    folder: str | Path,
    *,
    chunk: int,
    seed: int,
    batch_size: int,
    progress: Progress,
    **options: Any,
) -> tuple[list[Completion], dict[str, Any]]:
    """Samples of rendered prompts, drawn or read back, a prompt's samples adjacent; and their settings.

    chunk: prompts a file: a killed process loses at most one chunk.
    options: samples, temperature, max_completion_tokens.
    progress: called with (completions so far, completions in all) after each batch and each file.
    Raises ValueError for sizes below 1 and the errors of check_room, before anything is written; RunFolderError if
    the folder holds samples of other settings, or another process uses it.
    """
    for name, value in {**options, "chunk": chunk, "batch_size": batch_size}.items():
        if name not in ("temperature", "sampling"):
            check_whole(name, value)
    ids = tokenizer(list(prompts))["input_ids"]
    # of all prompts, before the first is sampled
    check_room(model, ids, options["max_completion_tokens"])
    folder = path_of(folder)
    if folder.exists() and not folder.is_dir():
        raise RunFolderError(f"folder={str(folder)!r} is a file; name a folder")
    settings = (
        _settings(model, tokenizer, prompts, ids) | options | {"chunk": chunk, "seed": seed}
    )
    folder.mkdir(parents=True, exist_ok=True)
    try:
        lock = FileLock(folder / ".lock").acquire(blocking=False)
    except Timeout as error:
        raise RunFolderError(
            f"another process is sampling into folder={str(folder)!r}; wait for it, or name another folder"
        ) from error
    with lock:  # releases it in every case
        _claim(folder, settings)
        completions = []
        samples = options["samples"]

        def report(finished: int, _: int) -> None:
            progress(len(completions) + finished, len(prompts) * samples)

        for number, first in enumerate(range(0, len(prompts), chunk)):
            path = folder / _PARTS / f"part-{number:05d}.json"
            if not path.exists():
                # One seed for all would give the first prompts of two chunks the same random numbers.
                chunk_seed = int.from_bytes(
                    hashlib.sha256(f"{seed} {number}".encode()).digest()[:4]
                )
                part = prompts[first : first + chunk]
                fresh = complete(
                    model,
                    tokenizer,
                    part,
                    batch_size=batch_size,
                    seed=chunk_seed,
                    progress=report,
                    **options,
                )
                write_whole(path, json.dumps(_rows(part, fresh, samples)).encode())
            # Fresh samples are read back too, so that both kinds have the same types.
            for row in read_json(path, list):
                ids = tuple(row["ids"])
                completions.append(Completion(row["completion"], len(ids), row["cut_off"], ids))
            report(0, 0)
    return completions, settings


def _rows(
    prompts: Sequence[str], completions: Sequence[Completion], samples: int
) -> list[dict[str, Any]]:
    rows = []
    for i, completion in enumerate(completions):
        row = {"prompt": prompts[i // samples], "completion": completion.text}
        rows.append(row | {"ids": completion.ids, "cut_off": completion.cut_off})
    return rows


def _digest_of_every_bit(model: PreTrainedModel) -> str:
    """Digest of every weight's name, type, shape and bytes: equal for equal models on any device.

    Reads all of them: about 1 s for 135 M parameters in float32 on a CPU.
    """
    digest = hashlib.sha256()
    for name, weight in model.named_parameters():
        digest.update(f"{name} {weight.dtype} {tuple(weight.shape)}".encode())
        digest.update(weight.detach().cpu().contiguous().reshape(-1).view(torch.uint8).numpy())
    return digest.hexdigest()[:16]


def _settings(
    model: PreTrainedModel,
    tokenizer: PreTrainedTokenizerBase,
    prompts: Sequence[str],
    ids: Sequence[Sequence[int]],
) -> dict[str, Any]:
    # Adapters may be loaded but off: the weights alone would not show it.
    adapters = set()
    for module in model.modules():
        if isinstance(getattr(module, "disable_adapters", None), bool):
            adapters.add("off" if module.disable_adapters else str(module.active_adapters))
    return {
        "model": type(base_model(model)).__name__,
        "weights": _digest_of_every_bit(model),
        "adapters": sorted(adapters),
        "ends": end_ids(model, tokenizer),
        "prompts": f"{len(prompts)}, digest {content_digest([list(prompts), list(ids)])}",
    }


def _claim(folder: Path, settings: dict[str, Any]) -> None:
    """Write the settings into a folder without samples; raises RunFolderError if it has samples of other settings."""
    path, parts = folder / _SETTINGS, folder / _PARTS
    if not any(parts.glob("part-*.json")):
        write_whole(path, (json.dumps(settings, indent=1) + "\n").encode())
        parts.mkdir(exist_ok=True)
        return
    if not path.exists():
        raise RunFolderError(
            f"folder={str(folder)!r} holds {_PARTS} but no {_SETTINGS}, so nobody knows of which settings its samples "
            "are; name another folder"
        )
    saved = read_json(path)
    differ = [key for key in settings | saved if saved.get(key) != settings.get(key)]
    if differ:
        words = "; ".join(
            f"{key}: {saved.get(key)!r} there, {settings.get(key)!r} now" for key in differ
        )
        raise RunFolderError(
            f"folder={str(folder)!r} holds samples of other settings, and none are overwritten ({words}); "
            "name another folder, or ask for what is there"
        )


def trained_as_sampled(tokenizer: PreTrainedTokenizerBase, table: pd.DataFrame) -> list[bool]:
    """For each row (prompt, completion, ids, cut_off): does TRL's tokenization of the texts give these ids?

    TRL 1.16's DPO, KTO and SFT trainers tokenize prompt + completion as one text, with the tokenizer's end token
    added unless it is there. ORPO and CPO append the end's id, and put a BOS in front if the tokenizer has one
    and the prompt does not begin with it. False for a text that the tokenizer would cut into other tokens, special
    tokens inside, another end than the tokenizer's, bytes that are no text, and a completion that merges with its
    prompt. A completion that was cut off is compared without the end that TRL adds.

    >>> ids = [[36, 2]] * 2  # "4" and SmolLM2's end; the second one was cut off, but holds an end
    >>> table = pd.DataFrame({"prompt": "2 + 2 =", "completion": "4", "ids": ids, "cut_off": [False, True]})
    >>> trained_as_sampled(tokenizer, table)  # doctest: +SKIP
    [True, False]
    """
    end, end_id = tokenizer.eos_token, tokenizer.eos_token_id
    texts, sampled = [], []
    prompts = tokenizer(list(table["prompt"]))["input_ids"]
    for prompt_ids, row in zip(prompts, table.to_dict("records"), strict=True):
        texts.append(row["prompt"] + row["completion"].removesuffix(end) + end)
        sampled.append([*prompt_ids, *row["ids"]])
        if row["cut_off"]:
            sampled[-1].append(end_id)
    return [ids == row for ids, row in zip(tokenizer(texts)["input_ids"], sampled, strict=True)]
