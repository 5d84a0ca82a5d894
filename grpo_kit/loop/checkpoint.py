"""Checkpoints: a run after a step, written whole or not at all, and read back only if every byte is as it was written.

runs/<name>/checkpoint-<step>/  model.safetensors or the adapter, with config and tokenizer: load_policy opens it
                                optimizer.pt      moments, as the optimizer keeps them
                                run_state.json    step, config, tokens, seconds, loss scale
                                digests.json      size and SHA-256 of each file, written last

It is written as runs/<name>/.saving, each file and the folder synced, then renamed. No random state is kept: a step's
random numbers are a function of (seed, step).
"""

from __future__ import annotations

import errno
import json
import os
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from safetensors.torch import load_file

from grpo_kit.loop.digests import DIGESTS, what_is_wrong, write_digests
from grpo_kit.models import base_model
from grpo_kit.record.files import RUN, RunFolderError

if TYPE_CHECKING:
    from grpo_kit.loop.grpo import GRPOTrainer

SAVING, STATE, OPTIMIZER = ".saving", "run_state.json", "optimizer.pt"


class CheckpointNotSaved(OSError):
    """A checkpoint could not be written; what it should hold is still in memory."""


def save(trainer: GRPOTrainer) -> Path:
    """Write the trainer's checkpoint; older ones go, but for config.save_total_limit and the best.

    Raises CheckpointNotSaved, and leaves nothing of it, where the disk does not take it.
    """
    target = trainer.folder / f"checkpoint-{trainer.step}"
    if target.exists() and what_is_wrong(target) is None:
        return target
    part = trainer.folder / SAVING
    try:
        shutil.rmtree(part, ignore_errors=True)  # what a kill left
        part.mkdir(parents=True)
        _write(trainer, part)
        write_digests(part)
        for path in [
            *part.rglob("*"),
            part,
        ]:  # else a power cut could leave the name without what it stands for
            _sync(path)
        shutil.rmtree(target, ignore_errors=True)  # a damaged one
        os.replace(part, target)
        _sync(target.parent)
    except BaseException as error:
        shutil.rmtree(part, ignore_errors=True)
        if isinstance(error, Exception):
            what = str(error).splitlines()[0] if str(error) else type(error).__name__
            raise CheckpointNotSaved(f"{target} cannot be written ({what})") from error
        raise
    stay = {target, *(trainer.folder / name for name in trainer.kept_checkpoints)}
    others = [path for path in checkpoints(trainer.folder) if path not in stay]
    for path in others[: max(len(others) - trainer.config.save_total_limit + 1, 0)]:
        shutil.rmtree(path, ignore_errors=True)
    return target


def _write(trainer: GRPOTrainer, folder: Path) -> None:
    trainer.model.save_pretrained(folder, max_shard_size="1TB")
    trainer.tokenizer.save_pretrained(folder)
    torch.save(trainer.optimizer.state_dict(), folder / OPTIMIZER)
    state = {
        "step": trainer.step,
        "config": trainer.config.values(),
        "tokens": trainer.tokens,
        "seconds": trainer.seconds,
        "scaler": trainer.scaler.state_dict(),
    }
    (folder / STATE).write_text(json.dumps(state, indent=1) + "\n", encoding="utf-8")


def load_last(trainer: GRPOTrainer) -> None:
    """Put the run's last whole checkpoint into the trainer. A damaged one is named, and the one before is taken.

    A field of the config that was changed while the run trained has its value of then; one that the trainer's config
    has another value of than the run was begun with is a change from the next step on.
    Raises RunFolderError where no checkpoint is whole, ValueError for a config that the run cannot go on with.
    """
    passed = []
    for folder in reversed(checkpoints(trainer.folder)):
        wrong = what_is_wrong(folder) if (folder / DIGESTS).exists() else "it was not written to its end"
        if wrong is None:
            for line in passed:
                print(f"{line}. Going on from {folder}.", flush=True)
            return load(trainer, folder)
        passed.append(f"{folder} is damaged and is passed over: {wrong}")
    named = f" ({'; '.join(passed)})" if passed else ""
    raise RunFolderError(
        f"folder={str(trainer.folder)!r} holds no whole checkpoint to go on from{named}; begin under another name"
    )


def load(trainer: GRPOTrainer, folder: Path) -> None:
    """Weights, optimizer, step and config of a checkpoint that is whole."""
    state = json.loads((folder / STATE).read_text(encoding="utf-8"))
    trainer.take_up_config(state["config"], _begun_with(trainer.folder))
    load_weights(trainer.model, folder)
    saved = torch.load(folder / OPTIMIZER, map_location=trainer.device, weights_only=True)
    trainer.optimizer.load_state_dict(saved)
    trainer.scaler.load_state_dict(state["scaler"])
    trainer.step, trainer.tokens, trainer.seconds = state["step"], state["tokens"], state["seconds"]


def load_weights(model: Any, folder: Path) -> None:
    """The weights, or the adapter, of a checkpoint into a model of the same kind, bit for bit."""
    adapter = folder / "adapter_model.safetensors"
    if adapter.exists():
        from peft import set_peft_model_state_dict

        set_peft_model_state_dict(model, load_file(adapter))
        return
    weights = load_file(folder / "model.safetensors")
    base = base_model(model)
    missing = base.load_state_dict(weights, strict=False)
    tied = set(getattr(base, "all_tied_weights_keys", None) or {})
    if missing.unexpected_keys or set(missing.missing_keys) - tied:
        raise RunFolderError(f"{folder} holds the weights of another model than the trainer has")


def _begun_with(folder: Path) -> dict[str, Any]:
    return json.loads((folder / RUN).read_text(encoding="utf-8"))["config"]


def checkpoints(folder: str | Path) -> list[Path]:
    """The folders checkpoint-<step>, whole or not, lowest step first."""

    def found() -> Iterator[tuple[int, Path]]:
        for path in Path(folder).glob("checkpoint-*"):
            number = path.name.removeprefix("checkpoint-")
            if number.isdecimal() and path.is_dir():
                yield int(number), path

    return [path for _, path in sorted(found())]


def _sync(path: Path) -> None:
    """Ask the disk to keep a file or a folder's names. Raises OSError where the disk fails or is full.

    Some file systems refuse that of a folder, and Windows of what is open for reading: those go on without.
    """
    try:
        handle = os.open(path, os.O_RDONLY)
        try:
            os.fsync(handle)
        finally:
            os.close(handle)
    except OSError as error:
        if error.errno in (errno.EIO, errno.ENOSPC, getattr(errno, "EDQUOT", None)):
            raise
