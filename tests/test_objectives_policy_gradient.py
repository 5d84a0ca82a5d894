"""REINFORCE, RLOO, GAE and PPO against exact expectations: a policy whose every completion is listed."""

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
    sequence_ratio,
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
    assert sequence_logprobs(logprobs, toy.mask).exp().sum().item() == pytest.approx(1, abs=1e-12)
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
            toy.logprobs(logits)[rows], rewards[rows], toy.mask[rows], baseline=torch.tensor([baseline])
        )

    assert close(expected_gradient(toy, logits, 1, loss), -policy_gradient(toy, logits, rewards))


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
            loss = reinforce(toy.logprobs(logits)[row], rewards[row], toy.mask[row], baseline=baseline)
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

    got = expected_gradient(toy, logits, size, with_advantages(lambda r: rloo_advantages(r, size)))
    assert close(got, wanted)
    shrunk = with_advantages(lambda r: group_advantages(r, size, scale="none"))
    assert close(expected_gradient(toy, logits, size, shrunk), wanted * (size - 1) / size)


def test_group_advantages_against_numpy():
    rewards = torch.tensor([1.0, 0.0, 0.5, 0.25, 0.25, 0.25, 1.0, 1.0, 0.0], dtype=torch.float64)
    groups = rewards.numpy().reshape(3, 3)
    centred = groups - groups.mean(1, keepdims=True)
    by_group = centred / (groups.std(1, ddof=1, keepdims=True) + 1e-4)
    by_batch = centred / (rewards.numpy().std(ddof=1) + 1e-4)
    for scale, wanted in {"group": by_group, "batch": by_batch, "none": centred}.items():
        got = group_advantages(rewards, 3, scale=scale).numpy()
        assert np.allclose(got, wanted.flatten(), atol=1e-12), scale
        assert got[3:6].tolist() == [0, 0, 0], "a group without spread teaches nothing"
    others = [(rewards[i] - rewards[[j for j in range(3) if j != i]].mean()).item() for i in range(3)]
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


def test_rloo_ratio_is_of_the_whole_completion():
    ratio = torch.tensor([[1.5, 0.5, 9.0], [1.5, 1.5, 1.0]]).log()
    mask = torch.tensor([[1, 1, 0], [1, 1, 0]])
    loss = rloo(ratio, torch.zeros(2, 3), torch.tensor([1.0, 2.0]), mask, epsilon=0.5, epsilon_high=1.0)
    assert loss.item() == pytest.approx(-(0.75 + 2 * 2.0) / 2)


# ---- GAE ------------------------------------------------------------------------------------------------------


def random_episode(seed=0):
    """Rewards, values and a mask of lengths 4, 2, 1; behind the end stands rubbish."""
    g = torch.Generator().manual_seed(seed)
    rewards, values = torch.randn(2, 3, 4, dtype=torch.float64, generator=g)
    mask = torch.tensor([[1, 1, 1, 1], [1, 1, 0, 0], [1, 0, 0, 0]])
    return rewards, values, mask


@pytest.mark.parametrize("lam", [0.0, 0.3, 0.95, 1.0])
@pytest.mark.parametrize("gamma", [1.0, 0.9])
def test_gae_is_its_explicit_sum(gamma, lam):
    rewards, values, mask = random_episode()
    got = gae(rewards, values, mask, gamma=gamma, lam=lam)
    for i, length in enumerate(mask.sum(1).tolist()):
        V = [*values[i, :length].tolist(), 0.0]
        deltas = [rewards[i, t].item() + gamma * V[t + 1] - V[t] for t in range(length)]
        for t in range(4):
            wanted = sum((gamma * lam) ** (k - t) * deltas[k] for k in range(t, length)) if t < length else 0
            assert got[i, t].item() == pytest.approx(wanted, abs=1e-12)
            if lam == 1 and t < length:  # the return less the value
                total = sum(gamma ** (k - t) * rewards[i, k].item() for k in range(t, length))
                assert got[i, t].item() == pytest.approx(total - V[t], abs=1e-12)
            if lam == 0 and t < length:  # the TD error
                assert got[i, t].item() == pytest.approx(deltas[t], abs=1e-12)


@BOTH
def test_gae_gives_the_policy_gradient_for_any_lambda_if_v_is_right_and_for_1_if_not(toy):
    logits, rewards = toy.logits(5), toy.rewards()
    p, zero = toy.probabilities(logits).detach(), torch.zeros(toy.n, 3, dtype=torch.float64)
    on_last = token_rewards(rewards, zero, toy.mask, beta=0.0)
    right = toy.state_values(logits, rewards)[0]
    wrong = right + torch.randn(toy.n_states, dtype=torch.float64, generator=torch.Generator().manual_seed(0))
    errors = {}
    for name, V in {"right": right, "wrong": wrong}.items():
        for lam in (0.0, 0.5, 1.0):
            A = gae(on_last, V[toy.states], toy.mask, lam=lam)
            got = gradient((p[:, None] * A * toy.logprobs(logits)).sum(), logits)
            errors[name, lam] = (got - policy_gradient(toy, logits, rewards)).abs().max().item()
    assert max(errors["right", lam] for lam in (0.0, 0.5, 1.0)) < 1e-12 and errors["wrong", 1.0] < 1e-12
    assert errors["wrong", 0.0] > errors["wrong", 0.5] > 1e-3


def test_token_rewards_by_hand():
    kl = torch.tensor([[1.0, 2.0, 3.0], [1.0, -2.0, 50.0]], requires_grad=True)
    mask = torch.tensor([[1, 1, 1], [1, 1, 0]])
    got = token_rewards(torch.tensor([10.0, 20.0]), kl, mask, beta=0.5)
    assert got.tolist() == [[-0.5, -1.0, 8.5], [-0.5, 21.0, 0.0]] and not got.requires_grad


