"""Held-out accuracy while a run trains, the best checkpoint, the model card, and what a constructor says at once."""

import json

import pytest
from tiny_run import GRPOTrainer, interrupted_once, make, same, settings, weights
from transformers import TrainerCallback

from grpo_kit import tasks
from grpo_kit.evaluation.accuracy import evaluate
from grpo_kit.evaluation.held_out import HeldOut
from grpo_kit.models import load_policy
from grpo_kit.record.control import control
from grpo_kit.record.files import RunFolderError, read_metrics
from grpo_kit.watch.run_card import model_card

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


def trainer(folder, *, held_out=None, keep="last", live=None, **overrides):
    model, tokenizer = load_policy("tiny-random", quiet=True)
    args = settings(folder, max_completion_length=TASK.max_completion_tokens, **overrides)
    return GRPOTrainer(
        model, TASK, args, processing_class=tokenizer,
        warmup=0, live=live, held_out=held_out, keep=keep,
    )  # fmt: skip


def test_measured_before_between_and_after_and_no_step_moves(tmp_path):
    plain = trainer(tmp_path / "plain", max_steps=5)
    plain.train()
    watched = trainer(tmp_path / "run", max_steps=5, held_out=HeldOut(TASK, rows=8, every=2))
    watched.train()
    assert same(weights(plain), weights(watched)), "looking moves no step"
    table = read_metrics(tmp_path / "run")
    measured = table[table["eval/accuracy"].notna()]
    assert measured["step"].tolist() == [0, 2, 4, 5]
    assert (measured["eval/accuracy_low"] <= measured["eval/accuracy"]).all()
    after = evaluate(watched.model, watched.processing_class, TASK, rows=TASK.held_out[:8])
    assert measured["eval/accuracy"].iloc[-1] == after.strict.value, "the same questions, greedily"


@pytest.mark.parametrize("where", ["rollout", "optimizer"])
def test_a_stop_makes_no_measure_twice_or_never(where, tmp_path):
    whole = trainer(tmp_path / "whole", max_steps=4, held_out=HeldOut(TASK, rows=4, every=2))
    whole.train()
    stopped = trainer(tmp_path / "run", max_steps=4, held_out=HeldOut(TASK, rows=4, every=2))
    interrupted_once(stopped, where, at_step=2)
    stopped.train(on_stop="return")
    assert stopped.interrupted
    stopped.train()
    assert same(weights(whole), weights(stopped))
    a, b = (read_metrics(tmp_path / name)["eval/accuracy"].tolist() for name in ("whole", "run"))
    assert str(a) == str(b)


class WeightsAt(TrainerCallback):
    def __init__(self):
        self.seen = {}

    def on_step_end(self, args, state, control, model=None, **kwargs):
        self.seen[state.global_step] = {n: p.detach().clone() for n, p in model.named_parameters()}


def test_the_best_is_kept_and_a_longer_run_goes_on_from_the_last(tmp_path, capsys):
    whole = trainer(tmp_path / "whole", max_steps=6)
    seen = WeightsAt()
    whole.add_callback(seen)
    whole.train()
    best = trainer(tmp_path / "run", max_steps=4, held_out=Scripted(TASK, rows=2, every=1), keep="best")
    best.train()  # 0.1 before, then 0.2, 0.7, 0.3, 0.4
    assert (
        same(seen.seen[2], weights(best))
        and "weights of step 2, the best evaluation" in capsys.readouterr().out
    )
    assert {p.name for p in (tmp_path / "run").glob("checkpoint-*")} == {"checkpoint-2", "checkpoint-4"}
    assert json.loads((tmp_path / "run" / "kept.json").read_text()) == {
        "step": 2, "of": 4, "by": "accuracy", "value": 0.7,
    }  # fmt: skip
    card = (tmp_path / "run" / "README.md").read_text()
    assert "The weights are those of step 2 of 4, the best held-out accuracy (0.700)" in card
    best.change(max_steps=6)
    best.train()  # 0.5, 0.6: 0.7 stays the best
    assert same(seen.seen[2], weights(best))
    assert {p.name for p in (tmp_path / "run").glob("checkpoint-*")} == {"checkpoint-2", "checkpoint-6"}
    table = read_metrics(tmp_path / "run")
    plain = read_metrics(tmp_path / "whole")
    assert table["reward"].dropna().tolist() == plain["reward"].tolist(), "steps 5 and 6 went on from step 4"


