"""k1, k2 and k3: what each estimates and whose gradient it has, against the exact KL of listed completions."""

import math

import numpy as np
import pytest
import torch
from toy_policy import Toy, gradient

from grpo_kit.objectives import grpo, k1, k2, k3, reinforce, token_rewards

BOTH = pytest.mark.parametrize("toy", [Toy(), Toy(end=2)], ids=["length 3", "lengths 1 to 3"])


def close(a, b, tolerance=1e-10):
    return torch.allclose(a, b, atol=tolerance, rtol=0)


class Pair:
    """A policy and a reference, of whole completions: probabilities, log-probabilities and both KLs, exactly."""

    def __init__(self, toy, *, ref=None):
        self.toy, self.logits = toy, toy.logits(0)
        self.ref_logits = toy.logits(1) if ref is None else ref
        self.logp = toy.logprobs(self.logits).sum(1)
        self.ref = toy.logprobs(self.ref_logits).sum(1).detach()
        self.p = self.logp.detach().exp()
        self.reverse = (self.logp.exp() * (self.logp - self.ref)).sum()  # KL(pi|ref)
        self.forward = (self.ref.exp() * (self.ref - self.logp)).sum()  # KL(ref|pi)

    def mean(self, values):
        """Under the policy, samples held fixed."""
        return (self.p * values).sum()

    def grad(self, scalar):
        return gradient(scalar, self.logits)

    def score(self, cost):
        """E[cost grad log pi], what a detached cost in the reward makes of the gradient."""
        return self.grad(self.mean(cost.detach() * self.logp))


@BOTH
def test_k1_and_k3_estimate_the_reverse_kl_without_bias_and_k2_with(toy):
    pair = Pair(toy)
    values = {k: k(pair.logp, pair.ref).detach() for k in (k1, k2, k3)}
    kl = pair.reverse.item()
    assert kl > 0.3 and abs(pair.forward.item() - kl) > 0.05, "or the two cannot be told apart"
    for k in (k1, k3):
        assert pair.mean(values[k]).item() == pytest.approx(kl, abs=1e-12)
    assert abs(pair.mean(values[k2]).item() - kl) > 0.02
    assert (values[k1] < 0).any() and (values[k2] >= 0).all() and (values[k3] >= 0).all()


@pytest.mark.parametrize(
    ("shift", "bias", "spread"),
    [(0.1, (0, 0.002, 0), (20, 1.42, 1.42)), (1.0, (0, 0.25, 0), (2, 1.73, 1.7))],
)
def test_bias_and_spread_are_those_that_schulman_published(shift, bias, spread):
    """Samples from N(0, 1), the other N(shift, 1): bias and standard deviation relative to the KL, by quadrature."""
    x, weight = np.polynomial.hermite_e.hermegauss(80)
    x, weight = torch.tensor(x), torch.tensor(weight / math.sqrt(2 * math.pi))
    logq, logp = -(x**2) / 2, -((x - shift) ** 2) / 2
    kl = shift**2 / 2
    for k, wanted_bias, wanted_spread in zip((k1, k2, k3), bias, spread, strict=True):
        values = k(logq, logp)
        mean = (weight * values).sum().item()
        std = math.sqrt((weight * (values - mean) ** 2).sum().item())
        assert mean / kl - 1 == pytest.approx(wanted_bias, abs=6e-4)
        assert std / kl == pytest.approx(wanted_spread, abs=0.02)


@BOTH
def test_the_gradient_of_each_as_a_loss(toy):
    pair = Pair(toy)
    got = {k: pair.grad(pair.mean(k(pair.logp, pair.ref))) for k in (k1, k2, k3)}
    assert got[k1].abs().max() < 1e-12
    assert close(got[k2], pair.grad(pair.reverse)) and got[k2].abs().max() > 0.05
    assert close(got[k3], pair.grad(pair.forward)) and not close(got[k3], got[k2], 1e-2)


@BOTH
def test_the_gradient_of_each_in_the_reward(toy):
    pair = Pair(toy)
    reverse, forward = pair.grad(pair.reverse), pair.grad(pair.forward)
    squares = pair.grad((pair.logp.exp() * (pair.logp - pair.ref) ** 2 / 2).sum())
    assert close(pair.score(k1(pair.logp, pair.ref)), reverse)
    assert close(pair.score(k2(pair.logp, pair.ref)), squares - reverse)
    assert close(pair.score(k3(pair.logp, pair.ref)), reverse - forward)


@BOTH
def test_k3_times_the_ratio_has_the_reverse_gradient_on_old_samples_too(toy):
    pair = Pair(toy)
    for old in (pair.logp.detach(), toy.logprobs(toy.logits(5)).sum(1).detach()):
        corrected = (old.exp() * torch.exp(pair.logp - old) * k3(pair.logp, pair.ref)).sum()
        assert corrected.item() == pytest.approx(pair.reverse.item(), abs=1e-12)
        assert close(pair.grad(corrected), pair.grad(pair.reverse))
    uncorrected = pair.grad((old.exp() * k2(pair.logp, pair.ref)).sum())
    assert not close(uncorrected, pair.grad(pair.reverse), 1e-2)


