"""Held-out rows on whole runs of the standard trainer: stopped, with adapters, judged by the reward, in words."""

import json
import re
import shutil

import few_words
import pytest
from loop_runs import press_stop
from standard_runs import make

from grpo_kit import tasks
from grpo_kit.evaluation.accuracy import evaluate
from grpo_kit.loop.processes import Stopped
from grpo_kit.loop.protocols import Hook
from grpo_kit.record._run_folder import alone
from grpo_kit.record.files import RunFolderError, read_metrics
from grpo_kit.trainer.control_folder import control
from grpo_kit.trainer.held_out import HeldOut, HeldOutHook
from grpo_kit.trainer.watch_run import WatchRun
from grpo_kit.watch.run_card import model_card
from grpo_kit.watch.terminal import Lines

TASK = tasks.largest(n_train=32, n_held_out=16)


class Scripted(HeldOut):
    """A held-out set whose accuracy is known beforehand; it still asks the model."""

    values = (0.1, 0.2, 0.7, 0.3, 0.4, 0.5, 0.6)

    def measure(self, model, tokenizer):
        found = super().measure(model, tokenizer)
        assert set(found) == {"accuracy", "accuracy_low", "accuracy_high", "constant"}
        object.__setattr__(self, "asked", getattr(self, "asked", -1) + 1)
        value = self.values[self.asked]
        return {"accuracy": value, "accuracy_low": value / 2, "accuracy_high": (1 + value) / 2}


class WeightsAt(Hook):
    def __init__(self, stop_at=None):
        self.seen, self.stop_at = {}, stop_at

    def before_step(self, trainer):
        if trainer.step == self.stop_at:
            self.stop_at = None
            press_stop()

    def after_step(self, trainer, row, batch):
        self.seen[trainer.step] = {n: p.detach().clone() for n, p in trainer.trained.items()}


def trainer(folder, *, task=TASK, tuning="full", **options):
    model, tokenizer = few_words.policy(tuning)
    return make(folder, task=task, model=model, tokenizer=tokenizer, **options)


def test_every_evaluation_is_a_line_where_there_is_no_notebook(tmp_path, capsys):
    """The one before the first step too, each behind its step, in the words of grpo-kit watch."""
    run = trainer(
        tmp_path / "run", steps=2, live=False, held_out=HeldOut(TASK, rows=8, every=1)
    )
    run.train()
    lines = [
        line
        for line in capsys.readouterr().out.splitlines()
        if re.match(r"step|.*held-out accuracy", line)
    ]
    places = [
        int(re.match(r"step (\d)/2|.*\(step (\d)\)", line)[line[:5] == "step " or 2])
        for line in lines
    ]
    assert (
        places == [0, 1, 1, 2, 2]
        and "held-out accuracy" in lines[0]
        and lines[1].startswith("step 1/2")
    )
    assert lines == Lines(run.folder, last=10).new()


def test_the_last_measure_is_the_evaluation_of_the_same_questions(tmp_path):
    run = trainer(tmp_path / "run", held_out=HeldOut(TASK, rows=8, every=2))
    run.train()
    measured = read_metrics(tmp_path / "run").dropna(subset="eval/accuracy")
    assert (measured["eval/accuracy_low"] <= measured["eval/accuracy"]).all()
    after = evaluate(run.model, run.tokenizer, TASK, rows=TASK.held_out[:8])
    assert measured["eval/accuracy"].iloc[-1] == after.strict.value


@pytest.mark.parametrize("tuning", ["full", "lora"])
def test_the_best_is_kept_by_a_run_that_was_stopped_and_by_adapters(tuning, tmp_path):
    seen = WeightsAt()
    made = dict(tuning=tuning, keep="best")
    whole = trainer(
        tmp_path / "whole", held_out=Scripted(TASK, rows=2, every=1), hooks=[seen], **made
    )
    whole.train()
    first = trainer(
        tmp_path / "run",
        held_out=Scripted(TASK, rows=2, every=1),
        hooks=[WeightsAt(stop_at=3)],
        **made,
    )
    with pytest.raises(Stopped, match="after step 3"):
        first.train()
    assert not (tmp_path / "run" / "kept.json").exists()
    held_out = Scripted(TASK, rows=2, every=1)
    object.__setattr__(held_out, "asked", 3)  # 0.4 is still to come
    second = trainer(tmp_path / "run", held_out=held_out, **made)
    second.train(resume=True)
    for name, p in second.trained.items():
        assert (seen.seen[2][name] == p).all() and (whole.trained[name] == p).all()
    assert json.loads((tmp_path / "run" / "kept.json").read_text())["step"] == 2
    card = (tmp_path / "run" / "README.md").read_text()
    assert "The weights are those of step 2 of 4, the best held-out accuracy (0.700)" in card


