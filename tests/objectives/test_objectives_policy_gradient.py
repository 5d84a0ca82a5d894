"""Log-probabilities, REINFORCE and RLOO against exact expectations: a policy whose every completion is listed."""

import math

import numpy as np
import pytest
import torch
from toy_policy import Toy, expected_gradient, gradient, policy_gradient

from grpo_kit.objectives import (
    clip_fraction,
    gae,
    group_advantages,
    masked_mean,
    ppo_policy,
    ppo_value,
    reinforce,
    rloo,
    rloo_advantages,
    sequence_logprobs,
    token_logprobs,
    token_ratio,
    token_rewards,
)

BOTH = pytest.mark.parametrize("toy", [Toy(), Toy(end=2)], ids=["length 3", "lengths 1 to 3"])


def close(a, b, tolerance=1e-10):
    return torch.allclose(a, b, atol=tolerance, rtol=0)


# ---- log-probabilities ----------------------------------------------------------------------------------------


@BOTH
def test_probabilities_of_all_completions_add_up_to_one(toy):
    logits = toy.logits(0)
    logprobs = token_logprobs(logits[toy.states], toy.ids)
    assert sequence_logprobs(logprobs, toy.mask).exp().sum().item() == pytest.approx(
        1, abs=1e-12
    )
    assert close(sequence_logprobs(logprobs, toy.mask), toy.probabilities(logits).log())
    mean = sequence_logprobs(logprobs, toy.mask, average=True)
    assert close(mean * toy.lengths, sequence_logprobs(logprobs, toy.mask))


def test_temperature_sharpens_before_it_normalises():
    p = torch.tensor([0.5, 0.3, 0.2], dtype=torch.float64)
    scored = token_logprobs(p.log().expand(3, 3), torch.arange(3), temperature=0.5).exp()
    assert close(scored, p**2 / (p**2).sum())


def test_masked_mean_counts_only_what_the_mask_holds():
    values = torch.tensor([[1.0, 2.0, math.nan], [4.0, 9.0, 9.0], [7.0, 7.0, 7.0]])
    mask = torch.tensor([[1, 1, 0], [1, 0, 0], [0, 0, 0]])
    assert masked_mean(values, mask, dim=1).tolist() == [1.5, 4.0, 0.0]
    assert masked_mean(values, mask).item() == pytest.approx(7 / 3)


# ---- REINFORCE, RLOO, group advantages ------------------------------------------------------------------------


@BOTH
@pytest.mark.parametrize("baseline", [0.0, 0.7, -3.0])
def test_reinforce_follows_the_expected_reward_whatever_the_baseline(toy, baseline):
    logits, rewards = toy.logits(1), toy.rewards()

    def loss(rows):
        return reinforce(
            toy.logprobs(logits)[rows],
            rewards[rows],
            toy.mask[rows],
            baseline=torch.tensor([baseline]),
        )

    assert close(
        expected_gradient(toy, logits, 1, loss), -policy_gradient(toy, logits, rewards)
    )


@BOTH
def test_the_baseline_changes_the_variance_and_the_best_one_is_known(toy):
    """Least variance at b* = E[|score|^2 R] / E[|score|^2]."""
    logits, rewards = toy.logits(1), toy.rewards() + 2
    p = toy.probabilities(logits).detach()
    scores = torch.stack([gradient(lp.sum(), logits).flatten() for lp in toy.logprobs(logits)])

    def variance(baseline):
        samples = []
        for i in range(toy.n):
            row = slice(i, i + 1)
            loss = reinforce(
                toy.logprobs(logits)[row], rewards[row], toy.mask[row], baseline=baseline
            )
            samples.append(gradient(loss, logits).flatten())
        samples = torch.stack(samples)
        mean = (p[:, None] * samples).sum(0)
        return (p * ((samples - mean) ** 2).sum(1)).sum().item()

    norms = (scores**2).sum(1)
    best = ((p * norms * rewards).sum() / (p * norms).sum()).item()
    assert variance(best) < variance(best + 0.01) and variance(best) < variance(best - 0.01)
    assert variance((p * rewards).sum().item()) < variance(0.0) / 2


def test_a_batch_is_averaged():
    toy = Toy(end=2)
    logits, rewards = toy.logits(1), toy.rewards()
    one_by_one = [
        reinforce(toy.logprobs(logits)[i : i + 1], rewards[i : i + 1], toy.mask[i : i + 1])
        for i in range(toy.n)
    ]
    together = reinforce(toy.logprobs(logits), rewards, toy.mask)
    assert close(together, torch.stack(one_by_one).mean())


@pytest.mark.parametrize(("end", "size"), [(None, 2), (2, 2), (2, 3)])
def test_leave_one_out_follows_the_expected_reward_and_the_groups_mean_a_share_of_it(end, size):
    """Over all 729, 225 and 3375 groups: RLOO unbiased, GRPO's mean (without std) (G-1)/G of it."""
    toy = Toy(end)
    logits, rewards = toy.logits(2), toy.rewards()
    logprobs, wanted = toy.logprobs(logits), -policy_gradient(toy, logits, rewards)

    def with_advantages(function):
        return lambda rows: reinforce(logprobs[rows], function(rewards[rows]), toy.mask[rows])

    got = expected_gradient(
        toy, logits, size, with_advantages(lambda r: rloo_advantages(r, size))
    )
    assert close(got, wanted)
    shrunk = with_advantages(lambda r: group_advantages(r, size, scale="none"))
    assert close(expected_gradient(toy, logits, size, shrunk), wanted * (size - 1) / size)


