"""What a run shows and logs, and the learning rate that it says it trained with."""

import pytest
import torch
from tiny_run import make, same, weights
from transformers import Adafactor

from grpo_kit.models import load_policy
from grpo_kit.optim.split_adamw import SplitAdamW8bit

RATES = {
    ("constant_with_warmup", 2): [1 / 3, 2 / 3, 1, 1],
    ("linear", 1): [1 / 2, 1, 2 / 3, 1 / 3],
    ("cosine", 0): [1, 0.854, 0.5, 0.146],
}


@pytest.mark.parametrize(("kind", "warmup"), RATES)
def test_the_warmup_begins_above_zero(kind, warmup, tmp_path):
    trainer = make("kit", tmp_path, lr_scheduler_type=kind, warmup_steps=warmup, learning_rate=1.0, beta=0)
    trainer.args.max_grad_norm = 1e-9  # a rate of 1 would break the model
    trainer.train()
    rates = [entry["learning_rate"] for entry in trainer.state.log_history if "learning_rate" in entry]
    assert rates == pytest.approx(RATES[kind, warmup], abs=1e-3)


def test_plain_trl_s_first_step_has_a_rate_of_zero(tmp_path):
    trainer = make("plain", tmp_path, lr_scheduler_type="constant_with_warmup", warmup_steps=2)
    trainer.train()
    assert trainer.state.log_history[0]["learning_rate"] == 0


def test_a_run_of_one_step_trains(tmp_path):
    trainer = make("kit", tmp_path, max_steps=1, lr_scheduler_type="linear", kit={"warmup": 0.1})
    before = weights(trainer)
    trainer.train()
    assert not same(before, weights(trainer))


def test_resuming_inside_the_warmup_is_exact(tmp_path):
    options = {"lr_scheduler_type": "linear", "warmup_steps": 3, "save_strategy": "steps", "save_steps": 1}
    whole = make("kit", tmp_path / "a", **options)
    whole.train()
    make("kit", tmp_path / "b", **options).train()
    resumed = make("kit", tmp_path / "b", **options)
    resumed.train(resume_from_checkpoint=str(tmp_path / "b" / "checkpoint-1"))
    assert same(weights(whole), weights(resumed))
    rates = [
        [e["learning_rate"] for e in t.state.log_history if "learning_rate" in e] for t in (whole, resumed)
    ]
    assert rates[0] == rates[1] and rates[0][0] == pytest.approx(1e-2 / 4)


@pytest.mark.parametrize(
    ("optim", "kind"),
    [("sgd", torch.optim.SGD), ("adafactor", Adafactor), ("adamw_torch", SplitAdamW8bit)],
)
def test_optim_is_obeyed_on_bfloat16_weights_and_said(optim, kind, tmp_path, capsys):
    model = load_policy("tiny-random", dtype="bfloat16", quiet=True)[0]
    trainer = make("kit", tmp_path, model=model, optim=optim, max_steps=1)
    trainer.train()
    assert type(getattr(trainer.optimizer, "optimizer", trainer.optimizer)) is kind
    assert capsys.readouterr().out.count("bfloat16 weights") == 1


@pytest.mark.parametrize(("live", "lines"), [(True, 2), (False, 2), (None, 0)])
def test_live_says_how_loud_a_run_is(live, lines, tmp_path, capsys):
    make("kit", tmp_path, max_steps=2, kit={"live": live}).train()
    out = capsys.readouterr().out.splitlines()
    assert sum("reward" in line and line.startswith("step ") for line in out) == lines


def test_the_log_history_is_trl_s_and_more(tmp_path):
    """One entry a step with its metrics, the summary of the run last."""
    entries = {}
    for which in ("plain", "kit"):
        trainer = make(which, tmp_path / which, max_steps=2)
        trainer.train()
        entries[which] = trainer.state.log_history
    assert [e["step"] for e in entries["kit"]] == [e["step"] for e in entries["plain"]] == [1, 2, 2]
    for plain, kit in zip(entries["plain"], entries["kit"], strict=True):
        assert set(plain) <= set(kit)
    assert "reward" in entries["kit"][1] and "train_runtime" in entries["kit"][-1]
