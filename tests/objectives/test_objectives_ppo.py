"""GAE and PPO against exact expectations: a policy whose every completion is listed."""

import re
from pathlib import Path

import numpy as np
import pytest
import torch
from toy_policy import Toy, expected_gradient, gradient, policy_gradient

from grpo_kit import objectives
from grpo_kit.objectives import (
    clip_fraction,
    gae,
    ppo_policy,
    ppo_value,
    sequence_ratio,
    token_ratio,
    token_rewards,
)

BOTH = pytest.mark.parametrize("toy", [Toy(), Toy(end=2)], ids=["length 3", "lengths 1 to 3"])


def close(a, b, tolerance=1e-10):
    return torch.allclose(a, b, atol=tolerance, rtol=0)


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
            wanted = (
                sum((gamma * lam) ** (k - t) * deltas[k] for k in range(t, length))
                if t < length
                else 0
            )
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
    wrong = right + torch.randn(
        toy.n_states, dtype=torch.float64, generator=torch.Generator().manual_seed(0)
    )
    errors = {}
    for name, V in {"right": right, "wrong": wrong}.items():
        for lam in (0.0, 0.5, 1.0):
            A = gae(on_last, V[toy.states], toy.mask, lam=lam)
            got = gradient((p[:, None] * A * toy.logprobs(logits)).sum(), logits)
            errors[name, lam] = (got - policy_gradient(toy, logits, rewards)).abs().max().item()
    assert (
        max(errors["right", lam] for lam in (0.0, 0.5, 1.0)) < 1e-12
        and errors["wrong", 1.0] < 1e-12
    )
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
        return ppo_policy(
            toy.logprobs(logits)[rows], old_logprobs[rows], A[rows], toy.mask[rows], epsilon=99
        )

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


# ---- target_kl, the recipe of docs/which_method.md --------------------------------------------------------------


def recipe(target):
    """too_far as the page has it, with another target."""
    page = Path(__file__).parents[2] / "docs" / "which_method.md"
    section = page.read_text().split("## PPO that stops in time")[1]
    (code,) = re.findall(r"^```python\n(.*?)^```", section, re.M | re.S)
    names = {"objectives": objectives}
    exec(code, names)
    assert names["TARGET_KL"] == 0.01
    names["TARGET_KL"] = target
    return names["too_far"]


def test_passes_stop_where_those_of_stable_baselines3_do():
    """Its rule in numpy: mean((exp(log rho) - 1) - log rho) > 1.5 target_kl, over the tokens that were written."""
    rng = np.random.default_rng(0)
    mask = np.array([[1, 1, 1, 1], [1, 1, 0, 0], [1, 0, 0, 0]])
    for spread in (0.01, 0.1, 1.0):
        old, new = -rng.random((3, 4)), -rng.random((3, 4)) * spread
        log_ratio = (new - old)[mask == 1]
        approx_kl = np.mean((np.exp(log_ratio) - 1) - log_ratio)
        given = [torch.tensor(each) for each in (new, old, mask)]
        assert recipe(approx_kl / 1.5 * (1 - 1e-9))(*given)
        assert not recipe(approx_kl / 1.5 * (1 + 1e-9))(*given)


@BOTH
def test_what_it_looks_at_is_the_exact_kl_of_the_policy_that_sampled(toy):
    """In expectation, over all that it can write: KL(old | new), not that of new from old."""
    old, new = toy.logits(3), toy.logits(4)
    p, q = toy.probabilities(old).detach(), toy.probabilities(new).detach()
    exact = (p * (p / q).log()).sum()
    k3 = objectives.k3(toy.logprobs(old), toy.logprobs(new)).detach()
    assert close((p * (k3 * toy.mask).sum(1)).sum(), exact)
    assert not close(exact, (q * (q / p).log()).sum(), 1e-3)


def passes(target, rate=2.0, epochs=6):
    """The mean KL behind each update that PPO makes of one rollout."""
    toy = Toy()
    logits = toy.logits(6).detach().requires_grad_()
    old = toy.logprobs(logits).detach()
    advantages = (toy.rewards() - 0.5).unsqueeze(1).expand(-1, 3)
    too_far, kls = recipe(target), []
    for _ in range(epochs):
        new = toy.logprobs(logits)
        if too_far(new, old, toy.mask):
            break
        loss = ppo_policy(new, old, advantages, toy.mask)
        logits = (logits - rate * gradient(loss, logits)).detach().requires_grad_()
        moved = objectives.k3(old, toy.logprobs(logits).detach())
        kls.append(moved.mean().item())
    return kls


def test_the_first_minibatch_trains_and_the_passes_end_at_the_first_kl_above_the_target():
    free = passes(target=99.0)
    assert len(free) == 6 and free == sorted(free) and free[0] > 0
    assert len(passes(target=0.0)) == 1
    for stops in range(1, 6):
        target = (free[stops - 1] - 1e-12) / 1.5
        assert passes(target) == free[:stops], "the update that went past it is the last"
