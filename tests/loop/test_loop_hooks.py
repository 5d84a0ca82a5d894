"""Hooks on the loop: held-out accuracy, the best step's weights, red flags, chart lines, controls, one of six lines."""

import json
import threading
import time

import pytest
import torch
from loop_runs import make, record, same, task, weights

import grpo_kit as kit
from grpo_kit.loop import Config
from grpo_kit.loop.processes import Stopped
from grpo_kit.loop.protocols import Hook
from grpo_kit.record.files import read_changes, read_metrics
from grpo_kit.trainer.control_folder import ControlFolder, control
from grpo_kit.trainer.grpo_trainer import GRPOTrainer
from grpo_kit.trainer.held_out import HeldOutHook
from grpo_kit.trainer.watch_run import WatchRun
from grpo_kit.watch._live import LiveChart
from grpo_kit.watch._run_state import RunState, change_line
from grpo_kit.watch.monitor import read_flags


class Measured:
    """Stands for a HeldOut whose values are known: what the hook does with them is tested."""

    judged_by, every = "accuracy", 2

    def __init__(self, *values):
        self.values, self.calls = list(values), []

    def measure(self, model, tokenizer):
        assert not model.training
        self.calls.append(1)
        return {"accuracy": self.values[len(self.calls) - 1]}


def test_held_out_rows_are_measured_in_the_rows_of_their_steps_and_move_nothing(tmp_path):
    plain = make(tmp_path / "plain")
    plain.train()
    held_out = kit.HeldOut(task(), rows=4, every=2)
    trainer = make(tmp_path / "run", hooks=[HeldOutHook(held_out)])
    trainer.train()
    table = read_metrics(trainer.folder)
    assert table[table["eval/accuracy"].notna()]["step"].tolist() == [0, 2, 4] and table[
        "step"
    ].tolist() == [
        0,
        1,
        2,
        3,
        4,
    ]
    assert same(weights(trainer), weights(plain))


def test_the_best_evaluations_weights_are_kept_and_a_longer_run_goes_on_from_the_last(
    tmp_path, capsys
):
    at = {}

    class Keep(Hook):
        def after_step(self, trainer, row, batch):
            at[trainer.step] = {name: p.detach().clone() for name, p in trainer.trained.items()}

    trainer = make(
        tmp_path / "run", hooks=[HeldOutHook(Measured(0.1, 0.7, 0.4), keep="best"), Keep()]
    )
    trainer.train()
    assert "weights of step 2, the best evaluation (accuracy 0.7)" in capsys.readouterr().out
    assert all(torch.equal(p, at[2][name]) for name, p in trainer.trained.items())
    assert json.loads((tmp_path / "run/kept.json").read_text())["step"] == 2
    names = sorted(path.name for path in (tmp_path / "run").glob("checkpoint-*"))
    assert names == ["checkpoint-2", "checkpoint-4"]
    whole = make(tmp_path / "whole", steps=4)
    whole.train()
    whole.change(steps=6)
    whole.train()
    trainer.hooks[0].held_out.values += [0.3]
    trainer.change(steps=6)
    trainer.train()
    last = {name: value for name, value in weights(trainer).items() if "/" in name}
    assert all(torch.equal(value, weights(whole)[name]) for name, value in last.items()), (
        "the moments of step 6"
    )


@pytest.mark.parametrize(
    ("values", "best"),
    [
        ((0.5, 0.5, 0.5), 4),
        ((0.7, 0.7, 0.4), 2),
        ((0.1, 0.7, 0.7), 4),
        ((0.7, 0.1, 0.1), 0),
        ((0.0, 0.0, 0.0), 4),
    ],
)
def test_of_equal_evaluations_the_latest_is_kept(values, best, tmp_path):
    make(tmp_path / "run", hooks=[HeldOutHook(Measured(*values), keep="best")]).train()
    assert json.loads((tmp_path / "run/kept.json").read_text())["step"] == best
    assert (tmp_path / f"run/checkpoint-{best}").is_dir()


