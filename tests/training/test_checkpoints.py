"""A kill or a full disk while a checkpoint is saved: what was whole stays whole, and training goes on from it."""

import json
import os
import resource
import subprocess
import sys
import warnings
from contextlib import contextmanager
from pathlib import Path

import pytest
from tiny_run import data, interrupted_once, make, same, weights
from transformers import TrainerCallback

from grpo_kit.record.files import RunFolderError, read_metrics
from grpo_kit.training.checkpoints import CheckpointNotSaved, last_whole_checkpoint

SAVES = dict(save_strategy="steps", save_steps=2)
KILLED = """
import os, signal, sys
from pathlib import Path
sys.path.insert(0, sys.argv[1])
from tiny_run import make
import transformers, torch
from transformers.trainer_callback import TrainerState

def dies(owner, name, after):
    inner = getattr(owner, name)
    def wrapped(*args, **kwargs):
        left[0] -= 1
        if left[0] == 0 and not after:
            os.kill(os.getpid(), signal.SIGKILL)
        out = inner(*args, **kwargs)
        if left[0] == 0:
            os.kill(os.getpid(), signal.SIGKILL)
        return out
    setattr(owner, name, wrapped)

MOMENTS = {
    "weights": (transformers.Trainer, "_save", 2, True),
    "optimizer": (transformers.Trainer, "_save_optimizer_and_scheduler", 2, False),
    "random state": (transformers.Trainer, "_save_rng_state", 2, True),
    "state": (TrainerState, "save_to_json", 2, False),
}
for moment, (owner, name, count, after) in MOMENTS.items():
    child = os.fork()
    if child == 0:
        left = [count]
        dies(owner, name, after)
        make("kit", Path(sys.argv[2]) / moment, save_strategy="steps", save_steps=2).train()
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
    trainer = make("kit", tmp_path_factory.mktemp("untouched") / "run")
    trainer.train()
    return weights(trainer)


@pytest.fixture(scope="module")
def killed(tmp_path_factory):
    folder = tmp_path_factory.mktemp("killed")
    tests = Path(__file__).parents[1]
    command = [sys.executable, "-c", KILLED, str(tests), str(folder)]
    done = subprocess.run(command, cwd=tests.parent, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stderr
    return folder


@pytest.mark.parametrize("moment", ["weights", "optimizer", "random state", "state"])
def test_a_kill_while_saving_leaves_the_last_whole_checkpoint_to_resume_from(moment, killed, untouched):
    """The save of step 4 is cut short; only what was whole before bears a checkpoint's name."""
    assert [p.name for p in killed.joinpath(moment).glob("checkpoint-*")] == ["checkpoint-2"]
    again = make("kit", killed / moment, **SAVES)
    again.train(resume_from_checkpoint=True)
    assert again.state.global_step == 4 and same(untouched, weights(again))
    assert read_metrics(killed / moment)["step"].tolist() == [1, 2, 3, 4]
    assert not (killed / moment / ".saving").exists()


def test_a_part_of_a_checkpoint_is_passed_over_and_refused_by_name(tmp_path, untouched, capsys):
    """As a trainer that saves in place leaves it: trl's own, or this one before."""
    make("kit", tmp_path / "run", **SAVES).train()
    state = tmp_path / "run/checkpoint-4/trainer_state.json"
    state.write_text(state.read_text()[:100])
    for path in tmp_path.glob("run/checkpoint-*/digests.json"):
        path.unlink()
    again = make("kit", tmp_path / "run", **SAVES)
    with pytest.raises(
        ValueError, match="checkpoint-4' is damaged: it was not written to its end.*checkpoint-2'"
    ):
        again.train(resume_from_checkpoint=str(state.parent))
    again.train(resume_from_checkpoint=True)
    said = capsys.readouterr().out
    assert "checkpoint-4 is damaged and is passed over: it was not written to its end" in said
    assert same(untouched, weights(again)) and json.loads(state.read_text())["global_step"] == 4
    for path in tmp_path.glob("run/checkpoint-*/*"):  # of checkpoint-4, saved anew, the digests too
        path.name in ("trainer_state.json", "digests.json") and path.unlink()
    assert last_whole_checkpoint(tmp_path / "run") is None
    with pytest.raises(
        ValueError, match=r"holds no whole checkpoint \(checkpoint-4: .*\); start under another name"
    ):
        again.train(resume_from_checkpoint=True)
    with pytest.raises(ValueError, match="without a checkpoint to go on from"):
        make("kit", tmp_path / "run")
    with pytest.raises(ValueError, match="is no folder"):
        make("kit", tmp_path / "new").train(resume_from_checkpoint=str(tmp_path / "nowhere"))


def test_a_checkpoint_of_the_same_step_is_replaced_whole(tmp_path):
    """A kill between the two renames leaves the old one aside; it is found again."""
    make("kit", tmp_path, **SAVES).train()
    (tmp_path / ".saving").mkdir()
    os.replace(tmp_path / "checkpoint-4", tmp_path / ".saving/replaced-checkpoint-4")
    assert last_whole_checkpoint(tmp_path).name == "checkpoint-4"