def test_group_advantages_against_numpy():
    rewards = torch.tensor(
        [1.0, 0.0, 0.5, 0.25, 0.25, 0.25, 1.0, 1.0, 0.0], dtype=torch.float64
    )
    groups = rewards.numpy().reshape(3, 3)
    centred = groups - groups.mean(1, keepdims=True)
    by_group = centred / (groups.std(1, ddof=1, keepdims=True) + 1e-4)
    by_batch = centred / (rewards.numpy().std(ddof=1) + 1e-4)
    for scale, wanted in {"group": by_group, "batch": by_batch, "none": centred}.items():
        got = group_advantages(rewards, 3, scale=scale).numpy()
        assert np.allclose(got, wanted.flatten(), atol=1e-12), scale
        assert got[3:6].tolist() == [0, 0, 0], "a group without spread teaches nothing"
    others = [
        (rewards[i] - rewards[[j for j in range(3) if j != i]].mean()).item() for i in range(3)
    ]
    assert rloo_advantages(rewards, 3)[:3].tolist() == pytest.approx(others)


@BOTH
def test_rloo_reuses_samples_of_another_policy_without_bias_until_it_clips(toy):
    logits, old = toy.logits(3), toy.logits(4)
    rewards, old_logprobs = toy.rewards(), toy.logprobs(old).detach()

    def loss(rows, **clip):
        A = rloo_advantages(rewards[rows], 2)
        return rloo(toy.logprobs(logits)[rows], old_logprobs[rows], A, toy.mask[rows], **clip)

    wide = {"epsilon": 1.0, "epsilon_high": 1e9}
    # The baseline is then the old policy's reward, which is as good as any other.
    got = expected_gradient(toy, logits, 2, lambda rows: loss(rows, **wide), drawn_from=old)
    assert close(got, -policy_gradient(toy, logits, rewards))
    clipped = expected_gradient(toy, logits, 2, loss, drawn_from=old)
    assert not close(clipped, -policy_gradient(toy, logits, rewards), 1e-2)


def test_no_gradient_goes_through_the_old_policy():
    logprobs = torch.tensor([[-1.0, -2.0]], dtype=torch.float64).requires_grad_()
    mask, A = torch.ones(1, 2), torch.tensor([1.0], dtype=torch.float64)
    assert gradient(rloo(logprobs, logprobs, A, mask), logprobs).tolist() == [[-1, -1]]
    assert gradient(
        ppo_policy(logprobs, logprobs, A.expand(1, 2), mask), logprobs
    ).tolist() == [[-0.5, -0.5]]


def test_rloo_ratio_is_of_the_whole_completion():
    ratio = torch.tensor([[1.5, 0.5, 9.0], [1.5, 1.5, 1.0]]).log()
    mask = torch.tensor([[1, 1, 0], [1, 1, 0]])
    loss = rloo(
        ratio, torch.zeros(2, 3), torch.tensor([1.0, 2.0]), mask, epsilon=0.5, epsilon_high=1.0
    )
    assert loss.item() == pytest.approx(-(0.75 + 2 * 2.0) / 2)


# ---- errors ---------------------------------------------------------------------------------------------------


R, T = torch.zeros(2), torch.zeros(2, 3)


@pytest.mark.parametrize(
    ("call", "words"),
    [
        (
            lambda: token_logprobs(T, torch.zeros(2, dtype=torch.long), temperature=0),
            "temperature=0",
        ),
        (lambda: token_logprobs(T, torch.zeros(3, dtype=torch.long)), "ids has shape"),
        (lambda: sequence_logprobs(T, torch.ones(2, 2)), "completion_mask has shape"),
        (lambda: group_advantages(R, 1), "group_size=1"),
        (lambda: group_advantages(torch.zeros(5), 2), "group_size=2"),
        (lambda: rloo_advantages(torch.tensor([1.0, math.nan]), 2), "NaN"),
        (lambda: group_advantages(R, 2, scale="std"), "scale='std'"),
        (lambda: reinforce(T, torch.zeros(3), torch.ones(2, 3)), "rewards has shape"),
        (lambda: rloo(T, T, torch.zeros(2, 3), torch.ones(2, 3)), "advantages has shape"),
        (lambda: ppo_policy(T, T, R, torch.ones(2, 3)), "advantages has shape"),
        (lambda: ppo_value(T, T, torch.zeros(2, 1), torch.ones(2, 3)), "returns has shape"),
        (lambda: gae(T, T, torch.ones(2, 2)), "completion_mask has shape"),
        (lambda: token_rewards(R, T, torch.zeros(2, 3), beta=0.1), "without tokens"),
        (
            lambda: token_rewards(torch.zeros(3), T, torch.ones(2, 3), beta=0.1),
            "rewards has shape",
        ),
        (lambda: token_ratio(T, R), "old_logprobs has shape"),
        (lambda: clip_fraction(T, torch.zeros(3), torch.ones(2, 3)), "advantages has shape"),
    ],
)
def test_what_does_not_fit_is_refused_by_name(call, words):
    with pytest.raises(ValueError, match=words):
        call()