class Copies(Hook):
    """What a kill at this place in the order of hooks would leave."""

    def __init__(self, folder):
        self.folder = folder

    def after_step(self, trainer, row, batch):
        if trainer.step == 2:
            shutil.copytree(trainer.folder, self.folder)


class Counts(Hook):
    """A hook of a user's, with a column of its own."""

    def after_step(self, trainer, row, batch):
        trainer.log.write(trainer.step, {"mine": trainer.step})


def test_a_run_that_was_killed_between_two_hooks_has_all_columns_in_every_row(tmp_path):
    """A checkpoint stands for a step whose row is whole: it is saved when all hooks had their turn."""
    how = dict(keep="best", steps=3)
    held_out = lambda: HeldOut(TASK, rows=2, every=1)  # noqa: E731  of a tiny model: all evaluations are equal
    whole = trainer(tmp_path / "whole", held_out=held_out(), hooks=[Counts()], **how)
    places = [
        at
        for at, hook in enumerate(whole.hooks)
        if isinstance(hook, HeldOutHook | WatchRun | Counts)
    ]
    kills = [Copies(tmp_path / f"killed-{at}") for at in places]
    for at, kill in reversed([*zip(places, kills, strict=True)]):
        whole.hooks.insert(at + 1, kill)
    whole.train()
    wanted = read_metrics(whole.folder).notna()
    assert {"eval/accuracy", "mine", "diversity/self_bleu"} <= {*wanted}
    for kill in kills:
        again = trainer(kill.folder, held_out=held_out(), hooks=[Counts()], **how)
        again.train(resume=True)
        assert read_metrics(kill.folder).notna().equals(wanted)


def test_a_better_evaluation_that_is_not_kept_is_named_in_the_card_too(tmp_path, capsys):
    trainer(tmp_path / "run", held_out=Scripted(TASK, rows=2, every=1), live=False).train()
    said = capsys.readouterr().out
    assert (
        "Held-out accuracy was 70 % after step 2 and is 40 % after the last, 4; the fall may be chance."
        in said
    )
    assert not (tmp_path / "run" / "kept.json").exists()
    card = (tmp_path / "run" / "README.md").read_text()
    assert "was 70 % after step 2" in card and "The weights are the last step's." in card


def test_without_right_and_wrong_the_reward_is_measured_and_the_best_is_judged_by_it(tmp_path):
    def lively(completions, **columns):
        return [min(1.0, len(set(text)) / 20) for text in completions]

    rows = [{"question": f"Say {i}."} for i in range(40)]
    task = tasks.from_rows("own", rows, reward=lively, max_completion_tokens=6)
    trainer(
        tmp_path / "run",
        task=task,
        steps=2,
        held_out=HeldOut(task, rows=8, every=1),
        keep="best",
    ).train()
    table = read_metrics(tmp_path / "run")
    assert table["eval/reward"].notna().all() and "eval/accuracy" not in table
    best = table.loc[table["eval/reward"].idxmax()]
    kept = json.loads((tmp_path / "run" / "kept.json").read_text())
    assert (kept["by"], kept["value"]) == ("reward", pytest.approx(best["eval/reward"]))
    card = (tmp_path / "run" / "README.md").read_text()
    assert "Held-out reward, greedy, 95 % interval: step 0: 0." in card
    assert json.loads((tmp_path / "run" / "run.json").read_text())["best_constant"] is None