@pytest.mark.parametrize("tuning", ["full", "lora"])
def test_the_best_is_kept_by_a_run_that_was_stopped_and_by_adapters(tuning, tmp_path):
    def made(folder):
        model, tokenizer = load_policy("tiny-random", tuning=tuning, quiet=True)
        args = settings(folder, max_completion_length=TASK.max_completion_tokens, max_steps=4)
        held_out = Scripted(TASK, rows=2, every=1)
        return GRPOTrainer(
            model, TASK, args, processing_class=tokenizer, warmup=0, live=None,
            held_out=held_out, keep="best",
        )  # fmt: skip

    whole, seen = made(tmp_path / "whole"), WeightsAt()
    whole.add_callback(seen)
    whole.train()
    first = made(tmp_path / "run")
    interrupted_once(first, "rollout", at_step=3)
    first.train(on_stop="return")
    assert first.interrupted and not (tmp_path / "run" / "kept.json").exists()
    second = made(tmp_path / "run")
    object.__setattr__(second.held_out, "asked", 2)  # 0.3 and 0.4 are still to come
    second.train(resume_from_checkpoint=True)
    trained = {name for name, p in whole.model.named_parameters() if p.requires_grad}
    best, got, kept = seen.seen[2], weights(second), weights(whole)
    assert trained and all(
        (best[name] == got[name]).all() and (best[name] == kept[name]).all() for name in trained
    )
    assert json.loads((tmp_path / "run" / "kept.json").read_text())["step"] == 2


def test_a_better_evaluation_that_is_not_kept_is_named(tmp_path, capsys):
    run = trainer(tmp_path / "run", max_steps=4, held_out=Scripted(TASK, rows=2, every=1), live=False)
    run.train()  # 0.1 before, then 0.2, 0.7, 0.3, 0.4
    out = capsys.readouterr().out
    assert (
        "Held-out accuracy was 70 % after step 2 and is 40 % after the last, 4; the fall may be chance."
        in out
    )
    assert "keep='best' (--keep best) ends a run with the weights of its best evaluation." in out
    assert not (tmp_path / "run" / "kept.json").exists()
    card = (tmp_path / "run" / "README.md").read_text()
    assert "was 70 % after step 2" in card and "The weights are the last step's." in card


def test_without_right_and_wrong_the_reward_is_measured_and_the_best_is_judged_by_it(tmp_path):
    def lively(completions, **columns):
        return [min(1.0, len(set(text)) / 20) for text in completions]

    rows = [{"question": f"Say {i}."} for i in range(40)]
    task = tasks.from_rows("own", rows, reward=lively, max_completion_tokens=6)
    model, tokenizer = load_policy("tiny-random", quiet=True)
    run = GRPOTrainer(
        model, task, settings(tmp_path / "run", max_steps=2), live=None, warmup=0,
        processing_class=tokenizer, held_out=HeldOut(task, rows=8, every=1), keep="best",
    )  # fmt: skip
    run.train()
    table = read_metrics(tmp_path / "run")
    assert table["eval/reward"].notna().all() and "eval/accuracy" not in table
    best = table.loc[table["eval/reward"][1:].idxmax()]
    kept = json.loads((tmp_path / "run" / "kept.json").read_text())
    assert (kept["by"], kept["step"], kept["value"]) == (
        "reward",
        best["step"],
        pytest.approx(best["eval/reward"]),
    )
    assert (
        "Held-out reward, greedy, 95 % interval: step 0: 0." in (tmp_path / "run" / "README.md").read_text()
    )
    assert json.loads((tmp_path / "run" / "run.json").read_text())["best_constant"] is None