def test_the_best_checkpoint_is_known_by_its_own_name(tmp_path):
    options = dict(
        eval_strategy="steps", eval_steps=2, per_device_eval_batch_size=4, metric_for_best_model="reward"
    )
    trainer = make(
        "kit",
        tmp_path,
        **SAVES,
        **options,
        eval_dataset=data(4),
        save_total_limit=1,
        load_best_model_at_end=True,
    )
    trainer.train()
    best = Path(trainer.state.best_model_checkpoint)
    assert best.parent == tmp_path and best.is_dir() and ".saving" not in str(best)
    state = json.loads((last_whole_checkpoint(tmp_path) / "trainer_state.json").read_text())
    assert Path(state["best_model_checkpoint"]).parent == tmp_path


class FillsUp(TrainerCallback):
    """The disk is full from a step on, until `free` is called; `rows`: too full for a row, too.

    A row finds no room where metrics.csv is larger than the limit already: its first row gets long.
    """

    def __init__(self, trainer, step, *, rows=False, free=100_000):
        self.trainer, self.step, self.rows, self.bytes, self._disk = trainer, step, rows, free, None
        trainer.add_callback(self)

    def on_step_begin(self, args, state, control, **kwargs):
        if state.global_step == self.step and self._disk is None:
            if self.rows:
                folder = self.trainer.recorder.folder
                folder.write_step({"step": 1, "note": "x" * 110_000})
            self._disk = full_disk(self.bytes)
            self._disk.__enter__()

    def free(self):
        if self._disk is not None:
            self._disk.__exit__(None, None, None)
            self._disk = None
            self.step = None

    def __enter__(self):
        return self

    def __exit__(self, *exc):
        self.free()


@pytest.mark.parametrize(
    "tuning, free", [("full", 100_000), ("lora", 2_000_000)], ids=["weights", "tokenizer"]
)
def test_training_goes_on_over_a_save_that_the_disk_refuses(tuning, free, tmp_path):
    """Every library says it in its own way: safetensors, tokenizers (which has the largest file under LoRA), torch."""
    longer = make("kit", tmp_path / "a", tuning=tuning, max_steps=6)
    longer.train()
    trainer = make("kit", tmp_path / "b", tuning=tuning, **SAVES)
    with FillsUp(trainer, 1, free=free):
        with pytest.warns(RuntimeWarning, match="checkpoint-2 cannot be written.*Training goes on"):
            trainer.train()
        assert trainer.state.global_step == 4 and not list(tmp_path.glob("b/checkpoint-*"))
        with pytest.raises(CheckpointNotSaved, match="checkpoint-4 cannot be written"):
            trainer.train()
    trainer.args.max_steps = 6
    trainer.train()
    assert (tmp_path / "b/checkpoint-4").is_dir() and trainer.state.global_step == 6
    assert same(weights(longer), weights(trainer))
    assert read_metrics(tmp_path / "b")["step"].tolist() == [1, 2, 3, 4, 5, 6]


@pytest.mark.parametrize("rows", [False, True], ids=["too full to save", "too full for a row"])
def test_a_stop_on_a_full_disk_stays_in_memory_and_goes_on_once_there_is_space(
    rows, tmp_path, untouched, capsys
):
    trainer = make("kit", tmp_path / "run")
    interrupted_once(trainer, "rollout", at_step=2)
    with FillsUp(trainer, 1, rows=rows):
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", RuntimeWarning)
            trainer.train(on_stop="return")
        assert trainer.interrupted and "not saved" in capsys.readouterr().out
        for _ in range(2):
            with pytest.raises(OSError, match="cannot be written"):
                trainer.train(on_stop="return")
    trainer.train(on_stop="return")
    assert trainer.state.global_step == 4 and same(untouched, weights(trainer))
    assert read_metrics(tmp_path / "run")["step"].tolist() == [1, 2, 3, 4]


def test_rows_that_wait_are_not_given_up_by_a_train_on_a_disk_still_full(tmp_path, untouched):
    """Checkpoints fit, as on another disk; rows do not."""
    trainer = make("kit", tmp_path / "run")
    save = trainer._save_checkpoint

    def elsewhere(*args, **kwargs):
        with full_disk(2**30):
            save(*args, **kwargs)

    trainer._save_checkpoint = elsewhere
    interrupted_once(trainer, "rollout", at_step=2)
    with FillsUp(trainer, 1, rows=True):
        with pytest.warns(RuntimeWarning, match="kept in memory"):
            trainer.train(on_stop="return")
        with pytest.raises(RunFolderError, match="still wait in memory"):
            trainer.train(on_stop="return")
    trainer.train(on_stop="return")
    assert read_metrics(tmp_path / "run")["step"].tolist() == [1, 2, 3, 4]
    assert same(untouched, weights(trainer))


def test_a_disk_full_at_the_start_does_not_block_the_name(tmp_path, untouched):
    trainer = make("kit", tmp_path / "run")
    with full_disk(4), pytest.raises(RunFolderError, match="Free some space"):
        trainer.train()
    assert not any((tmp_path / "run").iterdir())
    trainer.train()
    assert same(untouched, weights(trainer))
