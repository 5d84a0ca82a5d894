"""What the campaign of drawn faults found in the loop, one test each."""

import json
import shutil

import pytest
from loop_runs import make, record, same, weights
from test_loop_hooks import Measured

from grpo_kit.loop import checkpoint
from grpo_kit.loop.processes import Stopped
from grpo_kit.loop.protocols import Hook
from grpo_kit.record._jsonl_run import RunLog
from grpo_kit.record._lines import LineFile
from grpo_kit.record.files import RunFolderError, read_metrics
from grpo_kit.trainer.held_out import HeldOutHook


class Disk:
    """No row and no checkpoint can be written while it is full."""

    def __init__(self, monkeypatch):
        self.patch = monkeypatch

    def fill(self):
        def full(*args, **kwargs):
            raise OSError(28, "No space left on device")

        self.patch.setattr(checkpoint.torch, "save", full)
        self.patch.setattr(LineFile, "write", full)


class After(Hook):
    """Does something after a step."""

    def __init__(self, step, act):
        self.step, self.act = step, act

    def after_step(self, trainer, row, batch):
        if trainer.step == self.step:
            self.act()


def test_after_a_disk_that_was_full_to_the_end_train_writes_what_is_missing(
    tmp_path, monkeypatch, capsys
):
    whole = make(tmp_path / "whole", save_steps=2)
    whole.train()
    trainer = make(tmp_path / "run", save_steps=2)
    with monkeypatch.context() as patch:
        trainer.hooks.append(After(3, Disk(patch).fill))
        with pytest.warns(RuntimeWarning, match="cannot be written"):
            trainer.train()
        assert trainer.step == 4 and len(record(trainer.folder)[0]) == 3
    trainer.train()
    assert record(trainer.folder) == record(whole.folder)
    assert json.loads((trainer.folder / "checkpoint-4/run_state.json").read_text())["step"] == 4
    assert same(weights(trainer), weights(whole))
    capsys.readouterr()
    trainer.train()
    assert "All 4 steps are done" in capsys.readouterr().out


@pytest.mark.parametrize("step", [2, 4])
def test_a_stop_in_an_evaluation_keeps_no_hook_from_its_step(tmp_path, step):
    """The evaluation is made up, after the last step too; the hooks behind it saw every step."""
    seen = []

    class See(Hook):
        def after_step(self, trainer, row, batch):
            seen.append(trainer.step)

    class Interrupted(Measured):
        def measure(self, model, tokenizer):
            found = super().measure(model, tokenizer)
            if len(self.calls) == 1 + step // 2:
                raise KeyboardInterrupt
            return found

    held_out = Interrupted(*(0.1 * i for i in range(4)))
    trainer = make(tmp_path / "run", hooks=[HeldOutHook(held_out, keep="best"), See()])
    with pytest.raises(Stopped, match=f"after step {step}"):
        trainer.train()
    trainer.train()
    assert seen == [1, 2, 3, 4]
    assert read_metrics(trainer.folder)["eval/accuracy"].notna().tolist() == [
        True,
        False,
        True,
        False,
        True,
    ]
    assert json.loads((trainer.folder / "kept.json").read_text())["step"] == 4


@pytest.mark.parametrize("raised", [RuntimeError("no server"), KeyboardInterrupt()])
def test_a_hook_that_fails_keeps_no_other_from_its_step(tmp_path, raised):
    seen = []

    class See(Hook):
        def after_step(self, trainer, row, batch):
            seen.append(trainer.step)

        def end(self, trainer, error):
            seen.append("end")

    class Fails(See):
        def after_step(self, trainer, row, batch):
            if trainer.step == 2:
                raise raised

    with pytest.raises(RuntimeError if isinstance(raised, RuntimeError) else Stopped):
        make(tmp_path / "run", hooks=[Fails(), See()]).train()
    assert seen == [1, 2, "end", "end"] and (tmp_path / "run/checkpoint-2").exists()


def test_a_hook_that_did_not_begin_does_not_end(tmp_path):
    calls = []

    class Raises(Hook):
        def begin(self, trainer):
            raise RuntimeError("no server")

    class Ends(Hook):
        def __init__(self, name):
            self.name = name

        def end(self, trainer, error):
            calls.append((self.name, str(error)))

    with pytest.raises(RuntimeError, match="no server"):
        make(tmp_path / "run", hooks=[Ends("first"), Raises(), Ends("last")]).train()
    assert calls == [("first", "no server")]


