"""A step that moves no weight says so at once, and once."""

from types import SimpleNamespace

import pytest

from grpo_kit import rewards
from grpo_kit.hooks.still_step_hook import StillStep
from grpo_kit.tasks import from_rows
from tests.loop_runs import make

ROWS = [{"question": f"{n}?", "answer": "5"} for n in range(8)]


def always_one(completions, **columns):
    return [1.0] * len(completions)


def varied(completions, **columns):
    return [float(place % 2) for place in range(len(completions))]


@pytest.mark.parametrize("reward, said", [(always_one, 1), (varied, 0)])
def test_it_says_so_once_with_why(tmp_path, capsys, reward, said):
    task = from_rows("own", ROWS, reward=reward, max_completion_tokens=4)
    make(tmp_path / "run", task=task, steps=3, hooks=[StillStep()]).train()
    lines = [line for line in capsys.readouterr().out.splitlines() if "moved no weight" in line]
    assert len(lines) == said
    for line in lines:
        assert line.startswith(
            "Step 1 moved no weight: in none of its 2 groups do the rewards differ, all are 1. "
        )


def test_where_rewards_differ_it_names_no_reward(capsys):
    batch = SimpleNamespace(rewards=[0.0, 1.0], groups=[0, 0])
    StillStep().after_step(SimpleNamespace(step=4), {"grad_norm": 0.0, "frac_reward_zero_std": 0.0}, batch)
    assert capsys.readouterr().out.startswith("Step 4 moved no weight: no completion has tokens that count")


def test_the_standard_trainer_has_it(tmp_path, capsys):
    import copy

    from grpo_kit import Config, GRPOTrainer
    from grpo_kit.models import load_policy

    model, tokenizer = load_policy("tiny-random", quiet=True)
    task = from_rows("own", ROWS, reward=rewards.ExactAnswer(), max_completion_tokens=4)
    config = Config(steps=1, prompts_per_step=2, group_size=2)
    GRPOTrainer(copy.deepcopy(model), task, config, tokenizer=tokenizer, folder=tmp_path / "run").train()
    assert "Step 1 moved no weight" in capsys.readouterr().out
