"""Checkpoints that are there whole or not at all, and what the kit keeps in them beside transformers' files.

runs/<name>/.saving/checkpoint-<step>   while it is written; then it is synced and renamed to
            checkpoint-<step>/          whole: a process killed at any moment leaves no part of one under this name
                stop_and_go.pt          only where the next step needs it: see `Session`
                saved-by-a-stop         where a stop saved it; it goes when the run is done
                digests.json            size and digest of each file; one that was damaged later is passed over by name
"""

from __future__ import annotations

import errno
import json
import os
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

from transformers.trainer_utils import rotate_checkpoints

from grpo_kit.loop.digests import STATE, what_is_wrong, write_digests

SAVING, OF_A_STOP = ".saving", "saved-by-a-stop"


class CheckpointNotSaved(OSError):
    """A checkpoint could not be written; what it should hold is still in memory."""


def last_whole_checkpoint(folder: str | Path, *, digests: bool = True) -> Path | None:
    """The checkpoint of the highest step whose files are as they were written; None if there is none.

    digests: False looks at the sizes of its files alone; a run that goes on reads all of them.

    >>> last_whole_checkpoint("runs/no-such-run") is None
    True
    """
    _put_back(Path(folder))
    whole = (p for p in reversed(checkpoints(folder)) if what_is_wrong(p, digests=digests) is None)
    return next(whole, None)


def checkpoints(folder: str | Path) -> list[Path]:
    """The folders checkpoint-<step>, whole or not, lowest step first."""
    found = [
        path for path in Path(folder).glob("checkpoint-*") if path.is_dir() and step_of(path) is not None
    ]
    return sorted(found, key=step_of)


def step_of(checkpoint: str | Path) -> int | None:
    """The step in a checkpoint's name; None where the name is another's.

    >>> step_of("runs/full/checkpoint-12")
    12
    """
    number = Path(checkpoint).name.removeprefix("checkpoint-")
    return int(number) if number.isdecimal() else None


def steps_in(checkpoint: str | Path) -> int:
    """Steps that were done as a whole checkpoint was saved."""
    return json.loads((Path(checkpoint) / STATE).read_text(encoding="utf-8"))["global_step"]


def saved_by(checkpoint: str | Path) -> int:
    """How many processes saved it; 0 where it does not tell."""
    folder = Path(checkpoint)
    return len(list(folder.glob("rng_state_*.pth"))) or int((folder / "rng_state.pth").exists())


def remove_those_of_stops(folder: str | Path, best: str | None) -> None:
    """A run is done: what was saved only to go on from is in the way. best: stays."""
    for path in checkpoints(folder):
        if (path / OF_A_STOP).exists() and str(path) != best:
            shutil.rmtree(path, ignore_errors=True)


def choose(checkpoint: str | bool, folder: str | Path, say: Callable[[str], None]) -> str:
    """The folder to resume from; `True` is the last whole one in the run's folder, and what is passed over is said.

    Raises ValueError where there is none, and for one that is damaged or was not written to its end.
    """
    _put_back(Path(folder))
    if checkpoint is not True:
        if not Path(checkpoint).is_dir():
            raise ValueError(f"resume_from_checkpoint={checkpoint!r} is no folder; {_instead(folder)}")
        if wrong := what_is_wrong(checkpoint):
            raise ValueError(f"resume_from_checkpoint={checkpoint!r} is damaged: {wrong}; {_instead(folder)}")
        return str(checkpoint)
    damaged = []
    for path in reversed(checkpoints(folder)):
        if (wrong := what_is_wrong(path)) is None:
            for name, why in damaged:
                say(f"{name} is damaged and is passed over: {why}. Going on from {path}.")
            return str(path)
        damaged.append((path, wrong))
    kind = "whole checkpoint" if damaged else "checkpoint"
    which = "; ".join(f"{path.name}: {wrong}" for path, wrong in damaged)
    raise ValueError(
        f"resume_from_checkpoint=True, but {str(folder)!r} holds no {kind}{f' ({which})' * bool(which)}; start "
        "under another name"
    )


