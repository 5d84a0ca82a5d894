"""A kill or a full disk while a checkpoint is saved: what was whole stays whole, and training goes on from it."""

import resource
import warnings
from contextlib import contextmanager
from pathlib import Path

import forked
import pytest
from loop_runs import make, press_stop, record, same, weights

from grpo_kit.loop.checkpoint import CheckpointNotSaved
from grpo_kit.loop.processes import Stopped
from grpo_kit.loop.protocols import Hook
from grpo_kit.record.files import RunFolderError, read_metrics

KILLED = """
import os, signal, sys
from pathlib import Path
sys.path.insert(0, sys.argv[1])
import torch; torch.set_num_threads(1)
from loop_runs import make
from grpo_kit.loop import checkpoint

def dies(owner, name, after):
    inner = getattr(owner, name)
    def dying(*args, **kwargs):
        left[0] -= 1
        if left[0]:
            return inner(*args, **kwargs)
        if after:
            inner(*args, **kwargs)
        os.kill(os.getpid(), signal.SIGKILL)
    setattr(owner, name, dying)

MOMENTS = {
    "weights": (torch, "save", 2, False),
    "optimizer": (torch, "save", 2, True),
    "digests": (checkpoint, "write_digests", 2, False),
    "all but the name": (checkpoint, "write_digests", 2, True),
}
for moment, (owner, name, count, after) in MOMENTS.items():
    child = os.fork()
    if child == 0:
        left = [count]
        dies(owner, name, after)
        make(Path(sys.argv[2]) / moment, save_steps=2).train()
        os._exit(0)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == -signal.SIGKILL, moment
"""


@contextmanager
def full_disk(free=100_000):
    """No file may grow beyond `free` bytes: what a full disk does to a checkpoint. Rows and what pytest writes fit."""
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (free, before[1]))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)


@pytest.fixture(scope="module")
def untouched(tmp_path_factory):
    trainer = make(tmp_path_factory.mktemp("untouched") / "run")
    trainer.train()
    return weights(trainer), record(trainer.folder)


@pytest.fixture(scope="module")
def killed(tmp_path_factory):
    folder = tmp_path_factory.mktemp("killed")
    tests = Path(__file__).parents[1]
    done = forked.run("-c", KILLED, tests, folder, cwd=tests.parent)
    assert done.returncode == 0, done.stderr
    return folder


@pytest.mark.parametrize("moment", ["weights", "optimizer", "digests", "all but the name"])
def test_a_kill_while_saving_leaves_the_last_whole_checkpoint_to_resume_from(
    moment, killed, untouched
):
    """The save of step 4 is cut short; only what was whole before bears a checkpoint's name."""
    assert [p.name for p in killed.joinpath(moment).glob("checkpoint-*")] == ["checkpoint-2"]
    again = make(killed / moment, save_steps=2)
    again.train(resume=True)
    assert again.step == 4 and same(untouched[0], weights(again))
    assert read_metrics(killed / moment)["step"].tolist() == [1, 2, 3, 4]
    assert not (killed / moment / ".saving").exists()


class FillsUp(Hook):
    """The disk is full from a step on, until `free` is called."""

    def __init__(self, step, free=100_000):
        self.step, self.bytes, self._disk = step, free, None

    def before_step(self, trainer):
        if trainer.step == self.step and self._disk is None:
            self._disk = full_disk(self.bytes)
            self._disk.__enter__()

    def free(self):
        if self._disk is not None:
            self._disk.__exit__(None, None, None)
            self._disk, self.step = None, None


class StopAfter(Hook):
    def __init__(self, step):
        self.step = step

    def after_step(self, trainer, row, batch):
        if trainer.step == self.step:
            press_stop()


@pytest.mark.parametrize(
    "tuning, free", [("full", 100_000), ("lora", 20_000)], ids=["weights", "adapters"]
)
def test_training_goes_on_over_a_save_that_the_disk_refuses(tuning, free, tmp_path):
    """Every library says it in its own way: safetensors, tokenizers, torch."""
    longer = make(tmp_path / "a", tuning=tuning, steps=6)
    longer.train()
    disk = FillsUp(1, free)
    trainer = make(tmp_path / "b", tuning=tuning, save_steps=2, hooks=[disk])
    try:
        with pytest.warns(
            RuntimeWarning, match="checkpoint-2 cannot be written.*Training goes on"
        ):
            trainer.train()
        assert trainer.step == 4 and not list(tmp_path.glob("b/checkpoint-*"))
        with pytest.raises(CheckpointNotSaved, match="checkpoint-4 cannot be written"):
            trainer.save()
    finally:
        disk.free()
    trainer.change(steps=6)
    trainer.train()
    assert (tmp_path / "b/checkpoint-6").is_dir() and trainer.step == 6
    assert same(weights(longer), weights(trainer))
    assert read_metrics(tmp_path / "b")["step"].tolist() == [1, 2, 3, 4, 5, 6]


@pytest.mark.parametrize("free", [100_000, 10], ids=["too full to save", "too full for a row"])
def test_a_stop_on_a_full_disk_stays_in_memory_and_goes_on_once_there_is_space(
    free, tmp_path, untouched
):
    disk = FillsUp(1, free)
    trainer = make(tmp_path / "run", hooks=[disk, StopAfter(2)])
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", RuntimeWarning)
            with pytest.raises(
                Stopped, match="after step 2 of 4 .*not saved: .*It is in memory"
            ):
                trainer.train()
    finally:
        disk.free()
    trainer.train()
    assert trainer.step == 4 and same(untouched[0], weights(trainer))
    assert record(trainer.folder) == untouched[1]


def test_a_disk_full_at_the_start_does_not_block_the_name(tmp_path, untouched):
    trainer = make(tmp_path / "run")
    with full_disk(4), pytest.raises(RunFolderError, match="Free some space"):
        trainer.train()
    assert not (tmp_path / "run/run.json").exists()
    trainer.train()
    assert same(untouched[0], weights(trainer))
