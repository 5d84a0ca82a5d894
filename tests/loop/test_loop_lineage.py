"""A model in memory that another run trained: the next run says so, and keeps it."""

import json

import pytest
from loop_runs import make, task

import grpo_kit as kit
from grpo_kit.loop.processes import Stopped
from grpo_kit.loop.protocols import Hook


def settings(folder):
    return json.loads((folder / "run.json").read_text())


def test_a_model_that_another_run_trained_is_named(tmp_path, capsys):
    class Stop(Hook):
        def after_step(self, trainer, row, batch):
            if trainer.step == 1:
                raise KeyboardInterrupt

    first = make(tmp_path / "one", steps=2, hooks=[Stop()], tuning="lora")
    with pytest.raises(Stopped):
        first.train()
    first.train()
    assert settings(tmp_path / "one")["starts_from"] is None, (
        "gone on with, not trained by another run"
    )
    again = make(tmp_path / "one", steps=3, model=first.model)
    assert again.starts_from is None, "a second trainer of the same run"
    config = kit.Config(steps=1, prompts_per_step=2, group_size=4)
    both = {"tokenizer": first.tokenizer, "folder": tmp_path / "two"}
    second = kit.GRPOTrainer(first.model, task(), config, live=False, **both)
    said = f"2 steps in {tmp_path / 'one'}"
    assert (
        f"This model was trained before: {said}. The run goes on from those weights"
        in capsys.readouterr().out
    )
    second.train()
    assert settings(tmp_path / "two")["starts_from"] == said
    assert f"| trained before | {said} |" in (tmp_path / "two/README.md").read_text()
    fresh, tokenizer = kit.load_policy("tiny-random", quiet=True)
    assert make(tmp_path / "three", model=fresh).starts_from is None