def test_a_better_evaluation_that_was_not_kept_is_named(tmp_path, capsys):
    make(tmp_path / "run", hooks=[HeldOutHook(Measured(0.1, 0.7, 0.4))]).train()
    assert "was 70 % after step 2 and is 40 % after the last, 4" in capsys.readouterr().out


def test_an_evaluation_that_was_cut_short_is_made_up(tmp_path):
    class Interrupted(Measured):
        def measure(self, model, tokenizer):
            found = super().measure(model, tokenizer)
            if len(self.calls) == 2:
                raise KeyboardInterrupt
            return found

    trainer = make(tmp_path / "run", hooks=[HeldOutHook(Interrupted(0.1, 0.0, 0.2, 0.3))])
    with pytest.raises(Stopped, match="after step 2"):
        trainer.train()
    trainer.train()
    table = read_metrics(trainer.folder)
    assert table["eval/accuracy"].dropna().tolist() == [0.1, 0.2, 0.3]


def test_a_line_a_step_and_red_flags_in_their_files(tmp_path, capsys):
    """The scale of an own reward is measured into the row; a flag on it stops the run where it is to."""
    trainer = make(tmp_path / "run", hooks=[WatchRun(live=False)])
    trainer.train()
    lines = [line for line in capsys.readouterr().out.splitlines() if line.startswith("step ")]
    assert [line.split()[1] for line in lines] == ["1/4", "2/4", "3/4", "4/4"]
    assert {"diversity/distinct_1", "script/latin", "groups/equal_rewards"} & {
        *read_metrics(trainer.folder)
    }
    stops = make(
        tmp_path / "stops",
        steps=12,
        learning_rate=0.5,
        hooks=[WatchRun(live=None, on_flag="stop")],
    )
    with pytest.raises(Stopped):
        stops.train()
    (flag, *_), said = read_flags(stops.folder), capsys.readouterr().out
    assert flag.name in said and stops.step < 12


def test_what_is_asked_by_the_folder_is_obeyed_between_steps(tmp_path, capsys):
    class Ask(Hook):
        def after_step(self, trainer, row, batch):
            of = control(trainer.folder)
            if trainer.step == 1:
                of.change(learning_rate=5e-3)
                of.change(steps=5)
                of.save()
            if trainer.step == 2:
                (trainer.folder / "control/zz.json").write_text('{"change": {"group_size": 2}}')
            if trainer.step == 3:
                of.pause()
                threading.Timer(0.6, of.go_on).start()
                self.began = time.monotonic()

    ask = Ask()
    trainer = make(tmp_path / "run", hooks=[ask, ControlFolder()])
    trainer.train()
    said = capsys.readouterr().out
    assert (
        "Saved " in said
        and "Paused after step 3." in said
        and "Refused: group_size=2 cannot be changed" in said
    )
    changes = read_changes(trainer.folder)
    assert [c["change"] for c in changes if "change" in c] == [
        {"steps": 5, "learning_rate": 5e-3}
    ]
    assert (
        changes[-1]["refused"] == {"group_size": 2}
        and "cannot be changed" in changes[-1]["why"]
    )
    assert trainer.step == 5 and time.monotonic() - ask.began > 0.5
    assert not (trainer.folder / "control").exists()


def test_answers_reach_the_buttons_under_the_chart(tmp_path, monkeypatch):
    """Else "Pause" never becomes "Go on", and what was refused is said far from where it was asked."""

    class Ask(Hook):
        def begin(self, trainer):
            control(trainer.folder).change(learning_rate=5e-3)
            control(trainer.folder).pause()

        def before_step(self, trainer):
            if trainer.step == 1:
                (trainer.folder / "control/zz.json").write_text('{"change": {"group_size": 2}}')

    said = []

    def answer(chart, text):
        said.append(text)
        if text.startswith("Paused"):
            control(tmp_path / "run").go_on()

    monkeypatch.setattr(LiveChart, "_show_answer", answer)
    made = make(tmp_path / "unused")
    trainer = GRPOTrainer(
        made.model, task(), Config(steps=2, prompts_per_step=2, group_size=4), tokenizer=made.tokenizer,
        folder=tmp_path / "run", hooks=[Ask()],
    )  # fmt: skip
    trainer.train()
    begun = [" ".join(text.split()[:2]) for text in said]
    assert begun == ["Paused after", "Going on", "From step", "Refused: group_size=2"], said
    assert [said[2]] == [*map(change_line, RunState.read(trainer.folder).changes)], (
        "as its folder is read"
    )


