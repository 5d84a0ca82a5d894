"""A tracker that fails ends no training and loses no row; what it was not told is told later."""

import pytest
from tiny_run import make

from grpo_kit.record.files import read_metrics
from grpo_kit.trackers.tracker_table import is_told, table_of

pytest.importorskip("tensorboard")
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator  # noqa: E402

from grpo_kit.trackers.tensorboard import TensorBoard  # noqa: E402


def rewards_in(folder):
    found = EventAccumulator(str(folder / "tensorboard")).Reload()
    return [(event.step, event.value) for event in found.Scalars("train/reward")]


def rows_in(folder):
    table = read_metrics(folder)
    return [
        (step, pytest.approx(reward)) for step, reward in zip(table["step"], table["reward"], strict=True)
    ]


def failing(monkeypatch, method, times):
    """The disk is full for so many calls, in the middle of what is written."""
    done, calls = getattr(TensorBoard, method), []

    def fails(self, *given, **named):
        calls.append(given)
        done(self, *given, **named)
        if len(calls) in times:
            raise OSError(28, "No space left on device")

    monkeypatch.setattr(TensorBoard, method, fails)
    return calls


def test_a_tracker_that_fails_in_mid_run_is_told_the_rest_later(tmp_path, monkeypatch, capsys):
    failing(monkeypatch, "row", {2, 3})
    trainer = make("kit", tmp_path, report_to=["tensorboard"], kit={"live": False})
    trainer.train()
    said = capsys.readouterr().out
    assert said.count("tensorboard failed (OSError") == 1 and "has everything again" in said
    assert rewards_in(tmp_path) == rows_in(tmp_path) and len(rows_in(tmp_path)) == 4


def test_what_a_tracker_never_took_is_told_by_the_next_train(tmp_path, monkeypatch, capsys):
    with monkeypatch.context() as patch:
        failing(patch, "row", range(2, 99))
        trainer = make("kit", tmp_path, report_to=["tensorboard"])
        trainer.train()
    assert "the next train() of this folder tells the rest" in capsys.readouterr().out
    assert len(rows_in(tmp_path)) == 4
    trainer.change(max_steps=5)
    trainer.train()
    assert rewards_in(tmp_path) == rows_in(tmp_path) and len(rows_in(tmp_path)) == 5


def test_tables_are_bounded():
    table = {"group": [n // 40 for n in range(160)], "completion": ["x"] * 160, "tokens": [["x"]] * 160}
    assert len(table_of(table)["group"]) == 40 and set(table_of(table)) == {"group", "completion"}
    assert len(table_of(table | {"completion": ["x" * 10_000] * 160})["group"]) == 40  # one group at least
    assert sum(is_told(step, 10_000) for step in range(1, 10_001)) == 101
    assert all(is_told(step, 32) for step in range(1, 33))
