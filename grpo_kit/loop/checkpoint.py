"""Checkpoints: a run after a step, written whole or not at all, and read back only if every byte is as it was written.

runs/<name>/checkpoint-<step>/  model.safetensors or the adapter, with config and tokenizer: load_policy opens it
                                optimizer.pt      moments, as the optimizer keeps them
                                sample_state.pt   what the sampler keeps from step to step, if it keeps anything
                                run_state.json    step, config, tokens, seconds, loss scale
                                digests.json      size and SHA-256 of each file, written last

It is written as runs/<name>/.saving, each file and the folder synced, then renamed. No random state is kept: a step's
random numbers are a function of (seed, step).
"""

from __future__ import annotations

import json
import os
import shutil
from collections.abc import Collection
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file

from grpo_kit.engine.optim.choose import SETTINGS
from grpo_kit.models._model_facts import base_model
from grpo_kit.record._digests import checkpoints, newest_whole, what_is_wrong, write_digests
from grpo_kit.record._lines import RUN, RUN_ID, read_json
from grpo_kit.record.files import RunFolderError, rename_fields, sync

SAVING, STATE, OPTIMIZER, SAMPLE_STATE = (
    ".saving",
    "run_state.json",
    "optimizer.pt",
    "sample_state.pt",
)
_KINDS = {
    "step": int,
    "tokens": int,
    "seconds": float,
    "config": dict,
    "begun": dict,
    "made_with": dict,
    "scaler": dict,
}


class CheckpointNotSaved(OSError):
    """A checkpoint could not be written; what it should hold is still in memory."""


def save(
    folder: Path,
    state: dict[str, Any],
    *,
    model: Any,
    tokenizer: Any,
    optimizer: torch.optim.Optimizer,
    sample_state: dict[str, Any] | None,
    limit: int,
    stay: Collection[str],
) -> Path:
    """Write checkpoint-<step> of a run's folder; returns its path. One that is there and whole stays as it is.

    state: what run_state.json holds, with "step". limit: how many checkpoints are kept, the newest first, besides those
    that `stay` names. Raises CheckpointNotSaved, and leaves nothing of it, where the disk does not take it.
    """
    target, part = folder / f"checkpoint-{state['step']}", folder / SAVING
    if target.exists() and what_is_wrong(target) is None:
        return target
    try:
        shutil.rmtree(part, ignore_errors=True)  # what a kill left
        part.mkdir(parents=True)
        model.save_pretrained(part, max_shard_size="1TB")
        tokenizer.save_pretrained(part)
        torch.save(optimizer.state_dict(), part / OPTIMIZER)
        if sample_state is not None:
            torch.save(sample_state, part / SAMPLE_STATE)
        (part / STATE).write_text(json.dumps(state, indent=1) + "\n", encoding="utf-8")
        write_digests(part, state.get(RUN_ID))
        for path in [*part.rglob("*"), part]:
            sync(path)  # else a power cut could leave a name without what it stands for
        shutil.rmtree(target, ignore_errors=True)  # a damaged one
        os.replace(part, target)
        sync(folder)
    except BaseException as error:
        shutil.rmtree(part, ignore_errors=True)
        if isinstance(error, Exception):
            reason = str(error).partition("\n")[0] or type(error).__name__
            raise CheckpointNotSaved(f"{target} cannot be written ({reason})") from error
        raise
    older = [path for path in checkpoints(folder) if path != target and path.name not in stay]
    for path in older[: max(len(older) - limit + 1, 0)]:
        shutil.rmtree(path, ignore_errors=True)
    return target


def read_state(checkpoint: Path) -> dict[str, Any]:
    """run_state.json of a checkpoint. Raises RunFolderError for one that is not whole, naming one that is."""
    is_run = (checkpoint / RUN).exists()
    damage = "it is the folder of a run" if is_run else what_is_wrong(checkpoint)
    if damage is not None:
        newest = newest_whole(checkpoint if is_run else checkpoint.parent)
        advice = "there is no other that is whole"
        if newest:
            advice = f"{newest} is whole, train(resume=True) takes it"
        raise RunFolderError(f"{checkpoint} is no whole checkpoint: {damage}; {advice}")
    state = read_json(checkpoint / STATE, names=_KINDS)
    for name in ("config", "begun"):
        rename_fields(state.get(name, {}))
    return state


def load(
    checkpoint: Path, *, model: Any, optimizer: torch.optim.Optimizer
) -> dict[str, Any] | None:
    """Put a checkpoint's weights and moments into a model and its optimizer, which keeps its settings, bit for bit.

    Returns what the sampler kept, on the model's device; None where it kept nothing.
    """
    settings = [
        {name: group[name] for name in SETTINGS if name in group}
        for group in optimizer.param_groups
    ]
    # Read to the CPU: the optimizer moves what belongs on a card. AdamW's step counts on it would cost a wait each.
    state = torch.load(checkpoint / OPTIMIZER, map_location="cpu", weights_only=True)
    trained = [p for group in optimizer.param_groups for p in group["params"]]
    for place, moments in state["state"].items():
        shapes = {
            value.shape for value in moments.values() if torch.is_tensor(value) and value.dim()
        }
        if shapes - {trained[place].shape}:
            raise ValueError(f"{OPTIMIZER} holds moments of other weights")
    sample_state = None
    if (checkpoint / SAMPLE_STATE).exists():
        device = next(model.parameters()).device
        sample_state = torch.load(
            checkpoint / SAMPLE_STATE, map_location=device, weights_only=True
        )
    load_weights(model, checkpoint)
    optimizer.load_state_dict(state)
    for group, settings_of_group in zip(optimizer.param_groups, settings, strict=True):
        group.update(settings_of_group)
    return sample_state


def load_weights(model: Any, folder: Path) -> None:
    """The weights, or the adapter, of a checkpoint into a model of the same kind, bit for bit."""
    adapter = folder / "adapter_model.safetensors"
    if adapter.exists():
        from peft import set_peft_model_state_dict

        set_peft_model_state_dict(model, load_file(adapter))
        return
    base = base_model(model)
    keys = base.load_state_dict(load_file(folder / "model.safetensors"), strict=False)
    tied = set(getattr(base, "all_tied_weights_keys", None) or {})
    if keys.unexpected_keys or set(keys.missing_keys) - tied:
        raise RunFolderError(
            f"{folder} holds the weights of another model than the trainer has"
        )