def test_what_cannot_be_is_refused(tmp_path):
    for bad in ({"rows": 0}, {"rows": 17}, {"every": 0}, {"rows": 2.5}):
        with pytest.raises(ValueError, match=next(iter(bad))):
            HeldOut(TASK, **{"rows": 4} | bad)
    with pytest.raises(ValueError, match="keep='best' needs held_out.* or keep='last'"):
        trainer(tmp_path / "a", keep="best")
    with pytest.raises(ValueError, match="keep='first'"):
        trainer(tmp_path / "b", keep="first", held_out=HeldOut(TASK, rows=2))
    assert not list(tmp_path.iterdir())


def test_the_card_says_what_was_trained(tmp_path):
    run = trainer(
        tmp_path / "run", steps=3, held_out=HeldOut(TASK, rows=8, every=2), learning_rate=1e-3
    )
    run.train()
    run.change(steps=4, learning_rate=5e-4)
    run.train()
    text = (tmp_path / "run/README.md").read_text()
    for words in (
        "| base | tiny-random |", "| data | task largest, rows 32 |", "exact_answer x 0.75, soft_format x 0.25",
        "| steps | 4 |", "Held-out accuracy, greedy, 95 % interval: step 0: ", "-> step 4: ",
        "learning_rate 0.001 → 0.0005", "| reward | 0.",
    ):  # fmt: skip
        assert words in text, text
    assert "None" not in text
    assert "88.3 %" in model_card(tmp_path / "run", "strict 19.9 % -> 88.3 %").read_text()
    with pytest.raises(RunFolderError, match="holds no run"):
        model_card(tmp_path)


@pytest.mark.parametrize(("live", "lines"), [(True, 2), (False, 2), (None, 0)])
def test_live_says_how_loud_a_run_is(live, lines, tmp_path, capsys):
    trainer(tmp_path / "run", steps=2, live=live).train()
    said = capsys.readouterr().out.splitlines()
    assert sum("reward" in line and line.startswith("step ") for line in said) == lines


def test_what_was_asked_while_no_run_went_on_is_named_and_thrown_away(tmp_path, capsys):
    run = trainer(tmp_path / "run", steps=2)
    run.train()
    run.train()
    assert "All 2 steps are done" in capsys.readouterr().out
    hand = control(tmp_path / "run")
    asked = {
        "pause": hand.pause, "stop": hand.stop, "save": hand.save, "go on": hand.go_on,
        "9e-05": lambda: hand.change(learning_rate=9e-5), "steps": lambda: hand.change(steps=9),
    }  # fmt: skip
    for ask in asked.values():
        with pytest.warns(UserWarning, match=f"trains into {tmp_path}.*nobody hears"):
            ask()
    (tmp_path / "run/control/a-number.json").write_text("7")
    run.change(steps=3, learning_rate=2e-5)
    run.train()
    assert run.step == 3 and run.config.learning_rate == 2e-5, "what was given last"
    thrown = [
        line for line in capsys.readouterr().out.splitlines() if line.startswith("Not obeyed: ")
    ]
    assert len(thrown) == 7 and all(
        any(name in line for line in thrown) for name in [*asked, "7"]
    )
    assert not (tmp_path / "run/control").exists()


def test_what_is_asked_while_a_command_evaluates_is_obeyed_and_what_comes_too_late_is_named(
    tmp_path, capsys
):
    """`grpo-kit train` holds the folder before its first step; a hook that ends later asks after the last look."""

    class Late(Hook):
        def end(self, trainer, error):
            control(trainer.folder).change(learning_rate=9e-5)

    run = trainer(tmp_path / "run", steps=2, hooks=[Late()])
    run.open()
    with alone(run.folder):
        control(run.folder).change(steps=3)
        run.train()
    assert run.step == 3
    assert (
        'Not obeyed: {"change": {"learning_rate": 9e-05}}. The run had ended'
        in capsys.readouterr().out
    )


def test_control_refuses_at_once(tmp_path):
    with pytest.raises(RunFolderError, match="holds no run"):
        control(tmp_path / "nowhere")
    trainer(tmp_path / "run", steps=1).train()
    hand = control(tmp_path / "run")
    with pytest.raises(ValueError, match="learning_rate"):
        hand.change(learning_rate=-1)
    with pytest.raises(ValueError, match="schedule"):
        hand.change(temperature=lambda progress: 1.0)
    assert not (tmp_path / "run/control").exists()
