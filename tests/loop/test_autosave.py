"""Where no checkpoint is due by steps a crash loses minutes, not the run: kit.GRPOTrainer saves by time."""

from pathlib import Path

import forked
import pytest
import torch
from standard_runs import make

from grpo_kit.loop.checkpoint import CheckpointNotSaved
from grpo_kit.loop.protocols import Hook
from grpo_kit.trainer.control_folder import Autosave

KILLED = """
import os, signal, sys
sys.path.insert(0, {tests!r})
from standard_runs import make
from grpo_kit.trainer.control_folder import Autosave
from grpo_kit.loop.protocols import Hook
class Kill(Hook):
    def before_step(self, trainer):
        if trainer.step == 3:
            os.kill(os.getpid(), signal.SIGKILL)
Autosave.EVERY, Autosave.SHARE = 0, 1e9
make({folder!r}, hooks=[Kill()]).train()
"""


class Slow(Hook):
    """Each step counts as two minutes; after each, when all hooks had their turn, the checkpoints that are there."""

    def __init__(self):
        self.seen = []

    def before_step(self, trainer):
        trainer.seconds += 120
        if trainer.step:
            self.end(trainer, None)

    def end(self, trainer, error):
        self.seen.append(sorted(path.name for path in trainer.folder.glob("checkpoint-*")))


def test_a_run_that_was_killed_goes_on_to_the_weights_of_one_that_was_not(tmp_path):
    code = KILLED.format(tests=str(Path(__file__).parents[1]), folder=str(tmp_path / "run"))
    assert forked.run("-c", code).returncode < 0
    again, untouched = make(tmp_path / "run"), make(tmp_path / "untouched")
    again.train(resume=True)
    untouched.train()
    assert again.step == 4
    assert all(torch.equal(p, untouched.trained[name]) for name, p in again.trained.items())


def test_it_saves_after_each_5_minutes_and_keeps_the_newest(tmp_path):
    slow = Slow()
    make(tmp_path / "run", steps=7, hooks=[slow]).train()
    assert (
        slow.seen
        == [[], [], ["checkpoint-3"]] + [["checkpoint-3"]] * 2 + [["checkpoint-6"]] * 2
    )


@pytest.mark.parametrize("save_steps", [0, 100])
def test_a_short_run_and_one_that_saves_by_steps_have_none(tmp_path, save_steps):
    hooks = [Slow()] if save_steps else []
    make(tmp_path / "run", save_steps=save_steps, hooks=hooks).train()
    assert not list((tmp_path / "run").glob("checkpoint-*"))


def test_saving_takes_a_small_share_of_the_time(tmp_path, monkeypatch):
    monkeypatch.setattr(Autosave, "SHARE", 1e-6)  # what took 0.1 s then waits a day
    slow = Slow()
    make(tmp_path / "run", steps=7, hooks=[slow]).train()
    assert slow.seen[-1] == ["checkpoint-3"]


def test_training_goes_on_where_the_disk_does_not_take_it(tmp_path, monkeypatch):
    slow = Slow()
    trainer = make(tmp_path / "run", steps=6, hooks=[slow])

    def full():
        monkeypatch.undo()
        raise CheckpointNotSaved("checkpoint-3 cannot be written (No space left on device)")

    monkeypatch.setattr(trainer, "save", full)
    with pytest.warns(RuntimeWarning, match="No space left on device.*Training goes on"):
        trainer.train()
    assert trainer.step == 6 and slow.seen[-2:] == [[], ["checkpoint-6"]]


class SavesModel(Hook):
    def end(self, trainer, error):
        trainer.save_model(trainer.folder / "model")


@pytest.mark.parametrize(
    ("how", "words"),
    [
        (
            {},
            "The run is in run. Not saved in it: any weights. trainer.save_model('run/model') saves the model.",
        ),
        (
            {"save_steps": 3},
            "Not saved in it: the weights of step 4; the newest is checkpoint-3. trainer.",
        ),
        (
            {"save_steps": 1, "steps": 2},
            "The run is in run, the weights of its last step in checkpoint-2. trainer.",
        ),
        (
            {"save_steps": 3, "steps": 8},
            "Not saved in it: the weights of steps 7 to 8; the newest is checkpoint-6.",
        ),
        ({"hooks": [SavesModel()]}, "The run is in run, its model in run/model."),
        ({"live": None}, ""),
    ],
    ids="nothing,one step since,each step,two steps since,a model,nobody looks".split(","),
)
def test_where_a_run_ends_a_line_says_where_it_is_and_what_of_it_is_not(
    how, words, tmp_path, capsys, monkeypatch
):
    monkeypatch.chdir(tmp_path)
    make(tmp_path / "run", **({"live": False} | how)).train()
    lines = [
        line
        for line in capsys.readouterr().out.splitlines()
        if line.startswith("The run is in")
    ]
    assert len(lines) == bool(words) and words in "".join(lines)