# ---- PPO ------------------------------------------------------------------------------------------------------


def test_ppo_on_fresh_samples_has_the_policy_gradient():
    toy = Toy()
    logits, rewards = toy.logits(6), toy.rewards()
    V, Q = toy.state_values(logits, rewards)
    logprobs, A = toy.logprobs(logits), Q[toy.states, toy.ids] - V[toy.states]

    def loss(rows):
        return ppo_policy(logprobs[rows], logprobs[rows].detach(), A[rows], toy.mask[rows])

    got = expected_gradient(toy, logits, 1, loss)  # the mean over three tokens
    assert close(got, -policy_gradient(toy, logits, rewards) / 3)


def test_ppo_on_old_samples_has_the_gradient_of_the_surrogate_with_the_old_policys_states():
    """L(pi) = sum_s d_old(s) sum_a pi(a|s) A_old(s, a): right at old = now, biased off it (TRPO, eq. 3)."""
    toy = Toy()
    logits, old, rewards = toy.logits(6), toy.logits(7), toy.rewards()
    V, Q = toy.state_values(old, rewards)
    A, old_logprobs = Q[toy.states, toy.ids] - V[toy.states], toy.logprobs(old).detach()

    def loss(rows):
        return ppo_policy(toy.logprobs(logits)[rows], old_logprobs[rows], A[rows], toy.mask[rows], epsilon=99)

    visits = torch.zeros(toy.n_states, dtype=torch.float64)
    for t in range(3):
        visits.index_add_(0, toy.states[:, t], toy.probabilities(old).detach())
    surrogate = (visits[:, None] * torch.softmax(logits, -1) * (Q - V[:, None])).sum()
    got = expected_gradient(toy, logits, 1, loss, drawn_from=old)
    assert close(got, -gradient(surrogate, logits) / 3)
    assert not close(got, -policy_gradient(toy, logits, rewards) / 3, 1e-2)


def test_ppo_clips_on_the_side_that_the_advantage_pushes_to_and_there_only():
    ratios = torch.tensor([0.5, 0.79, 0.81, 1.0, 1.19, 1.21, 2.0], dtype=torch.float64)
    for sign in (1.0, -1.0):
        logprobs = ratios.log().unsqueeze(0).requires_grad_()
        A, mask = torch.full((1, 7), sign, dtype=torch.float64), torch.ones(1, 7)
        loss = ppo_policy(logprobs, torch.zeros(1, 7, dtype=torch.float64), A, mask)
        slope = gradient(loss, logprobs)[0] * 7
        free = ratios < 1.2 if sign > 0 else ratios > 0.8
        assert close(slope, torch.where(free, -ratios * sign, 0.0))
        values = torch.min(ratios * sign, ratios.clamp(0.8, 1.2) * sign)
        assert loss.item() == pytest.approx(-values.mean().item())
        low, high = clip_fraction(ratios.unsqueeze(0), A, mask)
        assert (low + high).item() == pytest.approx((~free).sum().item() / 7)
        assert (low if sign > 0 else high).item() == 0


def test_clip_fraction_takes_the_mask_and_the_columns_of_gspo():
    logprobs = torch.tensor([[0.5, 3.0, 3.0], [3.0, 1.0, 0.1]]).log()
    mask, zero = torch.tensor([[1, 1, 0], [1, 1, 1]]), torch.zeros(2, 3)
    ratio, A = token_ratio(logprobs, zero), torch.tensor([1.0, -1.0])
    low, high = clip_fraction(ratio, A, mask, epsilon=0.2, epsilon_high=1.0)
    assert (low.item(), high.item()) == (pytest.approx(1 / 5), pytest.approx(1 / 5))
    ratio = sequence_ratio(logprobs, zero, mask)
    assert ratio.flatten().tolist() == pytest.approx([1.5**0.5, 0.3 ** (1 / 3)])
    low, high = clip_fraction(ratio, A, torch.ones(2, 1))
    assert (low.item(), high.item()) == (0.5, 0.5)


def test_ppo_value_by_hand():
    """Moved 0.5 towards the target: clipped at 0.2, no gradient. Moved away: squared error of the value itself."""
    values = torch.tensor([[0.5, -0.5, 0.1, 7.0]], dtype=torch.float64, requires_grad=True)
    old, returns = torch.zeros(1, 4, dtype=torch.float64), torch.ones(1, 4, dtype=torch.float64)
    loss = ppo_value(values, old, returns, torch.tensor([[1, 1, 1, 0]]))
    assert loss.item() == pytest.approx((0.8**2 + 1.5**2 + 0.9**2) / 6)
    assert gradient(loss, values)[0].tolist() == pytest.approx([0, -1.5 / 3, -0.9 / 3, 0])


# ---- errors ---------------------------------------------------------------------------------------------------


R, T = torch.zeros(2), torch.zeros(2, 3)


@pytest.mark.parametrize(
    ("call", "words"),
    [
        (lambda: token_logprobs(T, torch.zeros(2, dtype=torch.long), temperature=0), "temperature=0"),
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
        (lambda: token_rewards(torch.zeros(3), T, torch.ones(2, 3), beta=0.1), "rewards has shape"),
        (lambda: token_ratio(T, R), "old_logprobs has shape"),
        (lambda: clip_fraction(T, torch.zeros(3), torch.ones(2, 3)), "advantages has shape"),
    ],
)
def test_what_does_not_fit_is_refused_by_name(call, words):
    with pytest.raises(ValueError, match=words):
        call()