def test_a_stop_by_the_folder_is_a_stop(tmp_path):
    class Ask(Hook):
        def after_step(self, trainer, row, batch):
            if trainer.step == 2:
                control(trainer.folder).stop()

    trainer = make(tmp_path / "run", hooks=[Ask(), ControlFolder()])
    with pytest.raises(Stopped, match="after step 2 of 4"):
        trainer.train()
    trainer.hooks.pop(0)
    trainer.train()
    whole = make(tmp_path / "whole")
    whole.train()
    assert same(weights(trainer), weights(whole)) and record(trainer.folder) == record(
        whole.folder
    )


def test_a_hook_of_six_lines_stops_when_held_out_accuracy_falls_twice(tmp_path):
    class StopWhenItFallsTwice(Hook):
        def after_step(self, trainer, row, batch):
            found = read_metrics(trainer.folder).get("eval/accuracy")
            last = [] if found is None else found.dropna().tolist()[-3:]
            if len(last) == 3 and last[0] > last[1] > last[2]:
                raise KeyboardInterrupt

    held_out = HeldOutHook(Measured(0.5, 0.4, 0.3, 0.2, 0.1))
    trainer = make(tmp_path / "run", steps=8, hooks=[held_out, StopWhenItFallsTwice()])
    with pytest.raises(Stopped, match="after step 4 of 8"):
        trainer.train()


def test_a_hook_that_fails_loses_no_step(tmp_path):
    class Fails(Hook):
        def after_step(self, trainer, row, batch):
            if trainer.step == 2:
                raise RuntimeError("no network")

    trainer = make(tmp_path / "run", hooks=[Fails()])
    with pytest.raises(RuntimeError, match="no network"):
        trainer.train()
    assert trainer.step == 2 and (tmp_path / "run/checkpoint-2").exists()
    trainer.hooks.clear()
    trainer.train()
    whole = make(tmp_path / "whole")
    whole.train()
    assert same(weights(trainer), weights(whole))


def test_the_standard_trainer(tmp_path, tiny, capsys, monkeypatch):
    monkeypatch.chdir(tmp_path)
    model, tokenizer = tiny
    config = Config(steps=2, prompts_per_step=2, group_size=4, learning_rate=1e-3)
    held_out = kit.HeldOut(task(), rows=4, every=2)
    trainer = GRPOTrainer(
        model, task(), config, tokenizer=tokenizer, held_out=held_out, keep="best", live=False
    )
    trainer.train()
    assert (
        trainer.folder == tmp_path / "runs" / "largest"
        and "step 2/2" in capsys.readouterr().out
    )
    assert read_metrics(trainer.folder)["eval/accuracy"].notna().tolist() == [True, False, True]
    card = (trainer.folder / "README.md").read_text()
    assert "tiny-random" in card and "| steps | 2 |" in card and "task largest, rows 16" in card
    model, _ = kit.load_policy(trainer.save_model(tmp_path / "model"), quiet=True)
    assert all(torch.equal(p, trainer.trained[name]) for name, p in model.named_parameters())
    with pytest.raises(ValueError, match="is not empty; .*model-2' is free"):
        trainer.save_model(tmp_path / "model")
    with pytest.raises(ValueError, match="keep='best' needs held_out"):
        GRPOTrainer(model, task(), config, tokenizer=tokenizer, keep="best")