def test_near_the_reference_k2_and_k3_pull_alike_to_second_order():
    toy = Toy()
    direction = torch.randn(
        toy.n_states, 3, dtype=torch.float64, generator=torch.Generator().manual_seed(3)
    )
    gaps, pulls = [], []
    for step in (0.02, 0.01):
        pair = Pair(toy, ref=toy.logits(0) + step * direction)
        a, b = (pair.grad(pair.mean(k(pair.logp, pair.ref))) for k in (k2, k3))
        gaps.append((a - b).norm().item())
        pulls.append(a.norm().item())
    assert pulls[0] / pulls[1] == pytest.approx(2, rel=0.05)
    assert gaps[0] / gaps[1] == pytest.approx(4, rel=0.1)


def states_kl(pair, *, forward):
    """sum_s d(s) KL of the next token's distributions, the visits d(s) held fixed."""
    toy, visits = pair.toy, torch.zeros(pair.toy.n_states, dtype=torch.float64)
    for t in range(3):
        visits.index_add_(0, toy.states[:, t], pair.p * toy.mask[:, t])
    a, b = torch.log_softmax(pair.logits, -1), torch.log_softmax(pair.ref_logits, -1).detach()
    if forward:
        a, b = b, a
    return (visits * (a.exp() * (a - b)).sum(1)).sum()


@BOTH
def test_summed_over_tokens_the_losses_hold_the_states_fixed(toy):
    pair = Pair(toy)
    logprobs, ref = toy.logprobs(pair.logits), toy.logprobs(pair.ref_logits).detach()
    for k, forward in ((k2, False), (k3, True)):
        got = pair.grad(pair.mean((k(logprobs, ref) * toy.mask).sum(1)))
        assert close(got, pair.grad(states_kl(pair, forward=forward)))
    assert states_kl(pair, forward=False).item() == pytest.approx(pair.reverse.item()), (
        "the value is the whole KL"
    )
    assert not close(
        pair.grad(states_kl(pair, forward=False)), pair.grad(pair.reverse), 1e-2
    ), "its gradient not"


@BOTH
def test_k1_in_the_reward_has_the_whole_gradient_and_the_known_optimum(toy):
    """E[r] - beta KL(pi|ref) is highest at pi* = ref exp(r / beta) / Z."""
    beta, rewards, start = 0.3, toy.rewards(), Pair(toy)
    best = toy.logits_of(torch.softmax(start.ref + rewards / beta, 0))
    for logits, at_optimum in ((start.logits, False), (best, True)):
        logprobs, ref = toy.logprobs(logits), toy.logprobs(start.ref_logits).detach()
        shaped = token_rewards(rewards, k1(logprobs, ref), toy.mask, beta=beta).sum(1)
        p = toy.probabilities(logits)
        losses = [
            p[i].detach()
            * reinforce(logprobs[i : i + 1], shaped[i : i + 1], toy.mask[i : i + 1])
            for i in range(toy.n)
        ]
        got = gradient(sum(losses), logits)
        kl = (p * (p.log() - start.ref)).sum()
        assert close(got, -gradient((p * rewards).sum() - beta * kl, logits))
        assert (got.abs().max() < 1e-10) == at_optimum


@pytest.mark.parametrize("correct_kl", [False, True])
@pytest.mark.parametrize("old_seed", [0, 5], ids=["fresh samples", "old samples"])
def test_grpos_beta_pulls_by_the_forward_kl_of_each_state_and_corrected_by_the_reverse(
    correct_kl, old_seed
):
    """On old samples the corrected one has the old policy's states; the other is no gradient of a KL."""
    toy = Toy()
    pair, zero = Pair(toy), torch.zeros(1, dtype=torch.float64)
    old, ref = (
        toy.logprobs(toy.logits(old_seed)).detach(),
        toy.logprobs(pair.ref_logits).detach(),
    )
    pair.p = old.sum(1).exp()
    total = 0.0
    for i in range(toy.n):
        row = slice(i, i + 1)
        kl = dict(beta=0.2, ref_logprobs=ref[row], correct_kl=correct_kl)
        loss = grpo(toy.logprobs(pair.logits)[row], old[row], zero, toy.mask[row], **kl)
        total = total + pair.p[i] * loss
    wanted = 0.2 * pair.grad(states_kl(pair, forward=not correct_kl)) / 3
    assert close(pair.grad(total), wanted) == (correct_kl or old_seed == 0)


def test_shapes_that_differ_are_refused():
    for k in (k1, k2, k3):
        with pytest.raises(ValueError, match="ref_logprobs has shape"):
            k(torch.zeros(2, 2), torch.zeros(2))