def test_without_a_chart_each_measure_is_a_line(tmp_path, capsys):
    run = trainer(tmp_path, max_steps=2, held_out=HeldOut(TASK, rows=4, every=2), live=False)
    run.train()
    lines = capsys.readouterr().out.splitlines()
    told = [line for line in lines if "held-out accuracy" in line and "reward" not in line]
    best = f"{TASK.best_constant(TASK.held_out[:4])[1]:.0%}"
    assert told == [
        "held-out accuracy 0% (step 0)",
        f"no better than a constant answer ({best}): held-out accuracy 0% (step 2)",
    ]


def test_what_cannot_be_is_refused(tmp_path):
    for bad in ({"rows": 0}, {"rows": 17}, {"every": 0}, {"rows": 2.5}):
        with pytest.raises(ValueError, match=next(iter(bad))):
            HeldOut(TASK, **{"rows": 4} | bad)
    with pytest.raises(ValueError, match="keep='best' needs held_out.* or keep='last'"):
        make("kit", tmp_path, kit={"keep": "best"})
    with pytest.raises(ValueError, match="keep='first'"):
        make("kit", tmp_path, kit={"keep": "first"})
    assert not list(tmp_path.iterdir())


def test_the_card_says_what_was_trained(tmp_path):
    run = trainer(tmp_path / "run", max_steps=3, held_out=HeldOut(TASK, rows=8, every=2), learning_rate=1e-3)
    run.train()
    run.change(max_steps=4, learning_rate=5e-4)
    run.train()
    text = (tmp_path / "run/README.md").read_text()
    for words in (
        "| base | tiny-random |", "| data | task largest, rows 32 |", "exact_answer x 0.75, soft_format x 0.25",
        "| steps | 4 |",
        "Held-out accuracy, greedy, 95 % interval: step 0: ", "-> step 4: ",
        "- from step 4: learning_rate 0.001 -> 0.0005", "| reward | 0.",
    ):  # fmt: skip
        assert words in text, text
    assert "None" not in text
    assert "88.3 %" in model_card(tmp_path / "run", "strict 19.9 % -> 88.3 %").read_text()
    with pytest.raises(RunFolderError, match="holds no run"):
        model_card(tmp_path)


def test_a_model_that_was_trained_before_is_announced(tmp_path, capsys):
    first = trainer(tmp_path / "one", max_steps=2)
    first.train()
    second = make("kit", tmp_path / "two", model=first.model, max_steps=1, kit={"live": False})
    assert f"trained before: 2 steps in {tmp_path / 'one'}" in capsys.readouterr().out
    second.train()
    assert (
        json.loads((tmp_path / "two/run.json").read_text())["starts_from"] == f"2 steps in {tmp_path / 'one'}"
    )
    assert json.loads((tmp_path / "one/run.json").read_text())["starts_from"] is None


def test_folders_are_refused_before_anything_is_loaded(tmp_path, capsys):
    make("kit", tmp_path / "done", max_steps=1).train()
    with pytest.raises(RunFolderError, match="next free name is .*done-2"):
        make("kit", tmp_path / "done", model="a model that does not exist")
    (tmp_path / "file").write_text("")
    with pytest.raises(RunFolderError, match="no folder that can be written"):
        make("kit", tmp_path / "file", model="a model that does not exist")
    make("kit", tmp_path / "saved", max_steps=1, save_strategy="steps", save_steps=1).train()
    make("kit", tmp_path / "saved", kit={"live": False})
    assert "train(resume_from_checkpoint=True) goes on from checkpoint-1" in capsys.readouterr().out
    control(tmp_path / "saved")