def _instead(folder: str | Path) -> str:
    last = last_whole_checkpoint(folder)
    return f"resume from {str(last)!r}" if last else "there is no whole one; start under another name"


class Checkpoints:
    """How one trainer saves.

    writing: is a checkpoint being written? Then transformers' output folder is `.saving` in the run's folder.
    """

    def __init__(self, trainer: Any) -> None:
        self.trainer, self.writing = trainer, False
        self._to_push: list[str] = []

    def save(self, write: Callable[[], None], own: Callable[[Path], None], trial: Any) -> Path:
        """Write a checkpoint of the trainer's step; returns its folder, which is whole.

        write: transformers' way, which makes <output folder>/checkpoint-<step>. own: adds the kit's files to a folder.
        Raises CheckpointNotSaved, and leaves nothing behind, where the disk does not take it, also where it fails one
        of several processes; with sharded weights the error itself.
        """
        trainer = self.trainer
        together = trainer.session.together
        name = f"checkpoint-{trainer.state.global_step}"
        run = Path(trainer._get_output_dir(trial))
        if trainer.args.should_save:
            _put_back(run)
            shutil.rmtree(run / SAVING, ignore_errors=True)  # what a kill left
        trainer.accelerator.wait_for_everyone()
        part, best = run / SAVING / name, trainer.state.best_model_checkpoint
        self.writing, self._to_push = True, []
        try:
            with together.ending():
                write()
                own(part)
                self._name_best(run, part)
                trainer.accelerator.wait_for_everyone()
                if trainer.args.should_save:
                    write_digests(part)
                    _move(part, run / name)
        except BaseException as error:
            trainer.state.best_model_checkpoint = best
            shutil.rmtree(run / SAVING / name, ignore_errors=True)
            # A full disk is an error of its own in every library. With shards the others would wait for ever.
            agreed = trainer.ranks.count == 1 or (trainer.ranks.together and not together.passes)
            if isinstance(error, Exception) and agreed:
                what = str(error).splitlines()[0] if str(error) else type(error).__name__
                raise CheckpointNotSaved(f"{run / name} cannot be written ({what})") from error
            raise
        finally:
            self.writing = False
        trainer.accelerator.wait_for_everyone()
        if trainer.args.should_save:
            shutil.rmtree(run / SAVING, ignore_errors=True)
            rotate_checkpoints(
                output_dir=str(run),
                save_total_limit=trainer.args.save_total_limit,
                best_model_checkpoint=trainer.state.best_model_checkpoint,
                use_mtime=True,
            )
        for _ in self._to_push:
            trainer._push_from_checkpoint(str(run / name))
        return run / name

    def push_later(self, folder: str) -> None:
        """A checkpoint goes to the hub under its own name."""
        self._to_push.append(folder)

    def _name_best(self, run: Path, part: Path) -> None:
        """transformers names the best checkpoint by the folder it writes to; it will be there under its own name."""
        state = self.trainer.state
        if not state.best_global_step:
            return
        best = run / f"checkpoint-{state.best_global_step}"
        if best.name == part.name or best.is_dir():
            state.best_model_checkpoint = str(best)
        if self.trainer.args.should_save:
            state.save_to_json(str(part / STATE))


def _move(part: Path, target: Path) -> None:
    """Under its own name; one that is there already stays until the new one has it."""
    for path in [*part.rglob("*"), part]:  # else a power cut could leave the name without what it stands for
        _sync(path)
    if target.exists():
        os.replace(target, part.with_name("replaced-" + target.name))
    os.replace(part, target)
    _sync(target.parent)


def _sync(path: Path) -> None:
    """Ask the disk to keep a file or a folder's names. Raises OSError where the disk fails or is full.

    Some file systems refuse that of a folder, and Windows of what is open for reading: those go on without.
    Measured once, 0.5 GB in 4 files just written, in a container: 0.2 s.
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


def _put_back(run: Path) -> None:
    """What a kill between the two renames of `_move` left."""
    for old in (run / SAVING).glob("replaced-checkpoint-*"):
        target = run / old.name.removeprefix("replaced-")
        if not target.exists():
            os.replace(old, target)
