"""A tracker that fails ends no training and is reported once; one that comes later gets the steps before."""

import pytest
from loop_runs import make

from grpo_kit.loop.processes import Stopped
from grpo_kit.more.bridges import trackers
from grpo_kit.more.bridges.trackers import _table_is_due, _table_of
from grpo_kit.record.files import read_metrics


def rewards_in(folder):
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    found = EventAccumulator(str(folder / "tensorboard")).Reload()
    return [(event.step, event.value) for event in found.Scalars("train/reward")]


def rewards_of(folder, *steps):
    rows = zip(read_metrics(folder)["step"], read_metrics(folder)["reward"], strict=True)
    return [(step, pytest.approx(reward)) for step, reward in rows if step in steps]


def test_a_tracker_that_fails_is_reported_once_and_gets_the_steps_after(
    tmp_path, monkeypatch, capsys
):
    pytest.importorskip("tensorboard")
    done, calls = trackers.TensorBoard._numbers, []

    def fails(self, step, numbers):
        calls.append(step)
        if step in (2, 3):
            raise OSError(28, "No space left on device")
        done(self, step, numbers)

    monkeypatch.setattr(trackers.TensorBoard, "_numbers", fails)
    trainer = make(tmp_path / "run", hooks=[trackers.TensorBoard()])
    trainer.train()
    assert calls == [1, 2, 3, 4] and trainer.step == 4
    assert (
        capsys.readouterr().out.count("tensorboard failed (OSError: [Errno 28] No space left")
        == 1
    )
    assert rewards_in(trainer.folder) == rewards_of(trainer.folder, 1, 4)


def test_a_tracker_that_cannot_begin_is_left_alone(tmp_path, capsys):
    pytest.importorskip("tensorboard")
    (tmp_path / "run").mkdir()
    (tmp_path / "run/tensorboard").write_text("a file where a folder must be")
    trainer = make(tmp_path / "run", hooks=[trackers.TensorBoard()])
    trainer.train()
    assert trainer.step == 4 and capsys.readouterr().out.count("tensorboard failed") == 1


def test_a_tracker_that_comes_later_gets_the_steps_before(tmp_path):
    pytest.importorskip("tensorboard")

    class Stop(trackers.TensorBoard):
        """Stands before the tracker and stops the run: the tracker has the step all the same."""

        def begin(self, trainer):
            pass

        def after_step(self, trainer, row, batch):
            if trainer.step == 3:
                raise KeyboardInterrupt

    trainer = make(tmp_path / "run", steps=2)
    trainer.train()
    trainer.change(steps=4)
    trainer.hooks = [Stop(), trackers.TensorBoard()]
    with pytest.raises(Stopped):
        trainer.train()
    assert rewards_in(trainer.folder) == rewards_of(trainer.folder, 1, 2, 3)


def test_what_is_not_installed_is_refused_by_name(monkeypatch):
    monkeypatch.setattr("grpo_kit.more.bridges.trackers.find_spec", lambda name: None)
    for name in trackers.TRACKERS:
        with pytest.raises(ValueError, match=f"{name} is not installed; pip install {name}"):
            trackers.by_name(name)
    with pytest.raises(ValueError, match="tracker='mlflow'.*'wandb'"):
        trackers.by_name("mlflow")


def test_tables_are_bounded():
    table = {
        "group": [n // 40 for n in range(160)],
        "completion": ["x"] * 160,
        "tokens": [["x"]] * 160,
    }
    assert len(_table_of(table)["group"]) == 40 and set(_table_of(table)) == {
        "group",
        "completion",
    }
    # one group at least
    assert len(_table_of(table | {"completion": ["x" * 10_000] * 160})["group"]) == 40
    assert sum(_table_is_due(step, 10_000) for step in range(1, 10_001)) == 101
    assert all(_table_is_due(step, 32) for step in range(1, 33))
