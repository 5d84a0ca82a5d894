"""A step without a gradient says so at once, and once, with what its update still did to the weights."""

import re
from types import SimpleNamespace

import pytest
import torch

from grpo_kit import rewards
from grpo_kit.loop.protocols import Hook
from grpo_kit.tasks import from_rows
from grpo_kit.trainer.watch_run import StillStep
from tests.loop_runs import make

ROWS = [{"question": f"{n}?", "answer": "5"} for n in range(8)]
LINE = re.compile(
    r"Step (\d+) has no gradient: (.*?)\. (No weight moved|The optimizer's .*)\. If it stays so nothing is"
)


def always_one(completions, **columns):
    return [1.0] * len(completions)


def varied(completions, **columns):
    return [float(place % 2) for place in range(len(completions))]


def varied_until(step):
    """A reward that differs within groups in the steps before this one, and the hook that tells it the step."""
    now = SimpleNamespace(step=0)

    def until(completions, **columns):
        return varied(completions) if now.step < step else always_one(completions)

    class Tell(Hook):
        def before_step(self, trainer):
            now.step = trainer.step

    return until, Tell()


class Moves(Hook):
    """All weights as each step begins and ends."""

    def __init__(self):
        self.before, self.moved = None, []

    def before_step(self, trainer):
        self.before = [p.detach().clone() for p in trainer.trained.values()]

    def after_step(self, trainer, row, batch):
        pairs = zip(trainer.trained.values(), self.before, strict=True)
        moves = torch.cat([(p.detach() - before).flatten() for p, before in pairs])
        self.moved.append(moves.square().mean().sqrt().item())


def line_of(text):
    (line,) = [line for line in text.splitlines() if "has no gradient" in line]
    return LINE.match(line).groups()


@pytest.mark.parametrize(
    "how",
    [
        {}, {"tuning": "lora"}, {"seams": "fast"}, {"iterations": 2}, {"minibatches": 2}, {"weight_decay": 0.1},
        {"learning_rate": lambda progress: 1e-2 - 9e-3 * progress},
    ],
    ids=["full", "lora", "fast", "two iterations", "two minibatches", "weight decay", "a schedule"],
)  # fmt: skip
def test_after_steps_with_a_signal_the_moments_move_the_weights_and_the_line_says_how_far(
    tmp_path, capsys, how
):
    reward, tell = varied_until(2)
    task, moves = from_rows("own", ROWS, reward=reward, max_completion_tokens=4), Moves()
    make(tmp_path / "run", task=task, steps=4, hooks=[tell, StillStep(), moves], **how).train()
    step, why, how_far = line_of(capsys.readouterr().out)
    assert (step, why) == ("3", "in none of its 2 groups do the rewards differ, all are 1")
    by, times = re.search(
        r"moved each weight by (\S+) on average, (\S+) times as far as step 2", how_far
    ).groups()
    assert float(by) == pytest.approx(moves.moved[2], rel=0.2) and moves.moved[2] > 0
    assert float(times) == pytest.approx(moves.moved[2] / moves.moved[1], rel=0.15)


def test_the_update_without_a_gradient_is_adamws_own(tmp_path):
    """As TRL's: gradients of zero, given to torch's AdamW in the state that the last step with a signal left."""
    reward, tell = varied_until(2)
    wanted = []

    class Alone(Hook):
        def after_step(self, trainer, row, batch):
            if trainer.step == 2:
                twins = [
                    torch.nn.Parameter(p.detach().clone()) for p in trainer.trained.values()
                ]
                optimizer = torch.optim.AdamW(twins, lr=1e-2, weight_decay=0.0)
                for twin, p in zip(twins, trainer.trained.values(), strict=True):
                    twin.grad = torch.zeros_like(twin)
                    state = trainer.optimizer.state[p]
                    optimizer.state[twin] = {
                        name: value.clone() for name, value in state.items()
                    }
                optimizer.step()
                wanted.extend(twins)
            elif trainer.step == 3:
                for p, twin in zip(trainer.trained.values(), wanted, strict=True):
                    torch.testing.assert_close(p, twin)

    task = from_rows("own", ROWS, reward=reward, max_completion_tokens=4)
    make(tmp_path / "run", task=task, steps=3, optimizer="adamw", hooks=[tell, Alone()]).train()
    assert wanted


@pytest.mark.parametrize(
    "how", [{}, {"tuning": "lora"}, {"seams": "fast"}, {"iterations": 2}, {"beta": 0.0}]
)
def test_before_any_signal_no_weight_moves_and_the_line_says_so_once(tmp_path, capsys, how):
    task, moves = from_rows("own", ROWS, reward=always_one, max_completion_tokens=4), Moves()
    make(tmp_path / "run", task=task, steps=2, hooks=[StillStep(), moves], **how).train()
    step, why, how_far = line_of(capsys.readouterr().out)
    assert (step, how_far) == ("1", "No weight moved") and moves.moved == [0, 0]


def test_with_a_signal_nothing_is_said(tmp_path, capsys):
    task = from_rows("own", ROWS, reward=varied, max_completion_tokens=4)
    make(tmp_path / "run", task=task, steps=2, hooks=[StillStep()]).train()
    assert "gradient" not in capsys.readouterr().out


def test_where_rewards_differ_it_names_no_reward(capsys):
    batch = SimpleNamespace(rewards=[0.0, 1.0], groups=[0, 0])
    trainer, hook = SimpleNamespace(step=4, trained={"w": torch.ones(3)}), StillStep()
    hook.before_step(trainer)
    hook.after_step(trainer, {"grad_norm": 0.0, "frac_reward_zero_std": 0.0}, batch)
    assert capsys.readouterr().out.startswith(
        "Step 4 has no gradient: no completion has tokens that count"
    )


def test_the_standard_trainer_has_it(tmp_path, capsys):
    import copy

    from grpo_kit import Config, GRPOTrainer
    from grpo_kit.models import load_policy

    model, tokenizer = load_policy("tiny-random", quiet=True)
    task = from_rows("own", ROWS, reward=rewards.ExactAnswer(), max_completion_tokens=4)
    config = Config(steps=1, prompts_per_step=2, group_size=2)
    GRPOTrainer(
        copy.deepcopy(model), task, config, tokenizer=tokenizer, folder=tmp_path / "run"
    ).train()
    assert "Step 1 has no gradient" in capsys.readouterr().out
