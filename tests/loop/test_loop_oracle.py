"""The loop beside TRL: every loss on the forced batch, the first steps of the tiny runs; and a wrong loop differs."""

import pytest
import torch

from benchmarks.oracle.cases import all_cases
from benchmarks.oracle.compare import worst
from benchmarks.oracle.loop import Packed, loop_loss, loop_steps
from benchmarks.oracle.losses import compare_losses
from benchmarks.oracle.step_runs import RUNS
from benchmarks.oracle.steps import compare_steps
from grpo_kit.loop import grpo
from grpo_kit.loop.padded_update import PaddedUpdate
from grpo_kit.loop.policy_loss import PolicyLoss

UPDATES = pytest.mark.parametrize("update", [PaddedUpdate, Packed])
TURNLESS = [run for run in RUNS.values() if not run.episodes]


def losses_of(update, cases):
    differences = compare_losses(lambda case: loop_loss(case, update), cases=cases)
    assert all(d.passes for d in differences), worst(differences)
    return len(differences)


@pytest.mark.parametrize(("update", "first"), [(PaddedUpdate, 0), (Packed, 1)])
def test_every_loss_and_gradient_is_trls(update, first):
    """Every loss, level, beta and tuning, by one of its three ways to a gradient; the other update by another."""
    cases = [
        case for place, case in enumerate(all_cases()) if (place + first) % 3 == place // 3 % 3
    ]
    assert (
        len({(c.loss, c.level, c.beta, c.tuning) for c in cases})
        == len(cases)
        == len([*all_cases()]) / 3
    )
    assert losses_of(update, cases) > 1500


@pytest.mark.campaign
@UPDATES
def test_every_loss_and_gradient_is_trls_by_every_way_to_it(update):
    assert losses_of(update, [*all_cases()]) == 4800


@UPDATES
def test_the_first_steps_are_todays(update):
    differences = compare_steps(
        lambda run, forced: loop_steps(run, forced, update), runs=TURNLESS
    )
    assert len(differences) == 490 and all(d.passes for d in differences), worst(differences)


def failing(monkeypatch, owner, name, wrong):
    monkeypatch.setattr(owner, name, wrong)
    runs = [RUNS["main job"], RUNS["two iterations"]]
    return {d.what for d in compare_steps(loop_steps, runs=runs) if not d.passes}


def test_a_wrong_temperature_in_the_score_is_seen(monkeypatch):
    inner = PaddedUpdate.gradients
    hotter = lambda self, model, batch, loss, temperature, backward: inner(  # noqa: E731
        self, model, batch, loss, 1.1 * temperature, backward
    )
    assert "grad_norm" in failing(monkeypatch, PaddedUpdate, "gradients", hotter)


def test_a_wrong_mask_a_lost_kl_and_an_unscaled_advantage_are_seen(monkeypatch):
    inner = PolicyLoss.__init__

    def shifted(self, *args, **kwargs):
        inner(self, *args, **kwargs)
        self.mask = self.mask.clone()
        self.mask[:, 0] = 0

    with monkeypatch.context() as patch:
        assert "grad_norm" in failing(patch, PolicyLoss, "__init__", shifted)

    def without_kl(self, *args, **kwargs):
        inner(self, *args, **kwargs)
        self.beta = 0.0

    with monkeypatch.context() as patch:
        assert "loss" in failing(patch, PolicyLoss, "__init__", without_kl)

    def raw(batch, config, everyone):
        batch.advantages = [r - 0.5 for r in batch.rewards]

    assert "advantages" in failing(monkeypatch, grpo, "give_advantages", raw)


def test_a_part_of_an_update_adds_up_to_the_whole():
    """The micro-batch is a matter of memory: the gradient does not depend on it."""
    (case,) = [
        c for c in all_cases() if c.name == "grpo, token, beta 0.1, full, 2 micro-batches"
    ]

    def by(size):
        def make(config):
            update = PaddedUpdate(config)
            update.micro_batch = size
            return update

        return loop_loss(case, make)[1]

    whole = by(12)
    for size in (1, 5):
        for name, gradient in by(size).items():
            assert torch.allclose(gradient, whole[name], rtol=1e-4, atol=1e-7), name