def test_the_best_step_of_a_full_disk_is_saved_once_there_is_space(tmp_path, monkeypatch):
    trainer = make(tmp_path / "run", hooks=[HeldOutHook(Measured(0.1, 0.7, 0.4), keep="best")])
    with monkeypatch.context() as patch:
        trainer.hooks.insert(0, After(2, Disk(patch).fill))
        with pytest.raises(checkpoint.CheckpointNotSaved), pytest.warns(RuntimeWarning):
            trainer.train()
    trainer.train()
    assert (
        trainer.step == 4
        and json.loads((trainer.folder / "kept.json").read_text())["step"] == 2
    )


def test_a_damaged_best_checkpoint_is_named_and_the_best_of_the_rest_is_kept(tmp_path, capsys):
    folder = tmp_path / "run"
    stop = After(3, lambda: (_ for _ in ()).throw(KeyboardInterrupt))
    with pytest.raises(Stopped):
        make(folder, hooks=[HeldOutHook(Measured(0.1, 0.7), keep="best"), stop]).train()
    (folder / "checkpoint-2/model.safetensors").write_bytes(b"cut")
    trainer = make(folder, hooks=[HeldOutHook(Measured(0.4), keep="best")])
    trainer.train(resume=True)
    said = capsys.readouterr().out
    assert (
        "weights of step 2, the best evaluation so far (accuracy 0.7), cannot be kept" in said
    )
    assert "model.safetensors is cut" in said
    assert json.loads((folder / "kept.json").read_text())["step"] == 4


def test_a_change_is_made_again_where_its_step_has_more_lines(tmp_path):
    """An evaluation or a measure adds a line to the step's; the change stands in the first."""

    class Note(Hook):
        def after_step(self, trainer, row, batch):
            trainer.log.write(trainer.step, {"noted": 1.0})

    class Change(Hook):
        def before_step(self, trainer):
            if trainer.step == 2:
                trainer.config.learning_rate = 1e-3

    whole = make(tmp_path / "run", save_steps=2, save_total_limit=2, hooks=[Change(), Note()])
    whole.train()
    shutil.rmtree(whole.folder / "checkpoint-4")
    again = make(tmp_path / "run", hooks=[Note()])
    again.train(resume=True)
    assert again.config.learning_rate == 1e-3 and same(weights(again), weights(whole))


def test_rows_that_wait_for_a_full_disk_are_taken_back_too(tmp_path, monkeypatch):
    log = RunLog.open(tmp_path / "run", {})
    log.write(1, {"reward": 0.1}, {"completion": ["a"]})
    with monkeypatch.context() as patch, pytest.warns(RuntimeWarning):
        Disk(patch).fill()
        log.write(2, {"reward": 0.2}, {"completion": ["b"]})
        log.go_on_from(1)
        log.write(2, {"reward": 0.3}, {"completion": ["c"]})
    log.flush()
    rows, completions = record(log.path)
    assert [row["reward"] for row in rows] == [0.1, 0.3] and [
        c["completion"] for c in completions
    ] == [
        "a",
        "c",
    ]


def test_a_run_that_was_killed_before_its_first_row_begins_it_again(tmp_path):
    log = RunLog.open(tmp_path / "run", {})
    assert not (log.path / "metrics.jsonl").exists()
    with pytest.raises(RunFolderError, match="already holds a run.*next free name is .*run-2"):
        make(tmp_path / "run").train()
    again, fresh = make(tmp_path / "run"), make(tmp_path / "run-2")
    again.train(resume=True)
    fresh.train()
    assert (
        same(weights(again), weights(fresh))
        and record(again.folder)[0] == record(fresh.folder)[0]
    )


def test_a_change_is_on_record_where_its_step_was_stopped_and_done_again(tmp_path):
    """Without the line a resumed run would not make the change."""

    class ChangeAndStop(Hook):
        def before_step(self, trainer):
            if trainer.step == 2:
                trainer.config.learning_rate = 1e-3

    trainer = make(tmp_path / "run", hooks=[ChangeAndStop()])
    inner, calls = trainer.sample, []

    def stopped_once(*given):
        calls.append(1)
        if len(calls) == 3:
            raise KeyboardInterrupt
        return inner(*given)

    trainer.sample = stopped_once
    with pytest.raises(Stopped, match="after step 2"):
        trainer.train()
    trainer.train()
    changed = [row["changes"] for row in record(trainer.folder)[0] if "changes" in row]
    assert changed == [{"learning_rate": [1e-2, 1e-3]}]
